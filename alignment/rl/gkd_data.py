"""Samples of distillation: where they come from, which ones are used, and how they become a batch.

A sample is a prompt and a response: the data set's, or the student's own. The student's view and, where the teacher is
to see another prompt (on-policy self-distillation, OPSD), the teacher's view share the response token by token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from alignment.errors import InputError, UnavailableError
from alignment.rl.batch import Batch
from alignment.rl.data import PromptSet, from_parquet
from alignment.rl.distill_loss import IGNORED, require_same_active
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.tokenizer import Tokenizer

NO_LIMIT = 1 << 40


@dataclass(frozen=True, kw_only=True)
class GkdSample:
    """A prompt and a response, in tokens.

    Attributes:
        sample_id: stable name, unique in its set.
        prompt_ids: up to the start of the response.
        response_ids: the response; that of the data set until the student has generated.
        response_mask: which of its tokens count (turns of a user between completions do not).
        on_policy: whether the student made the response.
        teacher_prompt_ids: what the teacher sees in place of the prompt (OPSD); None is the same.
        data_source, ground_truth, metadata: for verifiers.
    """

    sample_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] = ()
    response_mask: tuple[bool, ...] = ()
    on_policy: bool = False
    teacher_prompt_ids: tuple[int, ...] | None = None
    data_source: str = ""
    ground_truth: str = ""
    metadata: str = ""

    def stripped(self) -> GkdSample:
        """Without its response: what the student is asked to complete."""
        return dataclasses.replace(self, response_ids=(), response_mask=())

    def answered(self, ids: Sequence[int], mask: Sequence[bool]) -> GkdSample:
        """With a response of the student."""
        return dataclasses.replace(
            self, response_ids=tuple(map(int, ids)), response_mask=tuple(map(bool, mask)), on_policy=True
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; :meth:`from_json` gives an equal sample back."""
        data = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GkdSample:
        """The inverse of :meth:`to_json`."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})


class SampleSet(Sequence[GkdSample]):
    """An immutable sequence of samples with unique ids.

    Raises:
        InputError: no samples, or a repeated id.
    """

    def __init__(self, samples: Iterable[GkdSample], *, where: object = "samples") -> None:
        self._samples = tuple(samples)
        if not self._samples:
            raise InputError("the data set has no samples", where=where, expected="at least one")
        ids = [s.sample_id for s in self._samples]
        if len(set(ids)) != len(ids):
            repeated = next(i for i in ids if ids.count(i) > 1)
            raise InputError("two samples share an id", where=where, expected="unique ids", found=repeated)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index]

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over all samples, in order."""
        digest = hashlib.sha256()
        for sample in self._samples:
            digest.update(json.dumps(sample.to_json(), sort_keys=True, separators=(",", ":")).encode() + b"\n")
        return digest.hexdigest()


# Reading.


def load_samples(config: GkdConfig, tokenizer: Tokenizer) -> SampleSet:
    """The samples of ``data.train_files``.

    Parquet in verl's format and materialised prompts: the response is the reference answer. JSON lines (``.jsonl``):
    ``messages`` with the assistant's answer last (it may be missing where every generation is on-policy), and
    optionally ``id``, ``teacher_prompt`` (in place of the last user message in the teacher's view) or
    ``teacher_messages`` (in place of all), ``data_source``, ``ground_truth``.

    Raises:
        InputError: no files, or rows that are not so.
        UnavailableError: a file needs a package that is not installed.
    """
    if not config.data.train_files:
        raise InputError(
            "there is nothing to train on", where="data.train_files", expected="at least one file", found="none"
        )
    samples: list[GkdSample] = []
    for name in config.data.train_files:
        path = Path(name)
        samples += _conversations(path, tokenizer) if path.suffix == ".jsonl" else _questions(path, tokenizer, config)
    if config.gkd.lmbda < 1:
        silent = next((s for s in samples if not s.response_ids), None)
        if silent is not None:
            raise InputError(
                "off-policy generations need responses in the data set",
                where=f"{', '.join(config.data.train_files)}: sample {silent.sample_id}",
                expected="an assistant's message at the end",
                next_step="set gkd.lmbda=1, or use data with responses",
            )
    return SampleSet(samples, where=", ".join(config.data.train_files))


def _questions(path: Path, tokenizer: Tokenizer, config: GkdConfig) -> list[GkdSample]:
    prompts = None
    if path.suffix == ".parquet":
        try:
            # Longer ones are gkd.truncation_strategy's business.
            prompts = from_parquet(path, tokenizer, max_prompt_length=NO_LIMIT, prompt_key=config.data.prompt_key)
        except UnavailableError:
            if not path.with_suffix(".safetensors").is_file():
                raise
    prompts = prompts or PromptSet.load(path, tokenizer=tokenizer)
    made = []
    for p in prompts:
        answer = (*tokenizer.encode(p.ground_truth), tokenizer.eos_token_id)
        made.append(
            GkdSample(
                sample_id=p.prompt_id,
                prompt_ids=p.token_ids,
                response_ids=answer,
                response_mask=(True,) * len(answer),
                data_source=p.data_source,
                ground_truth=p.ground_truth,
                metadata=p.metadata,
            )
        )
    return made


def _conversations(path: Path, tokenizer: Tokenizer) -> list[GkdSample]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file cannot be read ({getattr(error, 'strerror', error)})", where=path) from None
    samples = []
    for number, line in enumerate(lines):
        where = f"{path}, line {number + 1}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the line is not JSON ({error})", where=where) from None
        if not isinstance(row, Mapping):
            raise InputError("a conversation is a mapping", where=where, found=type(row).__name__)
        samples.append(conversation_sample(row, tokenizer, where=where, default_id=f"{path.stem}-{number}"))
    return samples


def conversation_sample(
    row: Mapping[str, Any], tokenizer: Tokenizer, *, where: str = "sample", default_id: str = "0"
) -> GkdSample:
    """A sample from chat messages. See :func:`load_samples`.

    Raises:
        InputError: no messages, or a message without role and text.
    """
    messages = _checked_messages(row.get("messages"), f"{where}, messages")
    answer: tuple[int, ...] = ()
    if messages[-1]["role"] == "assistant":
        answer = (*tokenizer.encode(messages[-1]["content"]), tokenizer.eos_token_id)
        messages = messages[:-1]
    return GkdSample(
        sample_id=str(row.get("id", default_id)),
        prompt_ids=tuple(tokenizer.encode_chat(messages)),
        response_ids=answer,
        response_mask=(True,) * len(answer),
        teacher_prompt_ids=teacher_prompt(row, messages, tokenizer, where=where),
        data_source=str(row.get("data_source", "")),
        ground_truth=str(row.get("ground_truth", "")),
    )


def teacher_prompt(
    row: Mapping[str, Any], messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer, *, where: str = "sample"
) -> tuple[int, ...] | None:
    """Tokens of the teacher's own prompt, or None where it sees the student's.

    ``teacher_prompt`` takes the place of the *last* user message and leaves the others; ``teacher_messages`` of all.
    """
    if row.get("teacher_messages"):
        theirs = _checked_messages(row["teacher_messages"], f"{where}, teacher_messages")
        if theirs[-1]["role"] == "assistant":
            theirs = theirs[:-1]
    elif row.get("teacher_prompt"):
        theirs = [dict(m) for m in messages]
        last = next((m for m in reversed(theirs) if m["role"] == "user"), None)
        if last is None:
            raise InputError("the teacher's prompt has no user message to take the place of", where=where)
        last["content"] = row["teacher_prompt"]
    else:
        return None
    return tuple(tokenizer.encode_chat(theirs))


def _checked_messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise InputError("a sample is a non-empty list of chat messages", where=where, found=type(value).__name__)
    for message in value:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise InputError("a chat message has a role and text", where=where, found=repr(message)[:80])
    return [dict(m) for m in value]


# Choosing.


class OnPolicySchedule:
    """Which generations are on-policy: each with probability λ, from a generator of its own.

    The generator is Python's ``random.Random(seed)``, one ``random()`` per generation, as in ms-swift: the sequence is
    the same there and here, on every platform.
    """

    def __init__(self, *, lmbda: float, seed: int = 42) -> None:
        self.lmbda, self.seed = lmbda, seed
        self.load_state_dict({"draws": 0})

    def draw(self) -> bool:
        """Whether the next generation is on-policy."""
        self.draws += 1
        return self._random.random() < self.lmbda

    def state_dict(self) -> dict[str, int]:
        """How many were drawn."""
        return {"draws": self.draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues behind as many draws."""
        self._random = random.Random(self.seed)
        self.draws = int(state["draws"])
        for _ in range(self.draws):
            self._random.random()


def resample(
    samples: Sequence[GkdSample],
    *,
    fits: Callable[[GkdSample], bool],
    more: Callable[[], Sequence[GkdSample]],
    max_resample_times: int,
) -> tuple[list[GkdSample], int]:
    """The samples that fit, others in place of the rest, in the order in which they were found.

    Looks at no more than ``(max_resample_times + 1) · len(samples)`` samples altogether, as ms-swift does.

    Args:
        samples: as they were drawn.
        fits: whether a sample can be encoded.
        more: the next batch of others.

    Returns:
        As many samples as were given, and how many did not fit.

    Raises:
        InputError: there are not enough even so.
    """
    wanted, budget = len(samples), len(samples) * (max_resample_times + 1)
    kept: list[GkdSample] = []
    pending, looked_at = list(samples), 0
    while len(kept) < wanted and looked_at < budget:
        if not pending:
            pending = list(more())
            if not pending:
                break
        sample = pending.pop(0)
        looked_at += 1
        if fits(sample):
            kept.append(sample)
    if len(kept) < wanted:
        raise InputError(
            "too few samples fit",
            where="gkd.max_length",
            expected=f"{wanted} samples",
            found=f"{len(kept)} of the {looked_at} that were looked at",
            next_step="raise gkd.max_length or gkd.max_resample_times, or set gkd.truncation_strategy=left",
        )
    return kept, looked_at - wanted


# Encoding.


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """How long a sample may be, and what happens to longer ones; both views go through the same one.

    ``max_length`` is that of a prompt (with the data set's response). A training batch is encoded by :meth:`extended`.
    """

    max_length: int
    truncation_strategy: str = "delete"

    def extended(self, by: int) -> Encoder:
        """With room for a completion."""
        return dataclasses.replace(self, max_length=self.max_length + by)

    def fits(self, sample: GkdSample) -> bool:
        """Whether prompt and response are short enough, in both views."""
        prompts = [sample.prompt_ids, *([sample.teacher_prompt_ids] if sample.teacher_prompt_ids else [])]
        return all(len(p) + len(sample.response_ids) <= self.max_length for p in prompts)

    def truncated(self, ids: Sequence[int], *, where: object) -> Sequence[int]:
        """Any per-token sequence cut to ``max_length``.

        Raises:
            InputError: it is longer, and the strategy is ``delete``.
        """
        if len(ids) <= self.max_length:
            return ids
        if self.truncation_strategy == "delete":
            raise InputError(
                "the sample is too long",
                where=where,
                expected=f"at most {self.max_length} tokens",
                found=len(ids),
                next_step="raise gkd.max_length, or set gkd.truncation_strategy=left",
            )
        return ids[-self.max_length :] if self.truncation_strategy == "left" else ids[: self.max_length]


@dataclass(frozen=True, kw_only=True)
class View:
    """One model's view of a sample: tokens, and labels (the token where it counts, −100 elsewhere)."""

    input_ids: Sequence[int]
    labels: Sequence[int]


def encode_view(prompt_ids: Sequence[int], sample: GkdSample, encoder: Encoder) -> View:
    """A prompt followed by the sample's response."""
    ids = [*prompt_ids, *sample.response_ids]
    counted = [t if c else IGNORED for t, c in zip(sample.response_ids, sample.response_mask, strict=True)]
    where = f"sample {sample.sample_id}"
    ids = list(encoder.truncated(ids, where=where))
    labels = list(encoder.truncated([IGNORED] * len(prompt_ids) + counted, where=where))
    if labels:
        # Nothing predicts a first token.
        labels[0] = IGNORED
    return View(input_ids=ids, labels=labels)


def encode_samples(samples: Sequence[GkdSample], encoder: Encoder) -> tuple[list[View], list[View] | None]:
    """The student's views, and the teacher's where any sample has another prompt for it (None: they are the same)."""
    ours = [encode_view(s.prompt_ids, s, encoder) for s in samples]
    if not any(s.teacher_prompt_ids for s in samples):
        return ours, None
    return ours, [encode_view(s.teacher_prompt_ids or s.prompt_ids, s, encoder) for s in samples]


def collate(samples: Sequence[GkdSample], encoder: Encoder, *, dp_size: int, pad_token_id: int) -> Batch:
    """The batch of a training step: rows in order, so that every rank gets an equal consecutive share.

    Fields: ``input_ids``, ``attention_mask``, ``position_ids``, ``labels`` [b,s] right padded, ``dataset_response`` [b]
    (1 where the response is the data set's), ``row`` [b] (its place in the whole batch, which it keeps on every rank),
    and under OPSD the first four once more as ``teacher_…`` [b,t].

    Raises:
        InputError: the samples do not divide by the ranks, or the two views differ in their active tokens.
    """
    if not samples or len(samples) % dp_size:
        raise InputError(
            "the batch does not divide between the data parallel ranks",
            where="collate",
            expected=f"a multiple of dp_size = {dp_size} samples",
            found=f"{len(samples)} samples",
        )
    ours, theirs = encode_samples(samples, encoder)
    ids = [s.sample_id for s in samples]
    tensors = padded(ours, pad_token_id)
    tensors["dataset_response"] = torch.tensor([int(not s.on_policy) for s in samples])
    tensors["row"] = torch.arange(len(samples))
    if theirs is not None:
        tensors |= {f"teacher_{name}": t for name, t in padded(theirs, pad_token_id).items()}
        require_same_active(tensors["labels"], tensors["teacher_labels"], ids)
    return Batch(tensors, {"uid": numbered(ids), "prompt_id": ids})


def padded(views: Sequence[View], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Views as tensors [b,s], padded on the right."""
    width = max(len(v.input_ids) for v in views)
    input_ids = torch.full((len(views), width), pad_token_id, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    mask = torch.zeros_like(input_ids)
    for row, view in enumerate(views):
        n = len(view.input_ids)
        input_ids[row, :n] = torch.tensor(view.input_ids, dtype=torch.int64)
        labels[row, :n] = torch.tensor(view.labels, dtype=torch.int64)
        mask[row, :n] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions, "labels": labels}


def numbered(ids: Sequence[str]) -> list[str]:
    """Names that are unique even where a sample was drawn twice: ``<id>#<how often before>``."""
    seen: dict[str, int] = {}
    names = []
    for name in ids:
        names.append(f"{name}#{seen.get(name, 0)}")
        seen[name] = seen.get(name, 0) + 1
    return names
