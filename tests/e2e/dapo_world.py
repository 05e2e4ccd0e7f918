"""A training run small enough for a test: a tokenizer, a model of two layers, a few prompts worth answering."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch

from alignment.backends.golden_rollout import GoldenRollout
from alignment.backends.rollout import SamplingParams
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig, preset
from alignment.rl.config import TrainConfig, unflatten
from alignment.rl.data import Prompt, PromptSet, prompt_batch, write_parquet
from alignment.rl.tasks import Question, verl_rows
from alignment.rl.tokenizer import Tokenizer, train_tokenizer
from alignment.weights.checkpoint import save_checkpoint

RESPONSE, PROMPT = 4, 12


def model_config(tokenizer: Tokenizer) -> ModelConfig:
    return dataclasses.replace(
        preset("tiny-moonlight"),
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        n_routed_experts=4,
        num_attention_heads=2,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
        initializer_range=0.3,
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build(root: Path) -> Path:
    """Writes ``root/model`` (checkpoint and tokenizer) and ``root/prompts`` (materialised).

    The head is scaled until the untrained model has favourites, of which the end of the text is one, and each prompt's
    reference answer is what the model itself is most likely to say: so some samples are right and others are not.
    """
    questions = [f"{a} + {b} =" for a in range(4) for b in range(4)]
    tokenizer = train_tokenizer(questions * 4, root / "tokenizer", vocab_size=105)
    prompts = [
        Prompt(
            prompt_id=f"sum-{i:02d}",
            token_ids=tuple(tokenizer.encode(q)),
            data_source="reasoning_gym/gcd",
            ground_truth="?",
        )
        for i, q in enumerate(questions)
    ]
    batch = prompt_batch(prompts, pad_token_id=tokenizer.pad_token_id, prompt_length=PROMPT)
    config = model_config(tokenizer)
    model = CausalLM(config).init_weights(11)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
        favourite = model(batch["prompts"], attention_mask=batch["prompt_mask"])[:, -1].argmax(-1).mode().values
        model.lm_head.weight[tokenizer.eos_token_id] = 0.9 * model.lm_head.weight[favourite]
    save_checkpoint(root / "model", config, model.state_dict())
    shutil.copytree(root / "tokenizer", root / "model", dirs_exist_ok=True)
    params = SamplingParams(
        max_new_tokens=RESPONSE,
        temperature=0.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    engine = GoldenRollout(load_format="safetensors", checkpoint=root / "model")
    said = engine.generate(batch["prompts"], batch["prompt_mask"], params, torch.arange(len(prompts)))
    answers = [tokenizer.decode_response(row) for row in said.responses.tolist()]
    prompts = [dataclasses.replace(p, ground_truth=a) for p, a in zip(prompts, answers, strict=True)]
    PromptSet(prompts, tokenizer_hash=tokenizer.content_hash).save(root / "prompts")
    return root


def config(root: Path, **changes) -> TrainConfig:
    """Two prompts' worth of mini batches, eight samples each; ``changes`` are dotted keys with ``__`` for the dots."""
    tree = {
        "data.train_files": [str(root / "prompts.json")],
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": RESPONSE,
        "data.train_batch_size": 4,
        "actor_rollout_ref.model.path": str(root / "model"),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 64,
        "actor_rollout_ref.rollout.n": 8,
        "algorithm.adv_estimator": "grpo",
        "reward_model.reward_manager": "dapo",
        "reward_model.overlong_buffer.enable": True,
        "reward_model.overlong_buffer.len": 1,
        "trainer.total_training_steps": 3,
        "trainer.device": "cpu",
        "trainer.logger": ["jsonl"],
        "trainer.save_freq": 0,
    }
    tree.update({key.replace("__", "."): value for key, value in changes.items()})
    return TrainConfig.from_dict(unflatten(tree))


def asked_in_chat(root: Path, directory: Path, **recipe) -> dict[str, object]:
    """The same questions in the chat template, with the instruction and few-shot examples of ``recipe``
    (:func:`~alignment.rl.tasks.verl_rows`), as parquet; as changes of :func:`config`.
    """
    tokenizer = Tokenizer(root / "model")
    questions = [
        Question(data_source=p.data_source, question=tokenizer.decode(p.token_ids), answer=p.ground_truth, metadata={})
        for p in PromptSet.load(root / "prompts.json")
    ]
    directory.mkdir(exist_ok=True)
    write_parquet(verl_rows(questions, split="rl", **recipe), directory / "asked.parquet")
    return {
        "data__train_files": [str(directory / "asked.parquet")],
        "data__max_prompt_length": 48,
        "trainer__total_training_steps": 1,
    }


def every_second_long(root: Path, directory: Path) -> dict[str, object]:
    """The same prompts, unshuffled, every second one four times as long; as changes of :func:`config`."""
    prompts = PromptSet.load(root / "prompts.json")
    changed = [dataclasses.replace(p, token_ids=p.token_ids * 4) if i % 2 == 0 else p for i, p in enumerate(prompts)]
    PromptSet(changed, tokenizer_hash=prompts.tokenizer_hash).save(directory / "uneven")
    return {
        "data__train_files": [str(directory / "uneven.json")],
        "data__max_prompt_length": 40,
        "data__shuffle": False,
    }


def halve_the_softmax_scale() -> None:
    """A worker setup that breaks the attention of every model in its process."""
    from alignment.models import mla

    honest = mla.softmax_scale
    mla.softmax_scale = lambda model: honest(model) / 2


def refuse() -> None:
    """A worker setup that fails."""
    from alignment.errors import InputError

    raise InputError("this worker will not start", where="setup")


def poison_the_second_rank() -> None:
    """A worker setup under which rank 1 has NaN in its head when it updates."""
    from alignment.rl.worker import Worker

    honest = Worker.update_actor

    def update_actor(self, *arguments, **keywords):
        if self.rank == 1:
            with torch.no_grad():
                self.actor.model.lm_head.weight[5] = float("nan")
        return honest(self, *arguments, **keywords)

    update_actor.dispatch = honest.dispatch
    Worker.update_actor = update_actor
