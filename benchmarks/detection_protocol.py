"""The detection protocol: two small models, 23 faults, 7 benign changes, two settings. One pass records one capture.

Models of four layers, hidden 256, 64 tokens, batch 2: ``dense`` in the shape of Qwen2 (transformers' own classes) and
``moe`` in that of DeepSeek-V3 (``alignment.models``: latent attention 192/128, 8 experts, top 2). Weights are scaled to
the spread of trained ones, where a softmax is neither flat nor a maximum. The loss is the clipped policy loss with a KL
penalty. A *setting* says what the target computes in: ``ideal`` is float32 on the kernels of golden; ``realistic`` is
bfloat16 with every matrix product of the target split along K, partial sums rounded to bfloat16, beneath the Python
API. Beneath a fault there may be a *shift*: the target is then given positions that lie so many places later, which
changes no attention score but by rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.numerics.random import portable_integers, portable_normal

BATCH, LENGTH, HIDDEN, LAYERS, VOCABULARY = 2, 64, 256, 4, 1024
CLIP, KL_COEFFICIENT = 0.2, 0.2
"""Clip range of PPO (Schulman et al. 2017) and the KL coefficient RLHF began with (Ziegler et al. 2019)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both sides compute in, and what is between the Python API and the target's matrix products."""

    name: str
    dtype: torch.dtype
    split_k: int = 1


IDEAL = Setting(name="ideal", dtype=torch.float32)
REALISTIC = Setting(name="realistic", dtype=torch.bfloat16, split_k=2)


class SplitK(TorchDispatchMode):
    """Matrix products as sums of ``parts`` products over slices of K, every partial result rounded to its dtype."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if function in (aten.mm.default, aten.bmm.default):
            return self._product(function, args[0], args[1])
        if function is aten.addmm.default and not kwargs:
            return self._product(aten.mm.default, args[1], args[2]) + args[0]
        return function(*args, **kwargs)

    def _product(self, function, left: Tensor, right: Tensor) -> Tensor:
        if left.shape[-1] < self.parts:
            return function(left, right)
        pairs = zip(left.chunk(self.parts, -1), right.chunk(self.parts, -2), strict=True)
        first, *rest = (function(a.contiguous(), b.contiguous()) for a, b in pairs)
        for part in rest:
            first = first + part
        return first


# --- models -------------------------------------------------------------------------------------------------------


def dense_model(seed: int, *, activation: str = "silu", implementation: str = "eager", **changes) -> nn.Module:
    """Qwen2's shape: 8 heads of 32, 2 KV heads, QKV biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        hidden_act=activation,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation=implementation,
        **changes,
    )
    torch.manual_seed(0)
    return _initialised(Qwen2ForCausalLM(config), seed)


def moe_model(seed: int) -> nn.Module:
    """DeepSeek-V3's shape: latent attention 192/128, one dense layer, then 8 experts in 4 groups, top 2."""
    from alignment.models.causal_lm import CausalLM
    from alignment.models.config import ModelConfig

    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=HIDDEN // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        kv_lora_rank=128,
        q_lora_rank=128,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=1,
    )
    model = CausalLM(config, dtype=torch.float32, device="cpu")
    return _initialised(model, seed)


def _initialised(model: nn.Module, seed: int) -> nn.Module:
    """Matrices that keep the size of what they are given; queries, keys and logits wide enough to decide something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = portable_normal(tuple(parameter.shape), seed=seed, stream=name, dtype=torch.float32)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "embed" in name:
                parameter.copy_(0.05 * noise)
            else:
                spread = 1.6 if any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")) else 1.0
                # bfloat16 then moves log-probabilities by 0.01 to 0.025 on average, as healthy runs report
                spread = 0.5 if name == "lm_head.weight" else spread
                parameter.copy_(spread * noise / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * portable_normal(tuple(buffer.shape), seed=seed, stream=name, dtype=torch.float32))
    return model.train()


# --- loss ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The clipped policy loss with a k3 KL penalty (Schulman 2020) over the response, and how it may go wrong."""

    temperature: float = 1.0
    mask_shift: int = 0
    normaliser: str = "token-mean"
    kl_sign: float = 1.0

    def __call__(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        logits = logits[:, :-1].float() / self.temperature
        labels = batch["input_ids"][:, 1:]
        log_prob = torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
        mask = batch["mask"].roll(self.mask_shift, -1)[:, 1:]
        ratio = (log_prob - batch["old_log_prob"]).exp()
        advantage = batch["advantage"]
        policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        gap = batch["ref_log_prob"] - log_prob
        penalty = gap.exp() - gap - 1
        total = ((policy + self.kl_sign * KL_COEFFICIENT * penalty) * mask).sum()
        return total / (mask.sum() if self.normaliser == "token-mean" else mask.numel())


def make_batch(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Tokens, a response mask, advantages, and old and reference log-probabilities near the model's own."""
    ids = portable_integers(0, VOCABULARY, (BATCH, LENGTH), seed=seed, stream="ids")
    shape = (BATCH, LENGTH - 1)
    with torch.no_grad():
        logits = _logits(model, ids)[:, :-1].float()
        own = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    lengths = portable_integers(LENGTH // 2, LENGTH, (BATCH, 1), seed=seed, stream="lengths")
    places = torch.arange(LENGTH)[None]
    return {
        "input_ids": ids,
        "mask": ((places >= LENGTH // 4) & (places < lengths)).float(),
        "advantage": portable_normal((BATCH, 1), seed=seed, stream="advantage", dtype=torch.float32).expand(shape),
        "old_log_prob": own + 0.02 * portable_normal(shape, seed=seed, stream="old", dtype=torch.float32),
        "ref_log_prob": own + 0.5 * portable_normal(shape, seed=seed, stream="ref", dtype=torch.float32),
    }


def _logits(model: nn.Module, ids: Tensor, shift: int | None = None) -> Tensor:
    positions = {} if shift is None else {"position_ids": torch.arange(shift, shift + LENGTH)[None].expand(BATCH, -1)}
    out = model(ids, **positions)
    return out if isinstance(out, Tensor) else out.logits


# --- faults -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A change of the target and the module that a search has to name.

    ``weights`` changes a model in place, ``patch`` is a context in which the target runs, ``golden`` and ``target``
    build the models from a seed where configurations differ.
    """

    name: str
    model: str
    culprit: str
    weights: Callable[[nn.Module], None] | None = None
    patch: Callable[[], contextlib.AbstractContextManager] | None = None
    golden: dict | None = None
    target: dict | None = None
    loss: Loss = Loss()
    direction: str = "forward"
    settings: tuple[str, ...] = ("ideal", "realistic")
    golden_loss: Loss = Loss()


@contextlib.contextmanager
def _replaced(owner, name: str, value) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _dense_attention(**changes) -> Callable[[], contextlib.AbstractContextManager]:
    """transformers' eager attention of Qwen2 with one thing changed."""

    def patch():
        from transformers.models.qwen2 import modeling_qwen2 as qwen2

        def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
            groups = module.num_key_value_groups
            repeat = changes.get("repeat", lambda x, n: x.repeat_interleave(n, dim=1))
            key, value = repeat(key, groups), repeat(value, groups)
            scores = torch.matmul(query, key.transpose(2, 3)) * scaling
            if attention_mask is not None:
                scores = scores + changes.get("mask", lambda m: m)(attention_mask)
            weights = changes.get("softmax", _softmax_float32)(scores)
            return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

        return _replaced(qwen2, "eager_attention_forward", attend)

    return patch


def _softmax_float32(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


class _SoftmaxBfloat16(torch.autograd.Function):
    """Every intermediate in the dtype of the scores, the sum added up term by term, as a naive vector kernel does."""

    @staticmethod
    def forward(context, scores: Tensor) -> Tensor:
        exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
        total = torch.zeros_like(exponentials[..., :1])
        for column in exponentials.split(1, dim=-1):
            total = total + column
        out = exponentials / total
        context.save_for_backward(out)
        return out

    @staticmethod
    def backward(context, gradient: Tensor) -> Tensor:
        (out,) = context.saved_tensors
        return out * (gradient - (gradient * out).sum(-1, keepdim=True))


def _one_key_less(mask: Tensor) -> Tensor:
    """A causal mask that ends one key early (the first query keeps its own)."""
    limit = torch.finfo(mask.dtype).min
    strict = torch.full(mask.shape[-2:], limit, dtype=mask.dtype).triu(0)
    strict[0, 0] = 0
    return mask.minimum(strict)


def _interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    return rotate(q), rotate(k)


def _patch_rope():
    from transformers.models.qwen2 import modeling_qwen2 as qwen2

    return _replaced(qwen2, "apply_rotary_pos_emb", _interleaved)


def _patch_scale():
    from alignment.models import mla

    right = mla.softmax_scale
    return _replaced(
        mla, "softmax_scale", lambda config: right(config) * math.sqrt(config.q_head_dim / config.v_head_dim)
    )


def _patch_router(**changes) -> Callable[[], contextlib.AbstractContextManager]:
    def patch():
        from alignment.models import moe

        right = moe.select_experts

        def select(scores, bias, config):
            chosen, weights = right(scores, bias, replace(config, **changes))
            return chosen, weights

        return _replaced(moe, "select_experts", select)

    return patch


def _stale(name: str, size: float) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        weight = model.get_parameter(name)
        noise = portable_normal(tuple(weight.shape), seed=7, stream=f"stale {name}", dtype=torch.float32)
        weight.add_((size * noise * weight.float().square().mean().sqrt()).to(weight.dtype))

    return change


def _swap_halves(model: nn.Module) -> None:
    weight = model.get_parameter("model.layers.1.self_attn.o_proj.weight")
    weight.copy_(weight.roll(weight.shape[1] // 2, dims=1).clone())


def _swap_experts(model: nn.Module) -> None:
    first, second = (model.get_submodule(f"model.layers.2.mlp.experts.{i}") for i in (1, 5))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)


def _not_a_number(model: nn.Module) -> None:
    def poison(_, __, output: Tensor) -> Tensor:
        output = output.clone()
        output[0, 3, 5] = float("nan")
        return output

    # before the hooks of the recorder: a fault of the module, not of what comes after it
    model.get_submodule("model.layers.2.mlp.up_proj").register_forward_hook(poison, prepend=True)


_EPS = {"rms_norm_eps": 1e-5}

FAULTS: tuple[Fault, ...] = (
    Fault(name="softmax scale x sqrt(192/128)", model="moe", culprit="model.layers.0.self_attn", patch=_patch_scale),
    Fault(
        name="causal mask off by one",
        model="dense",
        culprit="model.layers.0.self_attn",
        patch=_dense_attention(mask=_one_key_less),
    ),
    Fault(
        name="rope theta 1e4 to 1e6",
        model="dense",
        culprit="model.rotary_emb",
        golden={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        target={"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    Fault(name="rope interleaved vs half", model="dense", culprit="model.layers.0.self_attn", patch=_patch_rope),
    *(
        Fault(
            name=f"stale weight {size:.0e} (one layer)",
            model="dense",
            culprit="model.layers.1.self_attn.k_proj",
            weights=_stale("model.layers.1.self_attn.k_proj.weight", size),
        )
        for size in (1e-3, 1e-2, 1e-1)
    ),
    Fault(
        name="o_proj not loaded (random)",
        model="dense",
        culprit="model.layers.1.self_attn.o_proj",
        weights=_stale("model.layers.1.self_attn.o_proj.weight", 1.4),
    ),
    Fault(name="TP shards swapped", model="dense", culprit="model.layers.1.self_attn.o_proj", weights=_swap_halves),
    Fault(name="lm_head stale 1e-2", model="dense", culprit="lm_head", weights=_stale("lm_head.weight", 1e-2)),
    Fault(
        name="GQA repeat vs interleave",
        model="dense",
        culprit="model.layers.0.self_attn",
        patch=_dense_attention(repeat=lambda x, n: x.repeat(1, n, 1, 1)),
    ),
    Fault(
        name="RMSNorm eps 1e-6 to 1e-5",
        model="dense",
        culprit="model.layers.0.input_layernorm",
        golden={"rms_norm_eps": 1e-6},
        target=_EPS,
    ),
    Fault(
        name="softmax bf16 for fp32",
        model="dense",
        culprit="model.layers.0.self_attn",
        patch=_dense_attention(softmax=_SoftmaxBfloat16.apply),
        settings=("realistic",),
    ),
    Fault(
        name="gelu tanh for erf",
        model="dense",
        culprit="model.layers.0.mlp.act_fn",
        golden={"activation": "gelu"},
        target={"activation": "gelu_pytorch_tanh"},
    ),
    Fault(
        name="router top-k 1 for 2",
        model="moe",
        culprit="model.layers.1.mlp.gate",
        patch=_patch_router(num_experts_per_tok=1),
    ),
    Fault(
        name="router group limit",
        model="moe",
        culprit="model.layers.1.mlp.gate",
        patch=_patch_router(n_group=1, topk_group=1),
    ),
    Fault(
        name="routed scale 1.0 for 2.5",
        model="moe",
        culprit="model.layers.1.mlp.gate",
        patch=_patch_router(routed_scaling_factor=1.0),
    ),
    Fault(
        name="two experts swapped", model="moe", culprit="model.layers.2.mlp.experts.1.gate_proj", weights=_swap_experts
    ),
    Fault(name="one NaN element", model="dense", culprit="model.layers.2.mlp.up_proj", weights=_not_a_number),
    Fault(name="RL temperature", model="dense", culprit="loss", loss=Loss(temperature=0.7), direction="backward"),
    Fault(
        name="RL loss mask shifted by one", model="dense", culprit="loss", loss=Loss(mask_shift=1), direction="backward"
    ),
    Fault(
        name="RL loss normaliser",
        model="dense",
        culprit="loss",
        loss=Loss(normaliser="all tokens"),
        direction="backward",
    ),
    Fault(name="RL KL sign", model="dense", culprit="loss", loss=Loss(kl_sign=-1.0), direction="backward"),
)


@dataclass(frozen=True, kw_only=True)
class Benign:
    """A change that is no fault. ``setting`` of None keeps the target of the setting under test."""

    name: str
    model: str
    kernels: bool = False
    threads: int = 1
    golden: dict | None = None
    target: dict | None = None
    golden_dtype: torch.dtype | None = None
    settings: tuple[str, ...] = ("ideal", "realistic")


BENIGN: tuple[Benign, ...] = (
    Benign(name="same again, dense", model="dense"),
    Benign(name="same again, MoE", model="moe"),
    Benign(name="1 vs 2 threads, dense", model="dense", threads=2),
    Benign(name="1 vs 2 threads, MoE", model="moe", threads=2),
    Benign(name="other kernels, dense", model="dense", kernels=True),
    Benign(name="other kernels, MoE", model="moe", kernels=True),
    Benign(name="fused for eager attention", model="dense", target={"implementation": "sdpa"}),
    Benign(name="bf16 target, fp32 golden", model="dense", golden_dtype=torch.float32),
)


CALIBRATIONS: tuple[Benign, ...] = (
    Benign(name="dense", model="dense", kernels=True),
    Benign(name="dense gelu", model="dense", kernels=True, golden={"activation": "gelu"}),
    Benign(name="moe", model="moe", kernels=True),
)
"""Pairs that are known to be equal, of other seeds than those a search is judged on: what noise is measured from."""


def build(kind: str, seed: int, changes: dict | None) -> nn.Module:
    """The model of one side, float32."""
    return dense_model(seed, **(changes or {})) if kind == "dense" else moe_model(seed)


def step(
    model: nn.Module,
    batch: dict[str, Tensor],
    loss: Loss,
    record: Callable[[nn.Module], contextlib.AbstractContextManager],
    shift: int | None = None,
):
    """One forward and backward inside what ``record(model)`` gives; returns what that yields.

    Args:
        shift: position of the first token; None leaves positions to the model, which then counts from 0 as well.
    """
    model.zero_grad(set_to_none=True)
    with record(model) as capture:
        loss(_logits(model, batch["input_ids"], shift), batch).backward()
    return capture


def golden_of(case: Fault | Benign, setting: Setting) -> tuple:
    """What the golden side of a case is, beside the seed: equal for all cases that share one."""
    dtype = getattr(case, "golden_dtype", None) or setting.dtype
    return case.model, tuple(sorted((case.golden or {}).items(), key=str)), dtype, getattr(case, "golden_loss", Loss())


def record_golden(case: Fault | Benign, setting: Setting, seed: int, record, shift: int | None = None):
    """One pass of the golden side; returns what ``record`` yielded. With a ``shift`` it is given its positions."""
    _, _, dtype, loss = golden_of(case, setting)
    model = build(case.model, seed, case.golden).to(dtype)
    return step(model, make_batch(model, seed), loss, record, None if shift is None else 0)


def record_target(case: Fault | Benign, setting: Setting, seed: int, record, shift: int | None = None):
    """One pass of the target, on the batch that golden's log-probabilities went into, ``shift`` positions later."""
    golden = build(case.model, seed, case.golden).to(golden_of(case, setting)[2])
    batch = make_batch(golden, seed)
    target = build(case.model, seed, case.target if case.target is not None else case.golden).to(setting.dtype)
    fault, benign = (case, None) if isinstance(case, Fault) else (None, case)
    if fault and fault.weights:
        with torch.no_grad():
            fault.weights(target)
    # other kernels are the whole of a benign pair that has them, and the ground every fault of a setting stands on
    parts = (max(setting.split_k, 2) if benign.kernels else 1) if benign else setting.split_k
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        if parts > 1:
            stack.enter_context(SplitK(parts))
        if fault and fault.patch:
            stack.enter_context(fault.patch())
        if benign:
            torch.set_num_threads(benign.threads)
            stack.callback(torch.set_num_threads, threads)
        return step(target, batch, fault.loss if fault else Loss(), record, shift)
