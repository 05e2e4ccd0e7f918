"""Capturing a model: what is recorded is what was computed, and what is computed does not change."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from capture_model import Norm, batch, make_model, train
from torch import nn
from torch.nn.utils import parametrize

from alignment.capture import hooks, own_format
from alignment.capture.config import CaptureConfig
from alignment.capture.kernel import kernel as module_kernel
from alignment.capture.own_format import OwnCapture
from alignment.capture.reduction import Reducer
from alignment.capture.session import Capture, capture
from alignment.capture.writer import BackgroundWriter
from alignment.errors import InputError
from alignment.numerics.sketch import FOLD, SKETCH_SIZE, sketch_array

STAGE = "train"
SUMMED = FOLD + SKETCH_SIZE.bit_length()
"""Roundings that follow one another in a sketch."""


def captured(tmp_path, config, *, model=None, steps=1):
    model = model or make_model()
    with capture(model, config, directory=tmp_path / "c") as session:
        seen = train(model, steps, session.step)
    assert session.failure is None
    return OwnCapture(tmp_path / "c"), seen


def rows_of(reader, step=0, **wanted):
    rows = (r for r in reader.rows(step, STAGE, 0) if r.kind != "setting")
    return [r for r in rows if all(getattr(r, k) == v for k, v in wanted.items())]


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize("detail", ["statistics", "sketch", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_the_same_to_the_last_bit(tmp_path, level, detail, dtype):
    plain = train(make_model(dtype))
    _, seen = captured(tmp_path, CaptureConfig(level=level, detail=detail), model=make_model(dtype), steps=3)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


@pytest.mark.parametrize("fast", ["on", "off"])
@pytest.mark.parametrize("level", ["L0", "mix"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_autocast_is_captured_and_not_changed(tmp_path, monkeypatch, fast, level, dtype):
    if fast == "off":
        monkeypatch.setattr("alignment.capture.reduction.kernel", lambda: None)

    def trained(around=None):
        model = make_model()
        with torch.autocast("cpu", dtype=dtype):
            return train(model, 2, around(model) if around else None)

    plain = trained()
    with contextlib.ExitStack() as stack:

        def around(model):
            config = CaptureConfig(detail="tensor", level=level, real_tokens=False)
            session = stack.enter_context(capture(model, config, directory=tmp_path))
            stack.callback(lambda: failures.append(session.failure))
            return session.step

        failures = []
        seen = trained(around)
    assert failures == [None]
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    rows = [row for row in rows_of(OwnCapture(tmp_path)) if row.has_sketch]
    assert {"forward", "backward"} <= {row.direction for row in rows if row.kind == "module"}
    assert str(dtype).removeprefix("torch.") in {row.dtype for row in rows}
    for row in rows:
        t = row.tensor().astype(np.float32)
        close = SUMMED * EPS * float(np.linalg.norm(t))
        assert np.linalg.norm(row.sketch() - sketch_array(t)) <= close, row


def test_wrapping_inputs_as_full_backward_hooks_do_would_change_the_gradients():
    plain, model = train(make_model()), make_model()
    for module in model.modules():
        module.register_full_backward_hook(lambda *_: None)
    assert not all(torch.equal(a, b) for a, b in zip(plain, train(model), strict=True))


def test_every_module_has_its_inputs_outputs_and_gradients(tmp_path):
    model = make_model()
    reader, _ = captured(tmp_path, CaptureConfig(), model=model)
    called = {name for name, m in model.named_modules() if not isinstance(m, nn.ModuleList)}
    for direction, role, missing in (
        ("forward", "input", set()),
        ("forward", "output", set()),
        ("backward", "input", set()),
        # Token ids have no gradient.
        ("backward", "output", {"", "embed"}),
    ):
        found = {r.module for r in rows_of(reader, kind="module", direction=direction, role=role)}
        assert found == called - missing
    names = {n for n, _ in model.named_parameters()}
    assert {r.module for r in rows_of(reader, kind="parameter")} == names
    assert {r.module for r in rows_of(reader, kind="parameter_gradient")} == names
    assert [r.call for r in rows_of(reader, module="twice", direction="forward", role="output")] == [0, 1]
    by_name = {r.module: r for r in rows_of(reader, kind="module")}
    assert by_name["layers.0.norm"].parent == "layers.0" and by_name["layers.0"].parent == ""
    assert by_name["layers.0"].class_name == "Block"
    orders = [r.order for r in rows_of(reader)]
    assert orders == sorted(orders) == list(range(len(orders)))
    assert [r.path for r in rows_of(reader, module="", direction="forward", role="output")] == ["output.logits"]


def test_statistics_sketches_and_tensors_are_of_what_flowed(tmp_path):
    model = make_model()
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, a, o, name=name: seen.setdefault(name, []).append(o))
    reader, _ = captured(tmp_path, CaptureConfig(detail="tensor", real_tokens=False), model=model)
    for row in rows_of(reader, kind="module", direction="forward", role="output"):
        t = seen[row.module][row.call]
        t = (t["logits"] if isinstance(t, dict) else t).detach().numpy()
        assert np.array_equal(row.tensor(), t)
        assert np.allclose(row.sketch(), sketch_array(t), rtol=0, atol=8 * np.finfo(np.float32).eps * np.linalg.norm(t))
        assert (row.statistics.max, row.statistics.min) == (t.max(), t.min())
        assert row.statistics.count == t.size and row.shape == t.shape and row.dtype == "float32"
        assert math.isclose(row.statistics.l2, np.linalg.norm(t.astype(np.float64)), rel_tol=t.size * EPS)


EPS = float(np.finfo(np.float32).eps)


def test_the_gradient_of_an_input_is_this_modules_share_alone(tmp_path):
    model = make_model()
    reader, _ = captured(tmp_path, CaptureConfig(detail="tensor"), model=model)
    ids, mask = batch(0)
    for module_name in ("layers.0.left", "layers.0.right", "layers.1.norm", "layers.1", "twice"):
        fresh = make_model()
        module = fresh.get_submodule(module_name)
        call = 0
        [x] = [r.tensor() for r in rows_of(reader, module=module_name, direction="forward", role="input", call=call)]
        [g] = [r.tensor() for r in rows_of(reader, module=module_name, direction="backward", role="input", call=call)]
        [got] = [r for r in rows_of(reader, module=module_name, direction="backward", role="output", call=call)]
        x = torch.from_numpy(np.array(x)).requires_grad_()
        [share] = torch.autograd.grad(module(x), x, torch.from_numpy(np.array(g)))
        assert got.path == "args.0"
        scale = float(share.abs().max())
        assert np.abs(got.tensor() - share.numpy()).max() <= 16 * EPS * scale
    # Both projections read the norm's output: its gradient is the sum of their shares, and neither share alone.
    left, right = (
        rows_of(reader, module=f"layers.0.{n}", direction="backward", role="output")[0].tensor()
        for n in ("left", "right")
    )
    [whole] = [r.tensor() for r in rows_of(reader, module="layers.0.norm", direction="backward", role="input")]
    assert np.array_equal(left + right, whole) and not np.array_equal(left, whole)


class Often(nn.Module):
    """Uses its input six times; the gradients of transposed uses lie transposed in memory."""

    def __init__(self, transposed):
        super().__init__()
        self.transposed = transposed

    def forward(self, x):
        return sum((x.t() if self.transposed else x) * (k + 1.0) for k in range(6))


@pytest.mark.parametrize(
    "case, most",
    [("fast", 3), ("no kernel", 1), ("float64", 1), ("transposed", 1), ("tensors", 1), ("samples", 1)],
)
def test_shares_of_a_gradient_are_held_only_where_that_saves_making_the_sum(tmp_path, monkeypatch, case, most):
    if case == "no kernel":
        monkeypatch.setattr("alignment.capture.reduction.kernel", lambda: None)
    elif module_kernel() is None:
        pytest.skip("there is no compiler, or the fast path is off")
    held, add = [], hooks._Contribution.add

    def counted(self, gradient):
        add(self, gradient)
        held.append(len(self._summands))

    monkeypatch.setattr(hooks._Contribution, "add", counted)
    model = Often(case == "transposed")
    config = CaptureConfig(detail="tensor" if case == "tensors" else "sketch", samples=case == "samples")
    x = torch.randn(5, 5, dtype=torch.float64 if case == "float64" else torch.float32, requires_grad=True)
    with capture(model, config, directory=tmp_path) as session, session.step(0):
        model(x).sum().backward()
    assert session.failure is None
    assert len(held) == 6 and max(held) == most
    [row] = rows_of(OwnCapture(tmp_path), direction="backward", role="output", path="args.0")
    assert row.statistics.max == row.statistics.min == row.statistics.mean == sum(range(1, 7))
    assert torch.equal(x.grad, torch.full_like(x, sum(range(1, 7))))


def test_an_accelerator_is_given_the_sum_at_once():
    given = [torch.empty(3, device="meta")] * 2
    assert not Reducer(sketch_size=64).reads_summands(given)
    assert Reducer(sketch_size=64).reads_summands([torch.empty(3)] * 2) == (module_kernel() is not None)


def test_operators_carry_their_module_their_numbers_and_their_direction(tmp_path):
    reader, _ = captured(tmp_path, CaptureConfig(level="mix"))
    rows = rows_of(reader, kind="operator")
    assert {r.parent for r in rows if r.module == "aten.rsqrt.default"} == {"layers.0.norm", "layers.1.norm"}
    epsilon = [r for r in rows if r.module == "aten.add.Tensor" and r.dtype == "float"]
    assert {r.statistics.max for r in epsilon} == {1e-6} and {r.parent for r in epsilon} <= {
        "layers.0.norm",
        "layers.1.norm",
    }
    backward = [r for r in rows if r.direction == "backward" and r.module == "aten.mm.default"]
    assert {"layers.0.left", "layers.1.right", "twice", "head"} <= {r.parent for r in backward}
    assert {r.kind for r in captured(tmp_path / "l1", CaptureConfig(level="L1"))[0].rows(0, STAGE, 0)} == {
        "operator",
        "parameter",
        "parameter_gradient",
    }


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, weight):
        return weight * self.by


def test_a_weight_that_is_replaced_where_it_is_read_is_recorded_as_it_was_read(tmp_path):
    def adapted():
        model = make_model()
        parametrize.register_parametrization(model.twice, "weight", Halved())
        nn.utils.parametrizations.spectral_norm(model.head)
        return model

    def names(reader, kind):
        return {r.module for r in rows_of(reader) if r.kind == kind}

    model = adapted()
    reader, seen = captured(tmp_path, CaptureConfig(detail="tensor"), model=model)
    read = {r.module: r.tensor() for r in rows_of(reader, kind="parameter")}
    with torch.no_grad():
        expected = make_model().twice.weight * 0.5
    assert np.array_equal(read["twice.weight"], expected.numpy())
    assert np.linalg.norm(read["head.weight"], 2) < np.linalg.norm(make_model().head.weight.detach().numpy(), 2)
    plain, _ = captured(tmp_path / "plain", CaptureConfig(detail="tensor"))
    assert names(reader, "module") == names(plain, "module") and names(reader, "parameter") == names(plain, "parameter")
    assert {r.class_name for r in rows_of(reader, kind="module", module="twice")} == {"Linear"}
    replacing = {"twice.parametrizations.weight.original", "twice.parametrizations.weight.0.by"}
    replacing.add("head.parametrizations.weight.original")
    assert names(reader, "parameter_gradient") - names(plain, "parameter_gradient") == replacing
    # a spectral norm takes a step at every read
    alone = adapted()
    assert all(torch.equal(a, b) for a, b in zip(train(alone, 1), seen, strict=True))
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in alone.state_dict().items())


def test_activation_checkpointing_records_a_call_once(tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), Norm(8)

        def forward(self, x):
            return checkpoint(lambda t: self.norm(self.first(t)), x, use_reentrant=False)

    torch.manual_seed(0)
    model = Recomputed()
    with capture(model, CaptureConfig(), directory=tmp_path / "c") as session, session.step(0):
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    reader = OwnCapture(tmp_path / "c")
    for module in ("first", "norm"):
        for direction in ("forward", "backward"):
            assert [r.call for r in rows_of(reader, module=module, direction=direction, role="input")] == [0]


# --- reading once ----------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Writes into its input."""

    def forward(self, x):
        return x.add_(1)


def test_a_tensor_that_was_written_into_is_another_tensor(tmp_path):
    model = nn.Sequential(InPlace(), InPlace())
    with capture(model, CaptureConfig(detail="tensor"), directory=tmp_path / "c") as session, session.step(0):
        with torch.no_grad():
            model(torch.zeros(4))
    flowed = [(r.module, r.role, r.statistics.max, r.tensor().max()) for r in rows_of(OwnCapture(tmp_path / "c"))]
    assert flowed == [
        ("0", "input", 0, 0),
        ("0", "output", 1, 1),
        ("1", "input", 1, 1),
        ("1", "output", 2, 2),
        ("", "input", 0, 0),
        ("", "output", 2, 2),
    ]


class Reusing(nn.Module):
    """Gives memory back and gets it again for other values."""

    def forward(self, x):
        return x * 2


def test_memory_that_was_given_back_and_taken_again_is_another_tensor(tmp_path):
    model = Reusing()
    with capture(model, CaptureConfig(), directory=tmp_path / "c") as session, session.step(0), torch.no_grad():
        for i in range(50):
            model(torch.full((1000,), float(i)))
    outputs = [r.statistics.max for r in rows_of(OwnCapture(tmp_path / "c"), role="output")]
    assert outputs == [2.0 * i for i in range(50)]


class Regathering(nn.Module):
    """Holds a tensor whose memory another one has by now, as FSDP2 does with what it gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()

    def forward(self, x):
        memory = np.ones(8, np.float32)
        gathered = self.first(torch.from_numpy(memory))
        memory[:] = 2
        self.second(torch.from_numpy(memory))
        return x + gathered.sum()


def test_memory_that_a_living_tensor_gave_back_is_another_tensor(tmp_path):
    model = Regathering()
    with capture(model, CaptureConfig(backward=False), directory=tmp_path / "c") as session, session.step(0):
        model(torch.zeros(1))
    flowed = {r.module: r.statistics.max for r in rows_of(OwnCapture(tmp_path / "c"), role="output")}
    assert (flowed["first"], flowed["second"]) == (1, 2)


def test_a_tensor_that_passes_through_several_modules_is_reduced_once(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())
    with capture(model, CaptureConfig(), directory=tmp_path / "c") as session, session.step(0):
        model(torch.randn(10))
    reader = OwnCapture(tmp_path / "c")
    document = own_format.read_json(tmp_path / "c" / "step0" / STAGE / "rank0.json")
    assert len(rows_of(reader)) == 8 and set(document["columns"]["statistics"]) == {0}


# --- numbers ---------------------------------------------------------------------------------------------------------


def reduced(t, tmp_path):
    model = nn.Identity()
    with capture(model, CaptureConfig(), directory=tmp_path / "c") as session, session.step(0):
        model(t)
    return rows_of(OwnCapture(tmp_path / "c"), role="input")[0]


def test_nan_and_infinity_are_counted_and_the_rest_is_reduced(tmp_path):
    x = torch.tensor([1.0, float("nan"), -3.0, float("inf"), -float("inf"), float("nan")])
    s = reduced(x, tmp_path).statistics
    assert (s.nan_count, s.inf_count, s.count) == (2, 2, 6)
    assert (s.max, s.min, s.mean, s.l2) == (1.0, -3.0, -1.0, math.sqrt(10))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_without_a_finite_element_has_zeros(tmp_path, value):
    s = reduced(torch.full((5,), value), tmp_path).statistics
    assert (s.max, s.min, s.mean, s.l2, s.nan_count + s.inf_count) == (0, 0, 0, 0, 5)


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, 1e-30, 1e25])
def test_numbers_whose_squares_leave_the_range_are_reduced_right(tmp_path, fill):
    s = reduced(torch.full((1000,), fill), tmp_path).statistics
    exact = abs(np.float64(np.float32(fill))) * math.sqrt(1000)
    assert math.isclose(s.l2, exact, rel_tol=1000 * np.finfo(np.float64).eps)


def test_bfloat16_is_summed_in_float32(tmp_path):
    torch.manual_seed(0)
    x = torch.rand(300_000).bfloat16()
    s = reduced(x, tmp_path).statistics
    exact = x.double()
    bound = math.log2(len(x)) * EPS
    assert abs(s.mean / float(exact.mean()) - 1) <= bound and abs(s.l2 / float(exact.norm()) - 1) <= bound
    # Statistics that are themselves rounded to bfloat16 would not pass.
    assert abs(float(x.norm()) / float(exact.norm()) - 1) > bound


@pytest.mark.parametrize(
    "t",
    [
        torch.zeros(0, 3),
        torch.tensor(2.5),
        torch.arange(12).reshape(3, 4),
        torch.tensor([True, False]),
        torch.randn(4, 5).t(),
        torch.randn(6).expand(4, 6),
        torch.randn(3, dtype=torch.float64),
        torch.randn(4, dtype=torch.complex64),
        torch.randn(5).to(torch.float8_e4m3fn),
    ],
    ids=["empty", "scalar", "int64", "bool", "transposed", "expanded", "float64", "complex", "float8"],
)
def test_any_kind_of_tensor_has_its_statistics(tmp_path, t):
    s = reduced(t, tmp_path).statistics
    flat = (torch.view_as_real(t) if t.is_complex() else t).double().reshape(-1)
    assert s.count == flat.numel()
    if s.count:
        assert (s.max, s.min) == (float(flat.max()), float(flat.min()))
        assert math.isclose(s.l2, float(flat.norm()), rel_tol=16 * EPS)


# --- selection -------------------------------------------------------------------------------------------------------


def test_steps_are_selected_with_both_ends(tmp_path):
    reader, _ = captured(tmp_path, CaptureConfig(step_start=1, step_end=2), steps=4)
    assert reader.steps() == [1, 2]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("layers.*.norm",), {"layers.0.norm", "layers.1.norm"}),
        (("re:layers\\.1\\.(left|right)", "head"), {"layers.1.left", "layers.1.right", "head"}),
    ],
)
def test_modules_are_selected_by_pattern(tmp_path, patterns, names):
    reader, _ = captured(tmp_path, CaptureConfig(modules=patterns))
    assert {r.module for r in rows_of(reader, kind="module")} == names
    assert {r.parent for r in rows_of(reader, kind="parameter")} == names


def test_ranks_and_stages_are_selected(tmp_path):
    config = CaptureConfig(ranks=(1,), stages=("b",))
    for rank in (0, 1):
        session = Capture(config, directory=tmp_path, rank=rank)
        for stage in ("a", "b"):
            with session.stage(0, stage, nn.Identity()) as record:
                assert (record is not None) == (rank == 1 and stage == "b")
        session.close()


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"step_start": 9}, "nothing was captured: nothing in this run fits capture.step_start=9: the run went through "
         "steps 0 … 1"),
        ({"ranks": (7,)}, "nothing was captured: nothing in this run fits capture.ranks=[7]"),
        ({"stages": ("rollout", "values")}, "nothing was captured: nothing in this run fits "
         "capture.stages=[rollout,values]"),
        ({"modules": ("nomatch.*", "re:no")}, "no module was captured: none has a name that fits "
         "capture.modules=[nomatch.*,re:no]"),
        ({"step_start": 1}, None),
        ({"ranks": (0, 7)}, None),
        ({"stages": ("train",)}, None),
        ({"modules": ("head",)}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_a_selection_that_leaves_everything_out_is_said(tmp_path, capsys, fields, said):
    captured_model = make_model()
    with capture(captured_model, CaptureConfig(**fields), directory=tmp_path / "c") as session:
        train(captured_model, 2, session.step)
    assert capsys.readouterr().err == (f"capture: {said}\n" if said else "")


def test_nothing_is_said_of_a_run_that_failed_or_never_began(tmp_path, capsys):
    config = CaptureConfig(step_start=9)
    with capture(make_model(), config, directory=tmp_path / "a"):
        pass
    with pytest.raises(KeyError), capture(make_model(), config, directory=tmp_path / "b") as session, session.step(0):
        raise KeyError
    assert capsys.readouterr().err == ""


def test_generated_tokens_are_selected(tmp_path):
    model = make_model()
    session = Capture(CaptureConfig(token_start=1, token_end=2), directory=tmp_path)
    with session.stage(0, "rollout", model), torch.no_grad():
        ids, mask = batch()
        model(input_ids=ids, attention_mask=mask)
        for i in range(4):
            model(input_ids=ids[:, i : i + 1])
    session.close()
    rows = list(OwnCapture(tmp_path).rows(0, "rollout", 0))
    head = [r for r in rows if r.module == "head" and r.role == "output" and r.kind == "module"]
    assert [r.shape[1] for r in head] == [1, 1]


def test_switched_off_parts_are_left_out(tmp_path):
    config = CaptureConfig(backward=False, parameters=False, parameter_gradients=False)
    assert {(r.kind, r.direction) for r in rows_of(captured(tmp_path, config)[0])} == {("module", "forward")}


# --- samples ---------------------------------------------------------------------------------------------------------


def padded(rows, width, left):
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, at], mask[i, at] = torch.tensor(row), 1
    return ids, mask


def test_samples_are_known_and_sketched_alike_in_any_order_batch_and_padding(tmp_path):
    samples = [[3, 4, 5, 6], [7, 8], [9, 10, 11]]
    found = []
    for i, (cut, width, left) in enumerate([([[0, 1, 2]], 5, True), ([[2, 0], [1]], 9, False)]):
        model = make_model()
        with capture(model, CaptureConfig(samples=True), directory=tmp_path / str(i)) as session, session.step(0):
            with torch.no_grad():
                for part in cut:
                    ids, mask = padded([samples[k] for k in part], width, left)
                    model(input_ids=ids, attention_mask=mask)
        by_key = {}
        for r in rows_of(OwnCapture(tmp_path / str(i)), module="embed", role="output"):
            assert r.sketch().shape == (len(r.keys), 1024)
            by_key |= dict(zip(r.keys, r.sketch()))
        found.append(by_key)
    assert found[0].keys() == found[1].keys() and len(found[0]) == 3
    assert all(np.array_equal(found[0][k], found[1][k]) for k in found[0])


def test_equal_samples_are_told_apart_by_their_order(tmp_path):
    model = make_model()
    with capture(model, CaptureConfig(), directory=tmp_path / "c") as session, session.step(0), torch.no_grad():
        model(input_ids=torch.tensor([[1, 2], [1, 2], [3, 2]]))
    keys = rows_of(OwnCapture(tmp_path / "c"), module="head", role="output")[0].keys
    assert keys[1] == f"{keys[0]}#1" and "#" not in keys[2]


# --- the disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detail", ["sketch", "tensor"])
def test_a_full_disk_stops_the_capture_and_not_the_training(tmp_path, monkeypatch, capsys, detail):
    written = []
    real = own_format.write_file

    def write_file(at, plan, fill):
        if len(written) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(at))
        written.append(at)
        real(at, plan, fill)

    monkeypatch.setattr(own_format, "write_file", write_file)
    model, plain = make_model(), train(make_model(), 5)
    with capture(model, CaptureConfig(detail=detail), directory=tmp_path / "c") as session:
        seen = []

        def step(i):
            return session.step(i)

        seen = train(model, 5, step)
        session.flush()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert "No space left on device" in session.failure
    assert capsys.readouterr().err.count("capture stopped, the run goes on: No space left on device") == 1
    reader = OwnCapture(tmp_path / "c")
    finished = reader.steps()
    assert finished == list(range(len(finished))) and len(finished) < 5
    for s in finished:
        assert all(r.sketch() is not None for r in rows_of(reader, s, kind="module"))
    assert not [p for p in (tmp_path / "c").rglob(".*")], "nothing half-written is left"


def test_a_folder_that_cannot_be_written_stops_the_capture_and_not_the_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    model = make_model()
    with capture(model, CaptureConfig(), directory=tmp_path / "file" / "c") as session:
        seen = train(model, 2, session.step)
    assert all(torch.equal(a, b) for a, b in zip(train(make_model(), 2), seen, strict=True))
    assert session.failure and "capture stopped" in capsys.readouterr().err


@pytest.mark.parametrize("level", ["L0", "mix"])
def test_a_capture_that_fails_by_itself_does_not_take_the_training_along(tmp_path, monkeypatch, capsys, level):
    from alignment.capture.reduction import Reducer

    def add(*arguments, **named):
        raise RuntimeError("an operator this device lacks")

    monkeypatch.setattr(Reducer, "add", add)
    with capture(make_model(), CaptureConfig(level=level), directory=tmp_path / "c") as session:
        seen = train(session._model, 2, session.step)
    assert all(torch.equal(a, b) for a, b in zip(train(make_model(), 2), seen, strict=True))
    assert session.failure == "RuntimeError: an operator this device lacks"
    assert capsys.readouterr().err.count("capture stopped, the run goes on") == 1


@pytest.mark.parametrize("fast", ["on", "off"])
def test_inference_mode_and_training_are_captured_by_one_session(tmp_path, monkeypatch, fast):
    monkeypatch.setattr("alignment.capture.reduction.kernel", module_kernel if fast == "on" else lambda: None)
    model = make_model()
    ids, mask = batch()
    session = Capture(CaptureConfig(token_end=9), directory=tmp_path)
    with session.stage(0, "rollout", model), torch.inference_mode():
        for _ in range(3):
            model(input_ids=ids, attention_mask=mask)
    with session.stage(0, "update_actor", model):
        model(input_ids=ids, attention_mask=mask)["logits"].sum().backward()
    session.close()
    assert session.failure is None
    inside, outside = (list(OwnCapture(tmp_path).rows(0, s, 0)) for s in ("rollout", "update_actor"))
    last = [next(r for r in rows if r.module == "head" and r.role == "output") for rows in (inside, outside)]
    assert np.array_equal(last[0].sketch(), last[1].sketch())


def test_a_killed_run_leaves_every_finished_step_readable(tmp_path):
    script = f"""
        import sys
        sys.path.insert(0, {str(os.path.dirname(__file__))!r})
        from capture_model import make_model, train
        from alignment.capture.config import CaptureConfig
        from alignment.capture.session import capture
        import contextlib, os, signal
        model = make_model()
        with capture(model, CaptureConfig(detail="tensor"), directory={str(tmp_path / "c")!r}) as session:
            @contextlib.contextmanager
            def step(i):
                if i == 3:
                    session.flush()
                with session.step(i):
                    yield
                    if i == 3:
                        os.kill(os.getpid(), signal.SIGKILL)
            train(model, 6, step)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=300, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    reader = OwnCapture(tmp_path / "c")
    assert reader.steps() == [0, 1, 2]
    assert all(r.tensor().shape == r.shape for s in reader.steps() for r in rows_of(reader, s))


def test_what_waits_for_the_disk_is_bounded():
    import threading

    writer, gate, waiting = BackgroundWriter(queue_bytes=100), threading.Event(), []
    done = threading.Thread(target=lambda: [writer.submit(gate.wait, 40) or waiting.append(i) for i in range(5)])
    done.start()
    done.join(timeout=1)
    # Two fit; the third has to wait for the first to be written.
    assert len(waiting) == 2
    gate.set()
    done.join()
    writer.close()
    assert len(waiting) == 5 and writer.failure is None


def test_a_second_capture_does_not_mix_with_the_first(tmp_path):
    captured(tmp_path, CaptureConfig())
    with pytest.raises(InputError, match="holds a capture already"), capture(nn.Identity(), directory=tmp_path / "c"):
        pass
