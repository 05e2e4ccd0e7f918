"""Two training runs, stage by stage and step by step: the first stage whose inputs agree and whose results do not.

Reads runs of this project and verl's output alike (:mod:`alignment.diagnose.run_data`), with whatever they recorded:
batches (token ids and log-probs of every sample) say most, metrics alone say less, and what cannot be judged is said to
be so.

How things are judged, A being the run that is trusted:

* Deterministic stages on equal inputs (scores of equal texts, learning rates) are compared exactly.
* Log-probs are compared on *shared tokens*: the same token after the same tokens of the same prompt in both runs,
  whatever else they sampled. Two correct implementations differ by what A's own two differ by, its inference engine and
  its trainer on the same tokens: the *gap* of A, measured at the same step. The bound is :data:`FACTOR` times that.
* The gap of B against the gap of A says whether B's engine holds the weights of B's trainer. A gap before the first
  update is a first synchronisation that did not happen or was incomplete; later it is the one after the last update.
  Where engine and trainer of B agree with each other better than either agrees with A, both compute another function,
  and a gap of another size is its rounding.
* Where every sample draws with a seed of its own, two runs with equal distributions draw equal tokens, unless a draw
  falls between the two: the expected number of such samples is at most the sum of the gap over all tokens, and more of
  them than chance allows (Poisson, :data:`FALSE_ALARM`) is a difference.
* Loss and gradient norm have no bound of their own: equal bits pass, ``repeats`` of A give a spread to judge by, and
  otherwise they are shown and not judged. Equal bits are asked of deterministic runs that cut their work alike
  (:data:`ADDED_UP`). What an update did shows in the log-probs of the next step, which are judged.
* Once the runs have trained on different samples, their weights differ with good reason, and the comparison ends there.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alignment.diagnose.run_data import RunData, config_differences, open_run
from alignment.diagnose.sample_pairs import SamplePairs
from alignment.errors import InputError
from alignment.numerics.budget import ENVELOPE_FACTOR as FACTOR
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict
from alignment.rl.batch_record import BatchRecord

STAGES = (
    "data", "weight_sync", "rollout", "reward", "old_log_prob", "ref_log_prob", "teacher_log_prob", "advantage",
    "update_actor",
)  # fmt: skip
"""In the order of a step; ``weight_sync`` is the one the step's rollout depends on."""

FIELDS_OF = {
    "rollout": ("response_mask", "rollout_log_probs"),
    "reward": ("token_level_scores",),
    "old_log_prob": ("old_log_probs",),
    "ref_log_prob": ("ref_log_prob",),
    "advantage": ("values", "token_level_rewards", "advantages", "returns"),
}
"""What each stage adds to a batch, one number per response token."""

METRICS_OF = {
    "rollout": ("response_length/mean", "response_length/max", "response_length/min"),
    "reward": ("critic/score/mean", "critic/score/max", "critic/score/min", "acc/before_filter"),
    "old_log_prob": ("actor/entropy",),
    "advantage": ("critic/advantages/mean", "critic/advantages/max", "critic/advantages/min"),
    "update_actor": (
        "actor/lr", "actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm",
        "student/lr", "student/loss", "student/jsd_loss", "student/sft_loss", "student/grad_norm",
    ),
}
"""What a run without batches says about a stage. Ours take the entropy in the update, verl with the old log-probs."""

OTHER_TOKENS = "samples with other tokens"
GAP_OF = ("rollout_log_probs of", "old_log_probs of", "ref_log_prob of", "teacher_log_prob of", "trainer − engine")
"""How the names of measures begin whose bound is the gap of the first run."""

EXACT = ("actor/lr", "student/lr")
ADDED_UP = re.compile(
    r"^engine\.train$|\.(strategy|dtype|chunk_size|balance_batch|use_fused_kernels)$"
    r"|micro_batch_size(_per_gpu)?$|dynamic_bsz$|max_token_len_per_gpu$|\.megatron\.|\.fsdp_config\."
)
"""Settings that decide how work is cut, by what engine it is done and in what dtype: two runs that differ in one add up
in another order, and equal bits cannot be asked of them."""
FALSE_ALARM = 1e-3
"""Probability that a step of two equal distributions is called different for the tokens they drew."""

GAPS = (
    ("training/rollout_log_probs_abs_diff_mean", "nats"),
    ("training/rollout_probs_diff_mean", "probability"),
)
"""How far trainer and engine of one run are apart, by the metrics of either kind of run; the first that both have."""


@dataclass(frozen=True, kw_only=True)
class StageVerdict:
    """What one stage of one step says about two runs."""

    step: int
    stage: str
    outcome: Outcome
    reason: str
    measures: tuple[Measure, ...] = ()
    where: Divergence | None = None

    def verdict(self, *, subject: str, device: str, baseline: str) -> Verdict:
        """As a verdict of a check, for reports and exit codes."""
        return Verdict(
            check=f"run_stages.step{self.step}.{self.stage}",
            layer="e2e",
            stage=self.stage,
            subject=subject,
            device=device,
            outcome=self.outcome,
            reason=self.reason,
            measures=self.measures,
            where=self.where,
            baseline=baseline,
        )

    def __str__(self) -> str:
        return f"step {self.step} · {self.stage}: {self.outcome.value}: {self.reason}"


def compare_runs(
    a: RunData | Path, b: RunData | Path, *, repeats: Sequence[RunData | Path] = (), stop: bool = True
) -> list[StageVerdict]:
    """Judges run ``b`` by run ``a``, in the order in which things happen.

    Args:
        a: the run that is trusted; a run, its directory, or a verl output folder.
        b: the run that is judged.
        repeats: further runs of ``a``'s configuration: their spread is the noise of metrics that have no other.
        stop: end with the first failure; what comes after it is a consequence.

    Returns:
        One verdict per step and stage that both runs say something about; never empty.

    Raises:
        InputError: a run that cannot be read, or two that have no step in common.
    """
    a, b, *others = (run if isinstance(run, RunData) else open_run(run) for run in (a, b, *repeats))
    steps = sorted(set(a.metrics) & set(b.metrics))
    if not steps:
        raise InputError(
            "the runs have no step in common", where=b.directory, expected=f"steps {a.span}", found=f"steps {b.span}"
        )
    verdicts: list[StageVerdict] = []
    state = _State(same_samples=True, config=config_differences(a, b))
    for step in steps:
        for verdict in _compare_step(a, b, others, step, state):
            verdicts.append(verdict)
            if verdict.outcome is Outcome.FAIL and stop:
                return verdicts
        if not state.same_samples:
            left = steps[-1] - step
            if left:
                verdicts.append(_unjudged(step + 1, "rollout", _parted(step, left)))
            break
    return verdicts


def first_divergence(verdicts: Sequence[StageVerdict]) -> StageVerdict | None:
    """The first failure, or None."""
    return next((v for v in verdicts if v.outcome is Outcome.FAIL), None)


# --- one step --------------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """What earlier stages found: whether both runs trained on the same samples so far, and how they were configured."""

    same_samples: bool
    config: dict[str, tuple[Any, Any]]


def _compare_step(a: RunData, b: RunData, repeats: Sequence[RunData], step: int, state: _State):
    for name in sorted(name for s, name in b.not_finite - a.not_finite if s == step):
        stage = next((s for s, names in METRICS_OF.items() if name in names), "update_actor")
        yield _failed(step, stage, f"{name} is not finite", name, state)
    batch_a, batch_b = a.batch(step), b.batch(step)
    if batch_a is None or batch_b is None:
        yield from _compare_metrics(a, b, repeats, step, state)
        return
    misfits = [(run, *found) for run, batch in ((a, batch_a), (b, batch_b)) if (found := _misfit(batch))]
    if misfits:
        run, stage, name, text = misfits[-1]
        if run is b:
            yield _failed(step, stage, text, name, state)
        else:
            yield _unjudged(step, stage, f"the trusted run cannot be compared with: {text}")
        return
    pair = SamplePairs(batch_a, batch_b)
    if pair.missing:
        yield _failed(step, "data", f"the runs trained on other prompts: {pair.missing}", "prompts", state)
        return
    gaps = pair.gap(0), pair.gap(1)
    yield from _judge_sync(step, pair, gaps, state)
    yield from _judge_rollout(a, b, step, pair, gaps, state)
    yield from _judge_reward(step, pair, state)
    for stage, name in (
        ("old_log_prob", "old_log_probs"),
        ("ref_log_prob", "ref_log_prob"),
        ("teacher_log_prob", "teacher_log_prob"),
    ):
        verdict = _judge_shared(step, stage, name, pair, gaps, state)
        if verdict is not None:
            yield verdict
    yield from _judge_advantage(step, pair, state)
    yield from _judge_update(a, b, repeats, step, pair, state)
    state.same_samples = state.same_samples and pair.equal_tokens == len(pair.rows)


def _misfit(batch: BatchRecord) -> tuple[str, str, str] | None:
    """Stage and name of the first field that is not of the responses' shape, and what is said about it."""
    shape = batch.tensors["responses"].shape
    for stage, names in FIELDS_OF.items():
        for name in names:
            if name in batch.tensors and batch.tensors[name].shape != shape:
                found = list(batch.tensors[name].shape)
                return stage, name, f"{name} {found} does not fit the responses {list(shape)}"
    return None


def _judge_sync(step: int, pair: SamplePairs, gaps, state: _State):
    """Whether b's engine holds the weights of b's trainer, by how far they are apart in a."""
    if gaps[0] is None or gaps[1] is None:
        return
    measures = _against_gap("trainer − engine log-prob", gaps[1], gaps[0])
    if all(m.within for m in measures):
        yield _passed(step, "weight_sync", "engine and trainer agree as they do in the first run", measures)
        return
    # An engine with the right weights and a trainer with wrong ones would look the same: the other run decides.
    engine, _ = pair.shared("rollout_log_probs")
    trainer, _ = pair.shared("old_log_probs")
    bound = FACTOR * max(float(gaps[0].max(initial=0.0)), _floor(pair))
    if _moved_together(engine, trainer, gaps[1]):
        text = "engine and trainer of this run are closer to each other than to the first run: not the weight sync"
        yield _unjudged(step, "weight_sync", text, measures)
        return
    stage, what = "weight_sync", "the inference engine computes with other weights than the trainer"
    if len(engine) and float(np.abs(engine).max()) <= bound < float(np.abs(trainer).max()):
        stage, what = "old_log_prob", "the trainer's log-probs differ from both engines'"
    moment = "the first synchronisation" if step == 1 else f"the synchronisation after step {step - 1}"
    detail = f"{what}: {moment}" if stage == "weight_sync" else what
    yield _failed(step, stage, detail, "trainer − engine log-prob", state, measures)


def _moved_together(engine: np.ndarray, trainer: np.ndarray, gap: np.ndarray) -> bool:
    """Whether engine and trainer of b part from a's alike, and by far more than from each other.

    A synchronisation that failed leaves one of the two where it is in a. Where both moved, the gap is the rounding of
    another function: a fault that both share, which the rollout's log-probs name.
    """
    if not (len(engine) and len(trainer) and np.isfinite(gap).all()):
        return False
    own = FACTOR * float(gap.mean())
    return min(float(np.abs(engine).mean()), float(np.abs(trainer).mean())) > own


def _judge_rollout(a: RunData, b: RunData, step: int, pair: SamplePairs, gaps, state: _State):
    count, equal = len(pair.rows), pair.equal_tokens
    tokens = Measure(name=OTHER_TOKENS, value=float(count - equal), unit=f"of {count}")
    verdict = _judge_shared(step, "rollout", "rollout_log_probs", pair, gaps, state) if gaps[0] is not None else None
    if verdict is not None and verdict.outcome is Outcome.FAIL:
        yield verdict
        return
    measures = verdict.measures if verdict is not None else ()
    if equal == count:
        yield _passed(step, "rollout", f"all {count} samples have equal tokens", (tokens, *measures))
        return
    why = _equal_draws(a, b) or ("" if gaps[0] is not None else "log-probs of the engine were not recorded")
    if why:
        text = f"{count - equal} of {count} samples have other tokens, from {pair.first_difference()} on; {why}"
        yield _unjudged(step, "rollout", text, (tokens, *measures))
        return
    expected = float(gaps[0].sum())
    allowed = float(_poisson_quantile(expected, 1.0 - FALSE_ALARM))
    tokens = Measure(
        name=OTHER_TOKENS, value=float(count - equal), bound=allowed, unit=f"of {count}",
        origin=f"{expected:.2g} draws expected to fall between distributions as far apart as A's engine and trainer",
    )  # fmt: skip
    if tokens.within:
        yield _passed(
            step, "rollout", f"{count - equal} of {count} samples part, as chance has it", (tokens, *measures)
        )
    else:
        text = (
            f"{count - equal} of {count} samples have other tokens from equal draws, from {pair.first_difference()} on"
        )
        yield _failed(step, "rollout", text, "response tokens", state, (tokens, *measures))


def _judge_shared(step: int, stage: str, name: str, pair: SamplePairs, gaps, state: _State) -> StageVerdict | None:
    if not pair.has(name):
        return None
    differences, worst = pair.shared(name)
    if not len(differences):
        return _unjudged(step, stage, "the runs share no token: nothing to compare log-probs on")
    reference = gaps[0] if gaps[0] is not None else None
    if reference is None:
        largest = Measure(name=f"{name} of shared tokens, largest", value=float(np.abs(differences).max()), unit="nats")
        if largest.value == 0.0:
            return _passed(step, stage, "equal to the bit on shared tokens", (largest,))
        return _unjudged(step, stage, f"differs on shared tokens at {worst}; no gap to judge by", (largest,))
    measures = _against_gap(f"{name} of shared tokens", np.abs(differences), reference, floor=_floor(pair))
    if all(m.within for m in measures):
        return _passed(step, stage, f"{len(differences)} shared tokens agree", measures)
    signed = f"mean {differences.mean():+.3g} nats over {len(differences)} shared tokens, most at {worst}"
    consequence = ""
    if step > 1:
        consequence = (
            f"; the weights after step {step - 1} differ though everything before its update agreed: update_actor"
        )
    return _failed(step, stage, f"log-probs differ: {signed}{consequence}", name, state, measures)


def _judge_reward(step: int, pair: SamplePairs, state: _State):
    if not pair.has("token_level_scores"):
        return
    scores = [batch.tensors["token_level_scores"].astype(np.float64).sum(1) for batch in pair.batches]
    same = np.flatnonzero(pair.same).tolist()
    if not same:
        yield _unjudged(step, "reward", "no sample has equal tokens in both runs")
        return
    wrong = [k for k in same if scores[0][pair.rows[k][0]] != scores[1][pair.rows[k][1]]]
    measure = Measure(
        name="equal responses with another score", value=float(len(wrong)), bound=0.0, unit=f"of {len(same)}",
        origin="exact: a score is a function of the text",
    )  # fmt: skip
    if not wrong:
        yield _passed(step, "reward", f"{len(same)} equal responses have equal scores", (measure,))
        return
    (i, j), (prompt, sample) = pair.rows[wrong[0]], pair.names[wrong[0]]
    text = f"prompt {prompt}, sample {sample} scores {scores[0][i]:g} and {scores[1][j]:g} for one text"
    yield _failed(step, "reward", text, "token_level_scores", state, (measure,))


def _judge_advantage(step: int, pair: SamplePairs, state: _State):
    if not (pair.has("advantages") and pair.has("token_level_scores")):
        return
    scores = [batch.tensors["token_level_scores"].astype(np.float64).sum(1) for batch in pair.batches]
    groups: dict[str, list[tuple[int, int]]] = {}
    alike = np.array([scores[0][i] == scores[1][j] for i, j in pair.rows]) & pair.same
    parted = {prompt for (prompt, _), equal in zip(pair.names, alike, strict=True) if not equal}
    for rows, (prompt, _) in zip(pair.rows, pair.names, strict=True):
        groups.setdefault(prompt, []).append(rows)
    compared, largest, where, scale = 0, 0.0, "", 0.0
    for prompt, rows in groups.items():
        # Groups whose samples scored alike are the inputs that agree. With a KL penalty or a critic there are others.
        if prompt in parted:
            continue
        compared += 1
        for i, j in rows:
            mask = pair.batches[0].tensors["response_mask"][i] != 0
            x = pair.batches[0].tensors["advantages"][i].astype(np.float64)[mask]
            y = pair.batches[1].tensors["advantages"][j].astype(np.float64)[mask]
            scale = max(scale, float(np.abs(x).max(initial=0.0)))
            difference = float(np.abs(y - x).max(initial=0.0))
            if not difference <= largest:
                largest, where = difference, prompt
    if not compared:
        yield _unjudged(step, "advantage", "no group has equal responses in both runs")
        return
    dtype = pair.batches[0].tensors["advantages"].dtype
    length = max(len(rows) for rows in groups.values())
    # mean, deviation, quotient: sums over the group, one rounding for each term and each of the three
    bound = FACTOR * (length + 3) * float(np.finfo(dtype).eps) / 2 * max(scale, 1.0)
    measure = Measure(
        name="advantage of equal groups, largest difference", value=largest, bound=bound,
        origin=f"{FACTOR:g} × (n + 3)·u of {dtype} over groups of {length}",
    )  # fmt: skip
    if measure.within:
        yield _passed(step, "advantage", f"{compared} groups with equal scores have equal advantages", (measure,))
    else:
        text = f"equal scores give other advantages, most in the group of prompt {where}"
        yield _failed(step, "advantage", text, "advantages", state, (measure,))


def _judge_update(a: RunData, b: RunData, repeats: Sequence[RunData], step: int, pair: SamplePairs, state: _State):
    if pair.equal_tokens != len(pair.rows) or not state.same_samples:
        yield _unjudged(step, "update_actor", "the runs trained on other tokens")
        return
    yield from _judge_metrics(a, b, repeats, step, "update_actor", state)


# --- metrics ---------------------------------------------------------------------------------------------------------


def _compare_metrics(a: RunData, b: RunData, repeats: Sequence[RunData], step: int, state: _State):
    yield from _judge_gap_metrics(a, b, step, state)
    yield from _judge_texts(a, b, step, state)
    for stage in METRICS_OF:
        yield from _judge_metrics(a, b, repeats, step, stage, state)


def _judge_gap_metrics(a: RunData, b: RunData, step: int, state: _State):
    for name, unit in GAPS:
        if name in a.metrics[step] and name in b.metrics[step]:
            ours, theirs = a.metrics[step][name], b.metrics[step][name]
            measure = Measure(
                name=name, value=theirs, bound=FACTOR * max(ours, float(np.finfo(np.float32).eps)), unit=unit,
                origin=f"{FACTOR:g} × the same of the first run",
            )  # fmt: skip
            if measure.within:
                yield _passed(step, "weight_sync", "engine and trainer agree as they do in the first run", (measure,))
            else:
                moment = "the first synchronisation" if step == 1 else f"the synchronisation after step {step - 1}"
                text = f"the inference engine computes with other weights than the trainer: {moment}"
                yield _failed(step, "weight_sync", text, name, state, (measure,))
            return


def _judge_texts(a: RunData, b: RunData, step: int, state: _State):
    """verl's dump without batches: decoded text and scores."""
    rows_a, rows_b = a.texts.get(step), b.texts.get(step)
    if not rows_a or not rows_b:
        return
    inputs = [sorted(str(row["input"]) for row in rows) for rows in (rows_a, rows_b)]
    if inputs[0] != inputs[1]:
        yield _failed(step, "data", "the runs answered other prompts", "prompts", state)
        return
    answers = [sorted((str(row["input"]), str(row["output"])) for row in rows) for rows in (rows_a, rows_b)]
    other = len(rows_a) - sum((Counter(answers[0]) & Counter(answers[1])).values())
    shown = Measure(name="responses with other text", value=float(other), unit=f"of {len(rows_a)}")
    if other:
        why = _equal_draws(a, b) or "from equal draws"
        text = f"{other} of {len(rows_a)} responses have other text, {why}; text alone says not how likely that is"
        yield _unjudged(step, "rollout", text + _configured(state), (shown,))
    else:
        yield _passed(step, "rollout", f"all {len(rows_a)} responses have equal text", (shown,))
    scored: list[dict[tuple[str, str], float]] = [
        {(str(row["input"]), str(row["output"])): float(row["score"]) for row in rows} for rows in (rows_a, rows_b)
    ]
    both = scored[0].keys() & scored[1].keys()
    if not both:
        yield _unjudged(step, "reward", "no response has equal text in both runs")
        return
    wrong = sorted(key for key in both if scored[0][key] != scored[1][key])
    measure = Measure(
        name="equal responses with another score", value=float(len(wrong)), bound=0.0, unit=f"of {len(both)}",
        origin="exact: a score is a function of the text (and of its length in tokens)",
    )  # fmt: skip
    if wrong:
        text = f"{wrong[0][1]!r} scores {scored[0][wrong[0]]:g} and {scored[1][wrong[0]]:g}"
        yield _failed(step, "reward", text, "score", state, (measure,))
    else:
        yield _passed(step, "reward", f"{len(both)} equal responses have equal scores", (measure,))


def _judge_metrics(a: RunData, b: RunData, repeats: Sequence[RunData], step: int, stage: str, state: _State):
    names = [n for n in _metrics_of(stage, a) if n in a.metrics[step] and n in b.metrics[step]]
    if not names:
        return
    measures, open_ends = [], []
    for name in names:
        x, y = a.metrics[step][name], b.metrics[step][name]
        spread = [abs(r.metrics[step][name] - x) for r in repeats if name in r.metrics.get(step, {})]
        if x == y or name in EXACT:
            measures.append(Measure(name=name, value=abs(y - x), bound=0.0, origin="exact"))
        elif spread and max(spread) > 0.0:
            origin = f"{FACTOR:g} × spread of {len(spread)} repeats of the first run"
            measures.append(Measure(name=name, value=abs(y - x), bound=FACTOR * max(spread), origin=origin))
        elif spread or _repeats_exactly(a, b):
            origin = "exact: repeats of the first run are equal to the bit" if spread else "exact: deterministic runs"
            measures.append(Measure(name=name, value=abs(y - x), bound=0.0, origin=origin))
        else:
            measures.append(Measure(name=name, value=abs(y - x), origin=f"{x:.6g} and {y:.6g}; nothing to judge by"))
            open_ends.append(name)
    outside = [m for m in measures if not m.within]
    if outside:
        name = outside[0].name
        text = f"{name} is {a.metrics[step][name]:.6g} and {b.metrics[step][name]:.6g}"
        yield _failed(step, stage, text, name, state, tuple(measures))
    elif open_ends:
        text = f"{', '.join(open_ends)} differ; repeats of the first run (--repeat) would tell by how much they may"
        yield _unjudged(step, stage, text + _configured(state), tuple(measures))
    else:
        yield _passed(step, stage, f"{', '.join(names)} agree", tuple(measures))


# --- bounds ----------------------------------------------------------------------------------------------------------


def _against_gap(name: str, values: np.ndarray, gap: np.ndarray, *, floor: float = 0.0) -> tuple[Measure, Measure]:
    """Mean and largest of ``values`` against the same of a's gap."""
    origin = f"{FACTOR:g} × engine against trainer in the first run"
    tiny = max(floor, float(np.finfo(np.float32).eps))
    return tuple(
        Measure(
            name=f"{name}, {label}",
            value=float(of(values)) if len(values) else 0.0,
            bound=FACTOR * max(float(of(gap)) if len(gap) else 0.0, tiny),
            unit="nats",
            origin=origin,
        )
        for label, of in (("mean", np.mean), ("largest", np.max))
    )


def _floor(pair: SamplePairs) -> float:
    """One rounding of the largest log-prob, in the dtype it is recorded in."""
    values = pair.batches[0].tensors.get("old_log_probs", pair.batches[0].tensors.get("rollout_log_probs"))
    if values is None or not np.isfinite(values).all():
        return 0.0
    return float(np.abs(values).max(initial=0.0)) * float(np.finfo(values.dtype).eps)


def _poisson_quantile(mean: float, probability: float) -> int:
    """The smallest k with P(N ≤ k) ≥ ``probability`` for a Poisson N of this mean."""
    term = total = math.exp(-mean)
    k = 0
    while total < probability and k < 1_000_000:
        k += 1
        term *= mean / k
        total += term
    return k


def _equal_draws(a: RunData, b: RunData) -> str:
    """Why the two runs do not draw with the same seeds, sample by sample; empty where they do."""
    if a.engine != b.engine:
        return "the runs draw by different rules"
    if a.engine == "alignment":
        return "" if a.config.get("trainer.seed") == b.config.get("trainer.seed") else "the runs have different seeds"
    from alignment.rl.verl_sampling import NAME

    agent = "actor_rollout_ref.rollout.agent.default_agent_loop"
    if not a.config.get(agent) == b.config.get(agent) == NAME:
        return "draws are not seeded per sample"
    same = all(a.config.get(key) == b.config.get(key) for key in ("actor_rollout_ref.rollout.seed", "trainer.use_v1"))
    return "" if same else "the runs have different seeds"


def _repeats_exactly(a: RunData, b: RunData) -> bool:
    """Whether a difference needs no noise to be one: deterministic runs of ours on one device that add up the same
    numbers in the same order."""
    keys = filter(ADDED_UP.search, a.config.keys() | b.config.keys())
    if a.world_size != b.world_size or any(a.config.get(key) != b.config.get(key) for key in keys):
        return False
    return a.engine == b.engine == "alignment" and a.device == b.device and all(
        run.config.get("trainer.deterministic", False) is True
        and str(run.config.get("engine.rollout", "golden")) == "golden"
        and run.config.get("trainer.seed") == a.config.get("trainer.seed")
        for run in (a, b)
    )  # fmt: skip


# --- wording ---------------------------------------------------------------------------------------------------------


def _passed(step: int, stage: str, reason: str, measures: tuple[Measure, ...] = ()) -> StageVerdict:
    return StageVerdict(step=step, stage=stage, outcome=Outcome.PASS, reason=reason, measures=measures)


def _unjudged(step: int, stage: str, reason: str, measures: tuple[Measure, ...] = ()) -> StageVerdict:
    return StageVerdict(step=step, stage=stage, outcome=Outcome.INCONCLUSIVE, reason=reason, measures=measures)


def _failed(
    step: int, stage: str, reason: str, quantity: str, state: _State, measures: tuple[Measure, ...] = ()
) -> StageVerdict:
    shown = _configured(state)
    return StageVerdict(
        step=step,
        stage=stage,
        outcome=Outcome.FAIL,
        reason=reason + shown,
        measures=measures,
        where=Divergence(stage=stage, module=f"step {step}", quantity=quantity, detail=reason),
    )


def _metrics_of(stage: str, run: RunData) -> tuple[str, ...]:
    if run.engine == "verl":
        return METRICS_OF[stage]
    return {"old_log_prob": (), "update_actor": (*METRICS_OF["update_actor"], "actor/entropy")}.get(
        stage, METRICS_OF[stage]
    )


def _configured(state: _State) -> str:
    said = [f"{key} {old} → {new}" for key, (old, new) in state.config.items()]
    return "; the configurations differ in " + ", ".join(said[:6]) if said else ""


def _parted(step: int, left: int) -> str:
    return f"the runs trained on other tokens at step {step}: their weights differ with reason in the last {left} steps"
