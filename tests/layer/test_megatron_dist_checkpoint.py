"""megatron-core's distributed checkpoint, written offline by one rank and read under other layouts."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys

import megatron_world
import pytest
from megatron_world import megatron_engine, small_config, weights
from safetensors.torch import load_file

from alignment.backends import megatron_dist_checkpoint
from alignment.backends.megatron_dist_checkpoint import MARK
from alignment.errors import InputError
from alignment.weights.checkpoint import save_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("megatron_core")]

CONFIG = small_config("tiny-deepseek")
ON_TWO = {
    "tp2_ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "dp2": {},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Made by the command, from a Hugging Face checkpoint."""
    folder = tmp_path_factory.mktemp("dist")
    save_checkpoint(folder / "hf", CONFIG, weights(CONFIG))
    command = [sys.executable, "-m", "alignment", "checkpoint", "to-dist", str(folder / "hf"), str(folder / "dist")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=megatron_world.LIMIT_SECONDS)
    if "does not write distributed checkpoints with this torch" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def read(written, tmp_path_factory):
    """What engines computed whose weights came from the distributed checkpoint, and from the stream."""
    folder = tmp_path_factory.mktemp("read")
    layouts = {**ON_TWO, **{f"{k}_dist": {**v, "dist_checkpoint": str(written)} for k, v in ON_TWO.items()}}
    megatron_world.launch(2, {"layouts": {k: {**v, "steps": 1} for k, v in layouts.items()}, "results": str(folder)})
    return {
        name: (json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors"))
        for name in layouts
    }


@pytest.mark.parametrize("layout", ON_TWO)
def test_every_weight_arrives_bit_for_bit(read, layout):
    assert read[f"{layout}_dist"][0]["exported"]


@pytest.mark.parametrize("layout", ON_TWO)
def test_the_first_step_is_that_of_the_bridge_to_the_bit(read, layout):
    (bridge, tensors), (dist, others) = read[layout], read[f"{layout}_dist"]
    assert (bridge["losses"], bridge["norms"]) == (dist["losses"], dist["norms"])
    assert tensors.keys() == others.keys()
    assert all(bool((tensors[name] == others[name]).all()) for name in tensors)


def test_what_another_program_wrote_is_not_unpickled(written, tmp_path):
    copy = shutil.copytree(written, tmp_path / "copy")
    (copy / MARK).unlink()
    (copy / "common.pt").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(
        InputError, match="(?s)not a distributed checkpoint of this package.*alignment checkpoint to-dist"
    ):
        megatron_engine(CONFIG, {}, {"dist_checkpoint": str(copy)}, optimizer=False)


@pytest.mark.parametrize("name", (".metadata", "common.pt"))
@pytest.mark.parametrize("damage", ("changed", "missing"))
def test_a_damaged_file_is_refused_before_it_is_read(written, tmp_path, name, damage):
    copy = shutil.copytree(written, tmp_path / "copy")
    if damage == "missing":
        (copy / name).unlink()
    else:
        (copy / name).write_bytes((copy / name).read_bytes() + b"x")
    with pytest.raises(InputError, match=f"(?s){name}.*the file is not the one that was written"):
        megatron_engine(CONFIG, {}, {"dist_checkpoint": str(copy)}, optimizer=False)


def test_another_model_is_refused(written):
    other = dataclasses.replace(CONFIG, routed_scaling_factor=CONFIG.routed_scaling_factor + 1)
    with pytest.raises(InputError, match="(?s)another model's.*routed_scaling_factor"):
        megatron_engine(other, {}, {"dist_checkpoint": str(written)}, optimizer=False)


def test_a_folder_in_use_is_not_written_into(written):
    engine = megatron_engine(CONFIG, weights(CONFIG), {}, optimizer=False)
    with pytest.raises(InputError, match="the folder is not empty"):
        megatron_dist_checkpoint.write(engine, written, source="")


def test_a_shard_of_another_size_is_refused(written, tmp_path):
    copy = shutil.copytree(written, tmp_path / "copy")
    shard = next(copy.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"(?s){shard.name}.*the file is not the one that was written"):
        megatron_engine(CONFIG, {}, {"dist_checkpoint": str(copy)}, optimizer=False)


def test_the_weights_of_another_checkpoint_are_refused(written):
    from alignment.rl.mock_rollout import hash_checkpoint

    megatron_dist_checkpoint.check_source(written, hash_checkpoint(written.parent / "hf"))
    with pytest.raises(InputError, match="holds other weights than model.path"):
        megatron_dist_checkpoint.check_source(written, "another")


def test_only_the_policys_own_weights_come_from_it(written, tmp_path):
    """A teacher or a perturbed start is another checkpoint: it is read as it is."""
    from alignment.rl.config import TrainConfig
    from alignment.rl.megatron_policy import _dist_checkpoint

    megatron = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(written)}
    policy = {"model": {"path": str(written.parent / "hf")}, "actor": {"megatron": megatron}}
    config = TrainConfig.from_dict({"actor_rollout_ref": policy})
    assert _dist_checkpoint(config, written.parent / "hf") == written
    assert _dist_checkpoint(config, tmp_path) is None
