"""Observers run around a stage, the first one outermost, and leave without a trace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from alignment.errors import InputError
from alignment.rl.observers import ObserverSpec, close_observers, make_observers, named_object, observed

SEEN: list[str] = []


class Noting:
    def __init__(self, name: str) -> None:
        self.name = name

    def observe(self, worker, stage, batch, proceed):
        SEEN.append(f"{self.name} {stage} begins")
        answer = proceed()
        SEEN.append(f"{self.name} {stage} ends")
        return answer

    def close(self) -> None:
        SEEN.append(f"{self.name} closes")


def noting(worker, argument: str) -> Noting:
    return Noting(f"{argument}{worker.rank}")


def test_the_first_observer_is_the_outermost(monkeypatch):
    monkeypatch.setattr(f"{__name__}.SEEN", [])
    worker = SimpleNamespace(rank=3)
    worker.observers = make_observers([ObserverSpec(factory=f"{__name__}:noting", argument=a) for a in "ab"], worker)
    assert observed(worker, "rollout", None, lambda: 7) == 7
    close_observers(worker)
    assert SEEN == [
        "a3 rollout begins", "b3 rollout begins", "b3 rollout ends", "a3 rollout ends", "a3 closes", "b3 closes",
    ]  # fmt: skip
    assert observed(worker, "rollout", None, lambda: 8) == 8 and len(SEEN) == 6


def test_a_stage_that_nobody_watches_is_just_run():
    assert observed(SimpleNamespace(), "rollout", None, lambda: 5) == 5


@pytest.mark.parametrize("spec", ["nowhere:x", f"{__name__}:nothing", "", "math"])
def test_what_cannot_be_loaded_is_named(spec):
    with pytest.raises(InputError, match="expected module:name") as found:
        named_object(spec, where="observers")
    assert str(found.value).startswith("observers: it cannot be loaded")
