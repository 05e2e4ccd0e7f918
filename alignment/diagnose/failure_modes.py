"""The failure modes people know by name, each found in what a run recorded.

None of them needs a second run, so they are asked first and explain what the axes find.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from alignment.diagnose.run_stages import RunData
from alignment.rl.batch_record import BatchRecord

SPIKE = 10.0
"""A step is a spike where a metric exceeds the median of the window before it by this many scaled median deviations.

The deviation is an estimate itself, so the rate is one of the window: simulated for independent normal values
(4 million windows), 2.5e-6 per step with 20 values, and 2.8e-4 with 10, which is why no window is shorter than 20.
"""

WINDOW = LEAST = 20
_MAD = 1.4826
BUBBLE = 1 / 3
"""Share of a pipeline's time that its ramps take, (p − 1) / (m + p − 1), from which more micro batches are advised: two
stages with two micro batches have that much, and more stages with as many have more."""

IMBALANCE = 1.25
"""Most tokens of a rank over the mean: the others wait for a fifth of the step."""

PEAK = 2.0
"""Most tokens of a sample over what a micro batch was planned for."""


_ACTOR = "actor_rollout_ref.actor."


@dataclass(frozen=True, kw_only=True)
class FailureMode:
    """A failure mode by its name, where it shows, and what shows it."""

    name: str
    step: int
    evidence: str


def find_failure_modes(run: RunData) -> list[FailureMode]:
    """Every mode the records show, each at its first step, in the order of a step."""
    found: dict[str, FailureMode] = {}
    for step in run.recorded:
        for mode in _of_batch(run, run.batch(step), step):
            found.setdefault(mode.name, mode)
    for mode in (*_spikes(run), *_imbalance(run), *_bubble(run)):
        found.setdefault(mode.name, mode)
    return list(found.values())


def _of_batch(run: RunData, batch: BatchRecord, step: int) -> Iterator[FailureMode]:
    tensors = batch.tensors
    shapes = {name: tensors[name].shape for name in _PER_TOKEN if name in tensors}
    if len(set(shapes.values())) > 1:
        text = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        yield FailureMode(name="shape mismatch", step=step, evidence=text)
        return
    # Between two turns of a conversation there is what a user said, which does not count.
    if not run.config.get("gkd.multi_turn_scheduler"):
        yield from _mask(batch, step)
    yield from _alignment(batch, step)
    yield from _ranks(run, batch, step)
    yield from _memory(run, batch, step)


_PER_TOKEN = (
    "responses", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "token_level_scores",
    "token_level_rewards", "advantages", "returns",
)  # fmt: skip


def _mask(batch: BatchRecord, step: int) -> Iterator[FailureMode]:
    """A single-turn mask is ones up to the end and zeros after it, and covers every token that has a log-prob."""
    mask = batch.tensors["response_mask"] != 0
    holes = np.flatnonzero((np.diff(mask.astype(np.int8), axis=1) > 0).any(1) | ~mask.any(1) | ~mask[:, 0])
    if len(holes):
        row = int(holes[0])
        yield FailureMode(
            name="wrong response mask",
            step=step,
            evidence=f"sample {row} of prompt {batch.prompt_ids[row]}: {''.join('01'[int(m)] for m in mask[row][:40])}",
        )
        return
    scores = batch.tensors.get("token_level_scores")
    if scores is not None:
        outside = np.argwhere((scores != 0) & ~mask)
        last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
        early = np.argwhere((scores != 0) & (np.arange(mask.shape[1])[None] != last[:, None]))
        if len(outside) or len(early):
            row, position = (outside if len(outside) else early)[0]
            yield FailureMode(
                name="wrong response mask",
                step=step,
                evidence=f"sample {row}: the score is on token {position}, the mask ends at {int(last[row])}",
            )


def _alignment(batch: BatchRecord, step: int) -> Iterator[FailureMode]:
    """Log-probs that fit the engine's better when moved by one token are those of other tokens."""
    mask = batch.tensors["response_mask"] != 0
    reference = batch.tensors.get("rollout_log_probs", batch.tensors.get("old_log_probs"))
    if reference is None:
        return
    for name in ("old_log_probs", "ref_log_prob"):
        values = batch.tensors.get(name)
        if values is None or values is reference:
            continue
        in_place = _correlation(values, reference, mask)
        for shift in (-1, 1):
            moved = _correlation(*_shifted(values, reference, mask, shift))
            if moved > in_place and moved**2 > 0.5 and in_place**2 < 0.5:
                yield FailureMode(
                    name="actor/reference misalignment",
                    step=step,
                    evidence=f"{name} follows the sampled tokens by {shift:+d}: correlation {in_place:.2f} in place, "
                    f"{moved:.2f} moved",
                )
                return


def _shifted(values: np.ndarray, reference: np.ndarray, mask: np.ndarray, shift: int):
    if shift > 0:
        return values[:, shift:], reference[:, :-shift], mask[:, shift:]
    return values[:, :shift], reference[:, -shift:], mask[:, -shift:]


def _correlation(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> float:
    a, b = x[mask].astype(np.float64), y[mask].astype(np.float64)
    if len(a) < 3 or not (np.isfinite(a).all() and np.isfinite(b).all()) or a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def data_parallel(run: RunData) -> int:
    """Ranks among which the rows of a batch are shared out.

    In verl the ranks that hold parts of one model work on the same rows: the world over TP · PP · CP (Megatron) or over
    the Ulysses size (FSDP). In runs of this project every rank has rows of its own
    (:class:`~alignment.rl.config.MegatronConfig`).
    """
    return max(1, run.world_size // _model_parallel(run)) if run.engine == "verl" else run.world_size


def _model_parallel(run: RunData) -> int:
    """Ranks that hold one model together and compute the same rows."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    keys = [f"megatron.{name}" for name in names] if _megatron(run) else ["ulysses_sequence_parallel_size"]
    return math.prod(int(run.config.get(_ACTOR + key) or 1) for key in keys)


def _megatron(run: RunData) -> bool:
    return str(run.config.get("engine.train") or run.config.get(f"{_ACTOR}strategy") or "megatron") == "megatron"


def _ranks(run: RunData, batch: BatchRecord, step: int) -> Iterator[FailureMode]:
    """Tokens per rank of a run that did not record them, under the sharing its configuration asks for: whole
    consecutive shares without balancing. Ranks of this project that hold one model compute the rows of all of them.
    """
    ranks = data_parallel(run)
    shared = run.engine != "verl" and _model_parallel(run) > 1
    if run.workloads or shared or ranks < 2 or len(batch) % ranks or run.config.get("trainer.balance_batch"):
        return
    yield from _uneven(run, _tokens(batch).reshape(ranks, -1).sum(1), step)


def _imbalance(run: RunData) -> Iterator[FailureMode]:
    """Tokens that the updates really gave each rank; of verl what it logs where it balances (``global_seqlen/…``)."""
    for step, by_rank in _updates(run):
        yield from _uneven(run, np.array([rank["tokens"] for rank in by_rank]), step)
    for step in sorted(run.metrics):
        most, mean = (run.metrics[step].get(f"global_seqlen/{name}") for name in ("balanced_max", "mean"))
        if most is not None and mean is not None and most > IMBALANCE * mean:
            yield _imbalanced("a rank", most, mean, step, balanced=True)


def _uneven(run: RunData, tokens: np.ndarray, step: int) -> Iterator[FailureMode]:
    most, mean = int(tokens.max()), float(tokens.mean())
    if most > IMBALANCE * mean:
        balanced = bool(run.config.get("trainer.balance_batch"))
        yield _imbalanced(f"rank {int(tokens.argmax())}", most, mean, step, balanced=balanced)


def _imbalanced(rank: str, most: float, mean: float, step: int, *, balanced: bool) -> FailureMode:
    hint = (
        "trainer.balance_batch is on: a few long samples outweigh the others"
        if balanced
        else "trainer.balance_batch=true shares them out by length"
    )
    text = f"{rank} has {most:.0f} tokens, the mean is {mean:.0f}; {hint}"
    return FailureMode(name="rank token imbalance", step=step, evidence=text)


def _updates(run: RunData) -> Iterator[tuple[int, Sequence[Mapping[str, int]]]]:
    """Step and what each rank had to compute, of every update of a run that recorded it."""
    for step in sorted(run.workloads):
        for updates in run.workloads[step].values():
            yield from ((step, by_rank) for by_rank in updates)


def _memory(run: RunData, batch: BatchRecord, step: int) -> Iterator[FailureMode]:
    """Dynamic batching promises a token budget; responses that all run to the limit fill it in every micro batch."""
    config = run.config
    budget = config.get("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    if not (config.get("actor_rollout_ref.actor.use_dynamic_bsz") and budget):
        return
    tokens, limit = _tokens(batch), int(config.get("data.max_response_length") or 0)
    lengths = (batch.tensors["response_mask"] != 0).sum(1)
    clipped = float((lengths >= limit).mean()) if limit else 0.0
    if clipped > 0.5 and tokens.mean() * len(tokens) > PEAK * int(budget):
        yield FailureMode(
            name="dynamic-batch memory peak",
            step=step,
            evidence=f"{clipped:.0%} of the responses run to the limit of {limit} tokens, so every micro batch "
            f"holds its {budget} tokens: logits of [{budget}, vocabulary] in float32",
        )


def _tokens(batch: BatchRecord) -> np.ndarray:
    return (batch.tensors["prompt_mask"] != 0).sum(1) + (batch.tensors["response_mask"] != 0).sum(1)


def _spikes(run: RunData) -> Iterator[FailureMode]:
    for name, metrics in (
        ("KL spike", ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty")),
        ("grad-norm spike", ("actor/grad_norm",)),
    ):
        for metric in metrics:
            series = [(step, run.metrics[step][metric]) for step in sorted(run.metrics) if metric in run.metrics[step]]
            for place in range(LEAST, len(series)):
                before = np.array([value for _, value in series[max(0, place - WINDOW) : place]])
                step, value = series[place]
                middle = float(np.median(before))
                spread = _MAD * float(np.median(np.abs(before - middle)))
                # Heavy tails have a small median deviation: a spike stands out of the window by more than its range.
                outside = value - float(before.max()) > float(np.ptp(before))
                if spread > 0 and value - middle > SPIKE * spread and outside:
                    text = f"{metric} {value:.4g}, {middle:.4g} ± {spread:.2g} over the {len(before)} steps before"
                    yield FailureMode(name=name, step=step, evidence=text)
                    break
    for step, metric in sorted(run.not_finite):
        if "grad_norm" in metric or "kl" in metric:
            kind = "grad-norm spike" if "grad_norm" in metric else "KL spike"
            yield FailureMode(name=kind, step=step, evidence=f"{metric} is not finite")


def _bubble(run: RunData) -> Iterator[FailureMode]:
    """Updates whose ramps, the stages' waiting for the first micro batch and after the last, take too much of them."""
    if not run.workloads:
        yield from _configured_bubble(run)
    for step, (rank, *_) in _updates(run):
        yield from _ramp(rank["pipeline_stages"], rank["pipeline_chunks"], rank["micro_batches"], step)


def _ramp(stages: int, chunks: int, count: int, step: int) -> Iterator[FailureMode]:
    ramp = (stages - 1) / chunks
    share = ramp / (count + ramp) if ramp else 0.0
    if share >= BUBBLE:
        yield FailureMode(
            name="pipeline bubble",
            step=step,
            evidence=f"{stages} stages and {count} micro batches: {share:.0%} of an update is ramp",
        )


def _configured_bubble(run: RunData) -> Iterator[FailureMode]:
    """By the configuration, of a run that did not record its micro batches."""
    config = run.config
    stages = int(config.get(f"{_ACTOR}megatron.pipeline_model_parallel_size") or 1)
    if stages < 2 or not _megatron(run):
        return
    chunks = int(config.get(f"{_ACTOR}megatron.virtual_pipeline_model_parallel_size") or 1)
    samples = int(config.get(f"{_ACTOR}ppo_mini_batch_size") or 0) * int(config.get("actor_rollout_ref.rollout.n") or 1)
    micro = config.get(f"{_ACTOR}ppo_micro_batch_size_per_gpu")
    if not (samples and micro):
        return
    count = math.ceil(samples / data_parallel(run) / int(micro))
    if run.engine != "verl":
        # Ranks that hold one model run the micro batches of all of them through it.
        count *= _model_parallel(run)
    yield from _ramp(stages, chunks, count, min(run.metrics, default=0))
