"""Distillation on megatron-core: whole logits out of an engine that answers per token, and the loss on top of them.

The engine gathers the vocabulary over tensor parallel ranks, the tokens over context parallel ranks and the answers
over pipeline stages, so teacher and student are seen here as on one device. What travels are logits [b, s − 1, v]:
right for comparing stacks, too much for a vocabulary of a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.backends.training import LossFunction, MicroBatch, OptimizerConfig, Outputs, UpdateReport
from alignment.devices.base import Device
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_stages import outputs_of_student


class MegatronDistillation:
    """A Megatron engine that answers like the other engines of a distillation. What is not here is the engine's own."""

    def __init__(self, engine: Any, config: GkdConfig) -> None:
        self.inner = engine
        self._outputs = outputs_of_student(config)

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

    engine = megatron_policy(
        config, checkpoint, optimizer=optimizer, dtype=dtype, device=device, outputs=logits_of_tokens
    )
    return MegatronDistillation(engine, config)


def logits_of_tokens(logits: Tensor, following: Tensor) -> Outputs:
    """The logits themselves, [b,s,v]."""
    return {"logits": logits}


def _whole(micro_batch: MicroBatch) -> dict[str, Tensor]:
    """A micro batch of sequences as the engine takes it: one token of prompt, the rest its response."""
    return {**micro_batch, "responses": micro_batch["input_ids"][:, 1:]}
