"""A teacher with a frozen model of its own on every worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from alignment.backends.training import MicroBatch
from alignment.devices.base import Device
from alignment.rl import gkd_stages, teacher
from alignment.rl.gkd_config import GkdConfig


class ColocatedTeacher:
    """Forward passes of the teacher between the student's; with ``offload_teacher_model`` it waits on the host.

    Raises:
        InputError: no checkpoint in ``gkd.teacher_model``, or one that builds another model than it describes.
    """

    def __init__(self, config: GkdConfig, *, device: Device) -> None:
        self._offloads = config.gkd.offload_teacher_model
        self.engine = build_engine(config, Path(config.gkd.teacher_model), device=device)
        teacher.require_own_config(getattr(self.engine, "model", None), Path(config.gkd.teacher_model))
        if self._offloads:
            self.engine.offload()

    def score(self, micro_batches: Sequence[MicroBatch]) -> Sequence[Mapping[str, Tensor]]:
        """See :class:`alignment.rl.teacher.WorkerTeacher`."""
        if self._offloads:
            self.engine.reload()
        try:
            return self.engine.forward(micro_batches, stage=teacher.STAGE)
        finally:
            if self._offloads:
                self.engine.offload()


def build_engine(config: GkdConfig, checkpoint: Path, *, device: Device):
    """A frozen engine of the kind that trains the student, from the teacher's own checkpoint."""
    from alignment.rl.worker import DTYPES

    dtype = DTYPES[config.gkd.teacher_dtype]
    if config.engine.train == "fsdp":
        from alignment.rl.fsdp_policy import fsdp_policy

        return fsdp_policy(config, checkpoint, optimizer=None, dtype=dtype, device=device)
    if config.engine.train == "megatron":
        from alignment.rl.megatron_distillation import megatron_distillation

        return megatron_distillation(config, checkpoint, optimizer=None, dtype=dtype, device=device)
    from alignment.backends.golden_training import GoldenTrainingEngine

    return GoldenTrainingEngine.from_checkpoint(
        checkpoint,
        optimizer=None,
        dtype=dtype,
        device=device.torch_device,
        outputs=gkd_stages.outputs_of_student(config),
    )
