"""Checkpoints of a run: written beside, flushed, renamed; found again by three resume modes.

``<root>/global_step_<N>/`` holds one directory per trained role (``actor``, ``critic``), ``state.json`` and one
``rng_<role>_<rank>.safetensors`` per worker. ``latest_checkpointed_iteration.txt`` names the newest one. A directory
without the prefix of a finished one is what a killed run left behind; it is never read and is removed by the next save.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignment.errors import InputError
from alignment.files import read_json, sync_directory, write_atomically, write_json

LATEST = "latest_checkpointed_iteration.txt"
STATE = "state.json"
SCHEMA = 1
RESUME_MODES = ("disable", "auto", "resume_path")
_FINISHED, _UNFINISHED = "global_step_", ".unfinished_global_step_"


def save(
    root: Path, step: int, *, state: Mapping[str, Any], write: Callable[[Path], None], keep: int | None = None
) -> Path:
    """Saves a checkpoint of ``step``: all of it or, when the process dies on the way, none of it.

    Args:
        root: directory of all checkpoints of the run.
        step: number of finished training steps.
        state: the trainer's own state (data position, configuration, …), JSON-ready.
        write: puts the workers' files into the directory it is given.
        keep: how many checkpoints stay, oldest removed first; None keeps all.
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)
    beside, final = root / f"{_UNFINISHED}{step}", root / f"{_FINISHED}{step}"
    beside.mkdir()
    write(beside)
    write_json(beside / STATE, {"schema": SCHEMA, "step": step, **state})
    _flush(beside)
    _remove(final)
    os.replace(beside, final)
    sync_directory(root)
    write_atomically(root / LATEST, lambda path: path.write_text(f"{step}\n"))
    for stale in finished(root)[:-keep] if keep else ():
        _remove(root / f"{_FINISHED}{stale}")
    return final


def finished(root: Path) -> list[int]:
    """The steps of the finished checkpoints below ``root``."""
    names = [p.name.removeprefix(_FINISHED) for p in Path(root).glob(f"{_FINISHED}*")]
    return sorted(int(name) for name in names if name.isdigit())


def find(root: Path, *, resume_mode: str, resume_from_path: str | None = None) -> Path | None:
    """The checkpoint to resume from, or None for a fresh start.

    Args:
        root: directory of all checkpoints of the run.
        resume_mode: ``disable`` starts anew; ``auto`` takes the newest checkpoint of ``root`` if there is one;
            ``resume_path`` takes ``resume_from_path``.

    Raises:
        InputError: another mode, no path in mode ``resume_path``, or a path that is no checkpoint.
    """
    if resume_mode not in RESUME_MODES:
        raise InputError(
            "unknown resume mode", where="trainer.resume_mode", expected=" | ".join(RESUME_MODES), found=resume_mode
        )
    if resume_mode == "disable":
        return None
    if resume_mode == "auto":
        steps = finished(root)
        return Path(root) / f"{_FINISHED}{steps[-1]}" if steps else None
    if not resume_from_path:
        raise InputError(
            "resume_mode=resume_path needs the path", where="trainer.resume_from_path", expected=f"…/{_FINISHED}<N>"
        )
    path = Path(resume_from_path)
    if not path.name.startswith(_FINISHED) or not (path / STATE).is_file():
        raise InputError(
            "there is no finished checkpoint", where=path, expected=f"a directory {_FINISHED}<N> with {STATE}"
        )
    return path


def read_state(path: Path, *, config: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's state in the checkpoint at ``path``, after its configuration was compared with ``config``.

    Args:
        config: flat, dotted keys of everything that decides what is computed.

    Raises:
        InputError: another schema, or a configuration that differs: the first keys, with both values.
    """
    state = read_json(path / STATE)
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise InputError("a checkpoint of another schema", where=path, expected=SCHEMA, found=state.get("schema"))
    saved = state["config"]
    differing = sorted(k for k in saved.keys() | config.keys() if saved.get(k) != config.get(k))
    if differing:
        raise InputError(
            "the checkpoint belongs to another configuration",
            where=path,
            expected=", ".join(f"{k}={saved.get(k)}" for k in differing[:3]),
            found=", ".join(f"{k}={config.get(k)}" for k in differing[:3]),
            next_step="resume with the configuration of the checkpoint, or start anew with trainer.resume_mode=disable",
        )
    return state


def save_rng(path: Path) -> None:
    """The state of the generators of Python, NumPy and torch of this process (and of its accelerator)."""
    from safetensors.torch import save_file

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(np.concatenate([keys.astype(np.int64), [position, has_gauss]])),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    for kind, module in _accelerators():
        tensors[kind] = module.get_rng_state().cpu()
    save_file(tensors, path)


def load_rng(path: Path) -> None:
    """The inverse of :func:`save_rng`; an accelerator that is not here is passed over.

    Raises:
        InputError: the file is missing.
    """
    from safetensors.torch import load_file

    if not Path(path).is_file():
        raise InputError("the checkpoint lacks the state of the generators", where=path)
    tensors = load_file(path)
    version, *words = tensors["python"].tolist()
    gauss = tensors["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = tensors["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, tensors["numpy_gauss"].item())
    )
    torch.set_rng_state(tensors["torch"])
    for kind, module in _accelerators():
        if kind in tensors:
            module.set_rng_state(tensors[kind])


def _accelerators():
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and module.is_initialized():
            yield kind, module


def _remove(checkpoint: Path) -> None:
    """Takes the name away first: a process that dies in the middle of removing leaves nothing that looks finished."""
    if checkpoint.exists():
        nameless = checkpoint.with_name(f"{_UNFINISHED}{checkpoint.name}.removed")
        os.replace(checkpoint, nameless)
        shutil.rmtree(nameless)


def _flush(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    for path in [p for p in sorted(directory.rglob("*")) if p.is_dir()] + [directory]:
        sync_directory(path)
