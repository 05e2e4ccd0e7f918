from __future__ import annotations

import math

import dapo_world

from alignment.rl.run import run_dapo

GRPO = {
    "actor_rollout_ref__actor__clip_ratio_high": None,
    "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref__actor__use_kl_loss": True,
    "reward_model__reward_manager": "naive",
    "reward_model__overlong_buffer__enable": False,
}
PPO = {
    "algorithm__adv_estimator": "gae",
    "algorithm__lam": 0.95,
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_penalty": "k1",
    "algorithm__kl_ctrl__type": "adaptive",
    "critic__optim__lr": 1e-3,
    "trainer__total_training_steps": 8,
}
FILTER = {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__metric": "seq_reward"}


def test_grpo_has_a_reference_and_its_kl_starts_at_zero(world, tmp_path):
    result = run_dapo(dapo_world.config(world, **GRPO), run_dir=tmp_path)
    first, second, third = result.metrics
    assert first["actor/kl_loss"] == 0.0 < second["actor/kl_loss"]
    assert "critic/vf_loss" not in first


def test_ppo_has_a_critic_that_learns_and_a_kl_in_the_reward(world, tmp_path):
    result = run_dapo(dapo_world.config(world, **PPO), run_dir=tmp_path)
    losses = [line["critic/vf_loss"] for line in result.metrics]
    assert losses[-1] < losses[0] / 2
    first, second = result.metrics[:2]
    assert first["actor/reward_kl_penalty"] == 0.0
    assert first["actor/reward_kl_penalty_coeff"] == 0.001
    assert second["actor/reward_kl_penalty_coeff"] < 0.001  # far below the target: the controller loosens
    assert result.metrics[0]["critic/rewards/mean"] == result.metrics[0]["critic/score/mean"]


def test_a_critic_that_is_not_updated_does_not_learn(world, tmp_path, monkeypatch):
    from alignment.backends import golden_training

    monkeypatch.setattr(golden_training, "adamw_step", lambda *tensors, **settings: None)
    result = run_dapo(dapo_world.config(world, **PPO), run_dir=tmp_path)
    losses = [line["critic/vf_loss"] for line in result.metrics]
    assert not losses[-1] < losses[0] / 2


def test_four_updates_per_rollout_leave_the_first_policy(world, tmp_path):
    one = run_dapo(dapo_world.config(world), run_dir=tmp_path / "one")
    four = run_dapo(
        dapo_world.config(world, actor_rollout_ref__actor__ppo_mini_batch_size=1), run_dir=tmp_path / "four"
    )
    assert one.metrics[0]["reward/before_filter"] == four.metrics[0]["reward/before_filter"]
    assert one.metrics[0]["actor/ppo_kl"] == 0.0 != four.metrics[0]["actor/ppo_kl"]
    assert four.metrics[0]["actor/grad_norm"] != one.metrics[0]["actor/grad_norm"]


def test_epochs_repeat_the_mini_batches_and_shuffling_changes_their_order(world, tmp_path):
    settings = {"actor_rollout_ref__actor__ppo_mini_batch_size": 2, "actor_rollout_ref__actor__ppo_epochs": 2}
    straight = run_dapo(dapo_world.config(world, **settings), run_dir=tmp_path / "straight")
    shuffled = run_dapo(
        dapo_world.config(world, actor_rollout_ref__actor__shuffle=True, **settings), run_dir=tmp_path / "shuffled"
    )
    again = run_dapo(
        dapo_world.config(world, actor_rollout_ref__actor__shuffle=True, **settings), run_dir=tmp_path / "again"
    )
    assert straight.metrics[0]["actor/pg_loss"] != shuffled.metrics[0]["actor/pg_loss"]
    assert shuffled.metrics == again.metrics


def test_regeneration_trains_only_on_groups_that_differ(world, tmp_path):
    result = run_dapo(dapo_world.config(world, **FILTER), run_dir=tmp_path)
    rounds = [line["filter/num_gen_batches"] for line in result.metrics]
    assert max(rounds) > 1
    for line, step in zip(result.metrics, result.curve.steps, strict=True):
        assert len(step.prompt_ids) == 4 * line["filter/num_gen_batches"]
        kept = sum(v > 0 for v in step.groups["reward"].variance)
        assert line["filter/kept_fraction"] == kept / len(step.prompt_ids) == step.scalars["kept_fraction"]
        assert line["actor/pg_scale"] > 0
    assert result.curve.filtered


def test_regeneration_is_bounded_and_says_what_fills_the_batch(world, tmp_path):
    bounded = dapo_world.config(world, algorithm__filter_groups__max_num_gen_batches=1, **FILTER)
    result = run_dapo(bounded, run_dir=tmp_path)
    assert [line["filter/num_gen_batches"] for line in result.metrics] == [1, 1, 1]
    for line in result.metrics:
        assert line["filter/filled"] == 4 * (1 - line["filter/kept_fraction"])
    assert max(line["filter/filled"] for line in result.metrics) > 0


def test_a_reserve_keeps_the_prompts_of_every_step(world, tmp_path):
    plain = run_dapo(dapo_world.config(world), run_dir=tmp_path / "plain")
    reserve = dapo_world.config(
        world, algorithm__filter_groups__mode="reserve", algorithm__filter_groups__reserve_size=6, **FILTER
    )
    filtered = run_dapo(reserve, run_dir=tmp_path / "reserve")
    assert [s.prompt_hash for s in filtered.curve.steps] == [s.prompt_hash for s in plain.curve.steps]
    assert max(line["filter/num_gen_batches"] for line in filtered.metrics) > 1
    assert [len(s.prompt_ids) for s in filtered.curve.steps] == [4, 4, 4]
    assert filtered.metrics[0]["actor/pg_scale"] > plain.metrics[0]["actor/pg_scale"]


def test_the_overlong_punishment_reaches_the_reward_of_the_longest_responses_only(world, tmp_path):
    result = run_dapo(dapo_world.config(world, trainer__total_training_steps=1), run_dir=tmp_path)
    [line] = result.metrics
    [step] = result.curve.steps
    # One token of buffer: a response of full length loses 1, any shorter one nothing.
    lost = step.groups["score"].grand_mean - step.groups["reward"].grand_mean
    assert math.isclose(lost, line["response_length/clip_ratio"], rel_tol=2**-40)
