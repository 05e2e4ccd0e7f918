"""Teacher replicas: inference actors that score whole sequences and answer with their most likely tokens.

A replica is asked as an inference server is: prompt log-probs of the k most likely tokens, one new token at most, and
temperature 0, so that nothing of the sampling settings of the student reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from alignment.devices.base import Device
from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.distill_loss import active_positions, shift_labels
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_stages import place_tables
from alignment.rl.prompt_log_probs import entries_from_log_probs, parse_prompt_log_probs
from alignment.rl.teacher import require_own_config

MAX_TOKENS = 1
"""Of a request to a replica: it is there for the prompt's log-probs, the token it has to make is thrown away."""


class TeacherReplicas:
    """The driver's side of the replicas.

    Args:
        replicas: each answers sequences with their prompt log-probs, in vLLM's form and in order.
        k: ``gkd.gkd_logits_topk``.

    Raises:
        InputError: no replicas.
    """

    def __init__(self, replicas: Sequence[Callable[[list[list[int]], int], list]], *, k: int) -> None:
        if not replicas:
            raise InputError(
                "there are no teacher replicas", where="gkd.teacher_replicas", expected="at least 1", found=0
            )
        self._replicas, self._k = list(replicas), k

    def ask(self, sequences: Sequence[Sequence[int]]) -> list:
        """The answers for token sequences, in order: ⌈n / replicas⌉ consecutive ones for each, at the same time."""
        sequences = [list(map(int, s)) for s in sequences]
        size = -(-len(sequences) // len(self._replicas))
        shares = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        with ThreadPoolExecutor(max_workers=len(self._replicas)) as pool:
            parts = pool.map(lambda pair: pair[0](pair[1], self._k), zip(self._replicas, shares))
            answers = [answer for part in parts for answer in part]
        if len(answers) != len(sequences):
            raise InputError(
                "the replicas did not answer every sequence",
                where="teacher replicas",
                expected=len(sequences),
                found=len(answers),
            )
        return answers

    def score(self, batch: Batch) -> Batch:
        """The stage ``teacher_log_prob``: adds the tables and the log-prob of each active token where a table lists it.

        A token that is not among the k most likely is listed by the engine beside them; its log-prob is taken from
        there, so that ``teacher_token_log_probs`` is complete.
        """
        own = "teacher_input_ids" in batch
        ids = batch["teacher_input_ids" if own else "input_ids"]
        mask = batch["teacher_attention_mask" if own else "attention_mask"] != 0
        labels = batch["teacher_labels" if own else "labels"]
        sequences = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
        answers = self.ask(sequences)
        tables = [parse_prompt_log_probs(a, s, k=self._k) for a, s in zip(answers, sequences, strict=True)]
        placed = place_tables([t.log_probs for t in tables], [t.indices for t in tables], batch, k=self._k)
        values = torch.zeros(batch["labels"].shape)
        ours, theirs = active_positions(batch["labels"]), active_positions(labels)
        following = shift_labels(labels)
        for row, answer in enumerate(answers):
            said = [
                _log_prob(answer[position + 1], int(following[row, position]))
                for position in theirs[row].nonzero().flatten().tolist()
            ]
            values[row, ours[row]] = torch.tensor(said)
        return batch.add({**placed, "teacher_token_log_probs": values})


class GoldenReplica:
    """A replica on the golden model: the worker's side."""

    def __init__(self, config: GkdConfig, *, device: Device) -> None:
        from alignment.rl.worker import DTYPES
        from alignment.weights.checkpoint import load_model

        checkpoint = Path(config.gkd.teacher_model)
        self._model = load_model(checkpoint, dtype=DTYPES[config.gkd.teacher_dtype], device=device.torch_device)
        require_own_config(self._model, checkpoint)
        self._device = device

    def prompt_log_probs(self, sequences: Sequence[Sequence[int]], k: int) -> list:
        """Per sequence what vLLM answers to ``prompt_logprobs=k``."""
        answers = []
        with torch.no_grad():
            for sequence in sequences:
                ids = torch.tensor([list(sequence)], device=self._device.torch_device)
                logits = self._model(ids)[0]
                wide = logits if logits.dtype == torch.float64 else logits.float()
                answers.append(entries_from_log_probs(torch.log_softmax(wide, -1).cpu(), sequence, k=k))
        return answers


class VllmReplica:
    """A replica on vLLM: the worker's side."""

    def __init__(self, config: GkdConfig, *, device: Device) -> None:
        from alignment.backends.vllm_rollout import VllmRollout
        from alignment.rl.worker import DTYPES

        self._engine = VllmRollout(
            dtype=DTYPES[config.gkd.teacher_dtype],
            device=device,
            load_format="safetensors",
            checkpoint=Path(config.gkd.teacher_model),
            seed=config.gkd.seed,
            # One more for the token that a request has to make.
            max_model_len=config.encoded_length + MAX_TOKENS,
            engine_options={"max_logprobs": config.gkd.gkd_logits_topk},
        )

    def prompt_log_probs(self, sequences: Sequence[Sequence[int]], k: int) -> list:
        """Per sequence vLLM's own prompt log-probs, as plain mappings."""
        return self._engine.prompt_log_probs([list(s) for s in sequences], k=k, max_tokens=MAX_TOKENS)

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()


def replica_of(config: GkdConfig, *, device: Device):
    """The replica of this worker, on ``gkd.teacher_engine``."""
    kind = VllmReplica if config.gkd.teacher_engine == "vllm" else GoldenReplica
    return kind(config, device=device)


def _log_prob(entry: Mapping[Any, Any] | None, token: int) -> float:
    said = (entry or {}).get(token)
    if said is None:
        return 0.0
    return float(said["logprob"] if isinstance(said, Mapping) else said.logprob)
