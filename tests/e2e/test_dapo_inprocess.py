from __future__ import annotations

import json
import math

import dapo_world
import pytest
import torch

from alignment.errors import InputError
from alignment.rl import stages
from alignment.rl.batch_record import batch_path, read_batch, recorded_steps
from alignment.rl.config import TrainConfig
from alignment.rl.metrics import METRICS
from alignment.rl.run import run_dapo
from alignment.rl.tracking import GROUPS, TIMINGS, read_series
from alignment.rl.trainer import DapoTrainer
from alignment.rl.worker import Worker

ROUNDING = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def plain(world, tmp_path_factory):
    """One run of the plain configuration."""
    return run_dapo(dapo_world.config(world), run_dir=tmp_path_factory.mktemp("plain"))


def metric_bytes(result) -> bytes:
    return (result.directory / "metrics.jsonl").read_bytes() + (result.directory / GROUPS).read_bytes()


def test_a_run_writes_every_step_and_says_what_it_was(world, plain):
    assert [line["step"] for line in plain.metrics] == [1, 2, 3]
    about = json.loads((plain.directory / "run.json").read_text())
    assert about["device"] == "cpu" and about["seed"] == 1 and not about["filtered"]
    assert about["workers"][0]["roles"] == ["actor", "rollout", "reward"]
    assert TrainConfig.from_dict(json.loads((plain.directory / "config.json").read_text())) == dapo_world.config(world)
    [first, *_] = read_series(plain.directory / TIMINGS)
    assert set(first["seconds"]) == {
        "rollout",
        "reward",
        "old_log_prob",
        "advantage",
        "update_actor",
        "weight_sync",
        "step",
    }


def test_every_metric_is_a_known_one(plain):
    names = set(plain.metrics[0]) - {"step"}
    assert names - set(METRICS) == set()


def test_identities_of_the_first_update(plain):
    first = plain.metrics[0]
    assert first["actor/ppo_kl"] == 0.0 and first["actor/pg_clipfrac"] == 0.0
    vocabulary = 105
    assert 0.0 < first["actor/entropy"] < math.log(vocabulary)
    # One update per rollout on the policy that generated: prefill of the trainer against decode of the engine.
    assert 0.0 < first["training/rollout_log_probs_abs_diff_mean"] < ROUNDING * vocabulary
    assert abs(first["training/rollout_log_probs_diff_mean"]) <= first["training/rollout_log_probs_abs_diff_mean"]


def test_the_group_statistics_make_a_curve(plain):
    curve = plain.curve
    assert curve.total_steps == len(curve.steps) == 3
    step = curve.steps[0]
    assert len(step.prompt_ids) == 4 and step.group_size == 8
    assert set(step.groups) == {"reward", "score", "correctness", "response_length"}
    for line, curve_step in zip(plain.metrics, curve.steps, strict=True):
        size = len(curve_step.prompt_ids)
        assert (
            abs(curve_step.groups["score"].grand_mean - line["reward/before_filter"])
            <= torch.finfo(torch.float64).eps * size
        )


def test_the_same_run_twice_writes_the_same_bytes(world, plain, tmp_path):
    again = run_dapo(dapo_world.config(world), run_dir=tmp_path)
    assert metric_bytes(again) == metric_bytes(plain)


def test_another_seed_generates_otherwise_from_the_same_prompts(world, plain, tmp_path):
    other = run_dapo(dapo_world.config(world, trainer__seed=2), run_dir=tmp_path)
    assert [s.prompt_hash for s in other.curve.steps] == [s.prompt_hash for s in plain.curve.steps]
    assert other.curve.config == plain.curve.config
    assert other.curve.curve("reward") != plain.curve.curve("reward")


def test_another_learning_rate_is_another_curve_configuration(world, plain, tmp_path):
    other = run_dapo(dapo_world.config(world, actor_rollout_ref__actor__optim__lr=2e-3), run_dir=tmp_path)
    assert other.curve.config != plain.curve.config
    assert other.metrics[0]["actor/grad_norm"] == plain.metrics[0]["actor/grad_norm"]
    assert other.metrics[1]["actor/grad_norm"] != plain.metrics[1]["actor/grad_norm"]


@pytest.mark.parametrize(
    "on, off",
    [
        (
            {"actor_rollout_ref__actor__use_dynamic_bsz": True},
            {
                "actor_rollout_ref__actor__use_dynamic_bsz": False,
                "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 8,
            },
        ),
        ({"actor_rollout_ref__model__use_fused_kernels": True}, {"actor_rollout_ref__model__use_fused_kernels": False}),
    ],
    ids=["use_dynamic_bsz", "use_fused_kernels"],
)
def test_a_switch_of_layout_changes_nothing_but_rounding(world, tmp_path, on, off):
    """In float64, where the same tokens follow, on or off differ by the order of sums only."""
    one, other = (
        run_dapo(
            dapo_world.config(world, actor_rollout_ref__model__dtype="float64", **changes),
            run_dir=tmp_path / name,
        )
        for name, changes in (("on", on), ("off", off))
    )
    eps = torch.finfo(torch.float64).eps
    # AdamW divides by √v: where a gradient is small, a rounding error of it can grow by up to 1/√eps.
    bound = eps**0.5
    for a, b in zip(one.metrics, other.metrics, strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/pg_scale"):
            assert abs(a[name] - b[name]) <= bound * max(abs(a[name]), a["actor/pg_scale"]), name
        assert a["reward/before_filter"] == b["reward/before_filter"]


def test_a_batch_that_breaks_its_contract_stops_the_run_and_names_the_stage(world, tmp_path, monkeypatch):
    def prompt_in_the_mask(engine, batch, config):
        made = honest(engine, batch, config)
        mask = made["response_mask"].clone()
        mask[2, 0] = 0
        return made.add({"response_mask": mask})

    honest = stages.generate
    monkeypatch.setattr(stages, "generate", prompt_in_the_mask)
    with pytest.raises(InputError, match=r"rollout, response_mask, sample 2"):
        run_dapo(dapo_world.config(world), run_dir=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_stage_that_reorders_its_rows_is_found(world, tmp_path, monkeypatch):
    honest = Worker.old_log_prob

    def reversed_rows(self, batch):
        return honest(self, batch)[list(reversed(range(len(batch))))]

    reversed_rows.dispatch = honest.dispatch
    monkeypatch.setattr(Worker, "old_log_prob", reversed_rows)
    with pytest.raises(InputError, match="old_log_prob.*the stage changed a field that it only reads"):
        run_dapo(dapo_world.config(world), run_dir=tmp_path)


@pytest.mark.parametrize("stage", ["old_log_prob", "update_actor", "rollout"])
def test_logits_that_are_not_finite_name_the_stage(world, tmp_path, monkeypatch, stage):
    honest = getattr(Worker, stage)

    def with_nan(self, *arguments, **keywords):
        model = self.engine._model if stage == "rollout" else self.actor.model
        with torch.no_grad():
            model.lm_head.weight[5] = float("nan")
        return honest(self, *arguments, **keywords)

    with_nan.dispatch = honest.dispatch
    monkeypatch.setattr(Worker, stage, with_nan)
    with pytest.raises(InputError, match=f"{stage}.*logits are not finite|logits are not finite.*{stage}"):
        run_dapo(dapo_world.config(world), run_dir=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_sleep_really_destroys_the_weights_and_training_gives_its_memory_back(world, tmp_path, monkeypatch):
    seen = []
    honest_rollout, honest_update = Worker.rollout, Worker.update_actor

    def rollout(self, batch):
        answer = honest_rollout(self, batch)
        seen.append(("rollout", self.engine.weight_bytes() > 0, self.actor._resident))
        return answer

    def update(self, *arguments, **keywords):
        seen.append(("update", self.engine.weight_bytes() > 0, self.actor._resident))
        return honest_update(self, *arguments, **keywords)

    rollout.dispatch, update.dispatch = honest_rollout.dispatch, honest_update.dispatch
    monkeypatch.setattr(Worker, "rollout", rollout)
    monkeypatch.setattr(Worker, "update_actor", update)
    run_dapo(dapo_world.config(world, trainer__total_training_steps=2), run_dir=tmp_path)
    assert seen == [("rollout", True, False), ("update", False, True)] * 2


def test_without_a_weight_sync_the_sleeping_engine_refuses_to_generate(world, tmp_path, monkeypatch):
    monkeypatch.setattr(DapoTrainer, "_sync_weights", lambda self: None)
    with pytest.raises(InputError, match="generate: the engine is asleep"):
        run_dapo(dapo_world.config(world), run_dir=tmp_path)


def test_on_a_cpu_the_run_is_repeatable_without_the_determinism_switches_too(world, plain, tmp_path):
    loose = run_dapo(dapo_world.config(world, trainer__deterministic=False), run_dir=tmp_path)
    assert metric_bytes(loose) == metric_bytes(plain)
    assert not torch.are_deterministic_algorithms_enabled()


def test_time_slicing_changes_no_bit(world, plain, tmp_path):
    awake = run_dapo(dapo_world.config(world, actor_rollout_ref__rollout__free_cache_engine=False), run_dir=tmp_path)
    assert metric_bytes(awake) == metric_bytes(plain)


@pytest.mark.parametrize(
    "executor, words",
    [
        ("inprocess", "executor inprocess: this executor has one rank; expected 1; found 2. Next: use executor=ray"),
        ("cluster", "executor: unknown executor; expected ray | inprocess; found cluster"),
    ],
)
def test_an_executor_that_cannot_do_it_says_so(world, tmp_path, executor, words):
    with pytest.raises(InputError) as error:
        run_dapo(dapo_world.config(world, trainer__n_gpus_per_node=2), run_dir=tmp_path, executor=executor)
    assert words in str(error.value)


@pytest.mark.parametrize("setup", ["dapo_world:absent", "nowhere", "no_such_module:function"])
def test_a_worker_setup_that_does_not_exist_is_an_error(world, tmp_path, setup):
    with pytest.raises(InputError, match="worker_setup: the worker setup cannot be loaded.*expected module:function"):
        run_dapo(dapo_world.config(world), run_dir=tmp_path, worker_setup=setup)
    assert not list(tmp_path.iterdir())


def test_no_data_is_an_error(world, tmp_path):
    with pytest.raises(InputError, match="data.train_files: there is nothing to train on"):
        run_dapo(dapo_world.config(world, data__train_files=[]), run_dir=tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_recorded_batches_change_nothing_and_hold_what_was_trained_on(world, plain, tmp_path):
    recorded = run_dapo(dapo_world.config(world, trainer__record_batches=True), run_dir=tmp_path)
    assert metric_bytes(recorded) == metric_bytes(plain)
    assert recorded.curve.config == plain.curve.config
    assert recorded_steps(tmp_path) == list(range(1, len(plain.metrics) + 1))
    batch = read_batch(batch_path(tmp_path, 1))
    scores = batch.tensors["token_level_scores"].sum(1)
    assert float(scores.mean()) == pytest.approx(plain.metrics[0]["critic/score/mean"], abs=torch.finfo(torch.float32).eps)
    assert len(set(zip(batch.prompt_ids, batch.samples))) == len(batch)
    assert not (plain.directory / "batches").exists()
    run_dapo(dapo_world.config(world, trainer__record_batches=True, trainer__total_training_steps=1), run_dir=tmp_path)
    assert recorded_steps(tmp_path) == [1], "what a longer run left here is not this run's"
