"""Layer cutting: a small checkpoint of real weights from a large one, the field's way from 671B to one machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from alignment.errors import InputError
from alignment.files import read_json
from alignment.models.config import ModelConfig
from alignment.weights.checkpoint import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, expected_shapes, replacing, shard_names
from alignment.weights.tensor_file import StoredTensor, copy_bytes, plan_file, stored_tensors, write_file

_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..+)$")
_LAYER_ANYWHERE = re.compile(r"(?<=layers\.)(\d+)(?=\.|$)")
_PER_LAYER_LISTS = ("layer_types", "mlp_layer_types")
"""Keys of newer configurations that list one entry per layer."""
_MODULE_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore")
"""Keys of ``quantization_config`` that list module names."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What :func:`cut_checkpoint` kept: old layer numbers in their new order, and sizes before and after."""

    layers: tuple[int, ...]
    mtp_layers: tuple[int, ...]
    first_k_dense_replace: int
    source_bytes: int
    nbytes: int


def cut_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    layers: Sequence[int],
    keep_mtp: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Cut:
    """Writes a checkpoint of the given decoder layers of ``src``, in that order, with all that is outside of layers.

    Layer ``layers[i]`` becomes layer ``i``; ``num_hidden_layers`` and ``first_k_dense_replace`` are set anew, and so
    are lists by layer. FP8 weights keep their scales and ``quantization_config``. Tensors are copied byte by byte in
    the order of the layers, a few megabytes in memory at a time. Multi-token-prediction layers (those behind the last
    layer of the configuration) are left out, or kept behind the last layer. The folder appears whole or not at all,
    with the small files of the source (tokenizer, generation settings).

    Args:
        layers: numbers from 0; each at most once.
        keep_mtp: keep the multi-token-prediction layers.
        max_shard_bytes: size at which a new file begins.
        progress: told the tensor that is done, the bytes so far and the bytes in all.

    Raises:
        InputError: a layer the checkpoint does not have or that is named twice, a dense layer after an MoE layer (which
            ``first_k_dense_replace`` cannot express), a layer whose tensors contradict the configuration, no MTP layers
            where they are to be kept, a damaged source, or something at ``dst`` already.
    """
    src, dst = Path(src).absolute(), Path(dst).absolute()
    hf = read_json(src / CONFIG_FILE)
    config = ModelConfig.from_hf(hf, where=src / CONFIG_FILE)
    layers = tuple(layers)
    _check_layers(layers, config, src)
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise InputError("there is something at the place of the checkpoint already", where=dst)
    stored = stored_tensors(src)
    mtp = _mtp_layers(stored, config) if keep_mtp else ()
    if keep_mtp and not mtp:
        raise InputError("the checkpoint holds no multi-token-prediction layer", where=src)
    renamed = _renamed(stored, (*layers, *mtp))
    new_hf = _new_config(hf, config, layers, mtp)
    _check_tensors(renamed, stored, ModelConfig.from_hf(new_hf), src)
    shards = shard_names(renamed, max_shard_bytes)
    total = sum(t.nbytes for t in renamed.values())
    with replacing(dst) as beside:
        room = shutil.disk_usage(beside).free
        if room < total:
            raise InputError("the disk has too little room", where=dst, expected=f"{total} bytes", found=room)
        buffer, done = memoryview(bytearray(8 << 20)), 0

        def copy(tensor: StoredTensor, out: BinaryIO) -> None:
            nonlocal done
            copy_bytes(renamed[tensor.name], out, buffer)
            done += tensor.nbytes
            progress(tensor.name, done, total)

        for file, names in shards.items():
            plan = plan_file(
                beside / file, [(n, renamed[n].dtype, renamed[n].shape) for n in names], metadata={"format": "pt"}
            )
            write_file(beside / file, plan, copy)
        if list(shards) != [SINGLE_FILE]:
            weight_map = {name: file for file, names in shards.items() for name in names}
            _write_json(beside / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        for path in sorted(src.iterdir()):
            small = path.is_file() and not path.name.endswith(_WEIGHTS) and not path.name.startswith(".")
            if small and path.name != CONFIG_FILE:
                shutil.copyfile(path, beside / path.name)
        _write_json(beside / CONFIG_FILE, new_hf)
    return Cut(
        layers=layers,
        mtp_layers=mtp,
        first_k_dense_replace=new_hf["first_k_dense_replace"],
        source_bytes=sum(t.nbytes for t in stored.values()),
        nbytes=total,
    )


def _check_layers(layers: tuple[int, ...], config: ModelConfig, src: Path) -> None:
    if not layers:
        raise InputError("no layer is to be kept", where="layers", expected="at least one number")
    for layer in layers:
        if type(layer) is not int or not 0 <= layer < config.num_hidden_layers:
            raise InputError(
                "the checkpoint has no such layer",
                where=src,
                expected=f"0 to {config.num_hidden_layers - 1}",
                found=layer,
            )
        if layers.count(layer) > 1:
            raise InputError("a layer is named twice", where="layers", found=layer)
    for before, after in zip(layers, layers[1:]):
        if config.is_moe_layer(before) and not config.is_moe_layer(after):
            raise InputError(
                f"dense layer {after} would come after MoE layer {before}, which first_k_dense_replace cannot express",
                where="layers",
                expected=f"the dense layers (0 to {config.first_k_dense_replace - 1}) first",
                found=",".join(map(str, layers)),
                next_step="name the dense layers first: " + ",".join(map(str, sorted(layers, key=config.is_moe_layer))),
            )


def _mtp_layers(stored: Mapping[str, StoredTensor], config: ModelConfig) -> tuple[int, ...]:
    numbers = {int(found[2]) for name in stored if (found := _LAYER.match(name))}
    return tuple(sorted(n for n in numbers if n >= config.num_hidden_layers))


def _renamed(stored: Mapping[str, StoredTensor], kept: tuple[int, ...]) -> dict[str, StoredTensor]:
    """New names, in the order of the new layers, what comes before and after the layers in its place."""
    place = {old: new for new, old in enumerate(kept)}
    ordered: list[tuple[int, str, StoredTensor]] = []
    for name, tensor in stored.items():
        found = _LAYER.match(name)
        if found is None:
            ordered.append((-1 if "embed" in name else len(kept), name, tensor))
        elif int(found[2]) in place:
            new = place[int(found[2])]
            ordered.append((new, f"{found[1]}{new}{found[3]}", tensor))
    return {name: tensor for _, name, tensor in sorted(ordered, key=lambda entry: entry[0])}


def _new_config(
    hf: dict[str, Any], config: ModelConfig, layers: tuple[int, ...], mtp: tuple[int, ...]
) -> dict[str, Any]:
    new = {
        **hf,
        "num_hidden_layers": len(layers),
        "first_k_dense_replace": sum(not config.is_moe_layer(layer) for layer in layers),
        "num_nextn_predict_layers": len(mtp),
    }
    for key in _PER_LAYER_LISTS:
        if isinstance(hf.get(key), list) and len(hf[key]) >= config.num_hidden_layers:
            new[key] = [hf[key][layer] for layer in layers]
    place = {old: n for n, old in enumerate((*layers, *mtp))}
    quantization = hf.get("quantization_config")
    if isinstance(quantization, dict):
        new["quantization_config"] = {
            key: _renumbered(value, place) if key in _MODULE_LISTS and isinstance(value, list) else value
            for key, value in quantization.items()
        }
    return new


def _renumbered(modules: list[str], place: Mapping[int, int]) -> list[str]:
    kept = []
    for module in modules:
        found = _LAYER_ANYWHERE.search(module)
        if found is None:
            kept.append(module)
        elif int(found[1]) in place:
            kept.append(f"{module[: found.start()]}{place[int(found[1])]}{module[found.end() :]}")
    return kept


def _check_tensors(
    renamed: Mapping[str, StoredTensor], stored: Mapping[str, StoredTensor], config: ModelConfig, src: Path
) -> None:
    """Refuses what no engine would load: a layer without the tensors that the new configuration says it has."""
    expected = expected_shapes(config)
    for name, shape in expected.items():
        found = renamed.get(name)
        if found is None:
            raise InputError(
                f"the kept layers lack the tensor {name} that their configuration asks for",
                where=src,
                expected=list(shape),
                next_step="does first_k_dense_replace of the source say which of its layers are dense?",
            )
        if found.shape != shape:
            raise InputError(
                "the shape does not fit the configuration",
                where=f"{found.path}: {found.name}",
                expected=list(shape),
                found=list(found.shape),
            )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
