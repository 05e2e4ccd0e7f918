"""What a page says of a replay, an ablation, a comparison and a triage: the verdict first, and what it rests on."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import answer_samples
import numpy as np
import pytest
from answer_samples import DOCUMENTS, SEEDS, STEPS, captured, finding, stage, write_answers
from page_reader import HOSTILE, parsed
from typer.testing import CliRunner

from alignment.cli.report import leave_answer, leave_page
from alignment.diagnose.axes import AXES, AxisReport
from alignment.diagnose.triage import Triage
from alignment.errors import InputError
from alignment.files import write_json
from alignment.numerics.verdict import Outcome
from alignment.report.ablation_page import ablation_part
from alignment.report.audit_page import audit_part
from alignment.report.comparison_page import comparison_part
from alignment.report.page import ANSWERS, _part, gather, render, write_answer, write_page
from alignment.report.replay_page import replay_part
from alignment.report.run_directory import write_verdicts
from alignment.report.triage_page import triage_part

HERE = "an answer"


def text_of(page: Path) -> str:
    return " ".join(parsed(page).text)


def test_a_replay_is_judged_metric_by_metric_and_the_verdict_comes_first(tmp_path):
    within = replay_part(answer_samples.replay(), HERE)
    assert (within["outcome"], within["headline"]) == (
        "pass", f"ALIGNED: {STEPS} replayed steps on {HOSTILE} stay within their bounds"
    )  # fmt: skip
    assert [drift["outcome"] for drift in within["drifts"]] == ["pass", "pass"]
    far = replay_part(answer_samples.replay(off=2.0**-20), HERE)
    # The loss is within the field's bar and outside its envelope.
    assert far["outcome"] == "fail"
    assert far["headline"] == (
        f"MISALIGNED: actor/loss of {STEPS} replayed steps on {HOSTILE} is off by 7.34e-08, envelope 2.15e-10"
    )
    alone = replay_part(answer_samples.replay(noise=()), HERE)
    assert alone["outcome"] == "inconclusive"
    assert alone["headline"].endswith("and no noise was measured to judge it by")
    assert [drift["envelope"] for drift in alone["drifts"]] == ["not measured"] * 2
    assert [chart["band"] for chart in alone["charts"]] == [None] * 6
    write_json(tmp_path / "replay.json", answer_samples.replay(off=2.0**-20))
    text = text_of(write_page([tmp_path], tmp_path / "page.html"))
    assert text.index("MISALIGNED: actor/loss") < text.index("noise of each perturbed replay")


def test_a_drift_is_drawn_so_that_its_last_value_is_the_one_that_is_judged():
    document = answer_samples.replay()
    drift, so_far, both = replay_part(document, HERE)["charts"][:3]
    (line,), (error,), (values,) = (chart["metrics"].values() for chart in (drift, so_far, both))
    assert sum(line) / STEPS == pytest.approx(document["drifts"][0]["error"])
    assert error[-1] == document["drifts"][0]["error"]
    assert so_far["band"]["high"][-1] == document["drifts"][0]["envelope"]
    low, high = (drift["band"][edge] for edge in ("low", "high"))
    assert all(a < b for a, b in zip(low, high))
    assert (drift["log"], so_far["log"], both["log"]) == (True, True, False)
    assert [a - b for a, b in zip(values, both["beside"]["values"])] == [0.0, 2.0**-30] * (STEPS // 2)


def test_a_bar_that_noise_drowns_is_said_to_be(tmp_path):
    said = "the envelope decides"
    for document, there in ((answer_samples.replay(), False), (answer_samples.replay(noise=(1.0,)), True)):
        write_json(tmp_path / "replay.json", document)
        assert (said in text_of(write_page([tmp_path], tmp_path / "page.html"))) is there


def test_the_trainings_of_a_replay_are_not_drawn_one_by_one(tmp_path):
    """Two thousand steps of five runs are more than a page holds; what is asked is the drift between them."""
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / "metrics.jsonl").write_text(json.dumps({"step": 1, "actor/loss": 1.0}) + "\n")
    assert len(gather(tmp_path)["trainings"]) == 1
    write_json(tmp_path / "replay.json", answer_samples.replay())
    assert gather(tmp_path)["trainings"] == []


def test_the_factor_that_moves_the_curve_comes_first(tmp_path):
    document = answer_samples.ablation(moved={"clip": 0.0, "little": 0.5, "scale": -2.0})
    part = ablation_part(document, HERE)
    assert [(effect["name"], effect["word"]) for effect in part["effects"]] == [
        ("scale", "decided"), ("little", "decided"), ("clip", "none")
    ]  # fmt: skip
    assert part["outcome"] == "fail"
    assert part["headline"] == f"DECIDED: scale moves {HOSTILE} by -1.98 (95 % interval -2.005 … -1.955)"
    assert part["effects"][0]["changes"] == ["scale=1"] and part["effects"][0]["other_prompts"] == 2
    assert [chart["name"] for chart in part["charts"]] == [f"{HOSTILE} with {n}" for n in ("scale", "little", "clip")]
    arms = part["charts"][0]
    assert arms["beside"]["values"] == [11.0, 12.0, 13.0]
    assert (arms["band"]["low"], arms["band"]["high"]) == ([10.0, 11.0, 12.0], [12.0, 13.0, 14.0])
    write_json(tmp_path / "ablation.json", document)
    text = text_of(write_page([tmp_path], tmp_path / "page.html"))
    assert "other prompts than the base from step 2 on" in text and "scale=1" in text


def test_settings_stand_beside_the_base_of_the_same_seed():
    heat = ablation_part(answer_samples.ablation(), HERE)["heat"]
    assert heat["seeds"] == list(SEEDS)
    rows = {row["setting"]: row for row in heat["rows"]}
    assert [cell["text"] for cell in rows["base"]["cells"]] == ["11", "12", "13"]
    assert [cell["text"] for cell in rows["scale"]["cells"]] == ["9.01 (-1.99)", "10.02 (-1.98)", "11.03 (-1.97)"]
    assert rows["scale"]["cells"][0]["used"] == 1.0
    assert (rows["base"]["outcome"], rows["scale"]["outcome"], rows[HOSTILE]["outcome"]) == ("", "fail", "pass")


@pytest.mark.parametrize(
    ("moved", "seeds", "outcome", "said"),
    [
        ({"a": 0.0}, SEEDS, "pass", f"NO EFFECT: {HOSTILE} is the same in every setting and seed"),
        ({"a": -0.02}, SEEDS, "inconclusive", f"NOT DECIDED: every interval of an effect on {HOSTILE} has zero in it"),
        ({"a": 1.0}, (1,), "inconclusive", f"NOT DECIDED: one seed gives no interval; a moves {HOSTILE} by +1.01"),
    ],
)
def test_what_is_not_decided_convicts_nobody(moved, seeds, outcome, said):
    part = ablation_part(answer_samples.ablation(moved=moved, seeds=seeds), HERE)
    assert (part["outcome"], part["headline"]) == (outcome, said)
    assert (part["charts"][0]["band"] is None) is (len(seeds) == 1)


def test_a_comparison_is_a_table_of_stages_and_steps_under_its_first_divergence(tmp_path):
    part = comparison_part(answer_samples.comparison(), HERE)
    assert part["outcome"] == "fail"
    assert part["headline"] == f"MISALIGNED: first in step 2 reward: {HOSTILE}"
    assert [first["name"] for first in part["firsts"]] == ["step 2 reward", "captures, step 2 train"]
    assert [grid["title"] for grid in part["grids"]] == ["Stages of both runs", "Captures"]
    of_runs, of_captures = part["firsts"]
    assert of_runs["path"] == ["reward", "step 2", HOSTILE]
    assert of_runs["facts"] == [("how far", f"{HOSTILE} = 3 nats, bound 1 (3 × the same of the first run)")]
    assert of_captures["path"] == ["train", "layers", "1", "mlp", "output"]
    assert ("how far", "relative_l2 0.5, 5e+05 times its limit") in of_captures["facts"]
    assert of_captures["gaps"] == [f"module {HOSTILE} only in golden"]
    assert [row["size"] for row in of_captures["findings"]] == ["relative_l2 0.5, 5e+05 times its limit", "not finite"]
    runs, captures = part["grids"]
    assert runs["steps"] == [1, 2] and list(runs["rows"]) == ["reward", "update_actor"]
    assert {step: cell["outcome"] for step, cell in runs["rows"]["reward"].items()} == {1: "pass", 2: "fail"}
    assert list(runs["rows"]["update_actor"]) == [1]
    assert captures["steps"] == [2]
    page = write_answer("b against a", tmp_path / "page.html", comparison=answer_samples.comparison())
    text = text_of(page)
    assert text.index("MISALIGNED") < text.index("first divergence") < text.index("step 1") < text.index("every stage")
    assert "Where it comes from" not in text


def test_of_several_ranks_the_worst_stands_in_the_table():
    outcomes = (Outcome.PASS, Outcome.FAIL, Outcome.PASS)
    ranks = [captured(1, "train", outcome, rank=rank) for rank, outcome in enumerate(outcomes)]
    (grid,) = comparison_part({"stages": ranks}, HERE)["grids"]
    assert grid["rows"]["train"] == {1: {"outcome": "fail", "reason": f"rank 1: {HOSTILE}"}}


def test_a_failure_comes_before_what_cannot_be_told_and_a_gradient_is_drawn():
    open_, backward = captured(1, "train", Outcome.INCONCLUSIVE), finding(direction="backward", quantity="grad_weight")
    stages = [open_, captured(2, "train", Outcome.FAIL, first_backward=backward, findings=[backward] * 50)]
    (first,) = comparison_part({"stages": stages}, HERE)["firsts"]
    assert first["path"] == ["train", "layers", "1", "mlp", "grad_weight"]
    assert (len(first["findings"]), first["more"]) == (40, 10)
    alone = comparison_part({"stages": [open_]}, HERE)
    assert (alone["outcome"], alone["firsts"][0]["name"]) == ("inconclusive", "step 1 train")
    assert alone["headline"] == f"INCONCLUSIVE: first in step 1 train: {HOSTILE}"


def test_aligned_sides_and_a_side_that_lacks_a_step():
    equal = {"stages": [stage(1, "reward", Outcome.PASS)]}
    assert comparison_part(equal, HERE)["headline"] == "ALIGNED: 1 stages"
    lacking = comparison_part({**equal, "missing": ["step 2 only in golden"]}, HERE)
    assert (lacking["outcome"], lacking["headline"]) == ("fail", "MISALIGNED: step 2 only in golden")
    assert comparison_part({"stages": []}, HERE)["headline"] == "NOT CARRIED OUT: no stage was compared"


def test_a_triage_names_its_cause_first_and_what_to_run_next(tmp_path):
    document = answer_samples.triage()
    part = triage_part(document, HERE)
    assert (part["outcome"], part["headline"]) == ("fail", f"MISALIGNED: hyper-parameters: temperature {HOSTILE}")
    text = text_of(write_answer("npu against gpu", tmp_path / "page.html", triage=document))
    places = ["MISALIGNED", "1. hyper-parameters", "KL spike at step 2", "First divergence: step 3", "alignment stress"]
    assert [text.index(place) for place in places] == sorted(text.index(place) for place in places)
    assert text.index("alignment stress") < text.rindex("alignment dapo one")
    assert "npu, compared with gpu" in text


@pytest.mark.parametrize(
    ("change", "outcome", "said"),
    [
        ({"causes": []}, "fail", "MISALIGNED: KL spike at step 2"),
        ({"causes": [], "failure_modes": []}, "fail", "MISALIGNED: hyper-parameters: temperature"),
        (
            {"causes": [], "failure_modes": [], "axes": [{"axis": "data", "outcome": "pass", "reason": "same"}]},
            "fail", f"MISALIGNED: step 3 · rollout: fail: {HOSTILE}",
        ),
        ({"axes": [{"axis": "data", "outcome": "pass", "reason": "same"}]}, "fail", None),
    ],
)  # fmt: skip
def test_anything_a_triage_finds_is_its_headline(change, outcome, said):
    part = triage_part({**answer_samples.triage(), **change}, HERE)
    assert part["outcome"] == outcome and said in (None, part["headline"])


def test_a_triage_that_finds_nothing_is_aligned_where_something_was_compared():
    empty = {"causes": [], "failure_modes": [], "first_divergence": None}
    same = triage_part({**empty, "exit_code": 0, "axes": [{"axis": "data", "outcome": "pass", "reason": "same"}]}, HERE)
    assert (same["outcome"], same["headline"]) == (
        "pass", "ALIGNED: 1 of 1 axes were compared, and none finds anything"
    )  # fmt: skip
    unseen = [{"axis": "data", "outcome": "unavailable", "reason": "no batches"}]
    nothing = triage_part({**empty, "exit_code": 2, "axes": unseen}, HERE)
    assert nothing["headline"] == "NOT CARRIED OUT: no axis had anything to compare"


def test_an_audit_passes_where_all_is_caught_and_nothing_cried_wolf(tmp_path):
    for document, outcome, said in (
        (answer_samples.audit(), "pass", "PASSED: 1 of 1 defects caught, 0 false alarms"),
        (answer_samples.audit(check=""), "fail", "NOT PASSED: 0 of 1 defects caught, 0 false alarms"),
        (answer_samples.audit(alarms=2), "fail", "NOT PASSED: 1 of 1 defects caught, 2 false alarms"),
        (
            {**answer_samples.audit(), "clean": ["rope: off"]}, "fail",
            "NOT PASSED: 1 of 1 defects caught, 0 false alarms, 1 findings without a fault",
        ),
    ):  # fmt: skip
        part = audit_part(document, HERE)
        assert (part["outcome"], part["headline"]) == (outcome, said)
    text = text_of(write_answer("audit of one", tmp_path / "page.html", audit=answer_samples.audit()))
    assert "PASSED: 1 of 1" in text and "1 faults" in text and "router" in text


def test_a_run_with_verdicts_keeps_its_own_headline_and_one_without_takes_the_answers(tmp_path):
    write_answers(tmp_path)
    assert gather(tmp_path)["headline"].startswith("ALIGNED: 12 replayed steps")
    write_verdicts(tmp_path, [])
    assert gather(tmp_path)["headline"].startswith("ALIGNED: 12 replayed steps")
    (tmp_path / "replay.json").unlink()
    assert gather(tmp_path)["headline"].startswith("DECIDED: scale")
    assert gather(tmp_path)["next"] == ["alignment dapo one"]


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("replay", {"steps": "many"}, "alignment replay --json writes.*expected steps"),
        ("replay", {"drifts": []}, "expected the drift of a metric"),
        ("replay", {"drifts": [{"metric": "actor/loss"}]}, "expected error, noise, worst_step.* in every row"),
        ("replay", {"curves": [{"metric": "actor/loss"}]}, "expected steps, reference"),
        ("ablation", {"effects": "none"}, "alignment ablate --json writes.*expected effects"),
        ("ablation", {"levels": [{"seed": 1}]}, "expected factors, level in every row"),
        ("comparison", {"stages": [{"stage": "a", "outcome": "maybe", "reason": ""}]}, "an outcome of fail, error"),
        ("comparison", {"stages": [captured(1, "a", Outcome.PASS, first_forward={"module": 1})]}, "module and quant"),
        ("comparison", {"stages": [captured([1], "a", Outcome.PASS)]}, "a number as the step"),
        ("triage", {"causes": [{"axis": "data"}]}, "expected cause, evidence in every row"),
        ("audit", {"matrix": [{"fault": "a"}]}, "alignment audit --json writes.*expected caught in every row"),
        ("triage", {"first_divergence": 3}, "expected first_divergence"),
    ],
)
def test_an_answer_of_another_shape_is_named(tmp_path, name, change, problem):
    write_json(tmp_path / f"{name}.json", {**DOCUMENTS[name](), **change})
    with pytest.raises(InputError, match=f"(?s){name}.json.*{problem}"):
        write_page([tmp_path], tmp_path / "page.html")


def test_a_series_of_another_length_is_named(tmp_path):
    document = answer_samples.replay()
    document["curves"][0]["drift"] = document["curves"][0]["drift"][1:]
    with pytest.raises(InputError, match="12 values, one per step, in every series of actor/loss"):
        replay_part(document, HERE)


def test_an_answer_stands_without_its_page(tmp_path, capsys):
    target = tmp_path / "page.html"
    assert leave_answer(None, "b against a", triage=answer_samples.triage()) is None
    assert leave_answer(target, "b against a", triage=answer_samples.triage()) == target and target.is_file()
    assert capsys.readouterr() == ("", "")
    (tmp_path / "in the way").mkdir()
    assert leave_answer(tmp_path / "in the way", "b against a", triage=answer_samples.triage()) is None
    out, told = capsys.readouterr()
    assert out == "" and told.startswith("the page was not written: ")


def test_a_run_leaves_its_answer_before_its_page(tmp_path):
    page = leave_page(tmp_path, baselines=tmp_path / "none", answers={"replay.json": answer_samples.replay()})
    assert page == tmp_path / "report.html" and json.loads((tmp_path / "replay.json").read_text())["steps"] == STEPS


def test_triage_writes_its_page_where_one_is_asked_for(tmp_path, monkeypatch):
    from alignment.cli import app
    from alignment.diagnose import triage as module

    axis = AxisReport(axis=AXES[1], outcome=Outcome.PASS, reason="the same prompts")
    found = Triage(dut=Path("npu"), baseline=Path("gpu"), axes=(axis,), causes=(), modes=(), first=None)
    monkeypatch.setattr(module, "triage", lambda *runs, **options: found)
    page = tmp_path / "page.html"
    silent = CliRunner().invoke(app, ["triage", "npu", "gpu"])
    assert silent.exit_code == 0 and "as a page" not in silent.stdout and not page.exists()
    shown = CliRunner().invoke(app, ["triage", "npu", "gpu", "--html", str(page)])
    assert shown.exit_code == 0 and shown.stdout.endswith(f"as a page: {page}\n")
    assert "ALIGNED: 1 of 1 axes were compared" in text_of(page)
    page.unlink()
    document = CliRunner().invoke(app, ["triage", "npu", "gpu", "--html", str(page), "--json"])
    assert json.loads(document.stdout)["dut"] == "npu" and page.is_file()


def record(directory: Path, *, scale: float = 1.0) -> Path:
    """A capture as a folder of tensors: what a layer made."""
    directory.mkdir()
    np.save(directory / "layer.npy", scale * np.arange(1.0, 9.0, dtype=np.float32))
    return directory


def test_compare_writes_its_page_where_one_is_asked_for(tmp_path):
    from alignment.cli import app

    golden, page = record(tmp_path / "golden"), tmp_path / "page.html"
    for name, scale, code, said in (("same", 1.0, 0, "ALIGNED: 1 stages"), ("wrong", 2.0, 1, "MISALIGNED: first in ")):
        command = ["compare", str(golden), str(record(tmp_path / name, scale=scale)), "--html", str(page)]
        shown = CliRunner().invoke(app, command)
        assert shown.exit_code == code and shown.stdout.endswith(f"as a page: {page}\n"), shown.output
        assert said in text_of(page)
    told = CliRunner().invoke(app, [*command, "--json"])
    assert told.exit_code == 1 and json.loads(told.stdout)["aligned"] is False
    refused = CliRunner().invoke(app, [*command, "--save-noise", str(tmp_path / "noise.json")])
    assert "--html is not read with --save-noise" in str(refused.exception)


READ = {name: read for name, (_, read) in ANSWERS.items()}
OTHERS = (None, True, 3, -0.5, "text", "nan", [], [[1]], {}, {"a": [1]})


def places(value, path=()):
    """Every place of a document, of long lists the first two items."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(document, path, value):
    """A document with something else, or with nothing (``...``), at one place."""
    if not path:
        return value
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("name", DOCUMENTS)
def test_anything_at_any_place_is_shown_or_refused_by_name(name):
    document = json.loads(json.dumps(DOCUMENTS[name]()))
    shown, refused = [], 0
    for path in places(document):
        for other in (*OTHERS, *([...] if path else [])):
            changed = replaced(document, path, other)
            try:
                shown.append(READ[name](changed, HERE))
            except InputError as error:
                assert str(error).startswith(f"{HERE}: not what alignment "), error
                refused += 1
            except Exception as error:
                raise AssertionError(f"{path}: {other!r}") from error
    assert shown and refused
    # What is shown can be drawn; a page for each would take minutes.
    for part in shown[:: max(1, len(shown) // 20)]:
        render([{**_part("a run", [], {name: part})}])
