"""Turns: who speaks when, what counts, and when a conversation ends."""

from __future__ import annotations

import pytest

from alignment.errors import InputError
from alignment.rl import multi_turn
from alignment.rl.multi_turn import (
    SCHEDULERS,
    Conversation,
    MultiTurnScheduler,
    TryAgain,
    make_scheduler,
    register,
    require_scheduler,
    run_turns,
)

LIMIT = 100


class Nagging(MultiTurnScheduler):
    """Asks on and on; keeps what it was told."""

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.started: list[str] = []

    def on_trajectory_start(self, conversations):
        self.started += [c.sample_id for c in conversations]

    def step(self, conversation):
        return [{"role": "user", "content": "more"}]


def conversations(*names: str) -> list[Conversation]:
    return [Conversation(sample_id=name, prompt_ids=(1, 2)) for name in names]


def run(talks, scheduler, *, answers=None, max_tokens=LIMIT):
    asked: list[tuple[int, list[str]]] = []

    def generate(pending, turn):
        asked.append((turn, [c.sample_id for c in pending]))
        return [(answers or {}).get((c.sample_id, turn), ([7, 8], "78", False)) for c in pending]

    run_turns(
        talks,
        scheduler=scheduler,
        generate=generate,
        encode=lambda messages: [9] * len(messages),
        max_tokens=max_tokens,
    )
    return asked


def test_one_turn_without_a_scheduler():
    talks = conversations("a", "b")
    assert run(talks, None) == [(0, ["a", "b"])]
    assert talks[0].token_ids == [7, 8] and talks[0].loss_mask == [True, True] and talks[0].turns == 1


def test_max_turns_ends_a_conversation():
    talks = conversations("a")
    assert len(run(talks, Nagging(max_turns=3))) == 3
    assert talks[0].token_ids == [7, 8, 9, 7, 8, 9, 7, 8]
    assert talks[0].loss_mask == [True, True, False, True, True, False, True, True]


def test_max_turns_is_asked_a_second_time():
    class Forgetful(Nagging):
        def check_finished(self, conversation, *, hit_limit):
            return False

    assert len(run(conversations("a"), Forgetful(max_turns=2))) == 2


def test_a_completion_that_hits_the_limit_ends_its_conversation_only():
    talks = conversations("a", "b")
    asked = run(talks, Nagging(max_turns=2), answers={("a", 0): ([7], "7", True)})
    assert asked == [(0, ["a", "b"]), (1, ["b"])]
    assert talks[0].token_ids == [7] and talks[1].turns == 2


def test_a_conversation_without_room_ends():
    talks = conversations("a")
    # 2 of the prompt, 2 of the answer, 1 said: a limit of 5 leaves no room for another answer.
    run(talks, Nagging(max_turns=9), max_tokens=5)
    assert talks[0].turns == 1 and talks[0].token_ids == [7, 8]
    talks = conversations("a")
    run(talks, Nagging(max_turns=9), max_tokens=6)
    assert talks[0].turns == 2


def test_the_start_hook_is_called_once_with_every_conversation():
    scheduler = Nagging(max_turns=2)
    run(conversations("a", "b"), scheduler)
    assert scheduler.started == ["a", "b"]


def test_a_hook_may_be_a_coroutine():
    class Slow(Nagging):
        async def on_trajectory_start(self, conversations):
            self.started += ["awaited"]

    scheduler = Slow(max_turns=1)
    run(conversations("a"), scheduler)
    assert scheduler.started == ["awaited"]


def test_try_again_until_the_verifier_is_content():
    facts = {"data_source": "reasoning_gym/gcd", "ground_truth": "4", "metadata": ""}
    talks = [Conversation(sample_id=name, prompt_ids=(1,), metadata=facts) for name in ("right", "late", "never")]
    answers = {("right", 0): ([4], "4", False), ("late", 1): ([4], "4", False)}
    asked = run(talks, TryAgain(max_turns=3), answers=answers)
    assert [names for _, names in asked] == [["right", "late", "never"], ["late", "never"], ["never"]]


def test_registry(monkeypatch):
    monkeypatch.setattr(multi_turn, "SCHEDULERS", SCHEDULERS)
    register("nagging")(Nagging)
    try:
        made = make_scheduler("nagging", max_turns=4)
        assert isinstance(made, Nagging) and made.max_turns == 4
        with pytest.raises(InputError, match=r"expected nagging \| try_again; found nag"):
            require_scheduler("nag")
    finally:
        del SCHEDULERS["nagging"]
