"""Streams, events and buffers of an accelerator, in one thread: work is done as late as it may be.

A stream's work happens only when somebody waits for it, which is the most adverse schedule that real hardware is
free to take. What is read too early here is read too early *every* time, where on a device it is wrong once a day.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from alignment.errors import InputError


class Event:
    """A place in a stream; see :meth:`Stream.record`."""

    def __init__(self, stream: Stream, position: int) -> None:
        self._stream, self._position = stream, position

    @property
    def done(self) -> bool:
        """Whether all work before the place has been done."""
        return self._stream.finished >= self._position

    def wait(self) -> None:
        """Has the stream do all work before the place."""
        self._stream.run_until(self._position)


class Stream:
    """A queue of work, done in order, as late as possible."""

    def __init__(self) -> None:
        self.finished = 0
        self._work: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> Event:
        """Enqueues ``work`` and marks the place behind it."""
        self._work.append(work)
        return self.record()

    def record(self) -> Event:
        """The place behind everything enqueued so far."""
        return Event(self, self.finished + len(self._work))

    def run_until(self, position: int) -> None:
        """Does the work up to ``position``."""
        while self.finished < position and self._work:
            self._work.pop(0)()
            self.finished += 1

    def synchronize(self) -> None:
        """Does all of it."""
        self.run_until(self.finished + len(self._work))


class PendingTensor:
    """What an asynchronous copy or collective will have written; its content is there after :meth:`result`."""

    def __init__(self, destination: Tensor, event: Event) -> None:
        self._destination, self._event = destination, event

    def result(self) -> Tensor:
        """Waits, then gives the destination itself."""
        self._event.wait()
        return self._destination


def copy_async(source: Tensor, destination: Tensor, stream: Stream) -> PendingTensor:
    """``destination.copy_(source)`` on ``stream``: device to host, or between devices.

    Raises:
        InputError: the shapes differ.
    """
    if source.shape != destination.shape:
        raise InputError(
            "a copy keeps the shape", where="copy_async", expected=list(source.shape), found=list(destination.shape)
        )
    return PendingTensor(destination, stream.submit(lambda: destination.copy_(source)))


def all_reduce_async(parts: Sequence[Tensor], destination: Tensor, stream: Stream) -> PendingTensor:
    """The sum of the parts of all ranks, into ``destination``."""
    return PendingTensor(destination, stream.submit(lambda: destination.copy_(torch.stack(list(parts)).sum(0))))


class BufferPool:
    """Buffers that are used again once the work that reads them is done (a caching allocator with
    ``record_stream``).
    """

    def __init__(self) -> None:
        self._resting: list[tuple[Tensor, Event]] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
        """A buffer of that shape with arbitrary content; none that some stream still reads."""
        for i, (buffer, event) in enumerate(self._resting):
            if tuple(buffer.shape) == tuple(shape) and buffer.dtype == dtype and is_free(event):
                return self._resting.pop(i)[0]
        return torch.full(tuple(shape), torch.nan, dtype=dtype)

    def give_back(self, buffer: Tensor, *, after: Event) -> None:
        """Hands a buffer in; it may be taken again once ``after`` is done."""
        self._resting.append((buffer, after))


def is_free(event: Event) -> bool:
    """Whether a buffer whose last reader is marked by ``event`` may be written again."""
    return event.done


def fetch(sources: Sequence[Tensor], *, stream: Stream | None = None) -> list[Tensor]:
    """Device results on the host, copied on a side stream into host buffers that are used again.

    Args:
        sources: tensors of one shape.

    Returns:
        Their contents, each in memory of its own.
    """
    stream = stream or Stream()
    if not sources:
        return []
    host = torch.zeros_like(sources[0])
    return [copy_async(source, host, stream).result().clone() for source in sources]


def all_reduce_buckets(buckets: Sequence[Sequence[Tensor]], *, stream: Stream | None = None) -> list[Tensor]:
    """Sums over ranks of several buckets, all in flight together, each waited for where it is used.

    Args:
        buckets: per bucket one tensor per rank.
    """
    stream = stream or Stream()
    pending = [all_reduce_async(parts, torch.zeros_like(parts[0]), stream) for parts in buckets]
    return [each.result().clone() for each in pending]


def sample_by_race(
    probabilities: Sequence[Tensor],
    draws: Sequence[Tensor],
    *,
    stream: Stream | None = None,
    pool: BufferPool | None = None,
) -> list[Tensor]:
    """Tokens of several decode steps by the exponential race argmax pᵢ / Eᵢ with Eᵢ = −ln(1 − uᵢ) (vLLM's sampler).

    The noise of a step is made on the host while the stream still works on the step before; a noise buffer goes back to
    the pool and is free once the division that reads it is done.

    Args:
        probabilities: ``[b, v]`` per step.
        draws: uniform in [0, 1), ``[b, v]`` per step.

    Returns:
        int64 ``[b]`` per step.
    """
    stream, pool = stream or Stream(), pool or BufferPool()
    chosen = [torch.zeros(p.shape[0], dtype=torch.int64) for p in probabilities]
    for step, (p, u) in enumerate(zip(probabilities, draws, strict=True)):
        noise = pool.take(u.shape, u.dtype)
        torch.neg(torch.log1p(-u), out=noise)
        event = stream.submit(lambda p=p, noise=noise, out=chosen[step]: out.copy_((p / noise).argmax(-1)))
        pool.give_back(noise, after=event)
    stream.synchronize()
    return chosen


def pipeline_transfer(activations: Sequence[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What the next stage makes of the activations of a pipeline, received through buffers that are used again.

    Receiving (one stream) and computing (another) overlap; a buffer goes back once the computation that reads it is
    done.
    """
    receiving, computing, pool = Stream(), Stream(), BufferPool()
    results: list[Tensor] = [torch.empty(0)] * len(activations)

    def compute(i: int, pending: PendingTensor) -> None:
        results[i] = work(pending.result()).clone()

    for i, activation in enumerate(activations):
        buffer = pool.take(activation.shape, activation.dtype)
        pending = copy_async(activation, buffer, receiving)
        event = computing.submit(lambda i=i, pending=pending: compute(i, pending))
        pool.give_back(buffer, after=event)
    computing.synchronize()
    return results
