"""Makes baselines/checkpoints/tiny-moonlight-student: the small student of the distillation runs.

A model a fifth the size of the warm checkpoint clones the same demonstrator for a few hundred steps: it speaks (answers
end, digits follow sums) and is far from its teacher. Needs reasoning-gym; the numbers it prints go to ``student.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path

import torch
from make_warm_start import (
    BATCH,
    CHECKPOINT,
    HELD_OUT,
    QUESTIONS,
    TASK_SHARES,
    build_examples,
    train,
)

from alignment.files import write_json
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig
from alignment.rl.tasks import EMBEDDED_TASKS, generate
from alignment.rl.tokenizer import Tokenizer
from alignment.weights.checkpoint import load_config, save_checkpoint

STUDENT = CHECKPOINT.with_name("tiny-moonlight-student")
SEED, STEPS, LEARNING_RATE = 20250801, 300, 2e-3


def student_config(teacher: ModelConfig) -> ModelConfig:
    """The teacher's shape, narrower and shallower."""
    return dataclasses.replace(
        teacher,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        n_routed_experts=4,
        num_attention_heads=2,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=STUDENT)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer(CHECKPOINT)
    examples, held_out = (
        build_examples(
            [q for task in EMBEDDED_TASKS for q in generate(task, counts[task.name], seed=0, split=split)],
            tokenizer,
            clean=False,
        )
        for split, counts in (("warm_start", QUESTIONS), ("held_out", HELD_OUT))
    )
    config = student_config(load_config(CHECKPOINT))
    model = CausalLM(config).init_weights(SEED)
    history = train(
        model, examples, held_out, steps=arguments.steps, peak=LEARNING_RATE, seed=SEED, every=arguments.steps
    )
    weights_hash = save_checkpoint(arguments.out, config, model.state_dict(), overwrite=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, arguments.out / name)
    record = {
        "kind": "student",
        "seed": SEED,
        "steps": arguments.steps,
        "learning_rate": LEARNING_RATE,
        "batch": BATCH,
        "parameters": sum(p.numel() for p in model.parameters()),
        "task_shares": TASK_SHARES,
        "torch": str(torch.__version__),
        "weights_hash": weights_hash,
        "history": history,
    }
    write_json(arguments.out / "student.json", record)


if __name__ == "__main__":
    main()
