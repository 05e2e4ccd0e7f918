"""megatron-core's decoder layers and small models against the golden; its live defects, each in its place."""

from __future__ import annotations

import pytest
import torch
from megatron_world import VERSION

from alignment.backends.layers import layer_cases
from alignment.baseline.check import check_case
from alignment.baseline.record import ALLOW_DIRTY, record
from alignment.baseline.store import BaselineStore
from alignment.devices.base import get_device
from alignment.numerics.verdict import Outcome

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron_core")]

CASES = {case.id: case for case in layer_cases()}
LAYERS = [name for name in CASES if name.startswith("decoder_layer")]
DEEPSEEK_MOE, DEEPSEEK_DENSE = "decoder_layer.tiny-deepseek-moe-float32", "decoder_layer.tiny-deepseek-dense-float32"
MOONLIGHT_DENSE = "decoder_layer.tiny-moonlight-dense-float32"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Golden values and the noise of plain torch on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALLOW_DIRTY, "1")
        made = BaselineStore(tmp_path_factory.mktemp("baselines"))
        record(CASES.values(), get_device("cpu"), made, subjects=("torch",))
    return made


def verdict(store, name: str, *, without: str | None = None, core_attention: type | None = None):
    from alignment.backends.megatron_layers import MegatronLayers
    from alignment.backends.megatron_model import WAY_ROUNDS, BuildSettings

    settings = BuildSettings(way_rounds=frozenset(WAY_ROUNDS) - {without}, core_attention=core_attention)
    return check_case(CASES[name], MegatronLayers(settings), get_device("cpu"), store)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_golden(store, name):
    found = verdict(store, name)
    assert found.outcome is Outcome.PASS, f"{found.reason} {found.where}"


@pytest.mark.parametrize("name", LAYERS)
def test_observes_every_quantity_of_a_layer(name):
    """Nothing passes by not being looked at."""
    from alignment.backends.megatron_layers import MegatronLayers

    case = CASES[name]
    assert set(MegatronLayers().run(case, case.inputs(), get_device("cpu"))) == set(case.quantity_names)


# --- live defects: with its way-round off each fails, in its place ---------------------------------------------------


@pytest.mark.xfail(strict=True, reason=f"megatron-core {VERSION} ranks groups by topk // group_topk scores")
def test_stock_group_scores_agree(store):
    assert verdict(store, DEEPSEEK_MOE, without="group_score_of_two").outcome is Outcome.PASS


def test_stock_group_scores_are_failed_at_the_choice_of_experts(store):
    found = verdict(store, DEEPSEEK_MOE, without="group_score_of_two")
    assert found.outcome is Outcome.FAIL
    assert (found.where.module, found.where.quantity) == ("layers.1.mlp.gate", "router_selected")


@pytest.mark.xfail(strict=True, reason=f"megatron-core {VERSION} gives the latent norms rms_norm_eps")
def test_stock_latent_norms_agree(store):
    assert verdict(store, MOONLIGHT_DENSE, without="latent_norm_eps").outcome is Outcome.PASS


def test_stock_latent_norms_are_failed_at_the_norm(store):
    found = verdict(store, MOONLIGHT_DENSE, without="latent_norm_eps")
    assert found.outcome is Outcome.FAIL
    assert (found.where.module, found.where.quantity) == ("layers.0.self_attn.kv_a_layernorm", "kv_a_layernorm")


@pytest.mark.xfail(
    VERSION.startswith("0.12."),
    strict=True,
    reason=f"megatron-core {VERSION} scales the softmax by mscale, not mscale_all_dim",
)
def test_stock_softmax_scale_agrees(store):
    assert verdict(store, DEEPSEEK_DENSE, without="softmax_mscale").outcome is Outcome.PASS


def test_stock_softmax_scale_is_failed_at_the_attention(store):
    found = verdict(store, DEEPSEEK_DENSE, without="softmax_mscale")
    if not VERSION.startswith("0.12."):
        assert found.outcome is Outcome.PASS  # mended upstream
        return
    assert found.outcome is Outcome.FAIL
    assert (found.where.module, found.where.quantity) == ("layers.0.self_attn.core", "core")


# --- a planted fault
# ---------------------------------------------------------------------------------------------------


def core_attention_scaled_by_the_value_width():
    """The field's fault in an attention adaptor: 1/√(width of a value head) whatever scale it is told."""
    from alignment.backends.megatron_model import CausalCoreAttention

    class ValueWidthAttention(CausalCoreAttention):
        def __init__(self, config, *args, softmax_scale=None, **others):
            super().__init__(config, *args, softmax_scale=config.v_head_dim**-0.5, **others)

    return ValueWidthAttention


@pytest.mark.parametrize("name", LAYERS)
def test_an_attention_scaled_by_the_value_width_is_failed_at_the_attention(store, name):
    found = verdict(store, name, core_attention=core_attention_scaled_by_the_value_width())
    assert found.outcome is Outcome.FAIL
    assert found.where.quantity == "core" and found.where.module.endswith("self_attn.core")
    assert "query" not in found.where.detail


def test_the_same_attention_with_the_scale_it_is_told_passes(store):
    from alignment.backends.megatron_model import CausalCoreAttention

    class Told(CausalCoreAttention):
        pass

    if VERSION.startswith("0.12."):
        name = MOONLIGHT_DENSE  # plain rope, where the scale it is told is right
    else:
        name = DEEPSEEK_DENSE
    assert verdict(store, name, core_attention=Told).outcome is Outcome.PASS


def test_padding_moves_behind_and_back():
    from alignment.backends.megatron_layers import Front

    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    x = torch.arange(16.0).view(2, 4, 2)
    packed = Front(mask).pack(x)
    assert torch.equal(packed[0, :2], x[0, 2:]) and torch.equal(packed[1, :3], x[1, :3])
    assert torch.equal(Front(mask).unpack(packed), x)
