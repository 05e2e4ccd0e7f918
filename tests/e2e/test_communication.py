"""One process against ranks on Ray: aligned ones, a collective that is wrong, and one that is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import dapo_world
import pytest
import torch
from typer.testing import CliRunner

from alignment.cli import app
from alignment.diagnose.collective_record import RECORD, Call, CollectiveRecorder
from alignment.diagnose.communication import LIMIT, one_against_many
from alignment.diagnose.triage import triage
from alignment.errors import InputError
from alignment.rl.executor import InProcessExecutor, LocalGroup
from alignment.rl.run import located

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "diagnose"))
import collective_faults  # noqa: E402

FAULTS = Path(collective_faults.__file__)


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """The folder of a run: its configuration is what the command reads."""
    settings = located(dapo_world.config(world))
    folder = tmp_path_factory.mktemp("communication")
    (folder / "config.json").write_text(json.dumps(settings.to_dict()))
    return folder


def told(run: Path, into: Path, *arguments: str) -> tuple[int, dict]:
    made = CliRunner().invoke(
        app, ["communication", "--run", str(run), "--device", "cpu", "--run-dir", str(into), "--json", *arguments]
    )
    assert made.stdout, made.exception
    return made.exit_code, json.loads(made.stdout)


def outcomes(document: dict) -> dict[str, str]:
    return {v["check"].removeprefix("communication/"): v["outcome"] for v in document["verdicts"]}


def test_sharded_ranks_are_aligned(run, ray_cluster, tmp_path):
    code, found = told(run, tmp_path / "a", "engine.train=fsdp", "actor_rollout_ref.actor.strategy=fsdp")
    assert outcomes(found) == {"loss": "pass", "grad_norm": "pass", "collectives": "pass"} and code == 0
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= found["replay"]["judged"].keys()
    assert found["replay"]["unjudged"] == {} and found["replay"]["elements"] > 0
    noise = found["expected_reassociation"]
    for name in ("loss", "grad_norm"):
        assert 0 < noise[name] < LIMIT and found["differences"][name] < LIMIT
    # Nothing is left that a later engine of this process would take for its own.
    assert not torch.distributed.is_initialized()


def test_a_lost_contribution_is_convicted_and_named_by_triage(run, ray_cluster, tmp_path):
    code, found = told(run, tmp_path / "a", "--fault", f"{FAULTS}:lost_contribution")
    assert code == 1 and outcomes(found)["collectives"] == outcomes(found)["grad_norm"] == "fail"
    first = found["replay"]["wrong"][0]
    assert (first["op"], first["index"], first["cause"]) == ("all_reduce", 0, "the contribution of rank 1 is lost")
    folders = []
    for name in ("dut", "baseline"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "run.json").write_text(json.dumps({"device": "cpu"}))
        (folders[-1] / "metrics.jsonl").write_text(json.dumps({"step": 1, "actor/loss": 0.5}) + "\n")
    (folders[0] / "communication.json").write_text(json.dumps(found))
    cause = triage(*folders).causes[0]
    assert (cause.axis, cause.cause) == ("software stack", "communication is wrong")
    assert "all_reduce of the group of ranks 0, 1, call 0, on rank 0" in cause.evidence


def test_a_missing_collective_is_convicted_by_the_gradient(run, ray_cluster, tmp_path):
    """Every collective that is there is right: the gradient says that one is not there. As people see it."""
    asked = ["--run", str(run), "--device", "cpu", "--run-dir", str(tmp_path / "a")]
    shown = CliRunner().invoke(app, ["communication", *asked, "--fault", f"{FAULTS}:no_reduction"])
    assert shown.exit_code == 1, shown.output
    assert "MISALIGNED: 1 fail, 1 inconclusive, 1 pass" in shown.output
    assert "communication/grad_norm: communication: " in shown.output and "changed most" in shown.output
    assert "on 2 ranks" in shown.output and "re-association is expected to make" in shown.output
    assert "every collective gave what it was asked for: look for one that is missing" in shown.output
    assert "communication/collectives: no collective was recorded" in shown.output


def test_one_rank_and_rows_that_do_not_divide_are_refused(run, world, tmp_path):
    settings = located(dapo_world.config(world))
    asked = {"executor": InProcessExecutor(), "directory": tmp_path, "device": "cpu"}
    with pytest.raises(InputError, match="communication takes two"):
        one_against_many(settings, **asked)
    made = CliRunner().invoke(app, ["communication", "--run", str(run), "--device", "cpu", "--rows", "5"])
    assert isinstance(made.exception, InputError) and "the rows do not divide" in str(made.exception)


class Hanging(InProcessExecutor):
    """Ranks of which one never comes: what was recorded until the time was up is all there is."""

    def start(self, setting, placement):
        where = Path(json.loads(setting.observers[0].argument)["directory"])
        recorder = CollectiveRecorder()
        recorder.calls = [Call(op="all_reduce", ranks=(0, 1), group="dp", rank=0, reduce="SUM")]
        recorder.save(where / RECORD.format(rank=0))
        CollectiveRecorder().save(where / RECORD.format(rank=1))

        class Group(LocalGroup):
            def call(self, stage, batch=None, **arguments):
                raise RuntimeError("timed out")

        return {"actor": Group(None, ("actor",))}


def test_a_step_that_does_not_end_names_the_rank_that_stayed_away(world, tmp_path):
    import dataclasses

    settings = located(dapo_world.config(world))
    settings = dataclasses.replace(settings, trainer=dataclasses.replace(settings.trainer, n_gpus_per_node=2))
    with pytest.raises(InputError, match="the ranks did not finish the step") as error:
        one_against_many(settings, executor=Hanging(), directory=tmp_path, device="cpu")
    assert "all_reduce of the dp of ranks 0, 1, call 0, on rank 1: the rank did not take part" in str(error.value)
