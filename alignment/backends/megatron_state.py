"""The optimizer of a megatron-core model: made, saved, loaded, offloaded, with its gradients in one piece."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.backends.training import OptimizerConfig
from alignment.errors import InputError
from alignment.files import read_json, write_json

OPTIMIZER, LAYOUT = "optimizer_rank_{rank}.safetensors", "megatron.json"
WEIGHTS = "model"


def build_optimizer(
    chunks: list[Any], config: OptimizerConfig, *, dtype: torch.dtype, distributed: bool, overrides: Mapping[str, Any]
) -> Any:
    """megatron-core's optimizer: AdamW that decays every parameter, as the golden engine does.

    megatron-core's default leaves norms and biases out of the decay; FSDP's and the golden engine's do not.

    Raises:
        InputError: this release has no such optimizer setting.
    """
    import dataclasses

    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    known = {f.name for f in dataclasses.fields(MegatronOptimizerConfig)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise InputError(
            f"this release of megatron-core has no optimizer setting {unknown[0]!r}", where="override_optimizer_config"
        )
    if overrides.get("optimizer_cpu_offload") and distributed and dtype is torch.bfloat16:
        # Only so does the offloading optimizer keep the float32 main weights, on the host.
        overrides = {"use_precision_aware_optimizer": True, **overrides}
    settings = MegatronOptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": config.lr,
            "min_lr": 0.0,
            "weight_decay": config.weight_decay,
            "adam_beta1": config.betas[0],
            "adam_beta2": config.betas[1],
            "adam_eps": config.eps,
            "clip_grad": config.clip_grad,
            "bf16": dtype is torch.bfloat16,
            "params_dtype": dtype,
            "use_distributed_optimizer": distributed,
            **overrides,
        }
    )
    everything = (
        {"config_overrides": {}}
        if "config_overrides" in inspect.signature(get_megatron_optimizer).parameters
        else {"no_weight_decay_cond": lambda name, parameter: False}
    )
    optimizer = get_megatron_optimizer(settings, chunks, **everything)
    optimizer.reload_model_params()
    return optimizer


def _inner(optimizer: Any) -> list[Any]:
    """The torch optimizers inside: one for dense parameters, one for experts."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if part.optimizer is not None]


def _parameters(optimizer: Any) -> Iterator[tuple[str, Any, Tensor]]:
    """Key, inner optimizer and main parameter (or this rank's shard of it)."""
    for number, inner in enumerate(_inner(optimizer)):
        for group_number, group in enumerate(inner.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield f"{number}.{group_number}.{index}", inner, parameter


def state_tensors(optimizer: Any) -> dict[str, Tensor]:
    """Main parameters and every tensor of the optimizer state of this rank, by key."""
    tensors = {}
    for key, inner, parameter in _parameters(optimizer):
        tensors[f"{key}.main"] = _main(inner, parameter)
        for name, value in inner.state.get(parameter, {}).items():
            if torch.is_tensor(value) and name != "master_param":
                tensors[f"{key}.{name}"] = value
    return tensors


def _main(inner: Any, parameter: Tensor) -> Tensor:
    """What the optimizer steps: the parameter itself, or the float32 copy an offloading optimizer keeps of it."""
    copies = getattr(inner, "param_to_inner_param", None)
    return parameter.detach() if copies is None else copies[parameter].detach()


def save(engine: Any, directory: Path) -> None:
    """See :meth:`MegatronTrainingEngine.save_state`."""
    from safetensors.torch import save_file

    from alignment.files import write_atomically
    from alignment.weights.checkpoint import SINGLE_FILE, expected_shapes
    from alignment.weights.indexed_save import save_stream

    directory.mkdir(parents=True, exist_ok=True)
    stream = engine.export_weights()
    if engine.groups.rank == 0:
        save_stream(
            directory / WEIGHTS, engine.config, stream, index=dict.fromkeys(expected_shapes(engine.config), SINGLE_FILE)
        )
        write_json(directory / LAYOUT, {"updates": engine.updates, **_layout(engine)})
    else:
        for _ in stream:
            pass
    host = {key: tensor.cpu().contiguous().clone() for key, tensor in state_tensors(engine._megatron_optimizer).items()}
    write_atomically(directory / OPTIMIZER.format(rank=engine.groups.rank), lambda path: save_file(host, path))
    engine.groups.barrier()


def load(engine: Any, directory: Path) -> None:
    """See :meth:`MegatronTrainingEngine.load_state`. Everything is checked before anything is overwritten."""
    from alignment.backends.megatron_model import engine_scope
    from alignment.weights.checkpoint import iter_tensors

    saved = read_json(directory / LAYOUT)
    updates = saved.pop("updates")
    layout = _layout(engine)
    differing = sorted(k for k in saved.keys() | layout.keys() if saved.get(k) != layout.get(k))
    if differing:
        name = differing[0]
        raise InputError(
            "the optimizer state was saved under another layout",
            where=f"{directory / LAYOUT}: {name}",
            expected=layout.get(name),
            found=saved.get(name),
            next_step="resume with the layout of the checkpoint, or start a new run from its weights",
        )
    path = directory / OPTIMIZER.format(rank=engine.groups.rank)
    found = _read(path)
    optimizer = engine._megatron_optimizer
    _check(path, found, optimizer, started=updates > 0)
    with engine_scope(engine.device), torch.no_grad():
        engine._fill(iter_tensors(directory / WEIGHTS))
        optimizer.reload_model_params()
        _restore(optimizer, found)
    engine.updates = updates
    engine.groups.barrier()


def _layout(engine: Any) -> dict[str, Any]:
    return {
        "megatron_core": engine.version,
        "world_size": engine.groups.world_size,
        "dtype": str(engine.dtype),
        "use_distributed_optimizer": engine.settings.use_distributed_optimizer,
        "optimizer": {k: str(v) for k, v in sorted(engine.settings.optimizer.items())},
        **{k: v for k, v in vars(engine.settings.sizes).items()},
    }


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError("the checkpoint lacks the optimizer state of this rank", where=path) from None
    except SafetensorError as error:
        raise InputError(f"the file is truncated or not safetensors ({error})", where=path) from None


def _check(path: Path, found: Mapping[str, Tensor], optimizer: Any, *, started: bool) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for key, inner, parameter in _parameters(optimizer):
        names = ("main", "exp_avg", "exp_avg_sq") if started else ("main",)
        expected.update({f"{key}.{name}": tuple(_main(inner, parameter).shape) for name in names})
    for key, shape in expected.items():
        if key not in found:
            raise InputError(
                f"the optimizer state lacks {key}",
                where=path,
                expected="main parameters and both moments of every parameter",
                next_step="an offloading optimizer's state must hold its float32 main parameters (master_param) too",
            )
        if tuple(found[key].shape) != shape:
            raise InputError(
                "a tensor of the optimizer state does not fit",
                where=f"{path} · {key}",
                expected=shape,
                found=tuple(found[key].shape),
            )
    extra = sorted(k for k in found if k.rsplit(".", 1)[0] not in {e.rsplit(".", 1)[0] for e in expected})
    if extra:
        raise InputError(f"the optimizer state has {extra[0]} too many", where=path)


def _restore(optimizer: Any, found: Mapping[str, Tensor]) -> None:
    for key, inner, parameter in _parameters(optimizer):
        main = _main(inner, parameter)
        main.copy_(found[f"{key}.main"])
        names = [k.removeprefix(f"{key}.") for k in found if k.startswith(f"{key}.") and not k.endswith(".main")]
        state = {name: _like(found[f"{key}.{name}"], main, scalar=name == "step") for name in names}
        if not state:
            continue
        if hasattr(inner, "sub_optimizers"):
            # megatron-core's own way from here dies on a state without float32 copies (KeyError: master_param) and,
            # where
            # parameters are float32 themselves, on every state.
            target = inner.param_to_inner_param[parameter]
            holder = next(
                o for o in inner.sub_optimizers if any(p is target for g in o.param_groups for p in g["params"])
            )
            holder.state[target] = state
        else:
            inner.state[parameter] = state
    for inner in _inner(optimizer):
        if hasattr(inner, "sub_optimizers"):
            inner._sync_sub_optimizers_state_to_hdo()


def _like(tensor: Tensor, main: Tensor, *, scalar: bool) -> Tensor:
    # torch keeps the step counter on the host.
    return tensor.clone() if scalar else tensor.to(main.device)


def complete_gradients(chunks: Sequence[Any], distributed: bool) -> None:
    """With the distributed optimizer each data parallel rank has the sum of its share only: gathers the shares."""
    if not distributed:
        return
    import torch.distributed as dist

    for chunk in chunks:
        for buffer in _flat_buffers(chunk):
            group = buffer.data_parallel_group
            size = dist.get_world_size(group)
            if size == 1:
                continue
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(size)[dist.get_rank(group)].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)


def _flat_buffers(chunk: Any) -> Iterator[Any]:
    """megatron-core's flat buffers of a wrapped chunk; a frozen one has none."""
    # The wrapper keeps them under the name of a method of torch's modules.
    if not callable(chunk.buffers):
        yield from itertools.chain(chunk.buffers, chunk.expert_parallel_buffers)


def park(modules: Sequence[Any], chunks: Sequence[Any], optimizer: Any, *, device_kind: str) -> Callable[[], None]:
    """Moves every tensor that a model and its optimizer have on the device to the host; the result brings them back.

    Parameters and gradients that are views of megatron-core's flat buffers stay so: the buffer's storage is emptied and
    filled again in place.
    """
    storages: dict[int, Tensor] = {}

    def note(tensor: Tensor | None) -> None:
        if tensor is not None and tensor.numel() and tensor.device.type == device_kind:
            storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    for module in modules:
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            note(tensor.data)
    for chunk in chunks:
        for buffer in _flat_buffers(chunk):
            note(buffer.param_data)
            note(buffer.grad_data)
    if optimizer is not None:
        for tensor in state_tensors(optimizer).values():
            note(tensor)
    parked = []
    for tensor in storages.values():
        storage = tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        parked.append((storage, storage.nbytes(), whole.cpu().clone()))
        storage.resize_(0)

    def bring_back() -> None:
        for storage, size, copy in parked:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(copy)

    return bring_back
