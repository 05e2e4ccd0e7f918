"""Declared precision: operators and engines in float32 and bfloat16 are as exact as they say, and no worse.

Inputs are rounded first, so the float64 side starts from equal values; a bound is a multiple of the unit roundoff of
the declared arithmetic. A run that declares less (a matmul mode, a dtype of the router) is allowed more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from alignment.backends import golden_rollout
from alignment.faults import toy
from alignment.faults.check import Check, Finding, Setting, allowed, differs, expect
from alignment.faults.fault import OPERATOR
from alignment.faults.reference import language_model, routing
from alignment.models import attention, linear, mlp, norm, rope
from alignment.numerics.identities import GAP_BROKEN
from alignment.numerics.metrics import signed_mean_difference
from alignment.numerics.precision import Precision

DTYPES = (torch.float32, torch.bfloat16)
# Beyond what float16 can hold, next to ordinary values and to ones that are subnormal there.
SIZES = (1.0, 3e5, 1e-6)
ALARM = 4.9
"""Standard errors: a normal mean is beyond it once in a million."""


def _declared(setting: Setting, dtype: torch.dtype) -> Precision:
    return dataclasses.replace(setting.precision, compute=str(dtype).removeprefix("torch."), rollout=None, router=None)


def linears(setting: Setting) -> Iterator[Finding]:
    """Linear layers of every size of values: error relative to the sum of the magnitudes of the products."""
    for dtype in DTYPES:
        declared = _declared(setting, dtype)
        for size in SIZES:
            subject = linear.linear(64, 24, dtype=dtype, device="cpu")
            x = toy.normal((3, 16, 64), setting.seed, "linear x", scale=size).to(dtype)
            with torch.no_grad():
                subject.weight.copy_(toy.normal((24, 64), setting.seed, "linear weight", scale=0.2))
                found = subject(x)
            weight = subject.weight.detach().double()
            golden, reach = x.double() @ weight.T, x.double().abs() @ weight.abs().T
            yield from differs(
                (found.double() - golden) / reach,
                torch.zeros_like(golden),
                stage=OPERATOR,
                place="linear.matmul",
                scale=1.0,
                what=f"{declared.describe()}, values of {size:g}",
                bound=allowed(declared, 64),
            )


def operators(setting: Setting) -> Iterator[Finding]:
    """Norm, rotation, attention and gated layer in each dtype."""
    for dtype in DTYPES:
        declared = _declared(setting, dtype)
        what = declared.describe()

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return toy.normal(shape, setting.seed, f"operators {shape}", scale=scale).to(dtype)

        # Rows whose mean square is about ε tell a missing or misplaced ε from a right one.
        x, weight = draw(4, 32) * torch.tensor([1.0, 3e-3, 300.0, 1.0]).to(dtype)[:, None], (1 + draw(32, scale=0.2))
        found = norm.rms_norm(x, weight, eps=1e-5)
        golden = language_model.normalised(x.double(), weight.double(), 1e-5)
        # Rounded behind the quotient and behind the product with the weight.
        yield from differs(found, golden, stage=OPERATOR, place="norm.rms_norm", what=what, bound=allowed(declared, 32))

        x, angle = draw(2, 3, 5, 8), toy.normal((2, 5, 4), setting.seed, "angles", scale=3.0)
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        found = rope.rotate_interleaved(x, cos, sin)
        first, second = x.double()[..., 0::2], x.double()[..., 1::2]
        c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
        golden = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
        yield from differs(
            found, golden, stage=OPERATOR, place="rope.rotate_interleaved", what=what, bound=allowed(declared, 2)
        )

        q, k, v = draw(1, 1, 9, 16), draw(1, 1, 9, 17)[..., :16], draw(1, 1, 9, 12)
        allowed_pairs = torch.ones(9, 9, dtype=torch.bool).tril()
        found = attention.scaled_dot_product(q, k, v, scale=0.25, mask=allowed_pairs[None, None])
        golden = language_model.attend(q[0, 0].double(), k[0, 0].double(), v[0, 0].double(), 0.25, allowed_pairs)
        # Scores are rounded to the dtype before the softmax, which turns an absolute error into a relative one.
        score = float((q.double() @ k.double().transpose(-1, -2)).abs().max()) * 0.25
        bound = allowed(declared, 16) * (2 + score)
        yield from differs(
            found[0, 0], golden, stage=OPERATOR, place="attention.scaled_dot_product", what=what, bound=bound
        )

        subject = mlp.SwiGLU(24, 24, dtype=dtype, device="cpu")
        with torch.no_grad():
            for index, parameter in enumerate(subject.parameters()):
                parameter.copy_(toy.normal((24, 24), setting.seed, f"gated {index}", scale=0.2))
            x = draw(7, 24)
            found = subject(x)
        weights = {f"m.{name}": p.detach().double() for name, p in subject.named_parameters()}
        golden = routing.gated_mlp(x.double(), weights, "m")
        # Three matmuls and a product, each rounded, on values of which the last sum may cancel.
        yield from differs(
            found, golden, stage=OPERATOR, place="mlp.swiglu", what=what, bound=4 * allowed(declared, 24)
        )


@lru_cache(maxsize=32)
def _rounded(seed: int) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """A model's weights in bfloat16, sequences, and the exact log-probs of those weights."""
    held = {
        key: tensor if key.endswith("e_score_correction_bias") else tensor.bfloat16()
        for key, tensor in toy.weights("plain", seed).items()
    }
    exact = {key: tensor.float().double() if "bias" in key else tensor.double() for key, tensor in held.items()}
    batch = _wide_batch(seed)
    with torch.no_grad():
        golden = [language_model.token_log_probs(ids, exact, toy.PLAIN) for ids in batch.sequences]
    return held, list(batch.sequences), golden


def _wide_batch(seed: int) -> toy.Ragged:
    return toy.ragged("plain", seed, prompts=(5, 2, 7, 3, 6, 4), responses=(14, 16, 9, 15, 12, 16))


def gap(setting: Setting) -> Iterator[Finding]:
    """A bfloat16 engine against a bfloat16 trainer of equal weights: small by absolute value, and without a sign.

    Rounding moves near-ties between experts, and such a token's log-prob by any amount, so the median is judged,
    against what the trainer is off from the exact log-probs or the band of broken stacks. The sign is that of all
    tokens.
    """
    held, sequences, golden = _rounded(setting.seed)
    batch = _wide_batch(setting.seed)
    trainer = toy.model("plain", setting.seed, dtype=torch.bfloat16)
    engine = golden_rollout.GoldenRollout(toy.PLAIN, dtype=torch.bfloat16, seed=setting.seed + 1)
    mine = dict(engine.named_parameters())
    engine.update_weights((key, tensor.to(mine[key].dtype)) for key, tensor in held.items())
    with torch.no_grad():
        logits = trainer(batch.input_ids, attention_mask=batch.attention_mask)
    probe = engine.probe(batch.input_ids, batch.attention_mask, batch.response)
    trained, exact, paths = [], [], {"prefill": [], "decode": []}
    for row, ids in enumerate(sequences):
        p, r = batch.prompt_lengths[row], batch.response_lengths[row]
        real = logits[row][batch.attention_mask[row].bool()].double()
        trained.append(language_model.log_softmax(real[p - 1 : p + r - 1]).gather(-1, ids[p:, None]).squeeze(-1))
        exact.append(golden[row][p - 1 :])
        for path, values in (("prefill", probe.prefill), ("decode", probe.decode)):
            paths[path].append(values[row, :r].double())
    trained, exact = torch.cat(trained), torch.cat(exact)
    noise = float((trained - exact).abs().median())
    for path, parts in paths.items():
        found = torch.cat(parts)
        off, bound = float((found - trained).abs().median()), max(GAP_BROKEN, 3 * noise)
        signed = signed_mean_difference(found, trained)
        yield from expect(
            off <= bound and math.isfinite(off), stage="rollout", place="log_prob_gap",
            evidence=f"{path}: median |Δ log p| {off:.3g}, bound {bound:.3g}; signed mean {signed.mean:+.3g}",
        )  # fmt: skip
        yield from expect(
            not abs(signed.z) > ALARM,
            stage="rollout",
            place="log_prob_gap.sign",
            evidence=f"{path}: signed mean {signed.mean:+.3g} nats, {signed.z:+.1f} standard errors: "
            "rounding has no sign",
        )


CHECKS = (
    Check(
        name="precision.linears",
        layer="unit-op",
        cost=0.005,
        run=linears,
        kept_because="declared matmul modes, and values that float16 cannot hold",
    ),  # fmt: skip
    Check(
        name="precision.operators",
        layer="unit-op",
        cost=0.006,
        run=operators,
        kept_because="an operator in fewer digits than declared, one by one",
    ),  # fmt: skip
    Check(
        name="precision.gap",
        layer="rollout-vs-train-logprob",
        cost=0.3,
        run=gap,
        kept_because="the sign of the gap, on any engine, without looking inside",
    ),  # fmt: skip
)
