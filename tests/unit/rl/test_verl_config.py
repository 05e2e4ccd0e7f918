"""Our configuration in verl's tree: what carries over, what is renamed, what is refused."""

import dataclasses

import pytest

from alignment.errors import InputError
from alignment.rl.config import TrainConfig, load_config
from alignment.rl.run import located
from alignment.rl.verl_config import arguments, cpu_settings, merge, overlay, read_verl_yaml, verl_settings


def tiny(**changes):
    return dataclasses.replace(located(load_config("dapo-tiny")), **changes)


def test_a_preset_keeps_its_meaning_in_verls_words():
    settings = verl_settings(tiny(), device="cuda")
    assert settings["actor_rollout_ref.actor.clip_ratio_high"] == 0.28
    assert settings["actor_rollout_ref.rollout.n"] == 8
    assert settings["data.train_batch_size"] == 16
    assert settings["reward.reward_manager.name"] == "dapo"
    assert settings["++reward.reward_kwargs.overlong_buffer_cfg.len"] == 4
    assert settings["++reward.reward_kwargs.max_resp_len"] == 12
    assert settings["data.train_files"][0].endswith("baselines/data/rl.parquet")
    # ours -1: after the last step; verl's: never
    assert settings["trainer.save_freq"] == settings["trainer.total_training_steps"] == 40


def test_a_float32_run_computes_in_float32():
    """The key that names the dtype is ignored by verl's FSDP engine; this one is not."""
    precision = verl_settings(tiny(), device="cuda")["++actor_rollout_ref.actor.fsdp_config.mixed_precision"]
    assert precision["param_dtype"] == precision["reduce_dtype"] == "float32"


def test_only_the_cpu_gets_the_settings_of_the_cpu():
    keys = set(cpu_settings(tiny()))
    assert keys <= set(verl_settings(tiny(), device="cpu"))
    cuda = verl_settings(tiny(), device="cuda")
    assert "++ray_kwargs.ray_init.num_gpus" not in cuda and "actor_rollout_ref.rollout.enforce_eager" not in cuda
    assert cuda["actor_rollout_ref.rollout.free_cache_engine"] is True
    assert verl_settings(tiny(), device="cpu")["actor_rollout_ref.rollout.free_cache_engine"] is False


def changed(**leaves) -> TrainConfig:
    tree = tiny().to_dict()
    for path, value in leaves.items():
        *sections, leaf = path.split("__")
        at = tree
        for section in sections:
            at = at[section]
        at[leaf] = value
    return TrainConfig.from_dict(tree)


@pytest.mark.parametrize(
    "leaves, message",
    [
        ({"algorithm__filter_groups__enable": True}, "ignores dynamic sampling without a word"),
        ({"algorithm__adv_estimator": "gae"}, "without a critic"),
        ({"actor_rollout_ref__model__lora_rank": 8}, r"model\.lora_rank: engine=verl translates runs that train all weights"),
        ({"actor_rollout_ref__model__dtype": "float64"}, r"does not train in this dtype.*found float64"),
        ({"ascend_precision_collector": "c.yaml"}, "^ascend_precision_collector: verl computes in workers of its own"),
        ({"data__train_files": ["prompts.json"]}, r"verl reads parquet.*found prompts\.json"),
    ],
)
def test_what_verl_would_leave_out_in_silence_is_refused(leaves, message):
    with pytest.raises(InputError, match=message):
        verl_settings(changed(**leaves), device="cpu")


@pytest.mark.parametrize(
    "value, text",
    [(None, "null"), (True, "true"), (1e-06, "1e-06"), ([1, "a b"], '[1,"a b"]'), ("", "''"), ({"a": 1}, "{a:1}")],
)
def test_values_as_hydra_reads_them(value, text):
    assert arguments({"a.b": value}) == [f"a.b={text}"]


def test_an_override_takes_the_place_of_a_setting():
    settings = {"a.b": 1, "++c.d": 2, "++e.f.g": 3, "h": 4}
    assert merge(settings, ["a.b=5", "c.d=6", "++e.f={}"]) == ["h=4", "a.b=5", "++c.d=6", "++e.f={}"]
    assert merge(settings, ["~h"]) == ["a.b=1", "++c.d=2", "++e.f.g=3", "~h"]


def test_a_key_that_has_to_be_added_stays_one_whoever_sets_it():
    assert overlay({"++a": 1, "b": 2, "++c": 3}, {"a": 4, "++b": 5, "d": 6}) == {"++c": 3, "++a": 4, "++b": 5, "d": 6}


@pytest.mark.parametrize("text", ["a.b", "=1", "--help", "a b=1"])
def test_what_is_no_override_is_refused(text):
    with pytest.raises(InputError, match="an override is key=value"):
        merge({}, [text])


def test_a_yaml_of_verls_own_is_handed_over_as_it_is(tmp_path):
    path = tmp_path / "verl.yaml"
    path.write_text("defaults: [ppo_trainer]\nactor_rollout_ref:\n  rollout: {name: sglang, n: 4}\n++x.y: [1, 2]\n")
    assert read_verl_yaml(path) == {
        "actor_rollout_ref.rollout.name": "sglang", "actor_rollout_ref.rollout.n": 4, "++x.y": [1, 2],
    }  # fmt: skip
    path.write_text("- a\n")
    with pytest.raises(InputError, match="a configuration is a mapping.*found list"):
        read_verl_yaml(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_verl_yaml(tmp_path / "absent.yaml")


@pytest.mark.engine
def test_verl_declares_every_key_that_is_not_forced():
    """A key verl renames must not be added to its tree in silence."""
    pytest.importorskip("verl", reason="verl is not installed")
    from pathlib import Path

    import verl
    from hydra import compose, initialize_config_dir

    directory = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(directory), version_base=None):
        config = compose("ppo_trainer", overrides=arguments(verl_settings(tiny(), device="cpu")))
        assert config.actor_rollout_ref.rollout.n == 8
        with pytest.raises(Exception, match="clip_ratio_hihg"):
            compose("ppo_trainer", overrides=["actor_rollout_ref.actor.clip_ratio_hihg=0.3"])
