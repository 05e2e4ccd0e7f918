"""DAPO end to end with vLLM as the rollout engine, weights synced at every step; and its rollout stage alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import dapo_world
import pytest
import torch

from alignment.backends.engine_model import engine_config
from alignment.backends.sync_probe import probe_budget
from alignment.errors import InputError, UnavailableError
from alignment.numerics.verdict import Outcome
from alignment.report.rollout_view import rollout_command
from alignment.rl.config import TrainConfig
from alignment.rl.executor import InProcessExecutor
from alignment.rl.run import run_dapo
from alignment.weights.checkpoint import load_model

pytestmark = pytest.mark.engine

STEPS = 5
# The bar on gradients of engines in float32 (relative L2), as the project states it.
GRADIENT_BAR = 1e-4
# Start-up of four processes on a busy machine.
TIMEOUT = 900
GAP = "training/rollout_log_probs_diff_max"


@pytest.fixture(scope="module")
def wide_world(tmp_path_factory):
    """The tiny world of the other runs with head widths vLLM has kernels for."""
    narrow = dapo_world.model_config
    with mock.patch.object(dapo_world, "model_config", lambda tokenizer: engine_config(narrow(tokenizer))):
        return dapo_world.build(tmp_path_factory.mktemp("wide"))


def config(root, **changes) -> TrainConfig:
    chosen = {"engine__rollout": "vllm", "actor_rollout_ref__rollout__free_cache_engine": False, **changes}
    return dapo_world.config(root, **chosen)


@pytest.fixture(scope="module")
def bound(wide_world) -> float:
    """How far log-probs of a correct engine may be from the trainer's, from the model's own re-association noise."""
    model = load_model(wide_world / "model", dtype=torch.float32, device="cpu")
    return probe_budget(model, seeds=range(1, 6), device="cpu").value


@pytest.fixture(scope="module")
def golden_run(wide_world, tmp_path_factory) -> list[dict]:
    """The metrics of a run with golden trainer and vLLM."""
    chosen = config(wide_world, trainer__total_training_steps=STEPS)
    return run_dapo(chosen, run_dir=tmp_path_factory.mktemp("golden") / "run").metrics


def test_golden_trains_and_vllm_generates(golden_run, bound):
    assert len(golden_run) == STEPS
    for metrics in golden_run:
        assert metrics["actor/grad_norm"] > 0
        assert metrics[GAP] <= bound, "a trainer's update did not reach vLLM before the next rollout"


def test_megatron_trains_and_vllm_generates_as_golden_does(wide_world, golden_run, bound, tmp_path):
    """vLLM in a process of its own, beside the trainer's process group; the run in one: Megatron's shims stay."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    chosen = config(wide_world, engine__train="megatron", trainer__total_training_steps=STEPS)
    (tmp_path / "config.yaml").write_text(json.dumps(chosen.to_dict()))
    program, written = Path(sys.executable).with_name("alignment"), tmp_path / "config.yaml"
    command = [program, "dapo", "--config", written, "--device", "cpu", "--executor", "inprocess"]
    command += ["--run-dir", tmp_path / "run", "--json"]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == STEPS
    first, golden = metrics[0], golden_run[0]
    assert first["critic/score/mean"] == golden["critic/score/mean"], "equal weights and seeds: equal first responses"
    assert first["actor/grad_norm"] == pytest.approx(golden["actor/grad_norm"], rel=GRADIENT_BAR)
    assert max(m[GAP] for m in metrics) <= bound


def test_updates_that_never_arrive_show_as_a_gap(wide_world, bound, tmp_path, monkeypatch):
    """The same run where updates after the first never arrive: the gap is reported and grows out of rounding."""
    from alignment.backends.vllm_rollout import VllmRollout

    whole, calls = VllmRollout.update_weights, []

    def only_once(self, stream, **options):
        calls.append(1)
        if len(calls) == 1:
            whole(self, stream, **options)

    monkeypatch.setattr(VllmRollout, "update_weights", only_once)
    result = run_dapo(config(wide_world), run_dir=tmp_path / "run")
    first, *later = (m[GAP] for m in result.metrics)
    assert first <= bound < min(later)
    assert len(calls) > 1


def test_an_engine_that_cannot_sleep_is_told_before_it_starts(wide_world, tmp_path):
    with pytest.raises(
        UnavailableError, match="free_cache_engine: the CPU build of vLLM cannot sleep.*free_cache_engine=false"
    ):
        run_dapo(config(wide_world, actor_rollout_ref__rollout__free_cache_engine=True), run_dir=tmp_path / "run")


def test_a_model_vllm_has_no_kernel_for_is_refused_before_any_step(world, tmp_path):
    with pytest.raises(InputError, match="vLLM's MLA kernels do not support these head widths"):
        run_dapo(config(world), run_dir=tmp_path / "run", executor=InProcessExecutor())
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_the_rollout_stage_alone(wide_world, load_format):
    emitted: list[str] = []
    result = rollout_command(
        config(wide_world, actor_rollout_ref__rollout__load_format=load_format), prompts=2, emit=emitted.append
    )
    assert emitted[0] == "16 responses of vllm"
    assert {v.check: v.outcome for v in result.verdicts}["rollout.paths"] is Outcome.PASS


def test_a_response_depends_on_its_key_and_not_on_the_batch(wide_world):
    from alignment.backends.rollout import SamplingParams
    from alignment.backends.vllm_rollout import VllmRollout

    params = SamplingParams(max_new_tokens=6, seed=3, eos_token_id=(5, 6))
    prompts, keys = torch.arange(7, 31).view(4, 6), torch.tensor([11, 12, 13, 14])
    with VllmRollout(load_format="safetensors", checkpoint=wide_world / "model") as engine:
        whole = engine.generate(prompts, torch.ones_like(prompts), params, keys)
        order = torch.tensor([2, 0])
        part = engine.generate(prompts[order], torch.ones(2, 6), params, keys[order])
        other = engine.generate(prompts, torch.ones_like(prompts), params, keys + 100)
    assert torch.equal(part.responses, whole.responses[order])
    assert not torch.equal(other.responses, whole.responses)
    ends = torch.isin(whole.responses, torch.tensor([5, 6])) & (whole.response_mask == 1)
    assert torch.equal(whole.response_mask.sum(1) == 6, ~ends[:, :-1].any(1)), (
        "a response ends with and contains its end"
    )
