"""Scores of responses: reasoning-gym's verifiers, math-verify, and the same rules where neither is installed.

The reward is DAPO's (Yu et al., *DAPO: an open-source LLM reinforcement learning system at scale*, arXiv 2503.14476,
equation 7): +1 when the final answer is equivalent to the reference, −1 otherwise, before overlong shaping. verl's DAPO
reward manager calls this number ``score`` and the correctness behind it ``acc``.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from alignment.errors import InputError, UnavailableError

SOURCE_PREFIX = "reasoning_gym/"

# data_source names of public mathematics sets in verl's format, scored by math-verify
MATH_SOURCES = frozenset(
    {
        "math",
        "math_dapo",
        "openai/gsm8k",
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "aime2024",
        "aime2025",
    }
)


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one response earns, in verl's words.

    Attributes:
        score: the reward before overlong shaping: +1.0 or −1.0 by ``acc``.
        acc: correctness: 1.0 where the verifier gives full credit, else 0.0; what dynamic sampling filters on.
        credit: the verifier's own value in [0, 1]; partial credit is possible.
    """

    score: float
    acc: float
    credit: float

    @classmethod
    def of(cls, credit: float) -> Score:
        """The score of a verifier's value.

        Raises:
            InputError: it is not a number in [0, 1].
        """
        value = float(credit)
        if not 0.0 <= value <= 1.0:
            raise InputError("a verifier's value lies in [0, 1]", where="scoring", found=value)
        acc = 1.0 if value >= 1.0 else 0.0
        return cls(score=2.0 * acc - 1.0, acc=acc, credit=value)


def final_answer(response: str) -> str:
    """What is judged: the last <answer>…</answer> (reasoning-gym's convention), else the whole response."""
    tagged = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    return (tagged[-1] if tagged else response).strip()


def score_response(
    data_source: str,
    response: str,
    ground_truth: str,
    *,
    metadata: Mapping[str, Any] | str | None = None,
    verifier: str = "auto",
) -> Score:
    """Scores one response.

    Args:
        data_source: ``reasoning_gym/<dataset>``, or one of :data:`MATH_SOURCES`.
        response: decoded text without special tokens.
        ground_truth: the reference answer.
        metadata: reasoning-gym's metadata of the entry (a mapping or its JSON), for verifiers that read it.
        verifier: "reasoning_gym", "built_in" (the rules of this file, for the embedded tasks), or "auto": reasoning-gym
            where it is installed, else built-in. Mathematics sets always use math-verify.

    Raises:
        InputError: unknown data source or verifier.
        UnavailableError: the verifier this data source needs is not installed.
    """
    if data_source in MATH_SOURCES:
        return Score.of(_math_verify(response, ground_truth))
    name = data_source.removeprefix(SOURCE_PREFIX)
    if name == data_source:
        raise InputError(
            "no verifier for this data source",
            where=f"data_source {data_source!r}",
            expected=f"{SOURCE_PREFIX}<dataset> or one of {', '.join(sorted(MATH_SOURCES))}",
        )
    if verifier not in ("auto", "reasoning_gym", "built_in"):
        raise InputError(
            "unknown verifier", where="verifier", expected="auto | reasoning_gym | built_in", found=verifier
        )
    answer = final_answer(response)
    if verifier == "built_in" or (verifier == "auto" and not _has_reasoning_gym()):
        if name not in BUILT_IN:
            raise UnavailableError(
                "no built-in rule for this task, and reasoning-gym is not in use",
                where=f"data_source {data_source!r}",
                expected=", ".join(SOURCE_PREFIX + known for known in BUILT_IN),
                next_step="pip install reasoning-gym==0.1.25",
            )
        return Score.of(BUILT_IN[name](answer, ground_truth))
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    return Score.of(_gym_verifier(name)(answer, {"answer": ground_truth, "metadata": dict(metadata or {})}))


def score_responses(
    data_sources: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[str],
    *,
    metadata: Sequence[Mapping[str, Any] | str | None] | None = None,
    verifier: str = "auto",
) -> list[Score]:
    """:func:`score_response` for each response of a batch; all sequences have one length."""
    if metadata is None:
        metadata = [None] * len(responses)
    lengths = {len(data_sources), len(responses), len(ground_truths), len(metadata)}
    if len(lengths) != 1:
        raise InputError("the columns of a batch differ in length", where="scoring", found=sorted(lengths))
    return [
        score_response(source, response, truth, metadata=extra, verifier=verifier)
        for source, response, truth, extra in zip(data_sources, responses, ground_truths, metadata, strict=True)
    ]


def decimal_score(answer: str, truth: str) -> float:
    """reasoning-gym's rule for arithmetic: 1 for the same decimal number (commas, sign and zeros are free); where the
    reference occurs inside the answer, its share of the answer's length; else 0."""
    answer, truth = answer.replace(",", ""), truth.replace(",", "")
    if not answer:
        return 0.0
    try:
        if Decimal(answer) == Decimal(truth):
            return 1.0
    except InvalidOperation:
        pass
    return len(truth) / len(answer) if truth in answer else 0.0


def containment_score(answer: str, truth: str) -> float:
    """reasoning-gym's default rule: 1 for the same text, its share of the length where it is contained, else 0."""
    if not answer or truth not in answer:
        return 0.0
    return len(truth) / len(answer)


def spelling_score(answer: str, truth: str) -> float:
    """reasoning-gym's rule for spelling: the share of letters in place, ignoring case; 1 only for the whole word."""
    answer, truth = answer.lower(), truth.lower()
    if answer == truth:
        return 1.0
    share = 0.0
    for said, wanted in zip(answer, truth):  # noqa: B905 - the shorter one ends the comparison
        if said == wanted:
            share += 1 / len(truth)
    # a right word with something behind it
    return share - 0.2 if share == 1.0 else share


BUILT_IN: dict[str, Callable[[str, str], float]] = {
    "chain_sum": decimal_score,
    "products": decimal_score,
    "gcd": containment_score,
    "lcm": containment_score,
    "spell_backward": spelling_score,
}


@cache
def _has_reasoning_gym() -> bool:
    try:
        import reasoning_gym  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _gym_verifier(name: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise UnavailableError(
            f"reasoning-gym is needed to score this task ({error})",
            where=f"data_source {SOURCE_PREFIX + name!r}",
            next_step="pip install reasoning-gym==0.1.25",
        ) from None
    if name not in reasoning_gym.factory.DATASETS:
        raise InputError("reasoning-gym has no such task", where=f"data_source {SOURCE_PREFIX + name!r}")
    return reasoning_gym.get_score_answer_fn(name)


def _math_verify(response: str, truth: str) -> float:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UnavailableError(
            f"math-verify is needed to score mathematics sets ({error})",
            where="scoring",
            next_step="pip install math-verify",
        ) from None
    # Its time limits are POSIX alarms, which only a main thread may set.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    gold = parse(f"\\boxed{{{truth}}}", parsing_timeout=limit)
    # verl's limit on what is searched for an answer: long answers of a broken policy would cost minutes
    said = parse(response[-300:], parsing_timeout=limit)
    return float(verify(gold, said, timeout_seconds=limit))
