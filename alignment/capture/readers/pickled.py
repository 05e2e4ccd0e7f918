"""Pickles read as data: nothing is imported, nothing is called but the few constructors below.

The stack machine of the format is run here on plain values. A global becomes a :class:`Name`; calling one that is not
known, or giving state to anything but a :class:`Record`, is refused. So ``torch.save`` files and verl's ``DataProto``
dumps can be read without trusting whoever wrote them, and without importing torch.
"""

from __future__ import annotations

import io
import pickletools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from alignment.capture.readers.arrays import StoredArray
from alignment.errors import InputError

LARGEST_PROGRAM = 1 << 22
"""Operations of one pickle. A dump of a whole training step has a few thousand."""


@dataclass(frozen=True)
class Name:
    """A global that a pickle names: module and name. It is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Record:
    """An object of a class that is not loaded: its class, the arguments it was made with, and its state."""

    kind: Name
    arguments: tuple = ()
    state: Any = None


@dataclass(eq=False)
class _Raw:
    """A NumPy array before its state arrives."""

    array: np.ndarray | None = field(default=None)


Call = Callable[..., Any]


def run(
    program: bytes | BinaryIO,
    *,
    where: str,
    known: Mapping[str, Call] | None = None,
    records: Sequence[str] = (),
    storage: Callable[[Any], Any] | None = None,
) -> Any:
    """The value a pickle describes.

    Args:
        program: the pickle.
        where: what an error names.
        known: what calling a global means, by its dotted name, beside the constructors of NumPy and the collections.
        records: dotted names, or prefixes ending in ``.``, of classes whose objects become :class:`Record`.
        storage: what a persistent id means (PyTorch's storages), or None to refuse them.

    Raises:
        InputError: the pickle is damaged or does something that is not data.
    """
    machine = _Machine(where, {**_KNOWN, **(known or {})}, tuple(records), storage)
    source = io.BytesIO(program) if isinstance(program, (bytes, bytearray, memoryview)) else program
    position = 0
    try:
        for count, (opcode, argument, position) in enumerate(pickletools.genops(source)):
            if count > LARGEST_PROGRAM:
                raise InputError(
                    "the pickle is longer than is read", where=where, expected=f"{LARGEST_PROGRAM} operations"
                )
            if opcode.name == "STOP":
                return finished(machine.pop())
            machine.step(opcode.name, argument)
    except InputError as error:
        # What a constructor refuses knows its name, not the file.
        place = str(error.where) if str(where) in str(error.where) else f"{where}: {error.where}"
        raise InputError(
            error.problem,
            where=f"{place}, byte {position} of the pickle",
            expected=error.expected,
            found=error.found,
            next_step=error.next_step,
        ) from None
    except Exception as error:
        raise InputError(
            f"the pickle is damaged ({type(error).__name__}: {str(error)[:120]})",
            where=f"{where}, byte {position} of the pickle",
        ) from None
    raise InputError("the pickle has no end", where=where)


def walk(value: Any, *, deepest: int = 32, largest: int = 1_000_000) -> Iterator[tuple[str, Any]]:
    """Dotted path and leaf of every leaf below dictionaries, sequences and records; what is shared comes once.

    Raises:
        InputError: nested deeper, or larger, than any dump is.
    """
    seen: set[int] = set()
    pending: list[tuple[str, Any, int]] = [("", value, 0)]
    count = 0
    while pending:
        path, item, depth = pending.pop()
        count += 1
        if count > largest or depth > deepest:
            raise InputError("a structure that is too large or nested too deeply", where=path[:80] or "the value")
        prefix = f"{path}." if path else ""
        if isinstance(item, (dict, list, tuple, Record)):
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, Record):
                below = [("", item.state), ("", item.arguments)] if item.state is not None else [("", item.arguments)]
                pending += [(path, v, depth + 1) for _, v in reversed(below)]
            else:
                pairs = item.items() if isinstance(item, dict) else enumerate(item)
                pending += [(f"{prefix}{str(k)[:200]}", v, depth + 1) for k, v in reversed(list(pairs))]
        else:
            yield path, item


def finished(value: Any) -> Any:
    """``value`` with NumPy arrays in place of what was built up for them."""
    return value.array if isinstance(value, _Raw) else value


class _Machine:
    def __init__(
        self, where: str, known: Mapping[str, Call], records: tuple[str, ...], storage: Callable[[Any], Any] | None
    ) -> None:
        self.where, self.known, self.storage = where, known, storage
        self.records = records
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        else:
            action = _ACTIONS.get(name)
            if action is None:
                raise InputError(f"the pickle uses the operation {name}, which is not data", where=self.where)
            action(self, argument)

    def pop(self) -> Any:
        if not self.stack or (self.marks and len(self.stack) <= self.marks[-1]):
            raise InputError("the pickle takes more than it has", where=self.where)
        return self.stack.pop()

    def popped(self) -> list[Any]:
        """What lies above the last mark."""
        if not self.marks:
            raise InputError("the pickle has no mark where it needs one", where=self.where)
        at = self.marks.pop()
        items, self.stack[at:] = self.stack[at:], []
        return items

    def top(self, kind: type) -> Any:
        value = self.stack[-1] if self.stack else None
        if type(value) is not kind:
            raise InputError(
                "the pickle fills something else than it made", where=self.where, expected=kind.__name__,
                found=type(value).__name__,
            )  # fmt: skip
        return value

    # --- one method per kind of operation -----------------------------------------------------------------------------

    def mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def pop_mark(self, _: Any) -> None:
        self.popped()

    def drop(self, _: Any) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.pop()

    def duplicate(self, _: Any) -> None:
        value = self.pop()
        self.stack += [value, value]

    def append(self, _: Any) -> None:
        value = self.pop()
        self.top(list).append(finished(value))

    def extend(self, _: Any) -> None:
        items = self.popped()
        self.top(list).extend(map(finished, items))

    def make_list(self, _: Any) -> None:
        self.stack.append(list(map(finished, self.popped())))

    def make_tuple(self, _: Any) -> None:
        self.stack.append(tuple(map(finished, self.popped())))

    def make_dict(self, _: Any) -> None:
        items = self.popped()
        self.stack.append({})
        self._put_items(items)

    def make_frozenset(self, _: Any) -> None:
        self.stack.append(frozenset(self.popped()))

    def set_item(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self._put_items([key, value])

    def set_items(self, _: Any) -> None:
        self._put_items(self.popped())

    def _put_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise InputError("the pickle has a key without a value", where=self.where)
        target = self.top(dict)
        for key, value in zip(items[::2], items[1::2]):
            if not isinstance(key, (str, int, float, bool, bytes, Name, type(None))):
                raise InputError("the pickle has a key that is no name", where=self.where, found=type(key).__name__)
            target[key] = finished(value)

    def add_items(self, _: Any) -> None:
        items = self.popped()
        self.top(set).update(items)

    def tuple_of(self, count: int) -> None:
        items = [finished(self.pop()) for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def put(self, index: Any) -> None:
        value = self.pop()
        self.stack.append(value)
        self.memo[int(index)] = value

    def memoize(self, _: Any) -> None:
        self.put(len(self.memo))

    def get(self, index: Any) -> None:
        if int(index) not in self.memo:
            raise InputError(
                "the pickle remembers what it never put down", where=self.where, found=f"memo {int(index)}"
            )
        self.stack.append(self.memo[int(index)])

    def global_name(self, argument: Any) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(self._name(module, name))

    def stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self.stack.append(self._name(module, name))

    def _name(self, module: Any, name: Any) -> Name:
        if not isinstance(module, str) or not isinstance(name, str):
            raise InputError("the pickle names a global by something that is no text", where=self.where)
        found = Name(module, name)
        if str(found) not in self.known and not self._is_record(found):
            raise InputError(
                f"the pickle wants {str(found)[:120]}, which is code and is not run", where=self.where,
                next_step="save plain tensors, with torch.save of a dictionary of tensors or as safetensors",
            )  # fmt: skip
        return found

    def _is_record(self, name: Name) -> bool:
        return any(str(name) == r or (r.endswith(".") and str(name).startswith(r)) for r in self.records)

    def reduce(self, _: Any) -> None:
        arguments, function = self.pop(), self.pop()
        self.stack.append(self._called(function, arguments))

    def new_object(self, _: Any) -> None:
        arguments, kind = self.pop(), self.pop()
        self.stack.append(self._called(kind, arguments))

    def _called(self, function: Any, arguments: Any) -> Any:
        if type(function) is not Name or type(arguments) is not tuple:
            raise InputError("the pickle calls something that is no constructor", where=self.where)
        call = self.known.get(str(function))
        if call is not None:
            return call(*map(finished, arguments))
        return Record(function, tuple(map(finished, arguments)))

    def build(self, _: Any) -> None:
        state = finished(self.pop())
        target = self.stack[-1] if self.stack else None
        if type(target) is Record:
            target.state = state
        elif type(target) is _Raw:
            target.array = _array_of(state)
        elif type(target) is _Dtype:
            if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
                raise InputError("the pickle has a dtype without an order of bytes", where=self.where)
            if state[1] == ">":
                target.dtype = target.dtype.newbyteorder(">")
        elif isinstance(target, dict) and not state:
            pass  # an ordered dictionary without attributes
        elif isinstance(target, dict) and isinstance(state, dict):
            pass  # attributes of a state dict (its metadata), which hold no tensors
        elif isinstance(target, StoredArray):
            pass  # attributes of a tensor
        else:
            raise InputError("the pickle gives state to what has none", where=self.where, found=type(target).__name__)

    def persistent(self, _: Any) -> None:
        token = self.pop()
        if self.storage is None:
            raise InputError("the pickle refers to something outside it", where=self.where)
        self.stack.append(self.storage(token))

    def ignore(self, _: Any) -> None:
        pass


_VALUES = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING BINBYTES "
    "SHORT_BINBYTES BINBYTES8 BYTEARRAY8 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8".split()
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict, "EMPTY_SET": set,
}  # fmt: skip
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.ignore, "FRAME": _Machine.ignore, "MARK": _Machine.mark, "POP": _Machine.drop,
    "POP_MARK": _Machine.pop_mark, "DUP": _Machine.duplicate, "APPEND": _Machine.append, "APPENDS": _Machine.extend,
    "LIST": _Machine.make_list, "TUPLE": _Machine.make_tuple, "DICT": _Machine.make_dict,
    "FROZENSET": _Machine.make_frozenset, "SETITEM": _Machine.set_item, "SETITEMS": _Machine.set_items,
    "ADDITEMS": _Machine.add_items, "TUPLE1": lambda m, _: m.tuple_of(1), "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3), "PUT": _Machine.put, "BINPUT": _Machine.put, "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize, "GET": _Machine.get, "BINGET": _Machine.get, "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.global_name, "STACK_GLOBAL": _Machine.stack_global, "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.new_object, "BUILD": _Machine.build, "BINPERSID": _Machine.persistent,
}  # fmt: skip


# --- the constructors of NumPy and the standard library that data needs ---------------------------------------------

_DTYPE = re.compile(r"[|<>=]?(b1|[iu][1248]|f[248]|c(8|16)|O8?|[SU]\d{0,6})")


@dataclass(eq=False)
class _Dtype:
    dtype: np.dtype


def _dtype(code: Any = None, *_: Any) -> _Dtype:
    if not isinstance(code, str) or not _DTYPE.fullmatch(code):
        raise InputError("the pickle has a dtype that is not read", where="numpy.dtype", found=str(code)[:40])
    return _Dtype(np.dtype("O" if code.lstrip("|<>=").startswith("O") else code))


def _array_of(state: Any) -> np.ndarray:
    _, shape, dtype, fortran, data = state
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape) or len(shape) > 32:
        raise InputError("the pickle has an array without a shape", where="numpy.ndarray", found=str(shape)[:80])
    if not isinstance(dtype, _Dtype):
        raise InputError("the pickle has an array without a dtype", where="numpy.ndarray")
    order = "F" if fortran is True else "C"
    if dtype.dtype == object:
        if not isinstance(data, list):
            raise InputError("the pickle has an array of objects without objects", where="numpy.ndarray")
        flat = np.empty(len(data), dtype=object)
        flat[:] = (
            data
            if all(not isinstance(d, (list, tuple, np.ndarray)) for d in data)
            else [Record(Name("", ""), (d,)) for d in data]
        )
        return flat.reshape(shape, order=order)
    if not isinstance(data, (bytes, bytearray)):
        raise InputError("the pickle has an array without bytes", where="numpy.ndarray")
    return np.frombuffer(bytes(data), dtype=dtype.dtype).reshape(shape, order=order)


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, _Dtype) or dtype.dtype == object:
        raise InputError("the pickle has a number without a dtype", where="numpy.scalar")
    value = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(value, dtype=dtype.dtype, count=1)[0].item()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "utf-8", "ascii"):
        raise InputError("the pickle encodes something that is no text", where="_codecs.encode")
    return text.encode(encoding)


def _ordered(items: Any = ()) -> dict:
    return {k: v for k, v in items} if items else {}


_KNOWN: dict[str, Call] = {
    "collections.OrderedDict": _ordered,
    "_codecs.encode": _encode,
    **{f"{module}.set": lambda items=(): list(items) for module in ("builtins", "__builtin__")},
    "numpy.dtype": _dtype,
    "numpy.ndarray": lambda *_: _Raw(),
    **{f"numpy.{core}.multiarray._reconstruct": lambda *_: _Raw() for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
