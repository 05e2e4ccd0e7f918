"""Distillation on FSDP2 and on megatron-core: the losses of the golden engine, whatever the layout of the ranks."""

from __future__ import annotations

import importlib.util

import gkd_world
import pytest

from alignment.rl.config import load_config
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_run import run_gkd

STEPS = 4
# The bar on losses of engines in float32, as the project states it for three optimizer steps.
LOSS_BAR = 1e-5
MEGATRON = "actor_rollout_ref__actor__megatron__"


@pytest.fixture(scope="module")
def pupils(world, tmp_path_factory):
    return gkd_world.build(tmp_path_factory.mktemp("gkd"), world)


@pytest.fixture(scope="module")
def distil(world, pupils, tmp_path_factory):
    def run(executor: str = "inprocess", **changes) -> list[dict]:
        config = gkd_world.config(world, pupils, trainer__total_training_steps=STEPS, **changes)
        return run_gkd(config, run_dir=tmp_path_factory.mktemp("run"), executor=executor).metrics

    return run


@pytest.fixture(scope="module")
def golden(distil):
    """The golden engine's metrics, over the vocabulary and over the teacher's most likely tokens."""
    return {k: distil(gkd__gkd_logits_topk=k) for k in (None, 5)}


def assert_same(ours: list[dict], theirs: list[dict]) -> None:
    """As long as a run may be compared token by token: the first three updates, on the same responses."""
    for mine, reference in zip(ours[:3], theirs[:3], strict=True):
        assert mine["student/tokens"] == reference["student/tokens"]
        for name in ("student/loss", "student/jsd_loss"):
            assert abs(mine[name] - reference[name]) <= LOSS_BAR * abs(reference[name]), (mine, reference)


@pytest.mark.parametrize("model", ["golden", "transformers"])
@pytest.mark.parametrize("k", [None, 5])
def test_fsdp(distil, golden, model, k):
    if model == "transformers":
        pytest.importorskip("transformers")
    fsdp = {"engine__train": "fsdp", "actor_rollout_ref__actor__fsdp_config__model": model}
    assert_same(distil(gkd__gkd_logits_topk=k, **fsdp), golden[k])


def test_an_adapter_on_fsdp_and_its_base_as_the_teacher(distil, pupils):
    opsd = {"data__train_files": [str(pupils / "opsd.jsonl")], "gkd__lora__rank": 4, "gkd__teacher_model": None}
    fsdp = {"engine__train": "fsdp", "actor_rollout_ref__actor__fsdp_config__model": "golden"}
    ours, theirs = distil(**opsd, **fsdp), distil(**opsd)
    assert_same(ours, theirs)
    assert ours[0]["student/loss"] > 0


@pytest.mark.slow
def test_fsdp_on_two_ranks(ray_cluster, distil, golden):
    assert_same(distil("ray", engine__train="fsdp", trainer__n_gpus_per_node=2), golden[None])


def megatron_or_skip() -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")


@pytest.mark.engine
@pytest.mark.parametrize("k", [None, 5])
def test_megatron(distil, golden, k):
    megatron_or_skip()
    assert_same(distil(gkd__gkd_logits_topk=k, engine__train="megatron", gkd__offload_teacher_model=True), golden[k])


@pytest.mark.engine
@pytest.mark.parametrize("layout", ["data", "context", "pipeline"])
def test_megatron_on_two_ranks(ray_cluster, distil, golden, layout):
    megatron_or_skip()
    sizes = {} if layout == "data" else {f"{MEGATRON}{layout}_{'model_' * (layout == 'pipeline')}parallel_size": 2}
    assert_same(distil("ray", engine__train="megatron", trainer__n_gpus_per_node=2, **sizes), golden[None])


@pytest.mark.engine
def test_megatron_with_the_vocabulary_split(ray_cluster, tmp_path):
    """On the embedded models, whose 256 words two ranks can share: the teacher's most likely tokens are the vocabulary's."""
    megatron_or_skip()
    fixed = ["trainer.total_training_steps=3", "trainer.save_freq=0", "trainer.device=cpu", "trainer.logger=[jsonl]"]
    fixed += ["data.train_batch_size=8", "gkd.micro_batch_size=4", "gkd.gkd_logits_topk=5"]
    split = [
        "engine.train=megatron",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    ]
    ours = run_gkd(
        load_config("gkd-tiny", [*fixed, *split], kind=GkdConfig), run_dir=tmp_path / "split", executor="ray"
    )
    theirs = run_gkd(load_config("gkd-tiny", fixed, kind=GkdConfig), run_dir=tmp_path / "golden")
    assert_same(ours.metrics, theirs.metrics)
