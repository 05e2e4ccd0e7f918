"""vLLM's decoder layers, dense and MoE, module by module, its log-probs and its tokens, against the golden model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from alignment.backends.golden_rollout import GoldenRollout
from alignment.backends.rollout import SamplingParams
from alignment.backends.sync_probe import token_gaps, trainer_log_probs
from alignment.numerics.metrics import decided_flips
from alignment.numerics.random import portable_integers
from alignment.numerics.verdict import Outcome

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))
import vllm_world  # noqa: E402
from vllm_world import live_defect, show, without  # noqa: E402

pytestmark = pytest.mark.engine

JUDGED, LENGTH = 100, 40


def tokens(world, seed: int) -> list[int]:
    return portable_integers(3, world.config.vocab_size, (LENGTH,), seed=seed, stream="vllm_layers").tolist()


@pytest.fixture(scope="module", params=["moonlight", "deepseek"])
def world(request, tmp_path_factory):
    return getattr(vllm_world, request.param)(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engine(world):
    with world.engine(load_format="safetensors") as engine:
        yield engine


@pytest.fixture(scope="module")
def budgets(world):
    from alignment.backends.vllm_layers import layer_budgets

    return layer_budgets(world.trainer, {seed: tokens(world, seed) for seed in vllm_world.NOISE})


def check(world, engine, budgets):
    from alignment.backends.vllm_layers import check_layers

    return {v.check: v for v in check_layers(engine, world.trainer, tokens(world, JUDGED), budgets, seed=JUDGED)}


def test_every_part_of_every_layer_agrees(world, engine, budgets):
    found = check(world, engine, budgets)
    assert {name.rsplit(".", 1)[0] for name in found} == {"layer.dense", "layer.moe", "layer"}
    assert {name: v.reason for name, v in found.items() if v.outcome is not Outcome.PASS} == {}


def test_another_weight_in_one_expert_is_blamed_on_its_layer(world, engine, budgets):
    name = "model.layers.1.mlp.shared_experts.down_proj.weight"
    sent = dict(world.stream())[name]
    engine.update_weights([(name, sent * 1.01)], partial=True)
    try:
        found = check(world, engine, budgets)
    finally:
        engine.update_weights([(name, sent)], partial=True)
    assert found["layer.dense.0"].outcome is Outcome.PASS
    assert (found["layer.moe.1"].where.module, found["layer.moe.1"].where.quantity) == ("model.layers.1", "mlp")
    assert found["layer.head"].where.detail.endswith("follows from model.layers.1.mlp")


def test_log_probs_agree_on_prefill_and_on_decode(world, engine):
    found = engine.probe(world.case.input_ids, world.case.attention_mask, world.case.response_length)
    expected = trainer_log_probs(world.trainer, world.case)
    real = world.case.response_mask
    for path in (found.prefill, found.decode):
        gaps = token_gaps(path, expected, world.case)[real]
        assert float(gaps.mean()) <= float(gaps.max()) <= world.budget.value


def test_greedy_tokens_are_equal_wherever_the_margin_exceeds_the_noise(world, engine):
    golden = GoldenRollout(load_format="safetensors", checkpoint=world.checkpoint)
    prompts = torch.tensor([tokens(world, seed)[:10] for seed in range(8)])
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12)
    mine, theirs = (e.generate(prompts, torch.ones_like(prompts), greedy, torch.arange(8)) for e in (golden, engine))
    with torch.no_grad():
        scores = torch.log_softmax(world.trainer(torch.cat([prompts, mine.responses], dim=1))[:, 9:-1], dim=-1)
    for row in range(8):
        same = (mine.responses[row] == theirs.responses[row]).long().cumprod(0)
        compared = min(int(same.sum()) + 1, 12)  # the first other token, and what came before it
        chosen = torch.full_like(scores[row, :compared], float("-inf")).scatter(
            1, theirs.responses[row, :compared, None], 0.0
        )
        flips = decided_flips(chosen, scores[row, :compared].double(), margin=2 * world.budget.value)
        assert flips.decided == 0, f"row {row}: {flips}"


def truncated(logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Log-probabilities [v] after temperature, top_k and top_p, one token at a time."""
    scaled = torch.log_softmax(logits.double() / temperature, dim=-1)
    order = scaled.argsort(descending=True)[:top_k]
    kept, mass = [], 0.0
    shares = torch.softmax(scaled[order], dim=-1)
    for token, share in zip(order.tolist(), shares.tolist()):
        if mass >= top_p:
            break
        kept.append(token)
        mass += share
    result = torch.full_like(scaled, float("-inf"))
    result[kept] = torch.log_softmax(scaled[kept], dim=-1)
    return result


SAMPLING = {"temperature": 0.4, "top_k": 24, "top_p": 0.9}
DRAWS = 2048
# Five standard deviations of a sum that is nearly normal: a wrong alarm in 3 million runs; seeds are fixed besides.
SIGMAS = 5


def follow(drawn: torch.Tensor, log_probs: torch.Tensor) -> bool:
    """Whether the counts of ``drawn`` are within :data:`SIGMAS` of the χ² that draws from ``log_probs`` have."""
    wanted = log_probs.exp() * len(drawn)
    counts = torch.bincount(drawn, minlength=len(wanted)).double()
    possible = wanted > 0
    if bool(counts[~possible].any()):
        return False
    freedom = int(possible.sum()) - 1
    chi_squared = float(((counts - wanted) ** 2 / wanted)[possible].sum())
    return chi_squared <= freedom + SIGMAS * (2 * freedom) ** 0.5


def test_draws_and_their_log_probs_are_those_of_the_asked_distribution(world, engine):
    prompt = torch.tensor([tokens(world, 7)[:12]])
    with torch.no_grad():
        expected = truncated(world.trainer(prompt)[0, -1], **SAMPLING)
    params = SamplingParams(max_new_tokens=1, seed=5, **SAMPLING)
    made = engine.generate(prompt.expand(DRAWS, -1), torch.ones(DRAWS, 12), params, torch.arange(DRAWS))
    drawn = made.responses[:, 0]
    assert bool(torch.isfinite(expected[drawn]).all()), "a token outside top_k and top_p was drawn"
    # A temperature below 1 stretches the error of logits.
    bound = 2 * world.budget.value / SAMPLING["temperature"]
    assert float((made.log_probs[:, 0].double() - expected[drawn]).abs().max()) <= bound
    assert follow(drawn, expected)
    other = truncated(world.trainer(prompt)[0, -1].detach(), **{**SAMPLING, "temperature": 1.0})
    assert not follow(drawn, other), "the draws are too few to tell temperatures apart"


@pytest.mark.parametrize("family", ["moonlight", "deepseek"])
def test_bfloat16_stays_within_its_measured_budget(family, tmp_path):
    """Judged by the median: rounding may send a token near a tie to other experts."""
    make = {
        "moonlight": lambda d: vllm_world.World(d, vllm_world.moonlight_config(), torch.bfloat16),
        "deepseek": lambda d: vllm_world.deepseek(d, torch.bfloat16),
    }[family]
    world = make(tmp_path)
    with world.engine(load_format="safetensors") as engine:
        verdicts = world.check(engine)
    assert vllm_world.reasons(verdicts) == {}
    assert world.budget.metric == "median |Δ log p|"


@live_defect("the rotary kernel takes the head stride of a 3-D tensor for its token stride")
def test_defect_plain_rope_is_blamed_on_the_attention_of_the_first_layer(tmp_path):
    from alignment.backends.vllm_layers import layer_budgets

    world = vllm_world.moonlight(tmp_path)
    budgets = layer_budgets(world.trainer, {seed: tokens(world, seed) for seed in vllm_world.NOISE})
    with world.engine(load_format="safetensors", way_rounds=without("rotary_embedding")) as engine:
        found = check(world, engine, budgets)
    first = found["layer.dense.0"]
    if first.outcome is Outcome.FAIL:
        assert (first.where.module, first.where.quantity) == ("model.layers.0", "self_attn")
    show(first.outcome is Outcome.FAIL)
