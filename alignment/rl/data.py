"""Prompts as token ids, from verl's parquet, reasoning-gym or materialised, and the order in which training meets them.

A :class:`PromptSet` is what a run trains on: token ids, reference answers and data sources, with a hash of all of it. A
:class:`PromptSampler` walks through it in an order that is a function of (seed, epoch) alone and resumes exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from alignment.errors import InputError, UnavailableError
from alignment.files import read_json, write_atomically, write_json
from alignment.numerics.random import portable_permutation
from alignment.rl.batch import Batch
from alignment.rl.tasks import Question
from alignment.rl.tokenizer import Tokenizer

FORMAT_VERSION = 1
TRUNCATIONS = ("error", "left", "right", "middle")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready for the rollout.

    Attributes:
        prompt_id: stable name, unique in its set.
        token_ids: the chat template's tokens up to the start of the answer.
        data_source: which verifier judges the answer.
        ground_truth: the reference answer.
        metadata: JSON for verifiers that read more than the reference answer; empty for those that do not.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    data_source: str
    ground_truth: str
    metadata: str = ""


class PromptSet(Sequence[Prompt]):
    """An immutable sequence of prompts with unique ids.

    Args:
        prompts: at least one.
        tokenizer_hash: SHA-256 of the ``tokenizer.json`` that made the token ids.
        dropped: how many rows were left out for their length when the set was built.
        where: what errors call this set.

    Raises:
        InputError: no prompts, an empty prompt, or a repeated prompt id.
    """

    def __init__(
        self, prompts: Iterable[Prompt], *, tokenizer_hash: str, dropped: int = 0, where: object = "prompts"
    ) -> None:
        self._prompts = tuple(prompts)
        self.tokenizer_hash = tokenizer_hash
        self.dropped = dropped
        if not self._prompts:
            raise InputError("the data set has no prompts", where=where, found=f"{dropped} dropped for their length")
        for row, prompt in enumerate(self._prompts):
            if not prompt.token_ids:
                raise InputError("the prompt is empty", where=f"{where}, row {row}", expected="at least one token")
        repeated = [i for i, n in Counter(p.prompt_id for p in self._prompts).items() if n > 1]
        if repeated:
            raise InputError(
                "two prompts share an id", where=where, expected="unique prompt ids", found=", ".join(repeated[:3])
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        return self._prompts[index]

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(p.token_ids) for p in self._prompts)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over ids, tokens, sources, answers and metadata of all prompts, in order."""
        digest = hashlib.sha256()
        for p in self._prompts:
            fields = [p.prompt_id, list(p.token_ids), p.data_source, p.ground_truth, p.metadata]
            digest.update(json.dumps(fields, separators=(",", ":")).encode() + b"\n")
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """Materialises the set as ``<path>.safetensors`` (token ids, lengths) and ``<path>.json`` (everything else)."""
        from safetensors.torch import save_file

        path = Path(path)
        flat = torch.tensor([t for p in self._prompts for t in p.token_ids], dtype=torch.int32)
        lengths = torch.tensor([len(p.token_ids) for p in self._prompts], dtype=torch.int32)
        write_atomically(
            path.with_suffix(".safetensors"), lambda beside: save_file({"token_ids": flat, "lengths": lengths}, beside)
        )
        columns = {
            name: [getattr(p, name) for p in self._prompts]
            for name in ("prompt_id", "data_source", "ground_truth", "metadata")
        }
        write_json(
            path.with_suffix(".json"),
            {
                "format_version": FORMAT_VERSION,
                "content_hash": self.content_hash,
                "tokenizer_hash": self.tokenizer_hash,
                "columns": columns,
            },
        )

    @classmethod
    def load(cls, path: str | Path, *, tokenizer: Tokenizer | None = None) -> PromptSet:
        """Reads what :meth:`save` wrote; needs neither ``tokenizers`` nor reasoning-gym.

        Args:
            path: with or without the suffix.
            tokenizer: when given, the one that must have made the token ids.

        Raises:
            InputError: a file is missing, corrupted or of another version, or the tokens are another tokenizer's.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(path)
        header = read_json(path.with_suffix(".json"))
        tensors_path = path.with_suffix(".safetensors")
        if not isinstance(header, dict) or header.get("format_version") != FORMAT_VERSION:
            found = header.get("format_version") if isinstance(header, dict) else type(header).__name__
            raise InputError(
                "the prompt file has another format version",
                where=path.with_suffix(".json"),
                expected=FORMAT_VERSION,
                found=found,
            )
        try:
            tensors = load_file(tensors_path)
            lengths = tensors["lengths"].tolist()
            pieces = tensors["token_ids"].split(lengths)
            columns = header["columns"]
            prompts = [
                Prompt(
                    token_ids=tuple(ids.tolist()),
                    **{name: values[i] for name, values in columns.items()},
                )
                for i, ids in enumerate(pieces)
            ]
            loaded = cls(prompts, tokenizer_hash=header["tokenizer_hash"], where=path)
        except FileNotFoundError:
            raise InputError("the file does not exist", where=tensors_path) from None
        except (SafetensorError, KeyError, IndexError, TypeError, RuntimeError, AttributeError) as error:
            raise InputError(f"the prompt file is corrupted ({error!r})", where=tensors_path) from None
        if loaded.content_hash != header.get("content_hash") or any(len(c) != len(loaded) for c in columns.values()):
            raise InputError(
                "the prompts are not those the file was written with",
                where=path,
                expected=f"content hash {header.get('content_hash')}",
                found=loaded.content_hash,
                next_step="restore the file, or make it again with scripts/make_rl_data.py",
            )
        if tokenizer is not None and tokenizer.content_hash != loaded.tokenizer_hash:
            raise InputError(
                "the prompts were made with another tokenizer",
                where=path,
                expected=f"tokenizer.json with SHA-256 {loaded.tokenizer_hash}",
                found=f"{tokenizer.content_hash} ({tokenizer.folder})",
            )
        return loaded


def from_questions(questions: Sequence[Question], tokenizer: Tokenizer) -> PromptSet:
    """The prompts of generated questions, each asked by the user in the tokenizer's chat template."""
    prompts = [
        Prompt(
            prompt_id=q.prompt_id,
            token_ids=tuple(tokenizer.encode_chat([{"role": "user", "content": q.question}])),
            data_source=q.data_source,
            ground_truth=q.answer,
            metadata=q.verifier_metadata,
        )
        for q in questions
    ]
    return PromptSet(prompts, tokenizer_hash=tokenizer.content_hash, where="questions")


def from_parquet(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    filter_overlong_prompts: bool = False,
    truncation: str = "error",
    prompt_key: str = "prompt",
) -> PromptSet:
    """Reads verl's parquet format.

    Columns: ``prompt`` (list of {role, content}), ``data_source``, ``reward_model`` with ``ground_truth``, and
    ``extra_info`` with ``index`` (optionally ``prompt_id``, ``metadata``). The options' names are verl's (``data.*``).

    Args:
        max_prompt_length: tokens, after the chat template.
        filter_overlong_prompts: leave out longer prompts and count them in ``dropped``.
        truncation: what happens to a longer prompt that is not left out: "error", or cut "left", "right" or "middle".
        prompt_key: name of the prompt column.

    Raises:
        InputError: no such file, not parquet, a missing column or field, no rows, a malformed or empty prompt, or an
            overlong one under ``truncation="error"``.
        UnavailableError: pyarrow is not installed.
    """
    if truncation not in TRUNCATIONS:
        raise InputError(
            "unknown truncation", where="data.truncation", expected=" | ".join(TRUNCATIONS), found=truncation
        )
    rows = _parquet_rows(Path(path), ("data_source", prompt_key, "reward_model", "extra_info"))
    prompts, dropped = [], 0
    for number, row in enumerate(rows):
        where = f"{path}, row {number}"
        token_ids = tokenizer.encode_chat(_messages(row[prompt_key], f"{where}, {prompt_key}"))
        if len(token_ids) > max_prompt_length:
            if filter_overlong_prompts:
                dropped += 1
                continue
            token_ids = _truncate(token_ids, max_prompt_length, truncation, where)
        extra = row["extra_info"]
        index = _field(extra, "index", f"{where}, extra_info")
        source = row["data_source"]
        if not isinstance(source, str):
            raise InputError("data_source is not a string", where=where, found=type(source).__name__)
        prompts.append(
            Prompt(
                prompt_id=str(extra.get("prompt_id") or f"{source}-{index}"),
                token_ids=tuple(token_ids),
                data_source=source,
                ground_truth=_text(
                    _field(row["reward_model"], "ground_truth", f"{where}, reward_model"), f"{where}, reward_model"
                ),
                metadata=extra.get("metadata") or "",
            )
        )
    return PromptSet(prompts, tokenizer_hash=tokenizer.content_hash, dropped=dropped, where=path)


def write_parquet(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Writes rows of verl's format (:func:`alignment.rl.tasks.verl_rows`)."""
    arrow, parquet = _pyarrow()
    table = arrow.Table.from_pylist([dict(row) for row in rows])
    write_atomically(Path(path), lambda beside: parquet.write_table(table, beside))


def prompt_batch(prompts: Sequence[Prompt], *, pad_token_id: int, prompt_length: int | None = None) -> Batch:
    """The batch a training step starts from: one row per prompt, left padded.

    Fields: ``prompts`` [b,p] int64, ``prompt_mask`` [b,p] int64; lists ``uid`` (the prompt's id), ``prompt_id``,
    ``data_source``, ``ground_truth``, ``metadata``.

    Args:
        pad_token_id: fills the left.
        prompt_length: p; the longest prompt when None.

    Raises:
        InputError: no prompts, or one longer than ``prompt_length``.
    """
    if not prompts:
        raise InputError("a batch needs at least one prompt", where="prompt_batch")
    longest = max(prompts, key=lambda p: len(p.token_ids))
    width = prompt_length or len(longest.token_ids)
    if len(longest.token_ids) > width:
        raise InputError(
            "the prompt does not fit",
            where=f"prompt {longest.prompt_id}",
            expected=f"at most {width} tokens (data.max_prompt_length)",
            found=len(longest.token_ids),
        )
    ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        mask[row, width - len(prompt.token_ids) :] = 1
    names = ("prompt_id", "data_source", "ground_truth", "metadata")
    meta = {name: [getattr(p, name) for p in prompts] for name in names}
    return Batch({"prompts": ids, "prompt_mask": mask}, {"uid": list(meta["prompt_id"]), **meta})


def prompt_ids_hash(prompt_ids: Iterable[str]) -> str:
    """SHA-256 of a step's prompt ids in order: two runs saw the same prompts when these agree at every step."""
    return hashlib.sha256("\n".join(prompt_ids).encode()).hexdigest()


class PromptSampler:
    """Walks through a prompt set in batches; the order is a function of (seed, epoch) and the position is a state.

    Each epoch is one permutation (Philox keyed by seed and epoch); what does not fill a last batch is left out of that
    epoch, as verl's data loader does (``drop_last``).

    Args:
        prompts: the set.
        batch_size: prompts per batch.
        seed: of the order.
        shuffle: False keeps the set's order in every epoch.

    Raises:
        InputError: the batch is larger than the set, or not positive.
    """

    def __init__(self, prompts: PromptSet, *, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= batch_size <= len(prompts):
            raise InputError(
                "the batch does not fit the data set",
                where="data.train_batch_size",
                expected=f"1 … {len(prompts)}",
                found=batch_size,
            )
        self.prompts = prompts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0
        self._order: tuple[int, list[int]] | None = None

    def __iter__(self) -> Iterator[list[Prompt]]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> list[Prompt]:
        """The next ``batch_size`` prompts."""
        if self.position + self.batch_size > len(self.prompts):
            self.epoch, self.position = self.epoch + 1, 0
        order = self._epoch_order()
        start, self.position = self.position, self.position + self.batch_size
        return [self.prompts[i] for i in order[start : self.position]]

    def reserve(self, step: int, count: int) -> list[Prompt]:
        """``count`` prompts set aside for regeneration at ``step``, a function of (seed, step) alone.

        Drawing from it moves nothing, so the prompts of later steps do not depend on how many groups were filtered out.
        They may coincide with prompts of this or another step.
        """
        if not 0 <= count <= len(self.prompts):
            raise InputError(
                "the reserve does not fit the data set",
                where="reserve",
                expected=f"0 … {len(self.prompts)}",
                found=count,
            )
        order = portable_permutation(len(self.prompts), seed=self.seed, stream=f"prompts/reserve/{step}")
        return [self.prompts[int(i)] for i in order[:count]]

    def state_dict(self) -> dict[str, Any]:
        """Where the walk stands, and what it walks through."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state.

        Raises:
            InputError: the state is of another data set, seed, batch size or shuffling, or lacks a key.
        """
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise InputError(
                    "the saved data position belongs to another run",
                    where=f"data position, {name}",
                    expected=mine,
                    found=state.get(name),
                    next_step="resume with the configuration and data the checkpoint was written with",
                )
        for name in ("epoch", "position"):
            if type(state.get(name)) is not int or state[name] < 0:
                raise InputError(
                    "the saved data position is broken", where=f"data position, {name}", found=state.get(name)
                )
        self.epoch, self.position = state["epoch"], state["position"]

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "content_hash": self.prompts.content_hash,
        }

    def _epoch_order(self) -> list[int]:
        if self._order is None or self._order[0] != self.epoch:
            size = len(self.prompts)
            stream = f"prompts/epoch/{self.epoch}"
            order = (
                portable_permutation(size, seed=self.seed, stream=stream).tolist()
                if self.shuffle
                else list(range(size))
            )
            self._order = (self.epoch, order)
        return self._order[1]


def _parquet_rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    arrow, parquet = _pyarrow()
    try:
        table = parquet.read_table(path)
        present = table.column_names
    except FileNotFoundError:
        raise InputError("the file does not exist", where=path) from None
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file is not readable as parquet ({error})", where=path) from None
    for name in columns:
        if name not in present:
            raise InputError(
                "the data lacks a column",
                where=path,
                expected=name,
                found=", ".join(present) or "no columns",
                next_step="the format is verl's: prompt, data_source, reward_model.ground_truth, extra_info.index",
            )
    try:
        return table.to_pylist()
    except ValueError as error:  # a text that is none
        raise InputError(f"the file is not readable as parquet ({error})", where=path) from None


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise InputError("a prompt is a non-empty list of chat messages", where=where, found=type(value).__name__)
    for message in value:
        for name in ("role", "content"):
            if not isinstance(_field(message, name, where), str):
                raise InputError(
                    "a chat message has text", where=f"{where}, {name}", found=type(message[name]).__name__
                )
    if not any(message["content"] for message in value):
        raise InputError("the prompt is empty", where=where)
    return value


def _field(value: Any, name: str, where: str) -> Any:
    if not isinstance(value, Mapping) or value.get(name) is None:
        found = (
            ", ".join(k for k, v in value.items() if v is not None)
            if isinstance(value, Mapping)
            else type(value).__name__
        )
        raise InputError("the data lacks a field", where=where, expected=name, found=found or "no fields")
    return value[name]


def _text(value: Any, where: str) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InputError(f"the answer has no form as text ({error})", where=f"{where}, ground_truth") from None


def _truncate(token_ids: list[int], limit: int, truncation: str, where: str) -> list[int]:
    if truncation == "error":
        raise InputError(
            "the prompt is too long",
            where=where,
            expected=f"at most {limit} tokens (data.max_prompt_length)",
            found=len(token_ids),
            next_step="raise data.max_prompt_length, set data.filter_overlong_prompts=true, or choose data.truncation",
        )
    if truncation == "left":
        return token_ids[-limit:]
    if truncation == "right":
        return token_ids[:limit]
    head = limit // 2
    return token_ids[:head] + token_ids[len(token_ids) - (limit - head) :]


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UnavailableError(f"pyarrow is needed for parquet ({error})", next_step="pip install pyarrow") from None
    return pyarrow, parquet
