"""Recorded rollouts: a first run writes its responses down, later runs load them and go straight to training.

With the inference engine out of the way two runs see the same tokens, so their training stages can be compared exactly;
and a run that only wants to train need not bring an engine up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from alignment.errors import InputError
from alignment.files import read_json, write_atomically, write_json
from alignment.rl.batch import Batch
from alignment.rl.contracts import CONTRACTS

KEY = "key.json"
SCHEMA = 1


class RecordedRollouts:
    """The rollouts of one run in ``directory``: ``key.json`` and one safetensors file per step and generation attempt.

    Args:
        directory: created with ``key.json`` when the first rollout is recorded.
        key: what the responses depend on, by name: hash of the model, hash of the data, every sampling parameter.

    Raises:
        InputError: the directory holds the record of another key: it is stale, and is neither used nor overwritten.
    """

    def __init__(self, directory: Path, *, key: Mapping[str, Any]) -> None:
        self.directory = Path(directory)
        self.key = dict(key)
        if (self.directory / KEY).exists():
            self._require_same_key(read_json(self.directory / KEY))

    def has(self, step: int, attempt: int = 0) -> bool:
        """Whether this rollout was recorded."""
        return _path(self.directory, step, attempt).is_file()

    def steps(self) -> int:
        """How many consecutive steps from 1 on are recorded (their first attempt at least)."""
        return self.count(self.directory)

    @staticmethod
    def count(directory: Path) -> int:
        """The same for any directory, without looking at its key."""
        count = 0
        while _path(Path(directory), count + 1, 0).is_file():
            count += 1
        return count

    def save(self, step: int, attempt: int, rollout: Batch) -> None:
        """Records what the rollout stage added to ``rollout``, whole or not at all."""
        from safetensors.torch import save_file

        if not (self.directory / KEY).exists():
            write_json(self.directory / KEY, {"schema": SCHEMA, **self.key})
        contract = CONTRACTS["rollout"]
        names = [n for n in contract.adds + contract.may_add if n in rollout]
        tensors = {n: rollout[n].cpu().contiguous().clone() for n in names}
        write_atomically(
            _path(self.directory, step, attempt),
            lambda path: save_file(tensors, path, metadata={"prompts": _digest(rollout)}),
        )

    def load(self, step: int, attempt: int, prompts: Batch) -> Batch:
        """``prompts`` with the recorded responses.

        Raises:
            InputError: the file is damaged, or was recorded for other prompts.
        """
        from safetensors import SafetensorError, safe_open

        path = _path(self.directory, step, attempt)
        try:
            with safe_open(path, framework="pt") as file:
                recorded_for = (file.metadata() or {}).get("prompts")
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise InputError(f"a recorded rollout cannot be read ({error})", where=path) from None
        if recorded_for != _digest(prompts):
            raise InputError(
                "the rollout was recorded for other prompts",
                where=path,
                expected=f"prompts {_digest(prompts)[:12]}",
                found=f"prompts {str(recorded_for)[:12]}",
                next_step=f"record anew after removing {self.directory}",
            )
        return prompts.add(tensors)

    def _require_same_key(self, found: Any) -> None:
        expected = {"schema": SCHEMA, **self.key}
        found = found if isinstance(found, dict) else {}
        differing = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
        if differing:
            raise InputError(
                "the recorded rollouts are stale: they belong to another run",
                where=self.directory,
                expected=", ".join(f"{k}={expected.get(k)}" for k in differing),
                found=", ".join(f"{k}={found.get(k)}" for k in differing),
                next_step=f"point rollout.skip_dump_dir elsewhere, or remove {self.directory} to record anew",
            )


def _path(directory: Path, step: int, attempt: int) -> Path:
    return directory / f"step_{step:06d}_{attempt:02d}.safetensors"


def hash_checkpoint(directory: Path) -> str:
    """SHA-256 over names and bytes of the configuration and weights of a Hugging Face checkpoint."""
    digest = hashlib.sha256()
    directory = Path(directory)
    files = sorted(p for p in directory.iterdir() if p.name == "config.json" or p.suffix == ".safetensors")
    if not files:
        raise InputError("there is no checkpoint", where=directory, expected="config.json and *.safetensors")
    for path in files:
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _digest(batch: Batch) -> str:
    digest = hashlib.sha256()
    for name in ("prompts", "prompt_mask"):
        digest.update(str(tuple(batch[name].shape)).encode())
        digest.update(batch[name].to(torch.int64).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
