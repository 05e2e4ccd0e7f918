"""Which models a stage of the pipeline computes with, whatever engine holds them."""

from __future__ import annotations

from typing import Any

from torch import nn

from alignment.errors import UnavailableError

HOLDERS = {
    "rollout": "engine",
    "old_log_prob": "actor",
    "ref_log_prob": "reference",
    "values": "critic",
    "update_critic": "critic",
    "update_actor": "actor",
    "teacher_log_prob": "teacher",
    "update_student": "actor",
}
"""The attribute of the worker that holds the stage's engine."""


def stage_models(worker: Any, stage: str) -> dict[str, nn.Module]:
    """The models of ``stage`` by the prefix of their modules' names; empty where this worker has no part in it.

    Raises:
        UnavailableError: the stage's engine keeps its model where no hook can reach it.
    """
    engine = getattr(worker, HOLDERS.get(stage, ""), None) if stage in HOLDERS else None
    if engine is None:
        return {}
    engine = getattr(engine, "engine", None) or engine  # a teacher wraps the engine it asks
    chunks = getattr(engine, "modules", None)
    if isinstance(chunks, list):  # the pipeline stages of megatron-core that live on this rank
        return {str(i) if len(chunks) > 1 else "": chunk for i, chunk in enumerate(chunks)}
    model = getattr(engine, "model", None)
    if isinstance(model, nn.Module):
        return {"": model}
    try:
        named = dict(engine.named_modules())
    except Exception as error:
        raise UnavailableError(
            f"the model of this engine cannot be watched ({error})", where=f"{stage}, {type(engine).__name__}",
            next_step="watch the training stages, or let the engine run in the worker's process",
        ) from None  # fmt: skip
    return {"": named[""]} if "" in named else {}
