"""Cards that flip bits, for the processes the stress test starts."""

from __future__ import annotations

import contextlib
import itertools
import os
import time

import numpy as np
import torch

from alignment.diagnose import stress

RATE = 1e-6


@contextlib.contextmanager
def _observing(observe):
    """``observe`` in place of the product's."""
    honest, stress.observe = stress.observe, observe
    try:
        yield
    finally:
        stress.observe = honest


@contextlib.contextmanager
def flipping(rank: int, rate: float = RATE, seed: int = 0):
    """On the card of ``rank`` each output element has one random bit flipped with probability ``rate``."""
    honest = stress.observe
    draws = np.random.Generator(np.random.Philox(seed))

    def observe(card, operation, inputs):
        output = honest(card, operation, inputs)
        if card.rank != rank:
            return output
        output = output.clone()
        bits = output.view(torch.uint8).reshape(-1)
        width = bits.numel() // output.numel()
        for _ in range(draws.binomial(output.numel(), rate)):
            byte = int(draws.integers(output.numel())) * width + int(draws.integers(width))
            bits[byte] ^= 1 << int(draws.integers(8))
        return output

    with _observing(observe):
        yield


def second_card():
    """For the command line, which switches it on in every worker."""
    return flipping(1)


@contextlib.contextmanager
def unsteady(every: int):
    """Whatever the card, each ``every``-th output has the lowest bit of its first byte flipped."""
    honest, count = stress.observe, itertools.count(1)

    def observe(card, operation, inputs):
        output = honest(card, operation, inputs)
        if next(count) % every == 0:
            output = output.clone()
            output.view(torch.uint8).reshape(-1)[0] ^= 1
        return output

    with _observing(observe):
        yield


@contextlib.contextmanager
def dying():
    """The worker's process ends before it answers."""

    def observe(card, operation, inputs):
        os._exit(9)

    with _observing(observe):
        yield


@contextlib.contextmanager
def hanging():
    """The second card never answers."""
    honest = stress.observe

    def observe(card, operation, inputs):
        while card.rank == 1:
            time.sleep(1)
        return honest(card, operation, inputs)

    with _observing(observe):
        yield


def lone_card():
    """The only card flips, so that nothing but its own past tells."""
    return flipping(0)
