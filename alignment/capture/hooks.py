"""Hooks on modules: what goes in, what comes out, and the gradients of both, without touching what is computed.

Gradients are read from the graph and not through wrappers around inputs. A wrapper would add up the gradients of a
tensor with several uses in another order, and the training would no longer be the same to the last bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from alignment.capture.absorbed import LAYER, absorbed_parts, absorbs, joined
from alignment.capture.kernel import SUMMANDS
from alignment.capture.leaves import call_leaves, output_leaves
from alignment.capture.record import Shard, holds_samples
from alignment.capture.reduction import Reduced, added_up
from alignment.capture.samples import Samples, samples_of_call
from alignment.capture.settings import SettingsReader
from alignment.capture.shards import (
    activation_shard,
    global_names,
    local_tensor,
    never_cut,
    parameter_shard,
)
from alignment.capture.stage import StageRecord


@dataclass(frozen=True)
class HookedModule:
    """What is known of a module before it runs."""

    name: str
    class_name: str
    parent: str
    module: nn.Module = field(repr=False, compare=False)
    holds_samples: bool = True
    uncut: bool = False
    """Whether its tensors are whole unless they say otherwise themselves."""
    absorbed: str = ""
    """The layer whose work it may do without calling it, by the name its calls have."""


@dataclass
class _Frame:
    """One call of a module that has begun."""

    hooked: HookedModule
    call: int
    records: bool
    inputs: list[tuple[str, Tensor, tuple[Reduced, Shard | None] | None]]
    targets: list[tuple[str, Tensor, Any, int]]
    sequence: int


class ModuleHooks:
    """The hooks of one stage on one model.

    Args:
        model: whose modules are hooked.
        prefix: goes in front of every name, with a dot.
        record: takes the rows.
        backward, parameters, parameter_gradients: what else to record.
        takes: which names are captured.
        tokens: first and last call of the model that is captured, in generation; None for every call.
        samples: whether to hash the samples of every call.
        modules: whether modules are recorded, and not only who is running.
        settings: reads the plain settings of modules; None where they are not recorded.
        mask: which tokens are real, where the model is not told.
        owners: whether :meth:`owner_of` will be asked.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        record: StageRecord,
        prefix: str = "",
        backward: bool = True,
        parameters: bool = True,
        parameter_gradients: bool = True,
        takes: Callable[[str], bool] = lambda name: True,
        tokens: tuple[int, int] | None = None,
        samples: bool = True,
        modules: bool = True,
        settings: SettingsReader | None = None,
        mask: Tensor | None = None,
        owners: bool = False,
    ) -> None:
        self.model, self.record, self.prefix = model, record, prefix
        self.backward, self.parameters, self.parameter_gradients = backward, parameters, parameter_gradients
        self.takes, self.tokens, self.samples, self.modules = takes, tokens, samples, modules
        self.settings, self.mask = settings if modules else None, mask
        self._handles: list[Any] = []
        self._graph_handles: list[Any] = []
        self._stack: list[_Frame] = []
        self._open_sums: dict[tuple, _Contribution] = {}
        self._recomputed: dict[str, int] = {}
        self._model_calls = 0
        self._taken, self._asked = True, owners
        self._pace: HookedModule | None = None
        self._seen_parameters: set[int] = set()
        self.spans: list[int] = []
        """Where in the order of the graph's nodes another module begins to run; :attr:`owners` has its name."""
        self.owners: list[str] = []
        self.found = False
        """Whether a module is captured."""

    def attach(self) -> None:
        """Registers the hooks."""
        containers = (nn.ModuleList, nn.ModuleDict)
        modules = dict(self.model.named_modules())
        names = global_names(self.model)
        whole_names = {id(m): ".".join(filter(None, (self.prefix, names[name]))) for name, m in modules.items()}
        # What replaces a weight where it is read (an adapter, a norm of weights) is no part of the model to compare, as
        # the weight is. Its gradients alone are recorded, for another capture of the same.
        replacing = {id(m) for module in modules.values() for m in _parametrizations(module)}
        first = self.record.next_call(f"{self.prefix}\0settings") == 0
        settings = self.settings if first else None
        for name, module in modules.items():
            replaces = id(module) in replacing
            if isinstance(module, containers) and not replaces:
                continue
            whole = whole_names[id(module)]
            root = module is self.model
            if not root and not self.takes(whole):
                continue
            parent = self._parent(name, modules, names)
            # A layer that several modules hold runs under the first of its names.
            absorbed = whole_names[id(module._modules[LAYER])] if absorbs(module) else ""
            hooked = HookedModule(
                whole, _class_name(module), parent, module, holds_samples(whole), never_cut(module), absorbed
            )
            taken = self.takes(whole)
            self.found = self.found or taken
            if not replaces:
                self._hook_calls(hooked, taken, root, settings)
            if self.parameter_gradients and self.backward and taken:
                for local, parameter in module._parameters.items():
                    if parameter is not None and parameter.requires_grad and id(parameter) not in self._seen_parameters:
                        self._seen_parameters.add(id(parameter))
                        self._hook_parameter(hooked, local, parameter)
        self._seen_parameters.clear()

    def _hook_calls(self, hooked: HookedModule, taken: bool, root: bool, settings: SettingsReader | None) -> None:
        module = hooked.module
        self._handles.append(
            module.register_forward_pre_hook(self._before(hooked, taken, root), with_kwargs=True, prepend=False)
        )
        self._handles.append(module.register_forward_hook(self._after(hooked, taken, root), with_kwargs=True))
        if settings is not None and taken:
            with self.record.own_work():
                self.record.settings(hooked.name, hooked.class_name, settings.of(module))
        if self.parameters and taken and parametrize.is_parametrized(module):
            for local, read in module.parametrizations.items():
                self._handles.append(read.register_forward_hook(self._replaced(hooked, local)))

    def detach(self) -> None:
        """Removes the hooks, those in the graph included, and completes what is open."""
        for handle in self._handles:
            handle.remove()
        for handle in self._graph_handles:
            handle.remove()
        self._handles.clear()
        self._graph_handles.clear()
        for contribution in list(self._open_sums.values()):
            contribution.complete()
        self._open_sums.clear()
        self._stack.clear()

    def owner_of(self, sequence: int) -> str:
        """The module that was running when node number ``sequence`` of the graph was made."""
        place = bisect_right(self.spans, sequence) - 1
        return self.owners[place] if place >= 0 else ""

    def _span(self) -> None:
        if self._asked and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.spans.append(torch.autograd._get_sequence_nr())
            self.owners.append(self._stack[-1].hooked.name if self._stack else "")

    @property
    def innermost(self) -> HookedModule | None:
        """The module that is running."""
        return self._stack[-1].hooked if self._stack else None

    def _begins_pass(self, hooked: HookedModule, root: bool) -> bool:
        """Whether a pass through the model begins: with its own call or, where it is entered by another method than
        ``forward`` (an engine's prefill and decode), with the first module that runs in every pass.
        """
        if root:
            self._pace = hooked
            return True
        if self._stack:
            return False
        if self._pace is None:
            self._pace = hooked
        return hooked is self._pace

    # --- forward -----------------------------------------------------------------------------------------------------

    def _before(self, hooked: HookedModule, taken: bool, root: bool) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            record = self.record
            if not record.active:
                return
            with record.own_work():
                recomputing = torch._C._current_graph_task_id() != -1
                if not recomputing and self._begins_pass(hooked, root):
                    self._stack.clear()
                    call = self._model_calls
                    self._model_calls += 1
                    self._taken = self.tokens is None or self.tokens[0] <= call <= self.tokens[1]
                    if self.samples and self._taken:
                        found = samples_of_call(args, kwargs, mask=self.mask)
                        # A decoding step has one token per sample; its samples are those of the prompt's pass.
                        if found is None or (self.tokens is not None and found.shape[1] == 1):
                            previous = record.samples
                            same = previous is not None and found is not None and len(previous.keys) == found.shape[0]
                            found = _decoding(previous, found) if same else None
                        elif found is not None:
                            found = found.counted(record.met)
                        record.set_samples(found)
                if not self._taken:
                    return
                if recomputing:
                    # Activation checkpointing runs the forward pass again: its rows are there already.
                    back = self._recomputed.get(hooked.name, 0)
                    self._recomputed[hooked.name] = back + 1
                    call = max(0, record.calls_of(hooked.name) - 1 - back)
                else:
                    self._recomputed.clear()
                    call = record.next_call(hooked.name)
                records = taken and self.modules and not recomputing
                graph = self.backward and taken and self.modules and torch.is_grad_enabled()
                found_inputs = call_leaves(args, kwargs) if records or graph else []
                inputs = [(path, t, self._reduce(hooked, path, t) if records else None) for path, t in found_inputs]
                targets = []
                if graph:
                    for path, t in found_inputs:
                        if t.requires_grad:
                            node, number = _edge(t)
                            targets.append((path, t, node, number))
                sequence = torch.autograd._get_sequence_nr() if targets else 0
                self._stack.append(_Frame(hooked, call, records, inputs, targets, sequence))
                self._span()

        return hook

    def _after(self, hooked: HookedModule, taken: bool, root: bool) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            record = self.record
            if not record.active or not self._taken:
                return
            while self._stack and self._stack[-1].hooked is not hooked:
                self._stack.pop()
            if not self._stack:
                return
            frame = self._stack.pop()
            self._span()
            if not taken:
                return
            with record.own_work():
                results = output_leaves(output) if self.modules else []
                if frame.records:
                    for path, t, taken_as in frame.inputs:
                        self._row(frame, "forward", "input", path, t, *taken_as)
                    for path, t in results:
                        self._row(frame, "forward", "output", path, t, *self._reduce(hooked, path, t))
                if self.parameters and torch._C._current_graph_task_id() == -1:
                    self._record_parameters(hooked)
                    if hooked.absorbed:
                        self._record_absorbed(hooked)
                if self.backward and self.modules and torch.is_grad_enabled():
                    self._hook_graph(frame, results)

        return hook

    def _reduce(self, hooked: HookedModule, path: str, t: Tensor) -> tuple[Reduced, Shard | None]:
        if hooked.uncut and type(t) in _WHOLE:
            return self.record.reduce(t, by_sample=hooked.holds_samples), None
        samples = self.record.samples
        shard = activation_shard(hooked.module, path, t, None if samples is None else samples.shape)
        return self.record.reduce(local_tensor(t), shard=shard, by_sample=hooked.holds_samples), shard

    def _row(
        self, frame: _Frame, direction: str, role: str, path: str, t: Tensor, reduced: Reduced, shard: Shard | None
    ) -> None:
        hooked = frame.hooked
        self.record.row(
            hooked.name, hooked.class_name, "module", direction, frame.call, role, path, hooked.parent, t, reduced,
            shard,
        )  # fmt: skip

    def _record_parameters(self, hooked: HookedModule) -> None:
        for local, parameter in hooked.module._parameters.items():
            if parameter is None:
                continue
            name = f"{hooked.name}.{local}" if hooked.name else local
            if not self.record.first_time(name, parameter):
                continue
            self._parameter_row(hooked, name, local, parameter)

    def _replaced(self, hooked: HookedModule, local: str) -> Callable:
        """For the weight that a module reads in the place of its parameter ``local``. It is taken as it is read: to ask
        for it would compute it again, which gathers shards, and in spectral norm changes the next one.
        """
        name = f"{hooked.name}.{local}" if hooked.name else local

        def hook(module: nn.Module, args: tuple, weight: Any) -> None:
            if not self.record.active or not self._taken or torch._C._current_graph_task_id() != -1:
                return
            with self.record.own_work():
                if isinstance(weight, Tensor) and self.record.first_time(name, weight):
                    self._parameter_row(hooked, name, local, weight.detach())

        return hook

    def _parameter_row(self, hooked: HookedModule, name: str, local: str, parameter: Tensor) -> None:
        self._weight_row(name, local, hooked.name, parameter, parameter_shard(parameter, hooked.module))

    def _weight_row(self, name: str, local: str, holder: str, weight: Tensor, shard: Shard | None) -> None:
        t = local_tensor(weight)
        self.record.row(
            name, "", "parameter", "forward", 0, "input", local, holder, t,
            self.record.reduce(t, shard=shard, by_sample=False), shard,
        )  # fmt: skip

    def _record_absorbed(self, hooked: HookedModule) -> None:
        """The weight of a layer whose work its parent has done without calling it."""
        name = hooked.absorbed
        if self.record.calls_of(name) or not self.takes(name):
            return
        parts = absorbed_parts(hooked.module)
        if not self.record.first_time(f"{name}.weight", *parts, exchanged=len(parts) > 1):
            return
        layer = hooked.module._modules[LAYER]
        self._weight_row(f"{name}.weight", "weight", name, joined(parts), parameter_shard(layer.weight, layer))

    # --- backward ----------------------------------------------------------------------------------------------------

    def _hook_parameter(self, hooked: HookedModule, local: str, parameter: nn.Parameter) -> None:
        name = f"{hooked.name}.{local}" if hooked.name else local

        def accumulated(p: Tensor) -> None:
            gradient = p.grad
            if gradient is None or not self.record.active:
                return
            with self.record.own_work():
                t, shard = local_tensor(gradient), parameter_shard(parameter, hooked.module)
                call = self.record.next_call(f"{name}\0gradient")
                self.record.row(
                    name, "", "parameter_gradient", "backward", call, "output", local, hooked.name, t,
                    self.record.reduce(t, shard=shard, by_sample=False), shard,
                )  # fmt: skip

        self._handles.append(parameter.register_post_accumulate_grad_hook(accumulated))

    def _hook_graph(self, frame: _Frame, results: Sequence[tuple[str, Tensor]]) -> None:
        outputs = [(path, t) for path, t in results if t.requires_grad]
        if not outputs:
            return
        samples = self.record.samples
        for path, t in outputs:
            self._graph_handles.append(t.register_hook(self._incoming(frame, path, samples)))
        if not frame.targets:
            return
        wanted = {(node, number): i for i, (_, _, node, number) in enumerate(frame.targets)}
        edges: dict[int, list[tuple[Any, int]]] = {i: [] for i in range(len(frame.targets))}
        starts: list[Any] = []
        handed_on: dict[int, Tensor] = {}
        for _, t in outputs:
            node, number = _edge(t)
            passed = wanted.get((node, number))
            if passed is not None:
                handed_on[passed] = t
                continue
            starts.append(node)
        _find_edges(starts, wanted, frame.sequence, edges)
        for passed, t in handed_on.items():
            # The module hands its input on: what flows into the output flows out of the input. The tensor's own
            # gradient has the module's other uses of it in it.
            edges[passed] = [(t, -1)]
        by_node: dict[Any, list[tuple[int, _Contribution]]] = {}
        for i, (path, *_) in enumerate(frame.targets):
            if edges[i]:
                contribution = _Contribution(self, frame, path, len(edges[i]), samples)
                for source, position in edges[i]:
                    if position < 0:
                        self._graph_handles.append(source.register_hook(contribution.add))
                    else:
                        by_node.setdefault(source, []).append((position, contribution))
        for node, wanted_here in by_node.items():
            self._graph_handles.append(node.register_hook(_collect(wanted_here)))
        frame.targets = []
        frame.inputs = []

    def _incoming(self, frame: _Frame, path: str, samples: Any) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self.record.active:
                self.gradient(frame, "input", path, (gradient,), samples)

        return hook

    def gradient(self, frame: _Frame, role: str, path: str, summands: Sequence[Tensor], samples: Any) -> None:
        """Records a gradient of a module's output (role ``input``) or input (role ``output``), the sum of what several
        uses of the tensor give."""
        record, hooked, first = self.record, frame.hooked, summands[0]
        with record.own_work():
            before = record.set_samples(samples)
            if len(summands) == 1:
                reduced, shard = self._reduce(hooked, path, first)
            elif hooked.uncut and all(type(t) in _WHOLE for t in summands):
                reduced, shard = record.reduce_sum(summands, by_sample=hooked.holds_samples), None
            else:
                reduced, shard = self._reduce(hooked, path, added_up(summands))
            self._row(frame, "backward", role, path, first, reduced, shard)
            record.set_samples(before)

    def opened(self, key: tuple, contribution: _Contribution) -> None:
        self._open_sums[key] = contribution

    def closed(self, key: tuple) -> None:
        self._open_sums.pop(key, None)

    def _parent(self, name: str, modules: dict[str, nn.Module], names: dict[str, str]) -> str:
        parts = name.split(".")[:-1] if name else []
        while parts and isinstance(modules.get(".".join(parts)), (nn.ModuleList, nn.ModuleDict)):
            parts.pop()
        if not name:
            return ""
        return ".".join(filter(None, (self.prefix, names[".".join(parts)])))


class _Contribution:
    """The gradient of one module's input, added up over the places the module uses it."""

    def __init__(self, hooks: ModuleHooks, frame: _Frame, path: str, edges: int, samples: Any) -> None:
        self._hooks, self._frame, self._path, self._edges, self._samples = hooks, frame, path, edges, samples
        self._key = (frame.hooked.name, frame.call, path)
        self._left, self._summands = edges, []

    def add(self, gradient: Tensor | None) -> None:
        """One use's share; the last one completes the sum."""
        if not self._hooks.record.active:
            self._summands = []
            return
        if gradient is not None:
            self._summands.append(gradient)
            if len(self._summands) > 1 and self._left > 1:
                # The uses may be many (one for every expert), and each share is as large as the tensor.
                with self._hooks.record.own_work():
                    if len(self._summands) == SUMMANDS or not self._gains():
                        self._summands = [added_up(self._summands)]
        self._left -= 1
        if self._left <= 0:
            self.complete()
        else:
            self._hooks.opened(self._key, self)

    def _gains(self) -> bool:
        """Whether the sum need not be made while its summands are there."""
        whole = self._frame.hooked.uncut and all(type(t) in _WHOLE for t in self._summands)
        return whole and self._hooks.record.reducer.reads_summands(self._summands)

    def complete(self) -> None:
        """Records what there is: a use that no gradient reaches counts as none."""
        summands, self._summands, self._left = self._summands, [], self._edges
        self._hooks.closed(self._key)
        if summands and self._hooks.record.active:
            self._hooks.gradient(self._frame, "output", self._path, summands, self._samples)


_WHOLE = (Tensor, nn.Parameter)
"""Types of tensors that are nobody's shard by themselves."""


def _parametrizations(module: nn.Module) -> list[nn.Module]:
    return list(module.parametrizations.modules()) if parametrize.is_parametrized(module) else []


def _class_name(module: nn.Module) -> str:
    name = type(module).__name__
    return name.replace("Parametrized", "", 1) if parametrize.is_parametrized(module) else name


def _collect(wanted: Sequence[tuple[int, _Contribution]]) -> Callable:
    def hook(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
        for position, contribution in wanted:
            contribution.add(grad_inputs[position])

    return hook


def _edge(t: Tensor) -> tuple[Any, int]:
    """The node of the graph that receives the gradient of ``t``, and its number there."""
    if t.grad_fn is not None:
        return t.grad_fn, t.output_nr
    with torch.enable_grad():
        return t.view_as(t).grad_fn.next_functions[0]


def _find_edges(starts: Sequence[Any], wanted: dict[tuple, int], sequence: int, edges: dict[int, list]) -> None:
    """Every edge into a wanted place from nodes that were made since ``sequence``."""
    todo, met = list(starts), set(starts)
    while todo:
        node = todo.pop()
        for position, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            i = wanted.get((following, number))
            if i is not None:
                edges[i].append((node, position))
            elif following not in met and following._sequence_nr() >= sequence:
                met.add(following)
                todo.append(following)


def _decoding(previous: Any, found: Any) -> Any:
    return Samples(keys=previous.keys, bounds=((0, 1),) * len(previous.keys), shape=found.shape)
