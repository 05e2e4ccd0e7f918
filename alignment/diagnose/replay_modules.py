"""Run the target's modules on golden's inputs, so that nothing that went wrong before blurs what goes wrong here.

The target's own forward pass is run once. Before a module runs, its tensors are compared with golden's and then
replaced by them; after it has run, so are its results. Every module, and the code between modules, thus computes from
golden values alone: what differs was made in this one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from alignment.capture.record import CaptureReader, TensorRow
from alignment.diagnose.difference import coarser, from_tensors, rounding
from alignment.diagnose.names import NameMap
from alignment.diagnose.noise import DEFAULT_AMPLIFICATION
from alignment.diagnose.pairing import DISCRETE
from alignment.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One tensor that the target computed from golden's values.

    Attributes:
        module: whose code computed it: the module for a result, its parent for an input.
        at: the module it was seen at.
        quantity: ``in <path>`` or ``out <path>``.
        relative: ‖t − g‖ / ‖g‖.
        limit: amplification of such a place times rounding on both sides; 0 for indices.
        problem: NaN, another shape; or "".
    """

    module: str
    at: str
    call: int
    quantity: str
    relative: float
    limit: float
    problem: str = ""

    @property
    def diverges(self) -> bool:
        """Whether the place computes something else than golden does."""
        return bool(self.problem) or self.relative > self.limit


def replay_modules(
    model: nn.Module,
    golden: CaptureReader,
    *,
    step: int,
    stage: str,
    rank: int = 0,
    forward: Callable[[], Any] | None = None,
    names: NameMap | None = None,
) -> list[Replayed]:
    """What the target's modules compute from golden's inputs, in the order they run.

    Args:
        model: the target.
        golden: a capture with ``capture.detail=tensor``.
        step, stage, rank: which part of it.
        forward: runs the target once; by default ``model`` is called with what golden's model was called with.
        names: where the target's modules are called otherwise.

    Raises:
        InputError: golden holds no tensors, or none of its modules is one of the target's.
    """
    import torch

    rows: dict[tuple[str, int, str, str], TensorRow] = {}
    names = names or NameMap()
    for row in golden.rows(step, stage, rank):
        if row.kind == "module" and row.direction == "forward" and row.has_tensor:
            rows[names.golden(row.module), row.call, row.role, row.path] = row
    if not rows:
        raise InputError(
            "golden holds no tensors to replay",
            where=golden.root,
            expected="module inputs of the forward pass",
            next_step="capture golden with capture.detail=tensor",
        )
    known = {key[0] for key in rows}
    hooks = _Hooks(rows)
    modules = {name: module for name, module in model.named_modules() if names.target(name) in known}
    if not modules:
        raise InputError(
            "none of golden's modules is one of the model's",
            where=golden.root,
            expected=", ".join(sorted(known)[:3]),
            found=", ".join(name for name, _ in list(model.named_modules())[1:4]),
        )
    handles = []
    try:
        for name, module in modules.items():
            common = names.target(name)
            parent = _parent(common, known)
            handles.append(module.register_forward_pre_hook(hooks.before(common, parent), with_kwargs=True))
            handles.append(module.register_forward_hook(hooks.after(common), with_kwargs=True))
        with torch.no_grad():
            if forward is None:
                args, kwargs = _call_of(rows)
                model(*args, **kwargs)
            else:
                forward()
    finally:
        for handle in handles:
            handle.remove()
    return hooks.found


def first_divergence(replayed: Sequence[Replayed]) -> Replayed | None:
    """The first place that computes something else than golden does."""
    return next((r for r in replayed if r.diverges), None)


class _Hooks:
    def __init__(self, rows: dict[tuple[str, int, str, str], TensorRow]) -> None:
        self.rows = rows
        self.calls: dict[str, int] = {}
        self.found: list[Replayed] = []

    def before(self, name: str, parent: str):
        def hook(module, args, kwargs):
            call = self.calls.get(name, -1) + 1
            self.calls[name] = call
            args = tuple(self._through(a, f"args.{i}", name, call, "input", parent) for i, a in enumerate(args))
            kwargs = {k: self._through(v, f"kwargs.{k}", name, call, "input", parent) for k, v in kwargs.items()}
            return args, kwargs

        return hook

    def after(self, name: str):
        def hook(module, args, kwargs, output):
            return self._through(output, "output", name, self.calls.get(name, 0), "output", name)

        return hook

    def _through(self, value: Any, path: str, name: str, call: int, role: str, owner: str) -> Any:
        """``value`` with golden's tensors in place of its own, after comparing them."""
        import torch

        if isinstance(value, torch.Tensor):
            row = self.rows.get((name, call, role, path))
            return value if row is None else self._replace(value, row, owner, name, call)
        if isinstance(value, dict):
            for key in list(value):
                value[key] = self._through(value[key], f"{path}.{key}", name, call, role, owner)
            return value
        if isinstance(value, (tuple, list)):
            parts = [self._through(v, f"{path}.{i}", name, call, role, owner) for i, v in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    def _replace(self, value: Tensor, row: TensorRow, owner: str, name: str, call: int) -> Tensor:
        import torch

        kept = row.tensor()
        mine = value.detach()
        mine = (mine.float() if mine.is_floating_point() and mine.dtype is not torch.float64 else mine).cpu().numpy()
        dtype = coarser(row.dtype, str(value.dtype).removeprefix("torch."))
        kind = "own" if row.role == "output" else "glue"
        limit = 0.0 if row.dtype in DISCRETE else DEFAULT_AMPLIFICATION[kind] * rounding(dtype)
        quantity = f"{'in' if row.role == 'input' else 'out'} {row.path}"
        problem, relative = "", math.inf
        if mine.size != kept.size:
            problem = f"shape {list(mine.shape)}, golden has {list(kept.shape)}"
        elif np.isnan(mine).sum() != np.isnan(kept).sum():
            problem = f"{int(np.isnan(mine).sum())} NaN, golden has {int(np.isnan(kept).sum())}"
        else:
            found = from_tensors(kept.reshape(-1), mine.reshape(-1))
            relative, problem = found.relative, found.problem
        self.found.append(
            Replayed(
                module=owner, at=name, call=call, quantity=quantity, relative=relative, limit=limit, problem=problem
            )
        )  # fmt: skip
        return torch.from_numpy(np.array(kept)).to(value).reshape(kept.shape)


def _parent(name: str, known: set[str]) -> str:
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return ""


def _call_of(rows: dict[tuple[str, int, str, str], TensorRow]) -> tuple[list[Any], dict[str, Any]]:
    """What golden's model was called with the first time: its top-level tensors."""
    import torch

    args: dict[int, Any] = {}
    kwargs: dict[str, Any] = {}
    for path, row in _inputs_of_root(rows):
        where, _, name = path.partition(".")
        value = torch.from_numpy(np.array(row.tensor()))
        if where == "args":
            args[int(name)] = value
        else:
            kwargs[name] = value
    if not args and not kwargs:
        raise InputError(
            "golden does not say what its model was called with",
            where="replay",
            expected="rows of the root module",
            next_step="pass forward=, which runs the target once",
        )
    return [args[i] for i in sorted(args)], kwargs


def _inputs_of_root(rows) -> Iterator[tuple[str, TensorRow]]:
    for (module, call, role, path), row in rows.items():
        if module == "" and call == 0 and role == "input" and path.count(".") == 1:
            yield path, row
