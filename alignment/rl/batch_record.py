"""The batches a run trained on, one file per step: token ids, masks, log-probs, scores and advantages of every sample.

``batches/step_000001.safetensors`` holds tensors whose first dimension is the sample, by verl's names, and who the
samples are in its metadata. Whoever compares two runs stage by stage reads these; NumPy is enough.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from alignment.errors import InputError
from alignment.files import write_atomically

if TYPE_CHECKING:
    from alignment.rl.batch import Batch

BATCHES = "batches"
SCHEMA = 1
FIELDS = (
    "prompts", "prompt_mask", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob",
    "values", "token_level_scores", "token_level_rewards", "advantages", "returns",
)  # fmt: skip
_NAME = re.compile(r"step_(\d+)\.safetensors")


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """One step's batch.

    ``tensors`` field → array [b, …]; ``prompt_ids`` [b] names of prompts, ``samples`` [b] numbers within the prompt.
    """

    step: int
    tensors: Mapping[str, np.ndarray]
    prompt_ids: Sequence[str]
    samples: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt_ids)


def batch_path(directory: Path, step: int) -> Path:
    """Where a run keeps the batch of ``step``."""
    return Path(directory) / BATCHES / f"step_{step:06d}.safetensors"


def record_of(batch: Batch, *, step: int) -> BatchRecord:
    """What a step trained on, for :func:`write_batch`; the samples of a prompt are numbered as they come."""
    tensors = {name: batch[name].detach().cpu().numpy() for name in FIELDS if name in batch}
    prompts = list(batch["prompt_id"])
    return BatchRecord(step=step, tensors=tensors, prompt_ids=prompts, samples=sample_numbers(prompts))


class BatchRecorder:
    """Keeps every step's batch as it leaves the advantage stage: a :class:`~alignment.rl.observers.DriverObserver`."""

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        self._run_dir = Path(run_dir)
        # What an earlier run in this directory did after the step that counts is not this run's.
        for step in recorded_steps(self._run_dir):
            if step > resume_step:
                batch_path(self._run_dir, step).unlink()

    def fields(self, step: int, stage: str, before: Batch | None, after: Batch) -> None:
        if stage == "advantage":
            write_batch(batch_path(self._run_dir, step), record_of(after, step=step))

    def close(self) -> None:
        """Every batch is on the disk already."""


def write_batch(path: Path, batch: BatchRecord) -> None:
    """Writes a batch whole or not at all.

    Raises:
        InputError: a tensor has another number of samples than there are names.
    """
    from safetensors.numpy import save_file

    for name, array in batch.tensors.items():
        if len(array) != len(batch):
            raise InputError(
                "a field of a batch has one row per sample", where=name, expected=len(batch), found=len(array)
            )
    who = {"schema": SCHEMA, "step": batch.step, "prompt_ids": list(batch.prompt_ids), "samples": list(batch.samples)}
    arrays = {name: np.ascontiguousarray(array) for name, array in batch.tensors.items()}
    write_atomically(path, lambda beside: save_file(arrays, beside, metadata={"batch": json.dumps(who)}))


def read_batch(path: Path) -> BatchRecord:
    """The batch at ``path``.

    Raises:
        InputError: the file is missing, damaged, or not a batch.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            who = json.loads((file.metadata() or {}).get("batch", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"a recorded batch cannot be read ({error})", where=path) from None
    if not isinstance(who, dict) or who.get("schema") != SCHEMA:
        raise InputError(
            "this is no recorded batch", where=path, expected=f"schema {SCHEMA}", found=who and who.get("schema")
        )
    names, numbers = who.get("prompt_ids"), who.get("samples")
    if not _are(names, str) or not _are(numbers, int) or len(names) != len(numbers) or type(who.get("step")) is not int:
        raise InputError(
            "a recorded batch does not say whose samples it holds", where=path, expected="step, prompt_ids and samples",
            found=", ".join(sorted(map(str, who))),
        )  # fmt: skip
    for name, array in tensors.items():
        if len(array.shape) < 1 or len(array) != len(names):
            raise InputError(
                "a field of a batch has one row per sample", where=f"{path}: {name}", expected=len(names),
                found=list(array.shape),
            )  # fmt: skip
    return BatchRecord(step=who["step"], tensors=tensors, prompt_ids=tuple(names), samples=tuple(numbers))


def _are(values: object, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def recorded_steps(directory: Path) -> list[int]:
    """The steps of a run whose batches were recorded."""
    there = Path(directory) / BATCHES
    found = (_NAME.fullmatch(path.name) for path in there.glob("*.safetensors"))
    return sorted(int(match[1]) for match in found if match)


def sample_numbers(prompt_ids: Sequence[str]) -> tuple[int, ...]:
    """0, 1, … within each prompt, in order of appearance."""
    seen: dict[str, int] = {}
    numbers = []
    for prompt in prompt_ids:
        numbers.append(seen.get(prompt, 0))
        seen[prompt] = numbers[-1] + 1
    return tuple(numbers)
