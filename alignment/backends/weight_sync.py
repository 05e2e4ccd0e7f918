"""Proof that a rollout engine computes with the trainer's weights: bit by bit, derived tensors included, on both paths.

What it is built against: with ``load_format=dummy`` a rollout was garbled although every parameter had arrived.
``W_UV`` and ``W_UK_T`` are derived from ``kv_b_proj`` after loading; on a GPU they are views and follow an in-place
update, as copies they stay what they were at start-up (fixed by running ``process_weights_after_loading`` after every
update, verl pull request 4130). Prefill does not use them, so parameters are equal and the first token is right, and
every later one is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignment.backends.rollout import DerivedTensor, RolloutEngine
from alignment.backends.sync_probe import MAXIMUM, ProbeCase, summed_up, token_gaps
from alignment.devices.aliasing import shares_storage
from alignment.errors import InputError
from alignment.models.precision import at_least_float32
from alignment.numerics.budget import Budget
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict

STAGE = "weight_sync"


def stream_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """The trainer's side: (name, tensor) one at a time in the checkpoint's names, cast to the rollout's ``dtype``.

    Buffers (the router's correction bias) keep float32 at least, as the model does. A tensor under two names (a tied
    head) is sent once, under the first, as checkpoints store it.
    """
    buffers = {name for name, _ in model.named_buffers()}
    sent: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in sent:
            continue
        sent.add(id(tensor))
        target = dtype if dtype is not None else tensor.dtype
        if name in buffers:
            target = at_least_float32(target)
        yield name, tensor.detach().to(target)


# --- the proof -----------------------------------------------------------------------------------------------------


def check_weight_sync(
    engine: RolloutEngine,
    source: Mapping[str, Tensor],
    *,
    case: ProbeCase,
    log_probs: Tensor,
    budget: Budget,
    subject: str = "golden",
    device: str = "cpu",
) -> list[Verdict]:
    """Prove, after an update, that ``engine`` computes with the weights in ``source``.

    Five verdicts: ``weight_sync.parameters`` (every tensor bitwise), ``weight_sync.derived_tensors`` (each declared one
    bitwise against its recomputation), ``weight_sync.undeclared_tensors`` (no tensor that updates cannot reach is held
    without being declared), ``weight_sync.prefill`` and ``weight_sync.decode`` (log-probs against the trainer's).

    Args:
        engine: awake and synced.
        source: the tensors as they were sent (see :func:`stream_weights`).
        case: the probe sequences.
        log_probs: the trainer's log-probs of them ``[b, r]`` (:func:`trainer_log_probs`).
        budget: allowed gap (:func:`probe_budget`); its noise must come from other seeds than the case's.

    Raises:
        InputError: the engine cannot be used, or the budget was measured on this very case.
    """

    def verdict(check: str, outcome: Outcome, reason: str, measures=(), where: Divergence | None = None) -> Verdict:
        return Verdict(
            check=f"weight_sync.{check}",
            layer="e2e",
            stage=STAGE,
            subject=subject,
            device=device,
            outcome=outcome,
            reason=reason,
            measures=tuple(measures),
            where=where,
            next_command=None if outcome is Outcome.PASS else "pytest tests/e2e/test_weight_sync.py",
        )

    compared = {
        "parameters": _compare_parameters(engine, source),
        "derived_tensors": _compare_derived(engine),
        "undeclared_tensors": _compare_undeclared(engine),
    }
    verdicts = [
        verdict(check, Outcome.FAIL if c.wrong else Outcome.PASS, c.reason, [c.measure], c.where)
        for check, c in compared.items()
    ]
    try:
        found = engine.probe(case.input_ids, case.attention_mask, case.response_length)
    except InputError as error:  # what was found above must still be told, so no forward is an outcome, not an end
        return verdicts + [verdict(path, Outcome.ERROR, f"the probe failed: {error}") for path in ("prefill", "decode")]
    culprit = compared["derived_tensors"].where or compared["parameters"].where
    for path, values in (("prefill", found.prefill), ("decode", found.decode)):
        verdicts.append(verdict(path, *_compare_path(path, values, log_probs, case, budget, culprit)))
    return verdicts


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Tensors that are ``wrong`` among ``total``, and what to say of them and of none."""

    total: int
    wrong: tuple[str, ...]
    where: Divergence | None
    bad: str
    good: str
    origin: str = "exact: a copy changes no bit"

    @property
    def reason(self) -> str:
        if not self.wrong:
            return f"{self.good} ({self.total} tensors)"
        return f"{len(self.wrong)} of {self.total} tensors {self.bad}: {_list(self.wrong)}"

    @property
    def measure(self) -> Measure:
        wrong = float(len(self.wrong))
        return Measure(name="tensors that are wrong", value=wrong, bound=0.0, unit="tensors", origin=self.origin)


def _compare_parameters(engine: RolloutEngine, source: Mapping[str, Tensor]) -> _Comparison:
    held = dict(engine.named_parameters())
    wrong: dict[str, str] = {}
    for name in [*source, *(n for n in held if n not in source)]:
        detail = _difference(held.get(name), source.get(name))
        if detail:
            wrong[name] = detail
    return _Comparison(
        total=len({**source, **held}),
        wrong=tuple(wrong),
        where=_first(wrong),
        bad="differ from what was sent",
        good="every tensor the engine holds equals the one that was sent",
    )


def _compare_derived(engine: RolloutEngine) -> _Comparison:
    held = dict(engine.named_parameters())
    declared = engine.derived_tensors()
    wrong = {}
    for name, one in declared.items():
        detail = _difference(one.tensor, one.recompute())
        if detail:
            wrong[name] = (
                f"stale: {detail}, from its recomputation out of {', '.join(one.sources)}; {_kinship(one, held)}"
            )
    return _Comparison(
        total=len(declared),
        wrong=tuple(wrong),
        where=_first(wrong),
        bad="are not what their sources give",
        good="every derived tensor equals its recomputation from the parameters",
    )


def _compare_undeclared(engine: RolloutEngine) -> _Comparison:
    wrong = undeclared_tensors(engine)
    return _Comparison(
        total=sum(1 for _ in reachable_tensors(engine.named_modules())),
        wrong=tuple(wrong),
        where=_first(dict.fromkeys(wrong, "no weight update reaches it and the engine does not declare it")),
        bad="are neither reached by updates nor declared",
        good="every tensor held is reached by updates, derived or constant",
        origin="exact: a tensor no update reaches must be declared derived or constant",
    )


def _first(wrong: Mapping[str, str]) -> Divergence | None:
    for name, detail in wrong.items():
        return Divergence(stage=STAGE, module=module_of(name), quantity=quantity_of(name), detail=detail)
    return None


def _kinship(one: DerivedTensor, held: Mapping[str, Tensor]) -> str:
    shared = [n for n in one.sources if n in held and shares_storage(one.tensor, held[n])]
    return f"it shares the storage of {shared[0]}" if shared else "it is a copy that no weight update reaches"


def _difference(found: Tensor | None, expected: Tensor | None) -> str | None:
    """How two tensors differ in their bits, or None where they do not."""
    if found is None or expected is None:
        return "the engine does not hold it" if found is None else "it was not sent"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
    a, b = (t.detach().cpu().contiguous() for t in (found, expected))
    if torch.equal(bytes_of(a), bytes_of(b)):
        return None
    apart = (a.double() - b.double()).abs()
    differing = int((a != b).sum())
    return f"{differing} of {a.numel()} elements differ, by up to {float(apart.max()):.3g}"


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _compare_path(path, values: Tensor, log_probs: Tensor, case: ProbeCase, budget: Budget, culprit: Divergence | None):
    if values.shape != log_probs.shape:
        raise InputError(
            "the engine and the trainer give log-probs of different shapes",
            where=f"weight_sync.{path}",
            expected=list(log_probs.shape),
            found=list(values.shape),
        )
    gaps = token_gaps(values, log_probs, case)
    judged = budget.judge(summed_up(gaps, case, budget.metric), run_seed=case.seed)
    shown = [judged, Measure(name="|Δ log p| of the first response token", value=float(gaps[:, 0].max()), unit="nats")]
    if budget.metric != MAXIMUM:
        shown.append(Measure(name=MAXIMUM, value=summed_up(gaps, case, MAXIMUM), unit="nats"))
    if judged.within:
        return Outcome.PASS, f"{path} gives the trainer's log-probs", shown
    # NaN compares false with everything: "not within" catches it
    sample, token = (~(gaps <= budget.value)).T.nonzero()[0].flip(0).tolist()
    where = Divergence(
        stage=STAGE,
        module=culprit.module if culprit else "model",
        quantity=culprit.quantity if culprit else f"{path} log_prob",
        detail=f"{path} parts from the trainer at response token {token} of sample {sample}",
    )
    return Outcome.FAIL, f"{path} does not give the trainer's log-probs from response token {token} on", shown, where


def undeclared_tensors(engine: RolloutEngine) -> list[str]:
    """Tensors the engine's modules hold that no update reaches and that it declares neither derived nor constant.

    Walks the attributes of every module (and lists, dicts and plain objects in them). A tensor on the storage of a
    parameter is reached by updates. Tensors hidden in closures or captured graphs are out of its sight.
    """
    held = [tensor for _, tensor in engine.named_parameters()]
    known = {t.untyped_storage().data_ptr() for t in held}
    known |= {d.tensor.untyped_storage().data_ptr() for d in engine.derived_tensors().values()}
    constants = tuple(engine.constant_tensors())
    found = []
    for name, tensor in reachable_tensors(engine.named_modules()):
        constant = any(name == c or name.startswith((f"{c}.", f"{c}[")) for c in constants)
        if not constant and tensor.numel() and tensor.untyped_storage().data_ptr() not in known:
            found.append(name)
    return found


_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"_parameters", "_buffers"}


def reachable_tensors(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of every tensor in the attributes of ``modules``, each tensor once."""
    seen: set[int] = set()
    for name, module in modules:
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                for inner, tensor in value.items():
                    yield from _tensors_in(_join(name, inner), tensor, seen)
            elif key not in _MODULE_INTERNALS:
                yield from _tensors_in(_join(name, key), value, seen)


def _tensors_in(path: str, value: object, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if id(value) in seen or isinstance(value, (nn.Module, type, str, bytes, int, float, type(None), torch.dtype)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(f"{path}[{key!r}]", inner, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, inner in enumerate(value):
            yield from _tensors_in(f"{path}[{index}]", inner, seen)
    elif hasattr(value, "__dict__") and not callable(getattr(value, "__code__", None)):
        for key, inner in vars(value).items():
            yield from _tensors_in(f"{path}.{key}", inner, seen)


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def module_of(name: str) -> str:
    return name.rpartition(".")[0] or "model"


def quantity_of(name: str) -> str:
    return name.rpartition(".")[2]


def _list(names: Iterable[str], shown: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
