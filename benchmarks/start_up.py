"""How long it takes until something happens: imports, the command's help, and collection of the whole suite.

    python benchmarks/start_up.py [--repeat 5]

Prints the median wall time of fresh processes, each beside the process it cannot be faster than. Bar: collection under
3 s (without torch's own import where that is what the tests spend). Nothing is judged.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEASURED = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import alignment": ["-c", "import alignment"],
    "import alignment.pytest_plugin": ["-c", "import alignment.pytest_plugin"],
    "every case of the catalogue": ["-c", "from alignment.backends.catalogue import cases; cases()"],
    "alignment --help": ["-m", "alignment", "--help"],
    "pytest --collect-only": ["-m", "pytest", "--collect-only", "-q"],
}


def median_seconds(arguments: list[str], repeat: int) -> float:
    """Median wall time of a fresh interpreter with ``arguments``, run in the repository."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        times.append(time.perf_counter() - start)
        if done.returncode:
            sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    print(f"{'':32}{'seconds':>9}{'above torch':>13}")
    torch_seconds = median_seconds(MEASURED["import torch"], repeat)
    for name, arguments in MEASURED.items():
        seconds = torch_seconds if name == "import torch" else median_seconds(arguments, repeat)
        print(f"{name:32}{seconds:9.2f}{seconds - torch_seconds:13.2f}")


if __name__ == "__main__":
    main()
