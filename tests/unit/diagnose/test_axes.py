"""What the axes read beside two runs: operators, tokenizers, listed scores, and the text that verl dumps."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from alignment.diagnose.axes import data, hardware, hyperparameters, overrides, scoring, software, structure
from alignment.diagnose.garbled import find_garbled
from alignment.diagnose.run_data import RunData
from alignment.diagnose.run_stages import StageVerdict
from alignment.errors import InputError
from alignment.numerics.verdict import Measure, Outcome, Verdict
from alignment.report.run_directory import finite
from alignment.rl.batch_record import BatchRecord, batch_path, write_batch


def a_run(directory, *, engine="alignment", metrics=None, texts=None, **config) -> RunData:
    directory.mkdir(exist_ok=True)
    return RunData(directory, engine, "npu", metrics or {1: {"actor/loss": 0.5}}, config, texts=texts or {})


# --- axis 4: operators -----------------------------------------------------------------------------------------------


def operators(directory, **errors: float) -> None:
    """``alignment run --only unit --json`` of operators with a bound of 1."""
    verdicts = [
        Verdict(
            check=f"unit/{name}",
            layer="unit",
            stage="operator",
            subject="torch_npu",
            device="npu",
            outcome=Outcome.PASS if error <= 1 else Outcome.FAIL,
            reason=f"{name} is off",
            measures=(Measure(name="relative L2", value=error, bound=1.0),),
        )
        for name, error in errors.items()
    ]
    directory.mkdir(exist_ok=True)
    told = {"verdicts": [finite(v.to_dict()) for v in verdicts]}
    (directory / software.OPERATORS).write_text(json.dumps(told))


def test_the_worst_operator_comes_first_and_the_others_are_listed(tmp_path):
    operators(tmp_path / "a", softmax=3.0, attention=float("inf"), norm=0.5, rope=7.0)
    report = software.check(a_run(tmp_path / "a"), a_run(tmp_path / "b"), [], explained=False)
    (finding,) = report.findings
    assert finding.cause == "the operator unit/attention computes differently"
    assert finding.evidence == "attention is off; 3 operators are outside their budgets, this one by most"
    assert [line.partition(" ")[0] for line in report.remarks] == ["unit/rope", "unit/softmax"]


def test_operators_within_their_budgets_are_a_pass_and_not_asked_for_again(tmp_path):
    operators(tmp_path / "a", softmax=1.0, norm=0.5)
    report = software.check(a_run(tmp_path / "a"), a_run(tmp_path / "b"), [], explained=False)
    assert report.outcome is Outcome.PASS and "2 operators are within their budgets" in report.reason
    assert "alignment run --only unit" not in report.next_command


def test_without_an_operator_test_the_command_is_given(tmp_path):
    report = software.check(a_run(tmp_path / "a"), a_run(tmp_path / "b"), [], explained=False)
    assert "alignment run --only unit --json > RUN/operators.json" in report.next_command


def test_a_stage_that_parts_is_laid_at_the_operator(tmp_path):
    operators(tmp_path / "a", softmax=3.0)
    parted = StageVerdict(step=1, stage="old_log_prob", outcome=Outcome.FAIL, reason="log-probs differ")
    report = software.check(a_run(tmp_path / "a"), a_run(tmp_path / "b"), [parted], explained=False)
    assert [finding.cause for finding in report.findings] == ["the operator unit/softmax computes differently"]


def test_a_file_that_is_no_operator_test_is_refused(tmp_path):
    run = a_run(tmp_path / "a")
    (tmp_path / "a" / software.OPERATORS).write_text(json.dumps({"verdicts": [{"check": "x"}]}))
    with pytest.raises(InputError, match="not an answer of alignment run"):
        software.check(run, run, [], explained=False)


# --- axis 2: tokenizers ----------------------------------------------------------------------------------------------


def tokenizer(directory, *, template="{{ messages }}", vocabulary=("a", "b"), own_file=False):
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": list(vocabulary)}}))
    (directory / "tokenizer_config.json").write_text(json.dumps({} if own_file else {"chat_template": template}))
    if own_file:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def compared(tmp_path, ours, theirs):
    runs = []
    tmp_path.mkdir(exist_ok=True)
    for name, folder in (("dut", ours), ("baseline", theirs)):
        texts = {1: [{"input": "1 + 1 =", "output": "2", "score": 1.0}]}
        config = {"actor_rollout_ref.model.path": str(folder)}
        runs.append(a_run(tmp_path / name, engine="verl", texts=texts, **config))
    return data.check(*runs)


def test_equal_tokenizers_are_no_finding_wherever_their_template_lies(tmp_path):
    report = compared(tmp_path, tokenizer(tmp_path / "a"), tokenizer(tmp_path / "b", own_file=True))
    assert report.outcome is Outcome.PASS


def test_another_way_to_write_merges_down_is_no_other_vocabulary(tmp_path):
    folders = [tokenizer(tmp_path / name) for name in ("a", "b")]
    for folder, merge in zip(folders, ("a b", ["a", "b"])):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ["a"], "merges": [merge]}}))
    assert compared(tmp_path / "runs", *folders).outcome is Outcome.PASS


@pytest.mark.parametrize(
    "changes, cause, evidence",
    [
        ({"template": "{{ message }}"}, "another chat template", "from character 10 on: 's }}' → ' }}'"),
        ({"vocabulary": ("a", "c")}, "another vocabulary", "'b"),
    ],
)
def test_what_differs_in_a_tokenizer_is_named(tmp_path, changes, cause, evidence):
    report = compared(tmp_path, tokenizer(tmp_path / "a", **changes), tokenizer(tmp_path / "b"))
    (finding,) = report.findings
    assert finding.cause == cause and evidence in finding.evidence


# --- axis 6: scores, listed ------------------------------------------------------------------------------------------


def scored(directory, scores) -> RunData:
    count = len(scores)
    tensors = {
        "responses": np.arange(count, dtype=np.int64)[:, None] + 5,
        "response_mask": np.ones((count, 1), np.int64),
        "token_level_scores": np.array(scores, np.float32)[:, None],
    }
    names = [f"p{i}" for i in range(count)]
    run = a_run(directory)
    write_batch(batch_path(directory, 1), BatchRecord(step=1, tensors=tensors, prompt_ids=names, samples=[0] * count))
    return run


PARTED = StageVerdict(step=1, stage="reward", outcome=Outcome.FAIL, reason="two scores for one text")


def test_responses_with_two_scores_are_listed(tmp_path):
    runs = scored(tmp_path / "a", [0.0, 1.0, 1.0]), scored(tmp_path / "b", [1.0, 1.0, 0.0])
    report = scoring.check(*runs, [PARTED])
    assert report.remarks == ("prompt p0, sample 0: 1 → 0", "prompt p2, sample 0: 0 → 1")


def test_the_list_ends_and_says_how_many_more(tmp_path):
    count = scoring.LISTED + 3
    runs = scored(tmp_path / "a", [0.0] * count), scored(tmp_path / "b", [1.0] * count)
    report = scoring.check(*runs, [PARTED])
    assert len(report.remarks) == scoring.LISTED + 1 and report.remarks[-1] == "and 3 more"


def test_text_with_two_scores_is_listed_for_verl(tmp_path):
    runs = [
        a_run(tmp_path / name, engine="verl", texts={1: [{"input": "q", "output": "The answer", "score": score}]})
        for name, score in (("a", 0.0), ("b", 1.0))
    ]
    assert scoring.check(*runs, [PARTED]).remarks == ("'The answer': 1 → 0",)


def test_a_score_that_is_no_number_is_off():
    u = float(np.finfo(np.float32).eps) / 2
    for recorded, off in ((1.0, False), (1.0 + 3 * u, False), (1.0 + 8 * u, True), (float("nan"), True)):
        assert scoring._off(recorded, 1.0) is off


# --- axis 3: cards ---------------------------------------------------------------------------------------------------


def test_an_answer_of_no_cards_is_no_pass(tmp_path):
    for verdicts, outcome in (([], Outcome.UNAVAILABLE), ([{"check": "stress/0", "outcome": "pass"}], Outcome.PASS)):
        (tmp_path / hardware.STRESS).write_text(json.dumps({"verdicts": verdicts}))
        report = hardware.check(tmp_path)
        assert report.outcome is outcome
    (tmp_path / hardware.STRESS).write_text(json.dumps({"verdicts": []}))
    report = hardware.check(tmp_path)
    assert report.reason == "stress.json names no card" and report.next_command == hardware.NEXT


# --- garbled text that verl dumped -----------------------------------------------------------------------------------


def dumped(directory, output: str) -> RunData:
    rows = [{"input": f"question {i}", "output": output, "score": 0.0} for i in range(4)]
    return a_run(directory, engine="verl", texts={1: rows})


GOOD = "First 17 + 25 is 42, then half of that is 21, so the answer is 21."


@pytest.mark.parametrize(
    "output, reason", [("the the " * 200, "repeats itself"), ("\ufffd\x00ab" * 20, "is no language"), (GOOD, None)]
)
def test_dumped_text_is_looked_at(tmp_path, output, reason):
    found = find_garbled(dumped(tmp_path / "a", output), dumped(tmp_path / "b", GOOD))
    assert (found is None) if reason is None else (reason in found.reason and found.step == 1)


def test_a_baseline_that_is_garbled_too_is_no_finding(tmp_path):
    both = [dumped(tmp_path / name, "the the " * 200) for name in ("a", "b")]
    assert find_garbled(*both) is None


# --- axis 5: first weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other, evidence", [(1.0, []), (2.0, ["1 of 2 tensors differ, model.k_scale first"])])
def test_weights_without_dimensions_are_compared(tmp_path, other, evidence):
    for name, scale in (("dut", other), ("baseline", 1.0)):
        (tmp_path / name).mkdir()
        tensors = {"model.w": torch.ones(2, 2), "model.k_scale": torch.tensor(scale)}
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    assert [f.evidence for f in structure._tensors(tmp_path / "dut", tmp_path / "baseline")] == evidence


# --- axis 5: conversion, and what the engines hold -------------------------------------------------------------------


ACTOR = "actor_rollout_ref.actor.megatron."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from alignment.models.causal_lm import CausalLM
    from alignment.models.config import preset
    from alignment.weights.checkpoint import save_checkpoint

    config = preset("tiny-deepseek")
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    save_checkpoint(folder, config, CausalLM(config).init_weights(1).state_dict())
    return folder


def structured(tmp_path, checkpoint, **sizes: int):
    config = {"engine.train": "megatron", "actor_rollout_ref.model.path": str(checkpoint)}
    config |= {ACTOR + name: size for name, size in sizes.items()}
    runs = [a_run(tmp_path / name, **config) for name in ("dut", "baseline")]
    return structure.check(*runs, [], None)


SIZES = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


@pytest.mark.parametrize("whole, how", [(structure.WHOLE, "bit for bit"), (0, "in names and shapes")])
def test_a_checkpoint_comes_back_from_the_layout_of_the_run(tmp_path, checkpoint, monkeypatch, whole, how):
    monkeypatch.setattr(structure, "WHOLE", whole)
    report = structured(tmp_path, checkpoint, **SIZES)
    assert report.outcome is Outcome.PASS and f"tensors come back {how} from the parts of 4 ranks" in report.reason


def test_a_conversion_that_loses_a_tensor_is_named(tmp_path, checkpoint, monkeypatch):
    """Gate and up projection are joined the wrong way round."""
    from alignment.weights import megatron_layout

    honest = megatron_layout.unshard

    def swapped(parameter, shards):
        found = list(honest(parameter, shards))
        names = [name for name, _ in found][::-1]
        yield from zip(names, (tensor for _, tensor in found))

    monkeypatch.setattr(megatron_layout, "unshard", swapped)
    report = structured(tmp_path, checkpoint, **SIZES)
    assert report.findings[0].cause == "the conversion to the layout of the run"
    assert "proj.weight does not come back" in report.findings[0].evidence


def test_sizes_that_do_not_fit_the_model_are_named(tmp_path, checkpoint):
    report = structured(tmp_path, checkpoint, tensor_model_parallel_size=3)
    assert report.findings[0].cause == "the conversion to the layout of the run"
    assert "a divisor of num_attention_heads" in report.findings[0].evidence


@pytest.mark.parametrize("outcome", [Outcome.PASS, Outcome.FAIL])
def test_what_the_engines_hold_is_read(tmp_path, checkpoint, outcome):
    verdict = Verdict(
        check="weight_sync.derived", layer="e2e", stage="weight_sync", subject="golden", device="npu",
        outcome=outcome, reason="w_uv is not that of kv_b_proj",
    )  # fmt: skip
    (tmp_path / "dut").mkdir()
    (tmp_path / "dut" / structure.WEIGHTS).write_text(json.dumps({"verdicts": [verdict.to_dict()]}))
    report = structured(tmp_path, checkpoint)
    assert report.outcome is outcome
    if outcome is Outcome.FAIL:
        assert report.findings[0].cause == "what the engine holds: weight_sync.derived"
        assert "w_uv is not that of kv_b_proj" in report.findings[0].evidence
    else:
        assert "1 checks of what the engines hold after a sync pass" in report.reason
        assert report.next_command == ""


def test_without_a_look_at_the_engines_the_command_is_given(tmp_path, checkpoint):
    assert "alignment run --only weight_sync --json > RUN/weights.json" in structured(tmp_path, checkpoint).next_command


# --- what to run next ------------------------------------------------------------------------------------------------


def test_the_overrides_of_a_field_are_what_yaml_reads_back():
    config = {"a": 0.001, "b": None, "c": "cosine", "d": "1", "e": ["x", "y"], "f": True, "g": "two words"}
    told = overrides(config, [*config, "absent"])
    assert told == "a=0.001 b=null c=cosine 'd=\"1\"' 'e=[\"x\", \"y\"]' f=true 'g=two words'"
    read = (word.partition("=") for word in shlex.split(told))
    assert {name: yaml.safe_load(value) for name, _, value in read} == config


def test_fields_go_back_to_the_baselines_values_the_strongest_first(tmp_path):
    one = a_run(tmp_path / "a", **{"data.seed": 2, "actor_rollout_ref.actor.optim.lr": 0.1, "only.here": 1})
    other = a_run(tmp_path / "b", **{"data.seed": 1, "actor_rollout_ref.actor.optim.lr": 0.2})
    told = hyperparameters.check(one, other).next_command
    assert told == "run again with actor_rollout_ref.actor.optim.lr=0.2 data.seed=1"
    alone = a_run(tmp_path / "c", **{**other.config, "only.here": 1})
    assert hyperparameters.check(alone, other).next_command == (
        "run again with the value of the baseline for each field above"
    )
    assert hyperparameters.check(other, other).next_command == ""
