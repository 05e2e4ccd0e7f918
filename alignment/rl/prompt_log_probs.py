"""Prompt log-probs of an inference engine, as a teacher's tables [seq,k].

vLLM answers ``prompt_logprobs=k`` with one entry per prompt token: None for the first, else a mapping from token id to
an object (or a JSON mapping) with ``logprob`` and ``rank``. An entry holds the k most likely tokens, and the token that
really stands there as a k+1-st where it is not among them. Entry i + 1 is what position i predicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alignment.errors import InputError

Entries = Sequence[Mapping[Any, Any] | None]


@dataclass(frozen=True, kw_only=True)
class TopKTables:
    """``log_probs`` [s,k] float32 (−inf where there is no entry) and ``indices`` [s,k] int64 of one sequence.

    Row i is what position i predicts, the convention of logits: it belongs to the label of token i + 1. The last row,
    which predicts a token that is not there, is −inf. Rows are sorted, most likely first.
    """

    log_probs: Tensor
    indices: Tensor


def parse_prompt_log_probs(entries: Entries, token_ids: Sequence[int], *, k: int) -> TopKTables:
    """The tables of a sequence from an engine's prompt log-probs.

    Of each entry the k most likely tokens are kept, by log-prob and then by rank; the token that was really there is
    dropped where it was only appended. An entry with fewer tokens leaves −inf behind them, None or an empty one a
    whole row of −inf, which the loss passes over.

    Args:
        entries: one per prompt token, the first None.
        token_ids: the prompt that was sent. Every entry names the token that stands there, so a list that is off by one
            token, or was tokenised anew, is found out.
        k: columns.

    Raises:
        InputError: another number of entries than tokens, a first token with an entry, or an entry that does not know
            the token it is for; with the position.
    """
    if k < 1:
        raise InputError("a table has at least one column", where="gkd_logits_topk", expected="≥ 1", found=k)
    if len(entries) != len(token_ids):
        raise InputError(
            "there is one prompt log-prob per token",
            where="prompt_logprobs",
            expected=f"{len(token_ids)} entries",
            found=f"{len(entries)} entries",
            next_step="send token ids, not text, so that nothing is tokenised anew",
        )
    if entries and entries[0] is not None:
        raise InputError(
            "the first token has nothing before it, so no log-prob",
            where="prompt_logprobs, token 0",
            expected=None,
            found=f"{len(entries[0])} tokens",
            next_step="the list is shifted by one, or its first entry was cut off",
        )
    log_probs = torch.full((len(token_ids), k), float("-inf"), dtype=torch.float32)
    indices = torch.zeros((len(token_ids), k), dtype=torch.int64)
    for position, entry in enumerate(entries[1:], start=1):
        if not entry:
            continue
        by_token = {int(token): (_field(said, "logprob"), _field(said, "rank")) for token, said in entry.items()}
        if int(token_ids[position]) not in by_token:
            raise InputError(
                "the log-probs of a position do not know the token that stands there",
                where=f"prompt_logprobs, token {position}",
                expected=f"an entry for token {int(token_ids[position])}",
                found=sorted(by_token),
                next_step="teacher and student must see the same token ids, not shifted and not tokenised anew",
            )
        best = sorted(by_token.items(), key=_most_likely_first)[:k]
        for column, (token, (log_prob, _)) in enumerate(best):
            log_probs[position - 1, column] = log_prob
            indices[position - 1, column] = token
    return TopKTables(log_probs=log_probs, indices=indices)


def entries_from_log_probs(log_probs: Tensor, token_ids: Sequence[int], *, k: int) -> list[dict[int, dict] | None]:
    """What vLLM would answer for these log-probs [s,v] of a sequence: the golden teacher speaks the same language.

    Ranks count from 1 and are those of the whole vocabulary.
    """
    entries: list[dict[int, dict] | None] = [None]
    values, order = log_probs.sort(dim=-1, descending=True, stable=True)
    for position, token in enumerate(token_ids[1:]):
        ids, said = order[position, :k].tolist(), values[position, :k].tolist()
        entry = {i: {"logprob": v, "rank": rank} for rank, (i, v) in enumerate(zip(ids, said), start=1)}
        if int(token) not in entry:
            rank = int((order[position] == int(token)).nonzero()) + 1
            entry[int(token)] = {"logprob": float(log_probs[position, int(token)]), "rank": rank}
        entries.append(entry)
    return entries


def _most_likely_first(item: tuple[int, tuple[float, int | None]]) -> tuple[float, float, int]:
    token, (log_prob, rank) = item
    return -log_prob, float("inf") if rank is None else rank, token


def _field(said: Any, name: str) -> Any:
    if isinstance(said, Mapping):
        return said.get(name)
    return getattr(said, name, None)
