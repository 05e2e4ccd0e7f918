"""The student with its adapter disabled, as its own teacher: no second model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from alignment.backends.training import MicroBatch
from alignment.rl import gkd_stages, teacher
from alignment.rl.fsdp_lora import FsdpLoraEngine
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.lora import LoraTrainingEngine


class AdapterDisabledTeacher:
    """Forward passes of the student's frozen base. Training the adapter never moves it."""

    def __init__(self, student: LoraTrainingEngine | FsdpLoraEngine, config: GkdConfig) -> None:
        self.engine, self._outputs = student, gkd_stages.outputs_of_student(config)

    def score(self, micro_batches: Sequence[MicroBatch]) -> Sequence[Mapping[str, Tensor]]:
        """See :class:`alignment.rl.teacher.WorkerTeacher`."""
        return self.engine.forward_base(micro_batches, self._outputs, stage=teacher.STAGE)
