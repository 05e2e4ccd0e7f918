"""What the checks of vLLM share: a trainer with head widths it supports, and how a live defect is pinned."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from alignment.backends.engine_model import engine_config, make_engine_checkpoint
from alignment.backends.sync_probe import ProbeCase, probe_budget, probe_case, trainer_log_probs
from alignment.backends.vllm_rollout import WAY_ROUNDS, VllmRollout, installed_version
from alignment.backends.weight_sync import check_weight_sync, stream_weights
from alignment.models.config import ModelConfig
from alignment.numerics.verdict import Outcome

JUDGED, NOISE = 100, (1, 2, 3, 4, 5)
CHECKS = ("parameters", "derived_tensors", "undeclared_tensors", "prefill", "decode")
DEFECTS_OF = "0.32."


class LiveDefect(AssertionError):
    """The described defect, with its signature; any other failure is a failure of the test."""


def live_defect(what: str):
    """A strict expected failure, pinned to the release it was found in: a release that mends it breaks the test."""
    version = installed_version() or ""
    return pytest.mark.xfail(
        version.startswith(DEFECTS_OF), raises=LiveDefect, strict=True, reason=f"vllm {version}: {what}"
    )


def show(signature: bool) -> None:
    """Raise :class:`LiveDefect` when the signature of the defect was seen."""
    if signature:
        raise LiveDefect("the defect shows where and how docs/live-defects.md says")


def without(*names: str) -> frozenset[str]:
    """All ways round but these."""
    return frozenset(WAY_ROUNDS) - set(names)


@contextlib.contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """New tensors hold NaN until they are written, so that what nobody writes cannot be right by what was there."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class World:
    """A trainer that moves, the checkpoint it started from, and what a correct engine may differ from it by."""

    def __init__(self, directory: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.dtype, self.checkpoint = config, dtype, directory / "model"
        self.trainer = make_engine_checkpoint(self.checkpoint, config, dtype=dtype)
        self.case = probe_case(config, seed=JUDGED)
        self.budget = probe_budget(self.trainer, seeds=NOISE, device="cpu")

    def engine(self, **options) -> VllmRollout:
        return VllmRollout(**{"checkpoint": self.checkpoint, "dtype": self.dtype, **options})

    def train(self, step: int) -> None:
        """Every weight moves by its own size; step 0 is the checkpoint."""
        self.trainer.init_weights(1 + step)

    def stream(self):
        return stream_weights(self.trainer)

    def check(self, engine: VllmRollout, *, case: ProbeCase | None = None):
        found = check_weight_sync(
            engine,
            dict(self.stream()),
            case=case or self.case,
            log_probs=trainer_log_probs(self.trainer, case or self.case),
            budget=self.budget,
            subject="vllm",
        )
        return dict(zip(CHECKS, found, strict=True))


def moonlight_config(**changes) -> ModelConfig:
    """Plain rope, no query latent, one dense and two MoE layers."""
    return engine_config("tiny-moonlight", num_hidden_layers=3, max_position_embeddings=256, **changes)


def moonlight(directory: Path, **changes) -> World:
    return World(directory, moonlight_config(**changes))


def deepseek(directory: Path, dtype: torch.dtype = torch.float32) -> World:
    """Yarn, a query latent, groups of experts, and experts that the CPU kernel has to pad."""
    config = engine_config("tiny-deepseek", max_position_embeddings=256)
    scaling = dataclasses.replace(config.rope_scaling, original_max_position_embeddings=32)
    return World(directory, dataclasses.replace(config, rope_scaling=scaling), dtype)


def failed(verdicts) -> set[str]:
    return {name for name, v in verdicts.items() if v.outcome is not Outcome.PASS}


def reasons(verdicts) -> dict[str, str]:
    return {name: v.reason for name, v in verdicts.items() if v.outcome is not Outcome.PASS}
