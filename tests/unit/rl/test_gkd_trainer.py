"""The driver of distillation with workers that only pretend: a thousand steps, resumed in the middle of a generation."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from alignment.backends.training import UpdateReport
from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.distill_loss import active_positions
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_data import GkdSample, SampleSet
from alignment.rl.gkd_stages import StudentUpdate
from alignment.rl.gkd_trainer import Generation, GkdTrainer, total_steps
from alignment.rl.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).resolve().parents[3] / "baselines" / "checkpoints" / "tiny-moonlight-student"
SPG, BATCH, RESPONSE, STEPS = 4, 2, 2, 1000


class Workers:
    """Answers every stage without a model; the student's answer is always one token and the end."""

    world_size, roles = 1, ("actor", "rollout")

    def __init__(self, eos: int, pad: int) -> None:
        self.eos, self.pad, self.synced, self.trained = eos, pad, 0, []

    def stream(self, produce, to, consume) -> None:
        self.synced += 1

    def call(self, stage: str, batch: Batch | None = None, **arguments):
        return getattr(self, stage)(batch, **arguments)

    def rollout(self, batch: Batch) -> Batch:
        responses = torch.tensor([[7, self.eos]]).expand(len(batch), -1).contiguous()
        mask = torch.ones_like(responses)
        attention = torch.cat([batch["prompt_mask"], mask], 1)
        return batch.add(
            {
                "responses": responses,
                "response_mask": mask,
                "input_ids": torch.cat([batch["prompts"], responses], 1),
                "attention_mask": attention,
                "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            }
        )

    def teacher_log_prob(self, batch: Batch) -> Batch:
        return batch.add({"teacher_token_log_probs": -active_positions(batch["labels"]).float()})

    def update_student(self, batch: Batch, counts) -> list[StudentUpdate]:
        self.trained.append((tuple(batch["prompt_id"]), tuple(batch["dataset_response"].tolist())))
        metrics = {"student/loss": 1.0, "student/agreement": 0.5, "student/jsd_loss": 1.0}
        samples = {uid: {"tokens": 2, "divergence": 1.0, "agreement": 1.0} for uid in batch["uid"]}
        return [StudentUpdate(report=UpdateReport(metrics=metrics, grad_norm=1.0, learning_rate=0.1), samples=samples)]


class Series:
    """The lines a run would write."""

    def __init__(self) -> None:
        self.on_policy: list[bool] = []

    def log(self, step, *, metrics, groups, timings, workloads) -> None:
        assert len(self.on_policy) < step
        self.on_policy.append(bool(metrics["student/on_policy"]))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(CHECKPOINT)


def samples(count: int = 21) -> SampleSet:
    made = []
    for i in range(count):
        made.append(
            GkdSample(
                sample_id=f"s{i}", prompt_ids=(1, 3, i + 10), response_ids=(i + 10, 2), response_mask=(True, True)
            )
        )
    return SampleSet(made)


def trainer(tokenizer, tmp_path, steps: int = STEPS, **gkd) -> tuple[GkdTrainer, Workers]:
    config = GkdConfig.from_dict(
        {
            "data": {"train_batch_size": BATCH, "max_prompt_length": 4, "max_response_length": RESPONSE},
            "gkd": {"teacher_model": "t", "steps_per_generation": SPG, "max_length": 6, **gkd},
            "trainer": {"total_training_steps": steps, "save_freq": 0},
        }
    )
    workers = Workers(tokenizer.eos_token_id, tokenizer.pad_token_id)
    groups = dict.fromkeys(("actor", "rollout"), workers)
    made = GkdTrainer(config, groups=groups, samples=samples(), tokenizer=tokenizer, checkpoints=tmp_path)
    return made, workers


@pytest.fixture(scope="module")
def straight(tokenizer, tmp_path_factory):
    """A thousand steps without a break: their sources, and what they trained on."""
    made, workers = trainer(tokenizer, tmp_path_factory.mktemp("run"))
    series = Series()
    made.fit(series)
    return series.on_policy, workers


def test_a_thousand_steps_follow_the_seeded_sequence(straight):
    generator = random.Random(42)
    drawn = [generator.random() < 0.5 for _ in range(STEPS // SPG)]
    assert straight[0] == [source for source in drawn for _ in range(SPG)]
    # Weights are synced once per on-policy generation, and at no other time.
    assert straight[1].synced == sum(drawn)


@pytest.mark.parametrize("at", [501, 503, 999])
def test_they_do_after_a_resume_in_the_middle_of_a_generation(tokenizer, tmp_path, straight, at):
    first, before = trainer(tokenizer, tmp_path, at)
    begun = Series()
    first.fit(begun)
    state = json.loads(json.dumps({"step": at, **first._state()}))
    second, after = trainer(tokenizer, tmp_path)
    second.step = state["step"]
    second._load_state(state)
    rest = Series()
    rest.on_policy = list(begun.on_policy)
    second.fit(rest)
    assert rest.on_policy == straight[0]
    assert before.trained + after.trained == straight[1].trained


def test_a_step_trains_on_one_source_only(straight):
    for on_policy, (_, dataset) in zip(*[straight[0], straight[1].trained], strict=True):
        assert set(dataset) == {int(not on_policy)}


def test_an_epoch_drops_what_does_not_fill_a_generation(straight):
    """21 samples, 8 a generation: two generations an epoch, 16 different samples in each."""
    size = SPG * 2
    for start in range(0, 80, size):
        seen = [name for names, _ in straight[1].trained[start : start + size] for name in names]
        assert len(seen) == len(set(seen)) == 16


def test_chunks_are_equal_and_consecutive():
    made = [GkdSample(sample_id=str(i), prompt_ids=(1,)) for i in range(6)]
    generation = Generation(samples=made, on_policy=True)
    chunks = [[s.sample_id for s in generation.next_chunk(3)] for _ in range(3)]
    assert chunks == [["0", "1"], ["2", "3"], ["4", "5"]]
    again = Generation.from_json(json.loads(json.dumps(generation.to_json())))
    assert again == generation


def test_steps_of_all_epochs(tokenizer):
    config = GkdConfig.from_dict(
        {
            "data": {"train_batch_size": 2},
            "gkd": {"teacher_model": "t", "steps_per_generation": 4},
            "trainer": {"total_epochs": 3},
        }
    )
    assert total_steps(config, samples()) == 3 * 2 * 4


def test_a_template_that_cannot_be_continued_is_refused(tokenizer, tmp_path, monkeypatch):
    made, _ = trainer(tokenizer, tmp_path)
    assert made._said([{"role": "user", "content": "1"}])[0] != tokenizer.bos_token_id
    monkeypatch.setattr(type(tokenizer), "encode_chat", lambda self, messages: [9, 9])
    with pytest.raises(
        InputError, match="the chat template cannot be continued turn by turn; expected a text that begins"
    ):
        made._said([{"role": "user", "content": "1"}])
