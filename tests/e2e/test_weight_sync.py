"""Trainer → rollout weight sync: proven after every kind of update, and the reported fault reproduced and named."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

from alignment.backends.golden_rollout import GoldenRollout
from alignment.backends.golden_sync import golden_load_format_table, golden_weight_sync
from alignment.backends.load_format_table import load_format_table
from alignment.backends.rollout import SamplingParams
from alignment.backends.sync_probe import ProbeCase, probe_budget, probe_case, trainer_log_probs
from alignment.backends.weight_sync import check_weight_sync, reachable_tensors, stream_weights, undeclared_tensors
from alignment.devices.base import get_device
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.budget import Budget
from alignment.numerics.verdict import Outcome, exit_code

JUDGED, NOISE = 100, (1, 2, 3, 4, 5)
CHECKS = ("parameters", "derived_tensors", "undeclared_tensors", "prefill", "decode")


class Setting:
    """A trainer that moves, and what a correct engine may differ from it by."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.config, self.dtype = preset(name), dtype
        self.trainer = CausalLM(self.config, dtype=dtype).init_weights(1)
        self.case = probe_case(self.config, seed=JUDGED)
        self.budget = probe_budget(self.trainer, seeds=NOISE, device="cpu")

    def engine(self, **options) -> GoldenRollout:
        return GoldenRollout(self.config, dtype=self.dtype, seed=1007, **options)

    def train(self, step: int) -> None:
        """A step big enough to see: every weight moves by its own size."""
        self.trainer.init_weights(1 + step)

    def check(self, engine: GoldenRollout, *, case: ProbeCase | None = None, budget: Budget | None = None):
        case = case or self.case
        found = check_weight_sync(
            engine,
            dict(stream_weights(self.trainer)),
            case=case,
            log_probs=trainer_log_probs(self.trainer, case),
            budget=budget or self.budget,
            device=engine.device.label,
        )
        assert [v.check for v in found] == [f"weight_sync.{c}" for c in CHECKS]
        return dict(zip(CHECKS, found, strict=True))


@pytest.fixture(
    scope="module",
    params=[("tiny-moonlight", torch.float32), ("tiny-deepseek", torch.float64)],
    ids=["moonlight-float32", "deepseek-float64"],
)
def setting(request) -> Setting:
    return Setting(*request.param)


def assert_good(verdicts) -> None:
    assert {name: v.outcome for name, v in verdicts.items()} == dict.fromkeys(CHECKS, Outcome.PASS), {
        name: v.reason for name, v in verdicts.items() if v.outcome is not Outcome.PASS
    }
    assert exit_code(verdicts.values()) == 0


def assert_stale(verdicts) -> None:
    """The reported fault: all parameters right, prefill and first token right, everything decoded wrong."""
    assert {name for name, v in verdicts.items() if v.outcome is Outcome.FAIL} == {"derived_tensors", "decode"}
    assert exit_code(verdicts.values()) == 1
    derived, decode = verdicts["derived_tensors"], verdicts["decode"]
    assert (derived.where.stage, derived.where.module, derived.where.quantity) == (
        "weight_sync",
        "model.layers.0.self_attn",
        "w_uk_t",
    )
    assert "model.layers.0.self_attn.w_uk_t, model.layers.0.self_attn.w_uv" in derived.reason
    assert "stale" in derived.where.detail and "it is a copy that no weight update reaches" in derived.where.detail
    assert (decode.where.module, decode.where.quantity) == ("model.layers.0.self_attn", "w_uk_t")
    assert "decode parts from the trainer at response token 1 of sample" in decode.where.detail
    judged, first = decode.measures[:2]
    assert first.value <= judged.bound < judged.value


# --- the right implementation passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", [False, True], ids=["copies", "views"])
def test_a_correct_engine_passes_after_first_second_and_third_update(setting, alias):
    engine = setting.engine(alias=alias)
    for step in range(3):
        setting.train(step)
        engine.update_weights(stream_weights(setting.trainer))
        assert_good(setting.check(engine))


@pytest.mark.parametrize("alias", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_correct_engine_passes_after_sleeping_and_a_sync(setting, alias, level):
    engine = setting.engine(alias=alias)
    engine.update_weights(stream_weights(setting.trainer))
    for step in (3, 4):
        engine.sleep(level)
        setting.train(step)
        engine.wake()
        engine.update_weights(stream_weights(setting.trainer))
        assert_good(setting.check(engine))


def test_sleeping_at_level_one_and_waking_keeps_the_proof(setting):
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer))
    engine.sleep(1)
    engine.wake()
    assert_good(setting.check(engine))


def test_a_partial_update_is_proven_too(setting):
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer))
    with torch.no_grad():
        for name, weight in setting.trainer.named_parameters():
            if "kv_b_proj" in name:
                weight.mul_(1.5)
    engine.update_weights(((n, t) for n, t in stream_weights(setting.trainer) if "kv_b_proj" in n), partial=True)
    assert_good(setting.check(engine))


def test_the_budget_is_measured_on_other_sequences_than_the_judged(setting):
    assert setting.budget.noise.seeds == NOISE
    assert 0 < setting.budget.noise.worst < setting.budget.value
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer))
    with pytest.raises(InputError, match="the judged run is one of those the noise was measured on"):
        setting.check(engine, case=probe_case(setting.config, seed=NOISE[0]))


# --- and wrong ones fail, by name ------------------------------------------------------------------------------------


def test_stale_derived_tensors_fail_while_every_parameter_is_equal(setting):
    engine = setting.engine()
    setting.train(5)
    engine.update_weights(stream_weights(setting.trainer), post_process=False)
    verdicts = setting.check(engine)
    assert verdicts["parameters"].outcome is verdicts["prefill"].outcome is Outcome.PASS
    assert_stale(verdicts)


def test_in_bfloat16_the_median_gap_is_judged_and_decides_both_ways():
    """Rounding reroutes single tokens there, so the maximum says nothing; stale weights move most tokens."""
    setting = Setting("tiny-deepseek", torch.bfloat16)
    assert setting.budget.metric == "median |Δ log p|"
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer))
    assert_good(setting.check(engine))
    setting.train(5)
    engine.update_weights(stream_weights(setting.trainer), post_process=False)
    assert_stale(setting.check(engine))


def test_stale_after_sleep_level_two_as_in_the_report(setting):
    engine = setting.engine()
    engine.sleep(2)
    setting.train(6)
    engine.wake()
    engine.update_weights(stream_weights(setting.trainer), post_process=False)
    assert_stale(setting.check(engine))


def test_a_step_too_small_for_log_probs_to_show_is_found_by_its_bits(setting):
    """Why the proof does not rest on the probe: after one small update stale weights still decode almost right."""
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer))
    with torch.no_grad():
        for name, weight in setting.trainer.named_parameters():
            if "kv_b_proj" in name:
                weight.mul_(1 + 2 * torch.finfo(weight.dtype).eps)
    engine.update_weights(stream_weights(setting.trainer), post_process=False)
    verdicts = setting.check(engine)
    assert {name for name, v in verdicts.items() if v.outcome is Outcome.FAIL} == {"derived_tensors"}
    assert exit_code(verdicts.values()) == 1


def test_rerunning_the_post_processing_repairs_it(setting):
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer), post_process=False)
    engine.process_weights_after_loading()
    assert_good(setting.check(engine))


def test_views_need_no_post_processing(setting):
    """The GPU's behaviour: the derived tensors see an in-place update by themselves."""
    engine = setting.engine(alias=True)
    for step in (7, 8):
        engine.sleep(2)
        setting.train(step)
        engine.wake()
        engine.update_weights(stream_weights(setting.trainer), post_process=False)
        assert_good(setting.check(engine))


def test_a_partial_update_without_post_processing_goes_stale_only_where_it_touched(setting):
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer))
    touched = "model.layers.1.self_attn.kv_b_proj.weight"
    with torch.no_grad():
        dict(setting.trainer.named_parameters())[touched].mul_(1.5)
    sent = dict(stream_weights(setting.trainer))
    engine.update_weights([(touched, sent[touched])], partial=True, post_process=False)
    derived = setting.check(engine)["derived_tensors"]
    assert derived.outcome is Outcome.FAIL
    assert derived.where.module == "model.layers.1.self_attn"
    assert "2 of" in derived.reason and "layers.0" not in derived.reason


def test_one_flipped_bit_of_one_weight_is_found_and_named(setting):
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer))
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    weight = dict(engine.named_parameters())[name]
    weight.view(-1)[5] = torch.nextafter(weight.view(-1)[5], torch.tensor(1e9, dtype=weight.dtype))
    verdict = setting.check(engine)["parameters"]
    assert verdict.outcome is Outcome.FAIL
    assert (verdict.where.module, verdict.where.quantity) == ("model.layers.1.mlp.experts.2.down_proj", "weight")
    assert re.fullmatch(rf"1 of {weight.numel()} elements differ, by up to \S+\d", verdict.where.detail)


def test_a_sign_of_zero_and_a_nan_count_as_bits(setting):
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer))
    sent = dict(stream_weights(setting.trainer))
    name = "model.layers.0.self_attn.o_proj.weight"
    sent[name] = sent[name].clone()
    sent[name][0, 0] = 0.0
    engine.update_weights([(name, sent[name])], partial=True)
    sent[name][0, 0] = -0.0
    arguments = dict(
        case=setting.case, log_probs=trainer_log_probs(setting.trainer, setting.case), budget=setting.budget
    )
    assert check_weight_sync(engine, sent, **arguments)[0].where.quantity == "weight"
    sent[name][0, 0] = 0.0
    assert check_weight_sync(engine, sent, **arguments)[0].outcome is Outcome.PASS


def test_a_tensor_that_was_not_sent_or_is_not_held_is_named(setting):
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer))
    sent = dict(stream_weights(setting.trainer))
    sent["model.layers.9.extra.weight"] = torch.zeros(1)
    del sent["lm_head.weight"]
    verdict = check_weight_sync(
        engine,
        sent,
        case=setting.case,
        log_probs=trainer_log_probs(setting.trainer, setting.case),
        budget=setting.budget,
    )[0]
    assert verdict.reason.startswith("2 of")
    assert "model.layers.9.extra.weight, lm_head.weight" in verdict.reason
    assert verdict.where.detail == "the engine does not hold it"


def test_an_undeclared_derived_tensor_is_found(setting):
    engine = setting.engine()
    engine.update_weights(stream_weights(setting.trainer))
    assert undeclared_tensors(engine) == []
    layer = engine._model.model.layers[1].mlp
    layer.packed = {"experts": [layer.gate.weight.detach().clone()]}
    assert undeclared_tensors(engine) == ["model.layers.1.mlp.packed['experts'][0]"]
    verdict = setting.check(engine)["undeclared_tensors"]
    assert verdict.outcome is Outcome.FAIL
    assert verdict.where.detail == "no weight update reaches it and the engine does not declare it"


def test_a_view_of_a_parameter_needs_no_declaration(setting):
    engine = setting.engine()
    engine._model.lm_head.transposed = engine._model.lm_head.weight.detach().t()
    assert undeclared_tensors(engine) == []


def test_the_walk_finds_tensors_in_containers_objects_and_buffers():
    class Holder:
        def __init__(self):
            self.inner = (torch.ones(1), {"key": torch.ones(2)})
            self.me = self

    module = torch.nn.Module()
    module.register_buffer("cached", torch.ones(3), persistent=False)
    module.holder = Holder()
    found = {path for path, _ in reachable_tensors([("m", module)])}
    assert found == {"m.cached", "m.holder.inner[0]", "m.holder.inner[1]['key']"}


def test_weights_that_make_nan_logits_are_an_error_beside_what_the_tensors_say(setting):
    engine = setting.engine()
    sent = dict(stream_weights(setting.trainer))
    arguments = dict(
        case=setting.case, log_probs=trainer_log_probs(setting.trainer, setting.case), budget=setting.budget
    )
    sent["model.norm.weight"] = torch.full_like(sent["model.norm.weight"], float("nan"))
    engine.update_weights(sent.items())
    verdicts = check_weight_sync(engine, sent, **arguments)
    assert [v.outcome for v in verdicts] == [Outcome.PASS] * 3 + [Outcome.ERROR] * 2
    assert "the engine's logits are not finite" in verdicts[3].reason
    assert exit_code(verdicts) == 2
    stale = setting.engine()
    stale.update_weights(sent.items(), post_process=False)
    assert exit_code(check_weight_sync(stale, sent, **arguments)) == 1


def test_log_probs_of_another_shape_are_refused(setting):
    engine = setting.engine()
    with pytest.raises(InputError, match=r"weight_sync.prefill: .*different shapes; expected \[4, 3\]; found \[4, 8\]"):
        check_weight_sync(
            engine,
            dict(engine.named_parameters()),
            case=setting.case,
            log_probs=torch.zeros(4, 3),
            budget=setting.budget,
        )


# --- dummy against safetensors ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_sync(setting):
    """The report's experiment: the checkpoint the trainer starts from is the one the safetensors engine read."""
    setting.train(0)

    def table(**options):
        return golden_load_format_table(setting.trainer, setting.case, device=get_device("cpu"), **options)

    return table


@pytest.mark.parametrize(("alias", "post_process"), [(False, True), (True, False), (True, True)])
def test_initialisation_does_not_matter_to_a_correct_engine(first_sync, alias, post_process):
    table = first_sync(alias=alias, post_process=post_process)
    assert [(stage, quantity, expected) for stage, quantity, _, expected, _ in table.table()] == [
        ("at init", "parameters", "differ"),
        ("at init", "derived tensors", "differ"),
        ("before sharding", "parameters", "equal"),
        ("after sharding", "parameters", "equal"),
        ("after sharding", "derived tensors", "equal"),
        ("in the first forward", "prefill log-probs", "equal"),
        ("in the first forward", "decode log-probs", "equal"),
    ]
    assert all(row.as_expected for row in table.rows)
    assert table.verdict().outcome is Outcome.PASS


def test_the_reported_fault_shows_only_in_derived_tensors_and_decoding(first_sync, setting):
    table = first_sync(alias=False, post_process=False)
    found = {(stage, quantity): seen for stage, quantity, seen, _, _ in table.table()}
    layers, tokens = setting.config.num_hidden_layers, setting.case.response_length
    assert found["before sharding", "parameters"] == found["after sharding", "parameters"] == "equal"
    assert found["after sharding", "derived tensors"] == f"{2 * layers} of {2 * layers} differ"
    assert found["in the first forward", "prefill log-probs"] == "equal"
    assert found["in the first forward", "decode log-probs"] == f"{tokens - 1} of {tokens} differ"
    verdict = table.verdict()
    assert verdict.outcome is Outcome.FAIL
    assert verdict.reason == "the initialisation matters: derived tensors differ after sharding"
    assert (verdict.where.module, verdict.where.quantity) == ("model.layers.0.self_attn", "w_uk_t")


def test_a_table_of_two_equal_engines_shows_nothing(setting):
    table = load_format_table(
        lambda load_format: setting.engine(), lambda: stream_weights(setting.trainer), setting.case
    )
    verdict = table.verdict()
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reason == "both engines started with equal weights, so the table shows nothing"


def test_the_fault_garbles_everything_after_the_first_token(setting):
    """What people saw: the text, not the tensors."""
    good, bad = setting.engine(), setting.engine()
    good.update_weights(stream_weights(setting.trainer))
    bad.update_weights(stream_weights(setting.trainer), post_process=False)
    ids, mask = setting.case.input_ids[:, :12], setting.case.attention_mask[:, :12]
    params, keys = SamplingParams(max_new_tokens=12, seed=3), torch.arange(len(ids))
    right, wrong = (one.generate(ids, mask, params, keys).responses for one in (good, bad))
    assert torch.equal(right[:, 0], wrong[:, 0])
    assert not torch.equal(right, wrong)


# --- as a run reports it ---------------------------------------------------------------------------------------------

REPORTED = [f"weight_sync.{c}" for c in (*CHECKS, "load_format")]


def test_a_run_reports_every_verdict_on_every_device(device):
    verdicts = golden_weight_sync(device, config=preset("tiny-deepseek"))
    assert [v.check for v in verdicts] == REPORTED
    assert {v.outcome for v in verdicts} == {Outcome.PASS}
    assert {v.device for v in verdicts} == {device.label}
    assert all(m.used < 1 for v in verdicts for m in v.measures if m.bound)


def test_a_fault_injected_into_the_engine_fails_the_run_by_name_and_does_not_widen_its_budget(monkeypatch):
    right = golden_weight_sync(get_device("cpu"), config=preset("tiny-deepseek"))
    update = GoldenRollout.update_weights

    def stale(self, stream, *, post_process=True, partial=False):
        update(self, stream, post_process=False, partial=partial)

    monkeypatch.setattr(GoldenRollout, "update_weights", stale)
    wrong = golden_weight_sync(get_device("cpu"), config=preset("tiny-deepseek"))
    assert exit_code(wrong) == 1
    failed = {v.check: str(v.where) for v in wrong if v.outcome is Outcome.FAIL}
    assert list(failed) == ["weight_sync.derived_tensors", "weight_sync.decode", "weight_sync.load_format"]
    assert all(where.startswith("weight_sync · model.layers.0.self_attn · w_uk_t") for where in failed.values())
    assert wrong[4].worst.bound == right[4].worst.bound


# --- on an NPU -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def npu_setting() -> Setting:
    return Setting("tiny-moonlight", torch.float32)


@pytest.mark.npu
@pytest.mark.parametrize("internal_format", [False, True], ids=["ND", "FRACTAL_NZ"])
@pytest.mark.parametrize("alias", [False, True], ids=["copies", "views"])
def test_an_npu_engine_that_post_processes_passes(npu_setting, alias, internal_format):
    engine = npu_setting.engine(device=get_device("npu"), alias=alias, internal_format=internal_format)
    for step in (1, 2):
        engine.sleep(2)
        npu_setting.train(step)
        engine.wake()
        engine.update_weights(stream_weights(npu_setting.trainer))
        assert_good(npu_setting.check(engine))


@pytest.mark.npu
def test_copies_on_an_npu_go_stale_without_post_processing(npu_setting):
    engine = npu_setting.engine(device=get_device("npu"))
    npu_setting.train(3)
    engine.update_weights(stream_weights(npu_setting.trainer), post_process=False)
    assert_stale(npu_setting.check(engine))


@pytest.mark.npu
@pytest.mark.parametrize("behaviour", [None, "internal_format_view_copies", "internal_format_as_strided_copies"])
def test_views_of_an_internal_format_weight_on_the_emulated_npu(npu_setting, behaviour):
    """Where ``view`` (as reported) or a strided view (as published) of such a weight is new storage, views go stale."""
    device = get_device("npu")
    if not device.emulated:
        pytest.skip("only the emulated NPU can switch this behaviour")
    from alignment.devices.emulated_npu import semantics

    with getattr(semantics, behaviour)() if behaviour else contextlib.nullcontext():
        engine = npu_setting.engine(device=device, alias=True, internal_format=True)
        npu_setting.train(4)
        engine.update_weights(stream_weights(npu_setting.trainer), post_process=False)
        verdicts = npu_setting.check(engine)
        assert_stale(verdicts) if behaviour else assert_good(verdicts)
        engine.process_weights_after_loading()
        assert_good(npu_setting.check(engine))


def test_an_engine_that_skips_an_update_while_it_is_awake_fails_the_run():
    from alignment.faults.catalogue.weight_sync import FAULTS

    behind = next(fault for fault in FAULTS if fault.id == "rollout-one-version-behind")
    with behind():
        wrong = golden_weight_sync(get_device("cpu"), config=preset("tiny-deepseek"))
    assert exit_code(wrong) == 1
    assert "weight_sync.parameters" in {v.check for v in wrong if v.outcome is Outcome.FAIL}
