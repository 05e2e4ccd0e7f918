"""Deliberate faults of a verl run, switched on through its own configuration."""

from __future__ import annotations

from verl.checkpoint_engine.base import CheckpointEngineManager


class StaleFirstSync(CheckpointEngineManager):
    """The first synchronisation never happens: the engine generates the first step with its dummy weights.

    ``+actor_rollout_ref.rollout.checkpoint_manager_class=verl_faults.StaleFirstSync``
    """

    def update_weights(self, global_steps=None):
        return {} if global_steps == 0 else super().update_weights(global_steps)
