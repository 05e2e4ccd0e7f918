"""Proof that a rollout engine computes with the trainer's weights: bit by bit, derived tensors included, on both paths.

What it is built against: with ``load_format=dummy`` a rollout was garbled although every parameter had arrived.
``W_UV`` and ``W_UK_T`` are derived from ``kv_b_proj`` after loading; on a GPU they are views and follow an in-place
update, as copies they stay what they were at start-up (fixed by running ``process_weights_after_loading`` after every
update, verl pull request 4130). Prefill does not use them, so parameters are equal and the first token is right, and
every later one is wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignment.backends.rollout import DerivedTensor, RolloutEngine
from alignment.devices.aliasing import shares_storage
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig
from alignment.models.precision import at_least_float32
from alignment.numerics.budget import Budget, Noise
from alignment.numerics.random import portable_integers
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict

STAGE = "weight_sync"
_EXACT = "exact: a copy changes no bit"


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


# --- the probe -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProbeCase:
    """Sequences whose response tokens both paths must give the trainer's log-probs for.

    ``input_ids`` and ``attention_mask`` are ``[b, p + r]``, prompts left padded, responses (the last
    ``response_length`` columns) right padded. ``seed`` identifies the run for the budget.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_length: int
    seed: int

    @property
    def response_mask(self) -> Tensor:
        """Bool ``[b, r]``."""
        return self.attention_mask[:, -self.response_length :].bool()


def probe_case(
    config: ModelConfig, *, seed: int, batch: int = 4, prompt_length: int = 12, response_length: int = 8
) -> ProbeCase:
    """Random tokens with ragged prompts and responses, the same bits on every machine."""

    def draw(low: int, high: int, shape, stream: str) -> Tensor:
        return portable_integers(low, high, shape, seed=seed, stream=f"weight_sync/{stream}")

    ids = draw(0, config.vocab_size, (batch, prompt_length + response_length), "tokens")
    prompts = draw(1, prompt_length + 1, (batch, 1), "prompt_lengths")
    responses = draw(2, response_length + 1, (batch, 1), "response_lengths")
    responses[0] = response_length
    columns = torch.arange(prompt_length + response_length)
    mask = (columns >= prompt_length - prompts) & (columns < prompt_length + responses)
    return ProbeCase(input_ids=ids * mask, attention_mask=mask.long(), response_length=response_length, seed=seed)


@torch.no_grad()
def trainer_log_probs(model: CausalLM, case: ProbeCase) -> Tensor:
    """The trainer's log-probs of the response tokens ``[b, r]``: float32 at least, temperature 1, 0 at padding."""
    ids, mask = case.input_ids.to(model.device), case.attention_mask.to(model.device)
    logits = model(ids, attention_mask=mask)[:, -case.response_length - 1 : -1]
    wide = torch.log_softmax(logits.to(at_least_float32(logits.dtype)), dim=-1)
    chosen = wide.gather(-1, ids[:, -case.response_length :, None]).squeeze(-1)
    return chosen.masked_fill(~case.response_mask.to(chosen.device), 0)


def probe_budget(reference: RolloutEngine, trainer: CausalLM, *, seeds: Iterable[int], device: str) -> Budget:
    """How far a correct engine is from the trainer: max |Δ log p| of ``reference`` over cases of other seeds, in nats.

    ``reference`` holds the trainer's weights and is known to be right (the golden engine, freshly loaded): what is
    measured is what re-association does, expanded against absorbed attention, batched against step by step, in the
    trainer's dtype.

    Args:
        seeds: at least five, none of them the seed of a judged case.
        device: label of the device it is measured on.
    """
    values, size, used = [], 0.0, tuple(seeds)
    for seed in used:
        case = probe_case(trainer.config, seed=seed)
        expected = trainer_log_probs(trainer, case)
        found = reference.probe(case.input_ids, case.attention_mask, case.response_length)
        values.append(max(_max_abs(found.prefill, expected), _max_abs(found.decode, expected)))
        size = max(size, float(expected.abs().max()))
    noise = Noise(values=tuple(values), seeds=used, perturbation="tokens of another seed", device=device)
    return Budget.from_noise(
        noise,
        metric="max |Δ log p|",
        dtype=trainer.dtype,
        reduction_length=trainer.config.hidden_size,
        unit="nats",
        scale=size,
    )


def _max_abs(x: Tensor, reference: Tensor) -> float:
    return float((x.double().cpu() - reference.double().cpu()).abs().max())


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
        budget: allowed max |Δ log p|; its noise must come from other seeds than the case's.

    Raises:
        InputError: the engine cannot be used, or the budget was measured on this very case.
    """

    def verdict(check: str, measures, reason: str, where: Divergence | None) -> Verdict:
        good = where is None
        return Verdict(
            check=f"weight_sync.{check}",
            layer="e2e",
            stage=STAGE,
            subject=subject,
            device=device,
            outcome=Outcome.PASS if good else Outcome.FAIL,
            reason=reason,
            measures=tuple(measures),
            where=where,
            next_command=None if good else "pytest tests/e2e/test_weight_sync.py",
        )

    parameters = _compare_parameters(engine, source)
    derived = _compare_derived(engine)
    undeclared = undeclared_tensors(engine)
    verdicts = [
        verdict(
            "parameters",
            [
                Measure(
                    name="tensors that differ", value=len(parameters.wrong), bound=0.0, unit="tensors", origin=_EXACT
                )
            ],
            parameters.reason("every tensor the engine holds equals the one that was sent"),
            parameters.where,
        ),
        verdict(
            "derived_tensors",
            [Measure(name="tensors that differ", value=len(derived.wrong), bound=0.0, unit="tensors", origin=_EXACT)],
            derived.reason("every derived tensor equals its recomputation from the parameters"),
            derived.where,
        ),
        verdict(
            "undeclared_tensors",
            [
                Measure(
                    name="undeclared tensors",
                    value=len(undeclared),
                    bound=0.0,
                    unit="tensors",
                    origin="exact: a tensor no update reaches must be declared derived or constant",
                )
            ],
            f"the engine holds undeclared tensors: {_list(undeclared)}"
            if undeclared
            else "every tensor held is accounted for",
            Divergence(
                stage=STAGE,
                module=_module(undeclared[0]),
                quantity=_quantity(undeclared[0]),
                detail="no weight update reaches it and the engine does not declare it",
            )
            if undeclared
            else None,
        ),
    ]
    found = engine.probe(case.input_ids, case.attention_mask, case.response_length)
    culprit = derived.where or parameters.where
    for path, values in (("prefill", found.prefill), ("decode", found.decode)):
        verdicts.append(verdict(path, *_compare_path(path, values, log_probs, case, budget, culprit)))
    return verdicts


@dataclass(frozen=True)
class _Comparison:
    total: int
    wrong: tuple[str, ...]
    where: Divergence | None
    words: str = "differ"

    def reason(self, good: str) -> str:
        if not self.wrong:
            return f"{good} ({self.total} tensors)"
        return f"{len(self.wrong)} of {self.total} tensors {self.words}: {_list(self.wrong)}"


def _compare_parameters(engine: RolloutEngine, source: Mapping[str, Tensor]) -> _Comparison:
    held = dict(engine.named_parameters())
    wrong: dict[str, str] = {}
    for name in [*source, *(n for n in held if n not in source)]:
        detail = _difference(held.get(name), source.get(name))
        if detail:
            wrong[name] = detail
    first = next(iter(wrong), None)
    where = first and Divergence(stage=STAGE, module=_module(first), quantity=_quantity(first), detail=wrong[first])
    return _Comparison(len(source | held), tuple(wrong), where or None, "differ from what was sent")


def _compare_derived(engine: RolloutEngine) -> _Comparison:
    held = dict(engine.named_parameters())
    declared = engine.derived_tensors()
    wrong = {}
    for name, one in declared.items():
        detail = _difference(one.tensor, one.recompute())
        if detail:
            wrong[name] = (
                f"stale: {detail} from its recomputation out of {', '.join(one.sources)}; {_kinship(one, held)}"
            )
    first = next(iter(wrong), None)
    where = first and Divergence(
        stage=STAGE, module=declared[first].module, quantity=declared[first].quantity, detail=wrong[first]
    )
    return _Comparison(len(declared), tuple(wrong), where or None, "are not what their sources give")


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
    if torch.equal(_bytes(a), _bytes(b)):
        return None
    apart = (a.double() - b.double()).abs()
    differing = int((a != b).sum())
    return f"{differing} of {a.numel()} elements differ, by up to {float(apart.max()):.3g},"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _compare_path(path, values: Tensor, log_probs: Tensor, case: ProbeCase, budget: Budget, culprit: Divergence | None):
    if values.shape != log_probs.shape:
        raise InputError(
            "the engine and the trainer give log-probs of different shapes",
            where=f"weight_sync.{path}",
            expected=list(log_probs.shape),
            found=list(values.shape),
        )
    gap = (values.double().cpu() - log_probs.double().cpu()).abs().masked_fill(~case.response_mask.cpu(), 0)
    worst = budget.judge(float(gap.max()), run_seed=case.seed)
    first = Measure(name="|Δ log p| of the first response token", value=float(gap[:, 0].max()), unit=budget.unit)
    if worst.within:
        return [worst, first], f"{path} gives the trainer's log-probs", None
    # NaN compares false with everything: "not within" catches it
    sample, token = (~(gap <= budget.value)).T.nonzero()[0].flip(0).tolist()
    where = Divergence(
        stage=STAGE,
        module=culprit.module if culprit else "model",
        quantity=culprit.quantity if culprit else f"{path} log_prob",
        detail=f"{path} parts from the trainer at response token {token} of sample {sample}",
    )
    return [worst, first], f"{path} does not give the trainer's log-probs from response token {token} on", where


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


def _module(name: str) -> str:
    return name.rpartition(".")[0] or "model"


def _quantity(name: str) -> str:
    return name.rpartition(".")[2]


def _list(names: Iterable[str], shown: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


# --- dummy against safetensors --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadFormatRow:
    """One comparison of a dummy-initialised engine with a checkpoint-initialised one.

    ``differing`` names the tensors (or response tokens) that differ among ``compared``.
    """

    stage: str
    quantity: str
    compared: int
    differing: tuple[str, ...]
    expected_equal: bool

    @property
    def as_expected(self) -> bool:
        """True when the two are equal exactly where they should be."""
        return self.expected_equal == (not self.differing)

    def row(self) -> tuple[str, str, str, str, str]:
        """(stage, quantity, found, expected, first difference) for a table."""
        found = f"{len(self.differing)} of {self.compared} differ" if self.differing else "equal"
        expected = "equal" if self.expected_equal else "differ"
        return self.stage, self.quantity, found, expected, self.differing[0] if self.differing else ""


@dataclass(frozen=True, kw_only=True)
class LoadFormatTable:
    """Whether the initialisation of the rollout engine matters: dummy against safetensors at every stage of the first
    sync.

    After the trainer's weights arrived it must not. ``init`` is expected to differ (else the table shows nothing).
    """

    rows: tuple[LoadFormatRow, ...]

    def table(self) -> list[tuple[str, str, str, str, str]]:
        """Rows of (stage, quantity, found, expected, first difference)."""
        return [row.row() for row in self.rows]

    def verdict(self, *, subject: str = "golden", device: str = "cpu") -> Verdict:
        """PASS when only init differs, INCONCLUSIVE when it does not, FAIL naming the first difference behind it."""
        wrong = [row for row in self.rows if not row.as_expected]
        after = next((row for row in wrong if row.expected_equal), None)
        if after is not None:
            outcome, reason = Outcome.FAIL, f"the initialisation matters: {after.quantity} differ {after.stage}"
        elif wrong:
            outcome, reason = (
                Outcome.INCONCLUSIVE,
                "both engines started with equal weights, so the table shows nothing",
            )
        else:
            outcome, reason = Outcome.PASS, "the initialisation of the engine does not matter"
        where = after and Divergence(
            stage=STAGE,
            module=_module(after.differing[0]),
            quantity=_quantity(after.differing[0]),
            detail=f"{after.stage}: dummy and safetensors differ",
        )
        return Verdict(
            check="weight_sync.load_format",
            layer="e2e",
            stage=STAGE,
            subject=subject,
            device=device,
            outcome=outcome,
            reason=reason,
            where=where,
            next_command="pytest tests/e2e/test_weight_sync.py" if outcome is not Outcome.PASS else None,
        )


def load_format_table(
    build: Callable[[str], RolloutEngine],
    source: Callable[[], Iterable[tuple[str, Tensor]]],
    case: ProbeCase,
    *,
    sleep_level: int = 2,
    post_process: bool = True,
) -> LoadFormatTable:
    """Run the first sync of a dummy and of a checkpoint-initialised engine, one after the other, and compare all
    stages.

    The stages are the source material's: at ``init``; ``before sharding``, the weights as they are streamed; ``after
    sharding``, as the engine holds them, derived tensors apart; and the ``first forward`` by prefill and by decode.
    Only digests are kept, so both engines never exist at once.

    Args:
        build: makes an engine for a ``load_format``.
        source: makes the trainer's stream; called once per engine.
        case: the sequences of the first forward.
        sleep_level: how the engine sleeps between start-up and the first sync.
        post_process: False reproduces engines that compute derived tensors at start-up only.
    """
    runs = {f: _first_sync(build(f), source, case, sleep_level, post_process) for f in ("dummy", "safetensors")}
    rows = []
    for (stage, quantity), dummy in runs["dummy"].items():
        real = runs["safetensors"][stage, quantity]
        differing = tuple(k for k in [*dummy, *(k for k in real if k not in dummy)] if dummy.get(k) != real.get(k))
        rows.append(
            LoadFormatRow(
                stage=stage,
                quantity=quantity,
                compared=len(dummy | real),
                differing=differing,
                expected_equal=stage != "at init",
            )
        )
    return LoadFormatTable(rows=tuple(rows))


def _first_sync(engine: RolloutEngine, source, case: ProbeCase, sleep_level: int, post_process: bool):
    def parameters() -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in engine.named_parameters()}

    def derived() -> dict[str, str]:
        return {name: digest(one.tensor) for name, one in engine.derived_tensors().items()}

    stages = {("at init", "parameters"): parameters(), ("at init", "derived tensors"): derived()}
    streamed: dict[str, str] = {}

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in source():
            streamed[name] = digest(tensor)
            yield name, tensor

    engine.sleep(sleep_level)
    engine.wake()
    engine.update_weights(noted(), post_process=post_process)
    stages["before sharding", "parameters"] = streamed
    stages["after sharding", "parameters"] = parameters()
    stages["after sharding", "derived tensors"] = derived()
    probe = engine.probe(case.input_ids, case.attention_mask, case.response_length)
    for path, values in (("prefill", probe.prefill), ("decode", probe.decode)):
        stages["in the first forward", f"{path} log-probs"] = {
            f"model.{path} log_prob of token {t}": digest(values[:, t]) for t in range(values.shape[1])
        }
    return stages


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, dtype and shape."""
    head = f"{tensor.dtype}{list(tensor.shape)}".encode()
    return hashlib.sha256(head + _bytes(tensor).clone().numpy().tobytes()).hexdigest()


__all__ = [
    "LoadFormatRow",
    "LoadFormatTable",
    "ProbeCase",
    "check_weight_sync",
    "digest",
    "load_format_table",
    "probe_budget",
    "probe_case",
    "reachable_tensors",
    "stream_weights",
    "trainer_log_probs",
    "undeclared_tensors",
]
