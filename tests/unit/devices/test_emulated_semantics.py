"""The switchable NPU behaviours: each does what it says, composes, reaches backward, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch
from torch import nn

from alignment.devices import emulated_npu

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(not emulated_npu.is_installed(), reason="tests the emulated NPU; run with --emulate-npu"),
]

FRACTAL_NZ = 29
HF32_UNIT_ROUNDOFF = 2.0**-12  # 11 explicit mantissa bits
FLOAT32_UNIT_ROUNDOFF = torch.finfo(torch.float32).eps / 2
K = 256


@pytest.fixture
def semantics():
    return emulated_npu.semantics


@pytest.fixture
def factors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, K, generator=generator), torch.randn(K, 32, generator=generator)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(npu: torch.Tensor, golden: torch.Tensor) -> float:
    return ((npu.detach().cpu().double() - golden).norm() / golden.norm()).item()


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---- internal formats


@pytest.fixture
def weights():
    """(a plain weight, the same in an internal format), both [8, 16] on the npu."""
    import torch_npu

    plain = torch.arange(128.0).reshape(8, 16).npu()
    return plain, torch_npu.npu_format_cast(plain, FRACTAL_NZ)


VIEWS = {
    "view": lambda t: t.view(16, 8),
    "reshape": lambda t: t.reshape(4, 32),
    "flatten": lambda t: t.flatten(),
    "transpose": lambda t: t.transpose(0, 1),
    "t": lambda t: t.t(),
    "permute": lambda t: t.permute(1, 0),
    "slice": lambda t: t[2:5],
    "select": lambda t: t[3],
    "split": lambda t: t.split(4, 0)[1],
    "chunk": lambda t: t.chunk(2, 1)[1],
    "unsqueeze": lambda t: t.unsqueeze(0),
    "unflatten": lambda t: t.unflatten(0, (2, 4)),
    "expand": lambda t: t.unsqueeze(0).expand(3, -1, -1),
    "as_strided": lambda t: t.as_strided((2, 2), (1, 2), 3),
}
THROUGH_VIEW = {"view", "reshape", "flatten", "unflatten"}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_internal_format_copies(semantics, weights, name):
    plain, internal = weights
    expected = VIEWS[name](plain.cpu())
    assert address(VIEWS[name](internal)) == address(internal), "outside the block it aliases"
    with semantics.internal_format_view_copies():
        copy = VIEWS[name](internal)
        assert address(copy) != address(internal) and torch.ops.emu_npu.get_format(copy) == semantics.FORMAT_ND
        assert copy.cpu().equal(expected)
        copy.fill_(-100)
        assert internal.cpu().equal(plain.cpu()), "a write to the view does not reach the weight"
        alias = VIEWS[name](plain)
        assert address(alias) == address(plain) and alias.cpu().equal(expected), "a plain weight aliases as ever"
    assert address(VIEWS[name](internal)) == address(internal)


@pytest.mark.parametrize("name", VIEWS)
def test_the_public_rule_copies_on_as_strided_only(semantics, weights, name):
    plain, internal = weights
    with semantics.internal_format_as_strided_copies():
        view = VIEWS[name](internal)
        assert (address(view) == address(internal)) == (name in THROUGH_VIEW)
        assert view.cpu().equal(VIEWS[name](plain.cpu()))
        assert address(VIEWS[name](plain)) == address(plain)


def test_a_base_format_aliases(semantics, weights):
    import torch_npu

    channels_last = torch_npu.npu_format_cast(weights[0], torch_npu.Format.NHWC)
    with semantics.internal_format_view_copies():
        assert address(channels_last.view(16, 8)) == address(channels_last)


def test_a_view_that_cannot_be_taken_still_raises(semantics, weights):
    with semantics.internal_format_view_copies(), pytest.raises(RuntimeError, match="view size is not compatible"):
        weights[0].t().view(-1)


def test_an_absorbed_weight_goes_stale_without_a_word(semantics, weights):
    """The hazard this exists for: derived tensors taken by view do not follow an in-place weight update."""
    plain, internal = weights
    with semantics.internal_format_view_copies():
        w_uk = internal.view(2, 4, 16)[0]
        internal.fill_(-100)
        assert w_uk.cpu().equal(plain.cpu().view(2, 4, 16)[0])
        followed = plain.view(2, 4, 16)[0]
        plain.fill_(-100)
        assert followed.eq(-100).all()


# ---- HF32


def test_hf32_rounding_is_to_nearest_even_at_11_bits(semantics):
    one_ulp = 2.0**-11
    inputs = torch.tensor(
        [1.0, 1 + one_ulp / 4, 1 + one_ulp / 2, 1 + 3 * one_ulp / 2, 1 + 3 * one_ulp / 4, -1 - one_ulp / 2]
    )
    expected = torch.tensor([1.0, 1.0, 1.0, 1 + 2 * one_ulp, 1 + one_ulp, -1.0])
    assert semantics.round_to_hf32(inputs).equal(expected)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    assert torch.allclose(semantics.round_to_hf32(special), special, rtol=0, atol=0, equal_nan=True)
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    error = ((semantics.round_to_hf32(x).double() - x.double()) / x.double()).abs().max().item()
    assert HF32_UNIT_ROUNDOFF / 2 < error <= HF32_UNIT_ROUNDOFF


def test_hf32_products_have_hf32_errors(semantics, factors):
    a, b = factors
    npu_a, npu_b = a.npu(), b.npu()
    golden = a.double() @ b.double()
    rounded = semantics.round_to_hf32(a).double() @ semantics.round_to_hf32(b).double()
    plain = npu_a @ npu_b
    assert plain.cpu().equal(a @ b)
    with semantics.hf32_matmul():
        for product in (
            npu_a @ npu_b,
            (npu_a[None] @ npu_b[None])[0],
            nn.functional.linear(npu_a, npu_b.t()),
            torch.addmm(torch.zeros(32, device="npu"), npu_a, npu_b),
            torch.baddbmm(torch.zeros(1, 64, 32, device="npu"), npu_a[None], npu_b[None])[0],
            torch.mm(npu_a, npu_b, out=torch.empty(0, device="npu")),
        ):
            # Independent roundings of K pairs of inputs: the relative error stays below the two unit roundoffs, and far
            # above what float32 sums give; against the product of rounded inputs only those sums are left.
            assert K**0.5 * FLOAT32_UNIT_ROUNDOFF < relative_error(product, golden) < 2 * HF32_UNIT_ROUNDOFF
            assert relative_error(product, rounded) < K * FLOAT32_UNIT_ROUNDOFF
        assert (npu_a.bfloat16() @ npu_b.bfloat16()).cpu().equal(a.bfloat16() @ b.bfloat16()), "float32 only"
        assert (npu_a.double() @ npu_b.double()).cpu().equal(golden)
        assert (a @ b).equal(plain.cpu()), "the CPU is untouched"
    assert (npu_a @ npu_b).equal(plain)


def test_hf32_reaches_backward(semantics, factors):
    a, b = factors

    def gradient():
        left = a.npu().requires_grad_()
        (left @ b.npu()).square().sum().backward()
        return left.grad

    plain = gradient()
    with semantics.hf32_matmul():
        rounded = gradient()
    golden = 2 * (a.double() @ b.double()) @ b.double().t()
    assert relative_error(plain, golden) < K * FLOAT32_UNIT_ROUNDOFF
    assert K * FLOAT32_UNIT_ROUNDOFF < relative_error(rounded, golden) < 4 * HF32_UNIT_ROUNDOFF
    assert gradient().equal(plain)


# ---- other orders of summation


@pytest.mark.parametrize("block", [1, 7, 64, K, 4 * K])
def test_blocked_accumulation_sums_block_by_block(semantics, factors, block):
    a, b = factors
    expected = torch.zeros(64, 32)
    for start in range(0, K, block):
        expected += a[:, start : start + block] @ b[start : start + block]
    with semantics.blocked_k_accumulation(block):
        product = a.npu() @ b.npu()
        low = a.bfloat16().npu() @ b.bfloat16().npu()
    assert product.cpu().equal(expected)
    assert product.cpu().equal(a @ b) == (block >= K)
    assert low.dtype == torch.bfloat16
    golden = a.bfloat16().double() @ b.bfloat16().double()
    assert relative_error(low, golden) < torch.finfo(torch.bfloat16).eps, "rounded once, at the end"
    assert relative_error(product, a.double() @ b.double()) < K * FLOAT32_UNIT_ROUNDOFF


def test_addmm_keeps_its_factors_and_ignores_what_it_must(semantics, factors):
    a, b = factors
    with semantics.blocked_k_accumulation(16):
        nan = torch.full((64, 32), torch.nan, device="npu")
        unread = torch.addmm(nan, a.npu(), b.npu(), beta=0, alpha=2)
        assert unread.equal(2 * (a.npu() @ b.npu())), "beta = 0 does not read the addend"
        added = torch.ones(64, 32, device="npu")
        assert torch.addmm(added, a.npu(), b.npu(), beta=3).equal(3 + a.npu() @ b.npu())
        assert added.clone().addmm_(a.npu(), b.npu()).equal(1 + a.npu() @ b.npu())
        integers = torch.ones(2, 2, dtype=torch.int64, device="npu")
        assert torch.addmm(integers, integers, integers).tolist() == [[3, 3], [3, 3]]
        assert (torch.ones(2, 0, device="npu") @ torch.ones(0, 2, device="npu")).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 2), (0, 1, 2), ()], ids=str)
def test_lane_sums(semantics, dim, keepdim):
    x = torch.randn(37, 5, 7, generator=torch.Generator().manual_seed(2))
    arguments = () if dim is None else (dim, keepdim)
    golden, plain = x.double().sum(*arguments), x.sum(*arguments)
    with semantics.interleaved_lane_sums():
        mine = x.npu().sum(*arguments)
    assert mine.shape == plain.shape and mine.dtype == plain.dtype
    assert relative_error(mine, golden) < x.numel() * FLOAT32_UNIT_ROUNDOFF


def test_lane_sums_are_another_order(semantics):
    x = torch.randn(4096, 3, generator=torch.Generator().manual_seed(2))
    expected = torch.stack([x[lane::8].sum(0, keepdim=True) for lane in range(8)]).sum(0).squeeze(0)
    with semantics.interleaved_lane_sums(8):
        mine = x.npu().sum(0)
        assert torch.ones(5, dtype=torch.int32, device="npu").sum().item() == 5
        assert torch.tensor(3.0, device="npu").sum().item() == 3
        assert torch.ones(3, dtype=torch.bool, device="npu").sum(0).dtype == torch.int64
        assert torch.sum(x.npu(), 0, out=torch.empty(0, device="npu")).equal(mine)
    assert mine.cpu().equal(expected) and not mine.cpu().equal(x.sum(0))
    assert x.npu().sum(0).cpu().equal(x.sum(0))


def test_arguments_are_checked(semantics):
    with pytest.raises(ValueError, match="block is at least 1, not 0"), semantics.blocked_k_accumulation(0):
        pass
    with pytest.raises(ValueError, match="lanes is at least 1, not 0"), semantics.interleaved_lane_sums(0):
        pass


# ---- nesting


def test_nested_behaviours_combine_and_unwind(semantics, factors):
    a, b = factors
    npu_a, npu_b = a.npu(), b.npu()
    plain = npu_a @ npu_b
    with semantics.hf32_matmul():
        hf32 = npu_a @ npu_b
        with semantics.blocked_k_accumulation(16):
            both = npu_a @ npu_b
            with semantics.blocked_k_accumulation(K):
                assert (npu_a @ npu_b).equal(hf32), "the innermost block counts, HF32 still holds"
            assert (npu_a @ npu_b).equal(both)
        assert (npu_a @ npu_b).equal(hf32)
    expected = torch.zeros(64, 32)
    for start in range(0, K, 16):
        left, right = a[:, start : start + 16], b[start : start + 16]
        expected += semantics.round_to_hf32(left) @ semantics.round_to_hf32(right)
    assert both.cpu().equal(expected) and not both.equal(hf32) and not hf32.equal(plain)
    assert (npu_a @ npu_b).equal(plain)


def test_an_exception_undoes_them(semantics, factors, weights):
    a, b = (t.npu() for t in factors)
    plain = a @ b
    with pytest.raises(ZeroDivisionError):
        with semantics.hf32_matmul(), semantics.internal_format_view_copies(), semantics.blocked_k_accumulation(16):
            1 / 0
    assert (a @ b).equal(plain)
    assert address(weights[1].view(16, 8)) == address(weights[1])


# ---- non-determinism

REPEATS = 8


@pytest.fixture
def long_factors():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 4096, generator=generator).npu(), torch.randn(4096, 8, generator=generator).npu()


def reductions(left: torch.Tensor, right: torch.Tensor):
    """name -> a computation whose result depends on the order of its sums."""
    rows = torch.zeros(4096, dtype=torch.long, device="npu")
    target = torch.zeros(2, 8, device="npu")
    return {
        "mm": lambda: left @ right,
        "bmm": lambda: left[None] @ right[None],
        "linear": lambda: nn.functional.linear(left, right.t()),
        "index_add": lambda: target.clone().index_add_(0, rows, right),
        "index_put": lambda: target.clone().index_put_((rows,), right, accumulate=True),
    }


@pytest.mark.parametrize("name", ["mm", "bmm", "linear", "index_add", "index_put"])
def test_results_vary_unless_determinism_is_on(semantics, long_factors, name):
    compute = reductions(*long_factors)[name]
    plain = compute()
    with semantics.nondeterministic_reductions():
        varied = [compute() for _ in range(REPEATS)]
        assert any(not result.equal(varied[0]) for result in varied)
        with deterministic():
            fixed = [compute() for _ in range(REPEATS)]
        assert all(result.equal(fixed[0]) for result in fixed)
    golden = plain.cpu().double()
    assert all(relative_error(result, golden) < 4096 * FLOAT32_UNIT_ROUNDOFF for result in varied)
    assert compute().equal(plain)


def test_gradients_vary_too(semantics, long_factors):
    left, right = long_factors

    def gradient():
        leaf = right.t().contiguous().requires_grad_()
        (left @ leaf.t()).square().sum().backward()
        return leaf.grad

    with semantics.nondeterministic_reductions(block=1):
        results = [gradient() for _ in range(REPEATS)]
        assert any(not result.equal(results[0]) for result in results)
        with deterministic():
            assert gradient().equal(gradient())


def test_accumulating_writes_with_several_indices_keep_their_sums(semantics):
    rows, columns = torch.tensor([[0], [1]]).npu(), torch.tensor([1, 1, 0]).npu()
    with semantics.nondeterministic_reductions():
        summed = torch.zeros(2, 2, 3, device="npu").index_put_(
            (rows, columns), torch.ones(3, device="npu"), accumulate=True
        )
        masked = torch.zeros(4, device="npu").index_put_(
            (torch.tensor([True, False, True, False]).npu(),), torch.ones(2, device="npu"), accumulate=True
        )
    assert summed[:, :, 0].tolist() == [[1.0, 2.0], [1.0, 2.0]]
    assert masked.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_two_runs_of_one_program_differ():
    program = """
from alignment.devices import emulated_npu
emulated_npu.install()
import torch
torch.manual_seed(0)
left, right = torch.randn(8, 4096).npu(), torch.randn(4096, 8).npu()
with emulated_npu.semantics.nondeterministic_reductions(block=1):
    print((left @ right).tolist())
    torch.use_deterministic_algorithms(True)
    print((left @ right).tolist())
"""
    (varied, fixed), (varied_again, fixed_again) = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert varied != varied_again and fixed == fixed_again


# ---- the fused operators follow


def test_fused_operators_are_computed_in_the_same_arithmetic(semantics, factors):
    import torch_npu

    a, b = factors
    with semantics.hf32_matmul():
        (rounded,) = torch_npu.npu_grouped_matmul([a.npu()], [b.npu()])
    (plain,) = torch_npu.npu_grouped_matmul([a.npu()], [b.npu()])
    golden = a.double() @ b.double()
    assert relative_error(plain, golden) < K * FLOAT32_UNIT_ROUNDOFF
    assert relative_error(rounded, golden) > K**0.5 * FLOAT32_UNIT_ROUNDOFF
