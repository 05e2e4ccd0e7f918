"""Ranks of a megatron-core run as processes, and the replayed batch they share. Run as a script it is one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from alignment.backends.megatron_model import installed_version
from alignment.errors import UnavailableError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.random import portable_integers, portable_normal

try:
    VERSION = installed_version()
except UnavailableError:
    VERSION = ""

SEED = 11
ROWS, PROMPT, RESPONSE, MICRO = 8, 6, 10, 2
LEARNING_RATE = 1e-3
STEPS = 3
LIMIT_SECONDS = 500


def small_config(name: str):
    """The preset with four layers, so that it has two virtual stages on two ranks."""
    return dataclasses.replace(preset(name), num_hidden_layers=4)


def weights(config, dtype=torch.float32) -> dict[str, torch.Tensor]:
    model = CausalLM(config, dtype=torch.float64).init_weights(SEED)
    return {
        name: t.detach().to(torch.float32 if name.endswith("e_score_correction_bias") else dtype)
        for name, t in model.state_dict().items()
    }


def replayed_rows(config) -> dict[str, torch.Tensor]:
    """Left-padded prompts and right-padded responses of different lengths, with fixed advantages."""
    ids = portable_integers(3, config.vocab_size, (ROWS, PROMPT + RESPONSE), seed=SEED, stream="parallel ids")
    mask = torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.int64)
    for row in range(ROWS):
        mask[row, : row % (PROMPT - 1)] = 0
        mask[row, PROMPT + RESPONSE - row % (RESPONSE - 1) :] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
        "responses": ids[:, PROMPT:],
        "response_mask": mask[:, PROMPT:],
        "advantages": portable_normal((ROWS, RESPONSE), seed=SEED, stream="parallel advantages", dtype=torch.float32),
    }


def share(rows: dict[str, torch.Tensor], rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """The micro batches of a rank."""
    mine = {name: tensor.chunk(world_size)[rank] for name, tensor in rows.items()}
    count = len(mine["input_ids"])
    return [{name: tensor[i : i + MICRO] for name, tensor in mine.items()} for i in range(0, count, MICRO)]


def by_token(logits: torch.Tensor, following: torch.Tensor) -> dict[str, torch.Tensor]:
    log_probs = logits.float().log_softmax(-1)
    return {
        "log_probs": log_probs.gather(-1, following[..., None])[..., 0],
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
    }


def golden_outputs(model, batch):
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"])
    width = batch["responses"].shape[1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = wide[:, -width - 1 : -1].log_softmax(-1)
    return {
        "log_probs": log_probs.gather(-1, batch["responses"][..., None])[..., 0],
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
    }


def policy_loss(outputs, batch):
    """Advantage-weighted likelihood summed over tokens, over the tokens of all rows."""
    total = float(replayed_rows_mask_sum())
    value = -(outputs["log_probs"] * batch["advantages"] * batch["response_mask"]).sum() / total
    return value, {"loss": value.detach()}


def replayed_rows_mask_sum() -> int:
    return sum(RESPONSE - row % (RESPONSE - 1) for row in range(ROWS))


def megatron_engine(config, state, layout: dict, *, dtype=torch.float32, optimizer=True):
    """``layout`` holds the sizes and, under other keys, switches of the build and of the optimizer.

    Where it names a ``dist_checkpoint``, the weights come from there and ``state`` is not read.
    """
    from alignment.backends.megatron_model import WAY_ROUNDS, BuildSettings, Recompute
    from alignment.backends.megatron_training import MegatronSettings, MegatronTrainingEngine
    from alignment.backends.training import OptimizerConfig
    from alignment.devices.base import get_device
    from alignment.weights.megatron_layout import ParallelSizes

    sizes = {f.name for f in dataclasses.fields(ParallelSizes)}
    recompute = {f.name for f in dataclasses.fields(Recompute)}
    dist_checkpoint = layout.get("dist_checkpoint")
    return MegatronTrainingEngine(
        config,
        weights=iter(() if dist_checkpoint else state.items()),
        optimizer=OptimizerConfig(lr=LEARNING_RATE) if optimizer else None,
        outputs=by_token,
        dtype=dtype,
        device=get_device("cpu"),
        settings=MegatronSettings(
            sizes=ParallelSizes(**{k: v for k, v in layout.items() if k in sizes}),
            build=BuildSettings(
                way_rounds=frozenset(WAY_ROUNDS) - set(layout.get("without", ())),
                recompute=Recompute(**{k: v for k, v in layout.items() if k in recompute}),
                transformer=layout.get("transformer", {}),
            ),
            use_distributed_optimizer=layout.get("use_distributed_optimizer", True),
            optimizer=layout.get("optimizer", {}),
            dist_checkpoint=Path(dist_checkpoint) if dist_checkpoint else None,
        ),
    )


def run_steps(engine, batches, *, steps=STEPS):
    """Losses (this rank's share), gradient norms, the gradients of the first step, and the final weights."""
    losses, norms, gradients = [], [], {}

    def keep(stream):
        gradients.update({name: g.detach().clone() for name, g in stream})

    for step in range(steps):
        report = engine.update(
            batches, policy_loss, stage="update_actor", observe_gradients=keep if step == 0 else None
        )
        losses.append(report.metrics["loss"])
        norms.append(report.grad_norm)
    return losses, norms, gradients, {name: t.detach().clone() for name, t in engine.export_weights()}


@contextlib.contextmanager
def processes(world_size: int, job: dict, *, script: str = __file__, environment: dict | None = None):
    """Starts one process per rank with ``job``; yields them, and ends those that are left."""
    with tempfile.TemporaryDirectory() as folder:
        job = {**job, "rendezvous": f"file://{folder}/rendezvous"}
        (Path(folder) / "job.json").write_text(json.dumps(job))
        here = Path(script)
        path = os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH"), str(here.parent), str(Path(__file__).parent)])
        )
        started = [
            subprocess.Popen(
                [sys.executable, str(here), str(rank), str(world_size), f"{folder}/job.json"],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environment or {})},
                stdout=open(f"{folder}/out_{rank}", "wb"),
                stderr=subprocess.STDOUT,
            )
            for rank in range(world_size)
        ]
        try:
            yield started, [Path(folder) / f"out_{rank}" for rank in range(world_size)]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                process.wait()


def launch(world_size: int, job: dict, **arguments) -> None:
    """Runs ``job`` on ``world_size`` ranks to its end.

    Raises:
        RuntimeError: a rank failed or the time was up, with the end of its output.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    with processes(world_size, job, **arguments) as (started, outputs):
        while any(p.poll() is None for p in started) and time.monotonic() < deadline:
            if any(p.poll() not in (None, 0) for p in started):
                time.sleep(2)
                break
            time.sleep(0.2)
        codes = [p.poll() for p in started]
        if any(codes) or None in codes:
            tails = "\n".join(f"--- rank {r}\n{o.read_text(errors='replace')[-3000:]}" for r, o in enumerate(outputs))
            raise RuntimeError(f"ranks ended with {codes}\n{tails}")


def join(rank: int, world_size: int, job: dict) -> None:
    import datetime

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=job["rendezvous"],
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=LIMIT_SECONDS),
    )


def resumes(engine, config, state, layout: dict, batches, job: dict) -> bool:
    """Whether a fresh engine that loads the state of ``engine`` makes the same next step, to the bit, on every rank."""
    folder = Path(job["results"]) / f"state-{layout['resume']}"
    engine.save_state(folder)
    fresh = megatron_engine(config, state, layout)
    fresh.load_state(folder)
    reports = [e.update(batches, policy_loss, stage="update_actor") for e in (engine, fresh)]
    equal = reports[0] == reports[1]
    for (name, a), (other, b) in zip(engine.export_weights(), fresh.export_weights(), strict=True):
        equal = equal and name == other and torch.equal(a, b)
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, equal)
    return all(everyone)


def main(rank: int, world_size: int, job: dict) -> None:
    from safetensors.torch import save_file

    join(rank, world_size, job)
    for name, layout in job["layouts"].items():
        config = small_config(layout.get("preset", "tiny-deepseek"))
        dtype = getattr(torch, layout.get("dtype", "float32"))
        state = weights(config, dtype)
        engine = megatron_engine(config, state, layout, dtype=dtype)
        exported = all(torch.equal(t, state[n]) for n, t in engine.export_weights())
        batches = share(replayed_rows(config), rank, world_size)
        log_probs = [o["log_probs"] for o in engine.forward(batches, stage="old_log_prob")]
        losses, norms, gradients, final = run_steps(engine, batches, steps=layout.get("steps", STEPS))
        resumed = resumes(engine, config, state, layout, batches, job) if layout.get("resume") else None
        total = torch.tensor(losses, dtype=torch.float64)
        torch.distributed.all_reduce(total)
        everyone = [None] * world_size
        torch.distributed.all_gather_object(everyone, log_probs)
        if rank == 0:
            tensors = {f"gradient.{n}": t for n, t in gradients.items()}
            tensors.update({f"weight.{n}": t for n, t in final.items()})
            tensors["log_probs"] = torch.cat([t for part in everyone for t in part])
            save_file({k: v.contiguous() for k, v in tensors.items()}, f"{job['results']}/{name}.safetensors")
            summary = {"losses": total.tolist(), "norms": norms, "exported": exported, "resumed": resumed}
            (Path(job["results"]) / f"{name}.json").write_text(json.dumps(summary))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
