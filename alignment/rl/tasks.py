"""reasoning-gym tasks as prompts: which tasks, with which difficulty, and which questions belong to which split.

A question's split is a function of its text alone (SHA-256), so no question can be in two splits, whatever the seed,
the order or the number of rows that were drawn.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignment.errors import InputError, UnavailableError
from alignment.rl.scoring import BUILT_IN, SOURCE_PREFIX

# Percent of all questions, by the hash of the question: [from, to)
SPLITS: dict[str, tuple[int, int]] = {"held_out": (0, 8), "rl": (8, 33), "warm_start": (33, 100)}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One reasoning-gym dataset at one difficulty.

    Attributes:
        name: reasoning-gym's dataset name.
        config: its configuration fields (reasoning-gym refuses unknown ones; ``seed`` and ``size`` are ours).
        share: weight in a mixture.
        accepts: regular expression that a question must match from start to end.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    accepts: str = r"(?s).*"

    @property
    def data_source(self) -> str:
        """The name rows of this task carry in verl's ``data_source`` column."""
        return SOURCE_PREFIX + self.name


@dataclass(frozen=True, kw_only=True)
class Question:
    """One task instance: what is asked, the verifier's reference answer, and where it came from.

    ``metadata`` is reasoning-gym's own; its verifiers read it.
    """

    data_source: str
    question: str
    answer: str
    metadata: Mapping[str, Any]

    @property
    def prompt_id(self) -> str:
        """A short stable name: task and hash of the question."""
        digest = hashlib.sha256(f"{self.data_source}\n{self.question}".encode()).hexdigest()
        return f"{self.data_source.removeprefix(SOURCE_PREFIX)}-{digest[:12]}"

    @property
    def verifier_metadata(self) -> str:
        """``metadata`` as JSON where the task's verifier may read it; empty where a built-in rule does without."""
        if self.data_source.removeprefix(SOURCE_PREFIX) in BUILT_IN:
            return ""
        return json.dumps(self.metadata, sort_keys=True, default=str)


# Short enough for a step per second on two cores, and within what a model below one million parameters can learn to
# compute rather than to remember (sums and spelling on unseen questions nearly always, common divisors often).
EMBEDDED_TASKS: tuple[Task, ...] = (
    Task(name="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, share=0.45),
    Task(
        name="spell_backward",
        config={"min_word_len": 3, "max_word_len": 5},
        share=0.4,
        accepts=r".*: [a-z]+",
    ),
    Task(name="gcd", config={"max_value": 40}, share=0.15),
)


def split_of(question: str) -> str:
    """The split a question belongs to: sha256(question) mod 100 looked up in :data:`SPLITS`."""
    percent = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % 100
    return next(name for name, (start, end) in SPLITS.items() if start <= percent < end)


def generate(task: Task, count: int, *, seed: int, split: str | None = None) -> list[Question]:
    """``count`` different questions of a task, in reasoning-gym's order for ``seed``.

    Args:
        task: what to draw.
        count: how many; each question text occurs once.
        seed: reasoning-gym's seed.
        split: one of :data:`SPLITS`, or None for all questions.

    Raises:
        UnavailableError: reasoning-gym is not installed.
        InputError: unknown task, configuration field or split, or the task has fewer than ``count`` such questions.
    """
    if split is not None and split not in SPLITS:
        raise InputError("unknown split", where="split", expected=" | ".join(SPLITS), found=split)
    found: dict[str, Question] = {}
    if count <= 0:
        return []
    for drawn, entry in enumerate(_entries(task, seed)):
        text = entry["question"]
        if text not in found and re.fullmatch(task.accepts, text) and split in (None, split_of(text)):
            found[text] = Question(
                data_source=task.data_source, question=text, answer=entry["answer"], metadata=entry["metadata"]
            )
            if len(found) == count:
                return list(found.values())
        if drawn > 1000 + 400 * count:
            break
    raise InputError(
        f"task {task.name} has too few different questions" + (f" in split {split}" if split else ""),
        where="tasks",
        expected=f"{count} questions",
        found=f"{len(found)} after {drawn} draws",
        next_step="ask for fewer, or raise the task's difficulty range",
    )


def generate_mixture(tasks: Sequence[Task], count: int, *, seed: int, split: str | None = None) -> list[Question]:
    """``count`` different questions of several tasks by their shares, one task after the other.

    The numbers per task are the shares rounded by largest remainder, so they add up to ``count``.
    """
    counts = _apportion([task.share for task in tasks], count)
    return [q for task, n in zip(tasks, counts, strict=True) for q in generate(task, n, seed=seed, split=split)]


def verl_rows(
    questions: Sequence[Question], *, split: str, few_shot: Sequence[Question] = (), instruction: str = ""
) -> list[dict[str, Any]]:
    """The questions as rows of verl's parquet format.

    Every prompt begins with ``instruction`` as the system's message and ``few_shot`` as turns that were answered, where
    they are given; the names of prompts are those of the questions alone.

    Columns: ``data_source``, ``prompt`` (chat messages), ``ability``, ``reward_model`` {style, ground_truth},
    ``extra_info`` {index, split, prompt_id, metadata (JSON that the verifier reads, or empty)}.
    """
    before = [{"role": "system", "content": instruction}] if instruction else []
    for shown in few_shot:
        before += [{"role": "user", "content": shown.question}, {"role": "assistant", "content": shown.answer}]
    return [
        {
            "data_source": q.data_source,
            "prompt": [*before, {"role": "user", "content": q.question}],
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": q.answer},
            "extra_info": {
                "index": index,
                "split": split,
                "prompt_id": q.prompt_id,
                "metadata": q.verifier_metadata,
            },
        }
        for index, q in enumerate(questions)
    ]


def _entries(task: Task, seed: int) -> Iterator[dict[str, Any]]:
    gym = _reasoning_gym()
    names = gym.factory.DATASETS
    if task.name not in names:
        near = difflib.get_close_matches(task.name, names, n=1)
        raise InputError(
            f"reasoning-gym has no task {task.name!r}",
            where="tasks",
            expected=f"{near[0]!r}" if near else f"one of its {len(names)} datasets",
        )
    try:
        # reasoning-gym seeds entry i with seed + i: seeds a large stride apart keep two draws from overlapping
        dataset = gym.create_dataset(task.name, seed=seed << 32, size=1 << 31, **task.config)
    except (TypeError, AssertionError) as error:
        raise InputError(f"reasoning-gym refuses this configuration ({error})", where=f"task {task.name}") from None
    return (dataset[index] for index in range(len(dataset)))


def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UnavailableError(
            f"reasoning-gym is needed to draw questions ({error})",
            where="tasks",
            next_step="pip install reasoning-gym==0.1.25, or use the materialised prompts in baselines/data/",
        ) from None
    return reasoning_gym


def _apportion(shares: Sequence[float], count: int) -> list[int]:
    if not shares or min(shares) < 0 or sum(shares) == 0:
        raise InputError("a mixture needs tasks with shares ≥ 0, not all zero", where="tasks", found=list(shares))
    exact = [share * count / sum(shares) for share in shares]
    counts = [int(x) for x in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    return counts
