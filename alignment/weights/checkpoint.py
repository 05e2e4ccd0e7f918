"""Hugging Face checkpoints: ``config.json`` beside ``model.safetensors``, or beside shards and their index."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ARCHITECTURE, VALUE_ARCHITECTURE, ModelConfig
from alignment.models.value_model import ValueModel

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MODELS = {ARCHITECTURE: CausalLM, VALUE_ARCHITECTURE: ValueModel}
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HASH_KEY = "alignment.content_hash"

Model = TypeVar("Model", CausalLM, ValueModel)


def weights_hash(state: Mapping[str, Tensor]) -> str:
    """``sha256:…`` over names, dtypes, shapes and bytes, whatever the order of the mapping, the strides or the
    device.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def expected_shapes(
    config: ModelConfig, *, architecture: str = ARCHITECTURE, where: object = CONFIG_FILE
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a checkpoint of ``config``; a tied head is not stored.

    ``where`` is what an error names.

    Raises:
        InputError: sizes of which no tensor can be made.
    """
    try:
        state = _MODELS[architecture](config, device="meta").state_dict()
    except (RuntimeError, TypeError) as error:
        told = str(error).partition("\n")[0]
        raise InputError(f"no model has the sizes of the configuration ({told})", where=where) from None
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def save_checkpoint(
    directory: str | os.PathLike,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = 5_000_000_000,
    architecture: str = ARCHITECTURE,
    overwrite: bool = False,
) -> str:
    """Write a checkpoint folder, whole or not at all, and return the :func:`weights_hash` of what was written.

    Everything is written and flushed beside the target, which is then renamed into place. One file is written if
    ``max_shard_bytes`` allows, else shards with an index. Each file carries the content hash of its tensors, which
    :func:`iter_tensors` verifies.

    Args:
        directory: the folder to create; parents are made.
        state: as ``state_dict()`` gives it; dtypes are kept.
        overwrite: replace an existing folder, everything in it included.

    Raises:
        InputError: the folder exists and is not empty, tensors do not fit ``config``, or the disk refuses.
    """
    directory = Path(directory).absolute()
    if directory.exists() and not (directory.is_dir() and (overwrite or not any(directory.iterdir()))):
        raise InputError(
            "there is something at the place of the checkpoint already",
            where=directory,
            next_step="choose another folder, or pass overwrite=True to replace it",
        )
    tensors = {
        name: _own(tensor)
        for name, tensor in state.items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    _check_tensors(found, config, architecture, where={name: directory for name in found}, folder=directory)
    hf = {
        **config.to_hf(),
        "architectures": [architecture],
        "torch_dtype": str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch."),
    }
    if architecture == VALUE_ARCHITECTURE:
        hf["num_labels"] = 1
    with replacing(directory) as beside:
        shards = shard_names(tensors, max_shard_bytes)
        for file, names in shards.items():
            part = {name: tensors[name] for name in names}
            save_file(part, beside / file, metadata={"format": "pt", _HASH_KEY: weights_hash(part)})
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
                "weight_map": {name: file for file, names in shards.items() for name in names},
            }
            (beside / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        (beside / CONFIG_FILE).write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n")
    return weights_hash(tensors)


def load_config(directory: str | os.PathLike) -> ModelConfig:
    """The configuration of a checkpoint folder.

    Raises:
        InputError: no ``config.json``, not JSON, another architecture, or an invalid value.
    """
    path = Path(directory) / CONFIG_FILE
    return ModelConfig.from_hf(_read_json(path), where=path)


def iter_tensors(directory: str | os.PathLike, *, verify: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Stream the tensors of a checkpoint as stored, on the CPU, file by file, one in memory at a time.

    Args:
        verify: first compare each file that carries a content hash with it (reads the file once more).

    Raises:
        InputError: a missing, truncated or corrupt file, an index that disagrees with its shards, or a content hash
        that
            does not match; the message names file and tensor.
    """
    for path, names in _files(Path(directory)).items():
        with _open(path) as file:
            claimed = (file.metadata() or {}).get(_HASH_KEY)
            if verify and claimed is not None:
                actual = weights_hash(_LazyTensors(file, names))
                if actual != claimed:
                    raise InputError(
                        "the tensors differ from those that were written", where=path, expected=claimed, found=actual
                    )
            for name in names:
                yield name, file.get_tensor(name)


def load_state(directory: str | os.PathLike, *, verify: bool = True) -> dict[str, Tensor]:
    """All of :func:`iter_tensors` as a dictionary."""
    return dict(iter_tensors(directory, verify=verify))


def load_model(
    directory: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    verify: bool = True,
) -> CausalLM:
    """The language model of a checkpoint folder, in ``dtype`` (by default as stored).

    Tensors a checkpoint may have besides the model's are passed over: multi-token-prediction layers behind the last
    one and ``rotary_emb.inv_freq``, which some published files list. Nothing is allocated before names, shapes and
    dtypes fit.

    Raises:
        InputError: the checkpoint is damaged or is not one of its own configuration (a missing or extra tensor, another
            shape or vocabulary, a dtype that is not a plain float); the message names file and tensor.
    """
    return _load(CausalLM, ARCHITECTURE, Path(directory), dtype=dtype, device=device, verify=verify)


def load_value_model(
    directory: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    verify: bool = True,
) -> ValueModel:
    """The critic of a checkpoint folder; otherwise as :func:`load_model`."""
    return _load(ValueModel, VALUE_ARCHITECTURE, Path(directory), dtype=dtype, device=device, verify=verify)


def _load(
    kind: type[Model], architecture: str, directory: Path, *, dtype: torch.dtype | None, device: object, verify: bool
) -> Model:
    config = load_config(directory)
    found, where = {}, {}
    for path, names in _files(directory).items():
        with _open(path) as file:
            for name in names:
                view = file.get_slice(name)
                found[name] = (_DTYPES.get(view.get_dtype(), view.get_dtype()), tuple(view.get_shape()))
                where[name] = path
    found = {name: what for name, what in found.items() if not _is_passed_over(name, what[1], config)}
    _check_tensors(found, config, architecture, where=where, folder=directory)
    model = kind(config, dtype=dtype or found["model.embed_tokens.weight"][0], device=device)
    _copy_into(model, ((n, t) for n, t in iter_tensors(directory, verify=verify) if n in found))
    return model


@torch.no_grad()
def _copy_into(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    state = model.state_dict(keep_vars=True)
    for name, tensor in tensors:
        state[name].copy_(tensor)


def _is_passed_over(name: str, shape: tuple[int, ...], config: ModelConfig) -> bool:
    if name.endswith("rotary_emb.inv_freq") or 0 in shape:
        return True
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= config.num_hidden_layers


def _check_tensors(
    found: Mapping[str, tuple[object, tuple[int, ...]]],
    config: ModelConfig,
    architecture: str,
    *,
    where: Mapping[str, Path],
    folder: Path,
) -> None:
    expected = expected_shapes(config, architecture=architecture)
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise InputError(
            f"the checkpoint lacks the tensor {missing[0]}" + _and_more(missing),
            where=folder,
            expected=f"{list(expected[missing[0]])}",
        )
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise InputError(
            f"the checkpoint has a tensor {extra[0]} that its configuration has no place for" + _and_more(extra),
            where=where[extra[0]],
            found=f"{list(found[extra[0]][1])}",
        )
    for name, (dtype, shape) in sorted(found.items()):
        if shape != expected[name] and name in ("model.embed_tokens.weight", "lm_head.weight"):
            raise InputError(
                "the vocabulary of the tensors is not that of the configuration",
                where=f"{where[name]}: {name}",
                expected=f"{list(expected[name])} (vocab_size, hidden_size)",
                found=list(shape),
            )
        if shape != expected[name]:
            raise InputError(
                "the shape does not fit the configuration",
                where=f"{where[name]}: {name}",
                expected=list(expected[name]),
                found=list(shape),
            )
        if dtype not in _DTYPES.values():
            raise InputError(
                "the tensor is not stored as a plain floating-point type",
                where=f"{where[name]}: {name}",
                expected=", ".join(_DTYPES),
                found=dtype,
                next_step="dequantise the checkpoint first",
            )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _own(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, alone in its storage: safetensors writes whole storages only."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def shard_names(tensors: Mapping[str, Any], max_shard_bytes: int) -> dict[str, list[str]]:
    """Names of the tensors of each file, in order; ``tensors`` are whatever knows its ``nbytes``. One file has the plain name."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, start=1)}


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """A folder beside ``directory`` that takes its place, flushed, if the block succeeds, and vanishes if not."""
    beside = directory.with_name(f".{directory.name}.writing-{os.getpid()}")
    old = directory.with_name(f".{directory.name}.old-{os.getpid()}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        yield beside
        for path in (*beside.iterdir(), beside):
            _flush(path)
        if directory.exists():
            directory.rename(old)
        beside.rename(directory)
        _flush(directory.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise InputError("the checkpoint cannot be written", where=directory, found=str(error)) from error
    finally:
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(beside, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _LazyTensors(Mapping[str, Tensor]):
    def __init__(self, file: safe_open, names: list[str]) -> None:
        self._file, self._names = file, names

    def __getitem__(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _files(directory: Path) -> dict[Path, list[str]]:
    """Which tensors each file of the checkpoint holds, by the files themselves, checked against the index."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() and index.exists():
        raise InputError(
            "the folder holds two checkpoints", where=directory, expected=f"{SINGLE_FILE} or {INDEX_FILE}", found="both"
        )
    if single.exists():
        return {single: _names(single)}
    if not index.exists():
        raise InputError("there are no weights here", where=directory, expected=f"{SINGLE_FILE} or {INDEX_FILE}")
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise InputError("the index has no weight_map from tensors to files", where=index)
    files: dict[Path, list[str]] = {}
    for file in sorted(set(listed.values())):
        if Path(file).name != file:
            raise InputError("the index points outside its folder", where=index, expected="file names", found=file)
        path = directory / file
        names = _names(path)
        claimed = {name for name in listed if listed[name] == file}
        if claimed != set(names):
            name = min(claimed ^ set(names))
            raise InputError(
                f"the index and the file disagree about the tensor {name}",
                where=path,
                expected="in the file"
                if name in claimed
                else f"in {listed[name]}"
                if name in listed
                else "not in the file",
                found="missing" if name in claimed else "in the file",
            )
        files[path] = names
    return files


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return sorted(file.keys())


@contextmanager
def _open(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise InputError("a file of the checkpoint is missing", where=path) from None
    except (SafetensorError, OSError, UnicodeEncodeError) as error:  # the last of a name in the index
        raise InputError("the file is damaged or is not a safetensors file", where=path, found=str(error)) from error


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("a file of the checkpoint is missing", where=path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("the file is not JSON", where=path, found=str(error)) from error
    if not isinstance(content, dict):
        raise InputError("the file does not hold a JSON object", where=path, found=type(content).__name__)
    return content
