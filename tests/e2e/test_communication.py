"""One process against ranks on Ray: aligned ones, a collective that is wrong, and one that is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import dapo_world
import gkd_world
import pytest
import torch
from typer.testing import CliRunner

from alignment.cli import app
from alignment.diagnose.collective_record import RECORD, Call, CollectiveRecorder
from alignment.diagnose.communication import LIMIT, one_against_many
from alignment.diagnose.trained_role import roles_of
from alignment.diagnose.triage import triage
from alignment.errors import InputError
from alignment.rl.distill_loss import active_positions
from alignment.rl.executor import InProcessExecutor, LocalGroup
from alignment.rl.gkd_run import run_gkd
from alignment.rl.run import located, run_dapo
from alignment.weights.checkpoint import load_config as load_model_config

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
    page = into / "report.html"
    assert json.loads(made.stdout)["page"] == str(page)
    assert ("MISALIGNED" in page.read_text()) is (made.exit_code == 1) and (into / "verdicts.json").is_file()
    return made.exit_code, json.loads(made.stdout)


def outcomes(document: dict) -> dict[str, str]:
    return {v["check"].removeprefix("communication/"): v["outcome"] for v in document["verdicts"]}


def test_sharded_ranks_are_aligned(run, ray_cluster, tmp_path):
    before = torch.distributed.is_initialized()
    code, found = told(run, tmp_path / "a", "engine.train=fsdp", "actor_rollout_ref.actor.strategy=fsdp")
    assert outcomes(found) == {"loss": "pass", "grad_norm": "pass", "collectives": "pass"} and code == 0
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= found["replay"]["judged"].keys()
    assert found["replay"]["unjudged"] == {} and found["replay"]["elements"] > 0
    noise = found["expected_reassociation"]
    for name in ("loss", "grad_norm"):
        assert 0 < noise[name] < LIMIT and found["differences"][name] < LIMIT
    # Nothing is left that a later engine of this process would take for its own.
    assert torch.distributed.is_initialized() == before


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


def test_a_ppo_run_is_tested_with_its_critic(world, ray_cluster, tmp_path):
    """The run itself is made: its folder is what the command takes."""
    changes = {"algorithm__adv_estimator": "gae", "trainer__total_training_steps": 1}
    run_dapo(dapo_world.config(world, **changes), run_dir=tmp_path / "run")
    code, found = told(tmp_path / "run", tmp_path / "a")
    names = {f"{role}{name}" for role in ("", "critic/") for name in ("loss", "grad_norm", "collectives")}
    assert outcomes(found) == dict.fromkeys(names, "pass") and code == 0
    assert (found["role"], found["critic"]["role"]) == ("actor", "critic")
    for told_of in (found, found["critic"]):
        assert told_of["replay"]["judged"] == {"all_reduce": 1} and 0 < told_of["one"]["grad_norms"][0]
    # A critic has values where a policy has a vocabulary: another gradient was compared.
    assert found["critic"]["one"]["parameters"].keys() != found["one"]["parameters"].keys()


@pytest.fixture(scope="module")
def distilled(world, tmp_path_factory):
    """The folder of a distillation of one step, run without Ray."""
    root = tmp_path_factory.mktemp("distilled")
    gkd_world.build(root / "gkd", world)
    changes = {"trainer__total_training_steps": 1, "gkd__lmbda": 0.0, "gkd__sft_alpha": 0.1}
    run_gkd(gkd_world.config(world, root / "gkd", **changes), run_dir=root / "run")
    return root / "run"


def test_a_distillation_is_tested_with_its_student(distilled, ray_cluster, tmp_path):
    code, found = told(distilled, tmp_path / "a")
    assert outcomes(found) == dict.fromkeys(("student/loss", "student/grad_norm", "student/collectives"), "pass")
    assert code == 0 and found["role"] == "student" and found["replay"]["judged"] == {"all_reduce": 1}
    assert 0 < found["one"]["loss"] and 0 < found["one"]["grad_norms"][0]
    assert {v["stage"] for v in found["verdicts"]} == {"update_student"}


def test_a_lost_contribution_to_a_student_is_convicted(distilled, ray_cluster, tmp_path):
    code, found = told(distilled, tmp_path / "a", "--fault", f"{FAULTS}:lost_contribution")
    assert code == 1 and outcomes(found)["student/collectives"] == outcomes(found)["student/grad_norm"] == "fail"
    assert found["replay"]["wrong"][0]["cause"] == "the contribution of rank 1 is lost"


def refused(run: Path, *arguments: str) -> str:
    made = CliRunner().invoke(app, ["communication", "--run", str(run), "--device", "cpu", *arguments])
    assert isinstance(made.exception, InputError), made.exception
    return str(made.exception)


def test_runs_that_cannot_be_taken_are_refused_with_what_is_missing(distilled, world, tmp_path):
    assert f"there is no such run; expected {tmp_path / 'none' / 'config.json'}" in refused(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "the run has no configuration of ours, from which the step is made" in refused(tmp_path / "empty")
    assert "actor_rollout_ref.model.path: the model of the run is not there" in refused(
        distilled, f"actor_rollout_ref.model.path={tmp_path / 'gone'}"
    )
    gone = refused(distilled, f"gkd.teacher_model={tmp_path / 'gone'}")
    assert "gkd.teacher_model: the model of the run is not there" in gone and "gkd.teacher_model=CHECKPOINT" in gone
    own = refused(distilled, "gkd.lora.rank=2", "gkd.teacher_model=null")
    assert "a student is its own teacher without its adapter: there is no gradient to compare" in own


def test_the_run_of_another_tool_is_refused_with_the_test_of_its_layout(tmp_path):
    run = tmp_path / "verl"
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "config.yaml").write_text(
        "trainer: {n_gpus_per_node: 4, nnodes: 2, device: npu, total_training_steps: 1}\n"
        "actor_rollout_ref: {model: {path: MODEL}, actor: {strategy: megatron, megatron: {tensor_model_parallel_size: 2}}}\n"
    )
    (run / "main.log").write_text("step:1 - actor/pg_loss:0.5 - actor/grad_norm:0.1\n")
    told_of = refused(run)
    assert "the run has no configuration of ours" in told_of
    assert "alignment communication trainer.n_gpus_per_node=8 engine.train=megatron" in told_of
    assert "tensor_model_parallel_size=2" in told_of


def test_tables_of_teacher_replicas_are_drawn(world, tmp_path):
    """Nobody is asked: tables cover the active tokens, are probabilities, and give the student a gradient."""
    gkd_world.build(tmp_path / "gkd", world)
    changes = {"gkd__lmbda": 1.0, "gkd__teacher_replicas": 1, "gkd__gkd_logits_topk": 5, "trainer__n_gpus_per_node": 2}
    settings = gkd_world.config(world, tmp_path / "gkd", **changes)
    (role,) = roles_of(settings)
    settings = role.comparable(settings)
    model = load_model_config(settings.actor_rollout_ref.model.path)
    batch = role.draw(settings, model, rows=8)
    tables, active = batch["teacher_topk_log_probs"], active_positions(batch["labels"])
    assert tables.shape == (*active.shape, 5) and torch.equal(torch.isfinite(tables).all(-1), active)
    assert (tables[active].exp().sum(-1) < 1).all() and (tables[active].diff(dim=-1) <= 0).all()
    with pytest.raises(InputError, match="the ranks did not finish the step"):
        one_against_many(settings, executor=Hanging(), directory=tmp_path / "a", device="cpu", role=role)


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
