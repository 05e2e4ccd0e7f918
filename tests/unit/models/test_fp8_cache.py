"""Keys in FP8: exact to half a unit of the last place with the right scale, and saturated with an old one."""

import pytest
import torch

from alignment.errors import InputError
from alignment.models.fp8_cache import Fp8KeyValues, push_scales
from alignment.numerics.precision import unit_roundoff
from alignment.numerics.random import portable_normal


def test_an_old_scale_saturates_and_a_new_one_does_not():
    keys = portable_normal((8, 4), seed=0, stream="keys")
    cache = Fp8KeyValues()
    cache.calibrate(keys)
    largest = float(keys.abs().max())
    grown = 3 * keys
    stale = (cache.read(cache.store(grown), torch.float64) - grown).abs().max()
    assert float(stale) > largest
    push_scales({"layer": Fp8KeyValues().calibrate(grown)}, {"layer": cache})
    fresh = (cache.read(cache.store(grown), torch.float64) - grown).abs().max()
    assert float(fresh) <= unit_roundoff("float8_e4m3fn") * 3 * largest


def test_what_is_missing_is_named():
    with pytest.raises(InputError, match="the cache has no scale"):
        Fp8KeyValues().store(torch.ones(1))
    with pytest.raises(InputError, match="layer.7: the update has no scale for a layer"):
        push_scales({}, {"layer.7": Fp8KeyValues()})
    assert float(Fp8KeyValues().calibrate(torch.zeros(3))) == 1.0
