"""The state of a sharded engine: saved, loaded, offloaded, on two ranks; and the errors that every rank gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fsdp_world
import pytest
import torch
from megatron_world import golden_outputs, join, launch, policy_loss, replayed_rows, share, weights
from safetensors.torch import load_file, save_file

from alignment.backends import fsdp_groups
from alignment.backends.fsdp_model import pieces, shard_rows
from alignment.devices.base import get_device
from alignment.errors import InputError, UnavailableError
from alignment.models.config import preset
from alignment.weights.checkpoint import load_state, weights_hash

PRESET = "tiny-deepseek"


def engine_of(model="golden", *, dtype="float32", outputs=golden_outputs):
    config = preset(PRESET)
    state = weights(config, getattr(torch, dtype))
    return fsdp_world.fsdp_engine(config, state, {"model": model, "dtype": dtype}, outputs=outputs)


def steps(engine, batches, count):
    return [
        (r.metrics["loss"], r.grad_norm)
        for r in (engine.update(batches, policy_loss, stage="update_actor") for _ in range(count))
    ]


def main(rank: int, world_size: int, job: dict) -> None:
    """One of two ranks: a straight run, one that is saved, loaded, offloaded and goes on, and errors on one rank
    only."""
    join(rank, world_size, job)
    folder = Path(job["results"])
    found: dict = {}
    batches = share(replayed_rows(preset(PRESET)), rank, world_size)
    for dtype in ("float32", "bfloat16"):
        straight = engine_of(dtype=dtype)
        steps(straight, batches, 1)
        straight.save_state(folder / dtype / "first")
        expected = steps(straight, batches, 2)
        straight.save_state(folder / dtype / "straight")
        resumed = engine_of(dtype=dtype)
        resumed.load_state(folder / dtype / "first")
        resumed.save_state(folder / dtype / "again")
        resumed.offload()
        try:
            steps(resumed, batches, 1)
        except InputError as error:
            found[f"{dtype} offloaded"] = str(error)
        resumed.reload()
        found[f"{dtype} same"] = steps(resumed, batches, 2) == expected
        resumed.save_state(folder / dtype / "resumed")
        found[f"{dtype} hash"] = weights_hash(dict(resumed.export_weights()))

    def poisoned(model, batch):
        outputs = golden_outputs(model, batch)
        return {**outputs, "log_probs": outputs["log_probs"] * (float("nan") if rank == 1 else 1.0)}

    broken = engine_of(outputs=poisoned)
    before = weights_hash(dict(broken.export_weights()))
    for name, call in {
        "forward": lambda: broken.forward(batches, stage="old_log_prob"),
        "update": lambda: steps(broken, batches, 1),
        "empty": lambda: broken.forward(batches if rank == 0 else [], stage="old_log_prob"),
    }.items():
        try:
            call()
        except InputError as error:
            found[name] = str(error)
    found["untouched"] = weights_hash(dict(broken.export_weights())) == before
    (folder / f"found_{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp_state")
    launch(2, {"results": str(folder)}, script=__file__)
    return folder, [json.loads((folder / f"found_{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_engine_takes_the_same_steps(ran, dtype):
    folder, found = ran
    assert found[0][f"{dtype} same"] and found[1][f"{dtype} same"]
    for file in (
        "model.safetensors",
        "shard_rank_0.safetensors",
        "shard_rank_1.safetensors",
        "fsdp.json",
        "config.json",
    ):
        assert (folder / dtype / "resumed" / file).read_bytes() == (folder / dtype / "straight" / file).read_bytes()
        assert (folder / dtype / "first" / file).read_bytes() == (folder / dtype / "again" / file).read_bytes()
    shard = "shard_rank_0.safetensors"
    assert (folder / dtype / "first" / shard).read_bytes() != (folder / dtype / "straight" / shard).read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_saved_checkpoint_is_what_is_exported(ran, dtype):
    folder, found = ran
    stored = load_state(folder / dtype / "resumed")
    assert weights_hash(stored) == found[0][f"{dtype} hash"] == found[1][f"{dtype} hash"]
    assert {str(t.dtype) for n, t in stored.items() if "correction_bias" not in n} == {f"torch.{dtype}"}


def test_main_weights_are_finer_than_what_is_exported(ran):
    """The steps of a small learning rate vanish in bfloat16: the shards have to keep what the checkpoint rounds
    away."""
    folder, _ = ran
    main = load_file(folder / "bfloat16" / "first" / "shard_rank_0.safetensors")["main.model.norm.weight"]
    assert main.dtype == torch.float32 and not torch.equal(main, main.bfloat16().float())


def test_an_offloaded_engine_says_so(ran):
    assert ran[1][0]["float32 offloaded"] == (
        "update_actor: the training engine is offloaded. Next: reload it before computing"
    )


@pytest.mark.parametrize("name, stage", [("forward", "old_log_prob"), ("update", "update_actor")])
def test_numbers_that_are_not_finite_stop_every_rank(ran, name, stage):
    _, (healthy, broken) = ran
    assert broken[name].startswith(f"{stage} · log_probs: the logits are not finite")
    assert healthy[name] == f"{stage}: rank 1 has failed. Next: read the error of that rank"
    assert healthy["untouched"] and broken["untouched"]


def test_a_rank_without_rows_stops_every_rank(ran):
    for found in ran[1]:
        assert found["empty"] == "old_log_prob: a rank has no micro batch; expected at least one; found [2, 0] by rank"


@pytest.fixture
def alone():
    with fsdp_world.alone():
        yield


def test_a_state_of_two_ranks_is_refused_by_one(ran, alone):
    with pytest.raises(
        InputError, match="saved under another layout; expected .*'world_size': 1.*found .*'world_size': 2"
    ):
        engine_of().load_state(ran[0] / "float32" / "first")


def test_a_shard_with_a_tensor_less_is_refused(alone, tmp_path):
    engine = engine_of()
    engine.save_state(tmp_path)
    path = tmp_path / "shard_rank_0.safetensors"
    tensors = load_file(path)
    del tensors["exp_avg.lm_head.weight"]
    save_file(tensors, path)
    with pytest.raises(InputError, match="the checkpoint lacks 1 tensor.*exp_avg.lm_head.weight"):
        engine.load_state(tmp_path)


def test_weights_that_do_not_fit(alone):
    config = preset(PRESET)
    state = weights(config)
    short = {**state, "lm_head.weight": state["lm_head.weight"][:-1]}
    with pytest.raises(
        InputError, match="lm_head.weight: the vocabulary of the tensors is not that of the configuration"
    ):
        fsdp_world.fsdp_engine(config, short, {"model": "golden"})
    less = {n: t for n, t in state.items() if n != "model.norm.weight"}
    with pytest.raises(InputError, match="the checkpoint lacks the tensor model.norm.weight"):
        fsdp_world.fsdp_engine(config, less, {"model": "golden"})
    with pytest.raises(InputError, match="extra.weight: a tensor that the configuration has no place for"):
        fsdp_world.fsdp_engine(config, {**state, "extra.weight": torch.zeros(1)}, {"model": "golden"})


def test_an_unknown_model_is_refused(alone):
    with pytest.raises(
        InputError, match="fsdp_config.model: no such model; expected transformers | golden; found llama"
    ):
        engine_of("llama")


def test_a_frozen_engine_computes_and_does_not_train(alone):
    config = preset(PRESET)
    engine = fsdp_world.fsdp_engine(config, weights(config), {"model": "golden"}, optimizer=False)
    batches = share(replayed_rows(config), 0, 1)
    assert len(engine.forward(batches, stage="ref_log_prob")) == len(batches)
    with pytest.raises(InputError, match="update_actor: a frozen engine has no optimizer"):
        engine.update(batches, policy_loss, stage="update_actor")


def test_a_torch_whose_reduction_cannot_be_corrected_is_refused(alone, monkeypatch):
    """Here the block's gradient is three times what it should be, and the root's is not."""
    from torch.distributed import fsdp

    fsdp_groups.join_group(get_device("cpu"))
    shard = fsdp.fully_shard

    def faulty(module, **arguments):
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, arguments, output: output * 3 - (output * 2).detach())
        return shard(module, **arguments)

    monkeypatch.setattr(fsdp, "fully_shard", faulty)
    with pytest.raises(
        UnavailableError, match="FSDP2 of this torch sums gradients wrongly; expected one factor.*found 1 to 3"
    ):
        fsdp_groups.gradient_scale(get_device("cpu"))


def test_shards_are_those_of_torch():
    for rows in (1, 2, 5, 7, 8):
        for world_size in (1, 2, 3, 4):
            chunks = torch.arange(rows).chunk(world_size)
            for rank in range(world_size):
                start, stop = shard_rows(rows, rank, world_size)
                expected = chunks[rank].tolist() if rank < len(chunks) else []
                assert list(range(start, stop)) == expected


def test_stacked_experts_are_taken_apart():
    stacked = torch.arange(2 * 6 * 3).view(2, 6, 3)
    found = {p.name: p.of(stacked) for p in pieces("model.layers.1.mlp.experts.gate_up_proj", stacked.shape)}
    assert torch.equal(found["model.layers.1.mlp.experts.1.gate_proj.weight"], stacked[1, :3])
    assert torch.equal(found["model.layers.1.mlp.experts.0.up_proj.weight"], stacked[0, 3:])
    [up] = [
        p
        for p in pieces("model.layers.1.mlp.experts.gate_up_proj", stacked.shape)
        if p.name.endswith("1.up_proj.weight")
    ]
    assert up.of(stacked[:1]) is None and torch.equal(up.of(stacked[1:], start=1), stacked[1, 3:])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))
