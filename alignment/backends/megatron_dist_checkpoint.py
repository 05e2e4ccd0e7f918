"""megatron-core's own distributed checkpoints: the offline way into the engine, beside the bridge of names.

The bridge reshards by this package's map of Hugging Face names, the distributed checkpoint by megatron-core's
``sharded_state_dict``: two independent ways to the same weights, so a run may change from one to the other as an
ablation.

megatron-core pickles the bookkeeping of these checkpoints (``.metadata``, ``common.pt``), and unpickling a stranger's
file runs it. So what :func:`write` did not mark is refused, and so is a marked one whose files changed. The mark tells a
mix-up; it is no signature, and a folder somebody else handed over is to be written anew from its Hugging Face checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from alignment.backends.megatron_model import engine_scope
from alignment.errors import InputError, UnavailableError
from alignment.files import read_json, write_json

if TYPE_CHECKING:
    from alignment.backends.megatron_training import MegatronTrainingEngine

MARK = "alignment.json"
_PICKLED = (".metadata", "common.pt")
_WRITE_AGAIN = "write it with alignment checkpoint to-dist"


def write(engine: MegatronTrainingEngine, directory: Path, *, source: str) -> None:
    """The weights of ``engine`` as a distributed checkpoint in ``directory``; called on every rank.

    ``source`` is the hash of the checkpoint they came from: who loads them has to mean the same one.

    Raises:
        InputError: the directory exists and is not empty.
        UnavailableError: this megatron-core and this torch do not work together here.
    """
    from megatron.core import dist_checkpointing

    if engine.groups.rank == 0:
        if directory.exists() and any(directory.iterdir()):
            raise InputError("the folder is not empty", where=directory, next_step="name a new one")
        directory.mkdir(parents=True, exist_ok=True)
    engine.groups.barrier()
    with engine_scope(engine.device):
        try:
            dist_checkpointing.save(_sharded(engine), str(directory))
        except (RuntimeError, TypeError) as error:
            # It calls functions of torch.distributed.checkpoint that are not public: 0.12.1 does not know torch 2.13's.
            raise UnavailableError(
                f"this megatron-core does not write distributed checkpoints with this torch ({_last_line(error)})",
                where=f"megatron-core {engine.version}, torch {torch.__version__}",
                next_step="use the torch its release was made for, or load by the bridge",
            ) from error
    engine.groups.barrier()
    if engine.groups.rank == 0:
        mark = {
            "megatron_core": engine.version,
            "source": source,
            "config": engine.config.to_hf(),
            "files": _hashes(directory),
            "sizes": _sizes(directory),
        }
        write_json(directory / MARK, mark)


def read(engine: MegatronTrainingEngine, directory: Path) -> None:
    """Fills ``engine``, whatever its layout, from a checkpoint that :func:`write` made; called on every rank.

    Raises:
        InputError: there is none, another program or another model made it, a file is damaged, or a tensor of the
            engine is not in it.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException

    check(directory, engine.config.to_hf())
    with engine_scope(engine.device):
        try:
            loaded = dist_checkpointing.load(_sharded(engine), str(directory))
        except CheckpointingException as error:
            raise InputError(
                f"the distributed checkpoint does not fit this model ({error})", where=directory, next_step=_WRITE_AGAIN
            ) from error
        for number, module in enumerate(engine.modules):
            missing, _ = module.load_state_dict(loaded[_chunk(number)], strict=False)
            # Layers without state of their own (fused kernels' bookkeeping) have nothing to load.
            lost = [name for name in missing if not name.endswith("_extra_state")]
            if lost:
                raise InputError(f"a tensor is missing: {lost[0]}", where=directory, next_step=_WRITE_AGAIN)


def check_source(directory: Path, source: str) -> None:
    """Refuses the weights of another checkpoint than the one with the hash ``source``.

    Raises:
        InputError: they are another's, or nothing says whose.
    """
    mark = read_json(directory / MARK) if (directory / MARK).is_file() else {}
    if mark.get("source") != source:
        raise InputError(
            "the distributed checkpoint holds other weights than model.path",
            where=directory,
            expected=source,
            found=mark.get("source") or "nothing that says whose",
            next_step=_WRITE_AGAIN,
        )


def check(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuses what :func:`write` did not make, before anything in it is unpickled.

    Raises:
        InputError: as :func:`read`.
    """
    if not (directory / MARK).is_file():
        raise InputError(
            "not a distributed checkpoint of this package; others are pickles and are not read",
            where=directory,
            expected=MARK,
            next_step=_WRITE_AGAIN,
        )
    mark = read_json(directory / MARK)
    hashes = mark.get("files") or {}
    for name in _PICKLED:
        expected, found = hashes.get(name), _hash(directory / name)
        if found is None or found != expected:
            raise InputError(
                "the file is not the one that was written",
                where=directory / name,
                expected=expected or "its hash",
                found=found or "no file",
                next_step=_WRITE_AGAIN,
            )
    sizes, there = mark.get("sizes") or {}, _sizes(directory)
    odd = sorted(name for name in sizes.keys() | there.keys() if sizes.get(name) != there.get(name))
    if odd:
        raise InputError(
            "the file is not the one that was written",
            where=directory / odd[0],
            expected=f"{sizes.get(odd[0], 'no')} bytes",
            found=f"{there.get(odd[0], 'no')} bytes",
            next_step=_WRITE_AGAIN,
        )
    made = mark.get("config") or {}
    different = sorted(key for key in made.keys() | config.keys() if made.get(key) != config.get(key))
    if different:
        raise InputError(
            "the distributed checkpoint is another model's",
            where=directory / MARK,
            expected=f"{different[0]} = {config.get(different[0])}",
            found=made.get(different[0]),
        )


def _sharded(engine: MegatronTrainingEngine) -> dict[str, Any]:
    return {_chunk(number): module.sharded_state_dict() for number, module in enumerate(engine.modules)}


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2]


def _chunk(number: int) -> str:
    return f"model{number}"


def _sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir() if path.name != MARK}


def _hashes(directory: Path) -> dict[str, str | None]:
    return {name: _hash(directory / name) for name in _PICKLED}


def _hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
