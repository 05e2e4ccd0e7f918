"""Where a recorded value comes from: machine, software, configuration, determinism, date and commit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import alignment
from alignment.devices.base import Device
from alignment.errors import InputError

COMMIT_VARIABLE = "ALIGNMENT_COMMIT"
DIRTY = "-dirty"
SOURCE_ROOT = Path(alignment.__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Everything that may explain why a value is what it is.

    ``commit`` ends in ``-dirty`` where the sources differed from it. ``hashes`` are SHA-256 by what was hashed (config,
    weights, data). ``determinism`` are the switches in force when the value was made.
    """

    date: str
    commit: str
    fingerprint: Mapping[str, object]
    packages: Mapping[str, str]
    python: str
    platform: str
    determinism: Mapping[str, object] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict:
        return asdict(self)

    @property
    def stack(self) -> str:
        """The software in one short phrase, for reports."""
        names = ("torch", "torch-npu", "transformers")
        known = [f"{n} {self.packages[n]}" for n in names if n in self.packages]
        return ", ".join([*known, str(self.fingerprint.get("runtime", ""))]).strip(", ")

    @classmethod
    def from_dict(cls, data: Mapping) -> Provenance:
        try:
            return cls(**data)
        except TypeError as error:
            raise InputError(f"not a provenance record ({error})", where="provenance") from None


def provenance_of(device: Device, *, hashes: Mapping[str, str] | None = None) -> Provenance:
    """The provenance of what is being computed now on ``device``."""
    return Provenance(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=source_commit(),
        fingerprint=device.fingerprint().to_dict(),
        packages=installed_packages(),
        python=platform.python_version(),
        platform=platform.platform(),
        determinism=determinism_switches(),
        hashes=dict(hashes or {}),
    )


def installed_packages() -> dict[str, str]:
    """Version of every installed distribution by its normalised name."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found[name.lower().replace("_", "-")] = distribution.version
    return dict(sorted(found.items()))


def source_commit(root: Path = SOURCE_ROOT) -> str:
    """The commit of the sources: ``ALIGNMENT_COMMIT`` where there is no git, else git's HEAD, with ``-dirty`` if changed.

    Changes below ``baselines/`` do not count: recording makes them.
    """
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    changed = _git(root, "status", "--porcelain", "--", ".", ":(exclude)baselines")
    return head if changed == "" else head + DIRTY


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def determinism_switches() -> dict[str, object]:
    """The switches that change bits, as they are now."""
    variables = (
        "CUBLAS_WORKSPACE_CONFIG",
        "HCCL_DETERMINISTIC",
        "LCCL_DETERMINISTIC",
        "CLOSE_MATMUL_K_SHIFT",
        "ATB_MATMUL_SHUFFLE_K_ENABLE",
        "ATB_LLM_LCOC_ENABLE",
        "HCCL_OP_EXPANSION_MODE",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
    )
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cuda_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "threads": torch.get_num_threads(),
        **{name: os.environ[name] for name in variables if name in os.environ},
    }


def content_hash(value: object) -> str:
    """SHA-256 of a JSON-ready value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def tensors_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
