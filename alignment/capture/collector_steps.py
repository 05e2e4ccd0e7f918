"""Which training steps the collector collects, counted as the collector counts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from alignment.capture.collector_config import CYCLE, CollectorConfig
from alignment.errors import InputError
from alignment.numerics.random import portable_integers

TRAIN_STAGES = frozenset({"actor_compute_log_prob", "actor_update"})
_LONGEST_SEQUENCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CollectedSteps:
    """The steps of a run that are dumped, from 0, both ends included.

    With an adapter (LoRA) on the FSDP back end the reference's log-probs are the actor's with the adapter switched off,
    so ``actor_compute_log_prob`` runs twice in a step, and for the actor's stages ``step_start`` and ``step_end`` count
    these calls: step s is calls 2·s and 2·s + 1. To collect N steps from the first on one sets ``step_end`` to 2·N.
    Only steps whose calls both lie in the range are dumped: half a step can be compared with nothing. So the call
    2·N of step N, which the range includes as well, is left out.

    Attributes:
        first, last: ``step_start`` and ``step_end``.
        twice: whether ``actor_compute_log_prob`` runs twice in a step.
    """

    first: int
    last: int
    twice: bool = False

    def of(self, stage: str) -> range:
        """The steps at which ``stage`` is dumped."""
        if self.twice and stage in TRAIN_STAGES:
            return range((self.first + 1) // 2, (self.last - 1) // 2 + 1)
        return range(self.first, self.last + 1)

    def takes(self, stage: str, step: int) -> bool:
        """Whether ``stage`` is dumped at ``step``."""
        return step in self.of(stage)

    def describe(self) -> str:
        """One line about what the range means."""
        plain = f"steps {self.first} … {self.last} ({self.last - self.first + 1})"
        if not self.twice:
            return f"collects {plain}"
        steps = self.of("actor_update")
        count = (
            f"{len(steps)} whole step{'s' * (len(steps) > 1)} ({steps[0]} … {steps[-1]})" if steps else "no whole step"
        )
        return (
            "LoRA on FSDP: actor_compute_log_prob runs twice a step, so for the actor's stages "
            f"step_start = {self.first} and step_end = {self.last} count calls, which is {count}; "
            f"for N steps from the first on set step_end to 2·N. Other stages: {plain}"
        )


def collected_steps(config: CollectorConfig, *, twice: bool) -> CollectedSteps:
    """The steps that ``config`` collects.

    Raises:
        InputError: ``twice``, and the range holds no whole step of the actor.
    """
    steps = CollectedSteps(first=config.step_start, last=config.step_end, twice=twice)
    if config.msprobe and config.actor_train_dump and not steps.of("actor_update"):
        raise InputError(
            "with LoRA on FSDP actor_compute_log_prob runs twice a step, and the range holds no whole step",
            where="precision_collector.step_end",
            expected="2·N for N steps",
            found=config.step_end,
        )
    return steps


def mock_step(config: CollectorConfig, step: int) -> int | None:
    """The recorded step that is replayed at training step ``step`` (both from 0), or None where none is.

    See :mod:`alignment.capture.collector_config` for the three modes. The random sequence is drawn from the seed alone,
    so every device replays the same one.
    """
    first, count = config.mock_step_start, config.mock_step_end - config.mock_step_start + 1
    if config.mock_random_seed is None:
        return step if first <= step <= config.mock_step_end else None
    if config.mock_random_seed == CYCLE:
        return first + step % count
    drawn = portable_integers(0, count, (1,), seed=config.mock_random_seed, stream=f"collector/mock_step/{step}")
    return first + int(drawn[0])


def mock_sequence(config: CollectorConfig, steps: int) -> Iterator[int | None]:
    """What is replayed at the first ``steps`` training steps."""
    return (mock_step(config, step) for step in range(min(steps, _LONGEST_SEQUENCE)))
