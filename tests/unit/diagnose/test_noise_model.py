"""The error model of a comparison: quantiles, levels that add up to the stated rate, and what each term is for."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from alignment.capture.record import CHAIN
from alignment.diagnose import noise as model_of_noise
from alignment.diagnose.capture_comparison import load_noise
from alignment.diagnose.difference import Difference, rounding, signed_resolution
from alignment.diagnose.localise import Localisation, localise
from alignment.diagnose.module_graph import Edge, Pair
from alignment.diagnose.noise import DISPERSION, FALSE_ALARM, FAMILIES, FEWEST, NoiseModel, student
from alignment.errors import InputError

SIGMA = 0.05
"""Spread of a signed part per ε/√tokens in the edges made here."""
WIDTH = 64
KEY = ("own", "Linear", "proj", "output", "bfloat16")


def generator(*seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(list(seed)[0] * 1000 + sum(seed[1:])))


def edge(position: int, difference: Difference, *, tokens: int, error: float, key=KEY, discrete=False, width=WIDTH):
    pair = Pair(
        f"layers.{position}", "Linear", "module", "forward", 0, "output", "output", position,
        "int64" if discrete else "bfloat16", (tokens, width), difference, discrete,
    )  # fmt: skip
    return Edge(key[0], pair.owner, key, pair, error, False, False, False, False, position, None, None, tokens)


def noisy(random: np.random.Generator, position: int, tokens: int, *, bias: float = 0.0) -> Edge:
    """An edge as noise of rounding leaves it, with signed parts that fall with the root of the tokens."""
    error = rounding("bfloat16")
    relative = math.sqrt(2.0) * error * math.exp(0.1 * random.standard_normal())
    spread = SIGMA * relative / math.sqrt(tokens)
    signed = spread * random.standard_normal(2) + (0.0, bias * relative)
    return edge(position, Difference(relative, *signed, detail="tensor"), tokens=tokens, error=error)


class Edges:
    """A graph of edges whose sources agree."""

    def __init__(self, edges: list[Edge]) -> None:
        self.edges, self.nodes = edges, {}

    def walk(self, judge) -> None:
        for one in self.edges:
            judge(one)


def calibrated(tokens: int = 128, pairs: int = 20, layers: int = 4) -> NoiseModel:
    noise = NoiseModel()
    for pair in range(pairs):
        noise.begin_pair()
        random = generator(1, pair)
        for layer in range(layers):
            noise.learn(noisy(random, layer, tokens))
    return noise


def findings(noise: NoiseModel, edges: list[Edge]) -> Localisation:
    return localise(Edges(edges), noise)


@pytest.fixture(scope="module")
def stats():
    """SciPy's distributions, which take a second to import: too long for collecting the tests."""
    from scipy import stats

    return stats


# --- quantiles ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", (3, 5, 8, 12, 20, 60))
@pytest.mark.parametrize("level", (1e-3, 1e-5, 1e-7))
def test_the_quantile_of_student_is_never_below_the_true_one(stats, freedom, level):
    true = stats.t.isf(level, freedom)
    # the last digit of either
    assert student(level, freedom) >= true * (1 - 1e-3)
    if freedom >= 12:
        assert student(level, freedom) <= true * 1.01, "the docstring says within 1 %"
    assert student(level, freedom) > stats.norm.isf(level)


@pytest.mark.parametrize("mean", (1e-4, 0.3, 3.0, 60.0))
@pytest.mark.parametrize("shape", (math.inf, 2.0, 30.0))
@pytest.mark.parametrize("level", (1e-3, 1e-6))
def test_a_larger_count_is_less_probable_than_the_level(stats, mean, shape, level):
    law = stats.poisson(mean) if shape == math.inf else stats.nbinom(shape, shape / (shape + mean))
    most = model_of_noise._most(shape, mean, level)
    assert law.sf(most) < level, "one count more has to be less probable"
    assert law.sf(most - 2) >= level or most <= 1, "and the limit is not a loose one"


# --- levels ---------------------------------------------------------------------------------------------------------


def test_the_levels_of_all_tests_add_up_to_the_stated_rate_and_no_more():
    noise = NoiseModel()
    families = {
        "sizes": {("own", "a"): 4, ("glue", "b"): 4, ("parameter gradient", "c"): 32},
        "choices": {("own", "gate"): 3},
        "loss": {("loss", "bfloat16"): 1},
    }
    noise.expect_edges(families)
    spent = {
        family: sum(noise.level(key) * count for key, count in edges.items()) for family, edges in families.items()
    }
    assert spent == {family: pytest.approx(FALSE_ALARM / len(FAMILIES)) for family in families}
    # signed parts have the keys of the sizes, and sums over layers a family of their own
    assert spent["sizes"] * 3 + spent["choices"] + spent["loss"] == pytest.approx(FALSE_ALARM)


def test_equal_computations_alarm_as_often_as_stated_and_not_more(stats, monkeypatch):
    """At a rate that can be seen: one comparison in five."""
    monkeypatch.setattr(model_of_noise, "FALSE_ALARM", 0.2)
    noise = calibrated(pairs=60)
    runs = 300
    alarms = sum(
        bool(findings(noise, [noisy(random, layer, 128) for layer in range(4)]).findings)
        for random in (generator(2, run) for run in range(runs))
    )
    assert 0 < alarms <= stats.binom.isf(1e-3, runs, 0.2)


# --- what each term is for ------------------------------------------------------------------------------------------


def test_few_tokens_scatter_more_and_are_no_alarm_where_many_tokens_would_be_one():
    noise = calibrated(tokens=128)
    size = rounding("bfloat16") * math.sqrt(2.0)
    bias = 3.0 * SIGMA * size / math.sqrt(4)
    few = edge(0, Difference(size, 0.0, bias, detail="tensor"), tokens=4, error=rounding("bfloat16"))
    many = edge(0, Difference(size, 0.0, bias, detail="tensor"), tokens=128, error=rounding("bfloat16"))
    assert findings(noise, [few]).findings == []
    # three deviations of that many tokens, and seventeen of those
    [found] = findings(noise, [many]).findings
    assert (found.reason, found.origin) == ("bias", "calibration, 80 samples")


def test_a_bias_that_no_layer_shows_is_seen_over_all_layers_and_named_at_the_first():
    noise = calibrated()
    deviation = SIGMA / math.sqrt(128)
    faulty = [noisy(generator(3, layer), layer, 128, bias=3.5 * deviation) for layer in range(4)]
    assert all(findings(noise, [one]).findings == [] for one in faulty)
    [found] = findings(noise, faulty).findings
    assert (found.module, found.reason) == ("layers.0", "bias")
    assert found.origin == "4 calls together, in standard deviations"


def test_sums_of_a_capture_lose_what_the_resolution_says():
    random, count, draws = generator(4), 1 << 14, 200
    lanes = random.standard_normal((draws, count // CHAIN, CHAIN)).astype(np.float32)

    def off(length: int) -> float:
        chains = lanes.reshape(draws, -1, length)
        sums = np.add.accumulate(chains, axis=2, dtype=np.float32)[:, :, -1].astype(np.float64).sum(1)
        error = (sums - lanes.astype(np.float64).sum((1, 2))) / count
        return float(np.sqrt(np.mean(error**2)))

    # one side of the two; a root mean square over the draws scatters by 1/√(2 draws)
    _, predicted = signed_resolution(math.sqrt(count), 0.0, count)
    predicted /= math.sqrt(2.0)
    scatter = 4 / math.sqrt(2 * draws)
    assert off(CHAIN) == pytest.approx(predicted, rel=scatter)
    assert off(4 * CHAIN) > predicted * (1 + scatter), "longer chains lose more than the captures' own do"


def test_what_sums_lose_is_no_evidence_over_layers():
    """A pair that differs in threads alone: tiny ε, so that the rounding of sums is what signed parts consist of."""
    random, count, size = generator(5), 128 * WIDTH, 3e-7
    _, resolution = signed_resolution(math.sqrt(count), 0.0, count)

    def small(position: int, identity) -> Edge:
        bias = 2.0 * resolution
        one = edge(position, Difference(size, 0.0, bias, detail="sketch"), tokens=128, error=size)
        one.result.identity = identity
        one.result.dtype = "float32"
        return one

    noise = NoiseModel()
    for pair in range(20):
        noise.begin_pair()
        for layer in range(4):
            relative = 1e-5 * math.exp(0.1 * random.standard_normal())
            signed = 1e-3 * relative / math.sqrt(128) * random.standard_normal(2)
            one = edge(layer, Difference(relative, *signed, detail="sketch"), tokens=128, error=relative)
            one.result.identity = (math.sqrt(count), 0.0, 1.0, -1.0, count)
            noise.learn(one)
    known = (math.sqrt(count), 0.0, 1.0, -1.0, count)
    assert findings(noise, [small(layer, known) for layer in range(4)]).findings == []
    # without that term the same four edges are a divergence
    assert findings(noise, [small(layer, None) for layer in range(4)]).findings != []


def test_a_result_may_be_as_far_off_as_in_any_benign_pair_however_well_its_sources_agree():
    noise = calibrated()
    usual = rounding("bfloat16") * math.sqrt(2.0)
    exact = edge(0, Difference(usual, detail="tensor"), tokens=128, error=0.0)
    assert findings(noise, [exact]).findings == []
    worse = edge(0, Difference(4 * usual, detail="tensor"), tokens=128, error=0.0)
    [found] = findings(noise, [worse]).findings
    assert found.reason == "relative difference"


# --- choices --------------------------------------------------------------------------------------------------------

GATE, MIXED = ("own", "Router", "gate", "output.0", "int64"), ("glue", "Experts", "mlp", "Linear", "output", "bfloat16")


def gate(moved: float, *, error: float = 0.02, tokens: int = 128) -> Edge:
    rows = 2 * tokens
    difference = Difference(math.sqrt(2.0 * moved / rows), detail="sketch")
    return edge(0, difference, tokens=tokens, error=error, key=GATE, discrete=True, width=2)


def mixed(rows: float, index: Edge, *, tokens: int = 128) -> Edge:
    one = edge(1, Difference(math.sqrt(rows / tokens), detail="sketch"), tokens=tokens, error=0.5, key=MIXED)
    one.moved, one.index = True, index
    return one


def routing(pairs: int = 20) -> NoiseModel:
    """Near ties that move two tokens on average; a sketch counts each by how far apart the two experts' numbers are."""
    noise = NoiseModel()
    for pair in range(pairs):
        noise.begin_pair()
        random = generator(6, pair)
        for _ in range(3):
            flips = int(random.poisson(2.0))
            index = gate(float((random.integers(1, 8, flips) ** 2).sum()) / 12.0 * 2.0)
            noise.learn(index)
            noise.learn(mixed(flips * random.uniform(0.8, 1.2), index))
    return noise


def test_moved_choices_scatter_more_than_independent_ones(stats):
    noise = routing()
    moved = [n for n, _ in noise.moves[GATE]]
    assert np.var(moved) > 2 * np.mean(moved)
    most = noise.moves_expected(GATE, 0.02 * 256, FALSE_ALARM)
    assert most > stats.poisson.isf(FALSE_ALARM, np.mean(moved)), "the law of independent ones is too narrow"
    assert max(moved) < most


def test_rows_that_an_index_moved_name_the_index():
    noise = routing()
    wrong = gate(20.0)
    assert findings(noise, [wrong]).findings == [], "the index alone could be near ties"
    [found] = findings(noise, [wrong, mixed(24.0, wrong)]).findings
    assert (found.module, found.reason) == ("layers.0", "choices")
    assert found.origin == "rows of layers.1 that are others"
    right = gate(5.0)
    assert findings(noise, [right, mixed(3.0, right)]).findings == []
    # rows that differ although the index did not move more than usual are not the index's
    named = {found.module for found in findings(noise, [right, mixed(24.0, right)]).findings}
    assert "layers.0" not in named


def test_without_calibration_choices_have_the_dispersion_of_near_ties(stats):
    noise = NoiseModel()
    most = noise.moves_expected(GATE, 1.0, FALSE_ALARM)
    assert most > DISPERSION * stats.poisson.isf(FALSE_ALARM, 4.0 / DISPERSION)


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_calibration_keeps_what_it_learned():
    noise = calibrated(pairs=3)
    again = NoiseModel.from_dict(json.loads(json.dumps(noise.to_dict())))
    assert again.samples[KEY].rows == noise.samples[KEY].rows
    assert len(again.samples[KEY].rows) >= FEWEST
    assert NoiseModel.from_dict(routing().to_dict()).moves == routing().moves


def test_a_calibration_of_an_older_format_is_refused_with_both_names(tmp_path):
    path = tmp_path / "noise.json"
    path.write_text(json.dumps({"format": "alignment-noise-1", "edges": [], "choices": []}))
    with pytest.raises(InputError, match="format 'alignment-noise-1', expected 'alignment-noise-2'"):
        load_noise([path])
