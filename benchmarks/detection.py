"""Detection power: which of 23 faults a comparison of captures names in its module, which benign pairs alarm it.

    python benchmarks/detection.py [--setting ideal --setting realistic] [--seeds 0,1]
        [--uncalibrated] [--only benign] [--shift 1,5,16] [--keep FOLDER] [--json]

The protocol is in ``detection_protocol.py``. Captures hold module-level sketches only. Noise is calibrated on pairs of
other seeds than those that are judged (``--calibration-seeds``), or, with ``--uncalibrated``, not at all. A hit is a
case whose first introduced divergence is the culprit. With ``--shift`` the target of every case is given positions that
lie so many places later, which is benign: a fault is still to be named, and a benign pair still to be quiet. Nothing
here is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import detection_protocol as protocol
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.diagnose.capture_comparison import CaptureComparison, compare_captures, learn_noise
from alignment.diagnose.noise import NoiseModel

SETTINGS = {setting.name: setting for setting in (protocol.IDEAL, protocol.REALISTIC)}
CALIBRATION_SEEDS = tuple(range(1000, 1020))


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a comparison said of one case."""

    case: str
    setting: str
    seed: int
    culprit: str | None
    named: str | None
    flagged: int
    reason: str
    shift: int | None = None
    introduced: tuple[str, ...] = ()

    @property
    def hit(self) -> bool:
        """The culprit was named first; for a benign pair, nothing was."""
        return self.named == self.culprit


@contextlib.contextmanager
def _capture_into(directory: Path, model: nn.Module) -> Iterator[None]:
    # Sketches of whole tensors alone: what modules are configured with would name some faults without them.
    config = CaptureConfig(detail="sketch", settings=False, real_tokens=False)
    with capture(model, config, directory=directory) as session, session.step(0):
        yield


class Captures:
    """The captures of all cases below one folder; what is there from an earlier run is not recorded again.

    Judging takes a tenth of a second and recording some, so a change of the judgement is tried on kept captures.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def pair(
        self, case, setting: protocol.Setting, seed: int, shift: int | None = None
    ) -> tuple[OwnCapture, OwnCapture]:
        """Golden and target of one case."""
        model, changes, dtype, _ = protocol.golden_of(case, setting)
        named = "-".join([model, *(f"{k}={v}" for k, v in changes), str(dtype).rpartition(".")[2]])
        place = self.root / setting.name / str(seed)
        given, moved = ("", "") if shift is None else (" at positions", f" shifted {shift}")
        golden = self._recorded(
            place / _slug(f"golden {named}{given}"), protocol.record_golden, case, setting, seed, shift
        )
        target = place / _slug(case.name + moved)
        return golden, self._recorded(target, protocol.record_target, case, setting, seed, shift)

    @staticmethod
    def _recorded(
        directory: Path, record, case, setting: protocol.Setting, seed: int, shift: int | None
    ) -> OwnCapture:
        if not directory.is_dir():
            directory.parent.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(dir=directory.parent, prefix="."))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                record(case, setting, seed, lambda model: _capture_into(beside, model), shift)
            beside.rename(directory)
        return OwnCapture(directory)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=+-]+", "_", name)


@contextlib.contextmanager
def _kept(directory: Path | None) -> Iterator[Captures]:
    if directory is not None:
        yield Captures(directory)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Captures(Path(temporary))


def calibrate(
    kind: str, setting: protocol.Setting, seeds: Sequence[int], captures: Captures | None = None
) -> NoiseModel:
    """The noise of one model in one setting, from its benign pair."""
    noise = NoiseModel()
    case = next(case for case in protocol.CALIBRATIONS if case.name == kind)
    for seed in seeds:
        with contextlib.nullcontext(captures) if captures else _kept(None) as held:
            learn_noise(*held.pair(case, setting, seed), into=noise)
    return noise


def calibration_of(case) -> str:
    """Which calibration belongs to a case: that of its golden model."""
    return "dense gelu" if (case.golden or {}).get("activation") == "gelu" else case.model


def judge(
    case,
    setting: protocol.Setting,
    seed: int,
    noise: NoiseModel | None,
    captures: Captures | None = None,
    shift: int | None = None,
) -> tuple[Result, CaptureComparison]:
    """Compare one case."""
    with contextlib.nullcontext(captures) if captures else _kept(None) as held:
        comparison = compare_captures(*held.pair(case, setting, seed, shift), noise=noise)
    stage = comparison.stages[0]
    first = stage.first
    result = Result(
        case=case.name,
        setting=setting.name,
        seed=seed,
        culprit=getattr(case, "culprit", None),
        named=None if stage.aligned else (first.module if first else "(nothing introduced)"),
        flagged=len(stage.localisation.findings) + len(stage.failures),
        reason=f"{first.quantity} at {first.at}: {first.reason}, {first.excess:.3g} x limit"
        if first
        else "; ".join(stage.failures),
        shift=shift,
        introduced=tuple(dict.fromkeys(finding.module for finding in stage.localisation.introduced)),
    )
    return result, comparison


def run(
    settings: Sequence[str],
    seeds: Sequence[int],
    *,
    calibration_seeds: Sequence[int],
    names: Sequence[str] = (),
    only: str | None = None,
    shifts: Sequence[int | None] = (None,),
    keep: Path | None = None,
) -> list[Result]:
    """All cases of the protocol, or those whose name contains one of ``names``.

    Args:
        only: ``faults`` or ``benign``.
        shifts: how much later the positions lie that the target is given; None gives neither side any.
        keep: a folder of captures that are used again.
    """
    out = []
    cases = {"faults": protocol.FAULTS, "benign": protocol.BENIGN}
    chosen = [case for kind, group in cases.items() if only in (None, kind) for case in group]
    with _kept(keep) as captures:
        for name in settings:
            setting = SETTINGS[name]
            noises: dict[str, NoiseModel | None] = {}
            for seed in seeds:
                for case in chosen:
                    if name not in case.settings or (names and not any(part in case.name for part in names)):
                        continue
                    kind = calibration_of(case)
                    if kind not in noises:
                        noises[kind] = (
                            calibrate(kind, setting, calibration_seeds, captures) if calibration_seeds else None
                        )
                    for shift in shifts:
                        result, _ = judge(case, setting, seed, noises[kind], captures, shift)
                        out.append(result)
                        moved = "" if shift is None else f" shifted by {shift}"
                        print(
                            f"{name} {seed} {'hit ' if result.hit else 'MISS'} {case.name}{moved}: {result.named} "
                            f"({result.reason})",
                            file=sys.stderr,
                        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--setting", action="append", choices=sorted(SETTINGS))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--calibration-seeds", default=",".join(map(str, CALIBRATION_SEEDS)))
    parser.add_argument("--uncalibrated", action="store_true")
    parser.add_argument("--only", choices=("faults", "benign"))
    parser.add_argument("--shift", help="give the target positions that lie so many places later: 1,5,16")
    parser.add_argument("--keep", type=Path, help="folder of captures; those it holds are not recorded again")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    calibration = [] if arguments.uncalibrated else [int(seed) for seed in arguments.calibration_seeds.split(",")]
    shifts = [int(shift) for shift in arguments.shift.split(",")] if arguments.shift else [None]
    results = run(
        arguments.setting or sorted(SETTINGS),
        seeds,
        calibration_seeds=calibration,
        names=arguments.case,
        only=arguments.only,
        shifts=shifts,
        keep=arguments.keep,
    )
    if arguments.json:
        print(
            json.dumps({"summary": summary(results), "cases": [{**asdict(r), "hit": r.hit} for r in results]}, indent=1)
        )
        return
    cases = list(dict.fromkeys(r.case for r in results))
    columns = list(dict.fromkeys(map(_column, results)))
    by_place = {(r.case, *_column(r)): r for r in results}
    heads = [f"{name} {seed}" + ("" if shift is None else f" +{shift}") for name, seed, shift in columns]
    print("| case | " + " | ".join(heads) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for case in cases:
        marks = []
        for column in columns:
            r = by_place.get((case, *column))
            marks.append(
                "n/a"
                if r is None
                else ("H" if r.culprit else "–")
                if r.hit
                else ("–" if r.culprit and r.named is None else f"w{r.flagged}")
            )
        print(f"| {case} | " + " | ".join(marks) + " |")
    for line in summary(results):
        print(line)


def _column(result: Result) -> tuple[str, int, int | None]:
    return result.setting, result.seed, result.shift


def summary(results: Sequence[Result]) -> list[dict]:
    """Hits and alarms per setting, seed and shift."""
    out = []
    for column in dict.fromkeys(map(_column, results)):
        setting, seed, shift = column
        mine = [r for r in results if _column(r) == column]
        faults, benign = [r for r in mine if r.culprit], [r for r in mine if not r.culprit]
        out.append(
            {
                "setting": setting,
                "seed": seed,
                **({} if shift is None else {"shift": shift}),
                "faults": len(faults),
                "culprit_first": sum(r.hit for r in faults),
                "culprit_named": sum(r.culprit in r.introduced for r in faults),
                "wrong_place_first": sum(not r.hit and r.named is not None for r in faults),
                "nothing_flagged": sum(r.named is None for r in faults),
                "benign": len(benign),
                "benign_alarms": sum(not r.hit for r in benign),
            }
        )
    return out


if __name__ == "__main__":
    main()
