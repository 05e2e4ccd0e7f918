"""Rounding: the unit roundoff of what a run declares, and how rounding errors grow over a reduction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from alignment.errors import InputError
from alignment.numerics.known_keys import known_keys

# explicit significand bits of the matmul modes that round float32 operands; TF32 as NVIDIA publishes it, HF32 with 11
# as assumed for Ascend (its public documents give the storage format, not the width used by every operator)
_MATMUL_BITS = {"tf32": 10, "hf32": 11}
_NAMES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
}
_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"} | {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
_ROUNDOFF_SMALL = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}

OPERATORS = ("matmul", "elementwise", "router", "rollout")


def dtype_name(dtype: torch.dtype | str) -> str:
    """``torch.bfloat16``, ``"torch.bfloat16"``, ``"bf16"`` → ``"bfloat16"``.

    Raises:
        InputError: the dtype is not a floating-point one that runs are declared in.
    """
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in _NAMES:
        raise InputError("unknown floating-point dtype", where="dtype", expected=", ".join(_NAMES), found=dtype)
    return name


def unit_roundoff(dtype: torch.dtype | str) -> float:
    """u = eps / 2 of a dtype under rounding to nearest: float64 2⁻⁵³, float32 2⁻²⁴, float16 2⁻¹¹, bfloat16 2⁻⁸.

    ``"tf32"`` (10 explicit significand bits, 2⁻¹¹) and ``"hf32"`` (11, 2⁻¹²) give what their operands are rounded to.
    """
    if str(dtype) in _MATMUL_BITS:
        return 2.0 ** -(_MATMUL_BITS[str(dtype)] + 1)
    name = dtype_name(dtype)
    return _ROUNDOFF_SMALL.get(name) or torch.finfo(_NAMES[name]).eps / 2


def error_growth(reduction_length: int, u: float, *, model: str = "probabilistic") -> float:
    """Relative error of a sum of n terms in precision u, relative to Σ|terms|.

    * ``probabilistic``: γ̃ₙ = exp(√n·u + n·u²/(1 − u)) − 1 ≈ √n·u, rounding errors of mean zero (Higham and Mary,
      *A new approach to probabilistic rounding error analysis*, SIAM J. Sci. Comput. 41(5), 2019, Theorem 2.4, λ = 1);
    * ``deterministic``: γₙ = n·u / (1 − n·u), which no order of summation exceeds (Higham, *Accuracy and Stability of
      Numerical Algorithms*, 2nd ed., 2002, Lemma 3.1).

    Raises:
        InputError: n < 1, an unknown model, or n·u ≥ 1 where the deterministic bound does not exist.
    """
    n = reduction_length
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InputError("a reduction has a length", where="reduction_length", expected="an int ≥ 1", found=repr(n))
    if model == "probabilistic":
        return math.expm1(math.sqrt(n) * u + n * u * u / (1.0 - u))
    if model == "deterministic":
        if n * u >= 1.0:
            raise InputError(
                "the deterministic error bound does not exist for so long a reduction",
                where="error_growth",
                expected="reduction_length × unit roundoff < 1",
                found=n * u,
                next_step="use the probabilistic model, or declare the precision the sum is accumulated in",
            )
        return n * u / (1.0 - n * u)
    raise InputError(
        "unknown error model", where="error_growth", expected="probabilistic or deterministic", found=model
    )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What a run declares about its arithmetic; it is judged by that and by nothing better.

    ``compute`` is the dtype of activations and outputs, ``matmul`` the mode float32 matmuls run in (``ieee``, ``tf32``
    or ``hf32``), ``router`` the dtype of the router's logits and ``rollout`` that of the rollout engine's matmuls
    (None: as ``compute``), ``accumulate`` the dtype sums run in (None: float32 for 16 and 8 bits, else ``compute``).
    """

    compute: str = "float32"
    matmul: str = "ieee"
    router: str | None = None
    rollout: str | None = None
    accumulate: str | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "router", "rollout", "accumulate"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, dtype_name(value))
        if self.matmul not in ("ieee", *_MATMUL_BITS):
            raise InputError("unknown matmul mode", where="matmul", expected="ieee, tf32 or hf32", found=self.matmul)

    @classmethod
    def of(cls, declared: Precision | torch.dtype | str) -> Precision:
        """``declared`` itself, or the plain precision of a dtype."""
        return declared if isinstance(declared, Precision) else cls(compute=dtype_name(declared))

    def dtype(self, operator: str = "matmul") -> str:
        """The dtype ``operator`` (one of matmul, elementwise, router, rollout) is declared to compute in."""
        if operator not in OPERATORS:
            raise InputError("unknown operator kind", where="Precision", expected=", ".join(OPERATORS), found=operator)
        return {"router": self.router, "rollout": self.rollout}.get(operator) or self.compute

    def unit_roundoff(self, operator: str = "matmul") -> float:
        """The coarsest rounding ``operator`` is declared to do; a matmul mode acts on float32 matmuls only."""
        u = unit_roundoff(self.dtype(operator))
        return max(u, self._operand_roundoff(operator))

    def floor(self, reduction_length: int, *, operator: str = "matmul", model: str = "probabilistic") -> float:
        """Relative error that no implementation can be blamed for: u_out + 2·u_operand + growth(n, u_accumulate).

        The output is rounded once, operands are rounded by the hardware only under tf32, hf32 or fp8 (two factors
        each), and the sum of n products grows as :func:`error_growth`.
        """
        dtype = self.dtype(operator)
        operand = self._operand_roundoff(operator)
        output = dtype
        if dtype.startswith("float8"):
            output = self.compute if not self.compute.startswith("float8") else "bfloat16"
        growth = error_growth(reduction_length, unit_roundoff(self._accumulator(dtype)), model=model)
        return unit_roundoff(output) + 2.0 * operand + growth

    def describe(self, operator: str = "matmul") -> str:
        """One phrase for the origin of a bound, e.g. ``float32 (hf32 matmul)``."""
        dtype = self.dtype(operator)
        return f"{dtype} ({self.matmul} matmul)" if self._mode_applies(operator) else dtype

    def to_dict(self) -> dict:
        """JSON-ready form; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping) -> Precision:
        """The inverse of :meth:`to_dict`; unknown keys are refused."""
        return cls(**known_keys(cls, data))

    def _mode_applies(self, operator: str) -> bool:
        return operator != "elementwise" and self.matmul in _MATMUL_BITS and self.dtype(operator) == "float32"

    def _operand_roundoff(self, operator: str) -> float:
        dtype = self.dtype(operator)
        if dtype.startswith("float8"):
            return unit_roundoff(dtype)
        return unit_roundoff(self.matmul) if self._mode_applies(operator) else 0.0

    def _accumulator(self, dtype: str) -> str:
        return self.accumulate or ("float64" if dtype == "float64" else "float32")
