"""Detection power: which of 23 faults a comparison of captures names in its module, which benign pairs alarm it.

    python benchmarks/detection.py [--setting ideal --setting realistic] [--seeds 0,1] [--uncalibrated] [--json]

The protocol is in ``detection_protocol.py``. Captures hold module-level sketches only. Noise is calibrated on pairs of
other seeds than those that are judged (``--calibration-seeds``), or, with ``--uncalibrated``, not at all. A hit is a
case whose first introduced divergence is the culprit. Nothing here is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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

    @property
    def hit(self) -> bool:
        """The culprit was named first; for a benign pair, nothing was."""
        return self.named == self.culprit


@contextlib.contextmanager
def _capture_into(directory: Path, model: nn.Module) -> Iterator[None]:
    with capture(model, CaptureConfig(detail="sketch"), directory=directory) as session, session.step(0):
        yield


def captured_pair(case, setting: protocol.Setting, seed: int, root: Path) -> tuple[OwnCapture, OwnCapture]:
    """Both sides of one case as captures below ``root``."""
    sides = iter((root / "golden", root / "target"))
    fault = case if isinstance(case, protocol.Fault) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        protocol.golden_and_target(
            fault, None if fault else case, setting, seed, lambda model: _capture_into(next(sides), model)
        )
    return OwnCapture(root / "golden"), OwnCapture(root / "target")


def calibrate(kind: str, setting: protocol.Setting, seeds: Sequence[int]) -> NoiseModel:
    """The noise of one model in one setting, from its benign pair."""
    noise = NoiseModel()
    case = next(case for case in protocol.CALIBRATIONS if case.name == kind)
    for seed in seeds:
        with tempfile.TemporaryDirectory() as directory:
            learn_noise(*captured_pair(case, setting, seed, Path(directory)), into=noise)
    return noise


def calibration_of(case) -> str:
    """Which calibration belongs to a case: that of its golden model."""
    return "dense gelu" if (case.golden or {}).get("activation") == "gelu" else case.model


def judge(case, setting: protocol.Setting, seed: int, noise: NoiseModel | None) -> tuple[Result, CaptureComparison]:
    """Compare one case."""
    with tempfile.TemporaryDirectory() as directory:
        comparison = compare_captures(*captured_pair(case, setting, seed, Path(directory)), noise=noise)
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
    )
    return result, comparison


def run(
    settings: Sequence[str], seeds: Sequence[int], *, calibration_seeds: Sequence[int], names: Sequence[str] = ()
) -> list[Result]:
    """All cases of the protocol, or those whose name contains one of ``names``."""
    out = []
    for name in settings:
        setting = SETTINGS[name]
        noises: dict[str, NoiseModel | None] = {}
        for case in (*protocol.FAULTS, *protocol.BENIGN):
            if name not in case.settings or (names and not any(part in case.name for part in names)):
                continue
            kind = calibration_of(case)
            if kind not in noises:
                noises[kind] = calibrate(kind, setting, calibration_seeds) if calibration_seeds else None
            for seed in seeds:
                result, _ = judge(case, setting, seed, noises[kind])
                out.append(result)
                print(
                    f"{name} {seed} {'hit ' if result.hit else 'MISS'} {case.name}: {result.named} ({result.reason})",
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
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    calibration = [] if arguments.uncalibrated else [int(seed) for seed in arguments.calibration_seeds.split(",")]
    results = run(arguments.setting or sorted(SETTINGS), seeds, calibration_seeds=calibration, names=arguments.case)
    if arguments.json:
        print(
            json.dumps({"summary": summary(results), "cases": [{**asdict(r), "hit": r.hit} for r in results]}, indent=1)
        )
        return
    cases = list(dict.fromkeys(r.case for r in results))
    columns = list(dict.fromkeys((r.setting, r.seed) for r in results))
    by_place = {(r.case, r.setting, r.seed): r for r in results}
    print("| case | " + " | ".join(f"{setting} {seed}" for setting, seed in columns) + " |")
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


def summary(results: Sequence[Result]) -> list[dict]:
    """Hits and alarms per setting and seed."""
    out = []
    for setting, seed in dict.fromkeys((r.setting, r.seed) for r in results):
        mine = [r for r in results if (r.setting, r.seed) == (setting, seed)]
        faults, benign = [r for r in mine if r.culprit], [r for r in mine if not r.culprit]
        out.append(
            {
                "setting": setting,
                "seed": seed,
                "faults": len(faults),
                "culprit_first": sum(r.hit for r in faults),
                "wrong_place_first": sum(not r.hit and r.named is not None for r in faults),
                "nothing_flagged": sum(r.named is None for r in faults),
                "benign": len(benign),
                "benign_alarms": sum(not r.hit for r in benign),
            }
        )
    return out


if __name__ == "__main__":
    main()
