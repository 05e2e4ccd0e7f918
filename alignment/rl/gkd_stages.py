"""What the two stages of distillation do to their batch, given engines: the teacher's word, and the student's update.

Rows are whole sequences, cut into micro batches of ``gkd.micro_batch_size`` samples, each trimmed to its longest. The
teacher's answer for a micro batch is kept where it was made and joined to the same micro batch of the update; it never
travels when it is a whole vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from alignment.backends.training import LossFunction, MicroBatch, Outputs, TrainingEngine, UpdateReport
from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.batching import Partition, micro_batches
from alignment.rl.distill_loss import (
    DistillCounts,
    TeacherTokens,
    active_positions,
    sft_divergence,
    shift_labels,
    token_divergence,
)
from alignment.rl.gkd_config import GkdConfig, GkdSettings

VIEW = ("input_ids", "attention_mask", "position_ids", "labels")
TABLES = ("teacher_topk_log_probs", "teacher_topk_indices")
SAID = ("teacher_logits", *TABLES)
PER_SAMPLE = ("divergence", "agreement")
ROW = "row/"


def outputs_of_student(config: GkdConfig) -> Callable[[nn.Module, MicroBatch], Outputs]:
    """How a model answers a micro batch: as the teacher, or as the student where the teacher has spoken."""
    return partial(distillation_outputs, settings=config.gkd)


def distillation_outputs(model: Callable[..., Tensor], micro_batch: MicroBatch, *, settings: GkdSettings) -> Outputs:
    """See :func:`teacher_outputs` and :func:`student_outputs`."""
    if any(name in micro_batch for name in SAID):
        return student_outputs(model, micro_batch, settings=settings)
    return teacher_outputs(model, micro_batch, settings=settings)


def teacher_outputs(model: Callable[..., Tensor], micro_batch: MicroBatch, *, settings: GkdSettings) -> Outputs:
    """The teacher at the n active tokens of the micro batch, in row order.

    ``teacher_logits`` [n,v], or with ``gkd_logits_topk`` the tables [n,k]; and ``token_log_probs`` [n] of the labels at
    temperature 1, at least float32.
    """
    logits = _logits(model, micro_batch)[active_positions(micro_batch["labels"])]
    labels = _active_labels(micro_batch)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = torch.log_softmax(wide, -1)
    said = {"token_log_probs": log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)}
    if settings.gkd_logits_topk is None:
        return {**said, "teacher_logits": logits}
    values, indices = log_probs.topk(min(settings.gkd_logits_topk, log_probs.shape[-1]), dim=-1)
    return {**said, "teacher_topk_log_probs": values, "teacher_topk_indices": indices}


def student_outputs(model: Callable[..., Tensor], micro_batch: MicroBatch, *, settings: GkdSettings) -> Outputs:
    """``divergence`` and ``agreement`` [b,s] at the positions that predict active tokens, 0 elsewhere; with an SFT term
    also ``nll`` [b,s].
    """
    active = active_positions(micro_batch["labels"])
    logits = _logits(model, micro_batch)[active]
    said = TeacherTokens(
        logits=micro_batch.get("teacher_logits"),
        topk_log_probs=micro_batch.get("teacher_topk_log_probs"),
        topk_indices=micro_batch.get("teacher_topk_indices"),
    )
    divergence, agreement = token_divergence(
        logits, said, beta=settings.beta, temperature=settings.temperature, chunk_size=settings.chunk_size
    )
    outputs = {"divergence": _placed(divergence, active), "agreement": _placed(agreement, active)}
    if settings.sft_alpha > 0:
        nll = sft_divergence(logits, _active_labels(micro_batch), chunk_size=settings.chunk_size)
        outputs["nll"] = _placed(nll, active)
    return outputs


def distill_loss(
    config: GkdConfig, counts: DistillCounts, outputs: Outputs, micro_batch: MicroBatch
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """This micro batch's share of the loss and of its metrics: sums over tokens, divided by the whole step's counts.

    The cross-entropy counts on responses of the data set only, whatever else is in the batch.
    """
    tokens = max(counts.tokens, 1)
    jsd = outputs["divergence"].sum() / tokens
    metrics = {"student/jsd_loss": jsd.detach(), "student/agreement": outputs["agreement"].sum() / tokens}
    loss = jsd
    if "nll" in outputs:
        mine = outputs["nll"] * micro_batch["dataset_response"].to(outputs["nll"]).unsqueeze(1)
        sft = mine.sum() / max(counts.sft_tokens, 1)
        loss = loss + config.gkd.sft_alpha * sft
        metrics["student/sft_loss"] = sft.detach()
    return loss, {**metrics, "student/loss": loss.detach()}


@dataclass
class TeacherCache:
    """The teacher's answers for the micro batches of one training step, until the update takes them."""

    said: list[dict[str, Tensor]] = field(default_factory=list)
    asked: list[Tensor] = field(default_factory=list)

    def keep(self, asked: Sequence[MicroBatch], said: Sequence[Mapping[str, Tensor]]) -> None:
        """Replaces what is kept."""
        self.asked = [part["input_ids"] for part in asked]
        self.said = [dict(answer) for answer in said]

    def take(self, asked: Sequence[MicroBatch]) -> list[dict[str, Tensor]]:
        """The answers for these micro batches, which are then forgotten.

        Raises:
            InputError: they are those of other micro batches.
        """
        same = len(asked) == len(self.asked) and all(
            torch.equal(part["input_ids"], mine) for part, mine in zip(asked, self.asked)
        )
        if not same:
            raise InputError(
                "the teacher has not been asked about these samples",
                where="update_student",
                expected=f"{len(asked)} micro batches that teacher_log_prob saw",
                found=f"{len(self.asked)} kept",
            )
        said, self.said, self.asked = self.said, [], []
        return said


@dataclass(frozen=True, kw_only=True)
class StudentUpdate:
    """One rank's answer to an update: the report, and per sample its sums over active tokens."""

    report: UpdateReport
    samples: Mapping[str, Mapping[str, float]]


def cut(batch: Batch, config: GkdConfig) -> Partition:
    """The micro batches of one rank: consecutive samples."""
    return micro_batches(
        [1] * len(batch), use_dynamic_bsz=False, micro_batch_size=config.gkd.micro_batch_size, max_token_len=None
    )


def ask_teacher(
    score: Callable[[Sequence[MicroBatch]], Sequence[Mapping[str, Tensor]]],
    batch: Batch,
    config: GkdConfig,
    cache: TeacherCache,
) -> Batch:
    """The stage ``teacher_log_prob`` with a teacher on the worker.

    Args:
        score: the teacher's forward pass over micro batches, see :func:`teacher_outputs`.
        batch: this rank's rows.
        cache: gets the answers.
    """
    partition = cut(batch, config)
    parts = partition.split(batch)
    answers = score([teacher_view(part) for part in parts])
    cache.keep([trim(part) for part in parts], [{k: a[k] for k in SAID if k in a} for a in answers])
    values = torch.zeros(batch["labels"].shape, dtype=answers[0]["token_log_probs"].dtype)
    for rows, part, answer in zip(partition.parts, parts, answers, strict=True):
        # Active tokens come in the same order in both views.
        values[list(rows)] = _placed(answer["token_log_probs"].cpu(), active_positions(part["labels"]))
    return batch.add({"teacher_token_log_probs": values})


def update_student(
    engine: TrainingEngine, batch: Batch, counts: DistillCounts, config: GkdConfig, cache: TeacherCache
) -> StudentUpdate:
    """The stage ``update_student``: one optimizer step, with the teacher's answers from the batch or from the cache."""
    parts = cut(batch, config).split(batch)
    inputs = [trim(part) for part in parts]
    if TABLES[0] in batch:
        said = [active_tables(part) for part in parts]
    else:
        said = cache.take(inputs)

    def loss(outputs: Outputs, micro_batch: MicroBatch) -> tuple[Tensor, Mapping[str, float | Tensor]]:
        value, metrics = distill_loss(config, counts, outputs, micro_batch)
        # As metrics, since an engine may ask for the loss of other ranks' micro batches too, but reports its own.
        return value, {**metrics, **_sums_of_rows(outputs, micro_batch)}

    function: LossFunction = loss
    report = engine.update(
        [
            {**{k: v for k, v in part.items() if not k.startswith("teacher_")}, **answer}
            for part, answer in zip(inputs, said, strict=True)
        ],
        function,
        stage="update_student",
    )
    metrics = dict(report.metrics)
    samples = {}
    for uid, row, active in zip(batch["uid"], batch["row"].tolist(), active_positions(batch["labels"]).sum(1).tolist()):
        samples[uid] = {"tokens": active, **{name: metrics.pop(f"{ROW}{row}/{name}") for name in PER_SAMPLE}}
    return StudentUpdate(report=dataclasses.replace(report, metrics=metrics), samples=samples)


def _sums_of_rows(outputs: Outputs, micro_batch: MicroBatch) -> dict[str, float]:
    rows = micro_batch["row"].tolist()
    return {
        f"{ROW}{row}/{name}": value
        for name in PER_SAMPLE
        for row, value in zip(rows, outputs[name].detach().sum(1).tolist(), strict=True)
    }


def count(batch: Batch) -> DistillCounts:
    """The counts of a whole training step: active tokens that the teacher covers, and those of dataset responses."""
    active = active_positions(batch["labels"])
    covered = active
    if TABLES[0] in batch:
        covered = active & ~torch.isneginf(batch[TABLES[0]]).all(-1)
    dataset = active & (batch["dataset_response"] != 0).unsqueeze(1)
    return DistillCounts(tokens=int(covered.sum()), sft_tokens=int(dataset.sum()))


def teacher_view(batch: Batch) -> dict[str, Tensor]:
    """What the teacher sees of a micro batch: its own view where there is one, under the student's names."""
    own = "teacher_input_ids" in batch
    return trim(Batch({name: batch[f"teacher_{name}" if own else name] for name in VIEW}))


def trim(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a micro batch, cut on the right to its longest sequence, in each view."""
    tensors = {}
    for name, tensor in batch.tensors.items():
        prefix = "teacher_" if f"{name}".startswith("teacher_") and name.removeprefix("teacher_") in VIEW else ""
        mask = batch.tensors.get(f"{prefix}attention_mask")
        cuts = tensor.ndim > 1 and mask is not None
        tensors[name] = tensor[:, : int((mask != 0).sum(1).max())] if cuts else tensor
    return tensors


def active_tables(batch: Batch) -> dict[str, Tensor]:
    """The rows of the teacher's tables at the active tokens of a micro batch, [n,k]."""
    active = active_positions(batch["labels"])
    return {name: batch[name][active] for name in TABLES}


def place_tables(log_probs: Sequence[Tensor], indices: Sequence[Tensor], batch: Batch, *, k: int) -> dict[str, Tensor]:
    """Per-sample tables [t,k] in the teacher's frame, moved to the student's: [b,s,k].

    Under OPSD the active tokens stand at other positions in the teacher's view; they are the same tokens in the same
    order, so the rows move one by one.
    """
    own = "teacher_labels" in batch
    theirs = active_positions(batch["teacher_labels" if own else "labels"])
    ours = active_positions(batch["labels"])
    shape = (*ours.shape, k)
    made = {TABLES[0]: torch.full(shape, float("-inf")), TABLES[1]: torch.zeros(shape, dtype=torch.int64)}
    for row, (values, ids) in enumerate(zip(log_probs, indices, strict=True)):
        there = theirs[row, : len(values)]
        made[TABLES[0]][row, ours[row]] = values[there]
        made[TABLES[1]][row, ours[row]] = ids[there]
    return made


def _logits(model: Callable[..., Tensor], micro_batch: MicroBatch) -> Tensor:
    return model(
        micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"], position_ids=micro_batch["position_ids"]
    )


def _active_labels(micro_batch: MicroBatch) -> Tensor:
    labels = shift_labels(micro_batch["labels"])
    return labels[active_positions(micro_batch["labels"])]


def _placed(values: Tensor, active: Tensor) -> Tensor:
    """Values [n] at the n true places of ``active`` [b,s], 0 elsewhere."""
    return torch.zeros(active.shape, dtype=values.dtype, device=values.device).masked_scatter(active, values)
