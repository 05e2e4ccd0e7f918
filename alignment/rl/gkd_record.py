"""The batches a distillation trained on, as :mod:`alignment.rl.batch_record` keeps those of DAPO.

A sample of distillation is one sequence with labels; here it is cut where its first label stands, so that prompts and
responses have the shapes that whoever compares runs reads. What the teacher said stands beside each token.
"""

from __future__ import annotations

import numpy as np

from alignment.rl.batch import Batch
from alignment.rl.batch_record import BatchRecord, BatchRecorder, batch_path, sample_numbers, write_batch
from alignment.rl.distill_loss import IGNORED


def student_record(batch: Batch, *, step: int) -> BatchRecord:
    """What a step of distillation trained on.

    Tensors: ``prompts`` and ``prompt_mask`` [b,p], left padded; ``responses`` and ``response_mask`` [b,r], right
    padded, with 0 also on what a user said between two turns; ``teacher_log_prob`` [b,r], the teacher's log-prob of
    each token that counts, 0 elsewhere; ``dataset_response`` [b], 1 where the response is the data set's.
    """
    ids, labels = batch["input_ids"].cpu().numpy(), batch["labels"].cpu().numpy()
    lengths = (batch["attention_mask"] != 0).sum(1).tolist()
    said = batch["teacher_token_log_probs"].detach().cpu().float().numpy()
    places = []
    for row, length in enumerate(lengths):
        active = np.flatnonzero(labels[row] != IGNORED)
        # A sample whose response was cut off whole is all prompt.
        places.append((int(active[0]), int(active[-1]) + 1) if len(active) else (length, length))
    count = len(places)
    width = max(start for start, _ in places)
    longest = max(1, *(end - start for start, end in places))
    made = {
        "prompts": np.zeros((count, width), ids.dtype),
        "prompt_mask": np.zeros((count, width), np.int64),
        "responses": np.zeros((count, longest), ids.dtype),
        "response_mask": np.zeros((count, longest), np.int64),
        "teacher_log_prob": np.zeros((count, longest), said.dtype),
        "dataset_response": batch["dataset_response"].cpu().numpy(),
    }
    for row, (start, end) in enumerate(places):
        made["prompts"][row, width - start :] = ids[row, :start]
        made["prompt_mask"][row, width - start :] = 1
        counts = labels[row, start:end] != IGNORED
        made["responses"][row, : end - start] = ids[row, start:end]
        made["response_mask"][row, : end - start] = counts
        # The position before a token is the one that predicts it.
        made["teacher_log_prob"][row, : end - start] = np.where(counts, said[row, start - 1 : end - 1], 0)
    prompts = list(batch["prompt_id"])
    return BatchRecord(step=step, tensors=made, prompt_ids=prompts, samples=sample_numbers(prompts))


class GkdBatchRecorder(BatchRecorder):
    """Keeps every step's batch once the teacher has spoken."""

    def keep(self, step: int, batch: Batch) -> None:
        """Writes the batch of ``step``."""
        write_batch(batch_path(self._run_dir, step), student_record(batch, step=step))
