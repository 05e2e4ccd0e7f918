"""The emulated torch_npu's fused operators against independent float64 formulas, and the log of their calls."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from alignment.devices import emulated_npu
from alignment.devices.emulated_npu import recorded_calls

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(not emulated_npu.is_installed(), reason="tests the emulated NPU; run with --emulate-npu"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def torch_npu():
    import torch_npu

    return torch_npu


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A CPU tensor in ``dtype``, the same on every run."""
    return torch.from_numpy(np.random.Generator(np.random.Philox(seed)).standard_normal(shape)).to(dtype)


def assert_matches(actual: torch.Tensor, golden: torch.Tensor, *, terms: int, roundings: int = 1) -> None:
    """|actual - golden| <= (eps(actual.dtype) * roundings + eps(float32) * terms) * max|golden|.

    ``roundings``: how often the formula rounds to the low precision; ``terms``: length of its longest float32 sum.
    """
    assert actual.shape == golden.shape
    eps = torch.finfo(actual.dtype).eps * roundings + torch.finfo(torch.float32).eps * terms
    bound = eps * golden.abs().max()
    difference = (actual.detach().cpu().double() - golden.detach()).abs().max()
    assert difference <= bound, f"differs by {difference}, rounding explains {bound}"


def assert_differs(actual: torch.Tensor, golden: torch.Tensor, *, terms: int, roundings: int = 1) -> None:
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_matches(actual, golden, terms=terms, roundings=roundings)


# ---- attention

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8
SCALE = 1 / math.sqrt(WIDTH)
ROUND_TRIPS = {"terms": LENGTH + WIDTH, "roundings": 2}  # the weights and the output are rounded
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def golden_attention(q, k, v, *, scale, hidden=None, pse=None, sink=None) -> torch.Tensor:
    """softmax(scale * q k^T + pse) v in float64 on [b, n, s, d]; row by row, key by key, head by head."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b in range(q.shape[0]):
        for n in range(q.shape[1]):
            m = n * k.shape[1] // q.shape[1]  # the key head of this query head
            scores = torch.einsum("id,jd->ij", q[b, n], k[b, m]) * scale
            if pse is not None:
                scores = scores + pse.double().expand(q.shape[0], q.shape[1], *scores.shape)[b, n]
            weights = scores.exp()
            if hidden is not None:
                weights = weights * ~hidden.expand(q.shape[0], q.shape[1], *scores.shape)[b, n]
            total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink[n].double().exp())
            out[b, n] = torch.where(total > 0, weights / total, 0.0) @ v[b, m]
    return out


def qkv(*, kv_heads=HEADS, q_length=LENGTH, kv_length=LENGTH, value_width=WIDTH, dtype=torch.float32):
    return (
        normal(BATCH, HEADS, q_length, WIDTH, seed=1, dtype=dtype),
        normal(BATCH, kv_heads, kv_length, WIDTH, seed=2, dtype=dtype),
        normal(BATCH, kv_heads, kv_length, value_width, seed=3, dtype=dtype),
    )


TO_LAYOUT = {
    "BNSD": lambda t: t,
    "BSND": lambda t: t.permute(0, 2, 1, 3),
    "BSH": lambda t: t.permute(0, 2, 1, 3).flatten(2),
    "SBH": lambda t: t.permute(2, 0, 1, 3).flatten(2),
}


def hidden_where(condition, q_length=LENGTH, kv_length=LENGTH) -> torch.Tensor:
    return torch.tensor([[not condition(i, j) for j in range(kv_length)] for i in range(q_length)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("layout", TO_LAYOUT)
def test_attention_layouts(torch_npu, layout, kv_heads, dtype):
    q, k, v = qkv(kv_heads=kv_heads, dtype=dtype)
    to_layout = TO_LAYOUT[layout]
    inputs = [to_layout(t).npu() for t in (q, k, v)]
    out, maximum, total, *_ = torch_npu.npu_fusion_attention(*inputs, HEADS, layout, scale=SCALE)
    golden = golden_attention(q, k, v, scale=SCALE)
    assert out.dtype == dtype
    assert_matches(out, to_layout(golden), **ROUND_TRIPS)
    assert maximum.shape == total.shape == (BATCH, HEADS, LENGTH, 8) and maximum.dtype == torch.float32
    # The scale of a head twice as wide, and the default scale of 1, are errors that the comparison sees.
    for wrong in (SCALE / math.sqrt(2), 1.0):
        assert_differs(
            torch_npu.npu_fusion_attention(*inputs, HEADS, layout, scale=wrong)[0], to_layout(golden), **ROUND_TRIPS
        )


def test_attention_in_the_wrong_layout_differs_or_is_refused(torch_npu):
    q, k, v = qkv()
    golden = golden_attention(q, k, v, scale=SCALE)
    bsh = [TO_LAYOUT["BSH"](t).npu() for t in (q, k, v)]
    assert_differs(
        torch_npu.npu_fusion_attention(*bsh, HEADS, "SBH", scale=SCALE)[0], TO_LAYOUT["BSH"](golden), **ROUND_TRIPS
    )
    with pytest.raises(RuntimeError, match="head_num is 4, but query has 6 heads in BSND"):
        torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), HEADS, "BSND", scale=SCALE)
    with pytest.raises(RuntimeError, match="SBH, BSH, BNSD, BSND or TND, not 'BHSD'"):
        torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), HEADS, "BHSD")


def test_attention_values_may_be_narrower_than_keys(torch_npu):
    q, k, v = qkv(value_width=WIDTH // 2)
    golden = golden_attention(q, k, v, scale=SCALE)
    for layout in ("BNSD", "BSH"):
        inputs = [TO_LAYOUT[layout](t).npu() for t in (q, k, v)]
        out = torch_npu.npu_fusion_attention(*inputs, HEADS, layout, scale=SCALE)[0]
        assert_matches(out, TO_LAYOUT[layout](golden), **ROUND_TRIPS)


MODES = {
    "0_causal": ({"sparse_mode": 0, "next_tockens": 0}, lambda i, j, shift: j <= i),
    "0_band": ({"sparse_mode": 0, "pre_tockens": 2, "next_tockens": 1}, lambda i, j, shift: -2 <= j - i <= 1),
    "1_all": ({"sparse_mode": 1, "pre_tockens": 0, "next_tockens": 0}, lambda i, j, shift: (i * j) % 3 != 1),
    "2_left_up": ({"sparse_mode": 2}, lambda i, j, shift: j <= i),
    "3_right_down": ({"sparse_mode": 3}, lambda i, j, shift: j <= i + shift),
    "4_band": ({"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1}, lambda i, j, shift: -2 <= j - i - shift <= 1),
}


@pytest.mark.parametrize("kv_length", [LENGTH, LENGTH + 3])
@pytest.mark.parametrize("mode", MODES)
def test_attention_sparse_modes(torch_npu, mode, kv_length):
    options, visible = MODES[mode]
    q, k, v = qkv(kv_length=kv_length)
    shift = kv_length - LENGTH
    hidden = hidden_where(lambda i, j: visible(i, j, shift), kv_length=kv_length)
    mask = COMPRESSED if options["sparse_mode"] in (2, 3, 4) else hidden
    golden = golden_attention(q, k, v, scale=SCALE, hidden=hidden)
    bound = {"terms": kv_length + WIDTH, "roundings": 2}

    def attend(**changed):
        arguments = {"atten_mask": mask.npu(), "scale": SCALE, **options, **changed}
        return torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), HEADS, "BNSD", **arguments)[0]

    assert_matches(attend(), golden, **bound)
    assert_differs(attend(atten_mask=None), golden, **bound)
    if kv_length > LENGTH and options["sparse_mode"] in (2, 3):
        assert_differs(attend(sparse_mode=5 - options["sparse_mode"]), golden, **bound)


@pytest.mark.parametrize("sparse_mode", range(5))
def test_attention_without_a_mask_hides_nothing(torch_npu, sparse_mode):
    """Documented, and a trap: a causal mode without its mask is full attention."""
    q, k, v = qkv()
    out = torch_npu.npu_fusion_attention(
        q.npu(), k.npu(), v.npu(), HEADS, "BNSD", scale=SCALE, sparse_mode=sparse_mode, pre_tockens=1, next_tockens=0
    )[0]
    assert_matches(out, golden_attention(q, k, v, scale=SCALE), **ROUND_TRIPS)


def test_attention_compressed_modes_take_only_the_compressed_mask(torch_npu):
    q, k, v = (t.npu() for t in qkv())
    small = COMPRESSED[:LENGTH, :LENGTH].npu()
    with pytest.raises(RuntimeError, match=r"sparse_mode 2 takes the compressed mask .* not a mask of shape \(6, 6\)"):
        torch_npu.npu_fusion_attention(q, k, v, HEADS, "BNSD", atten_mask=small, sparse_mode=2)
    with pytest.raises(RuntimeError, match="with other values"):
        torch_npu.npu_fusion_attention(q, k, v, HEADS, "BNSD", atten_mask=~COMPRESSED.npu(), sparse_mode=3)


def test_attention_mask_shapes(torch_npu):
    q, k, v = qkv()
    hidden = normal(BATCH, 1, LENGTH, LENGTH, seed=4) > 1
    hidden[..., 0] = False
    golden = golden_attention(q, k, v, scale=SCALE, hidden=hidden)
    for mask in (hidden, hidden.expand(-1, HEADS, -1, -1), hidden.to(torch.uint8)):
        out = torch_npu.npu_fusion_attention(
            q.npu(), k.npu(), v.npu(), HEADS, "BNSD", scale=SCALE, atten_mask=mask.npu(), sparse_mode=1
        )[0]
        assert_matches(out, golden, **ROUND_TRIPS)


def test_attention_rows_with_nothing_visible(torch_npu):
    q, k, v = qkv(q_length=LENGTH + 2)
    hidden = hidden_where(lambda i, j: j <= i - 2, q_length=LENGTH + 2)
    out = torch_npu.npu_fusion_attention(
        q.npu(), k.npu(), v.npu(), HEADS, "BNSD", scale=SCALE, atten_mask=COMPRESSED.npu(), sparse_mode=3
    )[0]
    assert_matches(out, golden_attention(q, k, v, scale=SCALE, hidden=hidden), **ROUND_TRIPS)
    assert out[:, :, :2].abs().max().item() == 0


@pytest.mark.parametrize("sparse_mode", [0, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_packed_sequences(torch_npu, dtype, sparse_mode):
    lengths = [3, 1, 5]
    ends = np.cumsum(lengths).tolist()
    tokens = ends[-1]
    q = normal(tokens, HEADS, WIDTH, seed=1, dtype=dtype)
    k, v = (normal(tokens, 2, WIDTH, seed=seed, dtype=dtype) for seed in (2, 3))
    golden = torch.zeros(tokens, HEADS, WIDTH, dtype=torch.float64)
    for start, end in itertools.pairwise([0, *ends]):
        hidden = None if sparse_mode == 0 else hidden_where(lambda i, j: j <= i, end - start, end - start)
        parts = (t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        golden[start:end] = golden_attention(*parts, scale=SCALE, hidden=hidden)[0].transpose(0, 1)

    def attend(q_ends=ends, kv_ends=ends, **options):
        mask = None if sparse_mode == 0 else COMPRESSED.npu()
        return torch_npu.npu_fusion_attention(
            q.npu(),
            k.npu(),
            v.npu(),
            HEADS,
            "TND",
            scale=SCALE,
            atten_mask=mask,
            sparse_mode=sparse_mode,
            actual_seq_qlen=q_ends,
            actual_seq_kvlen=kv_ends,
            **options,
        )

    out, maximum, *_ = attend()
    assert_matches(out, golden, **ROUND_TRIPS)
    assert maximum.shape == (tokens, HEADS, 8)
    # One sequence instead of three, and lengths instead of their cumulative sum, are seen.
    assert_differs(attend([tokens], [tokens])[0], golden, **ROUND_TRIPS)
    assert_differs(attend(lengths, lengths)[0], golden, **ROUND_TRIPS)
    # Trailing zeros leave the last sequences out.
    short = attend([*ends[:2], 0], [*ends[:2], 0])[0]
    assert_matches(short[: ends[1]], golden[: ends[1]], **ROUND_TRIPS)
    assert short[ends[1] :].abs().max().item() == 0
    with pytest.raises(RuntimeError, match="layout TND needs actual_seq_qlen and actual_seq_kvlen"):
        attend(None, None)


def test_attention_position_bias_and_sink(torch_npu):
    q, k, v = qkv()
    pse = normal(1, HEADS, LENGTH, LENGTH, seed=5)
    sink = normal(HEADS, seed=6)
    arguments = (q.npu(), k.npu(), v.npu(), HEADS, "BNSD")
    biased = torch_npu.npu_fusion_attention(*arguments, pse=pse.npu(), scale=SCALE)[0]
    assert_matches(biased, golden_attention(q, k, v, scale=SCALE, pse=pse), **ROUND_TRIPS)
    sunk = torch_npu.npu_fusion_attention(*arguments, sink=sink.npu(), scale=SCALE)[0]
    assert_matches(sunk, golden_attention(q, k, v, scale=SCALE, sink=sink), **ROUND_TRIPS)
    assert_differs(sunk, golden_attention(q, k, v, scale=SCALE), **ROUND_TRIPS)
    with pytest.raises(NotImplementedError, match="pse with layout TND is not emulated"):
        flat = [t[0].transpose(0, 1).npu() for t in (q, k, v)]
        torch_npu.npu_fusion_attention(*flat, HEADS, "TND", pse=pse.npu(), actual_seq_qlen=[6], actual_seq_kvlen=[6])


def test_attention_dropout(torch_npu):
    q, k, v = (t.npu() for t in qkv())

    def attend(keep_prob):
        torch.npu.manual_seed(3)
        return torch_npu.npu_fusion_attention(q, k, v, HEADS, "BNSD", scale=SCALE, keep_prob=keep_prob)[0]

    assert attend(0.5).equal(attend(0.5)) and not attend(0.5).equal(attend(1.0))
    with pytest.raises(RuntimeError, match=r"keep_prob is in \(0, 1\], not 0"):
        attend(0)


def test_attention_gradients(torch_npu):
    q, k, v = qkv(kv_heads=2)
    hidden = hidden_where(lambda i, j: j <= i)
    cotangent = normal(BATCH, HEADS, LENGTH, WIDTH, seed=9)
    golden = [t.double().requires_grad_() for t in (q, k, v)]
    (golden_attention(*golden, scale=SCALE, hidden=hidden) * cotangent.double()).sum().backward()

    def gradients(scale):
        inputs = [t.npu().requires_grad_() for t in (q, k, v)]
        out, maximum, *_ = torch_npu.npu_fusion_attention(
            *inputs, HEADS, "BNSD", scale=scale, atten_mask=COMPRESSED.npu(), sparse_mode=2
        )
        assert not maximum.requires_grad
        (out * cotangent.npu()).sum().backward()
        return [t.grad for t in inputs]

    for mine, theirs in zip(gradients(SCALE), golden, strict=True):
        assert_matches(mine, theirs.grad, terms=HEADS * (LENGTH + WIDTH), roundings=2)
    assert_differs(gradients(1.0)[0], golden[0].grad, terms=HEADS * (LENGTH + WIDTH), roundings=2)


def test_attention_refuses_what_it_does_not_compute(torch_npu):
    q, k, v = (t.npu() for t in qkv())
    for options in ({"sparse_mode": 6}, {"prefix": [1, 1]}, {"padding_mask": q}):
        with pytest.raises(NotImplementedError, match="emulated npu_fusion_attention: .* is not emulated"):
            torch_npu.npu_fusion_attention(q, k, v, HEADS, "BNSD", **options)
    with pytest.raises(RuntimeError, match="query, key and value have one dtype"):
        torch_npu.npu_fusion_attention(q, k.half(), v, HEADS, "BNSD")
    with pytest.raises(RuntimeError, match="query is torch.float64; the fused operator takes"):
        torch_npu.npu_fusion_attention(q.double(), k.double(), v.double(), HEADS, "BNSD")
    with pytest.raises(RuntimeError, match="expected npu tensors, but key is on cpu"):
        torch_npu.npu_fusion_attention(q, k.cpu(), v, HEADS, "BNSD")
    with pytest.raises(RuntimeError, match="4 query heads are no multiple of 3 key heads"):
        torch_npu.npu_fusion_attention(q, k[:, :3], v[:, :3], HEADS, "BNSD")


# ---- norms, SwiGLU, rotary


def golden_rms_norm(x, gamma, epsilon):
    x, dims = x.double(), tuple(range(-gamma.dim(), 0))
    rms = ((x**2).mean(dims, keepdim=True) + epsilon) ** 0.5
    return x / rms * gamma.double(), 1 / rms


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gamma_shape", [(8,), (4, 8)], ids=str)
def test_rms_norm(torch_npu, gamma_shape, dtype):
    x, gamma, epsilon = normal(3, 4, 8, seed=1, dtype=dtype), normal(*gamma_shape, seed=2, dtype=dtype), 1e-2
    golden, rstd = golden_rms_norm(x, gamma, epsilon)
    terms = gamma.numel()
    y, found_rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), epsilon=epsilon)
    assert y.dtype == dtype and found_rstd.dtype == torch.float32
    assert_matches(y, golden, terms=terms)
    assert_matches(found_rstd, rstd, terms=terms)
    assert_differs(torch_npu.npu_rms_norm(x.npu(), gamma.npu(), epsilon=1.0)[0], golden, terms=terms)
    if dtype == torch.float32:
        default = golden_rms_norm(x * 1e-3, gamma, 1e-6)[0]  # so small that the documented default epsilon shows
        assert_matches(torch_npu.npu_rms_norm((x * 1e-3).npu(), gamma.npu())[0], default, terms=2 * terms)


def test_rms_norm_gradients(torch_npu):
    x, gamma, cotangent = normal(3, 8, seed=1), normal(8, seed=2), normal(3, 8, seed=3)
    gx, gg = x.double().requires_grad_(), gamma.double().requires_grad_()
    (golden_rms_norm(gx, gg, 1e-6)[0] * cotangent.double()).sum().backward()
    mx, mg = x.npu().requires_grad_(), gamma.npu().requires_grad_()
    (torch_npu.npu_rms_norm(mx, mg)[0] * cotangent.npu()).sum().backward()
    assert_matches(mx.grad, gx.grad, terms=16)
    assert_matches(mg.grad, gg.grad, terms=16)
    with pytest.raises(RuntimeError, match=r"gamma \(7,\) is not the trailing shape of x \(3, 8\)"):
        torch_npu.npu_rms_norm(mx, mg[:7])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(torch_npu, dtype):
    a, b, gamma = (normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate([(3, 8), (3, 8), (8,)]))
    total = a.double() + b.double()
    y, rstd, x = torch_npu.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), 1e-3)
    assert_matches(x, total, terms=1)
    golden, _ = golden_rms_norm(total, gamma, 1e-3)
    assert_matches(y, golden, terms=8, roundings=2)
    assert rstd.shape == (3, 1)
    assert_differs(y, golden_rms_norm(a, gamma, 1e-3)[0], terms=8, roundings=2)


def test_operators_without_a_derivative_cut_the_gradient(torch_npu):
    x = normal(3, 8, seed=1).npu().requires_grad_()
    gamma = normal(8, seed=2).npu()
    assert torch_npu.npu_rms_norm(x, gamma)[0].requires_grad
    assert not torch_npu.npu_add_rms_norm(x, x, gamma)[0].requires_grad
    assert not torch_npu.npu_grouped_matmul([x], [gamma.unsqueeze(-1)])[0].requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu(torch_npu, dim, dtype):
    x = normal(4, 6, seed=1, dtype=dtype)
    gate, up = x.double().chunk(2, dim)
    golden = gate / (1 + torch.exp(-gate)) * up
    assert_matches(torch_npu.npu_swiglu(x.npu(), dim=dim), golden, terms=4)
    assert_differs(torch_npu.npu_swiglu(x.npu().roll(x.shape[dim] // 2, dim), dim=dim), golden, terms=4)
    with pytest.raises(RuntimeError, match="cannot be halved"):
        torch_npu.npu_swiglu(x[:3, :5].npu(), dim=dim)


def golden_rotary(x, cos, sin, mode):
    """A rotation of each pair of coordinates by its angle; pairs are (i, i + d/2) or (2i, 2i + 1)."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    half = x.shape[-1] // 2
    pairs = [(i, i + half) if mode == "half" else (2 * i, 2 * i + 1) for i in range(half)]
    out = torch.zeros_like(x)
    for a, b in pairs:
        out[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        out[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary(torch_npu, mode, dtype):
    x = normal(2, 5, 3, 8, seed=1, dtype=dtype)
    angle = normal(1, 5, 1, 8, seed=2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    golden = golden_rotary(x, cos, sin, mode)
    inputs = (x.npu(), cos.npu(), sin.npu())
    other = "interleave" if mode == "half" else "half"
    assert_matches(torch_npu.npu_rotary_mul(*inputs, rotary_mode=mode), golden, terms=2)
    assert_differs(torch_npu.npu_rotary_mul(*inputs, rotary_mode=other), golden, terms=2)
    number = ["half", "interleave"].index(mode)
    assert_matches(torch_npu.npu_rotary_position_embedding(*inputs, mode=number), golden, terms=2)
    assert_differs(torch_npu.npu_rotary_position_embedding(*inputs, mode=1 - number), golden, terms=2)
    with pytest.raises(RuntimeError, match="rotary_mode is 'half' or 'interleave', not 'neox'"):
        torch_npu.npu_rotary_mul(*inputs, rotary_mode="neox")


def test_rotary_by_matrix_and_default_mode(torch_npu):
    x, angle = normal(2, 5, 3, 8, seed=1), normal(1, 5, 1, 8, seed=2)
    golden = golden_rotary(x, angle.cos(), angle.sin(), "half")
    inputs = (x.npu().requires_grad_(), angle.cos().npu(), angle.sin().npu())
    assert_matches(torch_npu.npu_rotary_mul(*inputs), golden, terms=2)
    matrix = torch.zeros(8, 8)
    matrix[torch.arange(4) + 4, torch.arange(4)] = -1
    matrix[torch.arange(4), torch.arange(4) + 4] = 1
    rotated = torch_npu.npu_rotary_mul(*inputs, rotate=matrix.npu())
    assert_matches(rotated, golden, terms=8)
    assert not rotated.requires_grad and torch_npu.npu_rotary_mul(*inputs).requires_grad


# ---- grouped matmul

SIZES = [3, 0, 4]


def golden_groups(x, weight, sizes, bias=None):
    out, start = [], 0
    for group, size in enumerate(sizes):
        y = torch.einsum("mk,kn->mn", x[start : start + size].double(), weight[group].double())
        out.append(y if bias is None else y + bias[group].double())
        start += size
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stacked", [True, False], ids=["weight [g, k, n]", "weights [k, n]"])
@pytest.mark.parametrize(
    ("kind", "group_list"),
    [(0, np.cumsum(SIZES).tolist()), (1, SIZES), (None, np.cumsum(SIZES).tolist())],
    ids=["cumulative", "counts", "list of int"],
)
def test_grouped_matmul_by_rows(torch_npu, kind, group_list, stacked, dtype):
    x, weight, bias = normal(7, 5, seed=1, dtype=dtype), normal(3, 5, 4, seed=2, dtype=dtype), normal(3, 4, seed=3)
    weights = [weight.npu()] if stacked else [w.npu() for w in weight]
    options = {"group_list": group_list}
    if kind is not None:
        options = {"group_list": torch.tensor(group_list).npu(), "group_type": 0, "group_list_type": kind}
    golden = golden_groups(x, weight, SIZES)
    (one,) = torch_npu.npu_grouped_matmul([x.npu()], weights, split_item=3, **options)
    assert one.dtype == dtype
    assert_matches(one, torch.cat(golden), terms=5)
    many = torch_npu.npu_grouped_matmul([x.npu()], weights, split_item=0, **options)
    assert [tuple(y.shape) for y in many] == [(size, 4) for size in SIZES]
    assert torch.cat(many).equal(one)
    (with_bias,) = torch_npu.npu_grouped_matmul(
        [x.npu()], weights, bias=[b.npu() for b in bias], split_item=2, **options
    )
    assert_matches(with_bias, torch.cat(golden_groups(x, weight, SIZES, bias)), terms=6)
    assert_differs(with_bias, torch.cat(golden), terms=6)
    (wrong,) = torch_npu.npu_grouped_matmul(
        [x.npu()], weights[::-1] if not stacked else [weight.flip(0).npu()], split_item=3, **options
    )
    assert_differs(wrong, torch.cat(golden), terms=5)


def test_grouped_matmul_counts_read_as_ends_are_refused_or_differ(torch_npu):
    x, weight = normal(7, 5, seed=1).npu(), normal(3, 5, 4, seed=2).npu()
    with pytest.raises(RuntimeError, match=r"group_list \[3, 0, 4\] \(group_list_type 0\) does not cut 7 into groups"):
        torch_npu.npu_grouped_matmul([x], [weight], group_list=torch.tensor(SIZES).npu(), group_type=0, split_item=3)


def test_grouped_matmul_of_pairs(torch_npu):
    xs = [normal(size, 5, seed=size) for size in (2, 3)]
    weights = [normal(5, 4, seed=size) for size in (4, 5)]
    out = torch_npu.npu_grouped_matmul([x.npu() for x in xs], [w.npu() for w in weights])
    for y, x, w in zip(out, xs, weights, strict=True):
        assert_matches(y, x.double() @ w.double(), terms=5)


def test_grouped_matmul_by_inner_dimension(torch_npu):
    """group_type 2, as the gradient of the weights uses it: y_i = x[:, group i] @ weight[group i]."""
    x, weight = normal(7, 5, seed=1), normal(7, 4, seed=2)
    (y,) = torch_npu.npu_grouped_matmul(
        [x.t().npu()],
        [weight.npu()],
        group_list=torch.tensor(SIZES).npu(),
        group_type=2,
        group_list_type=1,
        split_item=3,
    )
    starts = [0, 3, 3]
    golden = torch.stack(
        [x[s : s + n].double().t() @ weight[s : s + n].double() for s, n in zip(starts, SIZES, strict=True)]
    )
    assert_matches(y, golden, terms=7)
    assert y[1].abs().max().item() == 0


def test_grouped_matmul_activations_and_rows_past_the_groups(torch_npu):
    x, weight = normal(7, 5, seed=1), normal(2, 5, 4, seed=2)
    options = {"group_list": torch.tensor([2, 5]).npu(), "group_type": 0, "split_item": 3}
    (y,) = torch_npu.npu_grouped_matmul([x.npu()], [weight.npu()], act_type=5, **options)
    plain = torch.cat(golden_groups(x[:5], weight, [2, 3]))
    assert_matches(y[:5], plain / (1 + torch.exp(-plain)), terms=9)
    assert y[5:].abs().max().item() == 0 and y.shape == (7, 4)
    with pytest.raises(NotImplementedError, match="act_type 4 is not emulated"):
        torch_npu.npu_grouped_matmul([x.npu()], [weight.npu()], act_type=4, **options)
    with pytest.raises(NotImplementedError, match="a quantised form is not emulated"):
        torch_npu.npu_grouped_matmul([x.npu()], [weight.npu()], scale=[weight.npu()], **options)
    with pytest.raises(TypeError, match="weight is a list of tensors, not a Tensor"):
        torch_npu.npu_grouped_matmul([x.npu()], weight.npu(), **options)
    with pytest.raises(RuntimeError, match="2 groups of rows, but 3 weight matrices"):
        torch_npu.npu_grouped_matmul([x.npu()], [weight[[0, 0, 0]].npu()], **options)


# ---- MoE


def test_gating_top_k_softmax(torch_npu):
    x = normal(5, 8, seed=1)
    finished = torch.tensor([False, True, False, False, False])
    weights, experts, rows = torch_npu.npu_moe_gating_top_k_softmax(x.npu(), finished.npu(), k=3)
    probabilities = x.double().exp() / x.double().exp().sum(-1, keepdim=True)
    golden = probabilities.sort(-1, descending=True)
    assert_matches(weights, golden.values[:, :3], terms=8)
    assert experts.dtype == rows.dtype == torch.int32
    assert experts[~finished].tolist() == golden.indices[:, :3][~finished].tolist()
    assert experts[1].tolist() == [8, 8, 8], "a finished row gets the expert past the last"
    assert rows.tolist() == [[r + 5 * j for j in range(3)] for r in range(5)]
    renormalised = golden.values[:, :3] / golden.values[:, :3].sum(-1, keepdim=True)
    assert_differs(weights, renormalised, terms=8)


def golden_router(x, bias, *, k, groups, k_group, best_of_group, sigmoid, factor, normalise=True):
    """Token by token, with Python sorting: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) node-limited routing."""
    weights, experts = [], []
    for row in x.double():
        score = 1 / (1 + torch.exp(-row)) if sigmoid else row.exp() / row.exp().sum()
        choice = (score if bias is None else score + bias.double()).tolist()
        size = len(choice) // groups
        value = [sum(sorted(choice[g * size : (g + 1) * size])[-best_of_group:]) for g in range(groups)]
        allowed = sorted(range(groups), key=lambda g: -value[g])[:k_group]
        candidates = [e for e in range(len(choice)) if e // size in allowed]
        chosen = sorted(candidates, key=lambda e: -choice[e])[:k]
        weight = score[chosen]
        weights.append((weight / weight.sum() if normalise else weight) * factor)
        experts.append(chosen)
    return torch.stack(weights), experts


@pytest.mark.parametrize(("groups", "k_group"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("best_of_group", [1, 2])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_gating_top_k(torch_npu, sigmoid, best_of_group, groups, k_group):
    x, bias = normal(6, 16, seed=1), normal(16, seed=2) / 4
    arguments = {
        "k": 4,
        "bias": bias.npu(),
        "k_group": k_group,
        "group_count": groups,
        "group_select_mode": best_of_group - 1,
        "norm_type": int(sigmoid),
        "routed_scaling_factor": 2.5,
        "out_flag": True,
    }
    golden, experts = golden_router(
        x,
        bias,
        k=4,
        groups=groups,
        k_group=k_group,
        best_of_group=best_of_group,
        sigmoid=sigmoid,
        factor=2.5,
        normalise=sigmoid,
    )
    y, found, norm = torch_npu.npu_moe_gating_top_k(x.npu(), **arguments)
    assert found.tolist() == experts and found.dtype == torch.int32
    assert_matches(y, golden, terms=16)
    assert_matches(norm, x.double().sigmoid() if sigmoid else x.double().softmax(-1), terms=16)
    # The bias selects but does not weigh; leaving it out, or the factor, is seen.
    assert torch_npu.npu_moe_gating_top_k(x.npu(), **{**arguments, "bias": None})[1].tolist() != experts
    assert_differs(
        torch_npu.npu_moe_gating_top_k(x.npu(), **{**arguments, "routed_scaling_factor": 1.0})[0], golden, terms=16
    )
    if groups > 1:
        assert torch_npu.npu_moe_gating_top_k(x.npu(), **{**arguments, "k_group": groups})[1].tolist() != experts


def test_gating_top_k_gradient_and_refusals(torch_npu):
    x = normal(6, 16, seed=1)
    golden_x = x.double().requires_grad_()
    cotangent = normal(6, 4, seed=3)
    golden, _ = golden_router(golden_x, None, k=4, groups=1, k_group=1, best_of_group=1, sigmoid=True, factor=1.0)
    (golden * cotangent.double()).sum().backward()
    mine = x.npu().requires_grad_()
    y, _, norm = torch_npu.npu_moe_gating_top_k(mine, 4, norm_type=1)
    (y * cotangent.npu()).sum().backward()
    assert_matches(mine.grad, golden_x.grad, terms=16)
    assert norm.isnan().all(), "without out_flag the third result is unspecified"
    with pytest.raises(RuntimeError, match="cannot take 4 of 16 experts from 1 of 8 groups"):
        torch_npu.npu_moe_gating_top_k(mine, 4, group_count=8)
    with pytest.raises(RuntimeError, match=r"bias is torch.float32 \[16\] like x, not torch.bfloat16 \[16\]"):
        torch_npu.npu_moe_gating_top_k(mine, 4, bias=torch.zeros(16, dtype=torch.bfloat16, device="npu"))
    with pytest.raises(NotImplementedError, match="renorm 1 is not emulated"):
        torch_npu.npu_moe_gating_top_k(mine, 4, renorm=1)


def test_token_permute_and_back(torch_npu):
    tokens, probs = normal(5, 3, seed=1), normal(5, 2, seed=2)
    indices = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])
    mine, mine_probs = tokens.npu().requires_grad_(), probs.npu().requires_grad_()
    permuted, where = torch_npu.npu_moe_token_permute(mine, indices.npu())
    pairs = sorted(((int(e), t, j) for t, row in enumerate(indices) for j, e in enumerate(row)), key=lambda p: p[0])
    assert permuted.detach().cpu().equal(tokens[[t for _, t, _ in pairs]])
    position = {(t, j): i for i, (_, t, j) in enumerate(pairs)}
    assert where.tolist() == [position[t, j] for t in range(5) for j in range(2)] and where.dtype == torch.int32
    back = torch_npu.npu_moe_token_unpermute(permuted, where, mine_probs)
    golden = tokens.double() * probs.double().sum(-1, keepdim=True)
    assert_matches(back, golden, terms=3)
    back.sum().backward()
    assert_matches(mine.grad, probs.double().sum(-1, keepdim=True).expand(5, 3), terms=3)
    assert_matches(mine_probs.grad, tokens.double().sum(-1, keepdim=True).expand(5, 2), terms=3)
    # argsort itself, which is not what the operator returns, does not bring the tokens back
    order = torch.argsort(indices.flatten(), stable=True).int().npu()
    assert_differs(torch_npu.npu_moe_token_unpermute(permuted, order, mine_probs), golden, terms=3)


def test_token_permute_drops_the_last(torch_npu):
    tokens, indices = normal(4, 3, seed=1), torch.tensor([1, 0, 1, 0])
    permuted, where = torch_npu.npu_moe_token_permute(tokens.npu(), indices.npu(), num_out_tokens=3)
    assert permuted.cpu().equal(tokens[[1, 3, 0]]) and where.tolist() == [2, 0, 3, 1]
    back = torch_npu.npu_moe_token_unpermute(permuted, where).cpu()
    assert back[[0, 1, 3]].equal(tokens[[0, 1, 3]]) and back[2].tolist() == [0.0, 0.0, 0.0]


def test_token_permute_by_routing_map(torch_npu):
    tokens, probs = normal(4, 3, seed=1), normal(4, 3, seed=2)
    routing_map = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    permuted, permuted_probs, where = torch_npu.npu_moe_token_permute_with_routing_map(
        tokens.npu(), routing_map.npu(), probs=probs.npu()
    )
    pairs = [(e, t) for e in range(3) for t in range(4) if routing_map[t, e]]
    assert permuted.cpu().equal(tokens[[t for _, t in pairs]])
    assert permuted_probs.cpu().equal(torch.stack([probs[t, e] for e, t in pairs]))
    back = torch_npu.npu_moe_token_unpermute_with_routing_map(
        permuted, where, [4, 3], probs=probs.npu(), routing_map=routing_map.npu()
    )
    assert_matches(back, tokens.double() * (probs.double() * routing_map).sum(-1, keepdim=True), terms=3)


def test_init_and_finalize_routing(torch_npu):
    rows, k, experts = 5, 2, 4
    x, scales = normal(rows, 3, seed=1), normal(rows, k, seed=2)
    bias, skip1, skip2 = normal(experts, 3, seed=3), normal(rows, 3, seed=4), normal(rows, 3, seed=5)
    _, expert_idx, row_idx = torch_npu.npu_moe_gating_top_k_softmax(normal(rows, experts, seed=6).npu(), None, k)
    expanded, expanded_row_idx, sorted_experts = torch_npu.npu_moe_init_routing(x.npu(), row_idx, expert_idx, rows)
    assert sorted_experts.tolist() == sorted(expert_idx.flatten().tolist())
    for row in range(rows):
        for j in range(k):  # column order: pair (row, j) is number row + j * rows
            assert expanded[expanded_row_idx[row + j * rows].item()].cpu().equal(x[row])
    ends = torch_npu.npu_moe_compute_expert_tokens(sorted_experts, experts)
    assert ends.tolist() == np.searchsorted(sorted_experts.tolist(), range(experts), side="right").tolist()

    golden = (
        skip1.double()
        + skip2.double()
        + x.double() * scales.double().sum(-1, keepdim=True)
        + (bias.double()[expert_idx.cpu().long()] * scales.double().unsqueeze(-1)).sum(1)
    )
    given = (skip1.npu(), skip2.npu(), bias.npu(), scales.npu())
    by_column = torch_npu.npu_moe_finalize_routing(expanded, *given, expanded_row_idx, expert_idx)
    assert_matches(by_column, golden, terms=8)
    by_row = torch_npu.npu_moe_finalize_routing(expanded, *given, expanded_row_idx, expert_idx, drop_pad_mode=2)
    assert_differs(by_row, golden, terms=8)


def test_init_routing_v2(torch_npu):
    x = normal(4, 3, seed=1)
    expert_idx = torch.tensor([[3, 0], [1, 2], [2, 5], [0, 3]], dtype=torch.int32)
    options = {"expert_num": 6, "expert_tokens_num_flag": True, "active_num": 8}
    expanded, where, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.npu(), expert_idx.npu(), expert_tokens_num_type=1, **options
    )
    flat = expert_idx.flatten().tolist()
    order = sorted(range(8), key=lambda pair: flat[pair])
    assert expanded.cpu().equal(x[[pair // 2 for pair in order]])
    assert where.tolist() == np.argsort(order).tolist() and where.dtype == torch.int32
    assert counts.tolist() == [2, 1, 2, 2, 0, 1] and counts.dtype == torch.int64
    out = torch_npu.npu_moe_finalize_routing(
        expanded, None, None, None, torch.ones(4, 2).npu(), where, expert_idx.npu(), drop_pad_mode=2
    )
    assert_matches(out, 2 * x.double(), terms=2)
    scatter = torch_npu.npu_moe_init_routing_v2(x.npu(), expert_idx.npu(), row_idx_type=1, **options)
    assert scatter[1].tolist() == order and scatter[2].tolist() == [2, 3, 5, 7, 7, 8]

    local, where, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.npu(), expert_idx.npu(), active_expert_range=[2, 4], expert_tokens_num_type=1, **options
    )
    active = [pair for pair in order if 2 <= flat[pair] < 4]
    assert local[:4].cpu().equal(x[[pair // 2 for pair in active]]) and local[4:].abs().max().item() == 0
    assert counts.tolist() == [2, 2]
    assert where.tolist() == [active.index(pair) if pair in active else -1 for pair in range(8)]
    with pytest.raises(NotImplementedError, match="quant_mode 1"):
        torch_npu.npu_moe_init_routing_v2(x.npu(), expert_idx.npu(), quant_mode=1, **options)


# ---- cross entropy


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 2}], ids=str)
def test_cross_entropy(torch_npu, options, reduction):
    x, target = normal(5, 7, seed=1), torch.tensor([3, 2, 0, 6, 2])
    smoothing, ignored = options.get("label_smoothing", 0.0), options.get("ignore_index", -1)
    golden_x = x.double().requires_grad_()
    log_prob = golden_x - golden_x.exp().sum(-1, keepdim=True).log()
    wanted = torch.full((5, 7), smoothing / 7, dtype=torch.float64)
    wanted[torch.arange(5), target] += 1 - smoothing
    losses = -(wanted * log_prob).sum(-1) * (target != ignored)
    golden = {"mean": losses.sum().view(1) / (target != ignored).sum(), "sum": losses.sum().view(1), "none": losses}[
        reduction
    ]
    mine = x.npu().requires_grad_()
    loss, found_log_prob, zloss, lse = torch_npu.npu_cross_entropy_loss(
        mine, target.npu(), reduction=reduction, **options
    )
    assert_matches(loss, golden, terms=5 * 7)
    assert_matches(found_log_prob, log_prob, terms=7)
    assert zloss.numel() == lse.numel() == 0 and not found_log_prob.requires_grad
    golden.sum().backward()
    loss.sum().backward()
    assert_matches(mine.grad, golden_x.grad, terms=5 * 7)
    with pytest.raises(RuntimeError, match="a negative ignore_index ignores nothing"):
        torch_npu.npu_cross_entropy_loss(mine, torch.tensor([3, -100, 0, 6, 2]).npu())


# ---- formats


def test_format_cast(torch_npu):
    weight = normal(8, 16, seed=1).npu()
    assert torch_npu.get_npu_format(weight) == torch_npu.Format.ND == 2
    assert torch_npu.npu_format_cast(weight, 2) is weight, "a cast to the format it has is the tensor itself"
    cast = torch_npu.npu_format_cast(weight, torch_npu.Format.FRACTAL_NZ)
    assert torch_npu.get_npu_format(cast) == 29 and torch_npu.get_npu_format(weight) == 2
    assert cast.data_ptr() != weight.data_ptr() and cast.equal(weight)
    with pytest.raises(ValueError, match="31 is not a valid Format"):
        torch_npu.npu_format_cast(weight, 31)


def test_format_cast_in_place_leaves_old_views_behind(torch_npu):
    parameter = torch.nn.Parameter(normal(8, 16, seed=1).npu())
    view = parameter.detach().t()
    assert torch_npu.npu_format_cast_(parameter, 29) is parameter
    assert torch_npu.get_npu_format(parameter) == 29
    before = view.clone()
    with torch.no_grad():
        parameter.fill_(-100)
    assert view.equal(before), "the view still reads the storage from before the cast"


def test_format_cast_has_a_gradient(torch_npu):
    weight = normal(4, 4, seed=1).npu().requires_grad_()
    (torch_npu.npu_format_cast(weight, 29) * 3).sum().backward()
    assert weight.grad.eq(3).all()


# ---- the log and unknown names


def test_the_log_holds_what_reached_the_kernel(torch_npu):
    q, k, v = (t.npu() for t in qkv(kv_heads=2, dtype=torch.bfloat16))
    with recorded_calls() as outer:
        with recorded_calls() as inner:
            torch_npu.npu_fusion_attention(q, k, v, HEADS, "BNSD", None, None, None, 0.125, sparse_mode=0)
        torch_npu.npu_swiglu(q)
    call = inner.only("npu_fusion_attention")
    assert call["scale"] == 0.125 and call["input_layout"] == "BNSD" and call["sparse_mode"] == 0
    assert call["keep_prob"] == 1.0, "defaults are recorded too"
    assert call.shapes["key"] == (BATCH, 2, LENGTH, WIDTH) and call.dtypes["query"] == "bfloat16"
    assert [c.name for c in outer] == ["npu_fusion_attention", "npu_swiglu"] and len(inner) == 1
    assert emulated_npu.calls[-1].name == "npu_swiglu"
    with pytest.raises(
        AssertionError, match="exactly one call of npu_rms_norm, found 0; called: npu_fusion_attention, npu_swiglu"
    ):
        outer.only("npu_rms_norm")
    with pytest.raises(KeyError, match="npu_swiglu has no argument 'scale'; it was called with .'dim'."):
        outer.only("npu_swiglu")["scale"]


def test_the_log_holds_lists_of_tensors(torch_npu):
    with recorded_calls() as log:
        torch_npu.npu_grouped_matmul([normal(2, 5, seed=1).npu()], [normal(5, 4, seed=2).npu()], bias=None)
    call = log.only("npu_grouped_matmul")
    assert call.shapes["x"] == ((2, 5),) and call.dtypes["weight"] == ("float32",) and call["bias"] is None


def test_a_failed_block_closes_its_log(torch_npu):
    with pytest.raises(ZeroDivisionError), recorded_calls() as log:
        1 / 0
    torch_npu.npu_swiglu(normal(2, 4, seed=1).npu())
    assert len(log) == 0


def test_unknown_names_say_what_to_do(torch_npu):
    with pytest.raises(AttributeError, match="the emulated torch_npu has no 'npu_kv_rmsnorm_rope_cache': add it to"):
        torch_npu.npu_kv_rmsnorm_rope_cache
    assert not hasattr(torch_npu, "npu_mla_prolog")
    with pytest.raises(ImportError, match="cannot import name 'npu_mla_prolog'"):
        from torch_npu import npu_mla_prolog  # noqa: F401
