"""Comparing two dumps: ``alignment compare`` against the real ``msprobe compare`` on the same files, whole-process CPU.

    python benchmarks/compare.py [--msprobe VENV/bin/msprobe] [--megabytes 1024] [--rows 20000] [--rounds 3] [--json]

msprobe itself writes the dumps, of a chain of small modules (statistics) or of large ones (tensors), twice, the second
time with inputs that differ by 1e-6. Both tools then compare them in turn, files in the page cache. Prints
``speedup_statistics`` (bar: ≥ 10) and ``speedup_tensor`` (≥ 5): medians of the ratios of neighbouring runs; start-up
and peak memory; ``peak_memory_ratio``, our peak memory on the tensors over that on a quarter of them (1 where it does
not depend on the size of a dump), and ``peak_bytes_per_row``, by how much it grows with each row of statistics. Exit
code 2 where msprobe is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TENSOR_MEGABYTES = 10
"""Size of one tensor: a hidden state of 640 tokens and width 4096 in float32."""

ROWS_PER_MODULE = 4
"""Input, output, weight and bias."""

WRITER = """
import json, sys
import torch
from torch import nn
from msprobe.pytorch import PrecisionDebugger

task, out, modules, elements, offset = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
options = {"scope": [], "list": [], "data_mode": ["all"]}
config = {"task": task, "dump_path": out, "rank": [], "step": [], "level": "L0", "async_dump": False,
          "statistics": {**options, "summary_mode": "statistics"}, "tensor": options}
with open(out + ".config.json", "w") as file:
    json.dump(config, file)
torch.manual_seed(0)
torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return (x.view(-1, 4) * self.weight + self.bias).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(modules))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


model = Model()
x = torch.randn(elements)
debugger = PrecisionDebugger(config_path=out + ".config.json")
debugger.start(model=model)
with torch.no_grad():
    model(x * (1 + offset))
debugger.stop()
"""


def write_dumps(python: Path, task: str, root: Path, *, modules: int, elements: int) -> tuple[Path, Path]:
    """Two dumps of msprobe below ``root``; returns their folders ``step0``, which hold one process each."""
    script = root / "writer.py"
    script.write_text(WRITER, encoding="utf-8")
    out = []
    for name, offset in (("golden", 0.0), ("target", 1e-6)):
        where = root / name
        command = [str(python), str(script), task, str(where), str(modules), str(elements), str(offset)]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
        found = sorted(where.rglob("dump.json"))
        if not found:
            sys.exit(f"msprobe wrote no dump:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        out.append(found[0].parent.parent)
    return out[0], out[1]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def cpu_of(command: list[str]) -> tuple[float, float, int]:
    """CPU seconds of a process and its children, its peak memory in MB, its exit code."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment(), cwd=ROOT
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, process.returncode


def ours_on(golden: Path, target: Path) -> list[str]:
    return [sys.executable, "-m", "alignment", "compare", str(golden), str(target), "--json"]


def peak_of_a_quarter(task: str, python: Path, *, modules: int, elements: int, keep: Path) -> float:
    """Our peak memory in MB on a dump of a quarter of the modules."""
    keep.mkdir()
    golden, target = write_dumps(python, task, keep, modules=modules, elements=elements)
    _, peak, code = cpu_of(ours_on(golden, target))
    shutil.rmtree(keep)
    if code not in (0, 1):
        sys.exit(f"alignment compare failed with {code} on a quarter of the dump")
    return peak


def measure(task: str, msprobe: Path, *, modules: int, elements: int, rounds: int, keep: Path) -> dict[str, float]:
    """Medians over ``rounds`` neighbouring runs of both tools."""
    quarter = max(1, modules // 4)
    less = peak_of_a_quarter(task, msprobe.with_name("python"), modules=quarter, elements=elements, keep=keep / "less")
    golden, target = write_dumps(msprobe.with_name("python"), task, keep, modules=modules, elements=elements)
    ours_command = ours_on(golden, target)
    ours, theirs, ratios, peaks, their_peaks = [], [], [], [], []
    for turn in range(rounds):
        result = keep / f"result{turn}"
        result.mkdir()
        mine, peak, code = cpu_of(ours_command)
        if code not in (0, 1):
            done = subprocess.run(
                ours_command, capture_output=True, text=True, env=_environment(), cwd=ROOT, check=False
            )
            sys.exit(f"alignment compare failed:\n{done.stderr[-2000:]}")
        other, their_peak, code = cpu_of(
            [str(msprobe), "compare", "-tp", str(target), "-gp", str(golden), "-o", str(result)]
        )
        if code or not any(result.iterdir()):
            sys.exit(f"msprobe compare failed with {code}")
        shutil.rmtree(result)
        ours.append(mine)
        theirs.append(other)
        ratios.append(other / mine)
        peaks.append(peak)
        their_peaks.append(their_peak)
    return {
        "ours_cpu_s": statistics.median(ours),
        "msprobe_cpu_s": statistics.median(theirs),
        "speedup": statistics.median(ratios),
        "ours_peak_mb": max(peaks),
        "peak_ratio": max(peaks) / less,
        "peak_bytes_per_row": (max(peaks) - less) * (1 << 20) / (ROWS_PER_MODULE * max(1, modules - quarter)),
        "msprobe_peak_mb": max(their_peaks),
    }


def start_up(rounds: int) -> float:
    """CPU seconds until ``alignment compare`` refuses a path that does not exist."""
    command = [sys.executable, "-m", "alignment", "compare", "/nowhere/golden", "/nowhere/target", "--json"]
    return statistics.median(cpu_of(command)[0] for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--msprobe", type=Path, default=shutil.which("msprobe"))
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("statistics", "tensor"))
    parser.add_argument("--scratch", type=Path, help="Folder for the dumps, 2 x --megabytes.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.msprobe is None or not arguments.msprobe.exists():
        print("msprobe is not installed here (pip install mindstudio-probe); name it with --msprobe", file=sys.stderr)
        sys.exit(2)
    out: dict[str, float] = {"start_up_cpu_s": start_up(arguments.rounds)}
    shapes = {
        "statistics": {"modules": max(1, arguments.rows // ROWS_PER_MODULE), "elements": 64},
        "tensor": {
            "modules": max(1, arguments.megabytes // (2 * TENSOR_MEGABYTES)),
            "elements": TENSOR_MEGABYTES << 18,
        },
    }
    for task, shape in shapes.items():
        if arguments.only in (None, task):
            with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
                found = measure(task, arguments.msprobe, rounds=arguments.rounds, keep=Path(directory), **shape)
            ratio, growth = found.pop("peak_ratio"), found.pop("peak_bytes_per_row")
            out |= {"peak_memory_ratio": ratio} if task == "tensor" else {"peak_bytes_per_row": growth}
            out |= {f"{task}_{name}": value for name, value in found.items() if name != "speedup"}
            out[f"speedup_{task}"] = found["speedup"]
    if arguments.json:
        print(json.dumps(out, indent=1))
        return
    for name, value in out.items():
        print(f"{name:28} {value:10.3f}")


if __name__ == "__main__":
    main()
