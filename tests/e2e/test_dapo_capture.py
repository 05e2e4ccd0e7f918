"""Runs that capture themselves: the same bytes of metrics, every stage and rank on disk, engines comparable."""

from __future__ import annotations

import json
import math
import re

import dapo_world
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.pipeline import FOLDER, capture_observer
from alignment.errors import InputError
from alignment.rl.run import run_dapo
from alignment.rl.tracking import GROUPS, METRICS

EPS = torch.finfo(torch.float32).eps
MODEL_STAGES = {"rollout", "old_log_prob", "update_actor"}
TWO_MINI_BATCHES = {"actor_rollout_ref__actor__ppo_mini_batch_size": 2, "trainer__total_training_steps": 2}


def captured(world, run_dir, capture=None, executor="inprocess", **changes):
    """(run, its capture)."""
    settings = dapo_world.config(world, **{**TWO_MINI_BATCHES, **changes})
    observer = capture_observer(capture or CaptureConfig(), run_dir)
    return run_dapo(settings, run_dir=run_dir, executor=executor, observers=[observer]), OwnCapture(run_dir / FOLDER)


def rows(reader, step, stage, rank=0, **wanted):
    return [r for r in reader.rows(step, stage, rank) if all(getattr(r, k) == v for k, v in wanted.items())]


@pytest.fixture(scope="module")
def plain(world, tmp_path_factory):
    return run_dapo(dapo_world.config(world, **TWO_MINI_BATCHES), run_dir=tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """One rank, sketches."""
    return captured(world, tmp_path_factory.mktemp("whole"))


def written(result):
    return [(result.directory / name).read_bytes() for name in (METRICS, GROUPS, "config.json")]


def test_a_captured_run_writes_the_same_bytes(plain, whole):
    assert written(plain) == written(whole[0])
    a, b = (json.loads((r.directory / "run.json").read_text()) for r in (plain, whole[0]))
    assert a["config"] == b["config"] and a["provenance"] == b["provenance"]


@pytest.mark.parametrize("capture", [CaptureConfig(level="mix", detail="tensor", samples=True)], ids=["everything"])
def test_even_everything_at_once_changes_nothing(world, plain, tmp_path, capture):
    assert written(captured(world, tmp_path / "run", capture)[0]) == written(plain)


def test_every_stage_of_every_step_is_there_in_the_order_of_a_step(whole):
    _, reader = whole
    assert reader.steps() == [1, 2]
    for step in reader.steps():
        assert reader.stages(step) == ["rollout", "reward", "old_log_prob", "advantage", "update_actor"]
        for stage in reader.stages(step):
            assert reader.ranks(step, stage) == [0]
            kinds = {r.kind for r in rows(reader, step, stage)}
            assert ("module" in kinds) == (stage in MODEL_STAGES) and "value" in kinds


def test_the_fields_of_the_pipeline_are_kept_with_the_keys_of_their_samples(whole):
    _, reader = whole
    [ids] = rows(reader, 1, "rollout", kind="value", module="input_ids")
    [advantages] = rows(reader, 1, "advantage", kind="value", module="advantages")
    assert ids.role == advantages.role == "output"
    assert len(set(ids.keys)) == len(ids.keys) == ids.shape[0] and advantages.keys == ids.keys
    assert ids.tensor().dtype == np.int64 and np.isfinite(advantages.tensor()).all()
    [read] = rows(reader, 1, "update_actor", kind="value", module="advantages")
    assert read.role == "input" and set(read.keys) == set(ids.keys)


def test_the_gradients_of_an_update_are_those_whose_norm_the_run_reports(whole):
    run, reader = whole
    for step, metrics in enumerate(run.metrics, 1):
        found = rows(reader, step, "update_actor", kind="parameter_gradient")
        updates = sorted({r.call for r in found})
        assert updates == [0, 1]
        norms = [math.sqrt(sum(r.statistics.l2**2 for r in found if r.call == u)) for u in updates]
        assert math.isclose(sum(norms) / 2, metrics["actor/grad_norm"], rel_tol=len(found) * EPS)


def test_the_first_generated_token_is_captured_unless_more_are_asked_for(world, whole, tmp_path):
    def passes(reader):
        return {r.call for r in rows(reader, 1, "rollout", module="lm_head", kind="module")}

    assert passes(whole[1]) == {0}
    ranged = CaptureConfig(stages=("rollout",), token_start=1, token_end=2, values=False)
    _, reader = captured(world, tmp_path / "run", ranged, trainer__total_training_steps=1)
    found = rows(reader, 1, "rollout", module="lm_head", kind="module", role="output")
    assert [r.shape[1] for r in found] == [1, 1] and reader.stages(1) == ["rollout"]


def test_steps_and_stages_are_selected(world, tmp_path):
    chosen = CaptureConfig(stages=("old_log_prob", "advantage"), step_start=2, step_end=2)
    _, reader = captured(world, tmp_path / "run", chosen)
    assert reader.steps() == [2] and reader.stages(2) == ["old_log_prob", "advantage"]


def test_replayed_rollouts_are_captured_as_fields(world, tmp_path):
    skip = {
        "actor_rollout_ref__rollout__skip__enable": True,
        "actor_rollout_ref__rollout__skip__dump_dir": str(tmp_path / "rollouts"),
    }
    first = captured(world, tmp_path / "recorded", **skip)[1]
    again = captured(world, tmp_path / "replayed", **skip)[1]
    generated, replayed = (
        {r.module: r for r in rows(reader, 1, "rollout", kind="value", role="output")} for reader in (first, again)
    )
    assert np.array_equal(generated["responses"].tensor(), replayed["responses"].tensor())
    assert not rows(again, 1, "rollout", kind="module")


# --- ranks and engines -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ray_cluster")
def test_every_rank_writes_its_share(world, whole, tmp_path):
    _, reader = captured(world, tmp_path / "run", executor="ray", trainer__n_gpus_per_node=2)
    one = whole[1]
    for stage in sorted(MODEL_STAGES):
        assert reader.ranks(1, stage) == [0, 1]
        keys = [
            {k for r in rows(reader, 1, stage, rank, kind="value", module="input_ids") for k in r.keys}
            for rank in (0, 1)
        ]
        # Rollout hands ids out; the other stages are given them.
        [whole_row] = rows(one, 1, stage, kind="value", module="input_ids")
        assert keys[0] | keys[1] == set(whole_row.keys) and not keys[0] & keys[1]
    gradients = {(r.module, r.call): r for r in rows(reader, 1, "update_actor", kind="parameter_gradient")}
    assert not rows(reader, 1, "update_actor", 1, kind="parameter_gradient")
    expected = rows(one, 1, "update_actor", kind="parameter_gradient")
    assert len(gradients) == len(expected)
    total = math.sqrt(sum(r.statistics.l2**2 for r in expected))
    for row in expected:
        ours = gradients[row.module, row.call].sketch()
        # Ranks add their halves up in another order than one rank its micro batch: rounding, on the scale of the step.
        assert np.linalg.norm(ours - row.sketch()) <= 2048 * EPS * total


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_fsdp_is_captured_under_the_names_of_the_checkpoint(world, whole, tmp_path):
    pytest.importorskip("transformers")
    chosen = CaptureConfig(stages=("old_log_prob", "update_actor"))
    run, reader = captured(
        world, tmp_path / "run", chosen, executor="ray", trainer__n_gpus_per_node=2, engine__train="fsdp",
        trainer__total_training_steps=1,
    )  # fmt: skip
    golden = {r.module: r for r in rows(whole[1], 1, "update_actor", kind="parameter_gradient", call=0)}
    for row in rows(reader, 1, "update_actor", kind="parameter_gradient", call=0):
        assert row.shape == golden[row.module].shape
    assert {r.module for r in rows(reader, 1, "update_actor", kind="parameter_gradient")} == set(golden)
    # While a module runs, FSDP2 holds its parameters whole: what was computed with is what is captured.
    expected = {r.module: r for r in rows(whole[1], 1, "old_log_prob", kind="parameter")}
    found = {r.module: r for r in rows(reader, 1, "old_log_prob", 1, kind="parameter") if r.module in expected}
    assert len(found) > len(expected) / 2
    for name, row in found.items():
        assert row.shard is None and np.array_equal(row.sketch(), expected[name].sketch())
    assert all(math.isfinite(m["actor/loss"]) for m in run.metrics)


# --- the command line ------------------------------------------------------------------------------------------------


def dapo(*arguments):
    from alignment.cli import app

    return CliRunner().invoke(app, ["dapo", "--device", "cpu", "--executor", "inprocess", *arguments])


def test_overrides_of_the_command_line_switch_it_on(tmp_path):
    run = tmp_path / "run"
    small = [
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=1",
    ]
    done = dapo(
        "--run-dir", str(run), *small, "capture.detail=statistics", "capture.stages=[old_log_prob]", "capture.level=L0"
    )
    assert done.exit_code == 0, done.output
    reader = OwnCapture(run / FOLDER)
    assert reader.stages(1) == ["old_log_prob"] and reader.describe()["detail"] == "statistics"
    # A training ends with its page.
    assert done.output.endswith(f"as a page: {run / 'report.html'}\n")
    assert "actor/loss" in (run / "report.html").read_text()
    again = dapo("--run-dir", str(run), *small, "capture.detail=sketch")
    assert isinstance(again.exception, InputError) and "this run has a capture already" in str(again.exception)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("capture.detial=sketch", "there is no such key.*did you mean capture.detail"),
        ("capture.detail=sketches", "there is no such choice.*did you mean sketch"),
        ("capture.step_start=-1", "capture.step_start: out of range"),
        ("capture.stages=[old_logprob]", "capture.stages: the pipeline has no such stage.*did you mean old_log_prob"),
    ],
)
def test_an_override_that_means_nothing_is_refused(tmp_path, override, message):
    done = dapo("--run-dir", str(tmp_path / "run"), override)
    assert isinstance(done.exception, InputError)
    assert not (tmp_path / "run").exists()
    assert re.search(message, str(done.exception))
