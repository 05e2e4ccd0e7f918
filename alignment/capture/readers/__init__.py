"""Readers of captures: this suite's own, and what an engineer's tools have left on disk."""

from __future__ import annotations

from pathlib import Path

from alignment.capture.record import CaptureReader
from alignment.errors import InputError

FORMATS = {
    "alignment": "capture.json",
    "msprobe": "rank<R>/dump.json or step<N>/rank<R>/dump.json",
    "collector": "actor_update/…, data/<key>/step<S>/…",
    "skip-rollout": "…/<step>/gen_batch.dp, step_<step>_<attempt>.safetensors",
    "rollout_data_dir": "<step>.jsonl",
    "tensorboard": "*tfevents*",
    "tensors": "*.safetensors, *.npy, *.pt",
}
"""The formats in the order in which they are tried, and what they are known by."""


def open_capture(path: str | Path, *, format: str | None = None) -> CaptureReader:
    """The reader of what lies at ``path``, a folder or a file. Reading neither imports torch nor runs anything read.

    Args:
        path: the capture.
        format: one of :data:`FORMATS`; None to find out.

    Raises:
        InputError: nothing is there, or nothing that any reader knows; or it is damaged.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise InputError("there is no such format", where="format", expected=", ".join(FORMATS), found=format)
    if not path.exists():
        raise InputError("there is no such capture", where=path)
    for name in FORMATS if format is None else (format,):
        reader = _reader(name, path, asked=format is not None)
        if reader is not None:
            return reader
    raise InputError(
        "no capture of a known format is here",
        where=path,
        expected="; ".join(f"{name}: {sign}" for name, sign in FORMATS.items()),
        found=", ".join(sorted(p.name for p in path.iterdir())[:8]) or "an empty folder"
        if path.is_dir()
        else path.name,
    )


def _reader(name: str, path: Path, *, asked: bool) -> CaptureReader | None:
    if name == "alignment":
        from alignment.capture.own_format import OwnCapture, is_capture

        return OwnCapture(path) if asked or is_capture(path) else None
    if name == "msprobe":
        from alignment.capture.readers.msprobe import MsprobeDump, is_dump

        return MsprobeDump(path) if asked or path.is_dir() and is_dump(path) else None
    if name == "collector":
        from alignment.capture.readers.collector_dump import CollectorDump, is_collector

        return CollectorDump(path) if asked or path.is_dir() and is_collector(path) else None
    if name == "skip-rollout":
        from alignment.capture.readers.rollout_dumps import SkippedRollouts, is_skipped

        return SkippedRollouts(path) if asked or is_skipped(path) else None
    if name == "rollout_data_dir":
        from alignment.capture.readers.rollout_dumps import RolloutLines, is_lines

        return RolloutLines(path) if asked or is_lines(path) else None
    if name == "tensorboard":
        from alignment.capture.readers.event_files import EventFiles, is_events

        return EventFiles(path) if asked or is_events(path) else None
    from alignment.capture.readers.tensor_folder import TensorFolder, is_folder

    return TensorFolder(path) if asked or is_folder(path) else None
