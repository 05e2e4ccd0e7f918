"""What a capture costs next to msprobe's, on one transformer, in one run.

A Qwen2 shape (hidden 512, 8 layers, 256 × 4 tokens, vocabulary 8192, eager attention, one thread) takes forward,
backward and AdamW steps: plain, under our statistics, under our sketches and under msprobe's L0 statistics, in turn.
Printed are medians over the rounds of CPU time (all threads of the process, everything written to disk included)
relative to the plain step of the same round, and what a step of each takes on disk.

Run: ``python benchmarks/capture.py --json``; needs transformers, and mindstudio-probe for the comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from alignment.capture.config import CaptureConfig
from alignment.capture.kernel import kernel
from alignment.capture.session import capture

SECTIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Transformer:
    """One model, its batch and its optimizer; every mode trains its own copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        config = Qwen2Config(
            hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=8192, max_position_embeddings=512, attn_implementation="eager", use_cache=False,
            tie_word_embeddings=False,
        )  # fmt: skip
        self.model = Qwen2ForCausalLM(config).to(dtype)
        self.ids = torch.randint(8192, (4, 256))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()


class OurMode:
    """Steps under a capture of ours."""

    def __init__(self, dtype: torch.dtype, detail: str, directory: Path) -> None:
        self.work, self.directory, self.count = Transformer(dtype), directory, 0
        self._open = contextlib.ExitStack()
        self.session = self._open.enter_context(
            capture(self.work.model, CaptureConfig(detail=detail), directory=directory)
        )

    def step(self) -> None:
        with self.session.step(self.count):
            self.work.step()
        self.session.flush()
        self.count += 1

    def close(self) -> None:
        self._open.close()
        if self.session.failure:
            raise SystemExit(f"the capture failed: {self.session.failure}")


class MsprobeMode:
    """Steps under msprobe's module level statistics."""

    def __init__(self, dtype: torch.dtype, directory: Path) -> None:
        from msprobe.pytorch import PrecisionDebugger

        directory.mkdir(parents=True, exist_ok=True)
        config = directory / "config.json"
        config.write_text(
            json.dumps(
                {
                    "task": "statistics", "dump_path": str(directory / "dump"), "rank": [], "step": [], "level": "L0",
                    "async_dump": False, "statistics": {"scope": [], "list": [], "data_mode": ["all"],
                    "summary_mode": "statistics"},
                }
            )
        )  # fmt: skip
        self.work, self.directory = Transformer(dtype), directory
        self.debugger = PrecisionDebugger(config_path=str(config))

    def step(self) -> None:
        self.debugger.start(self.work.model)
        self.work.step()
        self.debugger.stop()
        self.debugger.step()

    def close(self) -> None:
        return None


class PlainMode:
    """Steps without a capture."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.work = Transformer(dtype)
        self.step = self.work.step

    def close(self) -> None:
        return None


def cpu_seconds(call: Callable[[], None]) -> float:
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def folder_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def bytes_of_one_step(dtype: torch.dtype, detail: str, directory: Path) -> int:
    mode = OurMode(dtype, detail, directory)
    mode.step()
    mode.close()
    size = folder_bytes(directory)
    shutil.rmtree(directory)
    return size


def measure(dtype: torch.dtype, directory: Path, rounds: int, with_msprobe: bool) -> dict[str, float]:
    modes: dict[str, object] = {
        "plain": PlainMode(dtype),
        "statistics": OurMode(dtype, "statistics", directory / "statistics"),
        "sketch": OurMode(dtype, "sketch", directory / "sketch"),
    }
    if with_msprobe:
        modes["msprobe_l0"] = MsprobeMode(dtype, directory / "msprobe")
    for mode in modes.values():
        mode.step()
    taken: dict[str, list[float]] = {name: [] for name in modes}
    names = list(modes)
    for turn in range(rounds):
        # Everyone is first as often as last: a machine that warms up or fills favours nobody.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken[name].append(cpu_seconds(modes[name].step))
    for mode in modes.values():
        mode.close()
    result = {"plain_cpu_seconds": statistics.median(taken["plain"])}
    for name in names[1:]:
        ratios = [mine / plain for mine, plain in zip(taken[name], taken["plain"])]
        result[f"{name}_ratio"] = statistics.median(ratios)
    del modes
    gc.collect()
    sketch = bytes_of_one_step(dtype, "sketch", directory / "one_sketch")
    tensor = bytes_of_one_step(dtype, "tensor", directory / "one_tensor")
    result |= {"sketch_bytes": sketch, "tensor_bytes": tensor, "sketch_bytes_fraction": sketch / tensor}
    if with_msprobe:
        peer = result["msprobe_l0_ratio"] - 1
        result["statistics_of_msprobe_overhead"] = (result["statistics_ratio"] - 1) / peer
        result["sketch_of_msprobe_overhead"] = (result["sketch_ratio"] - 1) / peer
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--without-msprobe", action="store_true", help="measure ours alone")
    parser.add_argument("--dtype", choices=list(SECTIONS), help="one section only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with_msprobe = not options.without_msprobe
    if with_msprobe and importlib.util.find_spec("msprobe") is None:
        parser.error("msprobe is not installed: pip install mindstudio-probe, or --without-msprobe")
    document: dict[str, object] = {
        "rounds": options.rounds,
        "torch": torch.__version__,
        "fast_path": kernel() is not None,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, dtype in SECTIONS.items():
            if options.dtype in (None, name):
                # msprobe logs to standard output, which belongs to the document.
                with contextlib.redirect_stdout(sys.stderr if not options.json else io.StringIO()):
                    document[name] = measure(dtype, Path(folder) / name, options.rounds, with_msprobe)
    first = document.get("float32") or document.get("bfloat16")
    document |= {k: v for k, v in first.items() if k.endswith("_ratio") or k in ("sketch_bytes_fraction",)}
    if options.json:
        print(json.dumps(document, indent=1))
        return
    for name in SECTIONS:
        for key, value in document.get(name, {}).items():
            print(f"{name:<10}{key:<34}{value:>14.4f}")


if __name__ == "__main__":
    main()
