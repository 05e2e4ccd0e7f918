"""Axis 4 and the communication test: the command it gives, and the answer it reads."""

from __future__ import annotations

import json

import pytest

from alignment.diagnose.axes import software
from alignment.diagnose.run_data import RunData
from alignment.errors import InputError
from alignment.numerics.verdict import Outcome, Verdict

RANKS = {"trainer.n_gpus_per_node": 2, "trainer.nnodes": 1}


def a_run(directory, *, engine="alignment", **config) -> RunData:
    return RunData(directory, engine, "npu", {1: {"actor/loss": 0.5}}, {**RANKS, **config})


def test_the_ready_command_of_a_run_of_ours(tmp_path):
    report = software.check(a_run(tmp_path), a_run(tmp_path), [], explained=False)
    assert report.next_command.endswith(
        f"alignment communication --run {tmp_path} --json > {tmp_path / 'communication.json'}"
    )


def test_the_ready_command_of_verl_has_its_layout(tmp_path):
    actor = "actor_rollout_ref.actor."
    config = {
        f"{actor}strategy": "megatron",
        f"{actor}megatron.tensor_model_parallel_size": 2,
        f"{actor}megatron.pipeline_model_parallel_size": 1,
        "actor_rollout_ref.model.path": "models/moonlight",
    }
    found = software.communication_command(a_run(tmp_path, engine="verl", **config))
    assert found == (
        "alignment communication trainer.n_gpus_per_node=2 engine.train=megatron "
        "actor_rollout_ref.model.path=models/moonlight actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
        f"--json > {tmp_path / 'communication.json'}"
    )


def test_one_rank_has_no_communication(tmp_path):
    report = software.check(a_run(tmp_path, **{"trainer.n_gpus_per_node": 1}), a_run(tmp_path), [], explained=False)
    assert "alignment communication" not in report.next_command


def answer(directory, *outcomes: str) -> None:
    verdicts = [
        Verdict(
            check=f"communication/{name}", layer="layer", stage="update_actor", subject="fsdp", device="npu",
            outcome=Outcome(outcome), reason=f"what {name} says",
        ).to_dict()
        for name, outcome in zip(("loss", "grad_norm", "collectives"), outcomes)
    ]  # fmt: skip
    (directory / software.TESTED).write_text(json.dumps({"verdicts": verdicts}))


def test_a_conviction_is_a_finding_with_the_collective_first(tmp_path):
    answer(tmp_path, "pass", "fail", "fail")
    report = software.check(a_run(tmp_path), a_run(tmp_path), [], explained=False)
    assert report.outcome is Outcome.FAIL
    assert [finding.evidence for finding in report.findings] == ["what collectives says", "what grad_norm says"]
    assert {finding.cause for finding in report.findings} == {software.CONVICTED}


def test_a_passed_test_is_told_and_not_asked_for_again(tmp_path):
    answer(tmp_path, "pass", "pass", "pass")
    report = software.check(a_run(tmp_path), a_run(tmp_path), [], explained=False)
    assert report.outcome is Outcome.PASS
    assert "communication was tested: loss, grad_norm, collectives" in report.reason
    assert "alignment communication" not in report.next_command


def test_a_file_that_is_no_answer_is_refused(tmp_path):
    (tmp_path / software.TESTED).write_text(json.dumps({"verdicts": ["no"]}))
    with pytest.raises(InputError, match="not an answer of alignment communication"):
        software.check(a_run(tmp_path), a_run(tmp_path), [], explained=False)
