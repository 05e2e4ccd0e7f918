"""Records every collective of a stage in its rank: what went in, what came out. The only file that wraps functions of
``torch.distributed``.

The wrappers sit on the functions that engines call, wherever a module keeps one of them under a name, and are gone when
the recording ends. Inputs are copied before the call and outputs once they are valid: after the call, once an
asynchronous one has been waited for (or asked whether it is complete, and was), after the block of coalesced ones. What
nobody waited for is marked as unfinished, and not judged. What goes past these functions (functional
collectives, methods of a process group) is seen by its operator and counted as not recorded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.errors import InputError
from alignment.files import write_atomically

SCHEMA = 1
RECORD = "collectives_rank_{rank}.safetensors"


@dataclass(kw_only=True)
class Call:
    """One call of a collective on one rank.

    Attributes:
        op: all_reduce, reduce, all_gather, gather, reduce_scatter, scatter, all_to_all, broadcast, send or recv.
        ranks: the group, as ranks of the world, in the order of the group.
        group: what the group calls itself.
        rank: of the world.
        root: source or destination of what has one, and the peer of send and recv, as rank of the world. Of a recv from
            any rank the one that it turned out to be; None where that was never told.
        reduce: SUM, AVG, MAX, …; "" where nothing is reduced.
        inputs, outputs: host copies; the parts of a gather in the order of the group. Empty where this rank gives or
            gets nothing.
        tag: of send and recv; messages of one pair meet within a tag.
        finished: False where nobody waited for an asynchronous call: nothing came out yet that could be judged.
    """

    op: str
    ranks: tuple[int, ...]
    group: str
    rank: int
    root: int | None = None
    reduce: str = ""
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    tag: int = 0
    finished: bool = True

    def to_json(self) -> dict[str, Any]:
        """Everything but the tensors, and how many there are."""
        names = ("op", "ranks", "group", "rank", "root", "reduce", "tag", "finished")
        plain = {name: getattr(self, name) for name in names}
        return {**plain, "inputs": len(self.inputs), "outputs": len(self.outputs)}


class CollectiveRecorder:
    """Records the calls of this process between :meth:`begin` and :meth:`end`; ``unseen`` counts what it could not."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.unseen: Counter[str] = Counter()
        self._recording = False
        self._undo: list[Callable[[], None]] = []
        self._inside = threading.local()
        self._coalescing: dict[Any, list[_Opened]] = {}
        self._census = _Census(self)

    def begin(self) -> None:
        """Wraps the functions, in every module that holds one.

        Raises:
            InputError: this process has no ranks to talk to.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise InputError("there is no process group", where="recording collectives", expected="ranks that are up")
        places = (dist, sys.modules["torch.distributed.distributed_c10d"])
        wrapped: dict[int, tuple[Any, Callable]] = {}
        for name, read in _READERS.items():
            for place in places:
                function = vars(place).get(name)
                if isinstance(function, FunctionType) and id(function) not in wrapped:
                    wrapped[id(function)] = function, self._wrap(function, read)
        for name in ("batch_isend_irecv", "_coalescing_manager"):
            for place in places:
                function = vars(place).get(name)
                if function is not None and id(function) not in wrapped:
                    wrapped[id(function)] = function, getattr(self, f"_{name.lstrip('_')}")(function)
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                found = wrapped.get(id(value))
                if found is not None and found[0] is value:
                    setattr(module, name, found[1])
                    self._undo.append(functools.partial(setattr, module, name, value))
        self._recording = True
        self._census.__enter__()

    def end(self) -> None:
        """Puts everything back. A module that was imported meanwhile may keep a wrapper, which then records nothing."""
        self._recording = False
        self._census.__exit__(None, None, None)
        while self._undo:
            self._undo.pop()()

    def save(self, path: Path) -> None:
        """Writes the calls, whole or not at all."""
        from safetensors.torch import save_file

        tensors = {
            f"{number:06d}.{side}.{place}": tensor.contiguous()
            for number, call in enumerate(self.calls)
            for side, held in (("in", call.inputs), ("out", call.outputs))
            for place, tensor in enumerate(held)
        }
        told = {
            "schema": SCHEMA,
            "calls": [call.to_json() for call in self.calls],
            "unseen": dict(self.unseen),
        }
        write_atomically(path, lambda beside: save_file(tensors, beside, metadata={"record": json.dumps(told)}))

    # --- the wrappers ------------------------------------------------------------------------------------------------

    def _wrap(self, function: Callable, read: Callable[[Mapping[str, Any]], _Read]) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def recorded(*arguments: Any, **keywords: Any) -> Any:
            if self._is_inside():
                return function(*arguments, **keywords)
            bound = signature.bind(*arguments, **keywords)
            bound.apply_defaults()
            read_ = read(bound.arguments)
            group = _group(bound.arguments.get("group"))
            if group is None or _rank_in(group) < 0:
                return function(*arguments, **keywords)
            finish = self._open(read_, group)
            with self._within():
                work = function(*arguments, **keywords)
            waits = bool(bound.arguments.get("async_op")) or read_.deferred
            if group in self._coalescing:
                self._coalescing[group].append(finish)
            elif waits and work is not None:
                return Waiting(work, [finish])
            else:
                finish(work)
            return work

        return recorded

    def _batch_isend_irecv(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def recorded(p2p_op_list: Sequence[Any]) -> Any:
            if self._is_inside():
                return function(p2p_op_list)
            finishes = []
            for one in p2p_op_list:
                arguments = {"tensor": one.tensor, "dst": one.peer, "src": one.peer, "tag": one.tag}
                read = _READERS[one.op.__name__]
                finishes.append(self._open(read(arguments), _group(one.group)))
            with self._within():
                works = function(p2p_op_list)
            if len(works) == len(finishes):
                return [Waiting(work, [finish]) for work, finish in zip(works, finishes)]
            return [Waiting(work, finishes) for work in works]

        return recorded

    def _coalescing_manager(self, function: Callable) -> Callable:
        @functools.wraps(function)
        @contextlib.contextmanager
        def recorded(*arguments: Any, **keywords: Any) -> Iterator[Any]:
            if self._is_inside():
                with function(*arguments, **keywords) as manager:
                    yield manager
                return
            bound = inspect.signature(function).bind(*arguments, **keywords)
            bound.apply_defaults()
            group = _group(bound.arguments.get("group"))
            finishes = self._coalescing.setdefault(group, [])
            block = function(*arguments, **keywords)
            manager = block.__enter__()
            try:
                yield manager
            except BaseException:
                if not block.__exit__(*sys.exc_info()):
                    raise
            else:
                with self._within():
                    block.__exit__(None, None, None)
            finally:
                del self._coalescing[group]
            if bound.arguments.get("async_ops"):
                manager.works[:] = [Waiting(work, finishes) for work in manager.works]
            else:
                for finish in finishes:
                    finish()

        return recorded

    def _open(self, read: _Read, group: Any) -> _Opened:
        """Notes the calls with copies of their inputs; what is returned takes the outputs, once."""
        import torch.distributed as dist

        ranks = tuple(dist.get_process_group_ranks(group))
        opened = []
        for one in read.calls:
            root = ranks[one.root] if one.root is not None and one.root_of_group else one.root
            call = Call(
                op=one.op,
                ranks=ranks,
                group=_name(group),
                rank=dist.get_rank(),
                root=root,
                reduce=one.reduce,
                tag=one.tag,
            )
            if one.op not in ("broadcast", "scatter") or root == call.rank:
                call.inputs = [_copy(part) for part in one.give(len(ranks))]
            self.calls.append(call)
            opened.append((call, one))
        return _Opened(opened, len(ranks))

    def _is_inside(self) -> bool:
        return not self._recording or getattr(self._inside, "depth", 0) > 0

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        self._inside.depth = getattr(self._inside, "depth", 0) + 1
        try:
            yield
        finally:
            self._inside.depth -= 1


class _Opened:
    """Calls that have begun; calling it takes their outputs, once."""

    def __init__(self, calls: Sequence[tuple[Call, _One]], size: int) -> None:
        self._calls, self._size, self._done = calls, size, False

    def defer(self) -> None:
        """The calls have returned, and their outputs are not there yet."""
        for call, _ in self._calls:
            call.finished = self._done

    def __call__(self, answer: Any = None) -> None:
        """``answer`` is what the function gave, or the work that was waited for: either knows who sent."""
        if not self._done:
            self._done = True
            for call, one in self._calls:
                if call.op == "recv" and call.root is None:
                    call.root = _sender(answer, call.ranks)
                if one.op not in ("reduce", "gather") or call.root == call.rank:
                    call.outputs = [_copy(part) for part in one.take(self._size)]
                call.finished = True


class Waiting:
    """What an asynchronous collective gave; the outputs are taken once somebody knows that they are there."""

    def __init__(self, work: Any, finishes: Sequence[_Opened]) -> None:
        self._work, self._finishes = work, finishes
        for finish in finishes:
            finish.defer()

    def wait(self, *arguments: Any, **keywords: Any) -> Any:
        """Waits for the work, then keeps its outputs."""
        answer = self._work.wait(*arguments, **keywords)
        self._finish()
        return answer

    def synchronize(self, *arguments: Any, **keywords: Any) -> Any:
        """Synchronises with the work, then keeps its outputs."""
        answer = self._work.synchronize(*arguments, **keywords)
        self._finish()
        return answer

    def is_completed(self) -> bool:
        """Whether the work is done; keeps its outputs if it is."""
        done = self._work.is_completed()
        if done:
            self._finish()
        return done

    def _finish(self) -> None:
        for finish in self._finishes:
            finish(self._work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Census(TorchDispatchMode):
    """Counts the operators of collectives that no wrapper stands around."""

    def __init__(self, recorder: CollectiveRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name() if isinstance(func, torch._ops.OpOverload) else ""
        if name.startswith(("c10d::", "_c10d_functional::")) and not self._recorder._is_inside():
            short = name.partition("::")[2].rstrip("_").lstrip("_")
            if not any(word in name for word in ("barrier", "wait_tensor")):
                self._recorder.unseen[short] += 1
        return func(*args, **(kwargs or {}))


# --- what the arguments of each function mean ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _One:
    """One collective: the live tensors this rank gives and takes, by the size of the group."""

    op: str
    give: Callable[[int], Sequence[Tensor]]
    take: Callable[[int], Sequence[Tensor]]
    root: int | None = None
    root_of_group: bool = False
    reduce: str = ""
    tag: int = 0


@dataclass(frozen=True, kw_only=True)
class _Read:
    """The collectives that one call of a function is. ``deferred``: it returns before its outputs are valid."""

    calls: Sequence[_One]
    deferred: bool = False


def _nothing(size: int) -> Sequence[Tensor]:
    return ()


def _parts(whole: Tensor, size: int, splits: Sequence[int] | None = None) -> list[Tensor]:
    """The part of each rank: rows by ``splits``, else equal consecutive pieces of the memory order."""
    if splits is not None and len(splits):
        return list(whole.split([int(rows) for rows in splits]))
    return list(whole.reshape(-1).chunk(size)) if whole.numel() else [whole.reshape(-1)] * size


def _all_reduce(a: Mapping[str, Any]) -> _Read:
    tensor = a["tensor"]
    return _Read(
        calls=[_One(op="all_reduce", give=lambda n: [tensor], take=lambda n: [tensor], reduce=_reduction(a["op"]))]
    )


def _all_reduce_coalesced(a: Mapping[str, Any]) -> _Read:
    tensors = [a["tensors"]] if isinstance(a["tensors"], Tensor) else a["tensors"]
    return _Read(calls=[_all_reduce({"tensor": tensor, "op": a["op"]}).calls[0] for tensor in tensors])


def _reduce(a: Mapping[str, Any]) -> _Read:
    tensor = a["tensor"]
    root, of_group = _root(a, "dst")
    one = _One(
        op="reduce",
        give=lambda n: [tensor],
        take=lambda n: [tensor],
        root=root,
        root_of_group=of_group,
        reduce=_reduction(a["op"]),
    )
    return _Read(calls=[one])


def _all_gather(a: Mapping[str, Any]) -> _Read:
    return _Read(calls=[_One(op="all_gather", give=lambda n: [a["tensor"]], take=lambda n: a["tensor_list"])])


def _all_gather_whole(a: Mapping[str, Any]) -> _Read:
    whole, part = a["output_tensor"], a["input_tensor"]
    return _Read(calls=[_One(op="all_gather", give=lambda n: [part.reshape(-1)], take=lambda n: _parts(whole, n))])


def _gather(a: Mapping[str, Any]) -> _Read:
    root, of_group = _root(a, "dst")
    take = lambda n: a["gather_list"] or ()  # noqa: E731
    return _Read(calls=[_One(op="gather", give=lambda n: [a["tensor"]], take=take, root=root, root_of_group=of_group)])


def _scatter(a: Mapping[str, Any]) -> _Read:
    root, of_group = _root(a, "src")
    give = lambda n: a["scatter_list"] or ()  # noqa: E731
    return _Read(calls=[_One(op="scatter", give=give, take=lambda n: [a["tensor"]], root=root, root_of_group=of_group)])


def _reduce_scatter(a: Mapping[str, Any]) -> _Read:
    give = lambda n: a["input_list"]  # noqa: E731
    return _Read(calls=[_One(op="reduce_scatter", give=give, take=lambda n: [a["output"]], reduce=_reduction(a["op"]))])


def _reduce_scatter_whole(a: Mapping[str, Any]) -> _Read:
    whole, part = a["input"], a["output"]
    take = lambda n: [part.reshape(-1)]  # noqa: E731
    return _Read(
        calls=[_One(op="reduce_scatter", give=lambda n: _parts(whole, n), take=take, reduce=_reduction(a["op"]))]
    )


def _all_to_all(a: Mapping[str, Any]) -> _Read:
    lists = a["input_tensor_list"], a["output_tensor_list"]
    return _Read(calls=[_One(op="all_to_all", give=lambda n: lists[0], take=lambda n: lists[1])])


def _all_to_all_single(a: Mapping[str, Any]) -> _Read:
    give = lambda n: _parts(a["input"], n, a.get("input_split_sizes"))  # noqa: E731
    take = lambda n: _parts(a["output"], n, a.get("output_split_sizes"))  # noqa: E731
    return _Read(calls=[_One(op="all_to_all", give=give, take=take)])


def _broadcast(a: Mapping[str, Any]) -> _Read:
    tensor = a["tensor"]
    root, of_group = _root(a, "src")
    one = _One(op="broadcast", give=lambda n: [tensor], take=lambda n: [tensor], root=root, root_of_group=of_group)
    return _Read(calls=[one])


def _send(a: Mapping[str, Any], *, deferred: bool = False) -> _Read:
    root, of_group = _root(a, "dst")
    tag = a.get("tag", 0)
    one = _One(op="send", give=lambda n: [a["tensor"]], take=_nothing, root=root, root_of_group=of_group, tag=tag)
    return _Read(calls=[one], deferred=deferred)


def _recv(a: Mapping[str, Any], *, deferred: bool = False) -> _Read:
    root, of_group = _root(a, "src")
    tag = a.get("tag", 0)
    one = _One(op="recv", give=_nothing, take=lambda n: [a["tensor"]], root=root, root_of_group=of_group, tag=tag)
    return _Read(calls=[one], deferred=deferred)


_READERS: dict[str, Callable[[Mapping[str, Any]], _Read]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_whole,
    "all_gather_single": _all_gather_whole,
    "_all_gather_base": _all_gather_whole,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_whole,
    "reduce_scatter_single": _reduce_scatter_whole,
    "_reduce_scatter_base": _reduce_scatter_whole,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "send": _send,
    "isend": functools.partial(_send, deferred=True),
    "recv": _recv,
    "irecv": functools.partial(_recv, deferred=True),
}


def _root(a: Mapping[str, Any], name: str) -> tuple[int | None, bool]:
    """The source or destination, and whether it counts in the group and not in the world."""
    inside = a.get(f"group_{name}")
    return (int(inside), True) if inside is not None else (a.get(name), False)


def _sender(answer: Any, ranks: Sequence[int]) -> int | None:
    """Who sent what a recv from any rank got, as rank of the world: recv says so itself, works by the group's count."""
    if isinstance(answer, int):
        return answer if answer in ranks else None
    try:
        source = answer._source_rank()
    except (AttributeError, RuntimeError):
        # Not every back end keeps it.
        return None
    return ranks[source] if 0 <= source < len(ranks) else None


def _reduction(op: Any) -> str:
    """``SUM`` of ``ReduceOp.SUM``, as enumeration or as object."""
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return next((name for name in names if op == getattr(torch.distributed.ReduceOp, name)), "another reduction")


def _group(group: Any) -> Any:
    import torch.distributed as dist

    return dist.group.WORLD if group is None else group


def _rank_in(group: Any) -> int:
    import torch.distributed as dist

    return dist.get_rank(group)


def _name(group: Any) -> str:
    name = str(getattr(group, "group_desc", "") or "")
    return "" if name in ("undefined", "default_pg") else name


def _copy(tensor: Tensor) -> Tensor:
    # A view of a shared buffer would be overwritten, on the host as well.
    return tensor.detach().to("cpu", copy=True)


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank recorded: its calls in order, and what it could not see."""

    rank: int
    calls: Sequence[Call]
    unseen: Mapping[str, int]


def remove_records(directory: Path) -> None:
    """Removes the records of all ranks from a folder: those of an earlier run would be taken for this one's."""
    for path in Path(directory).glob(RECORD.format(rank="*")):
        path.unlink()


def load_records(directory: Path) -> list[RankRecord]:
    """The records of all ranks of a folder, by rank.

    Raises:
        InputError: none are there, one is damaged, or one is no record.
    """
    found = [_load(path) for path in Path(directory).glob(RECORD.format(rank="*"))]
    if not found:
        raise InputError("no collectives were recorded there", where=directory, expected=RECORD.format(rank=0))
    return sorted(found, key=lambda record: record.rank)


def _load(path: Path) -> RankRecord:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            told = json.loads((file.metadata() or {}).get("record", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise InputError(f"recorded collectives cannot be read ({error})", where=path) from None
    if not isinstance(told, dict) or told.get("schema") != SCHEMA:
        raise InputError("these are no recorded collectives", where=path, expected=f"schema {SCHEMA}")
    try:
        calls = [_call(plain, number, tensors) for number, plain in enumerate(told["calls"])]
        unseen = dict(told["unseen"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"a recorded collective is not whole ({type(error).__name__}: {error})", where=path) from None
    rank = int(path.stem.rpartition("_")[2])
    return RankRecord(rank=rank, calls=calls, unseen=unseen)


def _call(plain: dict[str, Any], number: int, tensors: Mapping[str, Tensor]) -> Call:
    counts = {side: plain.pop(name) for side, name in (("in", "inputs"), ("out", "outputs"))}
    held = {
        side: [tensors[f"{number:06d}.{side}.{place}"] for place in range(count)] for side, count in counts.items()
    }
    plain["ranks"] = tuple(plain["ranks"])
    return Call(**plain, inputs=held["in"], outputs=held["out"])
