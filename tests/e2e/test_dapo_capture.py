"""Runs that capture themselves: the same bytes of metrics, every stage and rank on disk, engines comparable."""

from __future__ import annotations

import dataclasses
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
from alignment.diagnose.capture_comparison import compare_captures
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


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"step_start": 9}, "nothing was captured: nothing in this run fits capture.step_start=9: the run went through "
         "steps 1 … 1"),
        ({"ranks": (7,)}, "nothing was captured: nothing in this run fits capture.ranks=[7]"),
        ({"stages": ("values",)}, "nothing was captured: nothing in this run fits capture.stages=[values]"),
        ({"modules": ("nomatch.*",)}, "no module was captured: none has a name that fits capture.modules=[nomatch.*]"),
        ({"modules": ("*.embed_tokens",), "step_end": 1}, None),
        ({"modules": ("nomatch.*",), "stages": ("advantage",)}, None),
    ],
)  # fmt: skip
def test_a_selection_that_leaves_everything_out_is_said(world, tmp_path, capsys, fields, said):
    settings = dapo_world.config(world, **{**TWO_MINI_BATCHES, "trainer__total_training_steps": 1})
    run_dapo(settings, run_dir=tmp_path, observers=[capture_observer(CaptureConfig(**fields), tmp_path)])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("capture: ")]
    assert lines == ([f"capture: {said}"] if said else [])


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


class WrongExpert:
    """A capture in which one expert's weight is another one's."""

    def __init__(self, reader):
        self._reader = reader

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def rows(self, step, stage, rank):
        found = list(self._reader.rows(step, stage, rank))
        ours, other = (f"model.layers.1.mlp.experts.{n}.down_proj.weight" for n in (0, 1))
        other = next(row for row in found if row.module == other and row.kind == "parameter")
        for row in found:
            wrong = row.module == ours and row.kind == "parameter"
            yield dataclasses.replace(other, module=row.module, path=row.path) if wrong else row


def test_fsdp_agrees_with_golden_module_by_module(world, whole, tmp_path):
    """Transformers stacks the experts and hands out the router's logits; weights and samples are the same."""
    pytest.importorskip("transformers")
    _, reader = captured(world, tmp_path / "run", engine__train="fsdp", trainer__total_training_steps=1)
    chosen = {"steps": (1,), "stages": ("old_log_prob", "update_actor")}
    found = compare_captures(whole[1], reader, **chosen)
    for stage in found.stages:
        assert stage.aligned, stage.reason()
        names = {row.module for row in rows(whole[1], 1, stage.stage, kind="parameter")}
        compared = {row.module for row in rows(reader, 1, stage.stage, kind="parameter")}
        assert any(".experts.0." in name for name in names) and all(
            ".experts." in name for name in names - compared
        ), "other weights than the experts' have other names"
        assert not [gap.name for gap in stage.unpaired if gap.what == "parameter"]
    wrong = compare_captures(WrongExpert(whole[1]), reader, **chosen).stages[0]
    assert (wrong.first.module, wrong.first.quantity) == ("model.layers.1.mlp.experts", "parameter down_proj")


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
    found = {r.module: r for r in rows(reader, 1, "old_log_prob", 1, kind="parameter")}
    single = found.keys() & expected.keys()
    assert all(".experts." in name for name in found.keys() ^ expected.keys()), "only experts are stacked"
    for name in single:
        assert found[name].shard is None and np.array_equal(found[name].sketch(), expected[name].sketch())
    # Stacked experts have no sketch on the other side: by statistics.
    stage = compare_captures(whole[1], reader, steps=(1,), stages=("old_log_prob",)).stages[0]
    assert not [f.quantity for f in stage.localisation.findings if f.quantity.startswith("parameter")]
    assert not [gap.name for gap in stage.unpaired if gap.what == "parameter"]
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
