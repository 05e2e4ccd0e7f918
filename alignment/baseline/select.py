"""Which baseline judges a run: an explicit order, shown whenever it matters."""

from __future__ import annotations

from dataclasses import dataclass

from alignment.backends.case import Case
from alignment.baseline.store import BaselineFile, BaselineStore, Entry, chip_slug
from alignment.errors import InputError


class MissingBaseline(InputError):
    """No baseline fits; the message shows the order that was tried and the command that records one."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One place to look: a kind of device, and one chip or any."""

    name: str
    kind: str
    chip: str | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}{f' {chip_slug(self.chip)}' if self.chip else ''})"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The chosen baseline, and how it was found."""

    file: BaselineFile
    entry: Entry
    step: Step
    tried: tuple[str, ...]

    @property
    def title(self) -> str:
        """Identifier, date and stack in one line."""
        p = self.entry.provenance
        where = f"{self.file.kind}/{chip_slug(self.file.chip)}/{self.file.layer}/{self.entry.key}"
        return f"{where}, recorded {p.date[:10]} at {p.commit[:12]} with {p.stack} ({self.step.name})"

    def explain(self) -> str:
        """The order that was tried, the chosen step last."""
        return " → ".join([*self.tried, f"{self.step}: {self.file.path.name}"])


def fallback_order(kind: str, chip: str) -> tuple[Step, ...]:
    """Same chip, same kind, then, for an NPU, the GPU it has to agree with, and last the CPU's golden values.

    The golden tensors are the same everywhere; what differs is whose noise the budget comes from.
    """
    steps = [Step(name="same chip", kind=kind, chip=chip), Step(name="same kind", kind=kind)]
    if kind == "npu":
        steps.append(Step(name="gpu", kind="cuda"))
    if kind != "cpu":
        steps.append(Step(name="cpu golden", kind="cpu"))
    return tuple(steps)


def record_command(case: Case, subject: str, kind: str) -> str:
    """The command that records the baseline of one case."""
    return f"alignment baseline record --case {case.id} --subject {subject} --device {kind}"


def select(store: BaselineStore, case: Case, subject: str, *, kind: str, chip: str) -> Selection:
    """The baseline of ``case`` for ``subject`` on a device, by :func:`fallback_order`.

    In each step the subject's own baseline comes before that of ``torch``; among several chips the latest recorded wins.

    Raises:
        MissingBaseline: there is none.
        InputError: a file on the way is damaged.
    """
    tried = []
    for step in fallback_order(kind, chip):
        found = [
            (file, file.entries[f"{case.id}/{name}"])
            for file in store.files(kind=step.kind, layer=case.layer, operator=case.operator)
            if step.chip is None or chip_slug(file.chip) == chip_slug(step.chip)
            for name in dict.fromkeys((subject, "torch"))
            if f"{case.id}/{name}" in file.entries
        ]
        if found:
            own = [pair for pair in found if pair[1].subject == subject] or found
            file, entry = max(own, key=lambda pair: pair[1].provenance.date)
            return Selection(file=file, entry=entry, step=step, tried=tuple(tried))
        tried.append(f"{step}: none")
    raise MissingBaseline(
        "there is no baseline for this case",
        where=f"{case.id} by {subject} in {store.root}",
        expected=" → ".join(str(step) for step in fallback_order(kind, chip)),
        found="none of them",
        next_step=record_command(case, subject, "cpu" if kind == "npu" else kind),
    )
