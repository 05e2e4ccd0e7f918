"""Log-probs and entropies of labels from logits, in every form the product has, forward and backward.

Logits come as a view of a wider tensor, shifted by a constant (nothing may change, also where all are negative or
large), with a forbidden token, at a temperature that is not 1; they must be what they were afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from alignment.faults.check import Check, Finding, Setting, differs, expect
from alignment.faults.reference import distributions
from alignment.numerics.random import portable_integers, portable_normal

STAGE = "old_log_prob"
VOCABULARY, WIDTH = 23, 6


def _labels(seed: int) -> Tensor:
    return portable_integers(0, VOCABULARY, (2, 5), seed=seed, stream="distributions/labels")


def slices(setting: Setting) -> Iterator[Finding]:
    """Which positions predict the response, and logits that are no numbers."""
    from alignment.rl import log_prob

    logits = portable_normal((2, 7, 3), seed=setting.seed, stream="distributions/slices")
    for length in (1, 3, 6):
        found = log_prob.response_logits(logits, length)
        golden = logits[:, 6 - length : 6]
        yield from differs(found, golden, stage=STAGE, place="log_prob.response_logits", what=f"{length} tokens")


def plain(setting: Setting) -> Iterator[Finding]:
    """The whole distribution at once."""
    from alignment.rl import log_prob

    yield from _form(setting, "log_prob.log_probs_and_entropy", log_prob.log_probs_and_entropy)


def chunked(setting: Setting) -> Iterator[Finding]:
    """Some tokens at a time."""
    from alignment.rl import log_prob

    yield from _form(
        setting, "log_prob.chunked_log_probs_and_entropy", partial(log_prob.chunked_log_probs_and_entropy, chunk_size=3)
    )


def parallel(setting: Setting) -> Iterator[Finding]:
    """Logits split over ranks whose vocabulary divides, and over ranks where it is padded."""
    from alignment.models.parallel import vocab_parallel

    def over(tp: int, logits: Tensor, labels: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        width = -(-VOCABULARY // tp)
        padded = torch.nn.functional.pad(logits, (0, tp * width - VOCABULARY))
        shards = [padded[..., r * width : (r + 1) * width] for r in range(tp)]
        return vocab_parallel.log_probs_and_entropy(shards, labels, vocab_size=VOCABULARY, temperature=temperature)

    for tp in (2, 4):
        yield from _form(setting, "vocab_parallel.log_probs_and_entropy", partial(over, tp))


def _form(setting: Setting, name: str, form: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[Finding]:
    labels = _labels(setting.seed)
    drawn = 3 * portable_normal((2, 5, VOCABULARY), seed=setting.seed, stream="distributions/logits")
    for offset, temperature in ((0.0, 1.0), (-60.0, 0.6), (45.0, 1.7)):
        wide = torch.cat([drawn[:, :1], drawn + offset], dim=1)
        if not name.startswith("vocab_parallel"):
            wide.scatter_(-1, (torch.cat([labels[:, :1], labels], 1)[..., None] + 1) % VOCABULARY, -math.inf)
        before = wide.clone()
        leaf = wide.requires_grad_()
        golden = distributions.of_labels(before[:, 1:], labels, temperature=temperature)
        log_probs, entropy = form(leaf[:, 1:], labels, temperature=temperature)
        where = {"stage": STAGE, "what": f"offset {offset:g}, T = {temperature:g}"}
        yield from differs(log_probs, golden.log_probs, place=f"{name}.log_probs", **where)
        yield from differs(entropy, golden.entropy, place=f"{name}.entropy", **where)
        same = torch.equal(leaf.detach(), before)
        yield from expect(same, stage=STAGE, place=f"{name}.logits", evidence="the logits were changed in place")
        for result, right, kind in (
            (log_probs, golden.log_prob_gradient, "log_probs"),
            (entropy, golden.entropy_gradient, "entropy"),
        ):
            (gradient,) = torch.autograd.grad(result.sum(), leaf, retain_graph=True)
            what = f"gradient, offset {offset:g}, T = {temperature:g}"
            yield from differs(gradient[:, 1:], right, stage="actor_update", place=f"{name}.{kind}", what=what)


def from_hidden(setting: Setting) -> Iterator[Finding]:
    """The fused output layers: gradients reach the hidden states and the weights, and padded rows do not count."""
    from alignment.models.parallel import vocab_parallel
    from alignment.rl import log_prob

    def sharded(tp: int):
        def run(hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float):
            shards = vocab_parallel.shard_vocabulary(weight, tp)
            flat = vocab_parallel.linear_log_probs(
                hidden.flatten(0, 1), shards, labels.flatten(), vocab_size=VOCABULARY, temperature=temperature
            )
            return flat.view_as(labels), None

        return run

    def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float):
        return log_prob.linear_log_probs_and_entropy(hidden, weight, labels, temperature=temperature, chunk_size=4)

    forms = {
        "log_prob.linear_log_probs_and_entropy": chunked,
        "vocab_parallel.linear_log_probs": sharded(2),
        "vocab_parallel.linear_log_probs.padded": sharded(5),
    }
    labels = _labels(setting.seed)
    direction = portable_normal((WIDTH,), seed=setting.seed, stream="distributions/direction")
    for sign, temperature in ((-9.0, 0.7), (4.0, 1.5)):
        hidden = portable_normal((2, 5, WIDTH), seed=setting.seed, stream="distributions/hidden") + sign * direction
        weight = portable_normal((VOCABULARY, WIDTH), seed=setting.seed, stream="distributions/weight") + direction
        golden = distributions.of_labels(hidden @ weight.T, labels, temperature=temperature)
        pull = portable_normal((2, 5), seed=setting.seed, stream="distributions/pull")
        for name, form in forms.items():
            leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            log_probs, entropy = form(*leaves, labels, temperature=temperature)
            results = [(log_probs, golden.log_probs, golden.log_prob_gradient, "log_probs")]
            if entropy is not None:
                results.append((entropy, golden.entropy, golden.entropy_gradient, "entropy"))
            for result, right, slope, kind in results:
                what = f"T = {temperature:g}"
                # a peaked distribution's entropy is a small difference of large numbers
                size = float(right.abs().max()) + float((hidden @ weight.T).abs().max()) * (kind == "entropy")
                yield from differs(result, right, stage=STAGE, place=f"{name}.{kind}", what=what, scale=size)
                gradients = torch.autograd.grad((result * pull).sum(), leaves, retain_graph=True, allow_unused=True)
                pulled = slope * pull.unsqueeze(-1)
                rights = pulled @ weight, torch.einsum("bsv,bsh->vh", pulled, hidden)
                sizes = [float(x.abs().max()) * float(pull.abs().max()) for x in (weight, hidden)]
                for leaf_name, gradient, expected, size in zip(("hidden", "weight"), gradients, rights, sizes):
                    gradient = torch.zeros_like(expected) if gradient is None else gradient
                    yield from differs(
                        gradient,
                        expected,
                        stage="actor_update",
                        place=f"{name}.{leaf_name}",
                        what=f"gradient through {kind}, {what}",
                        scale=size,
                    )


CHECKS = (
    Check(
        name="distributions.slices",
        layer="unit-op",
        cost=0.001,
        run=slices,
        kept_because="a shift by one is named here, where later checks see only its consequences",
    ),
    Check(
        name="distributions.plain",
        layer="unit-op",
        cost=0.004,
        run=plain,
        kept_because="it names the operator that all stages use",
    ),
    Check(
        name="distributions.chunked",
        layer="unit-op",
        cost=0.01,
        run=chunked,
        kept_because="no entry of the catalogue is in the chunked form, which use_fused_kernels turns on",
    ),
    Check(name="distributions.parallel", layer="unit-op", cost=0.008, run=parallel),
    Check(name="distributions.from_hidden", layer="unit-op", cost=0.02, run=from_hidden),
)
