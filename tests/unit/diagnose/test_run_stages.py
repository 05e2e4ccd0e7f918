"""Two runs, and the first stage that parts them: each kind of divergence is planted and has to be named where it is."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from alignment.diagnose.run_data import config_differences, is_run, open_run
from alignment.diagnose.run_stages import _poisson_quantile, compare_runs, first_divergence
from alignment.diagnose.sample_pairs import SamplePairs
from alignment.errors import InputError
from alignment.numerics.verdict import Outcome, exit_code
from alignment.rl.batch_record import BatchRecord, batch_path, read_batch, write_batch
from alignment.rl.verl_sampling import NAME

PROMPTS, SAMPLES, R, VOCAB, STEPS = 3, 4, 6, 9, 3
# What an engine and a trainer in float32 are apart by, here as a uniform draw.
GAP = 1e-6


class Policy:
    """A policy small enough to be a table: log-probs of the next token after the last one, moved by every update."""

    def __init__(self, seed: int) -> None:
        self.logits = np.random.Generator(np.random.Philox(seed)).normal(0.0, 2.0, (VOCAB, VOCAB))

    def log_probs(self, last: int, temperature: float = 1.0) -> np.ndarray:
        logits = self.logits[last] / temperature
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    def update(self, direction: float) -> None:
        self.logits = self.logits + direction * np.sin(np.arange(VOCAB * VOCAB)).reshape(VOCAB, VOCAB)


def train(
    root, *, temperature=1.0, stale_at=(), score_bug_at=None, old_bug_at=None, advantage_bug_at=None,
    update_bug_at=None, noise_seed=0, grad_noise=0.0, paired=True, prompts_from=0, metrics_only=False,
    not_finite_at=None, lr=1e-3, seed=5, model=1, gap=GAP,
):  # fmt: skip
    """A run of STEPS steps: sampling by inverse CDF with a uniform draw per sample and position."""
    trainer, engine = Policy(model), Policy(model)
    noise = np.random.Generator(np.random.Philox(1000 + noise_seed))
    lines = []
    for step in range(1, STEPS + 1):
        if step in stale_at:
            engine = Policy(99) if step == 1 else engine
        else:
            engine.logits = trainer.logits.copy()
        names, numbers, rows = [], [], {k: [] for k in ("responses", "rollout_log_probs", "old_log_probs")}
        for prompt in range(prompts_from, prompts_from + PROMPTS):
            for sample in range(SAMPLES):
                key = [seed, step, prompt, sample] + ([] if paired else [noise_seed])
                draws = np.random.Generator(np.random.Philox(key=int.from_bytes(bytes(key), "big"))).random(R)
                last, tokens, ours, theirs = prompt % VOCAB, [], [], []
                for draw in draws:
                    # the noise is in the distribution that is drawn from, as an engine's is
                    seen = engine.log_probs(last, temperature) + noise.uniform(-gap, gap)
                    token = int(min(np.searchsorted(np.exp(seen).cumsum(), draw), VOCAB - 1))
                    tokens.append(token)
                    ours.append(seen[token])
                    theirs.append(trainer.log_probs(last, temperature)[token])
                    last = token
                if step == old_bug_at:
                    theirs[0] += 0.1
                names.append(f"p{prompt}")
                numbers.append(sample)
                for field, values in zip(rows, (tokens, ours, theirs), strict=True):
                    rows[field].append(values)
        mask = np.ones((len(names), R), np.int64)
        responses = np.array(rows["responses"])
        scores = np.zeros((len(names), R), np.float32)
        scores[:, -1] = responses.sum(1) % 5 - 2.0
        if step == score_bug_at:
            scores[2, -1] += 1.0
        total = scores.sum(1).reshape(PROMPTS, SAMPLES)
        advantages = (total - total.mean(1, keepdims=True)) / (total.std(1, ddof=1, keepdims=True) + 1e-6)
        if step == advantage_bug_at:
            advantages = (total - total.mean(1, keepdims=True)) / (total.std(1, ddof=0, keepdims=True) + 1e-6)
        tensors = {
            "responses": responses,
            "response_mask": mask,
            "rollout_log_probs": np.array(rows["rollout_log_probs"], np.float32),
            "old_log_probs": np.array(rows["old_log_probs"], np.float32),
            "token_level_scores": scores,
            "advantages": np.repeat(advantages.reshape(-1, 1), R, 1).astype(np.float32),
        }
        if not metrics_only:
            record = BatchRecord(step=step, tensors=tensors, prompt_ids=tuple(names), samples=tuple(numbers))
            write_batch(batch_path(root, step), record)
        apart = np.abs(tensors["old_log_probs"].astype(float) - tensors["rollout_log_probs"])
        metrics = {
            "actor/grad_norm": float(np.abs(advantages).sum()) * (1.0 + grad_noise * noise.uniform(-1, 1)),
            "actor/lr": lr,
            "critic/score/mean": float(total.mean()),
            "training/rollout_log_probs_abs_diff_mean": float(apart.mean()),
        }
        if step == not_finite_at:
            del metrics["actor/grad_norm"]
        lines.append({"step": step, **metrics})
        trainer.update(0.01 * float(np.tanh(responses.sum() % 17)) + (0.05 if step == update_bug_at else 0.0))
    root.mkdir(exist_ok=True)
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = {"engine": "verl", "not_finite": [] if not_finite_at is None else [[not_finite_at, "actor/grad_norm"]]}
    (root / "run.json").write_text(json.dumps({"device": "cpu", "verl": about}))
    agent = {"default_agent_loop": NAME if paired else "single_turn_agent"}
    rollout = {"temperature": temperature, "agent": agent, "seed": seed}
    (root / "config.json").write_text(
        json.dumps({"actor_rollout_ref": {"rollout": rollout}, "trainer": {"default_local_dir": str(root)}})
    )
    return root


@pytest.fixture
def a(tmp_path):
    return train(tmp_path / "a")


def named(verdicts):
    found = first_divergence(verdicts)
    return None if found is None else (found.step, found.stage)


def test_a_repeat_of_the_run_is_aligned_at_every_stage(a, tmp_path):
    verdicts = compare_runs(a, train(tmp_path / "b", noise_seed=1))
    assert named(verdicts) is None
    assert {v.outcome for v in verdicts} == {Outcome.PASS}
    stages = ["weight_sync", "rollout", "reward", "old_log_prob", "advantage", "update_actor"]
    assert [(v.step, v.stage) for v in verdicts] == [(step, s) for step in range(1, STEPS + 1) for s in stages]


@pytest.mark.parametrize(
    "fault, where, said",
    [
        ({"temperature": 1.2}, (1, "rollout"), "rollout.temperature 1.0 → 1.2"),
        ({"stale_at": (1,)}, (1, "weight_sync"), "the first synchronisation"),
        ({"stale_at": (2,)}, (2, "weight_sync"), "the synchronisation after step 1"),
        ({"score_bug_at": 2}, (2, "reward"), "prompt p0, sample 2 scores"),
        ({"old_bug_at": 2}, (2, "old_log_prob"), "the trainer's log-probs differ from both engines'"),
        ({"advantage_bug_at": 1}, (1, "advantage"), "equal scores give other advantages"),
        ({"update_bug_at": 1}, (2, "rollout"), "the weights after step 1 differ.*: update_actor"),
        ({"prompts_from": 1}, (1, "data"), "the runs trained on other prompts: 8 samples"),
        ({"lr": 2e-3}, (1, "update_actor"), "actor/lr is 0.001 and 0.002"),
        ({"not_finite_at": 2}, (2, "update_actor"), "actor/grad_norm is not finite"),
    ],
)
def test_a_planted_divergence_is_named_at_its_stage(a, tmp_path, fault, where, said):
    import re

    verdicts = compare_runs(a, train(tmp_path / "b", noise_seed=1, **fault))
    assert named(verdicts) == where, [str(v) for v in verdicts]
    assert re.search(said, verdicts[-1].reason), verdicts[-1].reason
    assert verdicts[-1].outcome is Outcome.FAIL, "the comparison ends with the first failure"
    assert all(v.outcome is not Outcome.FAIL for v in verdicts[:-1])


@pytest.mark.parametrize("name, stage", [("old_log_probs", "old_log_prob"), ("advantages", "advantage")])
def test_a_field_of_another_shape_is_named_and_nothing_is_compared_with_it(a, tmp_path, name, stage):
    b = train(tmp_path / "b", noise_seed=1)
    batch = read_batch(batch_path(b, 2))
    wide = np.pad(batch.tensors[name], ((0, 0), (1, 0)))
    write_batch(batch_path(b, 2), dataclasses.replace(batch, tensors={**batch.tensors, name: wide}))
    found = first_divergence(compare_runs(a, b))
    assert (found.step, found.stage) == (2, stage)
    assert found.reason == f"{name} [12, 7] does not fit the responses [12, 6]"
    # The other way round the run under test has done nothing wrong.
    verdicts = compare_runs(b, a)
    assert first_divergence(verdicts) is None
    (said,) = (v for v in verdicts if v.step == 2)
    assert said.outcome is Outcome.INCONCLUSIVE and "the trusted run cannot be compared with" in said.reason


def test_a_model_that_is_wrong_in_engine_and_trainer_alike_is_not_called_a_stale_synchronisation(a, tmp_path):
    # its log-probs have another size, and with it another rounding
    first = first_divergence(compare_runs(a, train(tmp_path / "b", model=7, gap=10 * GAP)))
    assert (first.step, first.stage) == (1, "rollout")
    assert "log-probs differ" in first.reason
    stale = train(tmp_path / "c", model=7, gap=10 * GAP, stale_at=(1,))
    sync = next(v for v in compare_runs(a, stale, stop=False) if v.stage == "weight_sync")
    assert sync.outcome is Outcome.FAIL, sync


def test_without_seeds_per_sample_log_probs_are_judged_and_tokens_are_not(tmp_path):
    a = train(tmp_path / "a", paired=False)
    b = train(tmp_path / "b", paired=False, noise_seed=1)
    verdicts = compare_runs(a, b)
    assert named(verdicts) is None
    rollout = next(v for v in verdicts if v.stage == "rollout")
    assert rollout.outcome is Outcome.INCONCLUSIVE and "draws are not seeded per sample" in rollout.reason
    assert "trained on other tokens at step 1" in verdicts[-1].reason and verdicts[-1].step == 2
    hot = train(tmp_path / "hot", paired=False, noise_seed=1, temperature=1.2)
    assert named(compare_runs(a, hot)) == (1, "rollout"), "shared tokens tell the temperature all the same"


def test_runs_with_different_seeds_may_draw_different_tokens(a, tmp_path):
    verdicts = compare_runs(a, train(tmp_path / "b", noise_seed=1, seed=6))
    assert named(verdicts) is None
    rollout = next(v for v in verdicts if v.stage == "rollout")
    assert rollout.outcome is Outcome.INCONCLUSIVE and "the runs have different seeds" in rollout.reason


def test_a_gradient_norm_that_differs_is_judged_by_repeats_only(a, tmp_path):
    noisy = train(tmp_path / "b", noise_seed=1, grad_noise=1e-3)
    update = [v for v in compare_runs(a, noisy) if v.stage == "update_actor"]
    assert {v.outcome for v in update} == {Outcome.INCONCLUSIVE}
    assert "actor/grad_norm differ; repeats of the first run (--repeat)" in update[0].reason
    repeats = [train(tmp_path / f"r{i}", noise_seed=2 + i, grad_noise=1e-3) for i in range(4)]
    assert named(compare_runs(a, noisy, repeats=repeats)) is None
    wrong = train(tmp_path / "c", noise_seed=1, grad_noise=0.5)
    assert named(compare_runs(a, wrong, repeats=repeats)) == (1, "update_actor")


@pytest.mark.parametrize(
    "fault, where", [({}, None), ({"stale_at": (1,)}, (1, "weight_sync")), ({"lr": 2e-3}, (1, "update_actor"))]
)
def test_metrics_alone_say_what_they_can(tmp_path, fault, where):
    a = train(tmp_path / "a", metrics_only=True)
    b = train(tmp_path / "b", metrics_only=True, noise_seed=1, **fault)
    assert named(compare_runs(a, b)) == where


def test_verdicts_go_into_reports_and_exit_codes(a, tmp_path):
    verdicts = compare_runs(a, train(tmp_path / "b", temperature=1.2))
    shown = [v.verdict(subject="verl", device="cpu", baseline=str(a)) for v in verdicts]
    assert exit_code(shown) == 1
    assert shown[-1].check == "run_stages.step1.rollout" and shown[-1].where.stage == "rollout"
    assert str(verdicts[-1]).startswith("step 1 · rollout: fail: log-probs differ: mean")


def test_places_and_names_are_no_difference_of_configurations(a, tmp_path):
    runs = open_run(a), open_run(train(tmp_path / "b", temperature=0.7))
    assert config_differences(*runs) == {"actor_rollout_ref.rollout.temperature": (1.0, 0.7)}


def test_runs_without_a_common_step_are_refused(a, tmp_path):
    other = tmp_path / "b"
    other.mkdir()
    (other / "run.json").write_text("{}")
    (other / "metrics.jsonl").write_text('{"step": 9, "actor/lr": 0.1}\n')
    with pytest.raises(InputError, match="no step in common; expected steps 1 … 3; found steps 9 … 9"):
        compare_runs(a, other)
    with pytest.raises(InputError, match="no metrics of a verl run"):
        (tmp_path / "empty").mkdir()
        open_run(tmp_path / "empty")


def test_a_folder_verl_wrote_is_compared_without_being_converted(tmp_path):
    for name, temperature in (("a", 1.0), ("b", 1.2)):
        folder = tmp_path / name / "log"
        folder.mkdir(parents=True)
        entry = {
            "step": 1,
            "data": {"actor/lr": 0.1, "training/rollout_probs_diff_mean": 0.001, "actor/entropy": temperature},
        }
        (folder / "run.jsonl").write_text(json.dumps(entry) + "\n")
    (tmp_path / "other").mkdir()
    assert is_run(tmp_path / "a") and not is_run(tmp_path / "other") and not is_run(tmp_path / "absent")
    verdicts = compare_runs(tmp_path / "a", tmp_path / "b")
    assert [(v.stage, v.outcome) for v in verdicts] == [
        ("weight_sync", Outcome.PASS), ("old_log_prob", Outcome.INCONCLUSIVE), ("update_actor", Outcome.PASS),
    ]  # fmt: skip


@pytest.mark.parametrize("mean, probability, k", [(0.0, 0.999, 0), (1.0, 0.36, 0), (1.0, 0.73, 1), (1.0, 0.74, 2)])
def test_quantiles_of_counts(mean, probability, k):
    # P(N ≤ 0) = e⁻¹ = 0.3679, P(N ≤ 1) = 0.7358
    assert _poisson_quantile(mean, probability) == k


@pytest.mark.parametrize(
    "answers, scores, found",
    [
        (("x", "y"), (1.0, 0.0), [("rollout", Outcome.PASS), ("reward", Outcome.PASS)]),
        (("x", "z"), (1.0, 0.0), [("rollout", Outcome.INCONCLUSIVE), ("reward", Outcome.PASS)]),
        (("u", "v"), (1.0, 0.0), [("rollout", Outcome.INCONCLUSIVE), ("reward", Outcome.INCONCLUSIVE)]),
        (("x", "y"), (0.0, 0.0), [("rollout", Outcome.PASS), ("reward", Outcome.FAIL)]),
        (None, None, [("data", Outcome.FAIL)]),
    ],
)
def test_the_text_of_a_dump_is_compared_as_far_as_text_goes(tmp_path, answers, scores, found):
    for name, prompt, outputs, earned in (
        ("a", "q", ("x", "y"), (1.0, 0.0)),
        ("b", "q" if answers else "other", answers or ("x", "y"), scores or (1.0, 0.0)),
    ):
        (tmp_path / name / "rollouts").mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "data": {"training/global_step": 1}}\n')
        rows = [{"input": prompt, "output": o, "score": s, "step": 1} for o, s in zip(outputs, earned, strict=True)]
        (tmp_path / name / "rollouts" / "1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [(v.stage, v.outcome) for v in compare_runs(tmp_path / "a", tmp_path / "b")] == found


def own_run(root, settings=(), **metrics):
    """A run of this project without batches, on the golden engines."""
    root.mkdir()
    (root / "run.json").write_text(json.dumps({"device": "cpu"}))
    config = {"trainer.deterministic": True, "trainer.seed": 1, **dict(settings)}
    tree = {}
    for key, value in config.items():
        *above, last = key.split(".")
        at = tree
        for name in above:
            at = at.setdefault(name, {})
        at[last] = value
    (root / "config.json").write_text(json.dumps(tree))
    line = {"step": 1, "actor/entropy": 0.25, "actor/loss": 0.1, "critic/score/mean": -1.0, **metrics}
    (root / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return root


@pytest.mark.parametrize(
    "metrics, stage",
    [({}, None), ({"actor/entropy": 0.26}, "update_actor"), ({"critic/score/mean": -1.5, "actor/loss": 0.2}, "reward")],
)
def test_runs_of_ours_repeat_to_the_bit_and_need_no_noise(tmp_path, metrics, stage):
    found = first_divergence(compare_runs(own_run(tmp_path / "a"), own_run(tmp_path / "b", **metrics)))
    assert (found and found.stage) == stage


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    "key, values",
    [
        ("engine.train", ("golden", "fsdp")),
        (f"{ACTOR}.strategy", ("golden", "megatron")),
        (f"{ACTOR}.use_dynamic_bsz", (True, False)),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", (4, 8)),
        (f"{ACTOR}.ppo_max_token_len_per_gpu", (4096, 8192)),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", (None, 4)),
        ("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", (True, False)),
        ("gkd.micro_batch_size", (1, 2)),
        ("trainer.n_gpus_per_node", (1, 2)),
        ("trainer.nnodes", (1, 2)),
        ("actor_rollout_ref.model.dtype", ("float32", "bfloat16")),
        (f"{ACTOR}.megatron.tensor_model_parallel_size", (1, 2)),
    ],
)
def test_runs_that_add_up_in_another_order_need_noise_to_be_judged(tmp_path, key, values):
    norm = 0.745586
    runs = [
        own_run(tmp_path / name, {key: value}, **{"actor/grad_norm": found})
        for name, value, found in zip("ab", values, (norm, float(np.nextafter(norm, 1.0))), strict=True)
    ]
    verdicts = compare_runs(*runs)
    assert named(verdicts) is None
    [update] = [v for v in verdicts if v.stage == "update_actor"]
    assert update.outcome is Outcome.INCONCLUSIVE
    assert update.reason.startswith("actor/grad_norm differ; repeats of the first run (--repeat)")
    assert key.startswith("trainer.") or f"{key} {values[0]} → {values[1]}" in update.reason
    # the same bits are asked of runs that cut their work alike
    again = own_run(tmp_path / "c", {key: values[0]}, **{"actor/grad_norm": float(np.nextafter(norm, 1.0))})
    found = first_divergence(compare_runs(runs[0], again))
    assert found.stage == "update_actor" and found.reason == "actor/grad_norm is 0.745586 and 0.745586"


@pytest.mark.parametrize(
    "key, values", [(f"{ACTOR}.clip_ratio_high", (0.2, 0.28)), (f"{ACTOR}.loss_agg_mode", ("token-mean", "seq-mean"))]
)
def test_a_setting_of_the_algorithm_is_no_excuse_for_other_numbers(tmp_path, key, values):
    runs = [
        own_run(tmp_path / name, {key: value}, **{"actor/grad_norm": found})
        for name, value, found in zip("ab", values, (0.5, 0.6), strict=True)
    ]
    found = first_divergence(compare_runs(*runs))
    assert found.stage == "update_actor" and found.reason.startswith("actor/grad_norm is 0.5 and 0.6; the conf")


def test_long_batches_are_compared_in_a_sort(tmp_path):
    """Prefixes have names of fixed size: rows of thousands of tokens, and one place where two runs part."""
    rng = np.random.Generator(np.random.Philox(8))
    b, r, part = 8, 4096, 3000
    responses = rng.integers(0, 50_000, (b, r))
    mask = np.ones((b, r), np.int64)
    mask[:, 100:120] = 0  # an observation of a tool, which is part of every later prefix
    other = responses.copy()
    other[3, part] += 1
    shared = other.copy()
    shared[4, 110] += 1
    names = {"prompt_ids": tuple("aabbccdd"), "samples": (0, 1) * 4}
    log_probs = rng.normal(-2.0, 1.0, (b, r)).astype(np.float32)

    def batch(tokens):
        return BatchRecord(
            step=1, tensors={"responses": tokens, "response_mask": mask, "old_log_probs": log_probs}, **names
        )

    pair = SamplePairs(batch(responses), batch(other))
    assert pair.equal_tokens == b - 1 and pair.first_difference() == f"prompt b, sample 1, token {part}"
    differences, _ = pair.shared("old_log_probs")
    assert len(differences) == int(mask.sum()) - (r - part) and not differences.any()
    differences, _ = SamplePairs(batch(responses), batch(shared)).shared("old_log_probs")
    assert len(differences) == int(mask.sum()) - (r - part) - (r - 120), (
        "what follows another observation is not shared"
    )
