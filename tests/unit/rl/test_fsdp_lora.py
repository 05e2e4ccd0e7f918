"""The adapter on FSDP2 is the golden adapter: same draws, gradients, merges and exports, from frozen shards."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from alignment.backends.fsdp_training import FsdpSettings
from alignment.backends.training import OptimizerConfig
from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.devices.base import get_device
from alignment.diagnose.capture_comparison import compare_captures
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.rl.fsdp_lora import FsdpLoraEngine
from alignment.rl.lora import ActorWithoutAdapter, LoraModel, LoraSettings, LoraTrainingEngine
from alignment.weights.checkpoint import load_state

CONFIG = dataclasses.replace(preset("tiny-moonlight"), num_hidden_layers=2, vocab_size=40)
IDS = torch.tensor([[1, 5, 7, 9], [2, 4, 6, 8]])
ROWS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "position_ids": torch.arange(4).expand(2, 4)}
OPTIMIZER = OptimizerConfig(lr=1e-2)
SETTINGS = LoraSettings(rank=2, alpha=6.0)


def outputs(model, rows):
    logits = model(rows["input_ids"], attention_mask=rows["attention_mask"], position_ids=rows["position_ids"])
    return {"log_probs": torch.log_softmax(logits, dim=-1)[..., 0]}


def loss(found, rows):
    return -found["log_probs"].sum(), {}


def base(dtype=torch.float64) -> CausalLM:
    return CausalLM(CONFIG, dtype=dtype).init_weights(3)


def golden(dtype=torch.float64, settings=SETTINGS) -> LoraTrainingEngine:
    return LoraTrainingEngine(LoraModel(base(dtype), settings), optimizer=OPTIMIZER, outputs=outputs, device="cpu")


def sharded(dtype=torch.float64, settings=SETTINGS, model="golden", **more) -> FsdpLoraEngine:
    if model == "transformers":
        pytest.importorskip("transformers")
    return FsdpLoraEngine(
        CONFIG, weights=iter(base(dtype).state_dict().items()), adapter=settings, optimizer=OPTIMIZER, outputs=outputs,
        dtype=dtype, device=get_device("cpu"), settings=FsdpSettings(model=model, **more),
    )  # fmt: skip


def updated(engine, times: int = 1) -> dict[str, torch.Tensor]:
    """The gradients of the first of several updates."""
    seen: dict[str, torch.Tensor] = {}

    def keep(stream):
        found = {name: gradient.clone() for name, gradient in stream}
        seen.update(found if not seen else {})

    for _ in range(times):
        engine.update([ROWS], loss, stage="update_actor", observe_gradients=keep)
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_the_golden_adapter_bit_for_bit(dtype):
    ours, theirs = sharded(dtype), golden(dtype)
    gradients, expected = updated(ours), updated(theirs)
    assert gradients.keys() == expected.keys() and any(g.any() for g in gradients.values())
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    exported, expected = dict(ours.export_weights()), dict(theirs.export_weights())
    assert exported.keys() == expected.keys() and all(torch.equal(exported[n], t) for n, t in expected.items())


@pytest.mark.parametrize("wrong", [dataclasses.replace(SETTINGS, alpha=3.0), dataclasses.replace(SETTINGS, seed=7)])
def test_another_scale_or_another_draw_is_seen(wrong):
    gradients, expected = updated(sharded(settings=wrong)), updated(golden())
    assert not all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize("model", ["golden", "transformers"])
def test_it_trains_alone_and_exports_what_it_computes_with(tmp_path, model):
    engine = sharded(torch.float32, model=model, activation_checkpointing=model == "golden")
    before = dict(base(torch.float32).state_dict())
    first = engine.forward([ROWS], stage="old_log_prob")[0]["log_probs"]
    reference = ActorWithoutAdapter(engine, outputs)
    assert reference.model is engine.model
    assert torch.equal(reference.forward([ROWS], stage="ref_log_prob")[0]["log_probs"], first)
    assert all(torch.equal(t, before[n]) for n, t in engine.export_weights())
    updated(engine, times=2)
    learned = engine.forward([ROWS], stage="old_log_prob")[0]["log_probs"]
    assert not torch.equal(learned, first)
    assert torch.equal(reference.forward([ROWS], stage="ref_log_prob")[0]["log_probs"], first), "the base has moved"
    assert torch.equal(engine.forward([ROWS], stage="old_log_prob")[0]["log_probs"], learned), "the adapter stayed off"
    exported = dict(engine.export_weights())
    moved = {name for name in before if not torch.equal(exported[name], before[name])}
    targets = set(LoraModel(base(), SETTINGS).targets)
    assert moved <= targets and all(".experts." in name for name in targets - moved), "experts that no token chose stay"
    engine.save_state(tmp_path)
    saved = dict(load_state(tmp_path))
    assert saved.keys() == before.keys() and all(torch.equal(saved[n], t) for n, t in exported.items())
    again = sharded(torch.float32, model=model)
    again.load_state(tmp_path)
    assert all(torch.equal(t, exported[n]) for n, t in again.export_weights())
    engine.offload()
    engine.reload()
    updated(engine)
    updated(again)
    assert all(torch.equal(t, u) for (_, t), (_, u) in zip(engine.export_weights(), again.export_weights()))


def test_the_merged_weights_compute_what_was_trained():
    engine = sharded()
    updated(engine, times=2)
    plain = base()
    plain.load_state_dict(dict(engine.export_weights()))
    with torch.no_grad():
        expected = outputs(plain, ROWS)["log_probs"]
    assert torch.equal(engine.forward([ROWS], stage="old_log_prob")[0]["log_probs"], expected)


def test_the_experts_of_a_layer_are_adapted_together():
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("experts are one tensor from transformers 5 on")
    some = dataclasses.replace(SETTINGS, target_modules=("*.experts.0.gate_proj",), where="here")
    with pytest.raises(InputError, match="here: the experts of a layer are one tensor here and are adapted together"):
        sharded(settings=some, model="transformers")
    with pytest.raises(InputError, match="here: no weight of the model is adapted; expected all-linear, or some of"):
        sharded(settings=dataclasses.replace(some, target_modules=("qkv",)))


ONE_LAYER = dataclasses.replace(CONFIG, num_hidden_layers=1, first_k_dense_replace=0)


def captured(directory, model, run) -> OwnCapture:
    with capture(model, CaptureConfig(backward=False), directory=directory) as session, session.step(0):
        run()
    assert session.failure is None
    return OwnCapture(directory)


@pytest.mark.parametrize("of", ["plain", "adapted"])
def test_a_capture_of_it_pairs_with_every_module_of_the_model(tmp_path, monkeypatch, of):
    monkeypatch.setattr(f"{__name__}.CONFIG", ONE_LAYER)
    engine = sharded(torch.float32)
    updated(engine)
    merged = base(torch.float32)
    merged.load_state_dict(dict(engine.export_weights()))
    if of == "plain":
        first = captured(tmp_path / "a", merged, lambda: outputs(merged, ROWS))
    else:
        theirs = golden(torch.float32)
        updated(theirs)
        first = captured(tmp_path / "a", theirs.model, lambda: theirs.forward([ROWS], stage="old_log_prob"))
    learned = captured(tmp_path / "b", engine.model, lambda: engine.forward([ROWS], stage="old_log_prob"))
    stage = compare_captures(first, learned).stages[0]
    assert stage.failures == [] and stage.aligned, stage.reason()
    modules = {row.module for row in learned.rows(0, "train", 0) if row.kind == "module"}
    assert modules == {name for name, m in merged.named_modules() if not isinstance(m, torch.nn.ModuleList)}
    parameters = {row.module for row in learned.rows(0, "train", 0) if row.kind == "parameter"}
    assert parameters >= {name for name in LoraModel(base(), SETTINGS).targets if ".experts." not in name}
    forgotten = sharded(torch.float32)
    fresh = captured(tmp_path / "c", forgotten.model, lambda: forgotten.forward([ROWS], stage="old_log_prob"))
    stage = compare_captures(first, fresh).stages[0]
    assert stage.failures == [] and not stage.aligned
    assert stage.first.quantity == "parameter weight" and stage.first.module.endswith("_proj"), stage.reason()
