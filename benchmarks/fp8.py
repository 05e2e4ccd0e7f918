"""FP8 → BF16 of a checkpoint of many gigabytes: peak anonymous memory, and throughput against plain writing.

    python benchmarks/fp8.py [--gigabytes 8] [--folder FOLDER] [--keep]

Writes a synthetic sharded FP8 checkpoint so large that its conversion has the given size, converts it, writes each
file's number of zero bytes plainly in turn, and prints one row. Both are timed with the source in the page cache and
flushed to the disk (fsync per file). Bars: peak RssAnon under 2 GB, at least half of the throughput of plain writing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from alignment.models.config import preset
from alignment.weights.fp8 import convert_fp8_checkpoint
from alignment.weights.tensor_file import plan_file, write_all, write_file

PEAK_BAR_BYTES = 2e9
THROUGHPUT_BAR = 0.5
ROWS, COLUMNS, PER_SHARD = 4096 + 64, 7168 + 32, 16


def anonymous_bytes() -> int:
    """``RssAnon`` of this process: what is not backed by a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


class PeakAnonymous:
    """Samples :func:`anonymous_bytes` every five milliseconds."""

    def __enter__(self):
        self.bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.005):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __exit__(self, *exc):
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_bytes())


def write_source(folder: Path, output_bytes: int) -> None:
    """Shards of FP8 weights with edge blocks on both sides; the bytes repeat, which matters to neither side."""
    folder.mkdir(parents=True)
    weights = max(1, round(output_bytes / (2 * ROWS * COLUMNS)))
    codes = torch.randint(0, 255, (ROWS * COLUMNS,), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    grid = (-(-ROWS // 128), -(-COLUMNS // 128))
    scale = torch.rand(grid) * 1e-3 + 1e-4
    weight_map = {}
    shards = -(-weights // PER_SHARD)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = [f"model.layers.{i}.weight" for i in range(shard * PER_SHARD, min(weights, (shard + 1) * PER_SHARD))]
        listed = [(n, "F8_E4M3", (ROWS, COLUMNS)) for n in names] + [(f"{n}_scale_inv", "F32", grid) for n in names]
        plan = plan_file(folder / file, listed, metadata={"format": "pt"})

        def fill(tensor, out):
            data = codes if tensor.dtype == "F8_E4M3" else scale
            write_all(out, memoryview(data.view(torch.uint8).numpy().reshape(-1)))

        write_file(folder / file, plan, fill)
        weight_map |= {name: file for name, _, _ in listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    hf = {**preset("deepseek-v3-671b").to_hf(), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(hf))


def write_plainly(path: Path, size: int) -> None:
    """A file of ``size`` zero bytes, 1 MiB (what fits the cache) at a time, flushed to the disk."""
    data = memoryview(bytearray(1 << 20))
    with open(path, "wb", buffering=0) as out:
        while size > 0:
            size -= out.write(data[:size])
        os.fsync(out.fileno())


class Stopwatch:
    """Wall and CPU seconds."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def __enter__(self):
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def __exit__(self, *exc):
        self.wall += time.perf_counter() - self._wall
        self.cpu += time.process_time() - self._cpu


def convert(source: Path, target: Path, plain: Path) -> None:
    """Runs in a process of its own, so that nothing else counts. After every file it is written plainly as well, so
    that other load on the machine falls on both."""
    whole, written, finished = Stopwatch(), Stopwatch(), []

    def write(path: Path) -> None:
        with written:
            write_plainly(plain, path.stat().st_size)
        plain.unlink()
        finished.append(path)

    def progress(file: str, done: int, total: int) -> None:
        for path in sorted(target.glob("*.safetensors")):
            if path not in finished:
                write(path)

    with PeakAnonymous() as peak, whole:
        report = convert_fp8_checkpoint(source, target, progress=progress)
        progress("", 0, 0)
    print(
        json.dumps(
            {
                "nbytes": report.nbytes,
                "files": report.files,
                "peak": peak.bytes,
                "seconds": whole.wall - written.wall,
                "cpu": whole.cpu - written.cpu,
                "plain_seconds": written.wall,
                "plain_cpu": written.cpu,
            }
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the output")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fp8-benchmark")
    parser.add_argument("--keep", action="store_true", help="leave the files")
    parser.add_argument("--convert", nargs=3, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.convert:
        convert(*arguments.convert)
        return 0
    root = arguments.folder
    root.mkdir(parents=True)
    try:
        source, target = root / "source", root / "target"
        write_source(source, int(arguments.gigabytes * 1e9))
        for path in source.iterdir():
            path.read_bytes() if path.suffix == ".json" else subprocess.run(
                ["cat", path], stdout=subprocess.DEVNULL, check=True
            )
        command = [sys.executable, __file__, "--convert", str(source), str(target), str(root / "plain")]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        ratio, gigabytes = found["plain_seconds"] / found["seconds"], found["nbytes"] / 1e9
        print(
            f"{gigabytes:.1f} GB in {found['files']} files: converted in {found['seconds']:.1f} s"
            f" ({gigabytes / found['seconds']:.2f} GB/s, {found['cpu']:.1f} s of CPU),"
            f" written plainly in {found['plain_seconds']:.1f} s ({found['plain_cpu']:.1f} s of CPU);"
            f" throughput {ratio:.2f} of plain writing (bar {THROUGHPUT_BAR});"
            f" peak RssAnon {found['peak'] / 1e9:.3f} GB (bar {PEAK_BAR_BYTES / 1e9:g})"
        )
        return 0 if ratio >= THROUGHPUT_BAR and found["peak"] < PEAK_BAR_BYTES else 1
    finally:
        if not arguments.keep:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
