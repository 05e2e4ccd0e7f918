"""Only the first channels rotate; norms are kept, the others pass through."""

import pytest
import torch

from alignment.errors import InputError
from alignment.models.partial_rope import partial_tables, rotate_partially
from alignment.numerics.random import portable_normal


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_rotation_keeps_norms_and_depends_on_differences_of_positions(interleaved):
    x, y = (portable_normal((1, 1, 1, 8), seed=0, stream=n) for n in ("x", "y"))

    def score(at, to):
        turned = []
        for tensor, position in ((x, at), (y, to)):
            cos, sin = partial_tables(torch.tensor([[position]]), rotary_dim=4, theta=100.0)
            turned.append(rotate_partially(tensor, cos, sin, rotary_dim=4, interleaved=interleaved))
        assert torch.equal(turned[0][..., 4:], x[..., 4:])
        torch.testing.assert_close(turned[0].norm(), x.norm())
        return float((turned[0] * turned[1]).sum())

    assert score(3, 7) == pytest.approx(score(103, 107), rel=torch.finfo(torch.float64).eps * 1e3)
    assert abs(score(3, 7) - score(3, 8)) > torch.finfo(torch.float64).eps * 1e3


@pytest.mark.parametrize("rotary_dim", [3, 0, 10])
def test_what_cannot_rotate_is_refused(rotary_dim):
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(InputError, match="only pairs of a head's channels rotate; expected an even number up to 8"):
        rotate_partially(x, torch.ones(1, 1, 1), torch.zeros(1, 1, 1), rotary_dim=rotary_dim, interleaved=True)
