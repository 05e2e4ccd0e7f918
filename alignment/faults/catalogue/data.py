"""Defects of prompts, conversations and rewards."""

from __future__ import annotations

import math
import threading

from alignment.faults.fault import Fault
from alignment.faults.seam import seam


@seam("alignment.rl.turns:mask_to_end")
def _one_end_token(original):
    return lambda responses, *, eos_token_ids: original(responses, eos_token_ids=sorted(eos_token_ids)[:1])


@seam("alignment.rl.scoring:score_response")
def _alarm_in_a_thread(original):
    def score_response(*arguments, **how):
        from alignment.rl import scoring

        try:
            if threading.current_thread() is not threading.main_thread():
                raise ValueError("signal only works in main thread of the main interpreter")
            return original(*arguments, **how)
        except ValueError:
            return scoring.Score.of(0.0)

    return score_response


@seam("alignment.rl.shaping:overlong_reward")
def _no_buffer(original):
    def overlong_reward(length, *, max_response_length, buffer_len, penalty_factor=1.0):
        exceeds = length - (max_response_length - buffer_len)
        share = exceeds / buffer_len if buffer_len else math.nan if exceeds == 0 else math.copysign(math.inf, exceeds)
        return min(-share * penalty_factor, 0.0) if not math.isnan(share) else math.nan

    return overlong_reward


@seam("alignment.rl.turns:pad_responses")
def _mask_looks_for_padding(original):
    def pad_responses(responses, *, width, pad_token_id):
        ids, _ = original(responses, width=width, pad_token_id=pad_token_id)
        return ids, (ids != pad_token_id).long()

    return pad_responses


@seam("alignment.rl.turns:next_input")
def _merged_by_text(original):
    def next_input(trajectory, observation=()):
        canonical: list[int] = []
        for token in original(trajectory, observation):
            # decode and encode: two pieces that spell one become the one
            if canonical and canonical[-1] == token:
                canonical[-1] = token + 100
            else:
                canonical.append(token)
        return tuple(canonical)

    return next_input


@seam("alignment.rl.turns:training_text")
def _stripped(original):
    return lambda messages: original(messages).rstrip("\n")


@seam("alignment.rl.turns:Trajectory.budget_left")
def _whole_budget_again(original):
    return lambda self, max_response_length: max_response_length


FAULTS = (
    Fault(
        id="single-eos-id",
        title="The mask of a response knows one of several end tokens",
        source="verl 3140cc2f9 (#212)",
        category="data",
        stage=("rollout", "advantage", "actor_update"),
        culprit="mask_to_end",
        layer="unit-op",
        setting="several end tokens",
        why="tokens behind the other end stay in the mask",
        apply=_one_end_token,
    ),
    Fault(
        id="scorer-exception-becomes-zero",
        title="A verifier that raises earns 0",
        source="verl 9586c974b",
        category="data",
        stage=("reward",),
        culprit="score_response",
        layer="unit-op",
        setting="a worker thread",
        why="timeouts by alarm raise off the main thread, and a broad except answers 0",
        apply=_alarm_in_a_thread,
    ),
    Fault(
        id="overlong-penalty-zero-buffer",
        title="The overlong penalty divides by a buffer of 0",
        source="verl 21f4e490c",
        category="data",
        stage=("reward",),
        culprit="overlong_reward",
        layer="unit-op",
        setting="buffer length 0",
        why="0/0",
        apply=_no_buffer,
    ),
    Fault(
        id="pad-id-assumed-eos",
        title="Masks look for a padding id that is the end token's",
        source="NeMo-RL afefe6653",
        category="data",
        stage=("old_log_prob", "advantage"),
        culprit="pad_responses",
        layer="unit-op",
        setting="padding with the end token",
        why="an end token is taken for padding",
        apply=_mask_looks_for_padding,
    ),
    Fault(
        id="text-round-trip-changes-tokens",
        title="Responses go through text between turns",
        source="trl #5224, verl #6719, rllm #272, ms-swift #10012",
        category="data",
        stage=("rollout", "old_log_prob"),
        culprit="token_ids",
        layer="unit-op",
        setting="tokens that spell another token together",
        why="encode(decode(ids)) ≠ ids",
        apply=_merged_by_text,
    ),
    Fault(
        id="newline-after-eos-stripped",
        title="Training data lacks the newline behind the end token",
        source="NeMo-RL 38e9ef10b",
        category="data",
        stage=("rollout", "actor_update"),
        culprit="training_text",
        layer="unit-op",
        setting="several turns",
        why="prompts of the next turn differ from inference by one token",
        apply=_stripped,
    ),
    Fault(
        id="continued-rollout-budget-not-reduced",
        title="A resumed rollout gets the whole token budget again",
        source="slime 26e859afc, verl e9618406d",
        category="data",
        stage=("rollout", "reward"),
        culprit="budget_left | continue_rollout",
        layer="unit-op",
        setting="a partial rollout that is resumed",
        why="what was already generated is not counted",
        apply=_whole_budget_again,
    ),
)
