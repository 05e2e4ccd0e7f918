"""The weight sync between golden trainer and golden engine on a device, proven the way ``alignment run`` shows it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from alignment.backends.golden_rollout import GoldenRollout
from alignment.backends.load_format_table import LoadFormatTable, load_format_table
from alignment.backends.sync_probe import ProbeCase, probe_budget, probe_case, trainer_log_probs
from alignment.backends.weight_sync import check_weight_sync, stream_weights
from alignment.devices.base import Device
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig, preset
from alignment.numerics.budget import MINIMUM_RUNS
from alignment.numerics.verdict import Outcome, Verdict

JUDGED_SEED = 0
NOISE_SEEDS = tuple(range(1, MINIMUM_RUNS + 1))
ENGINE_SEED = 1000


def golden_weight_sync(
    device: Device,
    *,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    updates: int = 3,
    alias: bool = False,
) -> list[Verdict]:
    """The five verdicts of :func:`check_weight_sync` and ``weight_sync.load_format``, as a run reports them.

    A dummy-initialised engine sleeps at level 2, wakes and takes the trainer's weights, ``updates`` times over with
    weights that moved; the second time it is awake and holds the first ones, as where engine and trainer have devices
    of their own. The verdicts are those of the first update that failed, else of the last.

    Args:
        device: where trainer and engine compute.
        config: the model; ``tiny-moonlight`` by default.
        dtype: dtype of both sides.
        updates: how many updates to prove.
        alias: whether the engine's derived weights are views; see :class:`GoldenRollout`.
    """
    config = config or preset("tiny-moonlight")
    trainer = CausalLM(config, dtype=dtype, device=device.torch_device).init_weights(0)
    case = probe_case(config, seed=JUDGED_SEED)
    budget = probe_budget(trainer, seeds=NOISE_SEEDS, device=device.label)
    engine = GoldenRollout(config, dtype=dtype, device=device, seed=ENGINE_SEED, alias=alias)
    verdicts: list[Verdict] = []
    for update in range(updates):
        trainer.init_weights(update)
        if update != 1:
            engine.sleep(2)
            engine.wake()
        engine.update_weights(stream_weights(trainer))
        verdicts = check_weight_sync(
            engine,
            dict(stream_weights(trainer)),
            case=case,
            log_probs=trainer_log_probs(trainer, case),
            budget=budget,
            device=device.label,
        )
        if any(v.outcome is not Outcome.PASS for v in verdicts):
            break
    table = golden_load_format_table(trainer, case, device=device, alias=alias)
    return [*verdicts, table.verdict(device=device.label)]


def golden_load_format_table(
    trainer: CausalLM, case: ProbeCase, *, device: Device, alias: bool = False, post_process: bool = True
) -> LoadFormatTable:
    """:func:`load_format_table` for golden engines; the checkpoint holds the trainer's present weights.

    ``post_process=False`` and ``alias=False`` reproduce the reported fault: dummy is garbled, safetensors is not.
    """
    from alignment.weights.checkpoint import save_checkpoint

    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "checkpoint"
        save_checkpoint(checkpoint, trainer.config, dict(stream_weights(trainer)))

        def build(load_format: str) -> GoldenRollout:
            return GoldenRollout(
                trainer.config,
                dtype=trainer.dtype,
                device=device,
                load_format=load_format,
                checkpoint=checkpoint if load_format != "dummy" else None,
                seed=ENGINE_SEED,
                alias=alias,
            )

        return load_format_table(build, lambda: stream_weights(trainer), case, post_process=post_process)
