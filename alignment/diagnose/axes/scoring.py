"""Axis 6: prompts, extraction and scores, on the same recorded responses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alignment.diagnose.axes import AXES, AxisReport, Finding, report
from alignment.diagnose.axes.data import next_data
from alignment.diagnose.axes.prompt_parts import RECIPE, first_difference
from alignment.diagnose.run_stages import RunData, StageVerdict
from alignment.diagnose.sample_pairs import SamplePairs
from alignment.errors import InputError
from alignment.numerics.verdict import Outcome
from alignment.rl.batch_record import BatchRecord
from alignment.rl.config import TrainConfig, unflatten

AXIS = AXES[5]
SHOWN = 3
LISTED = 20
"""Responses with two scores that are listed one by one."""
_ROUNDOFF = float(np.finfo(np.float32).eps) / 2


def check(dut: RunData, baseline: RunData, stages: Sequence[StageVerdict]) -> AxisReport:
    """What is asked around equal questions, and responses that are scored differently: by the two runs, and by this
    package's scorer where it can be asked.
    """
    findings: list[Finding] = []
    listed: list[str] = []
    judged = [stage for stage in stages if stage.stage == "reward" and stage.outcome is not Outcome.INCONCLUSIVE]
    parted = next((stage for stage in judged if stage.outcome is Outcome.FAIL), None)
    if parted is not None:
        findings.append(
            Finding(axis=AXIS, cause="one text, two scores", evidence=f"step {parted.step}: {parted.reason}", weight=4)
        )
        listed = scored_differently(dut, baseline, parted.step)
    asked = first_difference(dut, baseline)
    if asked is not None and asked.part in RECIPE:
        findings.append(
            Finding(
                axis=AXIS,
                cause=f"{asked.part} of the prompts",
                evidence=asked.evidence,
                weight=5,
                next_command=next_data(dut, baseline),
            )
        )
    compared = [f"equal responses have equal scores in {len(judged)} steps"] if judged else []
    for run, whose in ((dut, "the run"), (baseline, "the baseline")):
        told = rescored(run)
        if told:
            evidence = f"{len(told)} responses of {whose}: {'; '.join(told[:SHOWN])}"
            findings.append(Finding(axis=AXIS, cause="scores that the scorer does not give", evidence=evidence))
        elif told is not None:
            compared.append(f"every recorded score of {whose} is the scorer's")
    return report(
        AXIS,
        findings,
        compared="; ".join(compared),
        unseen="" if compared else "no scored responses of both runs",
        remarks=listed,
        next_command=f"alignment compare {baseline.directory} {dut.directory}" if findings else "",
    )


def scored_differently(dut: RunData, baseline: RunData, step: int) -> list[str]:
    """Responses of a step that are equal in both runs and have two scores, with both, the first :data:`LISTED`."""
    batches = [run.batch(step) for run in (baseline, dut)]
    found: list[str] = []
    if None not in batches:
        pair = SamplePairs(*batches)
        scores = [batch.tensors["token_level_scores"].astype(np.float64).sum(1) for batch in batches]
        for place in np.flatnonzero(pair.same).tolist():
            (i, j), (prompt, sample) = pair.rows[place], pair.names[place]
            if scores[0][i] != scores[1][j]:
                found.append(f"prompt {prompt}, sample {sample}: {scores[0][i]:g} → {scores[1][j]:g}")
    else:
        theirs, ours = (
            {(str(row["input"]), str(row["output"])): float(row["score"]) for row in run.texts.get(step, ())}
            for run in (baseline, dut)
        )
        for prompt, text in sorted(theirs.keys() & ours.keys()):
            if theirs[prompt, text] != ours[prompt, text]:
                found.append(f"{text!r}: {theirs[prompt, text]:g} → {ours[prompt, text]:g}")
    more = [f"and {len(found) - LISTED} more"] if len(found) > LISTED else []
    return found[:LISTED] + more


def rescored(run: RunData) -> list[str] | None:
    """The recorded responses whose score today's scorer does not give, with both; None where it cannot be asked.

    The overlong penalty is added where the configuration has one; it is a function of the length alone.
    """
    if run.engine != "alignment" or not run.recorded:
        return None
    from alignment.rl.run import load_prompts
    from alignment.rl.scoring import score_responses
    from alignment.rl.tokenizer import Tokenizer

    try:
        config = TrainConfig.from_dict(unflatten(run.config))
        tokenizer = Tokenizer(config.actor_rollout_ref.model.path)
        prompts = {prompt.prompt_id: prompt for prompt in load_prompts(config, tokenizer)}
    except InputError:
        return None
    wrong = []
    for step in run.recorded:
        batch = run.batch(step)
        if not set(batch.prompt_ids) <= prompts.keys() or "token_level_scores" not in batch.tensors:
            return None
        asked = [prompts[name] for name in batch.prompt_ids]
        texts = [tokenizer.decode_response(_response(batch, row)) for row in range(len(batch))]
        scores = score_responses(
            [p.data_source for p in asked],
            texts,
            [p.ground_truth for p in asked],
            metadata=[p.metadata or None for p in asked],
        )
        for row, score in enumerate(scores):
            recorded = float(batch.tensors["token_level_scores"][row].sum())
            expected = score.score + _penalty(config, len(_response(batch, row)))
            if _off(recorded, expected):
                wrong.append(f"step {step}, {batch.prompt_ids[row]}: {texts[row]!r} has {recorded:g}, not {expected:g}")
    return wrong


def _off(recorded: float, expected: float) -> bool:
    """Whether the two differ by more than a score and a penalty, each rounded to float32 when they are recorded, and
    their sum; NaN agrees with nothing."""
    return not abs(recorded - expected) <= 3 * _ROUNDOFF * max(1.0, abs(expected))


def _response(batch: BatchRecord, row: int) -> list[int]:
    return batch.tensors["responses"][row][batch.tensors["response_mask"][row] != 0].tolist()


def _penalty(config: TrainConfig, length: int) -> float:
    from alignment.rl.shaping import overlong_reward

    buffer = config.reward_model.overlong_buffer
    if not buffer.enable:
        return 0.0
    return overlong_reward(
        length,
        max_response_length=config.data.max_response_length,
        buffer_len=buffer.len,
        penalty_factor=buffer.penalty_factor,
    )
