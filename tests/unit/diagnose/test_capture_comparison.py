"""Two captures: what is named first, what is no difference, and everything that must not pass in silence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from comparison_rows import LAYERS, TOKENS, WIDTH, MemoryCapture, Recorder, chain, renamed, row, statistics_of, weights

from alignment.capture.record import Shard
from alignment.diagnose.capture_comparison import compare_captures, learn_noise, load_noise, save_noise
from alignment.diagnose.difference import rounding
from alignment.diagnose.names import NameMap
from alignment.errors import InputError
from alignment.numerics.sketch import Place, sketch_array
from alignment.numerics.verdict import Outcome, exit_code

NOISE = rounding("float32")
"""Rounding of float32, as one kernel against another leaves it."""

DETAILS = ("statistics", "sketch", "tensor")


def compare(golden, target, **options):
    golden, target = (side if isinstance(side, MemoryCapture) else MemoryCapture(side) for side in (golden, target))
    return compare_captures(golden, target, **options)


def faulty(layer: int, change):
    return lambda at, y: change(y) if at == layer else y


@pytest.mark.parametrize("detail", DETAILS)
def test_equal_captures_are_aligned(detail):
    found = compare(chain(detail=detail), chain(detail=detail))
    assert found.first is None
    assert exit_code(found.verdicts()) == 0


@pytest.mark.parametrize("detail", DETAILS)
def test_rounding_noise_that_grows_is_no_divergence(detail):
    found = compare(chain(detail=detail), chain(detail=detail, noise=NOISE))
    assert found.stages[0].localisation.findings == []


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_scaled_output_is_introduced_where_it_is_scaled_and_inherited_behind(detail, layer):
    found = compare(chain(detail=detail), chain(detail=detail, noise=NOISE, fault=faulty(layer, lambda y: 1.01 * y)))
    first = found.stages[0].first
    assert (first.module, first.direction, first.status) == (f"model.layers.{layer}.linear", "forward", "introduced")
    assert {f.module for f in found.stages[0].localisation.introduced} == {f"model.layers.{layer}.linear"}
    assert exit_code(found.verdicts()) == 1


@pytest.mark.parametrize("detail", ("sketch", "tensor"))
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda y: y[::-1], id="tokens reversed"),
        pytest.param(lambda y: np.roll(y, WIDTH // 2, axis=1), id="halves swapped"),
        pytest.param(lambda y: np.where(np.arange(TOKENS)[:, None] == 7, -y, y), id="sign of one token"),
    ],
)
def test_what_keeps_every_statistic_is_still_seen(detail, change):
    found = compare(chain(detail=detail), chain(detail=detail, fault=faulty(2, change)))
    assert found.stages[0].first.module == "model.layers.2.linear"


def test_statistics_alone_cannot_see_a_permutation_and_the_result_says_what_was_compared():
    found = compare(chain(detail="statistics"), chain(detail="statistics", fault=faulty(3, lambda y: y[::-1])))
    assert found.stages[0].details == ("statistics",)
    assert found.first is None


@pytest.mark.parametrize("detail", DETAILS)
def test_a_stale_weight_is_named_as_a_parameter_however_small(detail):
    stale = weights()
    stale[1] = stale[1] * (1 + 1e-4)
    found = compare(chain(detail=detail), chain(detail=detail, noise=NOISE, matrices=stale))
    first = found.stages[0].first
    assert (first.module, first.quantity) == ("model.layers.1.linear", "parameter weight")
    assert "copied, not computed" in first.origin


@pytest.mark.parametrize("detail", DETAILS)
def test_nan_is_pinned_to_the_module_that_makes_it(detail):
    def poison(y):
        y = y.copy()
        y[3, 5] = np.nan
        return y

    found = compare(chain(detail=detail), chain(detail=detail, fault=faulty(1, poison)))
    assert found.stages[0].first.module == "model.layers.1.linear"
    assert "1 NaN" in found.stages[0].first.reason


def test_a_gradient_fault_with_an_equal_forward_pass_is_its_own_class():
    def rows(scale):
        out = chain()
        generator = np.random.Generator(np.random.Philox(5))
        for order, layer in enumerate(reversed(range(LAYERS)), 100):
            name = f"model.layers.{layer}.linear"
            gradient = generator.standard_normal((TOKENS, WIDTH))
            common = {"direction": "backward", "order": order}
            out.append(row(name, gradient, role="input", path="output", **common))
            out.append(row(name, gradient * (scale if layer == 1 else 1.0), path="args.0", **common))
        return out

    found = compare(rows(1.0), rows(2.0))
    located = found.stages[0].localisation
    assert located.first("forward") is None
    assert located.first("backward").module == "model.layers.1.linear"
    assert "first introduced gradient divergence" in found.stages[0].reason()


def test_a_wrong_first_gradient_behind_an_equal_forward_pass_is_the_loss():
    def rows(scale):
        gradient = scale * np.random.Generator(np.random.Philox(6)).standard_normal((TOKENS, WIDTH))
        last = f"model.layers.{LAYERS - 1}.linear"
        return [*chain(), row(last, gradient, role="input", path="output", direction="backward", order=100)]

    assert compare(rows(1.0), rows(1.1)).stages[0].first.module == "loss"
    assert compare(rows(1.0), rows(1.0)).first is None


def test_code_between_children_belongs_to_the_parent():
    def rows(turn):
        recorder = Recorder()
        x = np.random.Generator(np.random.Philox(7)).standard_normal((TOKENS, WIDTH))
        q = x * 2.0
        recorder.call("block.attn.q_proj", x, q)
        mixed = q[::-1] if turn else q + 0.5
        out = np.tanh(mixed)
        recorder.call("block.attn.o_proj", mixed, out)
        recorder.call("block.attn", x, out, class_name="Attention")
        recorder.call("block", x, x + out, class_name="Block")
        return recorder.rows

    first = compare(rows(False), rows(True)).stages[0].first
    assert (first.module, first.at, first.quantity) == ("block.attn", "block.attn.o_proj", "in args.0")


def test_calibration_sees_a_bias_that_no_default_sees(tmp_path):
    size = rounding("bfloat16")

    def side(**options):
        return [replace(r, dtype="bfloat16") if r.kind == "module" else r for r in chain(**options)]

    noise = None
    for seed in range(10, 26):
        pair = (MemoryCapture(side(seed=seed)), MemoryCapture(side(seed=seed, noise=size, noise_seed=seed)))
        noise = learn_noise(*pair, into=noise)
    save_noise(noise, tmp_path / "noise.json")
    noise = load_noise([tmp_path / "noise.json"])
    target = side(noise=size, fault=faulty(1, lambda y: y + size / 4))
    assert compare(side(), target).first is None
    first = compare(side(), target, noise=noise).stages[0].first
    assert (first.module, first.reason) == ("model.layers.1.linear", "bias")
    benign = compare(side(seed=3), side(seed=3, noise=size, noise_seed=77), noise=noise)
    assert benign.first is None


def test_a_file_that_is_no_calibration_is_refused(tmp_path):
    path = tmp_path / "noise.json"
    path.write_text("[]")
    with pytest.raises(InputError, match="no calibration"):
        load_noise([path])


# --- what must not pass in silence -----------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", DETAILS)
def test_random_against_golden_fails(detail):
    golden = chain(detail=detail)
    generator = np.random.Generator(np.random.Philox(9))
    target = [
        row(
            r.module,
            generator.standard_normal(r.shape),
            role=r.role,
            path=r.path,
            kind=r.kind,
            order=r.order,
            detail=detail,
        )
        for r in golden
    ]
    found = compare(golden, target)
    assert found.stages[0].first is not None
    assert exit_code(found.verdicts()) == 1


def test_no_common_names_is_an_error_that_shows_how_to_pair_them():
    with pytest.raises(InputError, match=r"no module in common.*--map"):
        compare(chain(), chain(name="blocks.{}.projection"))
    found = compare(
        chain(), chain(name="blocks.{}.projection"), names=NameMap.parse(["model.layers.*.linear=blocks.*.projection"])
    )
    assert found.first is None


@pytest.mark.parametrize("side", ("golden", "target"))
def test_a_module_that_one_side_lacks_fails_and_is_named(side):
    whole, less = chain(), [r for r in chain() if not r.module.startswith("model.layers.2.")]
    found = compare(whole, less) if side == "golden" else compare(less, whole)
    assert f"module model.layers.2.linear only in {side}" in "; ".join(found.stages[0].failures)
    assert exit_code(found.verdicts()) == 1
    accepted = compare(whole, less, allow_missing=["model.layers.2.*"])
    assert not accepted.stages[0].failures


@pytest.mark.parametrize("extra", ("golden", "target"))
@pytest.mark.parametrize("place", (0, 1))
def test_one_extra_call_is_named_and_the_others_are_paired_by_what_went_in(extra, place):
    generator = np.random.Generator(np.random.Philox(11))
    inputs = [generator.standard_normal((TOKENS, WIDTH)) for _ in range(3)]

    def side(which):
        recorder = Recorder()
        for call, i in enumerate(which):
            recorder.call("layer", inputs[i], np.tanh(inputs[i]), call=call)
        return recorder.rows

    more, less = side([0, 1, 2]), side([i for i in range(3) if i != place])
    found = compare(more, less) if extra == "golden" else compare(less, more)
    assert found.stages[0].localisation.findings == []
    [gap] = found.stages[0].unpaired
    assert (gap.what, gap.side, gap.name) == ("call", extra, f"layer #{place}")


def test_another_shape_fails():
    target = chain(fault=faulty(LAYERS - 1, lambda y: y[:, : WIDTH // 2]))
    found = compare(chain(), target)
    assert found.stages[0].first.module == f"model.layers.{LAYERS - 1}.linear"
    assert "shape" in found.stages[0].first.reason


def test_a_missing_tensor_file_is_an_error_with_its_place():
    def lost():
        raise InputError("the file is missing", where="dump_tensor_data/x.pt")

    golden = chain(detail="tensor")
    target = [replace(r, load_tensor=lost) if r.module == "model.layers.1.linear" else r for r in golden]
    with pytest.raises(InputError, match=r"dump_tensor_data/x\.pt"):
        compare(golden, target)


def test_nan_only_in_the_tensor_fails():
    golden = chain(detail="tensor")
    bad = golden[-1].tensor().copy()
    bad[0, 0] = np.nan
    found = compare(golden, [*golden[:-1], replace(golden[-1], load_tensor=lambda: bad)])
    assert "NaN" in found.stages[0].first.reason


def test_several_steps_and_a_step_that_one_side_lacks():
    rows = chain()
    both = MemoryCapture({step: {"train": {0: rows}} for step in (0, 1)})
    wrong = {0: {"train": {0: rows}}, 1: {"train": {0: chain(fault=faulty(0, lambda y: 2 * y))}}}
    found = compare(both, MemoryCapture(wrong))
    assert [stage.aligned for stage in found.stages] == [True, False]
    assert (found.first.step, found.first.first.module) == (1, "model.layers.0.linear")
    less = compare(both, MemoryCapture({0: {"train": {0: rows}}}))
    assert less.missing == ["step 1 only in golden"]
    assert exit_code(less.verdicts()) == 1
    with pytest.raises(InputError, match="no step in common"):
        compare(both, MemoryCapture({7: {"train": {0: rows}}}))


def test_no_detail_in_common_is_a_failure():
    golden = [replace(r, statistics=None, load_sketch=None) for r in chain(detail="tensor")]
    target = [replace(r, statistics=None) for r in chain(detail="sketch")]
    found = compare(golden, target)
    assert "share no detail" in found.stages[0].first.reason


# --- other layouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("wrong", (False, True))
def test_other_rank_counts_are_compared_by_their_shards(detail, wrong):
    golden = chain(detail=detail)
    ranks = {}
    for rank in range(2):
        rows = []
        for r, whole in zip(golden, chain(detail="tensor"), strict=True):
            if r.role == "output" and r.kind == "module":
                start = rank * WIDTH // 2
                part = whole.tensor()[:, start : start + WIDTH // 2]
                part = part[:, ::-1] if wrong and rank and "layers.2" in r.module else part
                shard = Shard(dim=1, start=start, length=WIDTH // 2, whole=WIDTH)
                sketch = sketch_array(part, place=Place.of(part.shape, dim=1, start=start, whole=WIDTH))
                cut = replace(r, shape=part.shape, shard=shard, statistics=statistics_of(part))
                cut = replace(cut, load_sketch=(lambda s=sketch: s) if detail != "statistics" else None)
                rows.append(replace(cut, load_tensor=(lambda p=part: p) if detail == "tensor" else None))
            else:
                rows.append(r)
        ranks[rank] = rows
    found = compare(golden, MemoryCapture({0: {"train": ranks}}))
    if wrong and detail != "statistics":
        assert found.stages[0].first.module == "model.layers.2.linear"
    else:
        assert found.first is None
    with pytest.raises(InputError, match="do not hold the whole tensor"):
        compare(golden, MemoryCapture({0: {"train": {1: ranks[1], 2: ranks[1]}}}))


@pytest.mark.parametrize("wrong", (False, True))
def test_as_many_ranks_that_cut_otherwise_are_compared_as_wholes(wrong):
    """Two data parallel ranks with half of the samples each, two tensor parallel ones with half of the features."""
    from alignment.capture.reduction import Reducer
    from alignment.capture.samples import Samples

    x = np.random.Generator(np.random.Philox(1)).standard_normal((4, 6, WIDTH)).astype(np.float32)
    keys = tuple(f"{i:016x}" for i in (7 << 60, 5 << 50, 3 << 55, 9 << 52))

    def side(kind):
        ranks = {}
        for rank in range(2):
            half = slice(2 * rank, 2 * rank + 2)
            if kind == "samples":
                part, held, shard = x[half], keys[half], None
            else:
                start = rank * WIDTH // 2
                part, held = x[..., start : start + WIDTH // 2], keys
                part = part[..., ::-1].copy() if wrong and rank else part
                shard = Shard(dim=2, start=start, length=WIDTH // 2, whole=WIDTH)
            reducer = Reducer(sketch_size=64)
            reducer.samples = Samples(keys=held, bounds=((0, 6),) * len(held), shape=(len(held), 6))
            reducer.add(torch.from_numpy(np.ascontiguousarray(part)), shard=shard)
            sketch = reducer.results()[2]()[0]
            made = row("layer", part, shard=shard, keys=held, by_key=True, bounds=reducer.samples.bounds, tokens=6)
            ranks[rank] = [replace(made, load_sketch=lambda s=sketch: s)]
        return MemoryCapture({0: {"train": ranks}})

    stage = compare(side("samples"), side("features")).stages[0]
    assert stage.rank is None and stage.aligned is not wrong


@pytest.mark.parametrize("detail", ("statistics", "tensor"))
def test_micro_batches_are_joined(detail):
    assert compare(chain(detail=detail), chain(detail=detail, calls=3)).first is None
    target = chain(detail=detail, calls=3, fault=faulty(2, lambda y: 1.1 * y))
    assert compare(chain(detail=detail), target).stages[0].first.module == "model.layers.2.linear"


@pytest.mark.parametrize("wrong", (False, True))
def test_samples_in_another_order_are_paired_by_their_hashes(wrong):
    generator = np.random.Generator(np.random.Philox(13))
    x = generator.standard_normal((6, 5, WIDTH))
    order = generator.permutation(6)

    def side(x, keys, bend):
        def one(value, **more):
            sketches = np.stack([sketch_array(sample) for sample in value])
            made = row("layer", value, keys=tuple(keys), **more)
            return replace(made, load_sketch=lambda: sketches)

        y = np.tanh(x)
        if bend:
            y[0] = -y[0]
        return [one(x, role="input", path="args.0", order=1), one(y, order=1)]

    keys = [f"sample{i}" for i in range(6)]
    found = compare(side(x, keys, False), side(x[order], [keys[i] for i in order], wrong))
    assert (found.first is not None) is wrong
    lost = compare(side(x, keys, False), side(x[:4], keys[:4], False))
    assert "2 of 6 samples missing" in lost.stages[0].first.reason


def test_other_storage_dtypes_allow_their_rounding_and_no_more():
    golden = chain()

    def stored(rows, factor=1.0):
        out = []
        for r in rows:
            if r.kind == "parameter":
                x = weights()[int(r.module.split(".")[2])] * factor
                x = x.astype(np.float32).view(np.uint32) + 0x8000 & 0xFFFF0000
                r = row(r.module, x.view(np.float32), role="input", path="weight", kind="parameter", dtype="bfloat16")
            out.append(r)
        return out

    assert compare(golden, stored(golden)).first is None
    assert compare(golden, stored(golden, 1.01)).stages[0].first.quantity == "parameter weight"


def test_another_implementation_is_paired_by_its_names():
    golden = chain(name="model.layers.{}.self_attn.o_proj")
    target = renamed(
        golden,
        lambda n: n.replace("model.layers", "decoder.layers").replace("self_attn.o_proj", "self_attention.linear_proj"),
    )
    assert compare(golden, target).first is None


def test_the_verdict_carries_place_measure_and_next_command():
    found = compare(chain(), chain(fault=faulty(1, lambda y: 1.5 * y)))
    [verdict] = found.verdicts(device="npu")
    assert verdict.outcome is Outcome.FAIL
    assert str(verdict.where).startswith("train · model.layers.1.linear · out output")
    assert verdict.worst.used > 1.0
    assert "capture.detail=tensor" in verdict.next_command


def test_fields_of_the_pipeline_are_compared_by_name():
    def side(log_prob, ids):
        common = {"kind": "value", "parent": "", "class_name": "", "detail": "tensor"}
        fields = [row("old_log_probs", log_prob, order=90, path="value", **common)]
        return [*chain(), *fields, row("responses", ids, order=91, path="value", dtype="int64", **common)]

    log_prob = np.linspace(-3.0, -0.1, 64)
    ids = np.arange(64)
    assert compare(side(log_prob, ids), side(log_prob * (1 + NOISE), ids)).first is None
    wrong = compare(side(log_prob, ids), side(log_prob / 0.7, ids)).stages[0].first
    assert (wrong.module, wrong.quantity) == ("old_log_probs", "value old_log_probs")
    wrong = compare(side(log_prob, ids), side(log_prob, ids + (ids == 5))).stages[0].first
    assert (wrong.module, wrong.reason) == ("responses", "choices")
