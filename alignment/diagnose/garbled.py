"""Text that is none: found in the responses a run recorded, by the statistics ``alignment rollout`` uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alignment.diagnose.run_stages import RunData
from alignment.errors import InputError
from alignment.numerics.verdict import Outcome, Verdict
from alignment.rl.rollout_only import Sample, check_text, compression_ratio, unreadable


@dataclass(frozen=True, kw_only=True)
class Garbled:
    """The first step whose text is garbled in the run and not in the baseline."""

    step: int
    reason: str


def find_garbled(dut: RunData, baseline: RunData) -> Garbled | None:
    """Where the run's text falls apart and the baseline's, at the same step, does not.

    Reads recorded batches (``trainer.record_batches``), decoded by the tokenizer of ``model.path`` (without one the
    statistics of tokens alone are used), or the text that verl dumps. None also where there is nothing to look at.
    """
    steps = [set(run.recorded) | set(run.texts) for run in (dut, baseline)]
    for step in sorted(steps[0] & steps[1]):
        verdict, reference = _judge(dut, step), _judge(baseline, step)
        if verdict is None or reference is None:
            continue
        if verdict.outcome is Outcome.FAIL and reference.outcome is not Outcome.FAIL:
            return Garbled(step=step, reason=f"step {step}: {verdict.reason}")
    return None


def samples_of(run: RunData, step: int) -> list[Sample]:
    """The recorded responses of a step with their statistics."""
    import math

    batch = run.batch(step)
    if batch is None:
        return _samples_of_text(run, step)
    tokenizer = _tokenizer(run)
    limit = int(run.config.get("data.max_response_length") or batch.tensors["responses"].shape[1])
    surprisal = batch.tensors.get("rollout_log_probs", batch.tensors.get("old_log_probs"))
    vocabulary = tokenizer.vocab_size if tokenizer else max(2, int(batch.tensors["responses"].max()) + 1)
    samples = []
    for row, prompt_id in enumerate(batch.prompt_ids):
        mask = batch.tensors["response_mask"][row] != 0
        if not mask.any():
            continue
        ids = batch.tensors["responses"][row][mask].tolist()
        text = tokenizer.decode_response(ids) if tokenizer else " ".join(map(str, ids))
        samples.append(
            Sample(
                prompt_id=prompt_id,
                prompt="",
                text=text,
                tokens=len(ids),
                ended=len(ids) < limit or bool(tokenizer and ids[-1:] == [tokenizer.eos_token_id]),
                compression_ratio=compression_ratio(text),
                surprisal_ratio=float(-surprisal[row][mask].mean()) / math.log(vocabulary)
                if surprisal is not None
                else 0.0,
                unreadable=unreadable(text),
            )
        )
    return samples


def _samples_of_text(run: RunData, step: int) -> list[Sample]:
    """The text that verl dumped, which has no tokens: how many ran into the limit is among its metrics."""
    rows = run.texts.get(step, ())
    clipped = round(float(run.metrics.get(step, {}).get("response_length/clip_ratio", 0.0)) * len(rows))
    return [
        Sample(
            prompt_id=str(row["input"]),
            prompt=str(row["input"]),
            text=str(row["output"]),
            tokens=len(str(row["output"]).split()),
            ended=number >= clipped,
            compression_ratio=compression_ratio(str(row["output"])),
            surprisal_ratio=0.0,
            unreadable=unreadable(str(row["output"])),
        )
        for number, row in enumerate(rows)
    ]


def _judge(run: RunData, step: int) -> Verdict | None:
    samples = samples_of(run, step)
    return check_text(samples, subject=run.engine, device=run.device) if samples else None


def _tokenizer(run: RunData):
    from alignment.rl.tokenizer import Tokenizer

    folder = Path(str(run.config.get("actor_rollout_ref.model.path") or ""))
    try:
        return Tokenizer(folder) if folder.is_dir() else None
    except InputError:
        return None
