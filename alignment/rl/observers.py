"""Who watches the stages of a run from inside its workers: a capture, the precision collector. Named by strings, so
that the pipeline need not know them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from alignment.errors import InputError

if TYPE_CHECKING:
    from alignment.rl.batch import Batch
    from alignment.rl.worker import Worker


@dataclass(frozen=True, kw_only=True)
class ObserverSpec:
    """What makes an observer in whatever process a worker lives: ``module:function``, called with the worker and
    ``argument``. ``driver`` names the same for the driver, called with ``argument`` alone; "" for none.
    """

    factory: str
    argument: str = ""
    driver: str = ""


class StageObserver(Protocol):
    """Told about everything its worker is asked to do."""

    def observe(self, worker: Worker, stage: str, batch: Batch | None, proceed: Callable[[], Any]) -> Any:
        """Runs ``proceed`` and returns its answer. ``batch.info["step"]`` is the training step, from 1.

        An observer leaves batch and answer as they are: what is computed must not depend on who watches.
        """
        ...

    def close(self) -> None:
        """The worker ends."""
        ...


class DriverObserver(Protocol):
    """Told about the stages that the driver runs itself."""

    def fields(self, step: int, stage: str, before: Batch | None, after: Batch) -> None:
        """A stage has ended that read ``before`` (None: nothing that is a batch) and left ``after``."""
        ...

    def close(self) -> None:
        """The run ends; its workers have ended."""
        ...


def named_object(spec: str, *, where: str) -> Any:
    """The object that ``module:name`` names.

    Raises:
        InputError: there is no such module, or no such name in it.
    """
    module, _, name = spec.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"it cannot be loaded ({error})", where=where, expected="module:name", found=spec) from None


def make_observers(specs: Sequence[ObserverSpec], worker: Worker) -> tuple[StageObserver, ...]:
    """The observers of a worker, the first one outermost."""
    return tuple(named_object(spec.factory, where="observers")(worker, spec.argument) for spec in specs)


def driver_observers(specs: Sequence[ObserverSpec]) -> tuple[DriverObserver, ...]:
    """The observers of the driver."""
    return tuple(named_object(spec.driver, where="observers")(spec.argument) for spec in specs if spec.driver)


def observed(worker: Worker, stage: str, batch: Batch | None, proceed: Callable[[], Any]) -> Any:
    """The answer of ``proceed``, with the worker's observers around it."""
    for observer in reversed(getattr(worker, "observers", ())):
        proceed = partial(observer.observe, worker, stage, batch, proceed)
    return proceed()


def close_observers(worker: Worker) -> None:
    """Tells the observers of a worker that it ends."""
    for observer in getattr(worker, "observers", ()):
        observer.close()
    worker.observers = ()
