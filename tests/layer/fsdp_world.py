"""Ranks of an FSDP2 run as processes, and what the float64 golden engine makes of the same rows. As a script it is one
rank."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch
from megatron_world import (
    LEARNING_RATE,
    STEPS,
    golden_outputs,
    join,
    policy_loss,
    replayed_rows,
    run_steps,
    share,
    weights,
)

from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset

# Relative L2 of a gradient has a floor: this share of the global norm spread over all parameters.
GRADIENT_FLOOR = 1e-3


def fsdp_engine(config, state, case: dict, *, outputs=golden_outputs, optimizer=True):
    """``case`` holds dtype and :class:`FsdpSettings`."""
    from alignment.backends.fsdp_training import FsdpSettings, FsdpTrainingEngine
    from alignment.backends.training import OptimizerConfig
    from alignment.devices.base import get_device

    settings = {k: v for k, v in case.items() if k in FsdpSettings.__dataclass_fields__}
    return FsdpTrainingEngine(
        config,
        weights=iter(state.items()),
        optimizer=OptimizerConfig(lr=LEARNING_RATE) if optimizer else None,
        outputs=outputs,
        dtype=getattr(torch, case.get("dtype", "float32")),
        device=get_device("cpu"),
        settings=FsdpSettings(**settings),
    )


class Recorded:
    """What calls of a model returned, by row, at real tokens only."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def __call__(self, model, batch):
        def keep(*arguments, **keywords):
            logits = model(*arguments, **keywords)
            self.logits += [row[real] for row, real in zip(logits.detach().clone(), keywords["attention_mask"] != 0)]
            return logits

        return golden_outputs(keep, batch)


class Golden:
    """The float64 golden engine on all rows, from weights rounded to ``dtype``: logits, losses, norms, first gradients
    and final weights."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        from alignment.backends.golden_training import GoldenTrainingEngine
        from alignment.backends.training import OptimizerConfig

        config = preset(name)
        model = CausalLM(config, dtype=torch.float64)
        model.load_state_dict(weights(config, dtype))
        recorded = Recorded()
        engine = GoldenTrainingEngine(
            model, optimizer=OptimizerConfig(lr=LEARNING_RATE), outputs=recorded, device="cpu"
        )
        rows = {k: v.double() if v.is_floating_point() else v for k, v in replayed_rows(config).items()}
        batches = share(rows, 0, 1)
        engine.forward(batches, stage="old_log_prob")
        self.logits = list(recorded.logits)
        self.losses, self.norms, self.gradients = [], [], {}
        step = engine._step

        def keeping(gradients, norm, rate):
            self.gradients = self.gradients or {n: g.clone() for n, g in gradients.items()}
            step(gradients, norm, rate)

        engine._step = keeping
        for _ in range(STEPS):
            report = engine.update(batches, policy_loss, stage="update_actor")
            self.losses.append(report.metrics["loss"])
            self.norms.append(report.grad_norm)
        self.weights = {n: t.clone() for n, t in engine.export_weights()}
        mask = rows["response_mask"]
        self.scale = float((rows["advantages"].abs() * mask).sum() / mask.sum())

    def gradient_errors(self, found: dict[str, torch.Tensor]) -> dict[str, float]:
        floor = GRADIENT_FLOOR * self.norms[0] / len(self.gradients) ** 0.5
        return {
            n: float((found[f"gradient.{n}"].double() - g).norm() / (g.norm() + floor))
            for n, g in self.gradients.items()
        }

    def logits_error(self, found: list[torch.Tensor]) -> float:
        """Largest difference over the largest logit."""
        worst = max(float((x.double() - y).abs().max()) for x, y in zip(found, self.logits, strict=True))
        return worst / max(float(y.abs().max()) for y in self.logits)

    def mean_logits_error(self, found: list[torch.Tensor]) -> float:
        """Mean difference over all logits: one token whose near-tied router flipped does not decide it."""
        off = [(x.double() - y).abs() for x, y in zip(found, self.logits, strict=True)]
        return float(sum(o.sum() for o in off)) / sum(o.numel() for o in off)


def run_case(case: dict, rank: int, world_size: int) -> tuple[dict, dict]:
    """Numbers and tensors of one case; equal on every rank. ``uneven`` gives rank 0 fewer and larger micro batches,
    ``wrong_scale`` multiplies the gradients."""
    import torch.distributed as dist

    config = preset(case["preset"])
    state = weights(config, getattr(torch, case.get("dtype", "float32")))
    recorded = Recorded()
    engine = fsdp_engine(config, state, case, outputs=recorded)
    engine.gradient_scale *= case.get("wrong_scale", 1.0)
    exported = all(torch.equal(t, state[n]) for n, t in engine.export_weights())
    batches = share(replayed_rows(config), rank, world_size)
    if case.get("uneven") and rank == 0:
        batches = [{name: torch.cat([b[name] for b in batches]) for name in batches[0]}]
    engine.forward(batches, stage="old_log_prob")
    logits = list(recorded.logits)
    losses, norms, gradients, final = run_steps(engine, batches)
    # Idle passes come last.
    rows = sum(len(batch["input_ids"]) for batch in batches)
    everyone: list = [None] * world_size
    dist.all_gather_object(everyone, (losses, logits[:rows]))
    numbers = {
        "losses": [sum(part[0][step] for part in everyone) for step in range(STEPS)],
        "norms": norms,
        "exported": exported,
        "gradient_scale": engine.gradient_scale,
        "here": sum(t.to_local().numel() for t in engine.model.parameters()),
        "whole": sum(t.numel() for t in engine.model.parameters()),
    }
    tensors = {f"gradient.{n}": t for n, t in gradients.items()}
    tensors |= {f"weight.{n}": t for n, t in final.items()}
    tensors |= {f"logits.{i:03}": t for i, t in enumerate(t for part in everyone for t in part[1])}
    return numbers, tensors


@contextlib.contextmanager
def alone():
    """Leaves no process group behind, which other engines would take for theirs."""
    import torch.distributed as dist

    assert not dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main(rank: int, world_size: int, job: dict) -> None:
    from safetensors.torch import save_file

    join(rank, world_size, job)
    for name, case in job["cases"].items():
        numbers, tensors = run_case(case, rank, world_size)
        if rank == 0:
            save_file({k: v.contiguous() for k, v in tensors.items()}, f"{job['results']}/{name}.safetensors")
            (Path(job["results"]) / f"{name}.json").write_text(json.dumps(numbers))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
