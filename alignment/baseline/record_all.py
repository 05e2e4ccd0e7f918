"""``python -m alignment.baseline.record_all OUT``: every baseline of one device into a folder, resumable.

It needs torch, numpy, safetensors, pyyaml and, for the subject of that name, transformers: what a borrowed GPU machine
has. The commit comes from ``ALIGNMENT_COMMIT`` where there is no git.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from alignment.errors import InputError

LAYERS = ("unit", "layer", "e2e")
WORK = ".work"


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when everything asked for is recorded, 2 otherwise."""
    options = _parser().parse_args(arguments)
    # Small models: one thread is the fastest, and the order of sums is then the same on every CPU.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        _record(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m alignment.baseline.record_all", description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the baselines; what is complete in it is skipped")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, npu, cuda:1, … (default: auto)")
    parser.add_argument("--layer", action="append", choices=LAYERS, help="only this layer (repeatable)")
    parser.add_argument("--case", action="append", default=[], metavar="ID", help="only cases that begin so (repeatable)")
    parser.add_argument("--subject", action="append", metavar="NAME", help="only this implementation (repeatable)")
    parser.add_argument("--preset", action="append", metavar="NAME", help="only this end-to-end setting (repeatable)")
    parser.add_argument("--steps", type=int, help="shorter end-to-end runs, for a trial")
    return parser


def _record(options: argparse.Namespace) -> None:
    from alignment.baseline.record import refuse_unfit
    from alignment.devices.base import get_device

    start = time.monotonic()
    device = get_device(options.device)
    refuse_unfit(device)

    def report(line: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {line}", flush=True)

    report(f"recording on {device.label}: {device.fingerprint().chip}")
    layers = options.layer or LAYERS
    for layer in LAYERS[:2]:
        if layer in layers:
            _record_cases(options, device, layer, report)
    if "e2e" in layers:
        _record_runs(options, device, report)
    shutil.rmtree(options.out / WORK, ignore_errors=True)
    report(f"complete: {options.out}")


def _record_cases(options: argparse.Namespace, device, layer: str, report) -> None:
    from alignment.backends.catalogue import cases
    from alignment.backends.subject import subject_entries
    from alignment.baseline.record import complete, record
    from alignment.baseline.store import BaselineStore

    store = BaselineStore(options.out)
    chosen = [c for c in cases(layer) if not options.case or any(c.id.startswith(p) for p in options.case)]
    for entry in subject_entries(layer, names=tuple(options.subject or ())):
        subject = entry.load()
        available = subject.available(device)
        if device.kind not in entry.kinds or not available.available:
            report(f"{layer}: {entry.name} is not recorded: {available.reason}")
            continue
        for operator, group in groupby(sorted(chosen, key=lambda c: c.operator), key=lambda c: c.operator):
            wanted = [c for c in group if subject.supports(c) and not complete(store, c, entry.name, device)]
            if wanted:
                done = record(wanted, device, store, subjects=[entry.name])
                report(f"{layer}: {operator} by {entry.name}: {len(done.entries)} cases, {len(done.changes)} values changed")


def _record_runs(options: argparse.Namespace, device, report) -> None:
    for path, record in _runs(options, device, report):
        if path.exists():
            report(f"e2e: {path.name} is complete")
            continue
        record()
        report(f"e2e: {path.name} recorded")


def _runs(options: argparse.Namespace, device, report) -> Iterator[tuple[Path, object]]:
    from alignment.baseline import runs

    work, chip = options.out / WORK, device.fingerprint().chip
    folder = runs.e2e_folder(options.out, kind=device.kind, chip=chip)
    wanted = tuple(options.preset or runs.PRESETS)
    for preset in wanted:
        if preset not in runs.PRESETS:
            raise InputError("no such setting is recorded", where="--preset", expected=", ".join(runs.PRESETS), found=preset)
    for preset in wanted:
        more = {"work": work, "report": report}
        if preset in runs.REPLAY_PRESETS:
            steps = {"steps": min(options.steps, runs.REPLAY_STEPS)} if options.steps else {}
            yield (
                folder / f"{preset}.replay" / runs.REPLAY_FILE,
                lambda p=preset, s=steps: runs.record_replay(options.out, p, device, **more, **s),
            )
        steps = {"steps": options.steps} if options.steps else {}
        yield (
            folder / f"{preset}.curves.json",
            lambda p=preset, s=steps: runs.record_curves(options.out, p, device, **more, **s),
        )


if __name__ == "__main__":
    sys.exit(main())
