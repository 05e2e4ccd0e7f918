"""Folders of plain tensor files, and single ones: ``.safetensors``, ``.npy``, and ``torch.save`` of tensors.

Every tensor is a row of kind ``value``. Its name is the key in its file; before it stands the path of the file without
its ending where a folder has several files, unless they are the numbered parts of one checkpoint. A lone
``state_dict`` around all tensors of a file is left out. ``step<N>`` and
``rank<R>`` folders are steps and ranks; without them everything is step 0 and rank 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignment.capture.own_format import decoded
from alignment.capture.readers.arrays import StoredArray
from alignment.capture.readers.foreign import files_below, numbered, reading, require_regular
from alignment.capture.readers.npy_file import read_npy
from alignment.capture.readers.pickled import walk
from alignment.capture.readers.torch_file import read_torch
from alignment.capture.record import TensorRow
from alignment.errors import InputError
from alignment.weights.tensor_file import read_header

STAGE = "tensors"
SAFETENSORS, NPY, TORCH = (".safetensors",), (".npy",), (".pt", ".pth", ".bin")
SUFFIXES = SAFETENSORS + NPY + TORCH

_ROOTS = ("state_dict.", "model_state_dict.")
"""What training loops put around the weights; where all tensors of a file lie under one, it names nothing."""
_PART = re.compile(r".*-\d{5}-of-\d{5}")
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


class TensorFolder:
    """A folder, or one file. See :class:`~alignment.capture.record.CaptureReader`.

    Raises:
        InputError: there is no tensor file.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._folders: dict[int, dict[int, Path]] = {}
        for step, folder in (numbered(self.root, "step") if self.root.is_dir() else {}).items():
            ranks = {r: p for r, p in numbered(folder, "rank").items() if _has_files(p)}
            if ranks or _has_files(folder):
                self._folders[step] = ranks or {0: folder}
        if not self._folders and self.root.is_dir():
            ranks = {r: p for r, p in numbered(self.root, "rank").items() if _has_files(p)}
            self._folders = {0: ranks} if ranks else {}
        if not self._folders:
            if not _has_files(self.root):
                raise InputError("there are no tensor files", where=root, expected=", ".join(SUFFIXES))
            self._folders = {0: {0: self.root}}

    def steps(self) -> list[int]:
        """See :class:`~alignment.capture.record.CaptureReader`."""
        return list(self._folders)

    def stages(self, step: int) -> list[str]:
        """The one stage."""
        return [STAGE] if step in self._folders else []

    def ranks(self, step: int, stage: str) -> list[int]:
        """See :class:`~alignment.capture.record.CaptureReader`."""
        return list(self._folders.get(step, {})) if stage == STAGE else []

    def describe(self) -> dict[str, Any]:
        """Format and steps."""
        return {"format": "tensors", "steps": len(self._folders)}

    def rows(self, step: int, stage: str, rank: int) -> Iterator[TensorRow]:
        """One row per tensor, file by file in the order of their names."""
        folder = self._folders.get(step, {}).get(rank) if stage == STAGE else None
        if folder is None:
            raise InputError(
                "there is no such step, stage and rank", where=self.root, found=f"step {step}, {stage}, rank {rank}"
            )
        files = list(_files(folder))
        several = len([f for f in files if not _PART.fullmatch(f.stem)]) > 1
        order = 0
        for path in files:
            prefix = ""
            if several and not _PART.fullmatch(path.stem):
                prefix = ".".join((*path.relative_to(folder).parent.parts, path.stem))
            for name, dtype, shape, load in _tensors(path):
                module = ".".join(part for part in (prefix, name) if part)
                yield TensorRow(
                    module=module or path.stem, class_name="", kind="value", direction="forward", call=0, role="output",
                    path=module or path.stem, order=order, parent="", dtype=dtype, shape=shape, load_tensor=load,
                )  # fmt: skip
                order += 1


def is_folder(root: Path) -> bool:
    """Whether there are tensor files in ``root`` or below its step and rank folders, or ``root`` is one."""
    return _has_files(Path(root))


def _tensors(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], Any]]:
    require_regular(path, "file")
    if path.suffix in SAFETENSORS:
        with reading(path, "safetensors file"):
            stored = read_header(path).tensors
            for tensor in stored:
                if any(type(n) is not int or n < 0 for n in tensor.shape):
                    raise InputError(
                        "a tensor without a shape", where=f"{path}: {tensor.name}", found=str(tensor.shape)[:80]
                    )
        for tensor in stored:
            yield tensor.name, _DTYPES[tensor.dtype], tensor.shape, lambda tensor=tensor: _decoded(tensor)
    elif path.suffix in NPY:
        array = read_npy(path)
        yield "", array.dtype, array.shape, array.load
    else:
        found = [(name, leaf) for name, leaf in walk(read_torch(path)) if isinstance(leaf, StoredArray)]
        root = next((root for root in _ROOTS if all(name.startswith(root) for name, _ in found)), "")
        for name, leaf in found:
            yield name.removeprefix(root), leaf.dtype, leaf.shape, leaf.load


def _decoded(tensor: Any) -> Any:
    with reading(f"{tensor.path}: {tensor.name}", "tensor"):
        return decoded(tensor)


def _has_files(root: Path) -> bool:
    return next(_files(root), None) is not None


def _files(root: Path) -> Iterator[Path]:
    root = Path(root)
    if root.is_file():
        if root.suffix in SUFFIXES:
            yield root
        return
    yield from (path for path in files_below(root) if path.suffix in SUFFIXES)
