"""Which part of a prompt differs between two runs: its question, few-shot examples, instruction, or how it is written.

A recorded prompt is text in the chat template of its run's tokenizer. The template is asked how it joins messages, and
the text is taken apart there: a system message is the instruction, earlier turns are few-shot examples, the last one is
the question. Examples may also stand in the question's own message, as paragraphs that begin as its last one does
("Question: …").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alignment.diagnose.run_stages import RunData
from alignment.errors import InputError
from alignment.rl.batch_record import BatchRecord
from alignment.rl.tokenizer import Tokenizer

MODEL, TOKENIZER = "actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path"
INSTRUCTION, FEW_SHOT, QUESTION, TEMPLATE, TOKENS = (
    "the instruction", "the few-shot examples", "the question", "the chat template", "the tokenizer",
)  # fmt: skip
RECIPE = (FEW_SHOT, INSTRUCTION)
"""What whoever asks the questions adds to them; the rest is the data's."""

_FIRST, _AROUND = 10, (9, 10, 11)
"""The first ten batches, those around step 10, and then all that are left: where people look."""

_SYSTEM, _USER, _ASSISTANT, _LAST = (f"\x00{number}\x00" for number in range(4))


@dataclass(frozen=True, kw_only=True)
class PromptParts:
    """A prompt's instruction ("" for none), few-shot examples and question."""

    instruction: str
    few_shot: tuple[str, ...]
    question: str


@dataclass(frozen=True, kw_only=True)
class PromptDifference:
    """The first prompt that has other tokens in two runs. ``part`` is what differs, "" where it cannot be told."""

    step: int
    prompt_id: str
    part: str
    evidence: str


def recorded_pairs(dut: RunData, baseline: RunData) -> list[int]:
    """The steps whose batches both runs recorded, in the order in which they are looked at."""
    steps = sorted(set(dut.recorded) & set(baseline.recorded))
    early = [step for step in steps if step <= _FIRST or step in _AROUND]
    return early + [step for step in steps if step not in early]


def first_difference(dut: RunData, baseline: RunData) -> PromptDifference | None:
    """The first prompt of one name that has other tokens in the two runs, and what of it differs."""
    for step in recorded_pairs(dut, baseline):
        ours, theirs = dut.batch(step), baseline.batch(step)
        if not all("prompts" in batch.tensors for batch in (ours, theirs)):
            continue
        rows = {prompt: i for i, prompt in reversed(list(enumerate(theirs.prompt_ids)))}
        for i, prompt in enumerate(ours.prompt_ids):
            if prompt in rows:
                a, b = _prompt(ours, i), _prompt(theirs, rows[prompt])
                if a != b:
                    part, said = _what((a, tokenizer_of(dut)), (b, tokenizer_of(baseline)))
                    evidence = f"batch {step}, prompt {prompt}, {said}"
                    return PromptDifference(step=step, prompt_id=prompt, part=part, evidence=evidence)
    return None


def tokenizer_of(run: RunData) -> Tokenizer | None:
    """The tokenizer that a run's configuration names, where its folder is there."""
    folder = Path(str(run.config.get(TOKENIZER) or run.config.get(MODEL) or ""))
    try:
        return Tokenizer(folder) if folder.is_dir() else None
    except InputError:
        return None


def parts_of(text: str, tokenizer: Tokenizer) -> PromptParts | None:
    """The parts of a prompt written in ``tokenizer``'s chat template; None where it is not."""
    try:
        messages = [("user", _USER), ("assistant", _ASSISTANT), ("user", _LAST)]
        start, rest = _render(tokenizer, messages).split(_USER)
        answers, rest = rest.split(_ASSISTANT)
        again, end = rest.split(_LAST)
    except (InputError, ValueError):
        return None
    # A template may put nothing between its messages: where one ends cannot be told then.
    if not (end and again and answers and text.endswith(end)):
        return None
    instruction = ""
    if text.startswith(start):
        text = text.removeprefix(start)
    else:
        try:
            # A template may have no place for a system message, or may refuse it.
            before, rest = _render(tokenizer, [("system", _SYSTEM), *messages]).split(_SYSTEM)
        except (InputError, ValueError):
            return None
        between = rest.split(_USER)[0]
        if not (between and text.startswith(before) and between in text):
            return None
        instruction, _, text = text.removeprefix(before).partition(between)
    *turns, last = text.removesuffix(end).split(again)
    shown = [" → ".join(turn.split(answers)) for turn in turns]
    lead, examples, question = _paragraphs(last)
    return PromptParts(
        instruction="\n\n".join(filter(None, (instruction, lead))), few_shot=(*shown, *examples), question=question
    )


def _render(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]]) -> str:
    return tokenizer.render_chat([{"role": role, "content": content} for role, content in messages])


def _paragraphs(message: str) -> tuple[str, tuple[str, ...], str]:
    """Instruction, examples and question of one message whose last paragraph begins as its examples do."""
    *paragraphs, last = message.split("\n\n")
    label, colon, _ = last.partition(":")
    examples = tuple(p for p in paragraphs if colon and "\n" not in label and p.startswith(f"{label}:"))
    if not examples:
        return "", (), message
    return "\n\n".join(p for p in paragraphs if p not in examples), examples, last


def _what(ours: tuple[list[int], Tokenizer | None], theirs: tuple[list[int], Tokenizer | None]) -> tuple[str, str]:
    """The part in which two prompts differ, and where."""
    (a, mine), (b, other) = ours, theirs
    at = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
    place = f"token {at}: {b[at : at + 1]} → {a[at : at + 1]}"
    if mine is None or other is None:
        return "", place
    try:
        texts = mine.decode(a, skip_special_tokens=False), other.decode(b, skip_special_tokens=False)
    except InputError:
        return "", place
    if texts[0] == texts[1]:
        return TOKENS, place
    x, y = parts_of(texts[0], mine), parts_of(texts[1], other)
    if x is None or y is None:
        return "", place
    if x.question != y.question:
        return QUESTION, f"{place}: {_short(y.question)} → {_short(x.question)}"
    if x.few_shot != y.few_shot:
        length = max(len(x.few_shot), len(y.few_shot))
        first = next(i for i in range(length) if x.few_shot[i : i + 1] != y.few_shot[i : i + 1])
        shown = [_short(side.few_shot[first]) if first < len(side.few_shot) else "none" for side in (y, x)]
        return FEW_SHOT, f"{len(y.few_shot)} examples → {len(x.few_shot)}, number {first + 1}: {' → '.join(shown)}"
    if x.instruction != y.instruction:
        return INSTRUCTION, f"{_short(y.instruction)} → {_short(x.instruction)}"
    return TEMPLATE, place


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}…") if text else "none"


def _prompt(batch: BatchRecord, row: int) -> list[int]:
    return np.asarray(batch.tensors["prompts"][row])[batch.tensors["prompt_mask"][row] != 0].tolist()
