"""FP8 checkpoints to BF16: DeepSeek's block-scaled e4m3 weights, without Triton, a few rows in memory at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from alignment.errors import InputError
from alignment.files import read_json, write_atomically
from alignment.weights.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from alignment.weights.tensor_file import (
    StoredTensor, TensorFile, copy_bytes, plan_file, read_header, read_into, stored_tensors, write_all, write_file,
)  # fmt: skip

SCALE_SUFFIX = "_scale_inv"
FP8 = "F8_E4M3"
Progress = Callable[[str, int, int], None]
"""Called with the name of the file in work, and how many bytes of output of how many are written."""

_SOURCE_KEY = "alignment.converted_from"
# Small enough to stay in the cache between reading, converting and writing.
_BUFFER_BYTES = 1 << 20
_LARGEST_E4M3 = float(torch.finfo(torch.float8_e4m3fn).max)
_LARGEST_BF16 = float(torch.finfo(torch.bfloat16).max)
# Reads e4m3 as bfloat16: the exponents are biased by 7 and by 127.
_REBIAS = 2.0**120
_FOREIGN_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What :func:`convert_fp8_checkpoint` did: counts of tensors and files, bytes of output; ``kept`` files were
    there."""

    dequantized: int
    copied: int
    files: int
    kept: int
    nbytes: int


def convert_fp8_checkpoint(src: str | Path, dst: str | Path, *, progress: Progress | None = None) -> Converted:
    """Writes the FP8 checkpoint ``src`` as BF16 into ``dst``: ``w[i, j] = fp8[i, j] · scale_inv[i // br, j // bc]``.

    The product is taken in float32 and rounded once, as DeepSeek's own ``fp8_cast_bf16.py`` does; ``br × bc`` is
    ``quantization_config.weight_block_size``, blocks at the edges may be smaller. Tensors of other dtypes are copied
    byte by byte, the scales are left out, the index is rebuilt, ``config.json`` loses its ``quantization_config``, and
    the small files beside (tokenizer, generation settings) are copied.

    Every file appears whole or not at all, and ``config.json`` last. A killed conversion continues where it was when
    it is called again: a file is kept when it says that it comes from the same source. Memory is a few blocks of rows.

    Raises:
        InputError: no FP8 weights, a scale that is missing, of another shape or not a positive number, a weight that is
            NaN or leaves the range of BF16, an unknown kind of quantisation, too little room, or something else at
            ``dst``; the message names file and tensor.
    """
    src, dst = Path(src).resolve(), Path(dst).resolve()
    if dst == src:
        raise InputError("the converted checkpoint needs a folder of its own", where=dst)
    config = read_json(src / CONFIG_FILE)
    block = _block_size(config, src / CONFIG_FILE)
    stored = stored_tensors(src)
    scales = _scales(stored, block)
    plans = _plans(stored, scales, block, dst)
    dst.mkdir(parents=True, exist_ok=True)
    with _alone_in(dst):
        return _convert(src, dst, config, block, stored, scales, plans, progress)


def _convert(
    src: Path,
    dst: Path,
    config: dict[str, Any],
    block: tuple[int, int],
    stored: Mapping[str, StoredTensor],
    scales: Mapping[str, StoredTensor],
    plans: Mapping[Path, TensorFile],
    progress: Progress | None,
) -> Converted:
    for path in plans:
        for half_written in dst.glob(f".{path.name}.*"):
            half_written.unlink()
    finished = {path for path, plan in plans.items() if _is_finished(plan)}
    total = sum(plan.nbytes for plan in plans.values())
    done = sum(plans[path].nbytes for path in finished)
    room = shutil.disk_usage(dst).free
    if room < total - done:
        raise InputError("the disk has too little room", where=dst, expected=f"{total - done} bytes", found=room)
    converter = _Converter(block)

    def fill(tensor: StoredTensor, out: BinaryIO) -> None:
        nonlocal done
        source = stored[tensor.name]
        if tensor.name in scales:
            converter.convert(source, converter.read_scale(scales[tensor.name]), out)
        else:
            converter.copy(source, out)
        done += tensor.nbytes
        if progress:
            progress(tensor.path.name, done, total)

    for path, plan in plans.items():
        if path not in finished:
            done += len(plan.header)
            write_atomically(path, lambda beside, plan=plan: write_file(beside, plan, fill))
    _copy_small_files(src, dst)
    _write_index(dst, plans)
    config.pop("quantization_config")
    key = "dtype" if "dtype" in config else "torch_dtype"
    _write_plain_json(dst / CONFIG_FILE, {**config, key: "bfloat16"})
    return Converted(
        dequantized=len(scales),
        copied=sum(len(plan.tensors) for plan in plans.values()) - len(scales),
        files=len(plans),
        kept=len(finished),
        nbytes=total,
    )


def dequantize(weight: Tensor, scale_inv: Tensor, *, block: tuple[int, int] = (128, 128)) -> Tensor:
    """``weight`` [r, c] float8_e4m3fn times its block scales [⌈r/br⌉, ⌈c/bc⌉], in BF16.

    Raises:
        InputError: as :func:`convert_fp8_checkpoint`.
    """
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16)
    converter = _Converter(block)
    scale = _checked_scale(scale_inv.float(), (rows, columns), block, where="scale_inv")
    for start in range(0, rows, block[0]):
        part = slice(start, min(start + block[0], rows))
        row = converter.scale_row(scale[start // block[0]], columns)
        converter.block_row(weight[part].contiguous().view(torch.int8), row, out[part], where="weight")
    return out


def quantize(weight: Tensor, *, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """``weight`` [r, c] as float8_e4m3fn and its block scales in float32: the inverse of :func:`dequantize` up to
    rounding.

    A block's scale is its largest magnitude divided by 448, the largest e4m3 number (DeepSeek-V3 report, section 3.3);
    1 where a block is all zeros.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    scale = blocks.abs().amax(dim=(1, 3)) / _LARGEST_E4M3
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    # Division may round a block's largest element up, past 448, where a cast gives NaN.
    scaled = (blocks / scale[:, None, :, None]).clamp_(-_LARGEST_E4M3, _LARGEST_E4M3)
    return scaled.reshape(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn), scale


class _Converter:
    """Block rows from a file to a file through buffers that are used again for every block row."""

    def __init__(self, block: tuple[int, int]) -> None:
        self.block = block
        self._bytes = torch.empty(0, dtype=torch.int8)
        self._bits = torch.empty(0, dtype=torch.int16)
        self._copying = memoryview(bytearray(_BUFFER_BYTES))

    def copy(self, source: StoredTensor, out: BinaryIO) -> None:
        copy_bytes(source, out, self._copying)

    def read_scale(self, scale: StoredTensor) -> Tensor:
        data = bytearray(scale.nbytes)
        with open(scale.path, "rb", buffering=0) as file:
            file.seek(scale.begin)
            read_into(file, memoryview(data), scale)
        dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[scale.dtype]
        found = torch.frombuffer(data, dtype=dtype).view(scale.shape).float()
        return _checked_values(found, where=f"{scale.path}: {scale.name}")

    def convert(self, source: StoredTensor, scale: Tensor, out: BinaryIO) -> None:
        rows, columns = source.shape
        at_once = max(1, _BUFFER_BYTES // max(1, self.block[0] * columns)) * self.block[0]
        if self._bytes.numel() < at_once * columns:
            self._bytes = torch.empty(at_once * columns, dtype=torch.int8)
            self._out = torch.empty(at_once * columns, dtype=torch.bfloat16)
        with open(source.path, "rb", buffering=0) as file:
            file.seek(source.begin)
            for start in range(0, rows, at_once):
                count = min(at_once, rows - start)
                codes = self._bytes[: count * columns].view(count, columns)
                result = self._out[: count * columns].view(count, columns)
                read_into(file, memoryview(codes.numpy().reshape(-1).view(np.uint8)), source)
                for first in range(0, count, self.block[0]):
                    part = slice(first, min(first + self.block[0], count))
                    row = self.scale_row(scale[(start + first) // self.block[0]], columns)
                    self.block_row(codes[part], row, result[part], where=f"{source.path}: {source.name}")
                write_all(out, memoryview(result.view(torch.int16).numpy().reshape(-1).view(np.uint8)))

    def scale_row(self, scale: Tensor, columns: int) -> Tensor:
        return scale.repeat_interleave(self.block[1])[:columns]

    def block_row(self, codes: Tensor, scale: Tensor, out: Tensor, *, where: str) -> None:
        """``out`` [r, c] BF16 from the codes [r, c] (int8) of one row of blocks and the scale of every column."""
        if not codes.numel():
            return
        # NaN has all bits set but the sign: the largest code, as a signed or as an unsigned number.
        if int(codes.max()) == 0x7F or int(codes.view(torch.uint8).max()) == 0xFF:
            raise InputError("the weight holds NaN", where=where, expected="finite FP8 numbers")
        if self._bits.numel() < codes.numel():
            self._bits = torch.empty(codes.numel(), dtype=torch.int16)
            self._values = torch.empty(codes.numel(), dtype=torch.float32)
        bits = self._bits[: codes.numel()].view(codes.shape)
        values = self._values[: codes.numel()].view(codes.shape)
        # Sign, exponent and fraction moved to where bfloat16 has them; torch's own cast from float8 takes ten times as
        # long.
        bits.copy_(codes).bitwise_left_shift_(4).bitwise_and_(-0x7810)
        values.copy_(bits.view(torch.bfloat16)).mul_(_REBIAS).mul_(scale)
        largest = float(scale.max())
        if largest * _LARGEST_E4M3 > _LARGEST_BF16 and not torch.isfinite(values.to(torch.bfloat16)).all():
            raise InputError("weight times scale leaves the range of BF16", where=where, found=f"a scale of {largest}")
        out.copy_(values)


@contextmanager
def _alone_in(dst: Path) -> Iterator[None]:
    """Two conversions into one folder would take each other's half-written files for those of a killed one."""
    with open(dst / ".converting", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError("another conversion is writing here", where=dst) from None
        yield
        (dst / ".converting").unlink()


def _block_size(config: Mapping[str, Any], where: Path) -> tuple[int, int]:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        raise InputError("the checkpoint is not quantised", where=where, expected="a quantization_config", found="none")
    for key, only in (("quant_method", "fp8"), ("fmt", "e4m3")):
        if quantization.get(key, only) != only:
            raise InputError(
                "another kind of quantisation",
                where=f"{where}: quantization_config.{key}",
                expected=only,
                found=quantization[key],
            )
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(side) is int and side > 0 for side in block):
        raise InputError(
            "the weights are not scaled by blocks",
            where=f"{where}: quantization_config.weight_block_size",
            expected="two positive integers, such as [128, 128]",
            found=block,
        )
    return block[0], block[1]


def _scales(stored: Mapping[str, StoredTensor], block: tuple[int, int]) -> dict[str, StoredTensor]:
    """The scale of every FP8 weight, which may lie in another file than the weight."""
    scales = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE_SUFFIX):
            owner = stored.get(name.removesuffix(SCALE_SUFFIX))
            if owner is None or owner.dtype != FP8:
                raise InputError(
                    "a scale without an FP8 weight",
                    where=f"{tensor.path}: {name}",
                    expected=f"{name.removesuffix(SCALE_SUFFIX)} as {FP8}",
                    found="no such tensor" if owner is None else owner.dtype,
                )
        if tensor.dtype in ("F8_E5M2", "F8_E8M0") or (tensor.dtype == FP8 and len(tensor.shape) != 2):
            raise InputError(
                "a tensor that no block scales belong to",
                where=f"{tensor.path}: {name}",
                expected=f"a matrix of {FP8}",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
        if tensor.dtype != FP8:
            continue
        scale = stored.get(name + SCALE_SUFFIX)
        if scale is None:
            raise InputError(f"the FP8 weight has no scale {name}{SCALE_SUFFIX}", where=f"{tensor.path}: {name}")
        if scale.dtype not in ("F32", "BF16", "F16"):
            raise InputError(
                "a scale of an unknown dtype",
                where=f"{scale.path}: {scale.name}",
                expected="F32, BF16 or F16",
                found=scale.dtype,
            )
        _check_scale_shape(scale.shape, tensor.shape, block, where=f"{scale.path}: {scale.name}")
        scales[name] = scale
    if not scales:
        raise InputError(
            "the checkpoint holds no FP8 weight", where=next(iter(stored.values())).path.parent if stored else None
        )
    return scales


def _check_scale_shape(found: tuple[int, ...], weight: tuple[int, ...], block: tuple[int, int], *, where: str) -> None:
    expected = [math.ceil(side / width) for side, width in zip(weight, block)]
    if list(found) != expected:
        raise InputError(
            "the scale does not fit its weight",
            where=where,
            expected=f"{expected} for a weight of {list(weight)} in blocks of {list(block)}",
            found=list(found),
        )


def _checked_scale(scale: Tensor, weight: tuple[int, int], block: tuple[int, int], *, where: str) -> Tensor:
    _check_scale_shape(tuple(scale.shape), weight, block, where=where)
    return _checked_values(scale, where=where)


def _checked_values(scale: Tensor, *, where: str) -> Tensor:
    bad = ~(torch.isfinite(scale) & (scale > 0))
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        raise InputError(
            "a scale is not a positive number",
            where=where,
            expected="finite and above 0",
            found=f"{scale[row, column].item()} at block [{row}, {column}]",
        )
    return scale


def _plans(
    stored: Mapping[str, StoredTensor], scales: Mapping[str, StoredTensor], block: tuple[int, int], dst: Path
) -> dict[Path, TensorFile]:
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in stored.values():
        if not tensor.name.endswith(SCALE_SUFFIX):
            by_file.setdefault(tensor.path, []).append(tensor)
    plans = {}
    for source, tensors in by_file.items():
        read = {source} | {scales[t.name].path for t in tensors if t.name in scales}
        wanted = [(t.name, "BF16" if t.name in scales else t.dtype, t.shape) for t in tensors]
        metadata = {"format": "pt", _SOURCE_KEY: _fingerprint(read, block)}
        plans[dst / source.name] = plan_file(dst / source.name, wanted, metadata=metadata)
    return plans


def _fingerprint(files: set[Path], block: tuple[int, int]) -> str:
    """Tells sources apart without reading their data: names, sizes, times and headers."""
    digest = hashlib.sha256(repr(block).encode())
    for path in sorted(files):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        digest.update(read_header(path).header)
    return f"sha256:{digest.hexdigest()}"


def _is_finished(plan: TensorFile) -> bool:
    if not plan.path.exists():
        return False
    if read_header(plan.path).header != plan.header:
        raise InputError(
            "there is a file that does not come from this source",
            where=plan.path,
            next_step="choose another folder, or remove the file to have it written anew",
        )
    return True


def _copy_small_files(src: Path, dst: Path) -> None:
    for path in sorted(src.iterdir()):
        weights = path.name.endswith((*_FOREIGN_WEIGHTS, ".index.json"))
        if path.is_file() and not weights and path.name != CONFIG_FILE and not path.name.startswith("."):
            write_atomically(dst / path.name, lambda beside, path=path: shutil.copyfile(path, beside))


def _write_index(dst: Path, plans: Mapping[Path, TensorFile]) -> None:
    if [path.name for path in plans] == [SINGLE_FILE]:
        return
    listing = {
        "metadata": {"total_size": sum(t.nbytes for plan in plans.values() for t in plan.tensors)},
        "weight_map": {t.name: path.name for path, plan in plans.items() for t in plan.tensors},
    }
    _write_plain_json(dst / INDEX_FILE, listing)


def _write_plain_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))
