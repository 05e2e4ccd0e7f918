from __future__ import annotations

import dataclasses

import pytest

from alignment.backends.training import UpdateReport
from alignment.errors import InputError
from alignment.rl.config import TrainConfig
from alignment.rl.filtering import DynamicSampling
from alignment.rl.run import comparison_fingerprint, placement
from alignment.rl.trainer import group_statistics, one_update, resume_fingerprint, total_steps


def config(**sections) -> TrainConfig:
    tree = {
        "data": {"train_batch_size": 4},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4}, "rollout": {"n": 2}},
    }
    return TrainConfig.from_dict({**tree, "algorithm": {"adv_estimator": "grpo"}, **sections})


def report(grad_norm: float, loss: float) -> UpdateReport:
    return UpdateReport(metrics={"actor/loss": loss}, grad_norm=grad_norm, learning_rate=0.5)


def test_shares_of_ranks_add_up_and_what_is_equal_is_taken_once():
    assert one_update("actor", [report(3.0, 0.25), report(3.0, 0.5)]) == {
        "actor/loss": 0.75,
        "actor/grad_norm": 3.0,
        "actor/lr": 0.5,
    }


def test_ranks_that_disagree_about_the_gradient_are_named():
    with pytest.raises(
        InputError, match="update_actor: the ranks disagree.*found rank 0: 3.0, rank 1: 3.0000000000000004"
    ):
        one_update("actor", [report(3.0, 0.25), report(3.0000000000000004, 0.5)])


def test_the_number_of_steps_is_given_or_follows_from_the_epochs():
    prompts = range(18)
    assert total_steps(config(trainer={"total_training_steps": 7}), prompts) == 7
    assert total_steps(config(trainer={"total_epochs": 3}), prompts) == 3 * 4


def test_a_run_may_be_resumed_for_longer_unless_its_schedule_has_an_end():
    short, long = (config(trainer={"total_training_steps": steps}) for steps in (5, 9))
    assert resume_fingerprint(short) == resume_fingerprint(long)
    cosine = {"actor": {"ppo_mini_batch_size": 4, "optim": {"lr_scheduler_type": "cosine"}}, "rollout": {"n": 2}}
    short, long = (config(trainer={"total_training_steps": s}, actor_rollout_ref=cosine) for s in (5, 9))
    assert resume_fingerprint(short) != resume_fingerprint(long)


@pytest.mark.parametrize(
    "change, comparable",
    [
        ({"trainer": {"seed": 5}}, True),
        ({"trainer": {"n_gpus_per_node": 2}}, True),
        ({"trainer": {"device": "cpu", "save_freq": 3}}, True),
        ({"data": {"train_batch_size": 4, "seed": 5}}, False),
        ({"algorithm": {"adv_estimator": "rloo"}}, False),
    ],
)
def test_what_makes_two_curves_comparable(change, comparable):
    ours, theirs = (comparison_fingerprint(c, model="m", data="d") for c in (config(), config(**change)))
    assert (ours == theirs) is comparable
    assert comparison_fingerprint(config(), model="other", data="d") != ours
    assert comparison_fingerprint(config(), model="m", data="other") != ours


@pytest.mark.parametrize(
    "change, roles",
    [
        ({}, ("actor", "rollout", "reward")),
        (
            {"algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": True}},
            ("actor", "rollout", "reference", "reward"),
        ),
        ({"algorithm": {"adv_estimator": "gae"}}, ("actor", "rollout", "reward", "critic")),
    ],
)
def test_only_the_roles_the_algorithm_needs_are_placed(change, roles):
    assert placement(config(**change)).roles == roles


def test_group_statistics_are_of_what_was_generated(make_batch):
    batch = make_batch(lengths=(3, 5, 1, 4), n=2)
    settings = dataclasses.replace(config().algorithm.filter_groups)
    sampling = DynamicSampling(settings, train_batch_size=2)
    sampling.offer(batch)
    line = group_statistics(4, batch, sampling, {"training/rollout_log_probs_abs_diff_mean": 0.125})
    assert line["step"] == 4 and line["group_size"] == 2 and line["prompt_ids"] == ("u0", "u1")
    assert line["groups"]["response_length"]["mean"] == (4.0, 2.5)
    assert line["groups"]["response_length"]["variance"] == (2.0, 4.5)
    assert line["scalars"] == {"kept_fraction": 1.0, "generation_batches": 1.0, "log_prob_gap": 0.125}
