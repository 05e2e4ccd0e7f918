"""Experts whose weights one side stacks, and routers that hand out other things: as transformers has them."""

from __future__ import annotations

import numpy as np
import pytest
from comparison_rows import MemoryCapture, row

from alignment.diagnose.capture_comparison import compare_captures

EXPERTS, INNER, WIDTH, TOKENS, CHOSEN = 4, 6, 8, 12, 2
NAME = "model.layers.1.mlp"
DRAWN = np.random.Generator(np.random.Philox(0))
GATE, UP = DRAWN.standard_normal((2, EXPERTS, INNER, WIDTH))
DOWN = DRAWN.standard_normal((EXPERTS, WIDTH, INNER))
TOKENS_IN = DRAWN.standard_normal((TOKENS, WIDTH))
LOGITS = DRAWN.standard_normal((TOKENS, EXPERTS))
CHOICE = np.argsort(-LOGITS, axis=-1)[:, :CHOSEN]
SHARES = np.take_along_axis(LOGITS, CHOICE, -1)
DETAILS = ("statistics", "sketch", "tensor")


def call(module, class_name, detail, *outputs):
    """A call of ``module`` with its input and outputs."""
    common = {"detail": detail, "class_name": class_name, "order": 1}
    yield row(module, TOKENS_IN, role="input", path="args.0", **common)
    for i, output in enumerate(outputs):
        dtype = "int64" if output.dtype.kind == "i" else "float32"
        yield row(module, output, path=f"output.{i}", dtype=dtype, **common)


def parameters(weights, detail, kind):
    role = "input" if kind == "parameter" else "output"
    direction = "forward" if kind == "parameter" else "backward"
    common = {"role": role, "direction": direction, "kind": kind, "detail": detail}
    return [row(name, weight, path=name.rpartition(".")[2], **common) for name, weight in weights.items()]


def apart(detail, kind="parameter"):
    """Every expert on its own, as checkpoints name them; the router hands out the choice and its weights."""
    weights = {}
    for n in range(EXPERTS):
        for layer, weight in (("gate_proj", GATE), ("up_proj", UP), ("down_proj", DOWN)):
            weights[f"{NAME}.experts.{n}.{layer}.weight"] = weight[n]
    return MemoryCapture([*parameters(weights, detail, kind), *call(f"{NAME}.gate", "Router", detail, CHOICE, SHARES)])


def fused_apart(detail):
    """Every expert on its own with gate and up in one layer, as megatron-core's local experts have them."""
    weights = {}
    for n in range(EXPERTS):
        weights[f"{NAME}.experts.{n}.gate_up_proj.weight"] = np.concatenate([GATE[n], UP[n]])
        weights[f"{NAME}.experts.{n}.down_proj.weight"] = DOWN[n]
    routed = call(f"{NAME}.gate", "Router", detail, CHOICE, SHARES)
    return MemoryCapture([*parameters(weights, detail, "parameter"), *routed])


def stacked(
    detail, kind="parameter", *, gate=GATE, up=UP, down=DOWN, outputs=(LOGITS, SHARES, CHOICE), router="TopkRouter"
):
    """All experts in one parameter; the router hands out its logits first."""
    weights = {
        f"{NAME}.experts.gate_up_proj": np.concatenate([gate, up], axis=1),
        f"{NAME}.experts.down_proj": down,
    }
    return MemoryCapture([*parameters(weights, detail, kind), *call(f"{NAME}.gate", router, detail, *outputs)])


def both_ways(one, other):
    yield compare_captures(one, other).stages[0]
    yield compare_captures(other, one).stages[0]


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("kind", ["parameter", "parameter_gradient"])
def test_stacked_experts_and_single_ones_agree(detail, kind):
    for stage in both_ways(apart(detail, kind), stacked(detail, kind)):
        assert stage.aligned, stage.reason()
        assert {gap.name for gap in stage.unpaired} == {f"{NAME}.gate output output.0"}


@pytest.mark.parametrize("detail", DETAILS)
def test_experts_that_fuse_gate_and_up_agree_as_well(detail):
    for stage in both_ways(fused_apart(detail), stacked(detail)):
        assert stage.aligned, stage.reason()


def test_weights_of_several_states_agree_and_a_later_one_is_found():
    """A stage that updates its weights records them again after it."""
    later = {"gate": GATE + 0.5, "up": UP + 0.5, "down": DOWN + 0.5}
    sides = []
    for down in (later["down"], of_one(later["down"], lambda w: w * 1.01)):
        first, second = stacked("sketch"), stacked("sketch", **{**later, "down": down})
        sides.append(MemoryCapture([*first.rows(0, "train", 0), *list(second.rows(0, "train", 0))[:2]]))
    single = list(apart("sketch").rows(0, "train", 0))
    weights = zip((GATE, UP, DOWN), ("gate_proj", "up_proj", "down_proj"))
    for weight, layer in weights:
        for n in range(EXPERTS):
            single += parameters({f"{NAME}.experts.{n}.{layer}.weight": weight[n] + 0.5}, "sketch", "parameter")
    golden = MemoryCapture(single)
    assert compare_captures(golden, sides[0]).stages[0].aligned
    wrong = compare_captures(golden, sides[1]).stages[0]
    # nobody knows how far an update without gradients may lead
    assert not wrong.aligned and [f.quantity for f in wrong.localisation.unknown] == ["parameter down_proj"]


def of_one(weight, change):
    out = weight.copy()
    out[2] = change(out[2])
    return out


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({"up": of_one(UP, lambda w: w * 1.01)}, "gate_up_proj"),
        ({"down": of_one(DOWN, lambda w: np.where(w == w.max(), 0.0, w))}, "down_proj"),
    ],
)
@pytest.mark.parametrize("detail", DETAILS)
def test_a_wrong_weight_of_one_expert_is_found(changes, at, detail):
    for stage in both_ways(apart(detail), stacked(detail, **changes)):
        assert (stage.first.module, stage.first.quantity) == (f"{NAME}.experts", f"parameter {at}")


@pytest.mark.parametrize("changes", [{"gate": UP, "up": GATE}, {"down": DOWN[::-1]}])
def test_exchanged_halves_and_experts_are_found_from_tensors(changes):
    for stage in both_ways(apart("tensor"), stacked("tensor", **changes)):
        assert stage.first.module == f"{NAME}.experts"


def test_an_expert_more_or_another_layout_is_missing():
    more = {"gate": GATE[:-1], "up": UP[:-1], "down": DOWN[:-1]}
    turned = {"down": DOWN.swapaxes(1, 2)}
    for changes, missing in ((more, 3), (turned, EXPERTS + 1)):
        for stage in both_ways(apart("sketch"), stacked("sketch", **changes)):
            assert len(stage.failures) == missing and not stage.aligned
            assert stage.failures[0].startswith(f"parameter {NAME}.experts.")


@pytest.mark.parametrize("detail", DETAILS)
def test_the_choices_of_two_routers_are_compared_wherever_they_stand(detail):
    wrong = CHOICE.copy()
    wrong[:5] = (wrong[:5] + 1) % EXPERTS
    for stage in both_ways(apart(detail), stacked(detail, outputs=(LOGITS, SHARES, wrong))):
        assert stage.first.module == f"{NAME}.gate" and not stage.aligned


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"router": "Router"}, "shape"),
        ({"outputs": (LOGITS[:-1], SHARES, CHOICE)}, "shape"),
        ({"outputs": (LOGITS, SHARES * 1.01, CHOICE)}, "relative difference"),
    ],
    ids=["one class", "a token less", "other weights"],
)
def test_another_width_fails_where_it_is_not_another_result(changes, found):
    for stage in both_ways(apart("sketch"), stacked("sketch", **changes)):
        assert stage.first.module == f"{NAME}.gate" and stage.first.reason.startswith(found)
