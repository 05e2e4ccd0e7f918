"""Faults users lived through, as wrappers around seams; ``--fault tests/e2e/deliberate_faults.py:NAME``."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch


@contextlib.contextmanager
def softmax_scale_of_value_width():
    """The attention kernel rebuilds its scale from the width of a value head (MindSpeed before a25e413e).

    The float64 golden keeps the right scale: it is the subject that is wrong.
    """
    from alignment.models import attention

    right = attention.scaled_dot_product

    def wrong(query, key, value, *, scale, mask):
        expanded = value.shape[1] == query.shape[1]
        if expanded and query.dtype != torch.float64:
            scale = value.shape[-1] ** -0.5
        return right(query, key, value, scale=scale, mask=mask)

    with mock.patch.object(attention, "scaled_dot_product", wrong):
        yield


@contextlib.contextmanager
def stale_absorbed_weights():
    """W_UK and W_UV are computed when the engine starts and never again (verl before PR 4130, on Ascend)."""
    from alignment.backends.golden_rollout import GoldenRollout

    right = GoldenRollout.update_weights

    def wrong(self, stream, *, post_process=True, **arguments):
        return right(self, stream, post_process=False, **arguments)

    with mock.patch.object(GoldenRollout, "update_weights", wrong):
        yield


@contextlib.contextmanager
def prompt_token_in_loss_mask():
    """The update slices its log-probs one token early: the mask covers the last prompt token and misses the last response
    token."""
    from alignment.rl import stages

    right = stages.policy_outputs

    def wrong(model, micro_batch, *, temperature):
        if not torch.is_grad_enabled():
            return right(model, micro_batch, temperature=temperature)
        length = micro_batch["responses"].shape[1]
        early = {name: micro_batch[name][:, :-1] for name in ("input_ids", "attention_mask", "position_ids")}
        early["responses"] = micro_batch["input_ids"][:, -length - 1 : -1]
        return right(model, {**micro_batch, **early}, temperature=temperature)

    with mock.patch.object(stages, "policy_outputs", wrong):
        yield


@contextlib.contextmanager
def updates_that_change_nothing():
    """The optimizer step is lost: every stage is right, and the policy never learns."""
    from alignment.backends.golden_training import GoldenTrainingEngine

    with mock.patch.object(GoldenTrainingEngine, "_step", lambda self, *arguments: None):
        yield
