"""The samples of one step in two runs, paired, and the tokens they share whatever else was sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alignment.numerics.random import portable_key
from alignment.rl.batch_record import BatchRecord


class SamplePairs:
    """The batches of one step of two runs, their samples paired by prompt and number."""

    def __init__(self, a: BatchRecord, b: BatchRecord) -> None:
        self.batches = a, b
        keys = [{key: i for i, key in enumerate(zip(x.prompt_ids, x.samples, strict=True))} for x in (a, b)]
        self.names = [key for key in keys[0] if key in keys[1]]
        self.rows = [(keys[0][key], keys[1][key]) for key in self.names]
        lost = sorted(set(keys[0]) ^ set(keys[1]))
        self.missing = f"{len(lost)} samples are in one of them only, {lost[0]} first" if lost else ""
        width = max(batch.tensors["responses"].shape[1] for batch in self.batches)
        self.tokens = [_ended(batch, width) for batch in self.batches]
        order = [np.array([row[side] for row in self.rows], dtype=np.int64) for side in (0, 1)]
        self.differs = self.tokens[0][order[0]] != self.tokens[1][order[1]]
        self.same = ~self.differs.any(1)

    @property
    def equal_tokens(self) -> int:
        """How many samples have the same response in both runs."""
        return int(self.same.sum())

    def first_difference(self) -> str:
        """The first sample and position where responses part."""
        at = int(np.argmin(self.same))
        prompt, sample = self.names[at]
        return f"prompt {prompt}, sample {sample}, token {int(self.differs[at].argmax())}"

    def has(self, name: str) -> bool:
        return all(name in batch.tensors for batch in self.batches)

    def gap(self, side: int) -> np.ndarray | None:
        """|trainer − engine| log-prob of every response token of one run."""
        tensors = self.batches[side].tensors
        if not {"old_log_probs", "rollout_log_probs"} <= tensors.keys():
            return None
        mask = tensors["response_mask"] != 0
        return np.abs(tensors["old_log_probs"].astype(np.float64) - tensors["rollout_log_probs"].astype(np.float64))[
            mask
        ]

    def shared(self, name: str) -> tuple[np.ndarray, str]:
        """Differences (b − a) of a per-token field over shared tokens, and where the largest of them is."""
        held = []
        for batch, tokens in zip(self.batches, self.tokens, strict=True):
            mask = batch.tensors["response_mask"] != 0
            keys = _prefix_keys(batch.prompt_ids, tokens)[:, : mask.shape[1]][mask]
            unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            values = batch.tensors[name].astype(np.float64)[mask]
            mean = np.bincount(inverse, weights=values, minlength=len(unique)) / np.bincount(
                inverse, minlength=len(unique)
            )
            held.append((unique, mean, np.argwhere(mask)[first]))
        common, in_a, in_b = np.intersect1d(held[0][0], held[1][0], assume_unique=True, return_indices=True)
        differences = held[1][1][in_b] - held[0][1][in_a]
        if not len(common):
            return differences, ""
        odd = ~np.isfinite(differences)
        worst = int(odd.argmax() if odd.any() else np.abs(differences).argmax())
        row, position = held[0][2][in_a[worst]]
        return differences, f"prompt {self.batches[0].prompt_ids[row]}, token {position}"


def _ended(batch: BatchRecord, width: int) -> np.ndarray:
    """Token ids [b, width] up to the last one that counts, −1 after it. Observations in between are in the prefix."""
    responses, mask = batch.tensors["responses"].astype(np.int64), batch.tensors["response_mask"] != 0
    length = np.where(mask.any(1), mask.shape[1] - mask[:, ::-1].argmax(1), 0)
    kept = np.where(np.arange(mask.shape[1])[None] < length[:, None], responses, -1)
    return np.pad(kept, ((0, 0), (0, width - kept.shape[1])), constant_values=-1)


def _prefix_keys(prompt_ids: Sequence[str], tokens: np.ndarray) -> np.ndarray:
    """A 64-bit name [b, r] for every token in its place: prompt, the tokens before it, and itself.

    A sum of scrambled (position, token) pairs; two different prefixes share a name with probability 2⁻⁶⁴.
    """
    prompts = np.array([portable_key("prompt", p) for p in prompt_ids], dtype=np.uint64)
    positions = np.arange(tokens.shape[1], dtype=np.uint64)[None] << np.uint64(32)
    pairs = _scrambled(positions + tokens.astype(np.uint64))
    return _scrambled(prompts[:, None] + np.cumsum(pairs, axis=1, dtype=np.uint64))


def _scrambled(numbers: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), elementwise modulo 2⁶⁴."""
    with np.errstate(over="ignore"):
        z = numbers + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
