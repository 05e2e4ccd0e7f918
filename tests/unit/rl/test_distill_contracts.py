"""The rules of the distillation stages: a valid batch passes, every deliberate violation is named."""

from __future__ import annotations

import math

import pytest
import torch
from rl_cases import build_distill_batch

from alignment.errors import InputError
from alignment.rl.contracts import check, check_untouched
from alignment.rl.distill_loss import IGNORED, active_positions

STAGE = "teacher_log_prob"


def edited(name, place, value, *, opsd: bool = False):
    batch = build_distill_batch(opsd=opsd)
    tensor = batch[name].clone()
    tensor[place] = value
    return batch.add({name: tensor})


@pytest.mark.parametrize("opsd", [False, True])
@pytest.mark.parametrize("stage", [STAGE, "update_student"])
def test_a_valid_batch_passes(stage, opsd):
    for moment in ("before", "after"):
        check(stage, build_distill_batch(opsd=opsd), moment=moment)


# Row 0: 2 prompt and 4 response tokens, of 6; row 1: 3 and 2, padded by one.
VIOLATIONS = {
    "a shifted label": ("labels", (0, 2), 7, "labels, sample 0, token 2: a label is not the token that stands there"),
    "a first token that counts": ("labels", (0, 0), 5, "labels, sample 0, token 0: the first token counts, and nothing"),
    "padding that counts": ("labels", (1, 5), 0, "labels, sample 1, token 5: padding counts in the loss; expected -100"),
    "a hole in the mask": ("attention_mask", (0, 2), 0, "attention_mask, sample 0, token 2: the sequence is not right padded"),
    "a wrong position": ("position_ids", (0, 3), 9, "position_ids, sample 0, token 3: a token has the wrong position; expected 3"),
    "a mask with a 2": ("dataset_response", 0, 2, "dataset_response, sample 0: a mask holds 0 and 1 only"),
    "a positive log-prob": ("teacher_token_log_probs", (0, 1), 0.5, "sample 0, token 1: a log-prob is positive"),
    "no number": ("teacher_token_log_probs", (0, 1), math.nan, "sample 0, token 1: a log-prob is not finite"),
    "a value where nothing counts": (
        "teacher_token_log_probs", (0, 0), -1.0, "sample 0, token 0: a position that does not count carries a value",
    ),
    "no number in a table": ("teacher_topk_log_probs", (0, 1, 0), math.nan, "token 1: a table holds what is no log-prob"),
    "more than all": ("teacher_topk_log_probs", (0, 1), 0.0, "token 1: the probabilities of a row add up to more than 1"),
    "an unsorted row": (
        "teacher_topk_log_probs", (0, 1), torch.tensor([-5.0, -4.0, -6.0], dtype=torch.float64), "token 1: a row is not sorted",
    ),
    "a token twice": ("teacher_topk_indices", (0, 1), 3, "teacher_topk_indices, sample 0, token 1: a row names a token twice"),
    "a table where nothing counts": (
        "teacher_topk_log_probs", (0, 0), torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64), "token 0: a position that does not count has a table",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_is_named(name):
    field, place, value, message = VIOLATIONS[name]
    batch = edited(field, place, value)
    stage = "update_student" if field == "dataset_response" else STAGE
    with pytest.raises(InputError, match=message):
        check(stage, batch)


def test_a_table_of_the_next_position_is_found_by_the_token_that_stands_there():
    batch = build_distill_batch(k=23)
    active = active_positions(batch["labels"])
    tables = {}
    for name in ("teacher_topk_log_probs", "teacher_topk_indices"):
        tables[name] = batch[name].clone()
        tables[name][active] = batch[name][active].roll(1, dims=0)
    with pytest.raises(
        InputError, match="the table and the teacher's log-prob disagree about the token that stands there"
    ):
        check(STAGE, batch.add(tables))


def test_views_that_part_are_named_by_sample():
    batch = edited("teacher_labels", (1, 5), IGNORED, opsd=True)
    with pytest.raises(
        InputError, match=r"labels, sample u1#0: teacher and student see different numbers of active tokens"
    ):
        check(STAGE, batch)


def test_open_slots_may_hold_any_id():
    batch = build_distill_batch()
    values, ids = batch["teacher_topk_log_probs"].clone(), batch["teacher_topk_indices"].clone()
    values[0, 1, 1:] = -math.inf
    ids[0, 1, 1:] = int(ids[0, 1, 0])
    check(STAGE, batch.add({"teacher_topk_log_probs": values, "teacher_topk_indices": ids}))


def test_widths_that_disagree():
    batch = build_distill_batch()
    with pytest.raises(
        InputError, match=r"labels: the field has the wrong shape; expected b×s = \[2, 6\]; found \[2, 5\]"
    ):
        check(STAGE, batch.add({"labels": batch["labels"][:, :5]}))


def test_the_teacher_changes_nothing_it_reads():
    batch = build_distill_batch()
    with pytest.raises(
        InputError, match="teacher_log_prob, labels, sample 0: the stage changed a field that it only reads"
    ):
        check_untouched(STAGE, batch, batch.add({"labels": batch["labels"] * 2}))
