"""Whole distillation runs: every kind of teacher and data, resumed and killed, alone and on Ray."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gkd_world
import pytest
import torch

from alignment.diagnose.resume_doctor import examine_checkpoint
from alignment.errors import InputError
from alignment.rl.gkd_run import run_gkd
from alignment.rl.gkd_trainer import COMPLETIONS
from alignment.rl.multi_turn import SCHEDULERS, MultiTurnScheduler, register
from alignment.rl.tracking import GROUPS, METRICS

STEPS = 6
SERIES = ("student/loss", "student/agreement", "student/on_policy", "student/tokens")


@pytest.fixture(scope="session")
def pupils(world, tmp_path_factory):
    """The student and the data of :mod:`gkd_world`."""
    return gkd_world.build(tmp_path_factory.mktemp("gkd"), world)


@pytest.fixture(scope="module")
def distil(world, pupils, tmp_path_factory):
    """Runs a configuration in a directory of its own."""

    def run(directory: Path | None = None, executor: str = "inprocess", progress=None, **changes):
        config = gkd_world.config(world, pupils, **changes)
        return run_gkd(
            config, run_dir=directory or tmp_path_factory.mktemp("run"), executor=executor, progress=progress
        )

    return run


def column(result, name: str) -> list[float]:
    return [row[name] for row in result.metrics]


def series(directory: Path) -> bytes:
    return (directory / METRICS).read_bytes() + (directory / GROUPS).read_bytes()


class Stages:
    """Which stages each step went through."""

    def __init__(self) -> None:
        self.seen: dict[int, list[str]] = {}

    def on_stage(self, step, total_steps, stage):
        self.seen.setdefault(step, []).append(stage)

    def on_step(self, *arguments):
        pass


# What is learned.


def test_the_student_comes_nearer_to_its_teacher(distil):
    result = distil(trainer__total_training_steps=60)
    for name, better in (("student/loss", -1), ("student/agreement", 1)):
        values = column(result, name)
        first, last = sum(values[:10]) / 10, sum(values[-10:]) / 10
        assert better * (last - first) > 0, (name, first, last)


def test_one_generation_feeds_consecutive_chunks_of_one_source(distil):
    stages = Stages()
    result = distil(progress=stages, trainer__total_training_steps=12, gkd__steps_per_generation=3)
    on_policy = [bool(x) for x in column(result, "student/on_policy")]
    generator = random.Random(42)
    drawn = [generator.random() < 0.5 for _ in range(4)]
    assert on_policy == [source for source in drawn for _ in range(3)]
    for step, seen in stages.seen.items():
        generates = on_policy[step - 1] and (step - 1) % 3 == 0
        # The student's weights move to the inference engine before it generates, and at no other time.
        assert [s for s in seen if s in ("weight_sync", "rollout")] == (["weight_sync", "rollout"] if generates else [])
        assert [s for s in seen if s in ("teacher_log_prob", "update_student")] == [
            "teacher_log_prob",
            "update_student",
        ]


def test_chunks_of_a_generation_are_its_samples_in_order(distil, tmp_path):
    halves = distil(tmp_path / "two", gkd__lmbda=0.0, trainer__total_training_steps=2)
    whole = distil(
        tmp_path / "one",
        gkd__lmbda=0.0,
        gkd__steps_per_generation=1,
        data__train_batch_size=8,
        trainer__total_training_steps=1,
    )
    assert sum(column(halves, "student/tokens")) == column(whole, "student/tokens")[0]


def test_off_policy_alone_needs_no_inference_engine(distil, monkeypatch):
    from alignment.rl.worker import Worker

    monkeypatch.setattr(Worker, "_build_rollout", lambda self: pytest.fail("an engine was built"))
    assert set(column(distil(gkd__lmbda=0.0), "student/on_policy")) == {0.0}


def test_a_teacher_that_waits_on_the_host_changes_nothing(distil):
    ours, theirs = distil(gkd__offload_teacher_model=True), distil()
    assert ours.metrics == theirs.metrics


def test_replicas_and_a_teacher_on_the_workers_train_alike(distil):
    common = {"gkd__gkd_logits_topk": 5, "gkd__lmbda": 1.0}
    served, here = distil(gkd__teacher_replicas=3, **common), distil(**common)
    for ours, theirs in zip(served.metrics, here.metrics):
        # Sequences alone, or batched with padding: float32 sums in another order, six updates long.
        assert ours["student/loss"] == pytest.approx(theirs["student/loss"], rel=1e3 * torch.finfo(torch.float32).eps)
        assert ours["student/tokens"] == theirs["student/tokens"]


def test_the_adapter_is_trained_and_its_base_teaches(distil, pupils):
    """With one view, a fresh adapter is its own teacher: no loss, nothing to learn. With a hint it has something to."""
    own = {"gkd__lora__rank": 4, "gkd__teacher_model": None, "gkd__lmbda": 0.0}
    idle = distil(trainer__total_training_steps=1, trainer__save_freq=1, **own)
    assert examine_checkpoint(idle.directory / "checkpoints") == ()
    eps = torch.finfo(torch.float32).eps
    assert abs(idle.metrics[0]["student/loss"]) <= 105 * eps and idle.metrics[0]["student/agreement"] == 1.0
    taught = distil(data__train_files=[str(pupils / "opsd.jsonl")], trainer__total_training_steps=30, **own)
    losses = column(taught, "student/loss")
    assert losses[0] > 1e3 * eps and sum(losses[-5:]) < sum(losses[:5])


def test_the_merged_adapter_is_what_generates(distil, pupils, monkeypatch):
    from alignment.rl.worker import Worker

    sent = []
    honest = Worker.load_weights

    def load_weights(self, stream):
        stream = list(stream)
        expected = dict(self.actor.model.merged_state())
        sent.append(all(torch.equal(t, expected[n]) for n, t in stream) and len(stream) == len(expected))
        return honest(self, stream)

    monkeypatch.setattr(Worker, "load_weights", load_weights)
    distil(data__train_files=[str(pupils / "opsd.jsonl")], gkd__lora__rank=4, gkd__teacher_model=None, gkd__lmbda=1.0)
    assert sent == [True] * 3


def test_over_long_prompts_are_drawn_again_or_cut(distil, pupils):
    long = [str(pupils / "long.jsonl")]
    again = distil(data__train_files=long)
    assert sum(column(again, "data/resampled")) > 0
    for strategy in ("left", "right"):
        cut = distil(data__train_files=long, gkd__truncation_strategy=strategy)
        assert sum(column(cut, "data/resampled")) == 0
    with pytest.raises(InputError, match="gkd.max_length: too few samples fit"):
        distil(data__train_files=long, gkd__max_length=3)


def test_several_turns(distil):
    class Repeating(MultiTurnScheduler):
        started = 0

        def on_trajectory_start(self, conversations):
            type(self).started += len(conversations)

        def check_finished(self, conversation, *, hit_limit):
            return False

        def step(self, conversation):
            return [{"role": "user", "content": "1"}]

    register("repeating")(Repeating)
    try:
        result = distil(
            gkd__multi_turn_scheduler="repeating",
            gkd__max_turns=2,
            gkd__lmbda=1.0,
            gkd__max_length=40,
            trainer__total_training_steps=2,
        )
    finally:
        del SCHEDULERS["repeating"]
    assert Repeating.started == 8
    single = distil(gkd__lmbda=1.0, gkd__max_length=40, trainer__total_training_steps=2)
    assert sum(column(result, "student/tokens")) > sum(column(single, "student/tokens"))


def test_only_on_policy_completions_are_logged(distil, tmp_path):
    result = distil(tmp_path, gkd__log_completions=True)
    lines = [json.loads(line) for line in (tmp_path / COMPLETIONS).read_text().splitlines()]
    begun = {step for step in range(1, STEPS + 1, 2) if result.metrics[step - 1]["student/on_policy"]}
    assert {line["step"] for line in lines} == begun and len(lines) == 8 * len(begun)
    assert all(line["prompt"].endswith("<|assistant|>") for line in lines)


def test_recorded_rollouts_are_trained_on_again(distil, tmp_path):
    record = {
        "actor_rollout_ref__rollout__skip__enable": True,
        "actor_rollout_ref__rollout__skip__dump_dir": str(tmp_path / "dump"),
    }
    first, second = distil(**record), distil(**record)
    assert first.metrics == second.metrics and list((tmp_path / "dump").glob("step_*"))


def test_curves_are_written_for_the_gates(distil):
    result = distil()
    step = result.curve.steps[0]
    assert set(step.groups) == {"agreement", "divergence", "response_length"} and step.group_size == 4
    mean = step.groups["divergence"].grand_mean
    assert mean > 0 and result.curve.filtered is False
    assert distil(trainer__seed=5).curve.steps[0].prompt_hash == step.prompt_hash


# Refused before a step is taken.


def test_a_teacher_with_another_tokenizer_is_refused(distil, world, tmp_path):
    other = tmp_path / "teacher"
    shutil.copytree(world / "model", other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + "\n")
    with pytest.raises(InputError, match="gkd.teacher_model: teacher and student have different tokenizers"):
        distil(gkd__teacher_model=str(other))
    with pytest.raises(InputError, match="gkd.teacher_model: the teacher's checkpoint does not exist"):
        distil(gkd__teacher_model=str(tmp_path / "nowhere"))


# Resuming.

RESUMED = {
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 1,
    "gkd__steps_per_generation": 3,
    "gkd__log_completions": True,
}


@pytest.fixture(scope="module")
def straight(distil, tmp_path_factory):
    """The uninterrupted run, with a checkpoint after every step: steps 1 … 3 are off-policy, 4 … 6 on-policy."""
    directory = tmp_path_factory.mktemp("straight")
    result = distil(directory, **RESUMED)
    assert column(result, "student/on_policy") == [0.0] * 3 + [1.0] * 3
    return directory


@pytest.mark.parametrize("step", range(1, STEPS))
def test_every_checkpoint_continues_to_the_same_end(distil, straight, tmp_path, step):
    """In the middle of a generation, too: its samples are in the checkpoint, for the weights that made them are gone."""
    directory = tmp_path / "run"
    shutil.copytree(straight, directory)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(directory / "checkpoints" / f"global_step_{later}")
    distil(directory, **RESUMED)
    assert series(directory) == series(straight)
    assert (directory / COMPLETIONS).read_bytes() == (straight / COMPLETIONS).read_bytes()
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (d / "checkpoints" / f"global_step_{STEPS}" / "actor" / file for d in (directory, straight))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("key", ["schedule", "generation", "data"])
def test_what_a_checkpoint_carries_matters(distil, straight, tmp_path, key):
    """The state of another step in one place gives another curve: the test above would see it."""
    directory = tmp_path / "run"
    shutil.copytree(straight, directory)
    for later in range(5, STEPS + 1):
        shutil.rmtree(directory / "checkpoints" / f"global_step_{later}")
    path = directory / "checkpoints" / "global_step_4" / "state.json"
    state = json.loads(path.read_text())
    other = json.loads((straight / "checkpoints" / "global_step_1" / "state.json").read_text())
    state[key] = {"draws": 4} if key == "schedule" else {**other[key], "position": 0} if key == "data" else other[key]
    path.write_text(json.dumps(state))
    longer = {**RESUMED, "trainer__total_training_steps": 9}
    distil(directory, **longer)
    honest = tmp_path / "honest"
    shutil.copytree(straight, honest)
    distil(honest, **longer)
    assert series(directory) != series(honest)


def test_another_teacher_is_another_run(distil, straight, tmp_path, pupils):
    directory = tmp_path / "run"
    shutil.copytree(straight, directory)
    with pytest.raises(InputError, match="the checkpoint belongs to another configuration.*teacher="):
        distil(directory, **{**RESUMED, "gkd__teacher_model": str(pupils / "student")})


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {here!r})
import torch
torch.set_num_threads(1)
import gkd_world
from alignment.rl.gkd_run import run_gkd

class Killer:
    def on_stage(self, step, total_steps, stage):
        if (step, stage) == ({step}, {stage!r}):
            os.kill(os.getpid(), signal.SIGKILL)
    def on_step(self, *arguments):
        pass

config = gkd_world.config(Path({world!r}), Path({pupils!r}), **{settings!r})
run_gkd(config, run_dir=Path({run_dir!r}), progress=Killer())
"""


def kill_at(world: Path, pupils: Path, run_dir: Path, step: int, stage: str) -> None:
    script = KILLED.format(
        here=str(Path(__file__).parent),
        world=str(world),
        pupils=str(pupils),
        run_dir=str(run_dir),
        settings=RESUMED,
        step=step,
        stage=stage,
    )
    ended = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]


def test_killed_and_resumed_gives_the_uninterrupted_run(distil, world, pupils, straight, tmp_path):
    """While an on-policy generation is being used up, and while the next checkpoint is written."""
    kill_at(world, pupils, tmp_path, 4, "rollout")
    kill_at(world, pupils, tmp_path, 5, "update_student")
    kill_at(world, pupils, tmp_path, 6, "save")
    distil(tmp_path, **RESUMED)
    assert series(tmp_path) == series(straight)
    assert (tmp_path / COMPLETIONS).read_bytes() == (straight / COMPLETIONS).read_bytes()


# On Ray.


@pytest.mark.parametrize(
    "changes", [{}, {"gkd__gkd_logits_topk": 5, "gkd__sft_alpha": 0.3}], ids=["vocabulary", "top-k"]
)
def test_two_ranks_on_ray_train_as_one(ray_cluster, distil, changes):
    alone = distil(**changes)
    together = distil(executor="ray", trainer__n_gpus_per_node=2, **changes)
    for ours, theirs in zip(together.metrics, alone.metrics):
        # The gradient of 16 tokens in two sums instead of one, float32, through six updates.
        assert ours["student/loss"] == pytest.approx(theirs["student/loss"], rel=1e3 * torch.finfo(torch.float32).eps)
        assert ours["student/tokens"] == theirs["student/tokens"]


@pytest.mark.slow
def test_turns_and_adapters_on_two_ranks(ray_cluster, distil, pupils):
    """Conversations end at different turns, so that their number need not divide by the ranks."""
    turns = {"gkd__multi_turn_scheduler": "try_again", "gkd__max_turns": 3, "gkd__lmbda": 1.0, "gkd__max_length": 40}
    opsd = [str(pupils / "opsd.jsonl")]
    adapter = {"gkd__lora__rank": 4, "gkd__teacher_model": None, "data__train_files": opsd}
    for changes in (turns, {**adapter, "trainer__balance_batch": True}):
        alone = distil(trainer__total_training_steps=4, **changes)
        together = distil(executor="ray", trainer__n_gpus_per_node=2, trainer__total_training_steps=4, **changes)
        for ours, theirs in zip(together.metrics, alone.metrics):
            assert ours["student/loss"] == pytest.approx(theirs["student/loss"], rel=1e3 * torch.finfo(torch.float32).eps)
            assert ours["student/tokens"] == theirs["student/tokens"]


def test_replicas_are_ray_actors(ray_cluster, distil):
    common = {
        "gkd__gkd_logits_topk": 5,
        "gkd__lmbda": 1.0,
        "gkd__teacher_replicas": 2,
        "trainer__total_training_steps": 2,
    }
    served, here = distil(executor="ray", **common), distil(**common)
    assert served.metrics == here.metrics


def test_separate_processes_for_student_and_engine(ray_cluster, distil):
    apart, together = (
        distil(executor="ray", trainer__colocate=c, trainer__total_training_steps=4) for c in (False, True)
    )
    assert apart.metrics == together.metrics


# Watched, and from the command line.


def test_a_captured_run_computes_the_same_and_shows_every_kind_of_teacher(distil, world, pupils, tmp_path):
    from alignment.capture.config import CaptureConfig
    from alignment.capture.pipeline import FOLDER, capture_observer
    from alignment.capture.readers import open_capture

    def captured(name: str, **changes):
        run_dir = tmp_path / name
        config = gkd_world.config(world, pupils, trainer__total_training_steps=3, **changes)
        result = run_gkd(config, run_dir=run_dir, observers=[capture_observer(CaptureConfig(), run_dir)])
        return result, open_capture(run_dir / FOLDER)

    plain = distil(trainer__total_training_steps=3)
    result, reader = captured("one")
    assert result.metrics == plain.metrics
    assert reader.steps() == [1, 2, 3]
    assert set(reader.stages(1)) == {"teacher_log_prob", "update_student"} and "rollout" in reader.stages(3)
    names = {row.module for row in reader.rows(1, "teacher_log_prob", 0)}
    assert "model.layers.0.self_attn" in names
    _, served = captured("replicas", gkd__teacher_replicas=1, gkd__gkd_logits_topk=5, gkd__lmbda=1.0)
    seen = {row.path for row in served.rows(1, "teacher_log_prob", 0)} | {
        row.module for row in served.rows(1, "teacher_log_prob", 0)
    }
    assert any("teacher_topk_log_probs" in name for name in seen)


def alignment(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "alignment", *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"},
    )  # fmt: skip
    return done


def test_the_command_runs_resumes_and_refuses(tmp_path):
    short = ["--executor", "inprocess", "--device", "cpu", "data.train_batch_size=8", "gkd.micro_batch_size=8"]
    once = alignment(
        "gkd",
        "--json",
        "--run-dir",
        "run",
        *short,
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        cwd=tmp_path,
    )
    assert once.returncode == 0, once.stderr
    assert [m["step"] for m in json.loads(once.stdout)["metrics"]] == [1, 2]
    more = alignment("gkd", "--json", "--run-dir", "run", *short, "trainer.total_training_steps=3", cwd=tmp_path)
    longer = json.loads(more.stdout)["metrics"]
    assert longer[:2] == json.loads(once.stdout)["metrics"] and len(longer) == 3
    assert json.loads(more.stdout)["page"] == "run/report.html"
    assert "student/loss" in (tmp_path / "run" / "report.html").read_text()
    made = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert made["fingerprint"]["label"] == "cpu" and made["commit"] and made["determinism"]["deterministic_algorithms"]
    for arguments, message in (
        (["gkd.teacher_model_server=http://x", "gkd.teacher_model=null"], "a teacher server is not supported"),
        (["gkd.bta=0.1"], "the nearest known key is gkd.beta"),
        (["--config", "gkd-tyni"], "did you mean gkd-tiny"),
        (["--baseline", "nowhere"], "the folder of the baselines does not exist"),
    ):
        refused = alignment("gkd", *arguments, cwd=tmp_path)
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr


def test_the_command_judges_by_stored_curves(tmp_path, monkeypatch):
    """Five short baselines, and a run against them: every verdict names the curve, and the exit code follows."""
    monkeypatch.setenv("ALIGNMENT_COMMIT", "0" * 40)
    from alignment.baseline.runs import record_curves
    from alignment.devices.base import get_device

    record_curves(tmp_path / "baselines", "gkd-tiny", get_device("cpu"), work=tmp_path / "work", steps=3)
    done = alignment(
        "gkd",
        "--json",
        "--executor",
        "inprocess",
        "--device",
        "cpu",
        "--baseline",
        "baselines",
        "trainer.total_training_steps=3",
        cwd=tmp_path,
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert {v["check"] for v in document["verdicts"]} == {
        "e2e/curve-gkd-tiny-agreement",
        "e2e/curve-gkd-tiny-divergence",
    }
    assert document["exit_code"] == done.returncode in (0, 1)
    page = (tmp_path / document["page"]).read_text()
    assert "e2e/curve-gkd-tiny-agreement" in page
    other = alignment(
        "gkd", "--executor", "inprocess", "--device", "cpu", "--baseline", "baselines", "trainer.total_training_steps=3", "gkd.beta=0.2",
        cwd=tmp_path,
    )  # fmt: skip
    assert other.returncode == 2, other.stdout
