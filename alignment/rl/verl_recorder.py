"""Keeps verl's batches: what its own rollout dump leaves out (token ids, log-probs of both engines, advantages).

verl's ``trainer.rollout_data_dir`` writes decoded text and scores. The trainer has the whole batch in hand at that
moment; :func:`install` lets it write the rest as well, in the form of :mod:`alignment.rl.batch_record`. Works on every
device, with ``trainer.use_v1=False``; where the hook is missing the run goes on without it and says so.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from alignment.backends.after_import import after_import

RECORD = "ALIGNMENT_VERL_RECORD"
"""Environment variable: the run directory below which batches are kept."""

TRAINER = "verl.trainer.ppo.ray_trainer"


def install() -> None:
    """Wraps the dump of rollouts of verl's trainer, in whichever process imports it."""
    after_import(TRAINER, record_dumped_batches)


def record_dumped_batches(module: ModuleType) -> None:
    """Wraps ``RayPPOTrainer._log_rollout_data`` of ``module``: the batch is recorded below ``$ALIGNMENT_VERL_RECORD``."""
    trainer = module.RayPPOTrainer
    stock = getattr(trainer, "_log_rollout_data", None)
    if stock is None:
        logging.getLogger(__name__).warning("this verl dumps no rollouts: batches are not recorded")
        return

    @functools.wraps(stock)
    def log_rollout_data(self, batch, *arguments, **named):
        from alignment.rl.batch_record import batch_path, write_batch

        record = batch_record(batch.batch, batch.non_tensor_batch, step=self.global_steps)
        write_batch(batch_path(Path(os.environ[RECORD]), self.global_steps), record)
        return stock(self, batch, *arguments, **named)

    trainer._log_rollout_data = log_rollout_data


def batch_record(tensors: Mapping[str, Any], names: Mapping[str, Any], *, step: int):
    """verl's batch as a :class:`~alignment.rl.batch_record.BatchRecord`.

    Args:
        tensors: ``DataProto.batch``: field → tensor [b, …].
        names: ``DataProto.non_tensor_batch``: field → array [b]; ``extra_info.prompt_id`` or ``extra_info.index`` names a
            prompt, and where neither is there its tokens do.
        step: number of the step, from 1.
    """
    from alignment.rl.batch_record import FIELDS, BatchRecord, sample_numbers

    arrays = {name: _array(tensors[name]) for name in FIELDS if name in tensors.keys()}
    if "attention_mask" in tensors.keys() and "prompts" in arrays:
        arrays["prompt_mask"] = _array(tensors["attention_mask"][:, : arrays["prompts"].shape[1]])
    count = len(arrays["responses"])
    infos = names.get("extra_info", [{}] * count)
    prompts = [_prompt_name(infos[i], arrays, i) for i in range(count)]
    # verl numbers the samples of a batch before anything reorders them.
    order = names.get("priority")
    if order is not None and len(order) == count:
        rank = {p: sorted(int(order[i]) for i in range(count) if prompts[i] == p) for p in set(prompts)}
        samples = tuple(rank[prompts[i]].index(int(order[i])) for i in range(count))
    else:
        samples = sample_numbers(prompts)
    return BatchRecord(step=step, tensors=arrays, prompt_ids=tuple(prompts), samples=samples)


def _prompt_name(info: Any, arrays: Mapping[str, Any], row: int) -> str:
    if isinstance(info, Mapping):
        for key in ("prompt_id", "index"):
            if info.get(key) is not None:
                return str(info[key])
    return hashlib.sha256(arrays["prompts"][row].tobytes()).hexdigest()[:16]


def _array(tensor: Any):
    import torch

    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).contiguous().numpy()
