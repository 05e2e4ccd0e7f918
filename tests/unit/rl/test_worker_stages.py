from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from alignment.backends.rollout import Generation
from alignment.errors import InputError
from alignment.rl import stages
from alignment.rl.config import TrainConfig
from alignment.rl.contracts import check


class Echo:
    """An engine whose log-prob of a token is minus its id; it notes what it was given."""

    def __init__(self):
        self.seen, self.reports = [], []

    def forward(self, micro_batches, *, stage):
        self.seen += micro_batches
        return [{"log_probs": -micro["responses"].double()} for micro in micro_batches]

    def update(self, micro_batches, loss, *, stage):
        self.seen += micro_batches
        self.reports.append((stage, len(micro_batches), loss))
        return len(self.reports)


def config(**changes) -> TrainConfig:
    tree = {
        "data": {"train_batch_size": 4, "max_response_length": 5, "max_prompt_length": 4},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 2, **changes}, "rollout": {"n": 2}},
        "algorithm": {"adv_estimator": "grpo"},
    }
    return TrainConfig.from_dict(tree)


DYNAMIC = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 13}


@pytest.mark.parametrize(
    "changes, pieces",
    [
        ({"ppo_micro_batch_size_per_gpu": 1}, 4),
        ({"ppo_micro_batch_size_per_gpu": 2}, 2),
        ({}, 1),
        (DYNAMIC, 2),
    ],
)
def test_rows_come_back_in_order_whatever_the_micro_batches(make_batch, changes, pieces):
    batch, engine = make_batch(), Echo()
    outputs = stages.forward(engine, batch, stages.rollout_batching(config(**changes)), stage="old_log_prob")
    assert len(engine.seen) == pieces
    expected = -(batch["responses"] * batch["response_mask"]).double()
    assert torch.equal(outputs["log_probs"], expected)


def test_training_and_inference_cut_alike(make_batch):
    settings = config(**DYNAMIC)
    batch = make_batch()
    cuts = [
        stages.rollout_batching(settings)(batch),
        stages.reference_batching(settings)(batch),
        stages.update_batching(settings.actor_rollout_ref.actor)(batch),
        stages.update_batching(settings.critic)(batch),
    ]
    assert all(cut == cuts[0] for cut in cuts)


def test_a_micro_batch_is_trimmed_to_its_longest_prompt_and_response(make_batch):
    batch = make_batch(lengths=(3, 2, 1, 1), prompt_lengths=(2, 3))
    trimmed = stages.trim(batch)
    assert trimmed["prompts"].shape == (4, 3) and trimmed["responses"].shape == (4, 3)
    assert trimmed["input_ids"].shape == trimmed["attention_mask"].shape == trimmed["position_ids"].shape == (4, 6)
    assert all(tensor.shape[1] == 3 for name, tensor in trimmed.items() if name not in stages.WHOLE)
    kept = trimmed["attention_mask"].bool()
    assert torch.equal(trimmed["input_ids"][kept], batch["input_ids"][batch["attention_mask"].bool()])
    assert torch.equal(trimmed["position_ids"][kept], batch["position_ids"][batch["attention_mask"].bool()])
    assert torch.equal(torch.cat([trimmed["prompts"], trimmed["responses"]], 1), trimmed["input_ids"])
    check("old_log_prob", batch.drop(list(batch.tensors)).add(trimmed))


def test_an_update_takes_one_step_per_mini_batch_with_its_own_counts(make_batch):
    batch, engine = make_batch(), Echo()
    settings = config(ppo_micro_batch_size_per_gpu=1)
    counts = ["counts of 0", "counts of 1"]
    cut = stages.update_batching(settings.actor_rollout_ref.actor)
    reports = stages.update(
        engine, batch.chunk(2), counts, cut, stage="update_actor", loss=lambda count: f"loss by {count}"
    )
    assert reports == [1, 2]
    assert engine.reports == [("update_actor", 2, "loss by counts of 0"), ("update_actor", 2, "loss by counts of 1")]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        stages.update(engine, batch.chunk(2), counts[:1], cut, stage="update_actor", loss=lambda count: None)


def test_generation_keeps_the_contract_and_trims_the_prompts(make_batch):
    whole = make_batch(prompt_lengths=(2, 3))
    prompts = whole.select(["prompts", "prompt_mask", "uid"]).add(meta={"sample_key": [7, 8, 9, 10]})
    asked = {}

    def generate(prompts, attention_mask, params, keys):
        asked.update(prompts=prompts, params=params, keys=keys)
        return Generation(
            responses=whole["responses"], response_mask=whole["response_mask"], log_probs=whole["rollout_log_probs"]
        )

    made = stages.generate(SimpleNamespace(generate=generate), prompts, config())
    check("rollout", made, require=("rollout_log_probs",))
    assert asked["prompts"].shape == (4, 3) and asked["keys"].tolist() == [7, 8, 9, 10]
    assert asked["params"].max_new_tokens == 5 and asked["params"].seed == 1
    assert torch.equal(
        made["position_ids"][made["attention_mask"].bool()], whole["position_ids"][whole["attention_mask"].bool()]
    )


def test_the_scale_of_the_loss_is_the_mean_of_advantage_times_ratio(make_batch):
    from alignment.rl.aggregation import Counts

    batch = make_batch()
    mask = batch["response_mask"].double()
    outputs = {"log_probs": batch["old_log_probs"] + 0.25, "entropy": batch["entropys"]}
    _, metrics = stages.actor_loss(config(), Counts.of(batch["response_mask"]))(outputs, batch.tensors)
    expected = (batch["advantages"].abs() * mask).sum() * torch.exp(torch.tensor(0.25).double()) / mask.sum()
    assert abs(metrics["actor/pg_scale"] - expected) <= torch.finfo(torch.float64).eps * mask.numel() * expected


def test_an_unknown_engine_is_refused(make_batch):
    from alignment.rl.worker import Worker, WorkerSetting

    settings = TrainConfig.from_dict(
        {
            **config().to_dict(),
            "engine": {"train": "nosuch", "rollout": "golden"},
            **{"actor_rollout_ref": {**config().to_dict()["actor_rollout_ref"], "actor": {"ppo_mini_batch_size": 2}}},
        }
    )
    with pytest.raises(
        InputError,
        match=r"engine.train: there is no such engine in the pipeline; expected golden \| fsdp \| megatron; found nosuch",
    ):
        Worker(WorkerSetting(config=settings), roles=("actor",), rank=0, world_size=1, rendezvous=None)
