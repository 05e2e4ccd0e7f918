"""A case: named inputs that every machine builds bit for bit alike, and what to compute from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from alignment.errors import InputError
from alignment.numerics.random import portable_integers, portable_normal, portable_uniform

Tensors = dict[str, torch.Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One thing a case observes, and where in the computation it is made.

    Attributes:
        name: its key among the observations, unique in the case.
        module: the module path (or the operator) that makes it; a failure names it.
        reduction_length: number of addends behind one element, for the roundoff floor of its budget.
        kind: ``real`` is compared by error; ``choice`` is a multi-hot selection [rows, candidates] whose decided flips
            are counted (a flip of a near-tie is none); ``table`` is a vector of independent scalars, one per label;
            ``sketch`` is a float64 random projection of what was observed.
        scores: for a choice, the name of the real quantity [rows, candidates] it selects by.
        labels: for a table, what each entry belongs to (a parameter's name).
        dtype: the dtype it is declared in; None for the run dtype of the case.
    """

    name: str
    module: str
    reduction_length: int = 1
    kind: str = "real"
    scores: str | None = None
    labels: tuple[str, ...] = ()
    dtype: str | None = None


class Draw:
    """Draws the inputs of one case by name; a tensor does not depend on what else is drawn.

    Real numbers are rounded to the run dtype first, so the float64 golden and a bfloat16 device start from equal values.
    """

    def __init__(self, case: str, seed: int, dtype: torch.dtype) -> None:
        self._case, self._seed, self.dtype = case, seed, dtype

    def _stream(self, name: str) -> str:
        return f"{self._case}/{name}"

    def normal(self, name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (scale * portable_normal(shape, seed=self._seed, stream=self._stream(name))).to(dtype or self.dtype)

    def uniform(
        self, name: str, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        drawn = portable_uniform(shape, seed=self._seed, stream=self._stream(name))
        return (low + (high - low) * drawn).to(dtype or self.dtype)

    def integers(self, name: str, *shape: int, low: int, high: int) -> torch.Tensor:
        return portable_integers(low, high, shape, seed=self._seed, stream=self._stream(name))


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a subject computes and how its golden values are made.

    Attributes:
        operator: what is computed, for example ``attention``.
        variant: which of its forms, for example ``mla-yarn``; empty where there is one.
        dtype: the declared run dtype, ``float32`` or ``bfloat16``.
        layer: ``unit`` or ``layer``, the test layer.
        stage: the pipeline stage a failure names; ``operator`` for unit cases.
        seed: of the judged inputs.
        build: the inputs from a :class:`Draw`, on the CPU. A cotangent of output ``y`` is the input ``cotangent.y``.
        golden: the observations in float64 from the inputs in float64 (integers as they are).
        quantities: what is observed, in order of computation.
        differentiable: inputs whose gradients are observed as ``grad.<input>``.
        batched: inputs with a batch dimension first, together with ``batched_outputs``: permuting it is a benign
            change of the order of reductions.
        perturbed: inputs that carry activations and are moved by one ulp to measure noise; empty for every real input
            that is neither a weight nor a bias nor a cotangent.
        llm_operator: judged by the tighter factor of the operators an LLM spends its time in.
        attributes: numbers and switches a subject needs; part of the case's identity.
    """

    operator: str
    dtype: str
    seed: int
    build: Callable[[Draw], Tensors]
    golden: Callable[[Tensors, Mapping[str, object]], Tensors]
    quantities: tuple[Quantity, ...]
    variant: str = ""
    layer: str = "unit"
    stage: str = "operator"
    differentiable: tuple[str, ...] = ()
    batched: tuple[str, ...] = ()
    batched_outputs: tuple[str, ...] = ()
    perturbed: tuple[str, ...] = ()
    llm_operator: bool = False
    attributes: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Operator and variant, the same in every dtype."""
        return f"{self.operator}.{self.variant}" if self.variant else self.operator

    @property
    def id(self) -> str:
        """``operator.variant-dtype``: the key of its baseline."""
        return f"{self.name}-{self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def quantity_names(self) -> tuple[str, ...]:
        return tuple(q.name for q in self.quantities)

    def inputs(self, *, seed: int | None = None) -> Tensors:
        """The inputs on the CPU, floats in the run dtype unless the case fixes another; ``seed`` replaces the judged one."""
        return self.build(Draw(self.name, self.seed if seed is None else seed, self.torch_dtype))

    def golden_observations(self, inputs: Tensors) -> Tensors:
        """The observations in float64 on the CPU.

        Raises:
            InputError: the golden function does not return exactly the quantities of the case.
        """
        observed = self.golden({k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}, self.attributes)
        return checked(self, observed, "the golden function")

    def identity(self) -> dict:
        """What must be equal for a stored baseline to belong to this case; JSON-ready."""
        return {
            "operator": self.operator,
            "variant": self.variant,
            "dtype": self.dtype,
            "layer": self.layer,
            "seed": self.seed,
            "attributes": _json_ready(dict(self.attributes)),
            "quantities": [[q.name, q.module, q.kind, q.dtype or self.dtype, list(q.labels)] for q in self.quantities],
        }


def _json_ready(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(k): _json_ready(v) for k, v in sorted(value.items())}
    return [_json_ready(v) for v in value] if isinstance(value, (list, tuple)) else value


def checked(case: Case, observed: Mapping[str, torch.Tensor], whose: str, *, partial: bool = False) -> Tensors:
    """``observed`` in the order of the case's quantities.

    Raises:
        InputError: a quantity is unknown, or one is missing and ``partial`` is not allowed.
    """
    unknown = [name for name in observed if name not in case.quantity_names]
    missing = [name for name in case.quantity_names if name not in observed]
    if unknown or (missing and not partial):
        raise InputError(
            f"{whose} does not observe the quantities of the case",
            where=case.id,
            expected=", ".join(case.quantity_names),
            found=f"unknown {unknown}, missing {missing}",
        )
    return {name: observed[name].detach() for name in case.quantity_names if name in observed}


def observe(
    forward: Callable[[Tensors, Mapping[str, object]], Tensors],
    inputs: Tensors,
    attributes: Mapping[str, object],
    differentiable: Sequence[str],
) -> Tensors:
    """Outputs of ``forward`` and the gradients of Σ ⟨output, cotangent⟩ with respect to the ``differentiable`` inputs."""
    leaves = {
        name: tensor.detach().clone().requires_grad_(name in differentiable)
        for name, tensor in inputs.items()
        if not name.startswith("cotangent.")
    }
    outputs = forward(leaves, attributes)
    if not differentiable:
        return outputs
    driven = [name for name in outputs if f"cotangent.{name}" in inputs]
    gradients = torch.autograd.grad(
        [outputs[name] for name in driven],
        [leaves[name] for name in differentiable],
        [inputs[f"cotangent.{name}"].to(outputs[name].dtype) for name in driven],
    )
    return {**outputs, **{f"grad.{name}": g for name, g in zip(differentiable, gradients)}}
