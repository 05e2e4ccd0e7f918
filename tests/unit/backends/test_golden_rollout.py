"""The golden rollout engine: its sampling, its log-probs, its sleep, and its refusal of bad updates."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

from alignment.backends.golden_rollout import GoldenRollout, _truncate
from alignment.backends.rollout import RolloutEngine, SamplingParams
from alignment.backends.weight_sync import stream_weights
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.budget import Budget
from alignment.numerics.random import portable_integers, portable_key

CONFIG = preset("tiny-moonlight")
BATCH, PROMPT = 6, 7
PARAMS = SamplingParams(max_new_tokens=9, seed=11)


def prompts(batch: int = BATCH, seed: int = 3):
    ids = portable_integers(3, CONFIG.vocab_size, (batch, PROMPT), seed=seed, stream="prompts")
    lengths = portable_integers(1, PROMPT + 1, (batch, 1), seed=seed, stream="lengths")
    mask = (torch.arange(PROMPT) >= PROMPT - lengths).long()
    return ids * mask, mask, torch.tensor([portable_key("prompt", i) for i in range(batch)])


@pytest.fixture(scope="module")
def engine() -> GoldenRollout:
    return GoldenRollout(CONFIG, seed=5)


@pytest.fixture(scope="module")
def generated(engine):
    ids, mask, keys = prompts()
    return engine.generate(ids, mask, PARAMS, keys)


def rounding(model_dtype, reference: torch.Tensor) -> float:
    return Budget.from_roundoff(
        metric="log_prob",
        dtype=model_dtype,
        reduction_length=CONFIG.num_hidden_layers * CONFIG.intermediate_size,
        scale=float(reference.abs().max()),
    ).value


def test_it_is_a_rollout_engine(engine):
    assert isinstance(engine, RolloutEngine)


def test_shapes_dtypes_and_masks(generated):
    assert generated.responses.shape == generated.response_mask.shape == generated.log_probs.shape == (BATCH, 9)
    assert (generated.responses.dtype, generated.response_mask.dtype) == (torch.int64, torch.int64)
    assert generated.log_probs.dtype == torch.float32
    assert bool((generated.response_mask == 1).all())  # no end-of-sequence token was asked for
    assert bool((generated.log_probs <= 0).all())


def test_log_probs_are_those_a_trainer_computes(engine, generated):
    """log_softmax(logits / temperature) of the whole sequence in one forward, without cache and absorption."""
    trainer = CausalLM(CONFIG, dtype=torch.float64)
    trainer.load_state_dict({n: t.double() for n, t in engine.named_parameters()})
    for temperature in (1.0, 0.5):
        params = dataclasses.replace(PARAMS, temperature=temperature)
        ids, mask, keys = prompts()
        out = engine.generate(ids, mask, params, keys)
        whole = torch.cat([ids, out.responses], 1)
        with torch.no_grad():
            logits = trainer(whole, attention_mask=torch.cat([mask, out.response_mask], 1))[:, PROMPT - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(-1, out.responses[..., None])[..., 0]
        assert (out.log_probs - expected).abs().max() <= rounding(torch.float32, expected)


def test_a_token_depends_on_key_and_position_only(engine, generated):
    ids, mask, keys = prompts()
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    permuted = engine.generate(ids[order], mask[order], PARAMS, keys[order])
    assert torch.equal(permuted.responses, generated.responses[order])
    parts = [engine.generate(ids[i : i + 2], mask[i : i + 2], PARAMS, keys[i : i + 2]).responses for i in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), generated.responses)
    padded = [torch.cat([torch.zeros(BATCH, 3, dtype=torch.int64), part], 1) for part in (ids, mask)]
    assert torch.equal(engine.generate(*padded, PARAMS, keys).responses, generated.responses)
    shorter = engine.generate(ids, mask, dataclasses.replace(PARAMS, max_new_tokens=4), keys)
    assert torch.equal(shorter.responses, generated.responses[:, :4])


def test_generators_are_neither_read_nor_moved(engine, generated):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    ids, mask, keys = prompts()
    assert torch.equal(engine.generate(ids, mask, PARAMS, keys).responses, generated.responses)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("change", ["key", "seed"])
def test_another_key_or_seed_gives_another_response(engine, generated, change):
    ids, mask, keys = prompts()
    keys, params = (keys + 1, PARAMS) if change == "key" else (keys, dataclasses.replace(PARAMS, seed=12))
    assert bool((engine.generate(ids, mask, params, keys).responses != generated.responses).any(1).all())


def test_draws_follow_the_distribution(engine):
    """χ² of many first tokens of one prompt against their probabilities, at five standard deviations of χ²."""
    draws, bins = 4000, 8
    ids, mask, _ = prompts(batch=1)
    params = SamplingParams(max_new_tokens=1, seed=1)
    keys = torch.arange(draws)
    out = engine.generate(ids.expand(draws, -1), mask.expand(draws, -1), params, keys)
    with torch.no_grad():
        probabilities = engine._model(ids, attention_mask=mask)[0, -1].double().softmax(-1)
    binned = (probabilities.cumsum(-1) * bins).long().clamp_max(bins - 1)
    expected = torch.zeros(bins, dtype=torch.float64).index_add_(0, binned, probabilities) * draws
    found = torch.bincount(binned[out.responses[:, 0]], minlength=bins)
    degrees = bins - 1
    assert ((found - expected) ** 2 / expected).sum() < degrees + 5 * (2 * degrees) ** 0.5


def test_greedy_takes_the_most_likely_token(engine):
    ids, mask, keys = prompts()
    out = engine.generate(ids, mask, SamplingParams(temperature=0, max_new_tokens=3), keys)
    other = engine.generate(ids, mask, SamplingParams(temperature=0, max_new_tokens=3, seed=77), keys + 5)
    assert torch.equal(out.responses, other.responses)
    with torch.no_grad():
        first = engine._model(ids, attention_mask=mask)[:, -1].argmax(-1)
    assert torch.equal(out.responses[:, 0], first)


def test_a_response_ends_with_its_end_token_and_is_padded_behind(engine, generated):
    ends = int(generated.responses[2, 3])  # a token that is known to be drawn
    ids, mask, keys = prompts()
    params = dataclasses.replace(PARAMS, eos_token_id=(ends, CONFIG.vocab_size + 1), pad_token_id=7)
    out = engine.generate(ids, mask, params, keys)
    for row in range(BATCH):
        hits = (generated.responses[row] == ends).nonzero()
        length = int(hits[0]) + 1 if len(hits) else PARAMS.max_new_tokens
        assert out.response_mask[row].tolist() == [1] * length + [0] * (PARAMS.max_new_tokens - length)
        assert torch.equal(out.responses[row, :length], generated.responses[row, :length])
        assert bool((out.responses[row, length:] == 7).all())
        assert bool((out.log_probs[row, length:] == 0).all())
    assert int(out.response_mask[2].sum()) <= 4


def test_many_finished_rows_leave_the_cache_and_change_nothing(engine):
    """Ends everywhere: half of the vocabulary ends a response, so rows drop out at every step."""
    ids, mask, keys = prompts(batch=32)
    free = engine.generate(ids, mask, PARAMS, keys)
    ends = tuple(range(0, CONFIG.vocab_size, 3))
    out = engine.generate(ids, mask, dataclasses.replace(PARAMS, eos_token_id=ends), keys)
    is_end = (free.responses % 3 == 0).long()
    expected = ((is_end.cumsum(1) - is_end) == 0).long()
    assert torch.equal(out.response_mask, expected)
    assert torch.equal(out.responses * expected, free.responses * expected)
    gap = (out.log_probs - free.log_probs * expected).abs().max()
    assert gap <= rounding(torch.float32, free.log_probs)


def test_truncation_keeps_the_most_likely_and_renormalises():
    log_probs = torch.tensor([[0.1, 0.5, 0.25, 0.15]]).log()

    def kept(**params):
        return _truncate(log_probs, SamplingParams(**params)).exp()[0]

    assert kept().tolist() == log_probs.exp()[0].tolist()
    eps = torch.finfo(torch.float32).eps
    assert torch.allclose(kept(top_k=2), torch.tensor([0, 2 / 3, 1 / 3, 0]), atol=4 * eps, rtol=0)
    assert torch.allclose(kept(top_p=0.45), torch.tensor([0.0, 1, 0, 0]), atol=4 * eps, rtol=0)
    assert torch.allclose(kept(top_p=0.6), torch.tensor([0, 2 / 3, 1 / 3, 0]), atol=4 * eps, rtol=0)
    assert kept(top_k=1, top_p=1.0).tolist() == [0, 1, 0, 0]


def test_truncated_sampling_stays_inside_and_reports_the_distribution_drawn_from(engine):
    ids, mask, keys = prompts()
    one = engine.generate(ids, mask, dataclasses.replace(PARAMS, top_k=1), keys)
    greedy = engine.generate(ids, mask, dataclasses.replace(PARAMS, temperature=0), keys)
    assert torch.equal(one.responses, greedy.responses)
    assert bool((one.log_probs == 0).all())


def test_probe_gives_both_paths_and_leaves_padding_zero(engine, generated):
    ids, mask, _ = prompts()
    whole = torch.cat([ids, generated.responses], 1)
    real = torch.cat([mask, generated.response_mask], 1)
    real[1, -4:] = 0
    probe = engine.probe(whole, real, PARAMS.max_new_tokens)
    expected = generated.log_probs * real[:, PROMPT:]
    assert (probe.prefill - expected).abs().max() <= rounding(torch.float32, expected)
    assert (probe.decode - expected).abs().max() <= rounding(torch.float32, expected)
    assert bool((probe.prefill[1, -4:] == 0).all()) and bool((probe.decode[1, -4:] == 0).all())


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_every_byte_and_waking_keeps_or_destroys(level, alias):
    engine = GoldenRollout(CONFIG, seed=5, alias=alias)
    ids, mask, keys = prompts()
    before = engine.generate(ids, mask, PARAMS, keys)
    state = {n: t.clone() for n, t in engine.named_parameters()}
    held = engine.weight_bytes()
    assert held == sum(t.numel() * t.element_size() for t in state.values())
    engine.sleep(level)
    assert engine.weight_bytes() == 0
    for use in (
        lambda: engine.generate(ids, mask, PARAMS, keys),
        lambda: engine.probe(ids, mask, 2),
        lambda: engine.update_weights(iter(())),
        lambda: engine.named_parameters(),
        lambda: engine.derived_tensors(),
        lambda: engine.sleep(1),
    ):
        with pytest.raises(InputError, match=rf"the engine is asleep \(level {level}\). Next: call wake\(\) first"):
            use()
    engine.wake()
    assert engine.weight_bytes() == held
    if level == 2:
        assert all(bool(t.isnan().all()) for _, t in engine.named_parameters())
        with pytest.raises(InputError, match=r"generate: \d+ weights have no valid value.*complete weight update"):
            engine.generate(ids, mask, PARAMS, keys)
        engine.update_weights(state.items())
    after = engine.generate(ids, mask, PARAMS, keys)
    assert torch.equal(after.responses, before.responses)
    assert torch.equal(after.log_probs, before.log_probs)


def test_waking_an_engine_that_is_awake_and_unknown_levels_are_refused():
    engine = GoldenRollout(CONFIG)
    with pytest.raises(InputError, match="wake: the engine is awake"):
        engine.wake()
    with pytest.raises(InputError, match="unknown sleep level; expected 1 or 2; found 3"):
        engine.sleep(3)


def trained(seed=8) -> CausalLM:
    return CausalLM(CONFIG).init_weights(seed)


def test_updates_are_in_place_and_hold_one_streamed_tensor_at_a_time():
    engine = GoldenRollout(CONFIG, seed=5)
    addresses = {n: t.data_ptr() for n, t in engine.named_parameters()}
    sent = trained().state_dict()
    alive: list[weakref.ref] = []

    def stream():
        for name, tensor in sent.items():
            assert sum(ref() is not None for ref in alive) <= 1
            copy = tensor.clone()
            alive.append(weakref.ref(copy))
            yield name, copy

    engine.update_weights(stream())
    assert {n: t.data_ptr() for n, t in engine.named_parameters()} == addresses
    assert all(torch.equal(t, sent[n]) for n, t in engine.named_parameters())


def without(name):
    return [(n, t) for n, t in trained().state_dict().items() if n != name]


NORM, KV = "model.norm.weight", "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (lambda: without(NORM), "update_weights: the update lacks 1 of .* tensors; expected model.norm.weight"),
        (
            lambda: [*trained().state_dict().items(), ("model.norm.wieght", torch.zeros(1))],
            "update_weights: model.norm.wieght: the engine has no such tensor. Next: did you mean 'model.norm.weight'",
        ),
        (lambda: [(NORM, torch.zeros(3))], r"model.norm.weight: another shape; expected \[96\]; found \[3\]"),
        (
            lambda: [(NORM, torch.zeros(96, dtype=torch.bfloat16))],
            "model.norm.weight: another dtype; expected torch.float32; found torch.bfloat16.*cast on the sending side",
        ),
        (lambda: [(NORM, torch.zeros(96))] * 2, "model.norm.weight: the tensor was streamed twice"),
    ],
)
def test_a_bad_update_is_refused_by_name(stream, message):
    with pytest.raises(InputError, match=message):
        GoldenRollout(CONFIG).update_weights(stream())


def test_an_update_torn_half_way_leaves_an_engine_that_refuses_to_generate():
    engine = GoldenRollout(CONFIG, seed=5)
    ids, mask, keys = prompts()

    def torn():
        yield NORM, torch.ones(CONFIG.hidden_size)
        raise ConnectionError("the trainer went away")

    with pytest.raises(ConnectionError):
        engine.update_weights(torn())
    with pytest.raises(InputError, match="weights have no valid value since they were destroyed or half updated"):
        engine.generate(ids, mask, PARAMS, keys)
    engine.update_weights(trained().state_dict().items())
    engine.generate(ids, mask, PARAMS, keys)


def test_an_update_refused_before_its_first_tensor_changes_nothing(generated):
    engine = GoldenRollout(CONFIG, seed=5)
    with pytest.raises(InputError):
        engine.update_weights([("nonsense", torch.zeros(1))])
    ids, mask, keys = prompts()
    assert torch.equal(engine.generate(ids, mask, PARAMS, keys).responses, generated.responses)


def test_partial_updates_after_level_two_must_add_up():
    engine, sent = GoldenRollout(CONFIG, seed=5), trained().state_dict()
    ids, mask, keys = prompts()
    engine.sleep(2), engine.wake()
    names = list(sent)
    engine.update_weights(((n, sent[n]) for n in names[:-1]), partial=True)
    with pytest.raises(InputError, match=f"generate: 1 weights have no valid value.*found {names[-1]}"):
        engine.generate(ids, mask, PARAMS, keys)
    engine.update_weights([(names[-1], sent[names[-1]])], partial=True)
    engine.generate(ids, mask, PARAMS, keys)


def test_load_formats(tmp_path):
    from alignment.weights.checkpoint import save_checkpoint

    sent = trained()
    save_checkpoint(tmp_path / "checkpoint", CONFIG, sent.state_dict())
    loaded = GoldenRollout(load_format="safetensors", checkpoint=tmp_path / "checkpoint")
    auto = GoldenRollout(load_format="auto", checkpoint=tmp_path / "checkpoint")
    dummy = GoldenRollout(CONFIG, seed=8)
    for one in (loaded, auto, dummy):
        assert all(torch.equal(t, sent.state_dict()[n]) for n, t in one.named_parameters())
    assert loaded.config == CONFIG
    halves = GoldenRollout(load_format="safetensors", checkpoint=tmp_path / "checkpoint", dtype=torch.bfloat16)
    expected = dict(stream_weights(sent, dtype=torch.bfloat16))
    assert all(torch.equal(t, expected[n]) for n, t in halves.named_parameters())
    with pytest.raises(InputError, match="the checkpoint is of another model; expected .*vocab_size=511.*found .*=512"):
        other = dataclasses.replace(CONFIG, vocab_size=511)
        GoldenRollout(other, load_format="safetensors", checkpoint=tmp_path / "checkpoint")


def test_a_tied_head_is_streamed_once_and_sleeps_with_the_embedding():
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    engine, trainer = GoldenRollout(config, seed=5), CausalLM(config).init_weights(8)
    sent = dict(stream_weights(trainer))
    assert "lm_head.weight" not in sent and "lm_head.weight" not in dict(engine.named_parameters())
    engine.sleep(2), engine.wake()
    engine.update_weights(sent.items())
    model = engine._model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, trainer.lm_head.weight)
    ids, mask, keys = prompts()
    engine.generate(ids, mask, PARAMS, keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_format": "pt"}, "load_format: unknown load_format; expected dummy, safetensors, auto; found pt"),
        ({"load_format": "safetensors"}, "load_format=safetensors needs a checkpoint"),
    ],
)
def test_a_load_format_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        GoldenRollout(CONFIG, **arguments)


def test_an_engine_without_a_model_is_refused():
    with pytest.raises(InputError, match="the engine needs a model"):
        GoldenRollout()


def test_weights_that_make_nan_logits_are_one_clear_error():
    engine = GoldenRollout(CONFIG, seed=5)
    sent = trained().state_dict()
    sent[NORM] = torch.full_like(sent[NORM], float("nan"))
    engine.update_weights(sent.items())
    with pytest.raises(InputError, match="the engine's logits are not finite; found NaN or infinity"):
        ids, mask, keys = prompts()
        engine.generate(ids, mask, PARAMS, keys)


def test_right_padded_prompts_and_wrong_shapes_are_refused(engine):
    ids, mask, keys = prompts()
    with pytest.raises(InputError, match="prompts must be left padded"):
        engine.generate(ids, mask.flip(1), PARAMS, keys)
    with pytest.raises(InputError, match=r"do not belong together.*found \[6, 7\], \[6, 7\], \[5\]"):
        engine.generate(ids, mask, PARAMS, keys[:-1])
    with pytest.raises(InputError, match="expected 1 ≤ response_length < 7; found 7"):
        engine.probe(ids, mask, 7)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", 0), ("max_new_tokens", 0)]
)
def test_bad_sampling_parameters_are_named(name, value):
    with pytest.raises(InputError, match=f"{name}: invalid sampling parameter"):
        SamplingParams(**{name: value})


def test_a_bfloat16_rollout_takes_a_cast_stream():
    engine = GoldenRollout(CONFIG, dtype=torch.bfloat16, seed=5)
    engine.update_weights(stream_weights(trained(), dtype=torch.bfloat16))
    ids, mask, keys = prompts()
    assert engine.generate(ids, mask, PARAMS, keys).log_probs.dtype == torch.float32


@pytest.mark.npu
def test_generation_on_an_npu_gives_the_cpus_tokens(engine, generated):
    from alignment.devices.base import get_device

    npu = GoldenRollout(CONFIG, seed=5, device=get_device("npu"))
    ids, mask, keys = prompts()
    out = npu.generate(ids, mask, PARAMS, keys)
    assert out.responses.device.type == "npu"
    assert torch.equal(out.responses.cpu(), generated.responses)


@pytest.mark.npu
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_on_an_npu_gives_its_memory_back(level):
    from alignment.devices.base import get_device

    device = get_device("npu")
    engine = GoldenRollout(CONFIG, seed=5, device=device)
    before, held = device.memory_allocated(), engine.weight_bytes()
    engine.sleep(level)
    assert before - device.memory_allocated() >= held
    engine.wake()
    if level == 2:
        engine.update_weights(trained().state_dict().items())
    engine.generate(*[p for p in prompts()[:2]], PARAMS, prompts()[2])
