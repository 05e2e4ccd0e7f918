"""Axis 1 on what Megatron says of itself."""

from __future__ import annotations

import json

import pytest

from alignment.diagnose.axes import hyperparameters
from alignment.diagnose.axes.megatron_arguments import megatron_arguments
from alignment.diagnose.run_data import RunData
from alignment.numerics.verdict import Outcome

ARGUMENTS = {"adam_beta1": "0.9", "clip_grad": "1.0", "rank": "0", "save": "None", "moe_router_dtype": "fp32"}


def log(directory, *, prefix="", **changes: str):
    """A log with the block that Megatron-LM prints: a name, dots up to column 48, a value."""
    directory.mkdir(exist_ok=True)
    lines = ["starting", "------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in {**ARGUMENTS, **changes}.items()]
    lines += ["-------------------- end of arguments ---------------------", "  after ....... 1"]
    (directory / "train.log").write_text("".join(f"{prefix}{line}\n" for line in lines))
    return directory


def checked(*directories, **config):
    runs = [RunData(directory, "verl", "npu", {1: {"actor/loss": 0.5}}, config) for directory in directories]
    return hyperparameters.check(*runs)


@pytest.mark.parametrize("prefix", ["", "(WorkerDict pid=4711) "])
def test_the_block_of_a_log_is_read(tmp_path, prefix):
    found = megatron_arguments(log(tmp_path / "run", prefix=prefix))
    assert found == {"adam_beta1": "0.9", "clip_grad": "1.0", "moe_router_dtype": "fp32"}


def test_the_transformer_configuration_of_the_last_checkpoint_is_read(tmp_path):
    for step, layers in ((2, 3), (10, 4)):
        folder = tmp_path / f"global_step_{step}" / "actor"
        folder.mkdir(parents=True)
        (folder / "transformer_config.json").write_text(json.dumps({"num_layers": layers}))
    assert megatron_arguments(tmp_path) == {"transformer_config.num_layers": 4}


def test_widths_and_losses_are_no_ranks_and_no_places(tmp_path):
    kept = ("kv_lora_rank", "q_lora_rank", "lora_rank", "load_balancing", "load_balancing_loss_coeff", "log_probs")
    left = (
        "rank", "local_rank", "tensor_model_parallel_rank", "load", "save", "save_interval", "log_interval",
        "log_timers_to_tensorboard", "tensorboard_dir", "wandb_project", "local_device", "master_port",
    )  # fmt: skip
    found = megatron_arguments(log(tmp_path / "run", **dict.fromkeys((*kept, *left), "1")))
    assert {name for name in (*kept, *left) if name in found} == set(kept)
    report = checked(log(tmp_path / "a", kv_lora_rank="512"), log(tmp_path / "b", kv_lora_rank="256"))
    assert [(f.cause, f.evidence[:9]) for f in report.findings] == [("Megatron's kv_lora_rank", "256 → 512")]


def test_differences_are_ranked_and_ranks_are_none(tmp_path):
    report = checked(log(tmp_path / "a", rank="3", moe_router_dtype="None", adam_beta1="0.8"), log(tmp_path / "b"))
    assert [(f.cause, f.evidence) for f in report.findings] == [
        ("Megatron's adam_beta1", "0.9 → 0.8 (moves the curve)"),
        ("Megatron's moe_router_dtype", "fp32 → None (moves numbers)"),
    ]


def test_equal_arguments_are_a_pass_without_any_other_configuration(tmp_path):
    report = checked(log(tmp_path / "a"), log(tmp_path / "b", rank="7"))
    assert report.outcome is Outcome.PASS and report.reason == "3 arguments of Megatron agree"


def test_a_run_without_any_is_not_judged(tmp_path):
    (tmp_path / "b").mkdir()
    assert checked(log(tmp_path / "a"), tmp_path / "b").outcome is Outcome.UNAVAILABLE
