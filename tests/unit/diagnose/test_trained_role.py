"""The batch that a distillation's student is trained on where its teachers are replicas."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from alignment.diagnose import trained_role
from alignment.diagnose.trained_role import Student
from alignment.models.config import preset
from alignment.rl.distill_loss import active_positions
from alignment.rl.gkd_config import GkdConfig, TeacherKind
from alignment.rl.gkd_stages import TABLES

ROWS = 4


def drawn(topk: int, vocabulary: int):
    """The batch's log-probs, tokens and active positions."""
    tree = {
        "data": {"max_prompt_length": 8, "max_response_length": 8, "train_batch_size": ROWS},
        "gkd": {"teacher_model": "t", "lmbda": 1.0, "teacher_replicas": 1, "gkd_logits_topk": topk},
        "trainer": {"n_gpus_per_node": 2},
    }
    config = GkdConfig.from_dict(tree)
    assert config.teacher_kind is TeacherKind.REPLICAS
    model = dataclasses.replace(preset("tiny-moonlight"), vocab_size=vocabulary)
    batch = Student().draw(config, model, rows=ROWS)
    return batch[TABLES[0]], batch[TABLES[1]], active_positions(batch["labels"])


@pytest.mark.parametrize(("topk", "vocabulary"), [(1, 12), (5, 12), (12, 12), (20, 12), (64, 1000), (7, 997)])
def test_tables_are_a_distribution_over_tokens_that_differ(topk, vocabulary):
    values, tokens, active = drawn(topk, vocabulary)
    k = min(topk, vocabulary)
    assert values.shape == tokens.shape == (*active.shape, k) and values.dtype == torch.float32
    assert torch.equal(torch.isfinite(values).all(-1), active)
    assert 0 <= tokens.min() and tokens.max() < vocabulary
    assert (tokens.sort(dim=-1).values.diff(dim=-1) > 0).all()
    assert (values[active].diff(dim=-1) <= 0).all()
    said = values[active].double().exp().sum(-1)
    # Each of k terms, and their log-probs of a size of at most 2⁴, are rounded to float32.
    rounded = 2**4 * k * torch.finfo(torch.float32).eps
    assert ((said - 1).abs() <= rounded).all() if k == vocabulary else (said < 1 - rounded).all()


def test_no_more_is_drawn_of_a_large_vocabulary_than_is_kept(monkeypatch):
    sizes, draw = [], trained_role.portable_normal

    def counted(shape, **how):
        sizes.append(tuple(shape))
        return draw(shape, **how)

    monkeypatch.setattr(trained_role, "portable_normal", counted)
    shapes = []
    for vocabulary in (1000, 2000):
        sizes.clear()
        values, _, _ = drawn(5, vocabulary)
        shapes.append(list(sizes))
    assert shapes[0] == shapes[1] == [(*values.shape[:2], values.shape[2] + 1)]
