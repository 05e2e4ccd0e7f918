"""Mean relative loss error over replayed steps: what it is, what noise makes of it, and what a fault does to it."""

from __future__ import annotations

import json
from pathlib import Path

import deliberate_faults
import pytest
from typer.testing import CliRunner

from alignment.cli import app
from alignment.diagnose.long_replay import BAR, METRICS, Drift, LongReplay, relative_error
from alignment.errors import InputError

FAULTS = Path(deliberate_faults.__file__)


def rows(*losses: float) -> list[dict[str, float]]:
    return [{"step": i, "actor/loss": loss} for i, loss in enumerate(losses, 1)]


def test_the_error_is_a_ratio_of_sums():
    """A loss that passes through zero does not make it infinite."""
    error, step, worst = relative_error(rows(1.0, 0.1, -2.0), rows(1.0, 0.0, -2.3))
    assert error == pytest.approx(0.4 / 3.3)
    assert (step, worst) == (3, pytest.approx(0.3 * 3 / 3.3))


def test_other_steps_and_no_loss_are_refused():
    with pytest.raises(InputError, match="other steps"):
        relative_error(rows(1.0), rows(1.0, 2.0))
    with pytest.raises(InputError, match="0 throughout"):
        relative_error(rows(0.0), rows(0.0))


def drift(metric: str, error: float, *noise: float) -> Drift:
    return Drift(metric=metric, error=error, noise=noise, worst_step=1, worst_error=error)


def test_what_has_no_bound_is_not_judged():
    """The loss has the field's bar; the gradient norm has its envelope alone."""
    loss, norm = METRICS
    for drifts, words, outcome, code in (
        ((drift(loss, 0.0), drift(norm, 0.0)), ["within", "not judged"], "inconclusive", 1),
        ((drift(loss, 2 * BAR), drift(norm, 0.0)), ["OUTSIDE", "not judged"], "fail", 1),
        ((drift(loss, 0.0, BAR), drift(norm, BAR, BAR)), ["within", "within"], "pass", 0),
        ((drift(loss, 0.0, BAR), drift(norm, 9 * BAR, BAR)), ["within", "OUTSIDE"], "fail", 1),
        # One ulp alone makes more than the bar: the envelope decides, either way.
        ((drift(loss, 2 * BAR, 2 * BAR), drift(norm, BAR, BAR)), ["within", "within"], "pass", 0),
        ((drift(loss, 9 * BAR, 2 * BAR), drift(norm, BAR, BAR)), ["OUTSIDE", "within"], "fail", 1),
        ((drift(loss, 2 * BAR, BAR), drift(norm, BAR, BAR)), ["OUTSIDE", "within"], "fail", 1),
    ):
        found = LongReplay(steps=1, drifts=drifts)
        assert [d.judgement for d in found.drifts] == words
        assert (found.to_dict()["outcome"], found.exit_code) == (outcome, code)


def test_a_bar_that_noise_drowns_is_said_to_be(monkeypatch, tmp_path):
    """As people see it; the numbers are those of a replay that was not made."""
    from alignment.cli import experiments
    from alignment.diagnose import long_replay
    from alignment.report import run_directory
    from alignment.rl import run

    drowned = LongReplay(steps=2, drifts=(drift(METRICS[0], BAR, 2 * BAR), drift(METRICS[1], BAR, BAR)))
    monkeypatch.setattr(long_replay, "long_replay", lambda *arguments, **keywords: drowned)
    monkeypatch.setattr(run, "read_run", lambda directory: type("Run", (), {"metrics": []}))
    monkeypatch.setattr(experiments, "_recorded", lambda directory: directory)
    monkeypatch.setattr(run_directory, "write_training_provenance", lambda directory, device, of: None)
    shown = CliRunner().invoke(app, ["replay", "--record", str(tmp_path), "--device", "cpu", "--run-dir", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert f"one unit in the last place alone makes {2 * BAR:.2e} of the loss" in shown.output
    assert "the envelope decides" in shown.output


def replayed(tmp_path, *arguments: str):
    command = [
        "replay",
        "--steps",
        "3",
        "--device",
        "cpu",
        "--perturbations",
        "2",
        "--run-dir",
        str(tmp_path / "run"),
        "--json",
    ]
    return CliRunner().invoke(app, [*command, *arguments])


def test_a_replay_of_the_same_device_is_inside_and_a_fault_is_outside(tmp_path):
    inside = replayed(tmp_path)
    assert inside.exit_code == 0, inside.output
    told = json.loads(inside.stdout)
    norm = told["drifts"][1]
    assert told["error"] == norm["error"] == 0.0 and 0.0 < norm["envelope"] < BAR
    page = tmp_path / "run" / "report.html"
    assert told["page"] == str(page) and "ALIGNED: 3 replayed steps on cpu stay within their bounds" in page.read_text()
    assert json.loads((page.parent / "provenance.json").read_text())["fingerprint"]["label"] == "cpu"
    _, drawn = json.loads((page.parent / "replay.json").read_text())["curves"]
    assert drawn["envelope"][-1] == norm["envelope"] and drawn["drift"] == [0.0] * 3 and len(drawn["noise"]) == 2
    outside = replayed(
        tmp_path / "faulty", "--record", str(tmp_path / "run" / "record"),
        "--fault", f"{FAULTS}:softmax_scale_of_value_width",
    )  # fmt: skip
    assert outside.exit_code == 1, outside.output
    loss, norm = json.loads(outside.stdout)["drifts"]
    # One update per step: the ratio is 1, so the loss alone would have passed this.
    assert loss["within"] and norm["error"] > norm["envelope"]
    shown = (tmp_path / "faulty" / "run" / "report.html").read_text()
    assert "MISALIGNED: actor/grad_norm of 3 replayed steps on cpu is off by " in shown


def test_fewer_recorded_steps_than_asked_for(tmp_path):
    made = replayed(tmp_path, "--perturbations", "0")
    assert made.exit_code == 1, made.output
    told = json.loads(made.stdout)
    assert told["outcome"] == "inconclusive" and told["drifts"][1]["within"] is None
    record = ["--record", str(tmp_path / "run" / "record"), "--device", "cpu"]
    shown = CliRunner().invoke(
        app, ["replay", "--steps", "1", "--perturbations", "0", *record, "--run-dir", str(tmp_path / "shown")]
    )
    assert shown.exit_code == 1 and "noise not measured, not judged" in shown.stdout
    assert "INCONCLUSIVE: without --perturbations" in shown.stdout
    short = CliRunner().invoke(
        app,
        [
            "replay",
            "--steps",
            "9",
            "--device",
            "cpu",
            "--record",
            str(tmp_path / "run" / "record"),
            "--run-dir",
            str(tmp_path / "more"),
        ],
    )
    assert isinstance(short.exception, InputError) and "fewer steps were recorded" in str(short.exception)
