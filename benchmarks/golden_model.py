"""Step time of the golden model: forward, forward and backward, one decoding step, one reading of a checkpoint.

    python benchmarks/golden_model.py [--preset NAME ...] [--device DEVICE] [--dtype DTYPE] [--batch N] [--length N]

Prints one JSON object per preset: parameters, and the median and the spread of each time in seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from alignment.devices.base import Device, get_device
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.random import portable_integers
from alignment.weights.checkpoint import load_model, save_checkpoint


def seconds(work: Callable[[], object], device: Device, repeats: int) -> dict[str, float]:
    """Median and interquartile range of ``work``, after one call that is not counted."""
    taken = []
    for repeat in range(repeats + 1):
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        if repeat:
            taken.append(time.perf_counter() - start)
    low, median, high = statistics.quantiles(taken, n=4)
    return {"median": median, "interquartile": high - low}


def measure(name: str, device: Device, *, dtype: torch.dtype, batch: int, length: int, repeats: int) -> dict:
    config = preset(name)
    model = CausalLM(config, dtype=dtype, device=device.torch_device).init_weights(0)
    model.absorb()
    tokens = portable_integers(0, config.vocab_size, (batch, length), seed=0, stream="benchmark")
    tokens = tokens.to(device.torch_device)

    @torch.no_grad()
    def forward() -> None:
        model(tokens)

    def train() -> None:
        model.zero_grad()
        model(tokens).float().log_softmax(-1)[..., 0].mean().backward()

    cache = model.new_cache(batch, length + repeats + 1)
    model.prefill(tokens, cache)
    found = {
        "preset": name,
        "device": device.label,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "tokens": [batch, length],
        "parameters": sum(p.numel() for p in model.parameters()),
        "forward": seconds(forward, device, repeats),
        "forward_backward": seconds(train, device, repeats),
        "decode_step": seconds(lambda: model.decode(tokens[:, :1], cache), device, repeats),
    }
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(f"{folder}/checkpoint", config, model.state_dict())
        found["load_checkpoint"] = seconds(lambda: load_model(f"{folder}/checkpoint"), device, repeats)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--preset", nargs="+", default=["tiny-moonlight", "tiny-deepseek"])
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16"])
    arguments.add_argument("--batch", type=int, default=128)
    arguments.add_argument("--length", type=int, default=32)
    arguments.add_argument("--repeats", type=int, default=9)
    given = arguments.parse_args()
    for name in given.preset:
        found = measure(
            name,
            get_device(given.device),
            dtype=getattr(torch, given.dtype),
            batch=given.batch,
            length=given.length,
            repeats=given.repeats,
        )
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
