"""Megatron's own arguments, as it prints them into a log and as verl keeps its transformer configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from alignment.errors import InputError
from alignment.files import read_json

LOGS = ("*.log", "*.out", "*.txt")
TRANSFORMER = "transformer_config.json"
_BEGIN, _END = re.compile(r"-{3,} arguments -{3,}"), re.compile(r"-{3,} end of arguments -{3,}")
_LINE = re.compile(r"(\w+) \.{2,} (.*?)\s*$")
_OF_A_RANK = re.compile(
    r"^((local|global|node|machine)_)?ranks?$|(^|_)parallel_rank$|(^|_)(device|devices|port|host|hostname|timestamp)(_|$)"
    r"|^(save|load)(_dir|_path|(_retain)?_interval)?$|^(wandb|tensorboard)_|_to_tensorboard$|^logging_level$"
    r"|^log_(dir|path|file|level|interval|progress|throughput|straggler|energy|params_norm|num_zeros_in_grad)$"
)
"""Which rank it is, where it runs, where it writes and what it logs, by whole names: ``kv_lora_rank`` is the width of a
layer, and ``load_balancing`` and ``log_probs`` are computed with."""
_LINES = 200_000
"""Of a log in which the block has to begin; it is among the first things that Megatron prints."""


def megatron_arguments(directory: Path) -> dict[str, Any]:
    """Name → value of what Megatron says of itself in a run's folder; empty where it says nothing.

    Read are the block between ``arguments`` and ``end of arguments`` of the first log that has one (Megatron-LM's
    ``_print_args``, also behind the prefix that Ray gives to lines of workers), and the ``transformer_config.json`` of
    the last checkpoint. What tells a rank or a place from another is left out.
    """
    found: dict[str, Any] = {}
    for path in sorted(path for pattern in LOGS for path in Path(directory).rglob(pattern)):
        found = _of_log(path)
        if found:
            break
    kept = sorted(Path(directory).rglob(TRANSFORMER), key=_step)
    if kept:
        try:
            told = read_json(kept[-1])
        except InputError:
            told = None
        if isinstance(told, dict):
            found |= {f"transformer_config.{name}": value for name, value in told.items()}
    return {name: value for name, value in found.items() if not _OF_A_RANK.search(name.rpartition(".")[2])}


def _of_log(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    inside = False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file):
                if not inside and number >= _LINES:
                    break
                if not inside:
                    inside = bool(_BEGIN.search(line))
                elif _END.search(line):
                    break
                elif match := _LINE.search(line):
                    found.setdefault(match[1], match[2])
    except OSError:
        return {}
    return found


def _step(path: Path) -> int:
    steps = re.findall(r"global_step_(\d+)", str(path))
    return int(steps[-1]) if steps else -1
