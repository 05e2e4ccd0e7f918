"""Fused projections by key group, over any number of ranks."""

import pytest
import torch

from alignment.weights.fused_qkv import fuse_qkv, merge_qkv, shard_qkv, split_qkv


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_fused_and_cut_comes_back(ranks):
    groups, width, hidden = 2, 2, 3
    q, k, v = (torch.arange(n * hidden).view(n, hidden) + 100 * i for i, n in enumerate((12, 4, 4)))
    fused = fuse_qkv(q, k, v, groups=groups)
    # The first group: its three query heads, its key head, its value head.
    assert torch.equal(fused[:10], torch.cat([q[:6], k[:2], v[:2]]))
    back = merge_qkv(shard_qkv(fused, ranks=ranks), groups=groups, head_dim=width)
    assert all(torch.equal(a, b) for a, b in zip(back, (q, k, v)))
    wrong = split_qkv(fused, groups=1, head_dim=width)
    assert not torch.equal(wrong[0], q)
