"""The communication test: one optimizer step by one process and by many, on one batch, and every collective in between.

One process adds up the gradients of all micro batches by itself; N processes share the micro batches out and let
collectives add. Loss and gradient norm may then differ by the order of sums alone. A relative difference over
:data:`LIMIT` convicts communication, which is the field's rule; below it the difference stands beside what
re-association is expected to make of it. Every collective of the step is recorded on every rank and replayed here in
float64 (:mod:`alignment.diagnose.collective_replay`), which convicts the first one that is wrong, however little of it
shows in the loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from alignment.diagnose.axes.software import COMMUNICATION
from alignment.diagnose.collective_record import RECORD, CollectiveRecorder, load_records, remove_records
from alignment.diagnose.collective_replay import Replay, replay
from alignment.diagnose.trained_role import Policy, TrainedRole
from alignment.errors import InputError
from alignment.files import read_json, write_json
from alignment.models.config import ModelConfig
from alignment.numerics.budget import unit_roundoff
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict
from alignment.rl.batch import Batch
from alignment.rl.config import MegatronConfig, RunConfig
from alignment.rl.executor import Executor, InProcessExecutor, Placement
from alignment.rl.observers import ObserverSpec
from alignment.rl.worker import DTYPES, Worker, WorkerSetting

LIMIT = COMMUNICATION
"""Relative difference of loss or gradient norm between one process and many that convicts communication: the field's
rule (DeepSeek-V3 on Atlas, one machine with gradient accumulation against several with the same global batch)."""

FACTS = "facts_rank_{rank}.json"

MICRO_BATCHES = 2
"""Of every rank, so that accumulation and communication both add."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one optimizer step said.

    Attributes:
        ranks: processes that made it.
        loss: of the whole batch.
        grad_norms: of every rank, which have to be one number.
        parameters: gradient norm of every parameter.
    """

    ranks: int
    loss: float
    grad_norms: tuple[float, ...]
    parameters: Mapping[str, float]

    @property
    def grad_norm(self) -> float:
        return self.grad_norms[0]


@dataclass(frozen=True, kw_only=True)
class Reassociation:
    """What another order of sums is expected to do: u · √length · condition (Higham and Mary 2019, SIAM J. Sci. Comput.
    41(5), section 3: rounding errors that are independent grow with the root of the number of additions).

    Attributes:
        length: additions whose order differs.
        roundoff: of the dtype they are in.
        loss_condition, norm_condition: Σ|summand| / |sum| over the micro batches.
    """

    length: int
    roundoff: float
    loss_condition: float
    norm_condition: float

    @property
    def loss(self) -> float:
        return self.roundoff * math.sqrt(self.length) * self.loss_condition

    @property
    def grad_norm(self) -> float:
        return self.roundoff * math.sqrt(self.length) * self.norm_condition


@dataclass(frozen=True, kw_only=True)
class CommunicationTest:
    """One process against many."""

    one: Step
    many: Step
    noise: Reassociation
    replay: Replay
    engine: str
    device: str
    role: str = ""
    stage: str = Policy.stage

    @property
    def loss_difference(self) -> float:
        return _relative(self.many.loss, self.one.loss)

    @property
    def grad_norm_difference(self) -> float:
        """Of the rank that is furthest off."""
        return max(_relative(norm, self.one.grad_norm) for norm in self.many.grad_norms)

    def furthest(self) -> tuple[str, float] | None:
        """The parameter whose gradient norm changed most, by how much of the norm of the whole gradient."""
        both = self.one.parameters.keys() & self.many.parameters.keys()
        if not both or not self.one.grad_norm:
            return None
        off = {name: abs(self.many.parameters[name] - self.one.parameters[name]) for name in both}
        name = max(sorted(off), key=off.__getitem__)
        return name, off[name] / self.one.grad_norm

    def verdicts(self) -> list[Verdict]:
        """Loss, gradient norm and collectives."""
        make = partial(Verdict, layer="layer", stage=self.stage, subject=self.engine, device=self.device)
        named = self.replay.first
        found = [
            self._difference(make, "loss", self.loss_difference, self.noise.loss, self.one.loss, self.many.loss),
            self._difference(
                make,
                "grad_norm",
                self.grad_norm_difference,
                self.noise.grad_norm,
                self.one.grad_norm,
                max(self.many.grad_norms, key=lambda norm: _relative(norm, self.one.grad_norm)),
            ),
        ]
        judged = sum(self.replay.judged.values())
        kinds = ", ".join(f"{count} {op}" for op, count in sorted(self.replay.judged.items()))
        left = "; ".join(f"{count} × {why}" for why, count in sorted(self.replay.unjudged.items()))
        measure = Measure(name="largest share of a sum's bound", value=self.replay.used, origin="(n − 1)·u·Σ|x|")
        if named is not None:
            others = f"; {len(self.replay.wrong) - 1} later ones are wrong too" if len(self.replay.wrong) > 1 else ""
            found.append(
                make(
                    check=self._check("collectives"),
                    outcome=Outcome.FAIL,
                    reason=f"{named}{others}",
                    where=Divergence(
                        stage=self.stage, module=named.op, quantity=f"call {named.index}", detail=named.place
                    ),
                    next_command=_next(named.cause, named.rank),
                )
            )
        elif left or not judged:
            reason = f"not judged: {left}" if left else "no collective was recorded"
            found.append(make(check=self._check("collectives"), outcome=Outcome.INCONCLUSIVE, reason=reason))
        else:
            found.append(
                make(
                    check=self._check("collectives"),
                    outcome=Outcome.PASS,
                    reason=f"{kinds}: {self.replay.elements} elements are what the inputs of all ranks say",
                    measures=(measure,),
                )
            )
        order = {Outcome.FAIL: 0, Outcome.INCONCLUSIVE: 1}
        return sorted(found, key=lambda verdict: order.get(verdict.outcome, 2))

    def _check(self, name: str) -> str:
        return "/".join(part for part in ("communication", self.role, name) if part)

    def _difference(
        self, make: Callable[..., Verdict], name: str, value: float, noise: float, one: float, many: float
    ) -> Verdict:
        told = f"{many:.9g} on {self.many.ranks} ranks, {one:.9g} on one: relative difference {value:.2e}"
        beside = f"re-association is expected to make {noise:.1e}"
        measure = Measure(
            name=f"relative difference of {name}",
            value=value,
            bound=LIMIT,
            origin="the field's rule: over 1 % convicts",
        )
        if measure.within:
            return make(
                check=self._check(name), outcome=Outcome.PASS, reason=f"{told}; {beside}", measures=(measure,)
            )
        parameter = self.furthest()
        where = ""
        if parameter is not None:
            where = f"; the gradient of {parameter[0]} changed most, by {parameter[1]:.1%} of the whole norm"
        right = self.replay.first is None
        return make(
            check=self._check(name),
            outcome=Outcome.FAIL,
            reason=f"communication: {told}; {beside}{where}",
            measures=(measure,),
            next_command="every collective gave what it was asked for: look for one that is missing, or is called with "
            "another group or reduction, where this gradient is added up"
            if right
            else None,
        )

    def to_dict(self) -> dict[str, Any]:
        noise = {**dataclasses.asdict(self.noise), "loss": self.noise.loss, "grad_norm": self.noise.grad_norm}
        return {
            "role": self.role or "actor",
            "engine": self.engine,
            "device": self.device,
            "limit": LIMIT,
            "one": dataclasses.asdict(self.one),
            "many": dataclasses.asdict(self.many),
            "differences": {"loss": self.loss_difference, "grad_norm": self.grad_norm_difference},
            "expected_reassociation": noise,
            "furthest_parameter": self.furthest(),
            "replay": self.replay.to_dict(),
        }


def one_against_many(
    config: RunConfig,
    *,
    executor: Executor,
    directory: Path,
    device: str,
    role: TrainedRole | None = None,
    rows: int | None = None,
    reference: Executor | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> CommunicationTest:
    """One optimizer step of ``config`` by one process and by its ``trainer.n_gpus_per_node · nnodes`` ranks.

    Args:
        config: what is trained, with the sizes of the layout under test. Model, engine, dtype and loss are its own;
            rollouts are not needed, the batch is drawn.
        executor: where the ranks live; they must see ``directory``.
        directory: gets the records.
        device: as in :class:`~alignment.rl.worker.WorkerSetting`.
        role: what makes the step, of :func:`~alignment.diagnose.trained_role.roles_of`; the policy by default.
        rows: of the batch; :data:`MICRO_BATCHES` micro batches for every rank by default.
        reference: where the one process lives; here by default.

    Raises:
        InputError: one rank only, rows that cannot be shared out, or a step without a gradient.
    """
    ranks = config.dp_size
    if ranks < 2:
        raise InputError(
            "communication takes two", where="trainer.n_gpus_per_node", expected=">= 2 ranks", found=f"{ranks}"
        )
    role = role or Policy()
    config = role.comparable(config)
    micro = role.micro_batch(config)
    rows = rows or ranks * MICRO_BATCHES * micro
    if rows % (ranks * micro):
        raise InputError(
            "the rows do not divide", where="rows", expected=f"a multiple of {ranks} ranks × {micro}", found=rows
        )
    directory = Path(directory)
    alone = single(config)
    model = _model(config)
    with _started(reference or InProcessExecutor(), alone, device, directory / "one", role, record=False) as group:
        progress("one process")
        batch = role.prepare(group, role.draw(config, model, rows=rows))
        # First the whole: engines that step change their state, and only this step is compared.
        one = _step(group, role, batch, batch, directory / "one")
        if not one.grad_norm:
            raise InputError("the step has no gradient: there is nothing to compare", where=role.stage)
        parts = []
        for start in range(0, rows, micro):
            progress(f"one process: micro batch {start // micro + 1} of {rows // micro}")
            parts.append(_step(group, role, batch[slice(start, start + micro)], batch, directory / "one"))
        label = group.call("describe")[0]["device"]
    with _started(executor, config, device, directory / "many", role, record=True) as group:
        progress(f"{ranks} ranks")
        try:
            many = _step(group, role, batch, batch, directory / "many")
        except Exception as error:
            raise _unfinished(directory / "many", error, role.stage) from error
    progress("replay")
    return CommunicationTest(
        one=one,
        many=many,
        noise=reassociation(one, parts, config, model),
        replay=replay(load_records(directory / "many")),
        engine=config.engine.train,
        device=label,
        role=role.name,
        stage=role.stage,
    )


def single(config: RunConfig) -> RunConfig:
    """``config`` for one process: no parallel sizes."""
    actor = config.actor_rollout_ref.actor
    sizes = {f.name: f.default for f in dataclasses.fields(MegatronConfig) if f.name.endswith("_size")}
    overrides = dataclasses.replace(
        actor.megatron.override_transformer_config,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
    )
    megatron = dataclasses.replace(actor.megatron, **sizes, override_transformer_config=overrides)
    policy = dataclasses.replace(config.actor_rollout_ref, actor=dataclasses.replace(actor, megatron=megatron))
    trainer = dataclasses.replace(config.trainer, n_gpus_per_node=1, nnodes=1)
    return dataclasses.replace(config, actor_rollout_ref=policy, trainer=trainer)


def _step(group: Any, role: TrainedRole, batch: Batch, whole: Batch, directory: Path) -> Step:
    reports = role.update(group, batch, whole)
    return Step(
        ranks=len(reports),
        loss=math.fsum(float(report.metrics[role.loss]) for report in reports),
        grad_norms=tuple(report.grad_norm for report in reports),
        parameters=read_json(directory / FACTS.format(rank=0))["parameter_grad_norms"],
    )


def _unfinished(directory: Path, error: Exception, stage: str) -> Exception:
    """What to raise where the ranks failed: with the first collective that says why, if one does."""
    try:
        first = replay(load_records(directory)).first
    except InputError:
        first = None
    if first is None:
        return error
    return InputError(
        "the ranks did not finish the step",
        where=stage,
        expected="every collective right",
        found=str(first),
        next_step=_next(first.cause, first.rank),
    )


@contextlib.contextmanager
def _started(
    executor: Executor, config: RunConfig, device: str, directory: Path, role: TrainedRole, *, record: bool
) -> Iterator[Any]:
    directory.mkdir(parents=True, exist_ok=True)
    remove_records(directory)
    argument = json.dumps(
        {"directory": str(directory.resolve()), "record": record, "stage": role.stage, "role": role.worker}
    )
    observer = ObserverSpec(factory=f"{__name__}:watch", argument=argument)
    setting = WorkerSetting(config=config, device=device, total_steps=1, generates=False, observers=(observer,))
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    try:
        groups = executor.start(setting, Placement(roles=(role.worker,), world_size=config.dp_size))
        yield groups[role.worker]
    finally:
        executor.shutdown()
        if not there:
            _leave(config.engine.train)


def _leave(engine: str) -> None:
    """Gives up the group of one that an engine of this process made, which later engines would take for theirs."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if engine == "megatron":
        from alignment.backends.megatron_groups import leave_groups

        leave_groups()
    torch.distributed.destroy_process_group()


def watch(worker: Worker, argument: str) -> Watch:
    """The observer of a rank, as workers make it."""
    return Watch(**json.loads(argument))


@dataclass(frozen=True)
class Watch:
    """Records the collectives of the update in a rank, and the gradient norm of every parameter."""

    directory: str
    record: bool
    stage: str = Policy.stage
    role: str = Policy.worker

    def observe(self, worker: Worker, stage: str, batch: Batch | None, proceed: Callable[[], Any]) -> Any:
        """Runs the stage; see :class:`~alignment.rl.observers.StageObserver`."""
        if stage != self.stage:
            return proceed()
        recorder = CollectiveRecorder() if self.record else None
        norms: dict[str, float] = {}
        engine = getattr(worker, self.role)
        update = engine.update

        def update_and_keep(*arguments: Any, **keywords: Any) -> Any:
            report = update(*arguments, **{**keywords, "parameter_grad_norms": True})
            norms.update(report.parameter_grad_norms)
            return report

        engine.update = update_and_keep
        where = Path(self.directory)
        try:
            if recorder is not None:
                recorder.begin()
            answer = proceed()
        finally:
            del engine.update
            if recorder is not None:
                recorder.end()
                # Also after a failure: who waits for a rank that never comes learns here which one.
                recorder.save(where / RECORD.format(rank=worker.rank))
        write_json(where / FACTS.format(rank=worker.rank), {"parameter_grad_norms": norms})
        return answer

    def close(self) -> None:
        """Everything is on the disk already."""


def reassociation(one: Step, parts: Sequence[Step], config: RunConfig, model: ModelConfig) -> Reassociation:
    """What the order of sums may do to the step: the sums over micro batches and ranks, the norm's pairwise sum, and,
    where ranks hold parts of one model, the sums of every layer that are cut.
    """
    megatron = config.actor_rollout_ref.actor.megatron
    dtype = DTYPES[config.actor_rollout_ref.model.dtype]
    elements = max(2, _elements(model))
    length = len(parts) + math.ceil(math.log2(elements))
    # Sums over micro batches are in float32 at least, whatever the model is in.
    roundoff = min(unit_roundoff(dtype), unit_roundoff(torch.float32))
    sizes = [getattr(megatron, f.name) or 1 for f in dataclasses.fields(megatron) if f.name.endswith("_size")]
    if config.engine.train == "megatron" and max(sizes) > 1:
        # Attention output and MLP of every layer, forwards and backwards.
        cut = model.num_attention_heads * model.v_head_dim + model.intermediate_size
        length += 2 * model.num_hidden_layers * cut
        roundoff = unit_roundoff(dtype)
    return Reassociation(
        length=length,
        roundoff=roundoff,
        loss_condition=_condition([part.loss for part in parts], one.loss),
        norm_condition=_condition([part.grad_norm for part in parts], one.grad_norm),
    )


def _condition(parts: Sequence[float], whole: float) -> float:
    size = math.fsum(abs(part) for part in parts)
    return max(1.0, size / abs(whole)) if whole else math.inf


def _elements(model: ModelConfig) -> int:
    from alignment.models.causal_lm import CausalLM

    return sum(parameter.numel() for parameter in CausalLM(model, device="meta").parameters())


def _model(config: RunConfig) -> ModelConfig:
    from alignment.weights.checkpoint import load_config

    return load_config(config.actor_rollout_ref.model.path)


def _relative(found: float, reference: float) -> float:
    if not (math.isfinite(found) and math.isfinite(reference)):
        return math.inf
    if not reference:
        return 0.0 if found == reference else math.inf
    return abs(found - reference) / abs(reference)


def _next(cause: str, rank: int) -> str:
    if cause.startswith("bit "):
        return f"alignment stress --minutes 30 on the node of rank {rank}"
    return "alignment bisect freeze -o stack.yaml here and where it agrees, then alignment bisect run over the two"
