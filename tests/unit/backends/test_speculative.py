"""Speculative decoding keeps the target's distribution, exactly."""

import pytest
import torch

from alignment.backends.speculative import accept_token, drafted_first, one_hot, residual, verify


def test_accepted_and_redrawn_together_follow_the_target():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    rounding = 8 * torch.finfo(p.dtype).eps
    for draft in (q, one_hot(1, 3, p.dtype)):
        accepted = torch.minimum(p, draft)
        assert (accepted + (1 - accepted.sum()) * residual(p, draft)).tolist() == pytest.approx(p.tolist(), rel=rounding)
    assert accept_token(p, q, 0, 0.99) and not accept_token(p, q, 1, 0.5)


def test_the_first_rejection_ends_the_draft():
    p = torch.tensor([[0.5, 0.5], [0.1, 0.9], [0.3, 0.7]])
    kept, then = verify([0, 0], p, None, [0.4, 0.2])
    assert kept == [0] and then.tolist() == [0.0, 1.0]
    kept, then = verify([0, 1], p, None, [0.4, 0.2])
    assert kept == [0, 1] and torch.equal(then, p[2])


def test_rows_with_a_draft_come_first_and_keep_their_order():
    assert drafted_first(torch.tensor([False, True, False, True])).tolist() == [1, 3, 0, 2]
