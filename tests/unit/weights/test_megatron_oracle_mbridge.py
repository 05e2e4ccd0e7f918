"""Names and layouts against mbridge's DeepSeek-V3 bridge, for every parameter and tensor parallel size."""

from __future__ import annotations

import types

import pytest
import torch

from alignment.errors import UnavailableError
from alignment.models.config import preset
from alignment.weights.checkpoint import expected_shapes
from alignment.weights.megatron_layout import shard, unshard
from alignment.weights.megatron_names import Naming, Split, megatron_parameters

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def bridge():
    """The bridge's conversion alone, without ranks or a model."""
    from alignment.backends.megatron_cpu import on_cpu
    from alignment.backends.megatron_model import installed_version

    try:
        installed_version()
    except UnavailableError as missing:
        pytest.skip(str(missing))
    with on_cpu():
        pytest.importorskip("mbridge", reason="mbridge is not installed")
        from mbridge.models.deepseek_v3 import DeepseekV3Bridge

        bridge = DeepseekV3Bridge.__new__(DeepseekV3Bridge)
    bridge.dtype = bridge.make_vocab_size_divisible_by = None
    bridge.config = types.SimpleNamespace(mtp_num_layers=None, num_layers=4, gated_linear_unit=True)
    bridge.hf_config = types.SimpleNamespace(num_nextn_predict_layers=0)
    return bridge


def tensors(config):
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config).items()}


def bridge_name(parameter) -> str:
    """The name under which mbridge knows a parameter: Transformer Engine's, with global numbers."""
    return parameter.local_name(Naming.TRANSFORMER_ENGINE_GROUPED, layer=parameter.layer, expert=parameter.expert)


CASES = [(name, size) for name in ("tiny-moonlight", "tiny-deepseek") for size in (1, 2, 4)]


@pytest.mark.parametrize("name", ["tiny-moonlight", "tiny-deepseek"])
def test_names_are_those_of_mbridge(bridge, name):
    for parameter in megatron_parameters(preset(name)):
        assert tuple(bridge._weight_name_mapping_mcore_to_hf(bridge_name(parameter))) == parameter.hf_names


@pytest.mark.parametrize(("name", "size"), CASES)
def test_parts_are_those_of_mbridge(bridge, name, size):
    config = preset(name)
    state = tensors(config)
    for parameter in megatron_parameters(config):
        sources = [state[n] for n in parameter.hf_names]
        ours = [shard(parameter, sources, rank=rank, size=size) for rank in range(size)]
        whole = bridge._weight_to_mcore_format(bridge_name(parameter), sources)
        theirs = bridge._weight_split_across_tp(bridge_name(parameter), whole, ours[0], size)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), parameter.name


@pytest.mark.parametrize(("name", "size"), CASES)
def test_merging_is_that_of_mbridge(bridge, name, size):
    config = preset(name)
    state = tensors(config)
    bridge.mpu = types.SimpleNamespace(tp_size=size, etp_size=size)
    for parameter in megatron_parameters(config):
        if parameter.split is Split.REPLICATED:
            continue
        parts = [shard(parameter, [state[n] for n in parameter.hf_names], rank=r, size=size) for r in range(size)]
        mark = types.SimpleNamespace(tensor_model_parallel=True, partition_dim=int(parameter.split is Split.COLUMNS))
        merged = bridge._weight_merge_across_tp(bridge_name(parameter), parts, mark)
        names, values = bridge._weight_to_hf_format(bridge_name(parameter), merged)
        ours = dict(unshard(parameter, parts))
        assert list(ours) == list(names)
        assert all(torch.equal(ours[n], v) and torch.equal(v, state[n]) for n, v in zip(names, values))
