"""Factors that only an engine has: the way the first weights take into megatron-core, and context parallelism."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from alignment.cli import app

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron_core")]

SMALL = ("engine.train=megatron", "trainer.total_training_steps=1", "data.train_batch_size=2",
         "actor_rollout_ref.actor.ppo_mini_batch_size=2", "--device", "cpu", "--metric", "actor/grad_norm")  # fmt: skip


def told(into, *arguments: str) -> dict:
    made = CliRunner().invoke(app, ["ablate", *SMALL, *arguments, "--json", "--run-dir", str(into)])
    if "does not write distributed checkpoints with this torch" in str(made.exception):
        pytest.skip(str(made.exception))
    assert made.exit_code == 0, made.output + str(made.exception)
    return json.loads(made.stdout)


def test_the_way_of_the_weights_is_crossed_with_determinism(tmp_path):
    """The bridge of names and the distributed checkpoint give the same weights: neither effect nor interaction."""
    found = told(tmp_path / "run", "--seeds", "2", "--full", "--factor", "dist_ckpt", "--factor", "nondeterministic")
    assert [e["name"] for e in found["effects"]] == ["dist_ckpt", "nondeterministic", "dist_ckpt × nondeterministic"]
    assert {(e["value"], e["low"], e["high"], e["decided"]) for e in found["effects"]} == {(0.0, 0.0, 0.0, False)}
    assert found["other_prompts"] == {} and len(found["levels"]) == 8
    # The setting really took the other way: what it loaded lies there, and its run says so.
    assert (tmp_path / "run" / "dist_checkpoint-float32" / "alignment.json").is_file()
    loaded = {
        name: json.loads((tmp_path / "run" / name / "seed-1" / "config.json").read_text())["actor_rollout_ref"]["actor"]
        for name in ("base", "dist_ckpt")
    }
    assert {name: actor["megatron"]["use_dist_checkpointing"] for name, actor in loaded.items()} == {
        "base": False,
        "dist_ckpt": True,
    }


def test_a_checkpoint_with_other_weights_in_it_is_an_effect(tmp_path, monkeypatch):
    """Both ways: what the bridge would not do shows as the effect of the way."""
    from alignment.backends import megatron_dist_checkpoint

    honest = megatron_dist_checkpoint.read

    def halved(engine, directory):
        honest(engine, directory)
        for module in engine.modules:
            module.output_layer.weight.data.mul_(0.5)

    monkeypatch.setattr(megatron_dist_checkpoint, "read", halved)
    (effect,) = told(tmp_path / "run", "--seeds", "3", "--factor", "dist_ckpt")["effects"]
    assert effect["value"] != 0.0 and effect["low"] < effect["value"] < effect["high"]


def test_context_parallelism_is_an_effect_of_rounding(ray_cluster, tmp_path):
    """Two ranks as replicas against two ranks that split each sequence: the gradient differs by the order of sums."""
    import torch

    from alignment.models.config import preset

    found = told(tmp_path / "run", "trainer.n_gpus_per_node=2", "--seeds", "1", "--factor", "cp")
    levels = {tuple(row["factors"]): row["level"] for row in found["levels"]}
    assert found["other_prompts"] == {} and found["effects"][0]["name"] == "cp"
    u = torch.finfo(torch.float32).eps / 2
    model = preset("tiny-moonlight")
    # Keys of other ranks are added in another order, in every layer, forwards and backwards.
    additions = 2 * model.num_hidden_layers * model.hidden_size
    assert 0 < abs(levels["cp",] - levels[()]) <= additions * u * levels[()]
    assert found["effects"][0]["value"] == levels["cp",] - levels[()]
