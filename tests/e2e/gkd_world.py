"""A distillation small enough for a test: the tiny world's model teaches a smaller student, on sums and on chats."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import dapo_world
import torch

from alignment.models.causal_lm import CausalLM
from alignment.rl.config import flatten, unflatten
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.tokenizer import Tokenizer
from alignment.weights.checkpoint import load_config, save_checkpoint

STUDENT_SEED = 17
LONG = "1 + 1 + 1 + 1 + 1 + 1 ="


HALF_WIDTH = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 16}


def build(root: Path, world: Path, *, sizes: dict = HALF_WIDTH) -> Path:
    """Writes ``root/student`` (``world/model`` with other sizes), ``root/chats.jsonl`` and ``root/opsd.jsonl``."""
    config = load_config(world / "model")
    student = dataclasses.replace(config, **sizes)
    model = CausalLM(student).init_weights(STUDENT_SEED)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    save_checkpoint(root / "student", student, model.state_dict())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(world / "model" / name, root / "student" / name)
    questions = [f"{a} + {b} =" for a in range(4) for b in range(4)]
    rows = [
        {
            "id": f"chat-{i:02d}",
            "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": str(eval(q[:-1]))}],
            "data_source": "reasoning_gym/gcd",
            "ground_truth": str(eval(q[:-1])),
        }
        for i, q in enumerate(questions)
    ]
    write_lines(root / "chats.jsonl", rows)
    hinted = [{**row, "teacher_prompt": f"{row['ground_truth']} = {q[:-2]}"} for row, q in zip(rows, questions)]
    write_lines(root / "opsd.jsonl", hinted)
    too_long = [{**row, "messages": [{"role": "user", "content": LONG}, row["messages"][1]]} for row in rows[:6]]
    write_lines(root / "long.jsonl", [*too_long, *rows[6:]])
    return root


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def config(world: Path, root: Path, **changes) -> GkdConfig:
    """Four samples a step, two steps a generation; ``changes`` are dotted keys with ``__`` for the dots."""
    tree = {
        "data.train_files": [str(root / "chats.jsonl")],
        "data.max_prompt_length": 10,
        "data.max_response_length": dapo_world.RESPONSE,
        "data.train_batch_size": 4,
        "actor_rollout_ref.model.path": str(root / "student"),
        "actor_rollout_ref.actor.optim.lr": 3e-3,
        "gkd.teacher_model": str(world / "model"),
        "gkd.steps_per_generation": 2,
        "gkd.micro_batch_size": 2,
        "gkd.temperature": 0.9,
        "gkd.beta": 0.4,
        "gkd.max_length": 14,
        "trainer.total_training_steps": 6,
        "trainer.device": "cpu",
        "trainer.logger": ["jsonl"],
        "trainer.save_freq": 0,
    }
    tree.update({key.replace("__", "."): value for key, value in changes.items()})
    made = GkdConfig.from_dict(unflatten(tree))
    assert flatten(GkdConfig.from_dict(made.to_dict()).to_dict()) == flatten(made.to_dict())
    return made


def tokenizer(root: Path) -> Tokenizer:
    return Tokenizer(root / "student")
