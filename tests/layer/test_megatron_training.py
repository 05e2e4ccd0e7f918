"""The megatron-core engine on one rank: its protocol, its state, and what it refuses."""

from __future__ import annotations

import json
import shutil

import megatron_world
import pytest
import torch
from megatron_world import policy_loss, replayed_rows, share, small_config, weights
from safetensors.torch import load_file, save_file

from alignment.errors import InputError

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron_core")]

CONFIG = small_config("tiny-deepseek")
OFFLOADED = {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}}
KINDS = {
    "float32": ({}, torch.float32),
    "plain_optimizer": ({"use_distributed_optimizer": False}, torch.float32),
    "bfloat16": ({}, torch.bfloat16),
    "bfloat16_plain_optimizer": ({"use_distributed_optimizer": False}, torch.bfloat16),
    "bfloat16_offloaded": (OFFLOADED, torch.bfloat16),
}


def make(kind: str = "float32", *, state=None, config=CONFIG):
    layout, dtype = KINDS[kind]
    return megatron_world.megatron_engine(
        config, weights(config, dtype) if state is None else state, layout, dtype=dtype
    )


def batches():
    return share(replayed_rows(CONFIG), 0, 1)


def step(engine, count: int = 1):
    reports = [engine.update(batches(), policy_loss, stage="update_actor") for _ in range(count)]
    return [(r.metrics["loss"], r.grad_norm) for r in reports]


def exported(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_is_what_is_exported(kind):
    state = weights(CONFIG, KINDS[kind][1])
    found = exported(make(kind))
    assert same(found, state) and all(found[n].dtype == t.dtype for n, t in state.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_engine_goes_on_to_the_bit(kind, tmp_path):
    straight = make(kind)
    step(straight, 2)
    straight.save_state(tmp_path / "two")
    rest = step(straight, 2)
    resumed = make(kind)
    step(resumed, 1)  # a state of its own, which loading has to replace
    resumed.load_state(tmp_path / "two")
    assert step(resumed, 2) == rest
    assert same(exported(resumed), exported(straight))


@pytest.mark.parametrize("kind", KINDS)
def test_load_then_save_writes_the_same_bytes(kind, tmp_path):
    engine = make(kind)
    step(engine, 2)
    engine.save_state(tmp_path / "first")
    other = make(kind)
    other.load_state(tmp_path / "first")
    other.save_state(tmp_path / "second")
    for path in sorted(p for p in (tmp_path / "first").rglob("*") if p.is_file()):
        assert (tmp_path / "second" / path.relative_to(tmp_path / "first")).read_bytes() == path.read_bytes(), path.name


def test_main_weights_keep_what_bfloat16_would_lose(tmp_path):
    """The state holds float32 main weights, not the rounded ones; resuming without them gives another run."""
    engine = make("bfloat16")
    step(engine, 2)
    engine.save_state(tmp_path / "state")
    path = tmp_path / "state" / "optimizer_rank_0.safetensors"
    tensors = load_file(path)
    mains = {n: t for n, t in tensors.items() if n.endswith(".main")}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in mains.values())
    rest = step(engine, 2)
    save_file({n: t.bfloat16().float() if n in mains else t for n, t in tensors.items()}, path)
    resumed = make("bfloat16")
    resumed.load_state(tmp_path / "state")
    assert step(resumed, 2) != rest


@pytest.mark.parametrize("kind", KINDS)
def test_offloading_changes_no_bit_and_refuses_to_compute(kind):
    engine, other = make(kind), make(kind)
    step(engine)
    step(other)
    engine.offload()
    with pytest.raises(InputError, match="update_actor: the training engine is offloaded"):
        step(engine)
    with pytest.raises(InputError, match="export_weights: the training engine is offloaded"):
        next(engine.export_weights())
    held = sum(t.untyped_storage().nbytes() for t in engine._tensors.values())
    assert held == 0
    engine.reload()
    assert step(engine, 2) == step(other, 2)
    assert same(exported(engine), exported(other))


def test_a_checkpoint_takes_the_files_of_its_source_and_skips_none_in_silence(tmp_path):
    from alignment.weights.checkpoint import load_state, save_checkpoint
    from alignment.weights.indexed_save import ROTARY_FREQUENCIES, read_index

    save_checkpoint(tmp_path / "source", CONFIG, weights(CONFIG), max_shard_bytes=200_000)
    engine = make()
    step(engine)
    engine.save_checkpoint(tmp_path / "saved", like=tmp_path / "source")
    assert read_index(tmp_path / "saved") == read_index(tmp_path / "source")
    assert same(load_state(tmp_path / "saved"), exported(engine))
    listing = tmp_path / "source" / "model.safetensors.index.json"
    index = json.loads(listing.read_text())
    file = index["weight_map"]["model.layers.1.mlp.gate.weight"]
    index["weight_map"]["model.layers.1.self_attn.rotary_emb.inv_freq"] = file
    listing.write_text(json.dumps(index))
    with pytest.raises(InputError, match=rf"{file}: training never produces .*\.1\.self_attn\.rotary_emb\.inv_freq"):
        engine.save_checkpoint(tmp_path / "refused", like=tmp_path / "source")
    assert not (tmp_path / "refused").exists()
    engine.save_checkpoint(tmp_path / "allowed", like=tmp_path / "source", allow_missing=[ROTARY_FREQUENCIES])
    assert same(load_state(tmp_path / "allowed"), exported(engine))


# --- the field's KeyError: master_param
# ----------------------------------------------------------------------------------


def offloaded_optimizer():
    """megatron-core's offloading optimizer inside an engine that has made a step."""
    engine = make("bfloat16_offloaded")
    step(engine)
    return engine, engine._megatron_optimizer.chained_optimizers[0].optimizer


def test_stock_offloading_optimizer_dies_on_a_state_without_main_weights():
    """What users met: a sharded state read under the layout of an optimizer without offload has no ``master_param``."""
    from alignment.backends.megatron_model import engine_scope

    engine, inner = offloaded_optimizer()
    with engine_scope(engine.device):
        state = inner.state_dict()
        state["state"] = {i: {k: v for k, v in s.items() if k != "master_param"} for i, s in state["state"].items()}
        with pytest.raises(KeyError, match="master_param"):
            inner.load_state_dict(state)


def test_a_state_without_main_weights_is_refused_by_name(tmp_path):
    engine, _ = offloaded_optimizer()
    engine.save_state(tmp_path / "state")
    path = tmp_path / "state" / "optimizer_rank_0.safetensors"
    tensors = load_file(path)
    assert any(name.endswith(".main") for name in tensors)
    save_file({name: t for name, t in tensors.items() if not name.endswith(".main")}, path)
    before = exported(engine)
    with pytest.raises(InputError, match=r"the optimizer state lacks 0\.0\.0\.main.*master_param"):
        engine.load_state(tmp_path / "state")
    assert same(exported(engine), before)


def test_a_state_of_another_layout_is_refused_by_name(tmp_path):
    engine = make("bfloat16")
    step(engine)
    engine.save_state(tmp_path / "state")
    with pytest.raises(InputError, match="saved under another layout"):
        make("bfloat16_offloaded").load_state(tmp_path / "state")
    with pytest.raises(InputError, match="saved under another layout"):
        make("bfloat16_plain_optimizer").load_state(tmp_path / "state")
    layout = json.loads((tmp_path / "state" / "megatron.json").read_text())
    (tmp_path / "state" / "megatron.json").write_text(json.dumps({**layout, "tensor_model_parallel_size": 2}))
    with pytest.raises(
        InputError, match="tensor_model_parallel_size: the optimizer state was saved under another layout"
    ):
        engine.load_state(tmp_path / "state")


def test_a_damaged_state_is_refused(tmp_path):
    engine = make()
    step(engine)
    engine.save_state(tmp_path / "state")
    shutil.copytree(tmp_path / "state", tmp_path / "torn")
    path = tmp_path / "torn" / "optimizer_rank_0.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated or not safetensors"):
        engine.load_state(tmp_path / "torn")
    path.unlink()
    with pytest.raises(InputError, match="lacks the optimizer state of this rank"):
        engine.load_state(tmp_path / "torn")


# --- what is refused before training
# -------------------------------------------------------------------------------------


def test_another_release_is_refused():
    from alignment.backends.megatron_model import check_version

    check_version("0.16.1")
    with pytest.raises(InputError, match=r"not supported; expected 0\.12\.x, 0\.13\.x, 0\.16\.x; found 0\.9\.0"):
        check_version("0.9.0")


def test_another_vocabulary_is_refused():
    state = weights(CONFIG)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"][:-3]
    with pytest.raises(
        InputError, match=r"model\.embed_tokens\.weight: the vocabulary of the tensors.*\[512, 64\].*\[509, 64\]"
    ):
        make(state=state)


def test_another_shape_is_refused():
    state = weights(CONFIG)
    state["model.layers.1.self_attn.o_proj.weight"] = state["model.layers.1.self_attn.o_proj.weight"][:, :-4]
    with pytest.raises(InputError, match=r"self_attn\.o_proj\.weight: the shape does not fit"):
        make(state=state)


def test_a_missing_tensor_is_refused():
    state = weights(CONFIG)
    del state["model.layers.2.mlp.gate.e_score_correction_bias"]
    with pytest.raises(InputError, match=r"lacks the tensor model\.layers\.2\.mlp\.gate\.e_score_correction_bias"):
        make(state=state)


def test_float64_is_refused():
    with pytest.raises(InputError, match="model.dtype: megatron-core trains in float32 or bfloat16"):
        megatron_world.megatron_engine(CONFIG, {}, {}, dtype=torch.float64)


def test_more_ranks_than_there_are_are_refused():
    with pytest.raises(InputError, match="the number of ranks.*a multiple of 2"):
        megatron_world.megatron_engine(CONFIG, weights(CONFIG), {"tensor_model_parallel_size": 2})


def test_an_unknown_optimizer_setting_is_refused():
    with pytest.raises(InputError, match="no optimizer setting 'offload_everything'"):
        megatron_world.megatron_engine(CONFIG, weights(CONFIG), {"optimizer": {"offload_everything": True}})


def test_a_frozen_engine_computes_and_does_not_update():
    engine = megatron_world.megatron_engine(CONFIG, weights(CONFIG), {}, optimizer=False)
    trained = make()
    ours, theirs = (e.forward(batches(), stage="ref_log_prob") for e in (engine, trained))
    assert all(torch.equal(a["log_probs"], b["log_probs"]) for a, b in zip(ours, theirs, strict=True))
    with pytest.raises(InputError, match="a frozen engine has no optimizer"):
        step(engine)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone():
    engine = make()
    before = exported(engine)

    def overflow(outputs, batch):
        value, metrics = policy_loss(outputs, batch)
        return value * float("inf"), metrics

    with pytest.raises(InputError, match="update_actor: the gradient is not finite"):
        engine.update(batches(), overflow, stage="update_actor")
    assert same(exported(engine), before)


def test_logits_that_are_not_finite_name_stage_and_token():
    state = weights(CONFIG)
    state["lm_head.weight"][5] = float("nan")
    with pytest.raises(InputError, match="old_log_prob · .*the logits are not finite"):
        make(state=state).forward(batches(), stage="old_log_prob")
