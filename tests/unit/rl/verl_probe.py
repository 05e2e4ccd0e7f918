"""Asks verl's own code what it does, in a process of its own: importing its trainer and server changes a process.

Prints one JSON document; :mod:`test_verl_live_defects` judges it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import types
from pathlib import Path


def dumped_score(directory: str) -> float:
    """The score in the dump of a response with reward −1.5, whose reward function returned a score of −1."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    extra = {"score": [-1.0], "acc": [0.0], "overlong_reward": [-0.5]}
    RayPPOTrainer._write_generations(["in"], ["out"], ["gt"], [-1.5], extra, directory, 1)
    return json.loads((Path(directory) / "1.jsonl").read_text())["score"]


def fsdp_reads() -> dict[str, bool]:
    """Which settings of precision the FSDP engine looks at."""
    import verl.workers.engine.fsdp.transformer_impl as engine
    from verl.workers.config import FSDPEngineConfig

    assert FSDPEngineConfig(dtype="float32", strategy="fsdp2").dtype == "float32", "accepted without a word"
    source = inspect.getsource(engine)
    return {name: f"engine_config.{name}" in source for name in ("dtype", "mixed_precision")}


def filters_groups() -> bool:
    """Whether anything on the way of the legacy trainer looks at ``algorithm.filter_groups``."""
    import verl.trainer.main_ppo_v0 as entry
    import verl.trainer.ppo.ray_trainer as trainer
    from verl.utils import config

    return any("filter_groups" in inspect.getsource(module) for module in (entry, trainer, config))


class Enough(Exception):
    """The request is there; what becomes of it is of no interest."""


async def seeds(samples: int) -> list[int | None]:
    """Seeds of the requests that verl's server makes for samples of one prompt, with ``rollout.full_determinism``."""
    import verl.workers.rollout.vllm_rollout.vllm_async_server as module

    asked: list[int | None] = []

    def generate(*, sampling_params, **_):
        asked.append(sampling_params.seed)
        raise Enough

    async def admitted(request_id):
        return None

    values = {"repetition_penalty": 1.0, "ignore_eos": False}
    config = types.SimpleNamespace(
        max_model_len=32, response_length=8, prompt_length=8, full_determinism=True, seed=42, get=values.get
    )
    server = types.SimpleNamespace(
        config=config, replica_rank=0, lora_as_adapter=False, _disaggregation_role=None, _pd_decode_peers=[],
        _park_until_admitted=admitted, model_config=types.SimpleNamespace(processor=None),
        engine=types.SimpleNamespace(generate=generate),
    )  # fmt: skip
    for i in range(samples):
        try:
            await module.vLLMHttpServer.generate(server, [3, 4, 5], {"temperature": 1.0, "logprobs": True}, f"det-{i}")
        except Enough:
            continue
    return asked


if __name__ == "__main__":
    found = {
        "dumped_score": dumped_score(sys.argv[1]),
        "fsdp_reads": fsdp_reads(),
        "filters_groups": filters_groups(),
        "seeds": asyncio.run(seeds(4)),
    }
    print("FOUND " + json.dumps(found))
