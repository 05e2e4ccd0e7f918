"""Every failure mode people know by name: found where it is planted, and not where it is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from alignment.diagnose.failure_modes import LEAST, SPIKE, WINDOW, data_parallel, find_failure_modes
from alignment.diagnose.run_stages import RunData
from alignment.rl.batch_record import BatchRecord, batch_path, write_batch
from alignment.rl.tracking import RANKS

SAMPLES, PROMPT, RESPONSE = 16, 6, 8
STEPS = 26


def healthy() -> BatchRecord:
    draws = np.random.Generator(np.random.Philox(7))
    lengths = 2 + np.arange(SAMPLES) % (RESPONSE - 3)
    mask = (np.arange(RESPONSE)[None] < lengths[:, None]).astype(np.int64)
    engine = (-draws.exponential(1.0, (SAMPLES, RESPONSE)) * mask).astype(np.float32)
    near = lambda: (engine + 1e-6 * draws.standard_normal(engine.shape) * mask).astype(np.float32)  # noqa: E731
    scores = np.zeros((SAMPLES, RESPONSE), dtype=np.float32)
    scores[np.arange(SAMPLES), lengths - 1] = np.where(np.arange(SAMPLES) % 3, -1.0, 1.0)
    return BatchRecord(
        step=1,
        tensors={
            "prompts": draws.integers(3, 90, (SAMPLES, PROMPT)),
            "prompt_mask": np.ones((SAMPLES, PROMPT), dtype=np.int64),
            "responses": draws.integers(3, 90, (SAMPLES, RESPONSE)) * mask,
            "response_mask": mask,
            "rollout_log_probs": engine,
            "old_log_probs": near(),
            "ref_log_prob": near(),
            "token_level_scores": scores,
            "advantages": (scores.sum(1, keepdims=True) * mask).astype(np.float32),
        },
        prompt_ids=[f"p{i // 4}" for i in range(SAMPLES)],
        samples=[i % 4 for i in range(SAMPLES)],
    )


def a_run(directory: Path, *, config=None, metrics=None, **tensors) -> RunData:
    batch = healthy()
    write_batch(batch_path(directory, 1), dataclasses.replace(batch, tensors={**batch.tensors, **tensors}))
    draws = np.random.Generator(np.random.Philox(3))
    series = {
        s: {"actor/grad_norm": 1.0 + 0.1 * draws.standard_normal(), "actor/kl_loss": 0.01} for s in range(1, STEPS + 1)
    }
    for step, values in (metrics or {}).items():
        series[step] = {**series[step], **values}
    return RunData(directory, "alignment", "cpu", series, config or {})


def shifted(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(values[:, :1]), values[:, :-1]], axis=1)


def with_hole() -> np.ndarray:
    mask = healthy().tensors["response_mask"].copy()
    mask[3, 1] = 0
    return mask


def early_scores() -> np.ndarray:
    return np.roll(healthy().tensors["token_level_scores"], -1, axis=1)


def long_and_short() -> dict[str, np.ndarray]:
    """The first half of the samples is long, the second short."""
    lengths = np.where(np.arange(SAMPLES) < SAMPLES // 2, RESPONSE - 1, 1)
    mask = (np.arange(RESPONSE)[None] < lengths[:, None]).astype(np.int64)
    scores = np.zeros((SAMPLES, RESPONSE), dtype=np.float32)
    scores[np.arange(SAMPLES), lengths - 1] = 1.0
    return {"response_mask": mask, "token_level_scores": scores, "prompt_mask": np.eye(SAMPLES, PROMPT, dtype=np.int64)}


def pinned() -> dict[str, np.ndarray]:
    scores = np.zeros((SAMPLES, RESPONSE), dtype=np.float32)
    scores[:, -1] = -1.0
    return {"response_mask": np.ones((SAMPLES, RESPONSE), dtype=np.int64), "token_level_scores": scores}


ACTOR = "actor_rollout_ref.actor."
DYNAMIC = {
    f"{ACTOR}use_dynamic_bsz": True,
    f"{ACTOR}ppo_max_token_len_per_gpu": 64,
    "data.max_response_length": RESPONSE,
}
STAGED = {
    f"{ACTOR}megatron.pipeline_model_parallel_size": 4, f"{ACTOR}ppo_mini_batch_size": 2,
    f"{ACTOR}ppo_micro_batch_size_per_gpu": 4, "actor_rollout_ref.rollout.n": 8, "engine.train": "megatron",
    "trainer.n_gpus_per_node": 4,
}  # fmt: skip

PLANTED = {
    "shape mismatch": {"advantages": np.zeros((SAMPLES, RESPONSE + 1), dtype=np.float32)},
    "actor/reference misalignment": {"ref_log_prob": shifted(healthy().tensors["rollout_log_probs"])},
    "wrong response mask": {"response_mask": with_hole()},
    "KL spike": {
        "metrics": {
            **{s: {"actor/kl_loss": 0.01 * (1 + s % 3)} for s in range(1, 23)},
            23: {"actor/ppo_kl": 0.01, "actor/kl_loss": 3.0},
        }
    },
    "grad-norm spike": {"metrics": {24: {"actor/grad_norm": 40.0}}},
    "dynamic-batch memory peak": {"config": DYNAMIC, **pinned()},
    "pipeline bubble": {"config": STAGED},
    "rank token imbalance": {"config": {"trainer.n_gpus_per_node": 2}, **long_and_short()},
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mode_is_named(tmp_path, name):
    assert [mode.name for mode in find_failure_modes(a_run(tmp_path, **PLANTED[name]))] == [name]


@pytest.mark.parametrize(
    "config",
    [
        {},
        DYNAMIC,
        {**STAGED, f"{ACTOR}ppo_micro_batch_size_per_gpu": 1, f"{ACTOR}ppo_mini_batch_size": 8},
        {"trainer.n_gpus_per_node": 2},
    ],
    ids=["plain", "dynamic batching", "enough micro batches", "two ranks"],
)
def test_a_healthy_run_shows_none(tmp_path, config):
    assert find_failure_modes(a_run(tmp_path, config=config)) == []


def test_a_score_on_another_token_is_a_wrong_mask(tmp_path):
    (mode,) = find_failure_modes(a_run(tmp_path, token_level_scores=early_scores()))
    assert mode.name == "wrong response mask" and "the score is on token" in mode.evidence


def test_balanced_ranks_are_no_imbalance(tmp_path):
    config = {"trainer.n_gpus_per_node": 2, "trainer.balance_batch": True}
    assert find_failure_modes(a_run(tmp_path, config=config, **long_and_short())) == []


def test_drift_is_no_spike(tmp_path):
    rising = {step: {"actor/grad_norm": 1.0 + 0.3 * step, "actor/kl_loss": 0.01 * step} for step in range(1, STEPS + 1)}
    assert find_failure_modes(a_run(tmp_path, metrics=rising)) == []


def test_a_heavy_tail_around_zero_is_no_spike(tmp_path):
    """Mostly near zero, now and then far off on either side: another such step is nothing new."""
    small = {s: {"actor/ppo_kl": 1e-6 * (s % 3 - 1)} for s in range(1, STEPS + 1)}
    tail = {**small, 8: {"actor/ppo_kl": 1e-3}, 15: {"actor/ppo_kl": -1e-3}, 24: {"actor/ppo_kl": 1.2e-3}}
    assert find_failure_modes(a_run(tmp_path / "tail", metrics=tail)) == []
    (mode,) = find_failure_modes(a_run(tmp_path / "spike", metrics={**tail, 24: {"actor/ppo_kl": 1e-2}}))
    assert (mode.name, mode.step) == ("KL spike", 24)


def test_a_metric_below_zero_has_spikes_too(tmp_path):
    below = {s: {"actor/ppo_kl": -1.0 + 0.01 * (s % 3)} for s in range(1, STEPS + 1)}
    (mode,) = find_failure_modes(a_run(tmp_path, metrics={**below, 24: {"actor/ppo_kl": -0.2}}))
    assert (mode.name, mode.step) == ("KL spike", 24)


def test_normal_noise_is_hardly_ever_that_far_out():
    """The rate the constant states: at 2.5e-6 per step, 200 000 windows with 4 of them are one in 500."""
    values = np.random.Generator(np.random.Philox(11)).standard_normal((200_000, LEAST + 1))
    before, value = values[:, :LEAST], values[:, LEAST]
    middle = np.median(before, axis=1)
    spread = 1.4826 * np.median(np.abs(before - middle[:, None]), axis=1)
    assert (value - middle > SPIKE * spread).sum() < 4
    assert LEAST == WINDOW


def test_short_series_are_not_judged(tmp_path):
    """After six steps the deviation is too uncertain: three steps in a thousand of pure noise were spikes."""
    assert find_failure_modes(a_run(tmp_path, metrics={10: {"actor/grad_norm": 40.0}})) == []


SIZES = {
    f"{ACTOR}megatron.tensor_model_parallel_size": 4, f"{ACTOR}megatron.pipeline_model_parallel_size": 2,
    f"{ACTOR}megatron.context_parallel_size": 2, "trainer.n_gpus_per_node": 8, "trainer.nnodes": 4,
}  # fmt: skip


def test_rows_are_shared_by_the_replicas_of_verl_and_by_every_rank_of_ours():
    def ranks(engine, **changes):
        return data_parallel(RunData(Path(), engine, "npu", {}, {**SIZES, **changes}))

    assert (ranks("verl"), ranks("alignment")) == (2, 32)
    fsdp = {f"{ACTOR}strategy": "fsdp2", f"{ACTOR}ulysses_sequence_parallel_size": 4}
    assert (ranks("verl", **fsdp), ranks("alignment", **{"engine.train": "fsdp"})) == (8, 32)


@pytest.mark.parametrize("engine, micro, count", [("verl", 4, 8), ("verl", 32, 1), ("alignment", 2, 16)])
def test_the_bubble_counts_the_micro_batches_of_a_replica(tmp_path, engine, micro, count):
    """32 ranks are 2 replicas of 2 stages, and each takes 32 of 64 samples: of ours, 2 of each of its 16 ranks."""
    config = {
        **SIZES, f"{ACTOR}ppo_mini_batch_size": 8, "actor_rollout_ref.rollout.n": 8,
        f"{ACTOR}ppo_micro_batch_size_per_gpu": micro, "trainer.balance_batch": True,
    }  # fmt: skip
    modes = find_failure_modes(dataclasses.replace(a_run(tmp_path, config=config), engine=engine))
    expected = [f"2 stages and {count} micro batches: {1 / (count + 1):.0%} of an update is ramp"] if count < 2 else []
    assert [mode.evidence for mode in modes] == expected


@pytest.mark.parametrize("engine", ["verl", "alignment"])
def test_ranks_of_one_model_have_no_imbalance(tmp_path, engine):
    config = {"trainer.n_gpus_per_node": 2}
    two = dataclasses.replace(a_run(tmp_path, config=config, **long_and_short()), engine=engine)
    assert [mode.name for mode in find_failure_modes(two)] == ["rank token imbalance"]
    one = {**config, f"{ACTOR}megatron.tensor_model_parallel_size": 2}
    assert find_failure_modes(dataclasses.replace(two, config=one)) == []


def recorded(directory: Path, *by_rank: dict[str, int], **changes) -> RunData:
    """A run whose second update gave its ranks ``by_rank``; its first one was even."""
    run, even = a_run(directory, **changes), {"micro_batches": 8, "pipeline_stages": 1, "pipeline_chunks": 1}
    updates = [[{"tokens": 100, **even}] * len(by_rank), [{"tokens": 100, **even, **rank} for rank in by_rank]]
    (directory / RANKS).write_text(json.dumps({"step": 3, "update_actor": updates}) + "\n")
    return run


@pytest.mark.parametrize(
    "balanced, hint",
    [
        (False, "trainer.balance_batch=true shares them out by length"),
        (True, "trainer.balance_batch is on: a few long samples outweigh the others"),
    ],
)
def test_what_the_ranks_really_had_decides(tmp_path, balanced, hint):
    """Whatever the configuration promises, and whatever the batch would be in other shares."""
    config = {"trainer.n_gpus_per_node": 2, "trainer.balance_batch": balanced}
    (mode,) = find_failure_modes(recorded(tmp_path, {"tokens": 170}, {"tokens": 100}, config=config))
    assert (mode.name, mode.step) == ("rank token imbalance", 3)
    assert mode.evidence == f"rank 0 has 170 tokens, the mean is 135; {hint}"
    even = recorded(tmp_path, {"tokens": 166}, {"tokens": 100}, config=config, **long_and_short())
    assert find_failure_modes(even) == []


def test_what_verl_logs_of_its_balanced_ranks_is_read(tmp_path):
    """By the names that its ``log_seqlen_unbalance`` gives."""
    config = {"trainer.n_gpus_per_node": 2, "trainer.balance_batch": True}

    def verl(name, most):
        logged = {"global_seqlen/max": 900.0, "global_seqlen/balanced_max": most, "global_seqlen/mean": 500.0}
        return dataclasses.replace(a_run(tmp_path / name, config=config, metrics={7: logged}), engine="verl")

    (mode,) = find_failure_modes(verl("uneven", 640.0))
    assert (mode.name, mode.step) == ("rank token imbalance", 7)
    assert mode.evidence == (
        "a rank has 640 tokens, the mean is 500; trainer.balance_batch is on: a few long samples outweigh the others"
    )
    assert find_failure_modes(verl("even", 610.0)) == []


def test_the_micro_batches_that_ran_decide_about_the_bubble(tmp_path):
    """The configuration asks for one micro batch; the record says how many there were."""
    stages = {"pipeline_stages": 4, "micro_batches": 6}
    (mode,) = find_failure_modes(recorded(tmp_path / "few", *[stages] * 4, config=STAGED))
    assert (mode.name, mode.step) == ("pipeline bubble", 3)
    assert mode.evidence == "4 stages and 6 micro batches: 33% of an update is ramp"
    assert find_failure_modes(recorded(tmp_path / "more", *[{**stages, "micro_batches": 7}] * 4, config=STAGED)) == []
    chunks = {**stages, "pipeline_chunks": 2}
    assert find_failure_modes(recorded(tmp_path / "interleaved", *[chunks] * 4, config=STAGED)) == []


def test_an_update_of_nothing_has_no_ramp(tmp_path):
    """Ranks whose rows were all left out ran no micro batch; stages that wait for none only wait."""
    nothing = {"tokens": 0, "micro_batches": 0}
    assert find_failure_modes(recorded(tmp_path / "one", nothing, nothing)) == []
    stages = {**nothing, "pipeline_stages": 4}
    (mode,) = find_failure_modes(recorded(tmp_path / "four", *[stages] * 4))
    assert mode.evidence == "4 stages and 0 micro batches: 100% of an update is ramp"


def test_what_is_not_finite_is_a_spike(tmp_path):
    run = dataclasses.replace(a_run(tmp_path), not_finite=frozenset({(4, "actor/grad_norm")}))
    (mode,) = find_failure_modes(run)
    assert (mode.name, mode.step) == ("grad-norm spike", 4)
