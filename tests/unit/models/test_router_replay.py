"""Routing replayed by decoder layer; records of other models are refused."""

import pytest
import torch

from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.models.router_replay import record_routing, replay_routing, routers


@pytest.fixture(scope="module")
def models():
    config = preset("tiny-moonlight")
    return [CausalLM(config, dtype=torch.float64).init_weights(seed) for seed in (0, 1)]


@torch.no_grad()
def test_the_own_record_changes_nothing_and_another_one_does(models):
    ids = torch.arange(3, 15)[None]
    mine, other = models
    plain = mine(ids)
    with record_routing(mine) as own:
        mine(ids)
    with record_routing(other) as foreign:
        other(ids)
    assert own[0] is None and [index for index, _ in routers(mine)] == [1, 2, 3]
    with replay_routing(mine, own):
        assert torch.equal(mine(ids), plain)
    with replay_routing(mine, foreign):
        assert not torch.equal(mine(ids), plain)
    assert torch.equal(mine(ids), plain), "the replay is still on"


def test_a_record_that_does_not_fit_is_refused(models):
    with pytest.raises(InputError, match="the record is of another model; expected 4 layers; found 3"):
        with replay_routing(models[0], [None] * 3):
            pass
    with pytest.raises(InputError, match="model.layers.1.mlp.gate: the record has no experts for a layer that routes"):
        with replay_routing(models[0], [None] * 4):
            pass
