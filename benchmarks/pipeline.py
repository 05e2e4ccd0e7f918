"""Step time of the Ray pipeline over the same step in a plain loop: ``python benchmarks/pipeline.py [--preset NAME]``.

Both run the same configuration from the same weights, so they compute the same numbers (checked); what differs is
that one crosses process boundaries. Their steps alternate, so that a busy machine slows both down alike, and the first
step of each, which warms up, is left out. The target is a ratio of medians of at most 1.2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path


class TurnTaker:
    """Lets two runs take their steps strictly in turn: a step begins when the other run has ended one."""

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore) -> None:
        self.mine, self.other = mine, other
        self.step = 0
        self.seconds: list[dict[str, float]] = []

    def on_stage(self, step: int, total_steps: int, stage: str) -> None:
        """Waits when a step is about to begin."""
        if step != self.step:
            self.step = step
            self.mine.acquire()

    def on_step(self, step: int, total_steps: int, metrics: dict, timings: dict) -> None:
        """Hands the machine over."""
        self.seconds.append(dict(timings))
        self.other.release()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="dapo-tiny")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each, after one that warms up")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from alignment.rl.config import load_config
    from alignment.rl.executor import InProcessExecutor
    from alignment.rl.ray_executor import RayExecutor
    from alignment.rl.run import run_dapo

    config = load_config(arguments.preset)
    trainer = dataclasses.replace(
        config.trainer,
        total_training_steps=arguments.steps + 1,
        save_freq=0,
        resume_mode="disable",
        device="cpu",
        logger=("jsonl",),
    )
    config = dataclasses.replace(config, trainer=trainer)
    turns = threading.Semaphore(1), threading.Semaphore(0)
    takers = TurnTaker(turns[0], turns[1]), TurnTaker(turns[1], turns[0])
    results = {}

    with tempfile.TemporaryDirectory() as directory:

        def run(name: str, executor, taker: TurnTaker) -> None:
            try:
                results[name] = run_dapo(config, run_dir=Path(directory) / name, executor=executor, progress=taker)
            finally:  # a run that fails must not leave the other one waiting
                for _ in range(arguments.steps + 1):
                    taker.other.release()

        thread = threading.Thread(target=run, args=("plain", InProcessExecutor(), takers[0]))
        thread.start()
        run("ray", RayExecutor(), takers[1])
        thread.join()
    if results["plain"].metrics != results["ray"].metrics:
        print("the two runs computed different numbers: their times cannot be compared", file=sys.stderr)
        return 1
    plain_steps, ray_steps = ([s["step"] for s in taker.seconds[1:]] for taker in takers)
    report = {
        "preset": arguments.preset,
        "steps": arguments.steps,
        "plain_seconds": statistics.median(plain_steps),
        "ray_seconds": statistics.median(ray_steps),
        "ratio": statistics.median(ray_steps) / statistics.median(plain_steps),
        "ratio_of_fastest": min(ray_steps) / min(plain_steps),
        "target": 1.2,
    }
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 0
    print(f"{arguments.preset}, {arguments.steps} steps each, one thread")
    for stage in takers[0].seconds[-1]:
        a, b = (statistics.median(s[stage] for s in taker.seconds[1:]) for taker in takers)
        print(f"  {stage:<14} plain {1000 * a:8.1f} ms   ray {1000 * b:8.1f} ms   {b / a if a else float('nan'):6.2f}×")
    print(f"Ray over plain: {report['ratio']:.3f}× (fastest steps: {report['ratio_of_fastest']:.3f}×); target ≤ 1.2×")
    return 0


if __name__ == "__main__":
    sys.exit(main())
