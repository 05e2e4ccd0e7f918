"""Keeps verl's batches: what its own rollout dump leaves out (token ids, log-probs of both engines, advantages).

verl's ``trainer.rollout_data_dir`` writes decoded text and scores. The trainer has the whole batch in hand at that
moment (the legacy one) or in its transfer queue (``trainer.use_v1=True``); :func:`install` lets it write the rest as
well, in the form of :mod:`alignment.rl.batch_record`. Works on every device; where the hook is missing the run goes on
without it and says so.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from alignment.backends.after_import import after_import

RECORD = "ALIGNMENT_VERL_RECORD"
"""Environment variable: the run directory below which batches are kept."""

TRAINER, V1_TRAINER = "verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base"
# What the queue of the other trainer calls things, in our words.
QUEUED = {"rm_scores": "token_level_scores"}


def install() -> None:
    """Wraps the dump of rollouts of verl's trainers, in whichever process imports them."""
    after_import(TRAINER, record_dumped_batches)
    after_import(V1_TRAINER, record_queued_batches)


def record_dumped_batches(module: ModuleType) -> None:
    """Wraps ``RayPPOTrainer._log_rollout_data`` of ``module``: batches are kept below ``$ALIGNMENT_VERL_RECORD``."""
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


def record_queued_batches(module: ModuleType) -> None:
    """The same for ``PPOTrainer`` of the v1 ``module``, whose batch lies in a transfer queue, sample by sample."""
    trainer = module.PPOTrainer
    stock = getattr(trainer, "_log_rollout_data", None)
    if stock is None:
        logging.getLogger(__name__).warning("this verl dumps no rollouts: batches are not recorded")
        return

    @functools.wraps(stock)
    def log_rollout_data(self, batch, *arguments, **named):
        from alignment.rl.batch_record import FIELDS, batch_path, write_batch

        wanted = [*FIELDS, *QUEUED, "extra_info"]
        found = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=wanted)
        record = queued_record(batch.keys, found, step=self.global_steps)
        write_batch(batch_path(Path(os.environ[RECORD]), self.global_steps), record)
        return stock(self, batch, *arguments, **named)

    trainer._log_rollout_data = log_rollout_data


def queued_record(keys: Sequence[str], found: Mapping[str, Any], *, step: int):
    """Samples of a transfer queue as a :class:`~alignment.rl.batch_record.BatchRecord`, in the order of their names.

    Args:
        keys: ``<uid>_<number of the sample>_<number of the turn>`` of each sample; repeated ones (padding) count once.
        found: field → one tensor per sample, of different lengths; ``extra_info`` as in :func:`batch_record`.
        step: number of the step, from 1.
    """
    import torch

    from alignment.rl.batch_record import BatchRecord

    first = {key: i for i, key in reversed(list(enumerate(keys)))}
    rows = {
        QUEUED.get(name, name): [row.detach().cpu() for row in found[name].unbind()]
        for name in found.keys()
        if name != "extra_info" and isinstance(found[name], torch.Tensor)
    }
    infos = list(found["extra_info"]) if "extra_info" in found.keys() else [{}] * len(keys)
    named = []
    for i in first.values():
        uid, number, turn = keys[i].rsplit("_", 2)
        named.append((_told_name(infos[i]) or uid, int(number), int(turn), i))
    # A conversation of several turns is several samples; the last one is the one that is scored.
    last = {(name, number): i for name, number, _, i in sorted(named)}
    kept = {field: [all_rows[i] for i in last.values()] for field, all_rows in rows.items()}
    tensors = {field: _padded(some, left=field == "prompts") for field, some in kept.items()}
    if "prompts" in kept:
        tensors["prompt_mask"] = _padded([torch.ones_like(row) for row in kept["prompts"]], left=True)
    return BatchRecord(
        step=step, tensors=tensors, prompt_ids=tuple(n for n, _ in last), samples=tuple(k for _, k in last)
    )


def batch_record(tensors: Mapping[str, Any], names: Mapping[str, Any], *, step: int):
    """verl's batch as a :class:`~alignment.rl.batch_record.BatchRecord`.

    Args:
        tensors: ``DataProto.batch``: field → tensor [b, …].
        names: ``DataProto.non_tensor_batch``: field → array [b]; ``extra_info.prompt_id`` or ``extra_info.index`` names
            a prompt, and where neither is there its tokens do.
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


def _padded(rows: Sequence[Any], *, left: bool):
    """Rows of different lengths as one array, with zeros where they are shorter than the longest."""
    import torch

    width = max(len(row) for row in rows)
    short = [width - len(row) for row in rows]
    sides = [(n, 0) if left else (0, n) for n in short]
    return _array(torch.stack([torch.nn.functional.pad(row, side) for row, side in zip(rows, sides, strict=True)]))


def _prompt_name(info: Any, arrays: Mapping[str, Any], row: int) -> str:
    told = _told_name(info)
    return told or hashlib.sha256(arrays["prompts"][row].tobytes()).hexdigest()[:16]


def _told_name(info: Any) -> str | None:
    """What the row of the data set calls its prompt, if it does."""
    if not isinstance(info, Mapping):
        return None
    return next((str(info[key]) for key in ("prompt_id", "index") if info.get(key) is not None), None)


def _array(tensor: Any):
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    # Token ids and masks: a batch of a large run is gigabytes as it is.
    return (tensor.int() if tensor.dtype == torch.int64 else tensor).contiguous().numpy()
