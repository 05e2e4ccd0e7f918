"""The teacher's side: where its distributions come from. One file per kind.

* :mod:`alignment.rl.teacher_colocated`: its own frozen model on every worker;
* :mod:`alignment.rl.teacher_adapter`: the student with its adapter disabled;
* :mod:`alignment.rl.teacher_replicas`: inference actors that score prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from alignment.backends.training import MicroBatch
from alignment.errors import InputError
from alignment.files import read_json
from alignment.rl.gkd_config import GkdConfig, TeacherKind

STAGE = "teacher_log_prob"


class WorkerTeacher(Protocol):
    """A teacher that computes on the worker, by an engine of its own or the student's."""

    engine: Any

    def score(self, micro_batches: Sequence[MicroBatch]) -> Sequence[Mapping[str, Tensor]]:
        """What it says about each micro batch; see :func:`alignment.rl.gkd_stages.teacher_outputs`."""
        ...


def worker_teacher(config: GkdConfig, student: Any, *, device: Any) -> WorkerTeacher | None:
    """The teacher on this worker, or None where replicas are asked.

    Args:
        student: the training engine of the student.
        device: :class:`alignment.devices.base.Device` of the worker.

    Raises:
        InputError: no checkpoint there, or a model that is not the one its configuration describes.
    """
    kind = config.teacher_kind
    if kind is TeacherKind.ADAPTER_DISABLED:
        from alignment.rl.teacher_adapter import AdapterDisabledTeacher

        return AdapterDisabledTeacher(student, config)
    if kind is TeacherKind.COLOCATED:
        from alignment.rl.teacher_colocated import ColocatedTeacher

        return ColocatedTeacher(config, device=device)
    return None


def require_own_config(model: Any, checkpoint: Path) -> None:
    """Refuse a teacher that was built from another configuration than its own checkpoint's, as the student's is.

    Raises:
        InputError: naming the first field that differs.
    """
    from alignment.models.config import ModelConfig

    built = getattr(model, "config", None)
    if not isinstance(built, ModelConfig):
        return
    stored, built = ModelConfig.from_hf(read_json(checkpoint / "config.json")).to_hf(), built.to_hf()
    for name in sorted(stored.keys() | built.keys()):
        if stored.get(name) != built.get(name):
            raise InputError(
                "the teacher was not built from its own configuration",
                where=f"{checkpoint} · {name}",
                expected=stored.get(name),
                found=built.get(name),
            )
