"""Distillation on megatron-core: whole logits out of an engine that answers per token, and the loss on top of them.

The engine gathers the vocabulary over tensor parallel ranks, the tokens over context parallel ranks and the answers
over pipeline stages, so teacher and student are seen here as on one device. What travels are logits [b, s − 1, v]:
right for comparing stacks, too much for a vocabulary of a hundred thousand. A teacher that lists its most likely tokens
sends those: every tensor parallel rank its candidates, under the ids of the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.backends.training import LossFunction, MicroBatch, OptimizerConfig, Outputs, UpdateReport
from alignment.devices.base import Device
from alignment.rl import vocab_parallel
from alignment.rl.distill_loss import active_positions
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_stages import outputs_of_student


class MegatronDistillation:
    """A Megatron engine that answers like the other engines of a distillation. What is not here is the engine's own.

    With ``lists`` it is a teacher that lists its most likely tokens (:func:`most_likely_tokens`), and its logits stay
    split over the tensor parallel ranks.
    """

    def __init__(self, engine: Any, config: GkdConfig, *, lists: bool = False) -> None:
        self.inner = engine
        self._outputs = outputs_of_student(config)
        self._lists = lists
        engine.gathers_vocabulary = not lists

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, micro_batches: Sequence[MicroBatch], *, stage: str) -> list[dict[str, Tensor]]:
        """What the teacher says about every micro batch, on the host."""
        answers = self.inner.forward([_whole(part) for part in micro_batches], stage=stage)
        return [dict(self._said(answer, part)) for answer, part in zip(answers, micro_batches, strict=True)]

    def update(
        self, micro_batches: Sequence[MicroBatch], loss: LossFunction, *, stage: str, **more: Any
    ) -> UpdateReport:
        """One optimizer step of the student; ``loss`` gets what the other engines give it."""

        def on_logits(outputs: Outputs, micro_batch: MicroBatch) -> tuple[Tensor, Mapping[str, Any]]:
            return loss(self._said(outputs, micro_batch), micro_batch)

        return self.inner.update([_whole(part) for part in micro_batches], on_logits, stage=stage, **more)

    def _said(self, outputs: Outputs, micro_batch: MicroBatch) -> Outputs:
        if self._lists:
            active = active_positions(micro_batch["labels"])[:, :-1].cpu()
            return {name: tensor[active] for name, tensor in outputs.items()}
        # The last position predicts a token that is not there: it never counts.
        logits = nn.functional.pad(outputs["logits"], (0, 0, 0, 1))
        return self._outputs(lambda *_, **__: logits, micro_batch)


def megatron_distillation(
    config: GkdConfig, checkpoint: Path, *, optimizer: OptimizerConfig | None, dtype: torch.dtype, device: Device
) -> MegatronDistillation:
    """The student, or without ``optimizer`` the teacher, from ``checkpoint``.

    Raises:
        UnavailableError: megatron-core is not installed.
        InputError: sizes that do not fit the model or the number of ranks.
    """
    from alignment.rl.megatron_policy import megatron_policy

    k = config.gkd.gkd_logits_topk
    lists = optimizer is None and k is not None
    outputs = partial(most_likely_tokens, k=k) if lists else logits_of_tokens
    engine = megatron_policy(config, checkpoint, optimizer=optimizer, dtype=dtype, device=device, outputs=outputs)
    return MegatronDistillation(engine, config, lists=lists)


def logits_of_tokens(logits: Tensor, following: Tensor) -> Outputs:
    """The logits themselves, [b,s,v]."""
    return {"logits": logits}


def most_likely_tokens(logits: Tensor, following: Tensor, *, k: int) -> Outputs:
    """The k most likely tokens of the whole vocabulary from this rank's part of it, and the log-prob of what follows.

    Args:
        logits: [b,s,v/t] of this tensor parallel rank, whose ids are the consecutive range of its place.
        following: [b,s] ids of the whole vocabulary.

    Returns:
        As :func:`alignment.rl.gkd_stages.teacher_outputs` names them, [b,s,k] and [b,s], the same on every rank.
    """
    from megatron.core import parallel_state

    group, rank = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_tensor_model_parallel_rank()
    wide = logits if logits.dtype == torch.float64 else logits.float()
    size = wide.shape[-1]
    start = rank * size
    mine = (following >= start) & (following < start + size)
    here = wide.gather(-1, (following - start).clamp(0, size - 1).unsqueeze(-1)).squeeze(-1)
    values, ids = vocab_parallel.local_top_k(wide, k, start=start)
    values, ids, sums, here = (
        _of_every_rank(x, group) for x in (values, ids, wide.logsumexp(-1), here.masked_fill(~mine, -math.inf))
    )
    total = torch.stack(sums).logsumexp(0)
    best, best_ids = vocab_parallel.merge_top_k(list(zip(values, ids, strict=True)), k)
    return {
        "token_log_probs": torch.stack(here).amax(0) - total,
        "teacher_topk_log_probs": best - total.unsqueeze(-1),
        "teacher_topk_indices": best_ids,
    }


def _of_every_rank(x: Tensor, group: Any) -> list[Tensor]:
    import torch.distributed as dist

    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def _whole(micro_batch: MicroBatch) -> dict[str, Tensor]:
    """A micro batch of sequences as the engine takes it: one token of prompt, the rest its response."""
    return {**micro_batch, "responses": micro_batch["input_ids"][:, 1:]}
