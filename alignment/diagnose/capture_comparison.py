"""Two captures, step by step and stage by stage: what differs, where it was introduced, and one verdict per stage."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from alignment.capture.record import CaptureReader, TensorRow
from alignment.diagnose.carried import Carried
from alignment.diagnose.localise import ALONE, UPDATE, UPDATE_SIZE, Finding, Localisation, learn, localise
from alignment.diagnose.module_graph import ModuleGraph, Pair
from alignment.diagnose.names import NameMap, matches_any, no_common_names
from alignment.diagnose.noise import NO_GRADIENTS, NoiseModel
from alignment.diagnose.pairing import Pairing, Unpaired, declared_remarks, pair_rows
from alignment.diagnose.shards import same_layout, whole_rows
from alignment.errors import InputError
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict

LARGEST = 10
"""Pairs that are kept for display, by relative difference."""
NAMED = 3
"""Modules with tensors that were not compared that are named."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pair for display."""

    module: str
    quantity: str
    relative: float
    gain: float
    detail: str
    problem: str


@dataclass
class StageComparison:
    """One step, stage and rank (None: all ranks together)."""

    step: int
    stage: str
    rank: int | None
    localisation: Localisation
    unpaired: list[Unpaired]
    pairs: int
    rows: tuple[int, int]
    details: tuple[str, ...]
    largest: list[Row] = field(default_factory=list)
    different_implementations: bool = False
    gradients: float = 0.0
    outputs: float = 0.0
    """Largest relative differences of gradients of parameters, and of what models give out."""

    @property
    def failures(self) -> list[str]:
        """What fails besides numbers: missing and extra modules, calls and parameters."""
        return [str(gap) for gap in self.unpaired if gap.fails]

    @property
    def skipped(self) -> list[Unpaired]:
        """Tensors that both sides have and that were not compared, because padding is among them."""
        return [gap for gap in self.unpaired if gap.skipped]

    @property
    def unsettled(self) -> bool:
        """Whether what was compared agrees, but what was not may hold a fault as well as padding."""
        return self._agrees and (bool(self.localisation.unknown) or any(gap.disagrees for gap in self.skipped))

    @property
    def first(self) -> Finding | None:
        """The first introduced divergence: forward before backward, which is what things were computed in."""
        return self.localisation.first("forward") or self.localisation.first("backward")

    @property
    def aligned(self) -> bool:
        """Whether nothing diverges, nothing is missing, and nothing that was left out disagrees."""
        return self._agrees and not self.unsettled

    @property
    def _agrees(self) -> bool:
        return not self.localisation.findings and not self.failures and self.pairs > 0

    @property
    def outcome(self) -> Outcome:
        """Whether it is aligned, is not, or cannot be told."""
        if self.unsettled:
            return Outcome.INCONCLUSIVE
        return Outcome.PASS if self.aligned else Outcome.FAIL

    def verdict(self, subject: str, device: str, baseline: str) -> Verdict:
        """This stage as the suite's verdict."""
        first = self.first
        place = f"step {self.step}" + (f", rank {self.rank}" if self.rank is not None else "")
        measures, where = (), None
        if first is not None:
            measure = Measure(
                name=first.reason,
                value=first.value,
                bound=first.limit,
                unit="of the size of golden",
                origin=first.origin,
            )
            measures = (measure,)
            where = Divergence(stage=self.stage, module=first.module or "(root)", quantity=first.quantity, detail=place)
        outcome = self.outcome
        return Verdict(
            check=f"compare/{self.stage}", layer="layer", stage=self.stage, subject=subject, device=device,
            outcome=outcome, reason=self.reason(), measures=measures, where=where, baseline=baseline,
            next_command=None if outcome is Outcome.PASS else self.next_command(subject),
        )  # fmt: skip

    def reason(self) -> str:
        """One sentence."""
        first = self.first
        if first is not None:
            kind = "gradient " if first.direction == "backward" and self.localisation.first("forward") is None else ""
            at = f" (seen at {first.at or '(root)'})" if first.at != first.module else ""
            return (
                f"first introduced {kind}divergence: {first.module or '(root)'}{at}, {first.quantity}: {first.reason}"
            )
        if self.failures:
            more = f" and {len(self.failures) - 1} more" if len(self.failures) > 1 else ""
            return self.failures[0] + more
        if not self.pairs:
            return "nothing could be paired"
        if self.localisation.findings:
            return f"{len(self.localisation.findings)} results diverge, none of them from sources that agree"
        healed = self.localisation.healed
        remark = (
            f"; {len(healed)} inputs differ without effect ({healed[0].at or '(root)'} {healed[0].quantity})"
            if healed
            else ""
        )
        left = "".join(f"; {text}" for text in (self.declared, self.left_out, self.unexplained) if text)
        return f"{self.pairs} tensors agree within the error of their sources{remark}{left}"

    @property
    def declared(self) -> str:
        """What is left out for a known reason, and why that is no failure; empty where nothing is."""
        return declared_remarks(self.unpaired)

    @property
    def left_out(self) -> str:
        """What was not compared, in words; empty where all was."""
        if not self.skipped:
            return ""
        # Those that disagree first: they are why a stage cannot be told.
        gaps = sorted(self.skipped, key=lambda gap: not gap.disagrees)
        modules = list(dict.fromkeys(gap.name.split(" ")[0] for gap in gaps))
        named = ", ".join(modules[:NAMED]) + (f" and {len(modules) - NAMED} more" if len(modules) > NAMED else "")
        count = sum(gap.disagrees for gap in gaps)
        disagree = f" (statistics of {count} disagree)" if count else ""
        return f"not compared: {len(gaps)} tensors of {named}, because padding differs{disagree}"

    @property
    def unexplained(self) -> str:
        """Which weights updates set apart by nobody knows how much, and why; empty where none."""
        unknown = self.localisation.unknown
        if not unknown:
            return ""
        first = max(unknown, key=lambda finding: finding.relative)
        blind = any(finding.origin == NO_GRADIENTS for finding in unknown)
        no_sketches = "sketch" not in self.details and "tensor" not in self.details
        why = "as their gradients differ too much to tell"
        if blind or no_sketches:
            why = "as no gradients were captured" if blind else "as that takes sketches and gradients"
        return (
            f"{len(unknown)} weights differ since an update, by {first.relative:.2g} in {first.module}:"
            f" nobody knows by how much they may, {why}"
        )

    def next_command(self, subject: str) -> str | None:
        """What to run to learn more."""
        first = self.first
        if self.localisation.unknown and self.unsettled:
            return "capture update_actor with both, too: capture.detail=sketch capture.parameter_gradients=true"
        if self.unsettled:
            return "capture both with the same padding, or name what may differ with --allow-missing"
        if first is None:
            return None
        if first.reason in (UPDATE, UPDATE_SIZE, ALONE):
            return "look at the optimizer: learning rate, betas, weight decay, clipping, and whether it stepped at all"
        if first.quantity.startswith("parameter"):
            return "look at how this weight was loaded or sent: alignment run --case weight_sync"
        if first.quantity.startswith("setting"):
            return "look at how this module is configured"
        finest = "tensor" if self.details and "tensor" not in self.details else None
        if finest:
            asked = f"capture.detail=tensor capture.modules='{first.module}*'"
            return f"capture again with {asked}, then alignment.diagnose.replay_modules"
        return None

    def to_dict(self) -> dict:
        """JSON-ready."""
        return {
            "step": self.step,
            "stage": self.stage,
            "rank": self.rank,
            "aligned": self.aligned,
            "outcome": self.outcome.value,
            "pairs": self.pairs,
            "golden_rows": self.rows[0],
            "target_rows": self.rows[1],
            "details": list(self.details),
            "reason": self.reason(),
            "not_compared": len(self.skipped),
            "first_forward": _finding(self.localisation.first("forward")),
            "first_backward": _finding(self.localisation.first("backward")),
            "findings": [_finding(f) for f in self.localisation.findings],
            "healed": [_finding(f) for f in self.localisation.healed],
            "unknown": [_finding(f) for f in self.localisation.unknown],
            "unpaired": [{**asdict(gap), "fails": gap.fails} for gap in self.unpaired],
            "largest": [_finite(asdict(row)) for row in self.largest],
        }


@dataclass
class CaptureComparison:
    """All stages of two captures."""

    golden: str
    target: str
    stages: list[StageComparison]
    missing: list[str] = field(default_factory=list)

    @property
    def first(self) -> StageComparison | None:
        """The first stage that is not aligned: one that fails before one that cannot be told."""
        unlike = [stage for stage in self.stages if not stage.aligned]
        return next((stage for stage in unlike if not stage.unsettled), unlike[0] if unlike else None)

    def verdicts(self, device: str = "cpu") -> list[Verdict]:
        """One verdict per stage, and one for steps, stages or ranks that one side lacks."""
        out = [stage.verdict(self.target, device, self.golden) for stage in self.stages]
        for gap in self.missing:
            out.append(
                Verdict(
                    check="compare", layer="layer", stage="capture", subject=self.target, device=device,
                    outcome=Outcome.FAIL, reason=gap, baseline=self.golden,
                )
            )  # fmt: skip
        return out

    def to_dict(self) -> dict:
        """JSON-ready."""
        first = self.first
        return {
            "golden": self.golden,
            "target": self.target,
            "aligned": first is None and not self.missing and bool(self.stages),
            "first": None if first is None else {"step": first.step, "stage": first.stage, "reason": first.reason()},
            "missing": self.missing,
            "stages": [stage.to_dict() for stage in self.stages],
        }


def compare_captures(
    golden: CaptureReader,
    target: CaptureReader,
    *,
    names: NameMap | None = None,
    noise: NoiseModel | None = None,
    stages: Sequence[str] = (),
    steps: Sequence[int] = (),
    allow_missing: Sequence[str] = (),
    progress=None,
) -> CaptureComparison:
    """Compare all steps and stages that either capture has.

    Args:
        noise: what a benign pair taught (:func:`learn_noise`); defaults without one.
        stages, steps: only these, if any are named.
        allow_missing: shell patterns of modules and parameters that one side may lack.
        progress: called with a line of text before each stage.

    Raises:
        InputError: a capture is empty or damaged, or the two have no step, stage or module in common.
    """
    names = names or NameMap()
    out = CaptureComparison(str(golden.root), str(target.root), [])
    carried = Carried()
    for step, stage, rank, first, second in _common(golden, target, steps, stages, out.missing):
        if progress is not None:
            progress(f"step {step} {stage}" + (f" rank {rank}" if rank is not None else ""))
        pairing = _paired(first, second, names)
        carried.before(step, stage, rank, pairing.pairs)
        graph = ModuleGraph(pairing.pairs)
        model = noise or NoiseModel()
        compared = [pair for pair in pairing.pairs if not pair.skipped]
        model.expect_tests(len(compared))
        found = localise(graph, model)
        carried.after(stage, pairing.pairs, found.diverging)
        foreign = _different_implementations(pairing)
        unpaired = [
            _weigh(gap, foreign) for gap in pairing.unpaired if not matches_any(gap.name.split(" ")[0], allow_missing)
        ]
        out.stages.append(
            StageComparison(
                step, stage, rank, found, unpaired, len(compared), (pairing.golden_rows, pairing.target_rows),
                tuple(sorted({pair.difference.detail for pair in compared} - {"none"})), _largest(compared),
                foreign, _farthest(compared, "parameter_gradient"), _farthest(compared, "module"),
            )
        )  # fmt: skip
    return out


def learn_noise(
    golden: CaptureReader, benign: CaptureReader, *, names: NameMap | None = None, into: NoiseModel | None = None
) -> NoiseModel:
    """What two captures that are known to be equal teach about noise: the calibration for :func:`compare_captures`.

    Raises:
        InputError: as :func:`compare_captures`.
    """
    model = into or NoiseModel()
    missing: list[str] = []
    carried = Carried()
    for step, stage, rank, first, second in _common(golden, benign, (), (), missing):
        pairs = _paired(first, second, names or NameMap()).pairs
        carried.before(step, stage, rank, pairs)
        learn(ModuleGraph(pairs), model)
        carried.after(stage, pairs, set())
    return model


def _paired(first: list[TensorRow], second: list[TensorRow], names: NameMap) -> Pairing:
    pairing = pair_rows(first, second, names)
    if not pairing.pairs:
        raise no_common_names({row.module for row in first}, {row.module for row in second})
    return pairing


def _common(
    golden: CaptureReader, target: CaptureReader, steps: Sequence[int], stages: Sequence[str], missing: list[str]
) -> Iterator[tuple[int, str, int | None, list[TensorRow], list[TensorRow]]]:
    """(step, stage, rank or None, rows of golden, rows of the target); what one side lacks goes to ``missing``."""
    wanted = _both("step", golden.steps(), target.steps(), steps, missing, "")
    for step in wanted:
        mine, theirs = golden.stages(step), target.stages(step)
        if len(mine) == len(theirs) == 1 and mine != theirs and not stages:
            # foreign dumps know no stages, and name the only one they have as they like
            yield from _ranks(golden, target, step, mine[0], theirs[0])
            continue
        for stage in _both("stage", mine, theirs, stages, missing, f"step {step}: "):
            yield from _ranks(golden, target, step, stage, stage)


def _ranks(golden: CaptureReader, target: CaptureReader, step: int, stage: str, other: str):
    mine, theirs = golden.ranks(step, stage), target.ranks(step, other)
    if len(mine) == len(theirs) == 1:
        yield step, stage, None, list(golden.rows(step, stage, mine[0])), list(target.rows(step, other, theirs[0]))
        return
    if mine == theirs and same_layout(golden.rows(step, stage, mine[0]), target.rows(step, other, mine[0])):
        for rank in mine:
            first, second = list(golden.rows(step, stage, rank)), list(target.rows(step, other, rank))
            yield step, stage, rank, first, second
        return
    first = whole_rows([list(golden.rows(step, stage, rank)) for rank in mine], where=golden.root)
    second = whole_rows([list(target.rows(step, other, rank)) for rank in theirs], where=target.root)
    yield step, stage, None, first, second


def _both(what: str, mine: Sequence, theirs: Sequence, wanted: Sequence, missing: list[str], where: str) -> list:
    if wanted:
        absent = [x for x in wanted if x not in mine and x not in theirs]
        if absent:
            raise InputError(
                f"no such {what}", where="compare", expected=f"one of {sorted({*mine, *theirs})}", found=absent[0]
            )
        mine, theirs = [x for x in mine if x in wanted], [x for x in theirs if x in wanted]
    common = [x for x in mine if x in theirs]
    if not common:
        raise InputError(
            f"the two captures have no {what} in common",
            where=where.rstrip(": ") or "compare",
            expected=f"golden has {list(mine)}",
            found=f"the target has {list(theirs)}",
        )
    missing += [f"{where}{what} {x} only in golden" for x in mine if x not in theirs]
    missing += [f"{where}{what} {x} only in the target" for x in theirs if x not in mine]
    return common


def _different_implementations(pairing: Pairing) -> bool:
    """Most paired modules are of another class: another implementation, which has other modules inside."""
    return pairing.classes > 0 and pairing.other_classes > pairing.classes / 2


def _weigh(gap: Unpaired, foreign: bool) -> Unpaired:
    """Between implementations only parameters have to match; a module one of them lacks is a remark."""
    if foreign and gap.what in ("module", "call"):
        return replace(gap, what="tensor")
    return gap


def _farthest(pairs: list[Pair], kind: str) -> float:
    """Largest relative difference of one kind of pair; of modules, of what the outermost one gives out."""
    held = [p for p in pairs if p.kind == kind and not p.discrete and math.isfinite(p.difference.relative)]
    if kind == "module":
        held = [p for p in held if p.direction == "forward" and p.role == "output"]
        depth = {id(p): p.owner.count(".") if p.owner else -1 for p in held}
        outermost = min(depth.values(), default=0)
        held = [p for p in held if depth[id(p)] == outermost]
    return max((p.difference.relative for p in held), default=0.0)


def _largest(pairs: list[Pair]) -> list[Row]:
    worst = heapq.nlargest(LARGEST, pairs, key=lambda pair: pair.difference.relative)
    return [
        Row(
            module=pair.owner, quantity=pair.quantity, relative=pair.difference.relative, gain=pair.difference.gain,
            detail=pair.difference.detail, problem=pair.difference.problem,
        )
        for pair in worst
        if pair.difference.relative > 0.0
    ]  # fmt: skip


def _finding(finding: Finding | None) -> dict | None:
    return None if finding is None else _finite(asdict(finding))


def _finite(data: dict) -> dict:
    """JSON has no infinity: text instead."""
    return {k: (str(v) if isinstance(v, float) and not math.isfinite(v) else v) for k, v in data.items()}


def save_noise(model: NoiseModel, path: Path) -> None:
    """Write a calibration."""
    from alignment.files import write_json

    write_json(path, model.to_dict())


def load_noise(paths: Sequence[Path]) -> NoiseModel:
    """Read calibrations into one model.

    Raises:
        InputError: a file is missing or none.
    """
    model = NoiseModel()
    for path in paths:
        try:
            model.add(NoiseModel.from_dict(json.loads(Path(path).read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                "no calibration",
                where=path,
                expected="a file of 'alignment compare A B --save-noise FILE'",
                found=error,
            ) from error
    return model
