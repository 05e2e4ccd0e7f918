"""How much the metrics cost next to naive torch, side by side in one run.

Naive means what one writes by hand: cast both tensors to float64 whole, then compute. Printed are times and ratios
(ours / naive) and the peak of float64 copies each needs; nothing is judged. Run: ``python benchmarks/comparison.py``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from alignment.numerics import metrics
from alignment.numerics.random import portable_normal

NAIVE: dict[str, tuple[Callable, Callable]] = {
    "relative_l2": (
        metrics.relative_l2,
        lambda x, ref: float((x.double() - ref.double()).norm() / ref.double().norm()),
    ),
    "max_abs": (metrics.max_abs, lambda x, ref: float((x.double() - ref.double()).abs().max())),
    "mean_abs": (metrics.mean_abs, lambda x, ref: float((x.double() - ref.double()).abs().mean())),
    "cosine": (
        metrics.cosine,
        lambda x, ref: float(
            torch.nn.functional.cosine_similarity(x.double().flatten(), ref.double().flatten(), dim=0)
        ),
    ),
    "signed mean": (
        lambda x, ref: metrics.signed_mean_difference(x, ref).mean,
        lambda x, ref: float((x.double() - ref.double()).mean()),
    ),
    "kl_divergence": (
        metrics.kl_divergence,
        lambda p, q: float((p.double().exp() * (p.double() - q.double())).sum(-1).mean()),
    ),
    "total_variation": (
        metrics.total_variation,
        lambda p, q: float(0.5 * (p.double().exp() - q.double().exp()).abs().sum(-1).mean()),
    ),
    "flips k=1": (
        lambda x, ref: metrics.decided_flips(x, ref, margin=0.0).decided,
        lambda x, ref: int((x.argmax(-1) != ref.argmax(-1)).sum()),
    ),
}


def best_time(call: Callable, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    shape = options.rows, options.columns
    ref = portable_normal(shape, seed=0, stream="ref").log_softmax(-1).float()
    x = (ref.double() + 1e-3 * portable_normal(shape, seed=0, stream="x")).log_softmax(-1).bfloat16().float()
    print(f"{shape[0]} × {shape[1]} float32, {torch.get_num_threads()} threads, best of {options.repeats}")
    print(f"{'metric':<16}{'ours ms':>10}{'naive ms':>10}{'ratio':>8}")
    for name, (ours, naive) in NAIVE.items():
        a, b = (best_time(lambda call=call: call(x, ref), options.repeats) for call in (ours, naive))
        print(f"{name:<16}{a * 1e3:>10.1f}{b * 1e3:>10.1f}{a / b:>8.2f}")
    a, b = (
        best_time(call, options.repeats)
        for call in (
            lambda: portable_normal(shape, seed=0, stream="t"),
            lambda: torch.randn(shape, dtype=torch.float64),
        )
    )
    print(f"{'normal draws':<16}{a * 1e3:>10.1f}{b * 1e3:>10.1f}{a / b:>8.2f}")
    copies, chunk = 2 * x.numel() * 8 / 2**20, 2 * metrics._CHUNK * 8 / 2**20
    print(f"float64 copies of the operands: naive {copies:.0f} MiB, ours {chunk:.0f} MiB at any size")


if __name__ == "__main__":
    main()
