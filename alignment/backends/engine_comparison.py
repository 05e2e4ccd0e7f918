"""Training engines side by side: memory, communication, start-up, and how much source lies between a call and its
kernels.

Every engine takes the same steps on the same rows, on as many processes of its own as there are ranks. What is counted
is counted where tensors are made, so that the numbers are the same on every device and on every run; only seconds are
not.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignment.backends.training import (
    LossFunction,
    MicroBatch,
    OptimizerConfig,
    Outputs,
    ProcessGroupRanks,
    TrainingEngine,
)
from alignment.devices.base import Device, get_device
from alignment.errors import InputError, UnavailableError
from alignment.models.config import ModelConfig, preset

ENGINES = ("golden", "fsdp", "fsdp-golden", "megatron")
"""``fsdp`` shards transformers' model, ``fsdp-golden`` the golden one."""

MATMULS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::matmul", "aten::linear")
_ROWS_PER_RANK, _MICRO, _PROMPT, _RESPONSE = 4, 2, 8, 24
_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One engine's numbers. Bytes, calls and lines are those of rank 0 (memory: of the rank with most).

    Attributes:
        engine: its name, with its release where it has one.
        ranks: data parallel ranks.
        start_seconds: from the start of a process to an engine that can take a step.
        first_step_seconds, step_seconds: the first update, and the median of later ones.
        held_bytes: tensors between updates: weights, main weights, optimizer, buffers, gradients that are kept.
        peak_bytes: most bytes of tensors alive during an update.
        collectives: calls and bytes of each collective operation in one update; the bytes are those of its largest
            argument.
        sent_bytes: what a rank sends for them where rings are used.
        frames: Python frames from the call of ``update`` to the first matrix product.
        lines_to_kernel: different source lines that run in between: what one steps through.
        lines_in_update: different source lines that run in a whole update: what one may have to read.
        unavailable: why there are no numbers; empty where there are.
    """

    engine: str
    ranks: int
    start_seconds: float = 0.0
    first_step_seconds: float = 0.0
    step_seconds: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0
    collectives: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sent_bytes: int = 0
    frames: int = 0
    lines_to_kernel: int = 0
    lines_in_update: int = 0
    unavailable: str = ""

    @property
    def calls(self) -> int:
        """Collective operations in one update."""
        return sum(count for count, _ in self.collectives.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**dataclasses.asdict(self), "calls": self.calls}


def compare_engines(
    engines: Sequence[str] = ENGINES,
    *,
    model: str | ModelConfig = "tiny-moonlight",
    ranks: int = 2,
    device: str = "cpu",
    timeout_seconds: float = 600.0,
) -> list[EngineRow]:
    """A row per engine, in order; an engine that is not installed or does not run here has a row that says why.

    Args:
        engines: of :data:`ENGINES`.
        model: a preset or a configuration; weights are drawn.
        ranks: processes of each engine.
        device: name for :func:`alignment.devices.base.get_device`; rank r uses device r of its kind.
        timeout_seconds: of one engine.

    Raises:
        InputError: an unknown engine, or one that fails otherwise than by not being available; the message has its
        error.
    """
    for name in engines:
        if name not in ENGINES:
            raise InputError(
                "there is no such engine to compare", where="engines", expected=", ".join(ENGINES), found=name
            )
    config = preset(model) if isinstance(model, str) else model
    with tempfile.TemporaryDirectory() as folder:
        _write_checkpoint(Path(folder) / "model", config)
        return [
            _launch(name, Path(folder), ranks=ranks, device=device, timeout_seconds=timeout_seconds) for name in engines
        ]


# --- what is measured
# --------------------------------------------------------------------------------------------------


class Tally(TorchDispatchMode):
    """Counts the bytes of live tensors and the collective operations while it is active.

    Tensors that are alive at its start count from the start. Memory that is given back by shrinking a storage, as
    FSDP2 does, is seen as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.sent_bytes = 0
        self.collectives: dict[str, list[int]] = {}
        self._sizes: dict[int, int] = {}

    def __enter__(self):
        for storage in live_storages().values():
            self._watch(storage)
        resize, tally = torch.UntypedStorage.resize_, self

        def resize_(storage, size):
            result = resize(storage, size)
            tally._watch(storage)
            return result

        self._resize, torch.UntypedStorage.resize_ = resize, resize_
        return super().__enter__()

    def __exit__(self, *exc):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*exc)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(_is_wrapper, types)):
            # Comes back as operations on what is wrapped.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func._schema.name.split("::")[1] not in _NO_MESSAGES:
            self._count(func._schema.name, args)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _has_storage(leaf):
                self._watch(leaf.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        before, now = self._sizes.get(key), storage.nbytes()
        if before == now:
            return
        self._sizes[key] = now
        self.live += now - (before or 0)
        self.peak = max(self.peak, self.live)
        if before is None:
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    def _count(self, operation: str, args: tuple) -> None:
        name = operation.split("::")[1].strip("_")
        payload = max((sum(t.nbytes for t in tree_leaves(a) if isinstance(t, Tensor)) for a in args), default=0)
        entry = self.collectives.setdefault(name, [0, 0])
        entry[0] += 1
        entry[1] += payload
        size = _group_size(args)
        hops = 2 if "allreduce" in name or "all_reduce" in name else 1
        self.sent_bytes += hops * payload * (size - 1) // size


_NO_MESSAGES = ("wait_tensor", "barrier", "monitored_barrier_")


def _group_size(args: tuple) -> int:
    import torch.distributed as dist

    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument).size()
            except (RuntimeError, AttributeError, TypeError):
                continue
    return dist.get_world_size()


def live_storages() -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors that Python can reach, each once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and _has_storage(thing):
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage._cdata] = storage
    return found


def _is_wrapper(kind: type) -> bool:
    """Whether tensors of this type, such as DTensor, hold others: the storage they show is as large as if they did
    not."""
    return hasattr(kind, "__tensor_flatten__")


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not _is_wrapper(type(tensor))


class LinesRun:
    """Which source lines run, on this thread and (for backward passes on CPU) those that call back into Python here."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.at_kernel: int | None = None
        self.frames = 0

    def __enter__(self):
        self._kernel = _FirstMatmul(self)
        self._before = sys.gettrace()
        self._kernel.__enter__()
        self._base = _depth(sys._getframe())
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc):
        sys.settrace(self._before)
        self._kernel.__exit__(*exc)

    def _trace(self, frame, event, argument):
        if _is_ours(frame.f_code.co_filename):
            return None
        if event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._trace

    def reached(self, frame) -> None:
        """The first matrix product is about to run."""
        self.at_kernel = len(self.lines)
        depth = 0
        while frame is not None and depth < 10_000:
            depth += not _is_ours(frame.f_code.co_filename)
            frame = frame.f_back
        self.frames = depth - self._base


class _FirstMatmul(TorchDispatchMode):
    def __init__(self, lines: LinesRun) -> None:
        super().__init__()
        self._lines = lines

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(_is_wrapper, types)):
            return NotImplemented
        if self._lines.at_kernel is None and func._schema.name in MATMULS:
            self._lines.reached(sys._getframe(1))
        return func(*args, **(kwargs or {}))


def _depth(frame) -> int:
    depth = 0
    while frame is not None:
        depth += not _is_ours(frame.f_code.co_filename)
        frame = frame.f_back
    return depth


def _is_ours(file: str) -> bool:
    """The measuring itself, which is no part of what is measured."""
    return file == __file__ or file.endswith("_python_dispatch.py")


# --- the workload
# ------------------------------------------------------------------------------------------------------


def _write_checkpoint(directory: Path, config: ModelConfig) -> None:
    from alignment.models.causal_lm import CausalLM
    from alignment.weights.checkpoint import save_checkpoint

    model = CausalLM(config, dtype=torch.float32).init_weights(1)
    save_checkpoint(directory, config, model.state_dict())


def workload(config: ModelConfig, rank: int) -> list[dict[str, Tensor]]:
    """The micro batches of a rank: full rows, so that every engine computes as many tokens."""
    from alignment.numerics.random import portable_integers

    length = _PROMPT + _RESPONSE
    ids = portable_integers(0, config.vocab_size, (_ROWS_PER_RANK, length), seed=rank, stream="comparison")
    whole = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(length).expand(_ROWS_PER_RANK, -1).contiguous(),
        "responses": ids[:, _PROMPT:],
    }
    return [{k: v[i : i + _MICRO] for k, v in whole.items()} for i in range(0, _ROWS_PER_RANK, _MICRO)]


def likelihood_loss(ranks: int) -> LossFunction:
    """Negative log-likelihood of the responses, over the tokens of all rows of all ranks."""
    tokens = ranks * _ROWS_PER_RANK * _RESPONSE

    def loss(outputs: Outputs, micro_batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        value = -outputs["log_probs"].sum() / tokens
        return value, {"loss": value.detach()}

    return loss


def token_outputs(logits: Tensor, following: Tensor) -> Outputs:
    """``log_probs`` [b, s] of the tokens ``following`` [b, s] under ``logits`` [b, s, v]."""
    return {"log_probs": logits.float().log_softmax(-1).gather(-1, following[..., None])[..., 0]}


def response_outputs(model: Any, micro_batch: MicroBatch) -> Outputs:
    """``log_probs`` [b, r] of the responses."""
    logits = model(
        micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"], position_ids=micro_batch["position_ids"]
    )
    width = micro_batch["responses"].shape[1]
    return token_outputs(logits[:, -width - 1 : -1], micro_batch["responses"])


def build_engine(name: str, checkpoint: Path, *, device: Device, ranks: Any) -> TrainingEngine:
    """An engine of :data:`ENGINES` in float32, of a process group that is there.

    Raises:
        UnavailableError: it is not installed.
    """
    common: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-4), "dtype": torch.float32}
    if name == "golden":
        from alignment.backends.golden_training import GoldenTrainingEngine

        return GoldenTrainingEngine.from_checkpoint(
            checkpoint, outputs=response_outputs, device=device.torch_device, ranks=ranks, **common
        )
    if name == "megatron":
        from alignment.backends.megatron_training import MegatronTrainingEngine

        return MegatronTrainingEngine.from_checkpoint(checkpoint, outputs=token_outputs, device=device, **common)
    from alignment.backends.fsdp_training import FsdpSettings, FsdpTrainingEngine

    settings = FsdpSettings(model="golden" if name == "fsdp-golden" else "transformers")
    return FsdpTrainingEngine.from_checkpoint(
        checkpoint, outputs=response_outputs, device=device, settings=settings, **common
    )


# --- processes
# ---------------------------------------------------------------------------------------------------------


def _launch(name: str, folder: Path, *, ranks: int, device: str, timeout_seconds: float) -> EngineRow:
    here = folder / name
    here.mkdir()
    started_at = time.time()
    processes = []
    for rank in range(ranks):
        job = {
            "engine": name,
            "rank": rank,
            "ranks": ranks,
            "device": device,
            "folder": str(folder),
            "timeout": timeout_seconds,
            "started_at": started_at,
        }
        with open(here / f"out_{rank}", "wb") as out:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", __name__, json.dumps(job)],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                )
            )
    deadline = time.monotonic() + timeout_seconds
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if any(p.poll() not in (None, 0) for p in processes):
                break
            time.sleep(0.1)
        codes = [p.poll() for p in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    if any(codes) or None in codes:
        rank = next(i for i, code in enumerate(codes) if code != 0)
        rank = next((i for i, code in enumerate(codes) if code), rank)
        raise InputError(
            "the engine failed" if codes[rank] is not None else f"the engine took longer than {timeout_seconds:g} s",
            where=f"{name}, rank {rank}",
            found=(here / f"out_{rank}").read_text(errors="replace")[-2000:],
        )
    answers = [json.loads((here / f"answer_{rank}.json").read_text()) for rank in range(ranks)]
    reasons = [a["unavailable"] for a in answers if a.get("unavailable")]
    if reasons:
        return EngineRow(engine=name, ranks=ranks, unavailable=reasons[0])
    first = answers[0]
    most = {key: max(a[key] for a in answers) for key in ("start_seconds", "held_bytes", "peak_bytes")}
    collectives = {k: (v[0], v[1]) for k, v in first.pop("collectives").items()}
    return EngineRow(**{**first, **most, "ranks": ranks, "collectives": collectives})


def _run_rank(job: Mapping[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    name, rank, size = job["engine"], job["rank"], job["ranks"]
    kind = get_device(job["device"]).kind
    device = get_device(kind if kind == "cpu" else f"{kind}:{rank}")
    ranks = ProcessGroupRanks(
        rank=rank,
        world_size=size,
        init_method=f"file://{job['folder']}/{name}/rendezvous",
        device_kind=device.kind,
        timeout_seconds=job["timeout"],
    )
    checkpoint = Path(job["folder"]) / "model"
    try:
        engine = build_engine(name, checkpoint, device=device, ranks=ranks)
    except UnavailableError as error:
        return {"unavailable": str(error)}
    start_seconds = time.time() - job["started_at"]
    from alignment.weights.checkpoint import load_config

    batches, loss = workload(load_config(checkpoint), rank), likelihood_loss(size)
    seconds = []
    for _ in range(_STEPS):
        begin = time.perf_counter()
        engine.update(batches, loss, stage="update_actor")
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    # Only now: megatron-core makes its moments in the first step.
    held = sum(storage.nbytes() for storage in live_storages().values())
    with Tally() as tally:
        engine.update(batches, loss, stage="update_actor")
    with LinesRun() as run:
        engine.update(batches, loss, stage="update_actor")
    version = getattr(engine, "version", None)
    return {
        "engine": f"{name} {version}" if version else name,
        "start_seconds": start_seconds,
        "first_step_seconds": seconds[0],
        "step_seconds": statistics.median(seconds[1:]),
        "held_bytes": held,
        "peak_bytes": tally.peak,
        "collectives": tally.collectives,
        "sent_bytes": tally.sent_bytes,
        "frames": run.frames,
        "lines_to_kernel": run.at_kernel or 0,
        "lines_in_update": len(run.lines),
    }


def _main() -> None:
    job = json.loads(sys.argv[1])
    answer = _run_rank(job)
    (Path(job["folder"]) / job["engine"] / f"answer_{job['rank']}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    _main()
