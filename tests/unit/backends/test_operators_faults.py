"""The checks of operators, both ways: the right implementation passes, and each seeded fault fails where it is made."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from alignment.backends import torch_operators as right
from alignment.backends.case import observe
from alignment.backends.catalogue import find_cases
from alignment.backends.subject import SubjectAvailability
from alignment.baseline.check import check_case
from alignment.baseline.record import record
from alignment.baseline.store import BaselineStore
from alignment.devices.base import get_device
from alignment.numerics.budget import Precision
from alignment.numerics.verdict import Outcome


class Mutant:
    """The subject ``torch`` with one operator replaced."""

    name, kinds = "torch", ("cpu",)

    def __init__(self, forward: Callable) -> None:
        self._forward = forward

    def available(self, device) -> SubjectAvailability:
        return SubjectAvailability(available=True, reason="")

    def supports(self, case) -> bool:
        return True

    def run(self, case, inputs, device):
        return observe(self._forward, inputs, case.attributes, case.differentiable)


def the(case_id: str):
    (case,) = find_cases([case_id])
    return case


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The baselines of every operator, recorded here and now."""
    folder = BaselineStore(tmp_path_factory.mktemp("baselines"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALIGNMENT_COMMIT", "0123456789abcdef")
        record(find_cases([], "unit"), get_device("cpu"), folder)
    return folder


def without_eps(t, a):
    return right.rms_norm(t, {**a, "eps": 0.0})


def swapped_halves(t, a):
    cos, sin = (table[:, None] for table in right.rope_tables(t["position_ids"], a))
    second, first = t["x"].chunk(2, dim=-1)
    return {"output": torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(t["x"].dtype)}


def other_pairing(t, a):
    return right.rope(t, {**a, "mode": {"half": "interleave", "interleave": "half"}[a["mode"]]})


def without_table_mscale(t, a):
    return right.rope(t, {**a, "mscale": 1.0, "mscale_all_dim": 1.0})


def plain_rope(t, a):
    return right.rope(t, {**a, "factor": 0.0})


def scale_of_v_head_dim(t, a):
    return right.attention(t, {**a, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64})


def without_mscale(t, a):
    return right.attention(t, {**a, "factor": 0.0})


def mscale_once(t, a):
    return right.attention({**t, "q": t["q"] / right.yarn_mscale(a["factor"], a["mscale_all_dim"])}, a)


def without_causality(t, a):
    segments = t["segment_ids"]
    mask = ((segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :])[:, None]
    mask = mask | torch.eye(mask.shape[-1], dtype=torch.bool)
    out = F.scaled_dot_product_attention(t["q"], t["k"], t["v"], attn_mask=mask, scale=right.softmax_scale(a))
    return {"output": out * (segments > 0)[:, None, :, None]}


def without_segments(t, a):
    return right.attention({**t, "segment_ids": (t["segment_ids"] > 0).long()}, a)


def padding_is_seen(t, a):
    out = right.attention({**t, "segment_ids": torch.ones_like(t["segment_ids"])}, a)["output"]
    return {"output": out * (t["segment_ids"] > 0)[:, None, :, None]}


def halves_of_swiglu_swapped(t, a):
    up, gate = t["x"].chunk(2, dim=-1)
    return {"output": F.silu(gate) * up}


def router_without_bias(t, a):
    return right.router({**t, "bias": torch.zeros_like(t["bias"])}, a)


def bias_in_the_weights(t, a):
    seen = right.router(t, a)
    weights = seen["scores_for_choice"] * seen["selected"]
    weights = weights / weights.sum(-1, keepdim=True) * a["routed_scaling_factor"]
    return {**seen, "weights": weights + 0 * seen["weights"]}


def router_without_groups(t, a):
    return right.router(t, {**a, "n_group": 1, "topk_group": 1})


def router_in_bfloat16(t, a):
    logits = F.linear(t["x"].bfloat16(), t["weight"].bfloat16()).float()
    x = torch.logit(torch.sigmoid(logits))
    return right.router({**t, "x": x, "weight": torch.eye(logits.shape[-1])}, a) | {"weights": right.router(t, a)["weights"]}


def without_routed_scaling(t, a):
    return right.router(t, {**a, "routed_scaling_factor": 1.0})


def groups_off_by_one(t, a):
    first, *rest = a["group_sizes"]
    return right.grouped_matmul(t, {**a, "group_sizes": (first - 1, rest[0] + 1, *rest[1:])})


def permute_by_unstable_order(t, a):
    k = t["expert_ids"].shape[1]
    order = t["expert_ids"].flatten().flip(0).argsort(stable=True)
    order = t["expert_ids"].numel() - 1 - order
    return {**right.token_permute(t, a), "permuted": t["x"][order // k]}


def log_prob_of_the_next_label(t, a):
    return right.log_prob({**t, "labels": t["labels"].roll(1, dims=1)}, a)


def entropy_in_bits(t, a):
    seen = right.log_prob(t, a)
    return {**seen, "entropy": seen["entropy"] / math.log(2)}


def float16_operands(t, a):
    return {"output": F.linear(t["x"].half().float(), t["weight"].half().float()).to(t["x"].dtype)}


def wrong_dtype(t, a):
    return {"output": F.linear(t["x"], t["weight"]).double()}


def gradient_of_embedding_without_repeats(t, a):
    return {"output": t["weight"].detach()[t["input_ids"]] + (t["weight"] - t["weight"].detach()).mean() * 0 + 0 * t["weight"].sum()}


def one_row_wrong(t, a):
    output = F.linear(t["x"], t["weight"]).clone()
    output[1, 3] = output[1, 4]
    return {"output": output}


def nan_in_one_place(t, a):
    output = F.linear(t["x"], t["weight"]).clone()
    output[0, 0, 0] = math.nan
    return {"output": output}


FAULTS = [
    ("rms_norm-float32", without_eps, "output"),
    ("rms_norm-bfloat16", without_eps, "output"),
    ("rope.plain-half-float32", swapped_halves, "output"),
    ("rope.plain-half-bfloat16", other_pairing, "output"),
    ("rope.yarn-interleave-bfloat16", other_pairing, "output"),
    ("rope.yarn-half-bfloat16", without_table_mscale, "output"),
    ("rope.yarn-half-float32", plain_rope, "output"),
    ("attention.mla-float32", scale_of_v_head_dim, "output"),
    ("attention.mla-bfloat16", scale_of_v_head_dim, "output"),
    ("attention.mla-yarn-bfloat16", without_mscale, "output"),
    ("attention.mla-yarn-bfloat16", mscale_once, "output"),
    ("attention.mla-float32", without_causality, "output"),
    ("attention.packed-bfloat16", without_segments, "output"),
    ("attention.padding-bfloat16", padding_is_seen, "output"),
    ("swiglu-bfloat16", halves_of_swiglu_swapped, "output"),
    ("router.plain-bfloat16", router_without_bias, "scores_for_choice"),
    ("router.plain-bfloat16", bias_in_the_weights, "weights"),
    ("router.plain-bfloat16", router_in_bfloat16, "scores_for_choice"),
    ("router.groups-float32", router_without_groups, "selected"),
    ("router.groups-bfloat16", without_routed_scaling, "weights"),
    ("grouped_matmul-bfloat16", groups_off_by_one, "output"),
    ("token_permute-bfloat16", permute_by_unstable_order, "permuted"),
    ("log_prob-bfloat16", log_prob_of_the_next_label, "log_prob"),
    ("log_prob-float32", entropy_in_bits, "entropy"),
    ("matmul-float32", float16_operands, "output"),
    ("matmul-float32", wrong_dtype, "output"),
    ("matmul-bfloat16", one_row_wrong, "output"),
    ("matmul-bfloat16", nan_in_one_place, "output"),
    ("embedding-float32", gradient_of_embedding_without_repeats, "grad.weight"),
]


@pytest.mark.parametrize(("case_id", "fault", "quantity"), FAULTS, ids=[f"{c}-{f.__name__}" for c, f, _ in FAULTS])
def test_a_fault_fails_and_is_named(store, case_id, fault, quantity):
    case = the(case_id)
    verdict = check_case(case, Mutant(fault), get_device("cpu"), store)
    assert verdict.outcome is Outcome.FAIL, verdict.reason
    assert (verdict.where.stage, verdict.where.module, verdict.where.quantity) == ("operator", case.operator, quantity)
    assert f'-k "{case_id}-torch" --device cpu' in verdict.next_command
    assert "recorded 2" in verdict.baseline and "same chip" in verdict.baseline


@pytest.mark.parametrize("case_id", sorted({c for c, _, _ in FAULTS}))
def test_the_right_implementation_passes(store, case_id):
    case = the(case_id)
    verdict = check_case(case, Mutant(right.FORWARD[case.operator]), get_device("cpu"), store)
    assert verdict.outcome is Outcome.PASS, (verdict.reason, verdict.where)
    assert all(m.within for m in verdict.measures) and verdict.worst.used > 0


def test_a_failure_says_where_the_largest_error_is(store):
    verdict = check_case(the("matmul-bfloat16"), Mutant(one_row_wrong), get_device("cpu"), store)
    assert "largest error at [1, 3," in verdict.where.detail and "golden" in verdict.where.detail


def test_a_wrong_dtype_is_called_by_its_name(store):
    verdict = check_case(the("matmul-float32"), Mutant(wrong_dtype), get_device("cpu"), store)
    assert verdict.where.detail == "dtype torch.float64, expected torch.float32 as declared"


def test_a_wrong_shape_is_called_by_its_name(store):
    class Flat(Mutant):
        def run(self, case, inputs, device):
            seen = super().run(case, inputs, device)
            return {**seen, "output": seen["output"].flatten(0, 1)}

    verdict = check_case(the("matmul-float32"), Flat(right.matmul), get_device("cpu"), store)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.where.detail == "shape [16, 24], expected [2, 8, 24]"


def test_a_subject_that_raises_is_an_error_with_what_it_said(store):
    def broken(t, a):
        raise RuntimeError("aclnnMatmul failed: 161002")

    verdict = check_case(the("matmul-float32"), Mutant(broken), get_device("cpu"), store)
    assert verdict.outcome is Outcome.ERROR
    assert verdict.reason == "the subject raised RuntimeError: aclnnMatmul failed: 161002"


def test_a_run_is_judged_by_the_precision_it_declares(store):
    case, subject = the("matmul-float32"), Mutant(float16_operands)
    device = get_device("cpu")
    assert check_case(case, subject, device, store).outcome is Outcome.FAIL
    # Operands of half precision have TF32's ten bits.
    declared = Precision(compute="float32", matmul="tf32")
    verdict = check_case(case, subject, device, store, declared=declared)
    assert verdict.outcome is Outcome.PASS
    assert "float32 (tf32 matmul)" in verdict.worst.origin


def test_a_subject_that_observes_nothing_is_an_error(store):
    class Blind(Mutant):
        def run(self, case, inputs, device):
            return {}

    verdict = check_case(the("matmul-float32"), Blind(None), get_device("cpu"), store)
    assert verdict.outcome is Outcome.ERROR and "observed nothing" in verdict.reason


def test_a_subject_that_is_not_there_is_unavailable_with_its_reason(store):
    class Absent(Mutant):
        def available(self, device):
            return SubjectAvailability(available=False, reason="it is not installed")

    verdict = check_case(the("matmul-float32"), Absent(None), get_device("cpu"), store)
    assert (verdict.outcome, verdict.reason) == (Outcome.UNAVAILABLE, "it is not installed")


def test_a_fault_of_the_golden_model_shows_against_the_stored_values(store, monkeypatch):
    from alignment.backends import golden_operators

    monkeypatch.setattr(golden_operators, "softmax_scale", lambda config: config.v_head_dim**-0.5)
    case = the("attention.mla-float32")
    verdict = check_case(case, Mutant(right.attention), get_device("cpu"), store)
    assert verdict.outcome is Outcome.FAIL
    assert (verdict.where.stage, verdict.where.quantity) == ("golden", "output")
