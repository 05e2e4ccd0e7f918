"""The same samples in another padding, order or micro batch are equal; a fault in one token is found all the same."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
import torch
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.own_format import OwnCapture
from alignment.capture.session import capture
from alignment.diagnose.capture_comparison import compare_captures
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.verdict import Outcome, exit_code
from alignment.report.comparison_view import comparison_lines

SAMPLES = ([3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [15, 16, 17, 18], [19, 20, 21])
LENGTH = max(map(len, SAMPLES))


def padded(samples, *, left=0, right=0):
    """Ids and mask, the longest sample with ``left`` and ``right`` padding; what stands there is arbitrary."""
    width = max(map(len, samples))
    ids = torch.full((len(samples), left + width + right), 2)
    mask = torch.zeros_like(ids)
    for i, sample in enumerate(samples):
        begin = left + (width - len(sample) if left else 0)
        ids[i, begin : begin + len(sample)] = torch.tensor(sample)
        mask[i, begin : begin + len(sample)] = 1
    return ids, mask


def golden_model(seed=0):
    config = dataclasses.replace(preset("tiny-moonlight"), num_hidden_layers=2)  # the second one has experts
    model = CausalLM(config, dtype=torch.float32, device="cpu")
    model.init_weights(seed)
    return model


def recorded(directory, batches, *, change=lambda model: None, config=CaptureConfig(), told=True):
    """A capture of forward and backward passes over micro batches, gradients summed over them."""
    model = golden_model()
    change(model)
    with capture(model, config, directory=directory) as session:
        with session.step(0):
            for ids, mask in batches:
                logits = model(ids, attention_mask=mask) if told else model(ids)
                # squares do not cancel, so sums over tokens keep their digits in any order
                (logits.square().mean(-1) * mask).sum().backward()
    assert session.failure is None
    return OwnCapture(directory)


def compared(tmp_path, golden, target, **options):
    first = recorded(tmp_path / "golden", golden, config=options.get("config", CaptureConfig()))
    return compare_captures(first, recorded(tmp_path / "target", target, **options)).stages[0]


def problems(stage):
    found = stage.localisation.findings
    return [f"{f.at} {f.quantity}: {f.reason}, {f.value:.2g} over {f.limit:.2g}" for f in found] + stage.failures


SAME = SAMPLES[:2]
"""Samples of one length, which have no padding of their own."""
WAYS = {
    "left 0 against left 8": ([padded(SAME)], [padded(SAME, left=8)]),
    "left against right": ([padded(SAMPLES, left=3)], [padded(SAMPLES, right=2)]),
    "another order": ([padded(SAMPLES)], [padded(SAMPLES[::-1], left=1)]),
    "micro batches": ([padded(SAMPLES, left=2)], [padded(SAMPLES[:3], left=1), padded(SAMPLES[3:])]),
    "one by one": ([padded(SAMPLES[:2]), padded(SAMPLES[2:])], [padded([sample]) for sample in SAMPLES[::-1]]),
    "as many, other ones": ([padded(SAMPLES[:2]), padded(SAMPLES[2:])], [padded(SAMPLES[::2]), padded(SAMPLES[1::2])]),
    "equal samples apart": ([padded(SAME[:1] * 2)], [padded(SAME[:1]), padded(SAME[:1], left=4)]),
}


CASES = [
    *itertools.product(WAYS, ["sketch"]),
    *itertools.product(["left 0 against left 8", "another order", "micro batches"], ["statistics", "tensor"]),
]


@pytest.mark.parametrize(("way", "detail"), CASES)
def test_equal_samples_are_equal_in_any_padding_order_and_micro_batch(tmp_path, way, detail):
    # statistics bound a difference from below, the one of a source as well: sums over tokens would exceed it
    config = CaptureConfig(detail=detail, parameter_gradients=detail != "statistics")
    stage = compared(tmp_path, *WAYS[way], config=config)
    assert problems(stage) == [] and stage.outcome is Outcome.PASS
    assert stage.pairs > 60
    # only rows of single experts, which may hold padding, are left out, and that is said
    assert all(".experts." in gap.name for gap in stage.skipped) and stage.left_out in stage.reason()


def scaled_last_token(model):
    """The second sample's last real token comes out of one projection 3 % larger."""

    def hook(module, args, output):
        ids = model.seen
        at = (ids == SAMPLES[1][-1]).nonzero()
        for i, j in at.tolist():
            output[i, j] *= 1.03
        return output

    model.register_forward_pre_hook(lambda m, args: setattr(m, "seen", args[0]))
    model.get_submodule("model.layers.1.self_attn.o_proj").register_forward_hook(hook)


@pytest.mark.parametrize(
    ("way", "detail"), [case for case in CASES if case[0] != "equal samples apart" and case[1] != "statistics"]
)
def test_a_fault_in_one_token_is_found_in_any_padding_order_and_micro_batch(tmp_path, way, detail):
    stage = compared(tmp_path, *WAYS[way], config=CaptureConfig(detail=detail), change=scaled_last_token)
    assert stage.first.module == "model.layers.1.self_attn.o_proj", problems(stage)[:3]


def stale_gradient(model):
    model.get_submodule("model.layers.1.self_attn.q_proj").weight.register_hook(lambda g: g * 1.5)


def test_a_wrong_gradient_is_found_over_other_micro_batches(tmp_path):
    golden, target = WAYS["micro batches"]
    stage = compared(tmp_path, golden, target, change=stale_gradient)
    assert (stage.first.module, stage.first.quantity) == ("model.layers.1.self_attn.q_proj", "gradient of weight")


def test_a_lost_sample_is_said(tmp_path):
    stage = compared(tmp_path, [padded(SAMPLES)], [padded(SAMPLES[:3])])
    assert "1 of 4 samples missing, 0 others instead" in stage.reason()


def test_without_keys_the_message_says_what_to_pass(tmp_path):
    stage = compared(tmp_path, [padded(SAME)], [padded(SAME, left=8)], config=CaptureConfig(real_tokens=False))
    assert "shape [2, 14" in stage.reason() and "golden has [2, 6" in stage.reason()
    assert (
        "if that is padding or another micro batch, capture golden and the target with its tokens known: call the model"
        " with input_ids and attention_mask, or give session.step the attention_mask" in stage.reason()
    )


class Bag(nn.Module):
    """A model that is told no mask."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 8)

    def forward(self, ids):
        return self.head(self.embed(ids))


@pytest.mark.parametrize("given", [True, False])
def test_a_mask_that_the_model_is_not_told_can_be_given_to_the_capture(tmp_path, given):
    found = []
    for name, left in (("golden", 0), ("target", 8)):
        ids, mask = padded(SAME, left=left)
        with capture(Bag(), CaptureConfig(), directory=tmp_path / name) as session, torch.no_grad():
            with session.step(0, attention_mask=mask if given else None):
                session._model(ids)
        found.append(OwnCapture(tmp_path / name))
    stage = compare_captures(*found).stages[0]
    assert stage.aligned is given
    assert given or "2 of 2 samples missing, 2 others instead" in stage.reason()


class Packed(nn.Module):
    """Removes the padding before it computes, as engines do; ``filler`` rows of what stands in the padding follow."""

    def __init__(self, *, scale=1.0, filler=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.linear, self.norm, self.head = (
            nn.Embedding(32, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        )  # fmt: skip
        self.scale, self.filler = scale, filler

    def forward(self, input_ids, attention_mask):
        real = attention_mask.bool()
        rows = self.embed(input_ids[real])
        if self.filler:
            left = int(real.sum())
            what = rows.new_full((4 * LENGTH - left, rows.shape[1]), float(input_ids.shape[1]))
            rows = torch.cat([rows, what])
        return self.head(self.norm(rows + self.scale * self.linear(rows)))


def packed(tmp_path, *, scale, filler=False, left=3):
    found = []
    for name, given, padding in (("golden", 1.0, 0), ("target", scale, left)):
        ids, mask = padded(SAME, left=padding)
        model = Packed(scale=given, filler=filler)
        with capture(model, CaptureConfig(settings=False), directory=tmp_path / name) as session, torch.no_grad():
            with session.step(0):
                model(input_ids=ids, attention_mask=mask)
        assert session.failure is None
        found.append(OwnCapture(tmp_path / name))
    return compare_captures(*found)


def test_where_padding_is_removed_the_rows_are_compared_whatever_the_padding_was(tmp_path):
    right = packed(tmp_path / "right", scale=1.0).stages[0]
    assert right.aligned and right.skipped == [] and problems(right) == []
    wrong = packed(tmp_path / "wrong", scale=1.5).stages[0]
    assert wrong.outcome is Outcome.FAIL and wrong.first.at == "norm" and wrong.skipped == []


def test_what_is_left_out_for_its_padding_is_counted_and_a_disagreement_in_it_is_no_pass(tmp_path):
    comparison = packed(tmp_path, scale=1.5, filler=True)
    stage = comparison.stages[0]
    assert not stage.aligned and stage.failures == []
    verdict = stage.verdict("target", "cpu", "golden")
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.next_command.startswith("capture both with the same padding")
    said = r"not compared: (\d+) tensors of .*, because padding differs \(statistics of \1 disagree\)"
    told = re.search(said, verdict.reason)
    assert int(told[1]) == len(stage.skipped) > 0
    assert str(stage.skipped[0]).endswith("not compared (padding among its [24, 8] and [24, 8])")
    lines = list(comparison_lines(comparison))
    assert stage.left_out in "\n".join(lines) and "INCONCLUSIVE" in lines[4]
    assert lines[-1] == "INCONCLUSIVE: 1 of 1 stages hold tensors that were not compared and disagree"
    assert exit_code(comparison.verdicts()) == 1
    # the same numbers, equally padded, are compared
    assert packed(tmp_path / "equal", scale=1.5, filler=True, left=0).stages[0].outcome is Outcome.FAIL


# --- what is recorded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("each", [True, False])
def test_sketches_and_statistics_are_of_the_real_tokens(tmp_path, monkeypatch, fast, each):
    if not fast:
        monkeypatch.setattr("alignment.capture.reduction.kernel", lambda: None)
    rows = []
    for i, batches in enumerate(([padded(SAMPLES)], [padded(SAMPLES[2:], left=5), padded(SAMPLES[:2], right=3)])):
        reader = recorded(tmp_path / str(i), batches, config=CaptureConfig(samples=each))
        rows.append([r for r in reader.rows(0, "train", 0) if (r.module, r.role) == ("model.norm", "output")])
    eps = np.finfo(np.float32).eps
    (whole,), parts = ([r for r in side if r.direction == "forward"] for side in rows)
    total = sum(len(sample) for sample in SAMPLES) * whole.shape[-1]
    assert whole.statistics.count == total == sum(part.statistics.count for part in parts)
    assert whole.by_key and whole.sketch().ndim == 1 + each
    flat = [np.atleast_2d(row.sketch()).sum(0) for row in (whole, *parts)]
    # two kernels of matrix products of other sizes round on their own: √n units of float32 of the size of the tensor
    assert np.linalg.norm(flat[0] - flat[1] - flat[2]) <= np.sqrt(whole.shape[-1]) * eps * whole.statistics.l2
    assert np.linalg.norm(flat[0]) > whole.statistics.l2 / 2


def test_the_sketch_of_samples_estimates_the_norm_of_their_difference():
    from alignment.capture.reduction import Reducer
    from alignment.capture.samples import Samples, sample_keys
    from alignment.numerics.random import portable_normal
    from alignment.numerics.sketch import SKETCH_SIZE

    ratios = []
    for draw in range(200):
        ids = torch.arange(12).reshape(3, 4) + 100 * draw
        reducer = Reducer(sketch_size=SKETCH_SIZE)
        reducer.samples = Samples(keys=sample_keys(ids), bounds=((0, 4), (1, 4), (0, 3)), shape=(3, 4))
        x = portable_normal((3, 4, 300), seed=draw, stream="x", dtype=torch.float32)
        reducer.add(x)
        _, statistics, sketches = reducer.results()
        real = torch.cat([x[0].flatten(), x[1, 1:].flatten(), x[2, :3].flatten()])
        assert np.isclose(statistics()[0, 3], float(real.double().norm()), rtol=np.finfo(np.float32).eps * 64)
        ratios.append(np.linalg.norm(sketches()[0]) / float(real.norm()))
    within = np.abs(np.array(ratios) - 1)
    assert (within < 0.05).mean() >= 0.95 and within.max() < 0.1


# Along samples there are no shards: those are data parallel ranks, which have keys of their own.
@pytest.mark.parametrize(("tokens_first", "dim"), [(False, 1), (False, 2), (True, 0), (True, 2)])
def test_shards_of_samples_add_up_to_the_whole(tokens_first, dim):
    from alignment.capture.record import Shard
    from alignment.capture.reduction import Reducer
    from alignment.capture.samples import Samples
    from alignment.numerics.random import portable_normal
    from alignment.numerics.sketch import Place

    x = portable_normal((8, 3, 6) if tokens_first else (3, 8, 6), seed=1, stream="x", dtype=torch.float32)
    keys = tuple(f"{i:016x}" for i in (0x123456789ABCDEF0, 0x23456789ABCDEF01, 0x3456789ABCDEF012))
    samples = Samples(keys=keys, bounds=((0, 8), (5, 8), (1, 3)), shape=(3, 8))

    def sketch(t, shard=None):
        reducer = Reducer(sketch_size=64)
        reducer.samples = samples
        place = Place.of(tuple(t.shape), dim=shard.dim, start=shard.start, whole=shard.whole) if shard else None
        reducer.add(t, shard=shard, place=place)
        _, statistics, sketches = reducer.results()
        return sketches()[0], statistics()[0]

    whole, exact = sketch(x)
    n = x.shape[dim] // 2
    shards = [Shard(dim=dim, start=start, length=n, whole=2 * n) for start in (0, n)]
    halves = [sketch(part.contiguous(), shard) for part, shard in zip(x.split(n, dim), shards)]
    eps = np.finfo(np.float32).eps
    assert np.linalg.norm(whole - halves[0][0] - halves[1][0]) <= 32 * eps * exact[3]
    assert halves[0][1][6] + halves[1][1][6] == exact[6] == (8 + 3 + 2) * 6
    for a, b in itertools.combinations([whole, halves[0][0], halves[1][0]], 2):
        assert np.linalg.norm(a - b) > 32 * eps * exact[3]
