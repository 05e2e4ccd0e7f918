"""Saving a stream of tensors into the files that an existing checkpoint's index assigns them to."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from alignment.errors import InputError
from alignment.files import read_json
from alignment.models.config import ModelConfig
from alignment.weights.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, expected_shapes

ROTARY_FREQUENCIES = "*.rotary_emb.inv_freq"
"""Derived numbers that some indices list (Moonlight's does); as ``allow_missing`` it leaves them out."""


def read_index(directory: str | Path) -> dict[str, str]:
    """File by tensor name of the checkpoint in ``directory``, with an index or in one file.

    Raises:
        InputError: there is no checkpoint, or its index has no ``weight_map``.
    """
    directory = Path(directory)
    if (directory / INDEX_FILE).is_file():
        told = read_json(directory / INDEX_FILE)
        listed = told.get("weight_map") if isinstance(told, dict) else None
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise InputError("the index has no weight_map from tensors to files", where=directory / INDEX_FILE)
        return dict(listed)
    if not (directory / SINGLE_FILE).is_file():
        raise InputError("there are no weights here", where=directory, expected=f"{SINGLE_FILE} or {INDEX_FILE}")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(directory / SINGLE_FILE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE_FILE)
    except (SafetensorError, OSError) as error:
        raise InputError(f"the file is not safetensors ({error})", where=directory / SINGLE_FILE) from None


def check_index(index: Mapping[str, str], config: ModelConfig, *, allow_missing: Sequence[str] = ()) -> dict[str, str]:
    """The part of ``index`` that training produces, after making sure that nothing else is lost in silence.

    A writer that waits for every key of a file never writes a file with a key that training does not produce; a run
    that saves so loses whole layers. That is refused before anything is written.

    Args:
        index: file by tensor name.
        allow_missing: shell patterns of keys that may be left out.

    Raises:
        InputError: a key that training never produces, naming its file; or a tensor that the index has no file for.
    """
    produced = set(expected_shapes(config))
    missing = [
        key for key in index if key not in produced and not any(fnmatch.fnmatchcase(key, p) for p in allow_missing)
    ]
    if missing:
        key = missing[0]
        lost = sum(1 for other, file in index.items() if file == index[key] and other in produced)
        raise InputError(
            f"training never produces the tensor {key}, which the index assigns to a file"
            + (f" (and {len(missing) - 1} more such keys)" if len(missing) > 1 else ""),
            where=index[key],
            expected="every key of the file",
            found=f"a file that would be skipped, with {lost} trained tensor(s)",
            next_step=f"pass allow_missing=[{_pattern(key)!r}] to write the file without it",
        )
    unplaced = sorted(produced - index.keys())
    if unplaced:
        raise InputError(f"the index has no file for the tensor {unplaced[0]}", where=INDEX_FILE)
    return {key: file for key, file in index.items() if key in produced}


def save_stream(
    directory: str | Path,
    config: ModelConfig,
    stream: Iterable[tuple[str, Tensor]],
    *,
    index: Mapping[str, str],
    allow_missing: Sequence[str] = (),
) -> None:
    """Writes ``stream`` into the files of ``index`` and a fresh index beside them, whole or not at all.

    A file is written as soon as its last tensor has come, so the memory taken is that of the files that are still open.

    Raises:
        InputError: see :func:`check_index`; or the stream lacks a tensor or has one too many.
    """
    from alignment.weights.checkpoint import replacing

    placed = check_index(index, config, allow_missing=allow_missing)
    missing: dict[str, set[str]] = {}
    for key, file in placed.items():
        missing.setdefault(file, set()).add(key)
    open_files: dict[str, dict[str, Tensor]] = {}
    total, dtype = 0, None
    with replacing(Path(directory).absolute()) as beside:
        for name, tensor in stream:
            file = placed.get(name)
            if file is None or name not in missing.get(file, ()):
                raise InputError("a tensor that the index has no place for", where=name)
            # A copy: the producer may reuse its buffer for the next tensor.
            open_files.setdefault(file, {})[name] = tensor.detach().cpu().contiguous().clone()
            total += tensor.nbytes
            dtype = dtype or str(tensor.dtype).removeprefix("torch.")
            missing[file].discard(name)
            if not missing[file]:
                save_file(open_files.pop(file), beside / file, metadata={"format": "pt"})
                del missing[file]
        if missing:
            file = min(missing)
            raise InputError(
                f"the stream ended without the tensor {min(missing[file])}",
                where=file,
                expected="every key of the file",
            )
        if set(placed.values()) != {SINGLE_FILE}:
            listing = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
            (beside / INDEX_FILE).write_text(json.dumps(listing, indent=2) + "\n")
        hf = {**config.to_hf(), "torch_dtype": dtype}
        (beside / CONFIG_FILE).write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n")


def _pattern(key: str) -> str:
    return ROTARY_FREQUENCIES if fnmatch.fnmatchcase(key, ROTARY_FREQUENCIES) else key
