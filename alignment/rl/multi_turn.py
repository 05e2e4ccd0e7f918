"""Rollouts of several turns: schedulers decide what is said to the student between its completions.

A conversation is kept as tokens. What the student generated counts in the loss, what a scheduler said does not. Tokens
are never made anew from text: a completion stays the ids that were drawn.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from alignment.errors import InputError

Messages = list[dict[str, str]]


@dataclass(kw_only=True)
class Conversation:
    """One trajectory while it is being generated.

    Attributes:
        sample_id: of its sample.
        prompt_ids: tokens up to the start of the first completion.
        token_ids: everything behind the prompt so far.
        loss_mask: one flag per entry of ``token_ids``: whether the student drew it.
        completions: text of each completion.
        metadata: the sample's ``data_source``, ``ground_truth`` and the like, for schedulers that judge.
        state: what a scheduler keeps about the conversation.
        finished: no further turn.
    """

    sample_id: str
    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    completions: list[str] = field(default_factory=list)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    finished: bool = False

    @property
    def turns(self) -> int:
        """Completions so far."""
        return len(self.completions)

    def say(self, ids: Sequence[int], *, counts: bool) -> None:
        """Appends tokens."""
        self.token_ids += map(int, ids)
        self.loss_mask += [counts] * len(ids)


class MultiTurnScheduler:
    """What happens between turns. A scheduler of one's own overrides :meth:`step`, and the rest where it must.

    Args:
        max_turns: most completions of one conversation; None leaves it to :meth:`check_finished`.
    """

    def __init__(self, *, max_turns: int | None = None) -> None:
        self.max_turns = max_turns

    def on_trajectory_start(self, conversations: Sequence[Conversation]) -> Any:
        """Called once per generation with every conversation, before the first turn; may be a coroutine."""

    def check_finished(self, conversation: Conversation, *, hit_limit: bool) -> bool:
        """Whether the conversation ends with the completion it has just got.

        It does where the completion ran into the length limit, and after ``max_turns`` completions.
        """
        return hit_limit or (self.max_turns is not None and conversation.turns >= self.max_turns)

    def step(self, conversation: Conversation) -> Messages:
        """What is said to the student before its next completion."""
        raise NotImplementedError


SCHEDULERS: dict[str, Callable[..., MultiTurnScheduler]] = {}
"""Name → class; add to it with :func:`register`."""


def register(name: str) -> Callable[[type], type]:
    """Makes a scheduler available as ``gkd.multi_turn_scheduler=<name>``."""

    def add(scheduler: type) -> type:
        SCHEDULERS[name] = scheduler
        return scheduler

    return add


def require_scheduler(name: str, known: Mapping[str, Any] = SCHEDULERS) -> None:
    """Refuse a name nobody registered.

    Raises:
        InputError: with the names there are.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise InputError(
            "there is no such multi-turn scheduler",
            where="gkd.multi_turn_scheduler",
            expected=" | ".join(sorted(known)),
            found=name,
            next_step=f"did you mean {near[0]}?" if near else "register one with alignment.rl.multi_turn.register",
        )


def make_scheduler(name: str, *, max_turns: int | None) -> MultiTurnScheduler:
    """The scheduler called ``name``."""
    require_scheduler(name)
    return SCHEDULERS[name](max_turns=max_turns)


@register("try_again")
class TryAgain(MultiTurnScheduler):
    """Asks again after an answer that the task's verifier rejects; a right one ends the conversation."""

    words = "Wrong."

    def check_finished(self, conversation: Conversation, *, hit_limit: bool) -> bool:
        from alignment.rl.scoring import score_responses

        facts = conversation.metadata
        [score] = score_responses(
            [facts["data_source"]],
            [conversation.completions[-1]],
            [facts["ground_truth"]],
            metadata=[facts.get("metadata") or None],
        )
        return bool(score.acc) or super().check_finished(conversation, hit_limit=hit_limit)

    def step(self, conversation: Conversation) -> Messages:
        return [{"role": "user", "content": self.words}]


def start(scheduler: MultiTurnScheduler, conversations: Sequence[Conversation]) -> None:
    """Calls the trajectory-start hook, awaiting it where it is a coroutine."""
    answer = scheduler.on_trajectory_start(conversations)
    if inspect.isawaitable(answer):
        asyncio.run(_wait(answer))


async def _wait(answer: Any) -> None:
    await answer


def run_turns(
    conversations: Sequence[Conversation],
    *,
    scheduler: MultiTurnScheduler | None,
    generate: Callable[[Sequence[Conversation], int], Sequence[tuple[Sequence[int], str, bool]]],
    encode: Callable[[Messages], Sequence[int]],
    max_tokens: int,
) -> None:
    """Generates turn by turn until every conversation has finished; without a scheduler, one turn.

    Args:
        conversations: changed in place, order kept.
        scheduler: decides what follows a completion.
        generate: (conversations, turn counted from 0) → per conversation the tokens drawn, their text, and whether the
            length limit cut them off.
        encode: tokens of messages up to the start of the next completion, *without* the beginning of a text.
        max_tokens: a conversation that has no room for a further completion ends: prompt, turns and all.
    """
    if scheduler is not None:
        start(scheduler, conversations)
    turn = 0
    while pending := [c for c in conversations if not c.finished]:
        made = generate(pending, turn)
        for conversation, (ids, text, hit_limit) in zip(pending, made, strict=True):
            conversation.say(ids, counts=True)
            conversation.completions.append(text)
            done = scheduler is None or scheduler.check_finished(conversation, hit_limit=hit_limit)
            # Asked a second time: a scheduler of one's own may forget the limit.
            limit = None if scheduler is None else scheduler.max_turns
            if done or (limit is not None and conversation.turns >= limit):
                conversation.finished = True
                continue
            said = list(encode(scheduler.step(conversation)))
            if len(conversation.prompt_ids) + len(conversation.token_ids) + len(said) >= max_tokens:
                conversation.finished = True
                continue
            conversation.say(said, counts=False)
        turn += 1
