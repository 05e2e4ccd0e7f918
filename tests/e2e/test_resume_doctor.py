"""A checkpoint examined before it is trusted: healthy ones have no symptom, each kind of damage has its own."""

from __future__ import annotations

import hashlib
import json
import shutil

import dapo_world
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from alignment.cli import app
from alignment.diagnose.resume_doctor import examine_checkpoint
from alignment.errors import InputError
from alignment.rl.run import run_dapo
from alignment.weights.checkpoint import load_model


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return dapo_world.build(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def saved(world, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    run_dapo(dapo_world.config(world, trainer__save_freq=1), run_dir=directory)
    return directory / "checkpoints"


@pytest.fixture
def checkpoints(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def problems(path, **arguments) -> list[str]:
    return [str(symptom) for symptom in examine_checkpoint(path, **arguments)]


def edit(path, change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_healthy_checkpoint_has_no_symptom(saved, world):
    assert problems(saved) == []
    assert problems(saved / "global_step_3") == []
    assert problems(world / "model") == []
    shown = CliRunner().invoke(app, ["checkpoint", "examine", str(saved)])
    assert shown.exit_code == 0, shown.output
    assert "can be trusted" in shown.output


def without_generator(folder):
    path = folder / "rng_actor_0.safetensors"
    state = load_file(path)
    state.pop("numpy")
    save_file(state, path)


def without_moment(folder):
    path = folder / "actor" / "optimizer.safetensors"
    state = load_file(path)
    state.pop("exp_avg_sq.lm_head.weight")
    save_file(state, path)


DAMAGE = {
    "latest": (lambda root, last: (root / "latest_checkpointed_iteration.txt").write_text("2\n"), "names another checkpoint"),
    "unfinished": (lambda root, last: (root / ".unfinished_global_step_4").mkdir(), "a save that was killed"),
    "step": (lambda root, last: edit(last / "state.json", lambda d: d.update(step=7)), "another step than the folder"),
    "data": (lambda root, last: edit(last / "state.json", lambda d: d["data"].update(position=4)), "fewer prompts were used"),
    "no data": (lambda root, last: edit(last / "state.json", lambda d: d.pop("data")), "the position in the data is missing"),
    "generators": (lambda root, last: (last / "rng_actor_0.safetensors").unlink(), "the generators of a rank are missing"),
    "generator": (lambda root, last: without_generator(last), "the generator of numpy is missing"),
    "order": (lambda root, last: edit(last / "state.json", lambda d: d["data"].update(seed=2)), "one in another order of prompts"),
    "schedule": (lambda root, last: (last / "actor" / "schedule.json").unlink(), "the schedule is missing"),
    "updates": (lambda root, last: edit(last / "actor" / "schedule.json", lambda d: d.update(updates=1)), "another number of steps"),
    "optimizer": (lambda root, last: (last / "actor" / "optimizer.safetensors").unlink(), "the optimizer state of a rank is missing"),
    "moment": (lambda root, last: without_moment(last), "the state of lm_head.weight is not whole"),
    "weights": (lambda root, last: (last / "actor" / "model.safetensors").write_bytes(b"cut"), "truncated or not safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_each_damage_is_named(checkpoints, name):
    damage, problem = DAMAGE[name]
    damage(checkpoints, checkpoints / "global_step_3")
    (found, *more) = problems(checkpoints)
    assert problem in found
    assert not more, more
    shown = CliRunner().invoke(app, ["checkpoint", "examine", str(checkpoints), "--json"])
    assert shown.exit_code == 1
    assert problem in json.loads(shown.output)["symptoms"][0]["problem"] + name


def test_a_generation_that_feeds_several_steps_is_no_symptom(checkpoints):
    """Distillation: two steps from one batch of prompts, and updates that the configuration of DAPO does not count."""
    edit(checkpoints / "global_step_3" / "state.json", lambda d: d["data"].update(position=8))
    assert "fewer prompts" in problems(checkpoints)[0]
    more = {"gkd.steps_per_generation": 2, "gkd.lmbda": 0.5}
    edit(checkpoints / "global_step_3" / "state.json", lambda d: d["config"].update(more))
    assert problems(checkpoints) == []


def test_another_number_of_ranks(saved):
    found = problems(saved, ranks=2)
    assert "saved by another number of ranks" in found[0]


def test_a_layout_that_the_optimizer_state_does_not_have(checkpoints):
    """The case of the field: a sharded optimizer state read under another layout ended in KeyError: master_param."""
    actor = checkpoints / "global_step_3" / "actor"
    (actor / "megatron.json").write_text(json.dumps({"updates": 3, "world_size": 2}))
    (actor / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.move(actor / name, actor / "model" / name)
    state = load_file(actor / "optimizer.safetensors")
    whole = {f"0.{kind}": state[f"{kind}.lm_head.weight"] for kind in ("exp_avg", "exp_avg_sq")}
    save_file({**whole, "0.main": whole["0.exp_avg"].clone()}, actor / "optimizer_rank_0.safetensors")
    save_file(
        whole | {f"1.{kind}": whole["0.exp_avg"].clone() for kind in ("exp_avg", "exp_avg_sq", "main")},
        actor / "optimizer_rank_1.safetensors",
    )
    found = problems(checkpoints / "global_step_3")
    assert "world_size: the optimizer state has another layout; expected 1; found 2" in found[0]
    assert "the state of 0 is not whole" in found[1] and "no main" in found[1]
    assert len(found) == 2


def as_megatron(checkpoints, **layout):
    """The last checkpoint as megatron-core's engine keeps it, on one rank, with a state of one parameter."""
    last = checkpoints / "global_step_3"
    actor = last / "actor"
    (actor / "megatron.json").write_text(json.dumps({"updates": 3, "world_size": 1, **layout}))
    (actor / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.move(actor / name, actor / "model" / name)
    moments = load_file(actor / "optimizer.safetensors")
    whole = {f"0.{kind}": moments[f"{kind}.lm_head.weight"] for kind in ("exp_avg", "exp_avg_sq")}
    whole |= {"0.main": whole["0.exp_avg"].clone(), "0.step": torch.tensor(3.0)}
    save_file(whole, actor / "optimizer_rank_0.safetensors")
    return actor


def test_equally_many_ranks_in_another_layout(checkpoints):
    """The case of the field once more: the number of ranks fits, the sizes do not."""
    actor = as_megatron(checkpoints, tensor_model_parallel_size=1, dtype="torch.float32")
    assert problems(checkpoints) == []
    edit(actor / "megatron.json", lambda d: d.update(tensor_model_parallel_size=2, dtype="torch.bfloat16"))
    dtype, size = problems(checkpoints)
    another = "the optimizer state has another layout than the run that saved it"
    assert f"megatron.json: dtype: {another}; expected torch.float32; found torch.bfloat16" in dtype
    assert f"megatron.json: tensor_model_parallel_size: {another}; expected 1; found 2" in size


def test_an_optimizer_file_of_another_checkpoint(checkpoints):
    """Whole and of the right layout, and two steps behind: its own counter says so."""
    file = as_megatron(checkpoints) / "optimizer_rank_0.safetensors"
    assert problems(checkpoints) == []
    save_file({**load_file(file), "0.step": torch.tensor(1.0)}, file)
    (found,) = problems(checkpoints)
    assert "the optimizer has counted another number of steps: the file is another checkpoint's" in found
    assert "0.step" in found and found.endswith("expected 3; found 1")


def test_what_no_gradient_moves_has_no_moments(checkpoints):
    """The bias that balances experts has a main weight alone; any other weight without moments has lost them."""
    file = checkpoints / "global_step_3" / "actor" / "optimizer.safetensors"
    state = load_file(file)
    names = {key.removeprefix("exp_avg.") for key in state if key.startswith("exp_avg.")}
    mains = {f"main.{name}": state[f"exp_avg.{name}"].clone() for name in names}
    bias = "main.model.layers.1.mlp.gate.e_score_correction_bias"
    save_file(state | mains | {bias: torch.zeros(4)}, file)
    assert problems(checkpoints) == []
    for key in ("exp_avg.lm_head.weight", "exp_avg_sq.lm_head.weight"):
        state.pop(key)
    save_file(state | mains | {bias: torch.zeros(4)}, file)
    (found,) = problems(checkpoints)
    assert "the state of lm_head.weight is not whole" in found


@pytest.fixture(scope="module", params=["golden", "fsdp"])
def adapted(world, tmp_path_factory, request):
    """One step of a run that trains an adapter; its actor."""
    directory = tmp_path_factory.mktemp(f"adapted-{request.param}")
    settings = {
        "engine__train": request.param, "actor_rollout_ref__actor__fsdp_config__model": "golden",
        "actor_rollout_ref__model__lora_rank": 2, "trainer__save_freq": 1, "trainer__total_training_steps": 1,
    }  # fmt: skip
    run_dapo(dapo_world.config(world, **settings), run_dir=directory)
    return directory / "checkpoints" / "global_step_1" / "actor"


def test_an_adapter_leaves_a_checkpoint_that_is_trusted(adapted, world):
    """Its weights are the merged ones, in a form that everything else reads too."""
    assert problems(adapted.parents[1]) == problems(adapted) == []
    merged, before = (load_model(p, dtype=torch.float32, device="cpu").state_dict() for p in (adapted, world / "model"))
    moved = {name for name in before if not torch.equal(merged[name], before[name])}
    assert moved and not any(name.endswith(("embed_tokens.weight", "lm_head.weight", "norm.weight")) for name in moved)


def test_what_an_adapter_leaves_frozen_has_no_moments_and_its_factors_have(adapted, tmp_path):
    step = shutil.copytree(adapted.parent, tmp_path / "global_step_1")
    (file,) = [*(step / "actor").glob("optimizer.safetensors"), *(step / "actor").glob("shard_rank_0.safetensors")]
    state = load_file(file)
    factor = next(key.removeprefix("exp_avg.") for key in sorted(state) if key.startswith("exp_avg.down."))
    mains = {f"main.{key.removeprefix('exp_avg.')}": state[key].clone() for key in state if key.startswith("exp_avg.")}
    save_file(mains | {k: t for k, t in state.items() if not k.startswith("exp_avg") or not k.endswith(factor)}, file)
    (found,) = problems(step)
    assert f"the state of {factor} is not whole" in found
    save_file(mains | state | {"main.lm_head.weight": torch.zeros(2)}, file)
    assert problems(step) == []

    def in_distillation(state):
        state["config"]["gkd.lora.rank"] = state["config"].pop("actor_rollout_ref.model.lora_rank")

    edit(step / "state.json", in_distillation)
    assert problems(step) == []
    edit(step / "state.json", lambda d: d["config"].pop("gkd.lora.rank"))
    (found,) = problems(step)
    assert "the state of lm_head.weight is not whole" in found


@pytest.mark.parametrize("adapted", ["golden"], indirect=True)
@pytest.mark.parametrize("key", ["base_model.lm_head.weight", "down.", "up."])
def test_an_adapter_that_no_longer_can_resume(adapted, tmp_path, key):
    step = shutil.copytree(adapted.parent, tmp_path / "global_step_1")
    file = step / "actor" / "lora.safetensors"
    state = load_file(file)
    lost = next(name for name in sorted(state) if name.startswith(key))
    save_file({name: tensor for name, tensor in state.items() if name != lost}, file)
    assert problems(step) == [f"{file}: {lost} is missing; found 1 such keys are not there"]
    file.write_bytes(b"cut")
    (found,) = problems(step)
    assert found.startswith(f"{file}: truncated or not safetensors")
    file.unlink()
    expected = "the adapter is missing: the weights beside it are merged, and no resume can take them apart"
    assert problems(step) == [f"{file}: {expected}"]


def test_a_distributed_checkpoint_is_held_to_what_was_written(tmp_path):
    """megatron-core's own files, by their sizes and hashes: nothing of them is unpickled."""
    from alignment.backends.megatron_dist_checkpoint import MARK

    written = {".metadata": b"pickle", "common.pt": b"pickle too", "__0_0.distcp": b"tensors"}
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match="not a distributed checkpoint of this package; others are pickles"):
        examine_checkpoint(tmp_path)
    mark = {
        "source": "a hash",
        "config": {"hidden_size": 32},
        "files": {name: hashlib.sha256(written[name]).hexdigest() for name in (".metadata", "common.pt")},
        "sizes": {name: len(content) for name, content in written.items()},
    }
    (tmp_path / MARK).write_text(json.dumps(mark))
    assert problems(tmp_path) == []
    (tmp_path / "common.pt").write_bytes(b"pickle two")
    assert "common.pt: the file is not the one that was written" in problems(tmp_path)[0]
    (tmp_path / "common.pt").write_bytes(written["common.pt"])
    (tmp_path / "__0_0.distcp").unlink()
    assert problems(tmp_path) == [
        f"{tmp_path / '__0_0.distcp'}: the file is not the one that was written; expected 7 bytes; found no bytes"
    ]
    (tmp_path / "__0_0.distcp").write_bytes(written["__0_0.distcp"])
    (tmp_path / MARK).write_text(json.dumps({**mark, "source": ""}))
    assert "source: nothing says whose weights these are" in problems(tmp_path)[0]


def test_the_key_that_training_never_produces(world, tmp_path):
    """Moonlight's index lists rotary_emb.inv_freq: the file it is in was silently not written."""
    model = shutil.copytree(world / "model", tmp_path / "model")
    state = load_file(model / "model.safetensors")
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**state, key: state["model.norm.weight"].clone()}, model / "model.safetensors")
    (found,) = problems(model)
    assert found.startswith(f"{model / 'model.safetensors'}: training never produces {key}: a writer that waits for every")
    assert found.endswith(f"would silently not write it, and lose {len(state)} trained tensors")
    shown = CliRunner().invoke(app, ["checkpoint", "examine", str(model)])
    assert shown.exit_code == 1 and shown.stdout.splitlines()[-1] == "1 symptom"


def test_an_index_that_promises_what_is_not_there(world, tmp_path):
    model = shutil.copytree(world / "model", tmp_path / "model")
    state = load_file(model / "model.safetensors")
    weight_map = dict.fromkeys(state, "model.safetensors")
    lost = {name: t for name, t in state.items() if name != "model.norm.weight"}
    save_file(lost, model / "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (found,) = problems(model)
    assert "the index promises model.norm.weight" in found
    weight_map["model.norm.weight"] = "other.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (found,) = problems(model)
    assert "other.safetensors: a file of the index is missing" in found


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match="there is no checkpoint here"):
        examine_checkpoint(tmp_path)
