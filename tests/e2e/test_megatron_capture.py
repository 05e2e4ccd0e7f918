"""A captured run on megatron-core: ranks say which part of the whole they hold, and the parts add up."""

from __future__ import annotations

import itertools

import dapo_world
import numpy as np
import pytest
import torch

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.pipeline import FOLDER, capture_observer
from alignment.diagnose.capture_comparison import compare_captures
from alignment.errors import UnavailableError
from alignment.models.norm import RMSNorm
from alignment.numerics.verdict import Outcome
from alignment.rl.run import run_dapo
from alignment.rl.tokenizer import train_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ray_cluster")]

EPS = torch.finfo(torch.float32).eps
BAR = 1e-4
"""Relative L2 of gradients against the golden engine in float32, the project's bar; here by the scale of all."""
MEGATRON = "actor_rollout_ref__actor__megatron__"
TWO_RANKS = {
    "trainer__n_gpus_per_node": 2, "engine__train": "megatron", f"{MEGATRON}tensor_model_parallel_size": 2,
    f"{MEGATRON}expert_model_parallel_size": 2, f"{MEGATRON}expert_tensor_parallel_size": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    """One step by the golden engine, by megatron-core on one rank, and on two tensor parallel ranks."""
    from alignment.backends.megatron_model import installed_version

    try:
        installed_version()
    except UnavailableError as missing:
        pytest.skip(str(missing))
    root = tmp_path_factory.mktemp("megatron_capture")
    with pytest.MonkeyPatch.context() as patch:
        # A vocabulary that two tensor parallel ranks can share.
        patch.setattr(
            dapo_world,
            "train_tokenizer",
            lambda texts, directory, vocab_size: train_tokenizer(texts, directory, vocab_size=104),
        )
        world = dapo_world.build(root / "world")
    base = {
        "trainer__total_training_steps": 1, "actor_rollout_ref__rollout__skip__enable": True,
        "actor_rollout_ref__rollout__skip__dump_dir": str(root / "rollouts"),
        # no more samples than tokens in a micro batch, whose dimensions could not be told apart
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 48,
    }  # fmt: skip

    def run(name, executor, **changes):
        run_dapo(
            dapo_world.config(world, **base, **changes), run_dir=root / name, executor=executor,
            observers=[capture_observer(CaptureConfig(), root / name)],
        )  # fmt: skip
        return OwnCapture(root / name / FOLDER)

    honest = RMSNorm.forward
    with pytest.MonkeyPatch.context() as patch:
        # as by another ε; the rollouts are recorded with the right one
        golden = run("golden", "inprocess")
        patch.setattr(RMSNorm, "forward", lambda self, x: honest(self, x) * (1 + 2.0**-12))
        wrong = run("wrong", "inprocess")
    return golden, run("one", "ray", engine__train="megatron"), run("two", "ray", **TWO_RANKS), wrong


def named(reader, stage, rank, **wanted):
    found = reader.rows(1, stage, rank)
    return {r.module: r for r in found if r.call == 0 and all(getattr(r, k) == v for k, v in wanted.items())}


def test_the_parts_of_a_parameter_add_up_to_the_whole(captures):
    _, one, two, _ = captures
    whole = named(one, "old_log_prob", 0, kind="parameter")
    parts = [named(two, "old_log_prob", rank, kind="parameter") for rank in (0, 1)]
    cut = [name for name, row in parts[0].items() if row.shard is not None and name in whole]
    assert any("linear_q_proj" in name for name in cut) and any("linear_fc2" in name for name in cut)
    assert not any(".local_experts." in name for name in cut), "experts are whole where their own group has one rank"
    assert all(len(parts[0][name].shard.pieces) == 2 for name in cut if "linear_fc1" in name), "gate and up"
    assert any("linear_fc1" in name for name in cut)
    for name in cut:
        shards = [p[name].shard for p in parts]
        starts, lengths = zip(*sorted(piece for shard in shards for piece in shard.pieces))
        assert starts == tuple(itertools.accumulate(lengths[:-1], initial=0))
        assert sum(lengths) == shards[0].whole == whole[name].shape[shards[0].dim]
        total = parts[0][name].sketch() + parts[1][name].sketch()
        assert np.linalg.norm(total - whole[name].sketch()) <= 64 * EPS * whole[name].statistics.l2


def test_every_rank_names_its_experts_as_the_whole_model_counts_them(captures):
    _, one, two, _ = captures
    whole = {n for n in named(one, "old_log_prob", 0, kind="parameter") if ".local_experts." in n}
    held = [
        {n for n in named(two, "old_log_prob", rank, kind="parameter") if ".local_experts." in n} for rank in (0, 1)
    ]
    assert held[0] and held[1] and not held[0] & held[1] and held[0] | held[1] <= whole


def test_ranks_that_share_a_sequence_say_which_piece_they_hold(captures):
    rows = [named(captures[2], "old_log_prob", rank, kind="module", role="output")["embedding"] for rank in (0, 1)]
    first, second = (r.shard for r in rows)
    assert first.dim == second.dim == 0 and (first.start, second.start) == (0, first.length)
    assert first.length + second.length == first.whole


def test_gradients_of_an_update_are_the_golden_engines_under_the_same_names(captures):
    golden, *others, _ = captures
    expected = named(golden, "update_actor", 0, kind="parameter_gradient")
    scale = float(np.sqrt(sum(r.statistics.l2**2 for r in expected.values())))
    for reader in others:
        found = named(reader, "update_actor", 0, kind="parameter_gradient")
        assert found.keys() == expected.keys()
        for name, row in found.items():
            assert row.shape == expected[name].shape
            assert np.linalg.norm(row.sketch() - expected[name].sketch()) <= BAR * scale


def test_golden_and_megatron_are_aligned_and_a_norm_that_is_wrong_is_named(captures):
    """Names, the order of dimensions, fused layers, padding and what routers hand out are another implementation's."""
    golden, megatron, _, wrong = captures
    stages = [s for s in compare_captures(golden, megatron).stages if s.stage in ("old_log_prob", "update_actor")]
    assert [stage.outcome for stage in stages] == [Outcome.PASS] * 2, [stage.reason() for stage in stages]
    assert all(stage.pairs > 300 and stage.different_implementations for stage in stages)
    [first] = [s.first for s in compare_captures(wrong, megatron, stages=["old_log_prob"]).stages]
    assert first.module == "model.layers.0.input_layernorm"
