"""What goes wrong in the chaos nights, as commands of their phases.

``damaged SOURCE TARGET FAULT`` copies an artefact of a clean night and damages it; ``fill FOLDER BYTES`` writes a file
through the product's own writer, ``hog FOLDER`` leaves no room in it; ``wait FLAG`` goes on until a file is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path


def damaged(source: str, target: str, fault: str) -> None:
    """Copies a folder; the last line of its metrics gets a NaN or is lost, its largest tensor file is cut in two."""
    shutil.copytree(source, target)
    if fault in ("nan", "short", "empty"):
        metrics = Path(target) / "metrics.jsonl"
        *lines, last = metrics.read_text().splitlines()
        if fault == "nan":
            values = json.loads(last)
            values["actor/grad_norm"] = float("nan")
            lines.append(json.dumps(values, sort_keys=True))
        metrics.write_text("" if fault == "empty" else "".join(line + "\n" for line in lines))
    if fault == "truncated":
        largest = max(Path(target).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
    if fault == "unnamed":
        about = json.loads((Path(target) / "run.json").read_text())
        del about["provenance"]
        (Path(target) / "run.json").write_text(json.dumps(about))


def fill(folder: str, size: str) -> None:
    """Leaves a document in a folder, or in the one that a variable of the node names, which may be full."""
    library = os.environ.pop("NIGHT_PRELOAD", "")
    if library:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": library})
    from alignment.files import write_json

    write_json(Path(os.environ.get(folder, folder)) / "filled.json", {"text": "x" * int(size)})
    # What Ray hides from a task that reserved no card would be an empty list of them.
    print(json.dumps({"written": int(size), "cards": os.environ.get("CUDA_VISIBLE_DEVICES", "all")}))


def hog(folder: str) -> None:
    """Fills a disk to its last byte, and leaves it so."""
    with contextlib.suppress(OSError), open(Path(folder) / "hogged", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    print(json.dumps({"hogged": True}), flush=True)


def wait(flag: str, seconds: str = "120") -> None:
    """Ends when ``flag`` is there."""
    deadline = time.monotonic() + float(seconds)
    while not Path(flag).exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{flag} never came")
        time.sleep(0.05)
    print(json.dumps({"waited": True}))


if __name__ == "__main__":
    {"damaged": damaged, "fill": fill, "hog": hog, "wait": wait}[sys.argv[1]](*sys.argv[2:])
