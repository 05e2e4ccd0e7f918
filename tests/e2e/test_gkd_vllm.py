"""Distillation with vLLM: as the student's inference engine, as teacher replicas, and its prompt log-probs parsed."""

from __future__ import annotations

from unittest import mock

import dapo_world
import gkd_world
import pytest
import torch

from alignment.backends.engine_model import engine_config
from alignment.backends.sync_probe import probe_budget
from alignment.rl.gkd_run import run_gkd
from alignment.rl.prompt_log_probs import parse_prompt_log_probs
from alignment.weights.checkpoint import load_model

pytestmark = pytest.mark.engine

K = 5
REPLICAS = {
    "gkd__teacher_replicas": 1,
    "gkd__gkd_logits_topk": K,
    "gkd__lmbda": 1.0,
    "trainer__total_training_steps": 2,
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Teacher and student with head widths vLLM has kernels for."""
    narrow = dapo_world.model_config
    with mock.patch.object(dapo_world, "model_config", lambda tokenizer: engine_config(narrow(tokenizer))):
        world = dapo_world.build(tmp_path_factory.mktemp("wide"))
    # vLLM's kernels for experts want widths that half the teacher's are not.
    return world, gkd_world.build(tmp_path_factory.mktemp("wide_gkd"), world, sizes={"intermediate_size": 32})


@pytest.fixture(scope="module")
def bound(wide) -> float:
    """How far a correct engine's log-probs may be from the golden model's, from the model's own re-association noise."""
    model = load_model(wide[0] / "model", dtype=torch.float32, device="cpu")
    return probe_budget(model, seeds=range(1, 6), device="cpu").value


@pytest.fixture(scope="module")
def engine(wide):
    pytest.importorskip("vllm")
    from alignment.backends.vllm_rollout import VllmRollout

    made = VllmRollout(
        checkpoint=wide[0] / "model", load_format="safetensors", max_model_len=32, engine_options={"max_logprobs": K}
    )
    yield made
    made.close()


def test_real_prompt_log_probs_are_the_golden_teacher_s_tables(wide, engine, bound):
    """Different lengths, one token alone, and tokens far from the likely ones: k + 1 entries in vLLM's answer."""
    sequences = [[1, 20, 30, 40, 50, 60], [1, 99], [1], [5, 6, 7, 8]]
    answers = engine.prompt_log_probs(sequences, k=K)
    assert [a[0] for a in answers] == [None] * 4 and max(len(e) for a in answers for e in a[1:]) == K + 1
    model = load_model(wide[0] / "model", dtype=torch.float32, device="cpu")
    for answer, sequence in zip(answers, sequences):
        tables = parse_prompt_log_probs(answer, sequence, k=K)
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([sequence]))[0], -1).topk(K)
        assert tables.log_probs.shape == (len(sequence), K) and torch.isneginf(tables.log_probs[-1]).all()
        gap = (tables.log_probs[:-1] - expected.values[:-1]).abs()
        assert gap.numel() == 0 or gap.max() <= bound
        # Indices are those of the golden model wherever neighbours are further apart than the bound.
        apart = (expected.values[:-1, :-1] - expected.values[:-1, 1:] > 2 * bound).all(-1)
        assert torch.equal(tables.indices[:-1][apart], expected.indices[:-1][apart])


def test_asking_the_teacher_leaves_the_engine_as_it_was(engine):
    """The log-probs are raw ones whatever the sampling settings, and the mode of the engine is put back."""
    before = engine._call("logprobs_mode", "processed_logprobs")[0]
    first = engine.prompt_log_probs([[1, 20, 30]], k=K)
    assert engine.prompt_log_probs([[1, 20, 30]], k=K) == first
    assert engine._call("logprobs_mode", before)[0] == before


def test_replicas_of_vllm_teach_what_the_golden_ones_teach(wide, bound, tmp_path):
    pytest.importorskip("vllm")
    runs = {}
    for name in ("vllm", "golden"):
        config = gkd_world.config(*wide, gkd__teacher_engine=name, **REPLICAS)
        runs[name] = run_gkd(config, run_dir=tmp_path / name).metrics
    for ours, theirs in zip(runs["vllm"], runs["golden"]):
        # A divergence moves by no more than the log-probs it is made of, on both sides of a difference.
        assert abs(ours["student/loss"] - theirs["student/loss"]) <= 2 * K * bound
        assert ours["student/tokens"] == theirs["student/tokens"]


def test_the_student_generates_with_vllm(wide, tmp_path):
    pytest.importorskip("vllm")
    config = gkd_world.config(
        *wide,
        engine__rollout="vllm",
        actor_rollout_ref__rollout__free_cache_engine=False,
        data__max_prompt_length=14,
        gkd__lmbda=1.0,
        trainer__total_training_steps=4,
    )
    result = run_gkd(config, run_dir=tmp_path / "run")
    assert len(result.metrics) == 4 and all(m["student/tokens"] > 0 for m in result.metrics)
