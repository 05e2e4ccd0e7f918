from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from alignment.errors import InputError
from alignment.rl.config import DEVICE_ONLY_FIELDS, DataConfig, TrainConfig, flatten, load_config, preset_names

SMALL = {
    "data": {"train_batch_size": 8, "max_prompt_length": 4, "max_response_length": 6},
    "actor_rollout_ref": {
        "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 2},
        "rollout": {"n": 4},
    },
    "algorithm": {"adv_estimator": "grpo"},
}


def small(**changes) -> dict:
    """SMALL with dotted changes (``__`` for the dot)."""
    import copy

    tree = copy.deepcopy(SMALL)
    for name, value in changes.items():
        *path, last = name.split("__")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def test_presets():
    assert preset_names() == ("dapo-tiny", "dapo-tiny-filtered", "dapo-tiny-four-updates", "grpo-tiny", "ppo-tiny")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_and_survives_the_round_trip(name):
    config = load_config(name)
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert config.trainer.deterministic


def test_the_two_settings_of_the_source():
    assert load_config("dapo-tiny").updates_per_epoch == 1
    assert load_config("dapo-tiny-four-updates").updates_per_epoch == 4


def test_dapo_presets_are_dapo():
    for name in ("dapo-tiny", "dapo-tiny-four-updates", "dapo-tiny-filtered"):
        config = load_config(name)
        actor = config.actor_rollout_ref.actor
        assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
        assert config.algorithm.adv_estimator == "grpo" and not config.algorithm.use_kl_in_reward
        assert config.reward_model.overlong_buffer.enable
    assert load_config("dapo-tiny").curve_gate == "paired"
    assert load_config("dapo-tiny-filtered").curve_gate == "unpaired"
    assert (
        load_config(
            "dapo-tiny-filtered", ["algorithm.filter_groups.mode=reserve", "algorithm.filter_groups.reserve_size=4"]
        ).curve_gate
        == "paired"
    )


def test_other_presets_are_their_algorithms():
    grpo, ppo = load_config("grpo-tiny"), load_config("ppo-tiny")
    assert grpo.use_reference and not grpo.use_critic
    assert grpo.actor_rollout_ref.actor.clip_ratio_low == grpo.actor_rollout_ref.actor.clip_ratio_high == 0.2
    assert ppo.use_critic and ppo.algorithm.adv_estimator == "gae" and ppo.algorithm.use_kl_in_reward


def test_overrides_in_verls_vocabulary():
    config = load_config(
        "dapo-tiny",
        [
            "actor_rollout_ref.actor.clip_ratio_high=0.3",
            "trainer.total_training_steps=20",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
            "trainer.logger=[console]",
            "trainer.deterministic=false",
            "trainer.resume_from_path=null",
            "trainer.total_training_steps=21",
        ],
    )
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_high, actor.optim.lr, actor.optim.betas) == (0.3, 1e-6, (0.9, 0.95))
    assert (config.trainer.total_training_steps, config.trainer.logger) == (21, ("console",))
    assert config.trainer.deterministic is False


def test_one_batching_convention_for_training_and_inference():
    config = TrainConfig.from_dict(
        small(actor_rollout_ref__actor__use_dynamic_bsz=True, actor_rollout_ref__actor__ppo_max_token_len_per_gpu=50)
    )
    for section in (config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref):
        assert section.log_prob_use_dynamic_bsz is True
        assert section.log_prob_max_token_len_per_gpu == 50
        assert section.log_prob_micro_batch_size_per_gpu == 2
    assert (config.critic.use_dynamic_bsz, config.critic.ppo_max_token_len_per_gpu) == (True, 50)


def test_inherited_fields():
    config = TrainConfig.from_dict(
        small(actor_rollout_ref__actor__clip_ratio=0.1, actor_rollout_ref__model__dtype="bfloat16")
    )
    policy = config.actor_rollout_ref
    assert (policy.actor.clip_ratio_low, policy.actor.clip_ratio_high) == (0.1, 0.1)
    assert (policy.rollout.dtype, policy.ref.dtype) == ("bfloat16", "bfloat16")
    assert config.data.gen_batch_size == 8 and policy.actor.loss_scale_factor == 6
    assert config.critic.loss_agg_mode == "token-mean" and config.critic.ppo_mini_batch_size == 2
    flat = flatten(config.to_dict())
    empty = {k for k, v in flat.items() if v is None}
    # The sizes of one engine mean something when they are not set.
    empty = {k for k in empty if not k.startswith("actor_rollout_ref.actor.megatron.")}
    assert empty == {"trainer.total_training_steps", "trainer.resume_from_path", "ascend_precision_collector"}


def test_engine_has_two_names():
    config = TrainConfig.from_dict(small(engine__train="megatron", actor_rollout_ref__rollout__name="vllm"))
    assert config.actor_rollout_ref.actor.strategy == config.engine.train == "megatron"
    assert config.actor_rollout_ref.rollout.name == config.engine.rollout == "vllm"
    with pytest.raises(
        InputError,
        match="engine.train: engine.train and actor_rollout_ref.actor.strategy name different engines; expected "
        "fsdp; found megatron",
    ):
        TrainConfig.from_dict(small(engine__train="megatron", actor_rollout_ref__actor__strategy="fsdp"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "actor_rollout_ref.actor.clip_ratio_hi=0.3",
            "actor_rollout_ref.actor.clip_ratio_hi: there is no such key. Next: the nearest known key is "
            "actor_rollout_ref.actor.clip_ratio_high",
        ),
        ("actor.clip_ratio_high=0.3", "nearest known key is actor_rollout_ref.actor.clip_ratio_high"),
        ("trainer.total_training_step=3", "nearest known key is trainer.total_training_steps"),
        ("+trainer.wandb=1", r"\+trainer.wandb=1: keys are neither added nor removed.*expected trainer.wandb=…"),
        ("~trainer.seed=1", "keys are neither added nor removed"),
        ("trainer.seed", "trainer.seed: an override is key=value; expected a.b.c=value"),
        ("trainer=1", "an override sets one value, not a section; expected trainer.<field>=value"),
        ("trainer.seed=abc", "trainer.seed: the value has the wrong type; expected a whole number; found 'abc'"),
        ("trainer.seed=1.5", "trainer.seed: the value has the wrong type; expected a whole number; found 1.5"),
        ("trainer.seed=true", "trainer.seed: the value has the wrong type"),
        (
            "trainer.deterministic=1",
            "trainer.deterministic: the value has the wrong type; expected true or false; found 1",
        ),
        ("trainer.seed=null", "trainer.seed: the value has the wrong type; expected a whole number; found None"),
        ("actor_rollout_ref.actor.optim.lr=.nan", "optim.lr: the value is not finite"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "betas: the value has the wrong type; expected a list of 2"),
        (
            "algorithm.adv_estimator=grop",
            "algorithm.adv_estimator: the value is not one of the choices; expected grpo | gae | rloo; found "
            "'grop'. Next: did you mean grpo",
        ),
        ("trainer.logger=[wandb]", r"trainer.logger\[0\]: the value is not one of the choices"),
        ("trainer.seed=[", "the override cannot be read"),
        ("trainer.experiment_name=${nothing.here}", "an interpolation cannot be resolved"),
    ],
)
def test_a_wrong_override_is_one_clear_error(override, message):
    with pytest.raises(InputError, match=message):
        load_config("dapo-tiny", [override])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"actor_rollout_ref__actor__ppo_mini_batch_size": 3},
            "ppo_mini_batch_size: a step consists of whole mini batches; expected a divisor of "
            "data.train_batch_size = 8; found 3",
        ),
        (
            {"trainer__n_gpus_per_node": 3},
            "shared out evenly over the data parallel ranks; expected ppo_mini_batch_size · rollout.n divisible "
            "by 3 ranks; found 2 · 4 = 8",
        ),
        (
            {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 3},
            "consists of whole micro batches; expected a divisor of 8; found 3",
        ),
        (
            {"actor_rollout_ref__rollout__n": 1, "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 1},
            "rollout.n: grpo compares the samples of a prompt with each other; expected at least 2; found 1",
        ),
        (
            {"algorithm__filter_groups__enable": True, "trainer__curve_gate": "paired"},
            "trainer.curve_gate: regenerating prompts .* Next: set algorithm.filter_groups.mode=reserve",
        ),
        (
            {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__mode": "reserve"},
            "algorithm.filter_groups.reserve_size: the value has to be positive",
        ),
        (
            {"algorithm__filter_groups__max_num_gen_batches": -1},
            "max_num_gen_batches: the number of generation rounds is not negative",
        ),
        (
            {
                "actor_rollout_ref__actor__use_dynamic_bsz": True,
                "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 9,
            },
            r"the token budget has to hold the longest sample; expected at least data.max_prompt_length \+ "
            r"data.max_response_length = 10; found 9",
        ),
        (
            {"actor_rollout_ref__actor__clip_ratio_c": 1.0},
            "clip_ratio_c: dual clip bounds the ratio from above; expected > 1",
        ),
        ({"actor_rollout_ref__actor__clip_ratio_low": 1.0}, "clip_ratio_low: the lower clip bound"),
        ({"actor_rollout_ref__rollout__temperature": 0.0}, "rollout.temperature: the value has to be positive"),
        (
            {"actor_rollout_ref__rollout__top_p": 1.5},
            "rollout.top_p: the value is out of range; expected 0 … 1; found 1.5",
        ),
        ({"actor_rollout_ref__rollout__top_k": 0}, "top_k keeps at least one token"),
        (
            {"reward_model__overlong_buffer": {"enable": True, "len": 7}, "reward_model__reward_manager": "dapo"},
            "the overlong buffer lies inside the response; expected 1 … data.max_response_length = 6; found 7",
        ),
        (
            {"reward_model__overlong_buffer": {"enable": True, "len": 2}},
            "only the dapo reward manager applies the overlong buffer",
        ),
        (
            {"trainer__resume_mode": "resume_path"},
            "trainer.resume_from_path: resume_mode=resume_path needs a checkpoint",
        ),
        ({"trainer__save_freq": -2}, "trainer.save_freq: the value is out of range"),
        (
            {"actor_rollout_ref__actor__optim": {"betas": [0.9, 1.0]}},
            "betas: the value is out of range; expected 0 ≤ β < 1",
        ),
        (
            {"actor_rollout_ref__actor__optim": {"lr": -1.0}},
            "actor_rollout_ref.actor.optim.lr: the value has to be positive",
        ),
        (
            {
                "actor_rollout_ref__ref__log_prob_use_dynamic_bsz": True,
                "actor_rollout_ref__ref__log_prob_max_token_len_per_gpu": 9,
            },
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu: the token budget has to hold the longest sample",
        ),
        (
            {
                "algorithm__filter_groups__enable": True,
                "data__gen_batch_size": 3,
                "trainer__n_gpus_per_node": 8,
                "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 1,
            },
            "data.gen_batch_size: a generation round is shared out evenly over the data parallel ranks; expected a "
            "number of prompts that, times rollout.n = 4, divides by 8 ranks; found 3",
        ),
        (
            {
                "algorithm__filter_groups": {"enable": True, "mode": "reserve", "reserve_size": 1},
                "trainer__n_gpus_per_node": 8,
                "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 1,
            },
            "algorithm.filter_groups.reserve_size: a generation round is shared out evenly",
        ),
        (
            {
                "algorithm__filter_groups": {"enable": True, "metric": "seq_final_reward"},
                "algorithm__use_kl_in_reward": True,
            },
            "filter_groups.metric: groups are filtered before the KL penalty enters the reward",
        ),
        (
            {"actor_rollout_ref__model__lora_rank": -1},
            "actor_rollout_ref.model.lora_rank: an adapter has a rank of at least 1 and a positive alpha; found rank -1",
        ),
        (
            {"actor_rollout_ref__model__lora_rank": 4, "engine__train": "megatron"},
            "actor_rollout_ref.model.lora_rank: the adapter is trained by the golden and the FSDP engine only; expected "
            "0, or engine.train=golden or fsdp; found 4 with engine.train=megatron",
        ),
        (
            {
                "actor_rollout_ref__model__lora_rank": 4,
                "actor_rollout_ref__ref__dtype": "float64",
                "actor_rollout_ref__actor__use_kl_loss": True,
            },
            "actor_rollout_ref.ref.dtype: the reference is the actor without its adapter, and computes as it does; "
            "expected float32 with lora_rank=4; found float64",
        ),
        ({"data": 3}, "data: a section is a mapping; expected a mapping; found int"),
        ({"dat": {}}, "dat: there is no such key"),
        ({"actor_rollout_ref__actor__loss_agg_mode": "token_mean"}, "did you mean token-mean"),
    ],
)
def test_values_that_do_not_fit_together(changes, message):
    TrainConfig.from_dict(SMALL)
    with pytest.raises(InputError, match=message):
        TrainConfig.from_dict(small(**changes))


def test_a_reserve_can_be_paired():
    filtering = {"enable": True, "mode": "reserve", "reserve_size": 2}
    config = TrainConfig.from_dict(small(algorithm__filter_groups=filtering, trainer__curve_gate="paired"))
    assert config.curve_gate == "paired"


def test_yaml_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {train_files: a.parquet}\n"
        "actor_rollout_ref:\n  rollout: {n: 2}\n"
        "trainer: {seed: 7, experiment_name: 'e${trainer.seed}'}\n"
    )
    config = load_config(path)
    assert (config.data.train_files, config.trainer.seed, config.trainer.experiment_name) == (("a.parquet",), 7, "e7")
    with pytest.raises(InputError, match="cannot be read .No such file"):
        load_config(tmp_path / "other.yaml")
    path.write_text("a: [")
    with pytest.raises(InputError, match="is not YAML"):
        load_config(path)
    path.write_text("[1]")
    with pytest.raises(InputError, match="a configuration is a mapping; found list"):
        load_config(path)
    path.write_text("")
    assert load_config(path) == TrainConfig()


def test_unknown_preset_names_the_nearest():
    with pytest.raises(InputError, match="dapo-tyni: there is no such preset.* did you mean dapo-tiny"):
        load_config("dapo-tyni")


def test_configuration_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().trainer.seed = 3
    with pytest.raises(TypeError):
        DataConfig(("a",))


def test_hash_depends_on_what_is_computed_only():
    base = TrainConfig.from_dict(SMALL)
    assert (
        TrainConfig.from_dict(small(trainer__device="npu", trainer__experiment_name="x")).config_hash()
        == base.config_hash()
    )
    assert TrainConfig.from_dict(small(actor_rollout_ref__actor__clip_ratio_c=4.0)).config_hash() != base.config_hash()
    seeded = TrainConfig.from_dict(small(trainer__seed=9))
    assert seeded.config_hash() != base.config_hash()
    assert seeded.config_hash(exclude=["trainer.seed"]) == base.config_hash(exclude=["trainer.seed"])
    with pytest.raises(InputError, match="nearest known key is trainer.seed"):
        base.config_hash(exclude=["trainer.sed"])
    assert DEVICE_ONLY_FIELDS <= set(flatten(base.to_dict()))


def test_spelling_out_an_inherited_value_changes_nothing():
    spelled = TrainConfig.from_dict(small(actor_rollout_ref__actor__clip_ratio_high=0.2, data__gen_batch_size=8))
    assert spelled == TrainConfig.from_dict(SMALL)
    assert spelled.config_hash() == TrainConfig.from_dict(SMALL).config_hash()


def test_a_preset_loads_without_omegaconf_and_torch():
    code = (
        "import sys; sys.modules['omegaconf'] = None\n"
        "from alignment.rl.config import load_config\n"
        "load_config('dapo-tiny'); assert 'torch' not in sys.modules\n"
        "try: load_config('dapo-tiny', ['trainer.seed=2'])\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("UnavailableError trainer.seed=2: overrides and interpolations need OmegaConf")
