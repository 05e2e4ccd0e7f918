"""A fault: one deliberate, reversible wrongness on a seam of the product, and what a check must say about it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from alignment.errors import InputError
from alignment.faults.check import LAYERS, Finding
from alignment.numerics.precision import Precision

OPERATOR = "operator"
STAGES = (
    "rollout",
    "old_log_prob",
    "ref_log_prob",
    "reward",
    "teacher",
    "advantage",
    "actor_update",
    "weight_sync",
    "checkpoint",
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A defect that was found in a public stack, or a benign difference that must not raise an alarm.

    Attributes:
        id: how people switch it on, for example ``mla-softmax-scale-v-head-dim``.
        title: one line.
        source: project, and commit or issue, where it was found.
        category: the file of the catalogue it is in.
        stage: the pipeline stages it acts in.
        culprit: the module, weight, field or loss term that a right placement names. Names that are equally right are
            separated by `` | ``; each is a part of a dotted path.
        layer: the cheapest layer of :data:`~alignment.faults.check.LAYERS` that can see it.
        setting: the hard setting it needs; under comfortable ones it hides.
        why: what differs, in one line.
        apply: makes the context manager that switches it on.
        benign: whether it is a difference that must not raise an alarm.
        declares: of a benign difference, the arithmetic it is declared with; what is declared is no fault.

    Raises:
        InputError: an unknown layer or stage, or an empty field.
    """

    id: str
    title: str
    source: str
    category: str
    stage: tuple[str, ...]
    culprit: str
    layer: str
    setting: str
    why: str
    apply: Callable[[], AbstractContextManager]
    benign: bool = False
    declares: Precision | None = None

    def __post_init__(self) -> None:
        where = f"fault {self.id}"
        if self.layer not in LAYERS:
            raise InputError("unknown layer", where=where, expected=", ".join(LAYERS), found=self.layer)
        for stage in self.stage:
            if stage not in STAGES:
                raise InputError("unknown stage", where=where, expected=", ".join(STAGES), found=stage)
        for name in ("id", "title", "source", "category", "stage", "culprit", "setting", "why"):
            if not getattr(self, name):
                raise InputError("a fault says everything about itself", where=where, expected=name, found="nothing")

    def __call__(self) -> AbstractContextManager:
        """Switches it on: a fault is what ``path.py:object`` names, too."""
        return self.apply()

    def is_placed_by(self, finding: Finding) -> bool:
        """Whether a finding names the right stage and the culprit.

        A finding about an operator that every stage uses says ``operator`` instead of a stage; it is right when it
        names the culprit.
        """
        names = [name.strip() for name in self.culprit.split("|")]
        return finding.stage in (*self.stage, OPERATOR) and any(name in finding.place for name in names)
