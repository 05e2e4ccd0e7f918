"""The precision collector in whole runs: what is computed stays what it was, what is dumped is complete, and a replay
of another device's responses trains to the same numbers.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path

import dapo_world
import gkd_world
import numpy as np
import pytest
import yaml

from alignment.capture import collector
from alignment.capture.collector_data import KEYS
from alignment.capture.msprobe_writer import write_msprobe
from alignment.capture.readers import open_capture
from alignment.errors import InputError, UnavailableError
from alignment.models import mla
from alignment.rl.fsdp_lora import FsdpLoraEngine
from alignment.rl.gkd_run import run_gkd
from alignment.rl.run import CONFIG, run_dapo
from alignment.rl.tracking import GROUPS, METRICS

STEPS = 3
OF_ROLLOUT_ENGINE = "training/rollout_"
"""Metrics that compare with the log-probs of the inference engine, which a replay does not have."""


def collect(tmp_path: Path, **fields) -> dict[str, str]:
    """The setting that switches a collector with these fields on."""
    path = tmp_path / "precision_collector.yaml"
    fields = {"msprobe": True, "dump_path": str(tmp_path / "dump"), "step_end": STEPS - 1, **fields}
    path.write_text(yaml.safe_dump({"precision_collector": fields}))
    return {"ascend_precision_collector": str(path)}


def files(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file() and p.name != "timings.jsonl"
    }


def names(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and not p.is_symlink()}


def trained(metrics: list[dict]) -> list[dict]:
    return [{k: v for k, v in step.items() if not k.startswith(OF_ROLLOUT_ENGINE)} for step in metrics]


@pytest.fixture(scope="module")
def plain(world, tmp_path_factory):
    """A run that nobody watches."""
    directory = tmp_path_factory.mktemp("plain")
    return run_dapo(dapo_world.config(world), run_dir=directory / "run")


@pytest.fixture(scope="module")
def recorded(world, tmp_path_factory):
    """A run on the benchmark device, with everything dumped that a run without a critic has."""
    directory = tmp_path_factory.mktemp("recorded")
    switches = (
        "configurations_dump",
        "key_data_dump",
        "reference_dump",
        "actor_train_dump",
        "actor_infer_dump",
        "memory_dump",
    )
    setting = collect(directory, **dict.fromkeys(switches, True), token_range_start=1, token_range_end=2)
    changes = {**setting, "actor_rollout_ref__actor__use_kl_loss": True}
    result = run_dapo(dapo_world.config(world, **changes), run_dir=directory / "run")
    return directory / "dump", result


def test_absent_none_and_null_are_the_same_run(world, plain, tmp_path):
    expected = files(plain.directory)
    for i, off in enumerate(("None", "null", None)):
        run = run_dapo(dapo_world.config(world, ascend_precision_collector=off), run_dir=tmp_path / str(i) / "run")
        assert run.metrics == plain.metrics
        found = files(run.directory)
        assert set(found) == set(expected)
        assert all(found[n] == expected[n] for n in (METRICS, GROUPS, CONFIG))
        assert [p.name for p in (tmp_path / str(i)).iterdir()] == ["run"]


def test_the_master_switch_off_changes_and_writes_nothing(world, plain, tmp_path):
    setting = collect(tmp_path, msprobe=False, key_data_dump=True, actor_train_dump=True, configurations_dump=True)
    assert run_dapo(dapo_world.config(world, **setting), run_dir=tmp_path / "run").metrics == plain.metrics
    assert not (tmp_path / "dump").exists()


def test_a_collected_run_computes_what_it_did_before(world, recorded, tmp_path):
    run = run_dapo(dapo_world.config(world, actor_rollout_ref__actor__use_kl_loss=True), run_dir=tmp_path)
    assert run.metrics == recorded[1].metrics


def test_everything_is_where_the_documentation_puts_it(recorded):
    dump, _ = recorded
    stages = ("actor_generate_sequences", "actor_compute_log_prob", "actor_update", "reference_compute_log_prob")
    three = ("construct.json", "dump.json", "stack.json")
    expected = {f"{stage}/step{s}/rank0/{f}" for stage in stages for s in range(STEPS) for f in three}
    expected |= {f"memory_snapshot/{stage}/step{s}/rank0.json" for stage in stages for s in range(STEPS)}
    for key in KEYS:
        name = {"responses": "response"}.get(key, key)
        place = "data/{}/step{}/rank0/micro_step0/{}0.{}"
        expected |= {place.format(key, s, name, kind) for s in range(STEPS) for kind in ("npy", "json")}
    assert names(dump) == expected | {"configurations.json"}
    for stage in stages:  # the documentation names the rank's folder directly below the stage
        assert json.loads((dump / stage / "rank0" / "dump.json").read_text())["level"] == "L0"
    found = json.loads((dump / "data" / "responses" / "step0" / "rank0" / "micro_step0" / "response0.json").read_text())
    assert set(found) == {"max", "min", "mean", "norm", "shape"} and found["shape"] == [32, dapo_world.RESPONSE]
    assert json.loads((dump / "configurations.json").read_text())["algorithm"]["adv_estimator"] == "grpo"
    memory = json.loads((dump / "memory_snapshot" / "actor_update" / "step0" / "rank0.json").read_text())
    assert memory["peak"] >= memory["before"] > 0


def test_a_reader_finds_stages_steps_and_rows(recorded):
    reader = open_capture(recorded[0])
    assert reader.describe()["format"] == "precision collector" and reader.steps() == list(range(STEPS))
    assert reader.stages(0)[:2] == ["data", "actor_generate_sequences"] and reader.stages(0)[-1] == "actor_update"
    kinds = {row.kind for row in reader.rows(0, "actor_update", 0)}
    assert kinds == {"module", "parameter", "parameter_gradient"}
    assert {row.direction for row in reader.rows(0, "actor_compute_log_prob", 0)} == {"forward"}


@pytest.mark.parametrize(
    ("level", "kinds"), [("L1", {"operator"}), ("mix", {"module", "operator", "parameter", "parameter_gradient"})]
)
def test_operators_are_dumped_with_the_other_levels(world, plain, tmp_path, level, kinds):
    setting = collect(tmp_path, level=level, actor_train_dump=True, step_end=0)
    run = run_dapo(dapo_world.config(world, **setting, trainer__total_training_steps=1), run_dir=tmp_path / "run")
    assert run.metrics == plain.metrics[:1]
    rows = list(open_capture(tmp_path / "dump").rows(0, "actor_update", 0))
    assert {row.kind for row in rows} == kinds
    parents = {row.parent for row in rows if row.module.startswith("Aten.") and row.direction == "forward"}
    assert level == "L1" or any(p.startswith("model.layers.1.") for p in parents)


def test_exactly_the_tokens_of_the_range_are_dumped(recorded, world, tmp_path):
    passes = [
        r for r in open_capture(recorded[0]).rows(0, "actor_generate_sequences", 0) if r.module == "model.embed_tokens"
    ]
    widths = [r.shape[1] for r in passes if r.path == "args.0"]
    assert widths == [1, 1]  # tokens 1 and 2: the first two decoding passes, without the prompt's
    run_dapo(dapo_world.config(world, **collect(tmp_path, actor_infer_dump=True)), run_dir=tmp_path / "run")
    passes = [
        r
        for r in open_capture(tmp_path / "dump").rows(0, "actor_generate_sequences", 0)
        if r.module == "model.embed_tokens"
    ]
    assert [r.shape[1] for r in passes if r.path == "args.0"] == [passes[0].shape[1]] and passes[0].shape[1] > 1


@pytest.mark.parametrize("fields", [{"key_data_dump": True}, {"actor_train_dump": True}])
def test_steps_that_the_run_does_not_have_are_said(world, tmp_path, capsys, fields):
    setting = collect(tmp_path, step_start=9, step_end=9, **fields)
    run_dapo(dapo_world.config(world, **setting, trainer__total_training_steps=1), run_dir=tmp_path / "run")
    assert not (tmp_path / "dump").exists()
    assert capsys.readouterr().err.splitlines()[-1] == (
        "precision collector: nothing was collected: no step fits precision_collector.step_start=9, "
        "precision_collector.step_end=9: the run went through steps 0 … 0, counted from 0"
    )


def test_only_the_steps_of_the_range_are_dumped(world, tmp_path, capsys):
    setting = collect(tmp_path, step_start=1, step_end=1, key_data_dump=True, actor_train_dump=True)
    run_dapo(dapo_world.config(world, **setting), run_dir=tmp_path / "run")
    assert open_capture(tmp_path / "dump").steps() == [1]
    assert {p.name for p in (tmp_path / "dump" / "actor_update").iterdir()} == {"step1", "rank0"}
    assert "nothing was collected" not in capsys.readouterr().err


def test_mock_inference_with_training_dumps_trains_to_the_same_numbers(world, recorded, tmp_path):
    """The main use: the benchmark device's responses are replayed, and the training stages are dumped beside it."""
    dump, benchmark = recorded
    setting = collect(
        tmp_path, enable_mock_inference=True, mock_data_path=str(dump), mock_step_end=STEPS - 1, key_data_dump=True,
        actor_train_dump=True, reference_dump=True,
    )  # fmt: skip
    changes = {**setting, "actor_rollout_ref__actor__use_kl_loss": True}
    # Another seed would say something else: what comes out is the recording.
    run = run_dapo(dapo_world.config(world, **changes, trainer__seed=99), run_dir=tmp_path / "run")
    assert trained(run.metrics) == trained(benchmark.metrics)
    assert not any(k.startswith(OF_ROLLOUT_ENGINE) for k in run.metrics[0])
    ours, theirs = open_capture(tmp_path / "dump"), open_capture(dump)
    assert ours.stages(0) == [s for s in theirs.stages(0) if s != "actor_generate_sequences"]
    for step in range(STEPS):
        for stage in ours.stages(step):
            one, other = (
                [(r.module, r.path, r.call, r.shape, r.statistics) for r in x.rows(step, stage, 0)]
                for x in (ours, theirs)
            )
            assert repr(one) == repr(other), f"{stage}, step {step}"  # by text, in which NaN equals NaN
    np.testing.assert_array_equal(*(_responses(x) for x in (tmp_path / "dump", dump)))


def _responses(dump: Path) -> np.ndarray:
    return np.load(dump / "data" / "responses" / "step1" / "rank0" / "micro_step0" / "response0.npy")


def test_a_replay_shows_a_fault_of_the_training_stages(world, recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(mla, "softmax_scale", mla.softmax_scale)  # the worker setup breaks it in this process
    dump, benchmark = recorded
    setting = collect(
        tmp_path, enable_mock_inference=True, mock_data_path=str(dump), mock_step_end=STEPS - 1, actor_train_dump=True
    )
    changes = {**setting, "actor_rollout_ref__actor__use_kl_loss": True}
    run = run_dapo(
        dapo_world.config(world, **changes), run_dir=tmp_path / "run", worker_setup="dapo_world:halve_the_softmax_scale"
    )
    assert trained(run.metrics) != trained(benchmark.metrics)
    ours, theirs = (open_capture(d).rows(0, "actor_compute_log_prob", 0) for d in (tmp_path / "dump", dump))
    differing = [
        a.module
        for a, b in zip(ours, theirs)
        if a.kind == "module" and a.statistics != b.statistics and a.dtype == "float32"
    ]
    assert differing[0].startswith("model.layers.0.self_attn")


@pytest.mark.parametrize(("seed", "replayed"), [(-1, [1, 2, 1]), (3, None)])
def test_other_modes_train_on_recorded_steps_out_of_order(world, recorded, tmp_path, seed, replayed):
    setting = collect(
        tmp_path, enable_mock_inference=True, mock_data_path=str(recorded[0]), mock_random_seed=seed, mock_step_start=1,
        mock_step_end=2, key_data_dump=True,
    )  # fmt: skip
    run = run_dapo(dapo_world.config(world, **setting), run_dir=tmp_path / "run")
    found = open_capture(tmp_path / "dump")
    prompts = {s: _prompts(open_capture(recorded[0]), s) for s in (1, 2)}
    order = [next(s for s, p in prompts.items() if np.array_equal(p, _prompts(found, step))) for step in range(STEPS)]
    assert order == (replayed or order) and set(order) <= {1, 2}
    # Rewards are judged by the answers of the prompts that were replayed.
    scores = {s: recorded[1].metrics[s]["critic/score/mean"] for s in (1, 2)}
    assert [m["critic/score/mean"] for m in run.metrics] == [scores[s] for s in order]
    again = run_dapo(dapo_world.config(world, **setting), run_dir=tmp_path / "again")
    assert again.metrics == run.metrics


def _prompts(reader, step: int) -> np.ndarray:
    return next(r.tensor() for r in reader.rows(step, "data", 0) if r.module == "prompts")


def test_a_recording_of_other_prompts_is_refused(world, recorded, tmp_path):
    setting = collect(tmp_path, enable_mock_inference=True, mock_data_path=str(recorded[0]), mock_step_end=STEPS - 1)
    with pytest.raises(InputError, match="the recorded step is about other prompts"):
        run_dapo(dapo_world.config(world, **setting, data__seed=5), run_dir=tmp_path / "run")


def test_two_recordings_for_one_generation_are_refused(world, recorded, tmp_path):
    setting = collect(tmp_path, enable_mock_inference=True, mock_data_path=str(recorded[0]))
    with pytest.raises(InputError, match="two recordings stand in for the same generation"):
        run_dapo(
            dapo_world.config(world, **setting, actor_rollout_ref__rollout__skip__enable=True), run_dir=tmp_path / "run"
        )


def test_a_missing_file_ends_the_run_before_it_begins(world, tmp_path):
    with pytest.raises(InputError, match="the file of the precision collector cannot be read"):
        run_dapo(
            dapo_world.config(world, ascend_precision_collector=str(tmp_path / "no.yaml")), run_dir=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_the_critics_stages(world, tmp_path):
    setting = collect(tmp_path, critic_train_dump=True, step_end=0)
    changes = {**setting, "algorithm__adv_estimator": "gae", "trainer__total_training_steps": 1}
    run_dapo(dapo_world.config(world, **changes), run_dir=tmp_path / "run")
    reader = open_capture(tmp_path / "dump")
    assert reader.stages(0) == ["critic_compute_values", "critic_update"]
    gradients = [r for r in reader.rows(0, "critic_update", 0) if r.kind == "parameter_gradient"]
    assert gradients and all(r.statistics.l2 >= 0 for r in gradients)


def test_a_full_disk_stops_the_collector_and_not_the_run(world, plain, tmp_path, monkeypatch, capsys):
    written = []

    def write(folder, *arguments, **settings):
        written.append(folder)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        return write_msprobe(folder, *arguments, **settings)

    monkeypatch.setattr(collector, "write_msprobe", write)
    setting = collect(tmp_path, actor_train_dump=True, key_data_dump=True)
    run = run_dapo(dapo_world.config(world, **setting), run_dir=tmp_path / "run")
    assert run.metrics == plain.metrics and len(written) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "collector" in line]
    assert said == [f"precision collector stopped, the run goes on: No space left on device ({written[1]})"]
    assert open_capture(tmp_path / "dump").stages(0) == ["data", "actor_compute_log_prob"]  # what was finished stays


def test_tensors_are_kept_with_task_tensor(world, tmp_path):
    setting = collect(tmp_path, actor_train_dump=True, task="tensor", step_end=0)
    run_dapo(dapo_world.config(world, **setting, trainer__total_training_steps=1), run_dir=tmp_path / "run")
    folder = tmp_path / "dump" / "actor_compute_log_prob" / "step0" / "rank0"
    assert (folder / "dump_tensor_data" / "Module.lm_head.Linear.forward.0.output.0.pt").is_file()
    for row in open_capture(tmp_path / "dump").rows(0, "actor_compute_log_prob", 0):
        values = row.tensor()
        assert values.shape == row.shape
        if row.dtype == "float32" and values.size:
            assert (float(values.max()), float(values.min())) == (row.statistics.max, row.statistics.min)


def test_distillation_is_collected_and_replayed(world, tmp_path):
    root = gkd_world.build(tmp_path / "gkd", world)
    plain = run_gkd(gkd_world.config(world, root), run_dir=tmp_path / "plain")
    switches = dict.fromkeys(("key_data_dump", "actor_train_dump", "reference_dump", "actor_infer_dump"), True)
    (tmp_path / "a").mkdir()
    first = collect(tmp_path / "a", **switches, step_end=5)
    assert run_gkd(gkd_world.config(world, root, **first), run_dir=tmp_path / "a" / "run").metrics == plain.metrics
    reader = open_capture(tmp_path / "a" / "dump")
    assert "reference_compute_log_prob" in reader.stages(0) and "actor_update" in reader.stages(0)
    (tmp_path / "b").mkdir()
    second = collect(
        tmp_path / "b", enable_mock_inference=True, mock_data_path=str(tmp_path / "a" / "dump"), mock_step_end=5,
        step_end=5, actor_train_dump=True,
    )  # fmt: skip
    assert run_gkd(gkd_world.config(world, root, **second), run_dir=tmp_path / "b" / "run").metrics == plain.metrics


LORA = {
    "engine__train": "fsdp", "actor_rollout_ref__actor__fsdp_config__model": "golden",
    "actor_rollout_ref__model__lora_rank": 2, "actor_rollout_ref__actor__use_kl_loss": True,
}  # fmt: skip


@pytest.mark.parametrize(("step_end", "whole"), [(4, [0, 1]), (2, [0])])
def test_with_lora_on_fsdp_two_steps_need_twice_the_step_end(world, tmp_path, monkeypatch, capsys, step_end, whole):
    passes = []
    honest = FsdpLoraEngine.forward

    def forward(self, micro_batches, *, stage):
        passes.append((stage, self._switch.on))
        return honest(self, micro_batches, stage=stage)

    monkeypatch.setattr(FsdpLoraEngine, "forward", forward)
    setting = collect(tmp_path, actor_train_dump=True, reference_dump=True, step_end=step_end)
    run_dapo(dapo_world.config(world, **setting, **LORA), run_dir=tmp_path / "run")
    assert passes == [("old_log_prob", True), ("ref_log_prob", False)] * STEPS, "the actor computes twice a step"
    reader = open_capture(tmp_path / "dump")
    for stage in ("actor_compute_log_prob", "actor_update"):
        assert [step for step in reader.steps() if stage in reader.stages(step)] == whole
    of_reference = [step for step in reader.steps() if "reference_compute_log_prob" in reader.stages(step)]
    assert of_reference == list(range(STEPS))
    said = capsys.readouterr().err
    assert f"count calls, which is {len(whole)} whole step" in said and "set step_end to 2·N" in said


@pytest.mark.parametrize("engine", ["golden", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_several_ranks_dump_their_own_rows_and_are_replayed_by_one(world, tmp_path, engine):
    if engine == "fsdp":
        pytest.importorskip("transformers")
    pytest.importorskip("ray")
    (tmp_path / "two").mkdir()
    setting = collect(tmp_path / "two", key_data_dump=True, actor_train_dump=True, step_end=0)
    changes = {**setting, "trainer__n_gpus_per_node": 2, "trainer__total_training_steps": 1, "engine__train": engine}
    two = run_dapo(dapo_world.config(world, **changes), run_dir=tmp_path / "two" / "run", executor="ray")
    reader = open_capture(tmp_path / "two" / "dump")
    assert reader.ranks(0, "actor_update") == [0, 1] and reader.ranks(0, "data") == [0, 1]
    assert not (tmp_path / "two" / "dump" / ".collecting").exists()
    for stage in ("actor_compute_log_prob", "actor_update"):
        assert any(r.kind == "module" for r in reader.rows(0, stage, 1))
    (tmp_path / "one").mkdir()
    setting = collect(
        tmp_path / "one",
        enable_mock_inference=True,
        mock_data_path=str(tmp_path / "two" / "dump"),
        key_data_dump=True,
        step_end=0,
    )
    one = run_dapo(
        dapo_world.config(world, **setting, trainer__total_training_steps=1), run_dir=tmp_path / "one" / "run"
    )
    assert one.metrics[0]["critic/score/mean"] == two.metrics[0]["critic/score/mean"]
    assert open_capture(tmp_path / "one" / "dump").ranks(0, "data") == [0, 1]


@pytest.mark.engine
def test_the_megatron_back_end_is_collected(world, tmp_path):
    from alignment.backends.megatron_model import installed_version

    try:
        installed_version()
    except UnavailableError as missing:
        pytest.skip(str(missing))
    changes = {"engine__train": "megatron", "trainer__total_training_steps": 1}
    plain = run_dapo(dapo_world.config(world, **changes), run_dir=tmp_path / "plain")
    setting = collect(tmp_path, key_data_dump=True, actor_train_dump=True, step_end=0)
    run = run_dapo(dapo_world.config(world, **changes, **setting), run_dir=tmp_path / "run")
    assert run.metrics == plain.metrics
    reader = open_capture(tmp_path / "dump")
    assert reader.stages(0) == ["data", "actor_compute_log_prob", "actor_update"]
    rows = list(reader.rows(0, "actor_update", 0))
    assert {r.kind for r in rows} == {"module", "parameter", "parameter_gradient"}
    assert any(r.direction == "backward" and "decoder.layers.1" in r.module for r in rows)


@pytest.mark.engine
def test_vllm_dumps_the_tokens_of_the_range(tmp_path, monkeypatch):
    pytest.importorskip("vllm")
    from alignment.backends.engine_model import engine_config

    narrow = dapo_world.model_config
    monkeypatch.setattr(dapo_world, "model_config", lambda tokenizer: engine_config(narrow(tokenizer)))
    root = dapo_world.build(tmp_path / "wide")
    setting = collect(
        tmp_path, actor_infer_dump=True, key_data_dump=True, step_end=0, token_range_start=1, token_range_end=2
    )
    changes = {"engine__rollout": "vllm", "actor_rollout_ref__rollout__free_cache_engine": False}
    run_dapo(
        dapo_world.config(root, **changes, **setting, trainer__total_training_steps=1),
        run_dir=tmp_path / "run",
        executor="inprocess",
    )
    rows = list(open_capture(tmp_path / "dump").rows(0, "actor_generate_sequences", 0))
    passes = [r.shape[0] for r in rows if r.module == "model.embed_tokens" and r.path == "args.0"]
    # vLLM packs: a decoding pass has one token of each of the at most 32 samples, the prompt's pass many.
    assert len(passes) == 2 and all(n <= 32 for n in passes)
