"""What a distillation configuration fills in, and everything it refuses, by the message."""

from __future__ import annotations

import pytest

from alignment.errors import InputError, UnavailableError
from alignment.rl.config import TrainConfig, flatten, load_config, preset_names
from alignment.rl.gkd_config import GkdConfig, TeacherKind


def made(**changes) -> GkdConfig:
    tree: dict = {}
    for key, value in {"gkd__teacher_model": "teacher", "data__train_batch_size": 8, **changes}.items():
        *parents, leaf = key.split("__")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return GkdConfig.from_dict(tree)


REPLICAS = {"gkd__teacher_replicas": 2, "gkd__lmbda": 1.0, "gkd__gkd_logits_topk": 4}


def test_defaults_are_the_source_s():
    gkd = made().gkd
    assert (gkd.lmbda, gkd.beta, gkd.sft_alpha, gkd.seed, gkd.max_resample_times) == (0.5, 0.5, 0.0, 42, 3)
    assert gkd.truncation_strategy == "delete" and gkd.steps_per_generation == 1 and gkd.gkd_logits_topk is None


def test_inherited_fields():
    config = made(actor_rollout_ref__rollout__temperature=0.7, data__max_prompt_length=9, gkd__micro_batch_size=4)
    assert config.gkd.temperature == 0.7 and config.gkd.max_length == 9 and config.gkd.teacher_dtype == "float32"
    actor = config.actor_rollout_ref.actor
    assert actor.ppo_micro_batch_size_per_gpu == 4 and actor.ppo_mini_batch_size == 8 and config.updates_per_epoch == 1
    assert made(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=2).gkd.micro_batch_size == 2
    assert config.encoded_length == 9 + config.data.max_response_length


def test_one_completion_per_prompt_whatever_num_generations_says():
    config = made(gkd__num_generations=8, actor_rollout_ref__rollout__n=8, gkd__steps_per_generation=3)
    assert config.actor_rollout_ref.rollout.n == 1
    assert config.generation_size == config.data.gen_batch_size == 24


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, TeacherKind.COLOCATED),
        ({"gkd__lora__rank": 4, "gkd__teacher_model": None}, TeacherKind.ADAPTER_DISABLED),
        ({"gkd__lora__rank": 4, "actor_rollout_ref__model__path": "teacher"}, TeacherKind.ADAPTER_DISABLED),
        ({"actor_rollout_ref__model__path": "teacher"}, TeacherKind.COLOCATED),
        ({"gkd__lora__rank": 4}, TeacherKind.COLOCATED),
        (REPLICAS, TeacherKind.REPLICAS),
    ],
)
def test_kind_of_teacher(changes, kind):
    assert made(**changes).teacher_kind is kind


MEGATRON = "actor_rollout_ref__actor__megatron__"
REFUSED = {
    "a teacher server without replicas": (
        {"gkd__teacher_model": None, "gkd__teacher_model_server": "http://localhost:8000"},
        "gkd.teacher_model_server: a teacher server is not supported; expected null; found http://localhost:8000. Next: set "
        "gkd.teacher_model",
    ),
    "two teachers": (
        {"gkd__teacher_model_server": "http://localhost:8000"},
        "gkd.teacher_model_server: a teacher model and a teacher server are two teachers",
    ),
    "virtual pipeline stages": (
        {f"{MEGATRON}virtual_pipeline_model_parallel_size": 2},
        "virtual_pipeline_model_parallel_size: distillation does not support virtual pipeline stages; expected null or 1; "
        "found 2",
    ),
    "replicas off-policy": (
        {**REPLICAS, "gkd__lmbda": 0.5},
        "gkd.lmbda: teacher replicas score what the student generated, .*; expected 1 .*; found 0.5",
    ),
    "replicas with context parallel": (
        {**REPLICAS, f"{MEGATRON}context_parallel_size": 2},
        "context_parallel_size: tables from teacher replicas cover whole sequences, .* expected 1 .* found 2",
    ),
    "replicas without top-k": (
        {**REPLICAS, "gkd__gkd_logits_topk": None},
        "gkd.gkd_logits_topk: teacher replicas give their most likely tokens only; expected a number",
    ),
    "replicas without a model": (
        {**REPLICAS, "gkd__teacher_model": None},
        "gkd.teacher_model: the replicas have no model",
    ),
    "a batch that does not divide": (
        {"trainer__n_gpus_per_node": 3},
        "data.train_batch_size: the batch does not divide between the data parallel ranks; expected a multiple of dp_size "
        "= 3; found 8",
    ),
    "an unknown scheduler": (
        {"gkd__multi_turn_scheduler": "try_agian"},
        "gkd.multi_turn_scheduler: there is no such multi-turn scheduler; expected .*try_again; found try_agian. Next: did "
        "you mean try_again",
    ),
    "no teacher": (
        {"gkd__teacher_model": None},
        "gkd.teacher_model: there is no teacher; expected a checkpoint directory",
    ),
    "no tokens of the teacher": ({"gkd__gkd_logits_topk": 0}, "gkd.gkd_logits_topk: the value has to be positive"),
    "beta": ({"gkd__beta": 1.5}, "gkd.beta: the value is out of range; expected 0 … 1; found 1.5"),
    "lambda": ({"gkd__lmbda": -0.1}, "gkd.lmbda: the value is out of range"),
    "alpha": ({"gkd__sft_alpha": -1.0}, "gkd.sft_alpha: the value is not negative"),
    "temperature": ({"gkd__temperature": 0.0}, "gkd.temperature: the value has to be positive"),
    "no steps": ({"gkd__steps_per_generation": 0}, "gkd.steps_per_generation: the value has to be positive"),
    "sequence-level": ({"gkd__seq_kd": True}, "gkd.seq_kd: sequence-level distillation .* is not supported"),
    "dynamic batches": (
        {"actor_rollout_ref__actor__use_dynamic_bsz": True},
        "use_dynamic_bsz: distillation cuts micro batches by number of samples",
    ),
    "epochs": ({"actor_rollout_ref__actor__ppo_epochs": 2}, "ppo_epochs: distillation passes over a batch once"),
    "fused kernels": (
        {"actor_rollout_ref__model__use_fused_kernels": True},
        "use_fused_kernels: the divergence needs logits",
    ),
    "an adapter on Megatron": (
        {"engine__train": "megatron", "gkd__lora__rank": 4},
        "gkd.lora.rank: the adapter is trained by the golden and the FSDP engine only; expected 0, or engine.train=golden "
        "or fsdp; found 4 with engine.train=megatron",
    ),
    "the adapter of the other pipelines": (
        {"actor_rollout_ref__model__lora_rank": 4},
        "actor_rollout_ref.model.lora_rank: the student's adapter has settings of its own; expected 0; found 4. "
        "Next: set gkd.lora.rank",
    ),
    "a negative rank": ({"gkd__lora__rank": -1}, "gkd.lora: an adapter has a rank of at least 1"),
    "an engine too short": (
        {"engine__rollout": "vllm", "data__max_prompt_length": 8, "gkd__max_length": 9},
        "gkd.max_length: the inference engine is built for prompts of data.max_prompt_length; expected at most 8; found 9",
    ),
    "an unknown key": (
        {"gkd__lamda": 1.0},
        "gkd.lamda: there is no such key. Next: the nearest known key is gkd.lmbda",
    ),
    "a key of DAPO": ({"algorithm__gamma": 1.0}, "algorithm: there is no such key"),
    "another strategy": (
        {"gkd__truncation_strategy": "split"},
        "gkd.truncation_strategy: .* expected delete \\| left \\| right",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changes, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        made(**changes)


def test_what_is_not_supported_is_unavailable():
    """What the source raises ``NotImplementedError`` for is a different kind of error than a wrong value."""
    for name in (
        "a teacher server without replicas",
        "virtual pipeline stages",
        "replicas off-policy",
        "sequence-level",
    ):
        with pytest.raises(UnavailableError):
            made(**REFUSED[name][0])


@pytest.mark.parametrize("name", preset_names(GkdConfig))
def test_presets(name):
    config = load_config(name, kind=GkdConfig)
    assert GkdConfig.from_dict(config.to_dict()) == config and config.trainer.deterministic
    assert name not in preset_names()
    with pytest.raises(InputError, match=f"{name}: there is no such preset"):
        load_config(name)


def test_overrides_know_both_vocabularies():
    config = load_config("gkd-tiny", ["gkd.beta=0.1", "actor_rollout_ref.rollout.temperature=0.5"], kind=GkdConfig)
    assert config.gkd.beta == 0.1 and config.actor_rollout_ref.rollout.temperature == 0.5
    with pytest.raises(InputError, match="nearest known key is gkd.beta"):
        load_config("gkd-tiny", ["gkd.betta=0.1"], kind=GkdConfig)


def test_the_hash_knows_the_teacher_by_its_weights_only():
    assert made().config_hash() == made(gkd__teacher_model="elsewhere", gkd__log_completions=True).config_hash()
    assert made().config_hash() != made(gkd__beta=0.1).config_hash()


def test_distillation_added_nothing_to_the_configuration_of_dapo():
    assert not any(key.startswith("gkd") for key in flatten(TrainConfig().to_dict()))
