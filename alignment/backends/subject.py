"""A subject: an implementation under test. What is not installed is reported with the reason, never dropped."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from alignment.backends.case import Case, Tensors
from alignment.devices.base import Device
from alignment.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SubjectAvailability:
    """Whether a subject can run on a device here, and in one sentence why not."""

    available: bool
    reason: str


@runtime_checkable
class Subject(Protocol):
    """Computes cases on devices.

    Attributes:
        name: how people call it: ``torch``, ``torch_npu``, ``transformers``, …
        kinds: the kinds of device it is made for; on others it is not listed at all.
    """

    name: str
    kinds: tuple[str, ...]

    def available(self, device: Device) -> SubjectAvailability:
        """Whether it can run on ``device`` in this process, with the reason."""

    def supports(self, case: Case) -> bool:
        """Whether it computes this case at all."""

    def run(self, case: Case, inputs: Tensors, device: Device) -> Tensors:
        """The observations of the case on ``device``, in order of computation; it may leave out what it cannot see.

        Args:
            inputs: on the CPU, as :meth:`Case.inputs` makes them.
        """


@dataclass(frozen=True, kw_only=True)
class SubjectEntry:
    """Where a subject lives; its module is imported when the subject is first used.

    ``engine`` is True for one that needs an optional engine: its checks carry the marker of that name.
    """

    name: str
    layer: str
    kinds: tuple[str, ...]
    target: str
    engine: bool = False

    def load(self) -> Subject:
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)()


EVERY_KIND = ("cpu", "cuda", "npu")

SUBJECTS: tuple[SubjectEntry, ...] = (
    SubjectEntry(name="torch", layer="unit", kinds=EVERY_KIND, target="alignment.backends.torch_operators:TorchOperators"),
    SubjectEntry(
        name="torch_npu", layer="unit", kinds=("npu",), target="alignment.backends.torch_npu_operators:TorchNpuOperators"
    ),
    SubjectEntry(name="torch", layer="layer", kinds=EVERY_KIND, target="alignment.backends.golden_layers:GoldenLayers"),
    SubjectEntry(
        name="transformers",
        layer="layer",
        kinds=EVERY_KIND,
        target="alignment.backends.transformers_layers:TransformersLayers",
    ),
    SubjectEntry(
        name="megatron",
        layer="layer",
        kinds=EVERY_KIND,
        target="alignment.backends.megatron_layers:MegatronLayers",
        engine=True,
    ),
)


def subject_entries(layer: str, *, names: tuple[str, ...] = ()) -> tuple[SubjectEntry, ...]:
    """The subjects of a test layer, all or those called ``names``."""
    return tuple(e for e in SUBJECTS if e.layer == layer and (not names or e.name in names))


def get_subject(name: str, layer: str) -> Subject:
    """The subject called ``name`` of a test layer.

    Raises:
        InputError: the layer has no such subject.
    """
    for entry in subject_entries(layer, names=(name,)):
        return entry.load()
    known = ", ".join(e.name for e in subject_entries(layer))
    raise InputError(f"the {layer} layer has no subject {name!r}", where="--subject", expected=known)
