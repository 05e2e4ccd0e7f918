"""Key data of the precision collector: ``data/<key>/step<S>/rank<R>/micro_step<M>/<name><i>.npy`` and ``.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignment.files import write_atomically, write_json

KEYS = ("responses", "input_ids", "attention_mask", "prompts", "position_ids", "old_log_probs", "entropys")
FILE_NAMES = {"responses": "response"}
"""The name of a key's files where it is not the key's."""


def write_key_data(
    dump_path: Path, values: Mapping[str, Tensor | np.ndarray], *, step: int, rank: int, micro_step: int, index: int = 0
) -> None:
    """Writes values and statistics of one micro step, each file whole or not at all.

    Args:
        dump_path: the collector's folder.
        values: by key; bfloat16 is stored as float32, which holds its values exactly.
        step, rank, micro_step, index: the place; steps from 0.
    """
    for key, value in values.items():
        array = as_array(value)
        folder = Path(dump_path) / "data" / key / f"step{step}" / f"rank{rank}" / f"micro_step{micro_step}"
        name = f"{FILE_NAMES.get(key, key)}{index}"
        write_atomically(folder / f"{name}.npy", lambda beside, array=array: _save(beside, array))
        write_json(folder / f"{name}.json", summary(array))


def as_array(value: Tensor | np.ndarray) -> np.ndarray:
    """A tensor as an array of a dtype that NumPy has."""
    if isinstance(value, np.ndarray):
        return value
    value = value.detach().cpu()
    if value.dtype not in (torch.float64, torch.float32, torch.float16) and value.is_floating_point():
        value = value.float()
    return value.contiguous().numpy()


def summary(array: np.ndarray) -> dict[str, Any]:
    """max, min, mean, norm (of the finite elements, in float64) and shape, and how many elements are not finite."""
    wide = array.astype(np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    found: dict[str, Any] = dict.fromkeys(("max", "min", "mean", "norm"))
    if finite.size:
        found = {
            "max": float(finite.max()), "min": float(finite.min()), "mean": float(finite.mean()),
            "norm": float(np.linalg.norm(finite)),
        }  # fmt: skip
    found["shape"] = list(array.shape)
    if finite.size != wide.size:
        found |= {"nan_count": int(np.isnan(wide).sum()), "inf_count": int(np.isinf(wide).sum())}
    return found


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:  # np.save would append an ending to the name
        np.save(file, array, allow_pickle=False)
