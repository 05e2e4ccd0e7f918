"""Every shim for the CPU build of vLLM: what happens without it, and with it."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch

from alignment.backends import vllm_cpu
from alignment.backends.vllm_cpu import local_choice
from alignment.backends.vllm_rollout import installed_version
from alignment.numerics.random import portable_normal

engine = pytest.mark.engine


class LiveDefect(AssertionError):
    """The described defect, with its signature."""


def live_defect(what: str):
    """A strict expected failure, pinned to the release it was found in."""
    version = installed_version() or ""
    return pytest.mark.xfail(
        version.startswith("0.32."), raises=LiveDefect, strict=True, reason=f"vllm {version}: {what}"
    )


@pytest.fixture(scope="module")
def operators():
    """The kernels of the installed build."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    vllm_cpu.apply_settings()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("unavailable: the installed vllm is no CPU build")
    from vllm import _custom_ops

    return _custom_ops


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_fill_in_what_the_user_left_open(monkeypatch):
    for name in vllm_cpu.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    vllm_cpu.apply_settings()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    for name in vllm_cpu.SETTINGS:  # what the call itself set is taken back too
        monkeypatch.delenv(name, raising=False)


def test_the_compiler_is_switched_off_when_it_is_already_imported(monkeypatch):
    config = types.SimpleNamespace(disable=False)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", config)
    for name in vllm_cpu.SETTINGS:
        monkeypatch.setenv(name, "1")
    vllm_cpu.apply_settings()
    assert config.disable is True


def test_set_num_threads_is_given_back_also_after_an_error():
    real = torch.set_num_threads
    with pytest.raises(OSError), vllm_cpu.kept_threads():
        torch.set_num_threads = lambda count: None
        raise OSError
    assert torch.set_num_threads is real


def test_a_choice_of_experts_is_translated_to_the_rank():
    """Rank 1 of 2 holds the experts 2 and 3 of 4 as 0 and 1."""
    ids, weights = torch.tensor([[2, 0], [3, 2]], dtype=torch.int32), torch.tensor([[0.7, 0.3], [0.6, 0.4]])
    local, kept = local_choice(ids, weights, torch.tensor([-1, -1, 0, 1]))
    assert local.dtype == torch.int32 and local.tolist() == [[0, 0], [1, 0]]
    assert torch.equal(kept, torch.tensor([[0.7, 0.0], [0.6, 0.4]]))


# --- linear layers ---------------------------------------------------------------------------------------------------


def linear(dtype: torch.dtype) -> torch.nn.Module:
    layer = torch.nn.Linear(64, 96, bias=False, dtype=dtype).requires_grad_(False)
    layer.weight.data = portable_normal((96, 64), seed=0, stream="linear").to(dtype)
    return layer


def dispatched(layer: torch.nn.Module) -> torch.nn.Module:
    import vllm.model_executor.layers.utils as dispatchers

    dispatchers.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer


@engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_is_read_back_bit_by_bit(operators, dtype):
    layer = linear(dtype)
    weight = layer.weight.detach().clone()
    dispatched(layer)
    assert layer.weight.numel() == 0, "stock, nothing is left to write into or to read"
    assert torch.equal(vllm_cpu.read_packed_linear(layer, rows=96, columns=64, dtype=dtype), weight)


@engine
def test_weights_are_kept_where_asked_and_a_layer_stays_what_it_was_built_as(operators):
    with vllm_cpu.kept_weights(True):
        kept = dispatched(linear(torch.float32))
    assert vllm_cpu.KEEP_WEIGHTS not in os.environ
    assert kept.weight.shape == (96, 64) and kept.cpu_linear is torch.nn.functional.linear
    dispatched(kept)
    assert kept.weight.shape == (96, 64)
    with vllm_cpu.kept_weights(False):
        assert dispatched(linear(torch.float32)).weight.numel() == 0


# --- experts ---------------------------------------------------------------------------------------------------------


@engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 128, 96), (2, 64, 32), (4, 64, 160)])
def test_packed_experts_are_unpacked_bit_by_bit(operators, dtype, shape):
    weight = portable_normal(shape, seed=1, stream="experts").to(dtype)
    packed = operators.cpu_prepack_moe_weight(weight, "vec")
    assert not torch.equal(packed, weight), "the layouts are the same: nothing was shown"
    assert torch.equal(vllm_cpu.unpacked(packed, "vec"), weight)


@engine
def test_a_packing_that_loses_elements_is_refused(operators, monkeypatch):
    from alignment.errors import UnavailableError

    vllm_cpu._packing.cache_clear()
    monkeypatch.setattr(operators, "cpu_prepack_moe_weight", lambda weight, isa: torch.zeros_like(weight))
    with pytest.raises(UnavailableError, match="the packed layout of the experts is no permutation"):
        vllm_cpu.unpacked(torch.zeros(2, 64, 32), "vec")
    vllm_cpu._packing.cache_clear()


def handed_to_kernel(monkeypatch) -> tuple[list, list]:
    """Expert numbers and weights that reach the kernel of rank 1 of 2, which holds experts 2 and 3 of 4.

    The kernel itself is not run: with numbers beyond its weights it reads foreign memory and may take the process down.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    seen = []

    def kernel(output, hidden, w1, w2, b1, b2, topk_weights, topk_ids, *rest) -> None:
        seen.append((topk_ids.tolist(), topk_weights.tolist()))

    monkeypatch.setattr(cpu_moe, "cpu_fused_moe", kernel)
    experts = object.__new__(cpu_moe.CPUUnquantizedExperts)
    experts._use_zentorch = False
    experts.quant_config = types.SimpleNamespace(w1_bias=None, w2_bias=None)
    names = (
        "output",
        "hidden_states",
        "w1",
        "w2",
        "activation",
        "global_num_experts",
        "a1q_scale",
        "a2_scale",
        "workspace13",
        "workspace2",
        "expert_tokens_meta",
    )
    experts.apply(
        **{**dict.fromkeys(names), "activation": types.SimpleNamespace(value="silu")},
        topk_ids=torch.tensor([[2, 0], [3, 2]], dtype=torch.int32),
        topk_weights=torch.tensor([[0.5, 0.25], [0.5, 0.25]]),
        expert_map=torch.tensor([-1, -1, 0, 1]),
        apply_router_weight_on_input=False,
    )
    return seen[0]


@pytest.fixture
def experts_class(operators, monkeypatch):
    """The experts' class, put back as it was afterwards."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    monkeypatch.setattr(CPUUnquantizedExperts, "apply", CPUUnquantizedExperts.apply)
    return CPUUnquantizedExperts


@engine
def test_a_rank_is_given_its_own_expert_numbers(experts_class, monkeypatch):
    vllm_cpu.install_expert_map()
    vllm_cpu.install_expert_map()
    assert handed_to_kernel(monkeypatch) == ([[0, 0], [1, 0]], [[0.5, 0.0], [0.5, 0.25]])


@engine
@live_defect("the experts' kernel is given global expert numbers under expert parallelism")
def test_defect_a_rank_is_given_the_numbers_of_all_experts(experts_class, monkeypatch):
    ids, weights = handed_to_kernel(monkeypatch)
    if ids != [[0, 0], [1, 0]]:
        assert (ids, weights) == ([[2, 0], [3, 2]], [[0.5, 0.25], [0.5, 0.25]])
        raise LiveDefect("numbers up to 3 for 2 experts")


# --- the rotary kernel -----------------------------------------------------------------------------------------------


def rotated(*, heads: int, apart: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(kernel, by hand) of 5 tokens with heads of 64, interleaved pairs; as ``[t, h, 64]`` or ``[t, h · 64]``."""
    tokens, width = 5, 64
    query = portable_normal((tokens, heads, width), seed=2, stream="query", dtype=torch.float32)
    angles = torch.outer(torch.arange(16.0), 10000 ** (-torch.arange(0, width, 2) / width))
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.arange(tokens)
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    first, second = query[..., 0::2], query[..., 1::2]
    expected = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    given = query.clone() if apart else query.clone().view(tokens, heads * width)
    torch.ops._C.rotary_embedding(positions, given, None, width, table, False)
    return given.view(tokens, heads, width), expected


def differ(found: torch.Tensor, expected: torch.Tensor) -> list[int]:
    """Tokens further apart than rounding of two products and a sum."""
    bound = 4 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    return ((found - expected).abs() > bound).flatten(1).any(1).nonzero().flatten().tolist()


@engine
@pytest.mark.parametrize(("heads", "apart"), [(4, False), (1, False), (1, True)])
def test_the_rotary_kernel_is_right_for_flat_heads_and_for_one(operators, heads, apart):
    assert differ(*rotated(heads=heads, apart=apart)) == []


@engine
@live_defect("the head stride is taken for the token stride")
def test_defect_the_rotary_kernel_is_wrong_for_heads_apart(operators):
    found, expected = rotated(heads=4, apart=True)
    # With the strides mixed up, token t is rotated where head t of token 0 lies, and the last tokens are never reached.
    wrong = differ(found, expected)
    assert wrong in ([], [0, 1, 2, 3, 4]), wrong
    if wrong:
        raise LiveDefect(f"tokens {wrong} are wrong")
