"""The page of a run: everything in one file, everything foreign escaped, drawn and usable in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from answer_samples import write_answers
from page_reader import BROWSER, HOSTILE, browser, parsed, told_by, violations, visited
from typer.testing import CliRunner

from alignment.cli import app
from alignment.cli.report import leave_page
from alignment.errors import InputError
from alignment.files import write_json
from alignment.numerics.verdict import Divergence, Measure, Outcome, Verdict
from alignment.report.page import GAP, embedded, gather, write_answer, write_page
from alignment.report.run_directory import write_verdicts

# A page has to open in two seconds with this many steps and metrics, and stay below this size: the project's bars.
STEPS, METRIC_COUNT, MOST_BYTES = 200, 100, 6_000_000
EMULATED = "npu (emulated)"
STORED = Path(__file__).parents[3] / "baselines"


def verdict(check: str, outcome: Outcome, **changes) -> Verdict:
    layer = check.partition("/")[0]
    measures = (Measure(name="relative_l2", value=0.5, bound=1.0, origin="2 x measured noise"),)
    return Verdict(
        **{
            "check": check, "layer": layer, "stage": "operator", "subject": "torch", "device": "cpu",
            "outcome": outcome, "reason": "within its budget", "measures": measures, "baseline": "cpu/chip", **changes,
        }
    )  # fmt: skip


GATE = (
    Measure(name="reward level at step 1", value=0.01, bound=0.03),
    Measure(name="reward deficit", value=0.0875, bound=0.0625, origin="t test, spread 0.02 of 5 baseline runs"),
    Measure(name="reward detectable deficit", value=0.0312, origin="90 % power"),
    Measure(name="reward p-value", value=0.00125),
)
CURVES = "cuda/h200/e2e/dapo.curves.json, recorded 2026-11-01 at c0ffee00c0ff with torch 2.13.0 "


def findings() -> list[Verdict]:
    where = Divergence(stage="old_log_prob", module="model.layers.0.self_attn", quantity="output", detail=HOSTILE)
    return [
        verdict("unit/rope-plain", Outcome.PASS),
        verdict(
            "unit/router-groups", Outcome.FAIL, reason=HOSTILE, where=where, next_command="alignment run --only unit"
        ),
        verdict(
            "layer/decoder_layer-0", Outcome.UNAVAILABLE, subject="megatron", reason="megatron-core is not installed"
        ),
        verdict("e2e/curve.dapo", Outcome.INCONCLUSIVE, reason="five seeds do not decide"),
        verdict("e2e/curve-dapo-reward", Outcome.FAIL, reason=HOSTILE, measures=GATE, baseline=f"{CURVES}{HOSTILE}"),
    ]


def metrics(directory: Path, *, steps: int = STEPS, count: int = METRIC_COUNT) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = ["reward/before_filter", "actor/grad_norm", *(f"more/metric_{i}" for i in range(count - 2))]
    lines = [json.dumps({"step": s, **{n: s / 7 + i for i, n in enumerate(names)}}) for s in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(tmp_path):
    write_verdicts(tmp_path / "run", findings())
    metrics(tmp_path / "run" / "dapo")
    write_json(
        tmp_path / "run" / "memory.json",
        {"phases": [{"phase": "rollout", "peak": 2e6, "modelled": 2e6, "outside": 1e6}]},
    )
    fingerprint = {"chip": "Ascend 910B", "driver": HOSTILE}
    packages = {"torch": "2.13.0.dev1", "a": HOSTILE}
    made = {"commit": "1" * 40, "fingerprint": fingerprint, "packages": packages}
    write_json(tmp_path / "run" / "provenance.json", made)
    write_json(tmp_path / "run" / "audit.json", {"defects": 1, "matrix": [{"fault": HOSTILE, "caught": True}]})
    return tmp_path / "run"


@pytest.fixture(params=["run", "answers"])
def any_run(request, tmp_path):
    """A run with verdicts and metrics, and the directory of everything else that ends in a page."""
    return request.getfixturevalue("run") if request.param == "run" else write_answers(tmp_path / "answers")


def test_everything_is_in_one_file_and_nothing_is_fetched(any_run, tmp_path):
    page = write_page([any_run], tmp_path / "page.html")
    reader = parsed(page)
    assert reader.links == ["data:,"]
    assert page.stat().st_size < MOST_BYTES
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(
        r"""(?:src|href)\s*=\s*["']?https?:|url\(|@import|fetch\(|XMLHttp""",
        text.replace("http://www.w3.org/2000/svg", ""),
    )


def test_foreign_text_stays_text(any_run, tmp_path):
    reader = parsed(write_page([any_run], tmp_path / "page.html"))
    assert reader.scripts == 2
    assert any(HOSTILE in data for data in reader.text)


def test_embedded_data_cannot_leave_its_element():
    told = {"name": HOSTILE, "nan": float("nan"), "line": "\u2028", "list": [float("inf"), 1.5]}
    text = embedded(told)
    assert "<" not in text and "\u2028" not in text
    assert json.loads(text) == {**told, "nan": None, "list": [None, 1.5]}


def test_the_page_says_what_the_verdicts_say(run, tmp_path):
    text = " ".join(parsed(write_page([run], tmp_path / "page.html")).text)
    for part in (
        "MISALIGNED", "router", "self_attn", "megatron-core is not installed", "alignment run --only unit",
        "five seeds do not decide", "1 faults", "rollout", "reward/before_filter",
    ):  # fmt: skip
        assert part in text, part


def test_the_page_shows_both_sides_and_the_statistic_of_the_curve(run, tmp_path):
    from alignment.baseline.runs import select_curves

    text = " ".join(parsed(write_page([run], tmp_path / "page.html", baselines=STORED)).text)
    assert "2 baselines whose provenance is missing" in text
    stored = select_curves(STORED, "dapo-tiny", kind="cpu", chip="AMD EPYC")
    write_verdicts(run, [verdict("e2e/curve-dapo-reward", Outcome.FAIL, measures=GATE, baseline=stored.title)])
    text = " ".join(parsed(write_page([run], tmp_path / "page.html", baselines=STORED)).text)
    of_both = ("Ascend 910B", "1" * 12, stored.provenance.commit[:12], stored.provenance.date[:10], "differs")
    versions = ("2.13.0.dev1", stored.provenance.packages["torch"], stored.provenance.fingerprint["chip"])
    statistic = ("0.0875", "0.0625 (t test, spread 0.02 of 5 baseline runs)", "0.0312", "0.00125")
    for said in (*of_both, *versions, *statistic):
        assert said in text, said
    assert "whose provenance is missing" not in text
    assert text.index("0.0875") < text.index("Training:")


def test_a_gate_that_measured_nothing_says_so(tmp_path):
    write_verdicts(tmp_path, [verdict("e2e/curve-dapo-reward", Outcome.ERROR, measures=())])
    (row,) = gather(tmp_path)["gate"]
    assert (row["deficit"], row["bound"], row["p_value"]) == ("not measured", "", "not measured")


def test_the_worst_quantity_is_there_without_a_mouse(tmp_path):
    """In the cell of the heat map for who reads aloud, and in the table of every check for everyone."""
    sizes = {"output relative_l2": 0.25, "grad.x max_abs": 0.5}
    found = [
        verdict(f"unit/rope-{number}", Outcome.PASS, measures=(Measure(name=name, value=value, bound=1.0),))
        for number, (name, value) in enumerate(sizes.items())
    ]
    write_verdicts(tmp_path, [*found, verdict("unit/none", Outcome.UNAVAILABLE, reason="no kernel", measures=())])
    rows = {row["check"]: row["worst"] for row in gather(tmp_path)["checks"]}
    assert rows == {"unit/rope-0": "output relative_l2 = 0.25", "unit/rope-1": "grad.x max_abs = 0.5", "unit/none": ""}
    text = write_page([tmp_path], tmp_path / "page.html").read_text()
    seen = re.findall(r"<td>([^<]*)</td><td>within its budget</td>|<span class=.unseen.>([^<]*)</span>", text)
    cells = [there or told for there, told in seen]
    assert cells[:2] == [", worst: grad.x max_abs = 0.5", ", worst: no kernel"], "the worst of two checks in one cell"
    assert cells[2:] == ["output relative_l2 = 0.25", "grad.x max_abs = 0.5"]


def test_a_page_of_passes_names_an_emulated_device(tmp_path):
    """The page of an answer has no provenance; with findings alone its device would be said of nothing that passed."""
    page = write_answer("cards", tmp_path / "page.html", verdicts=[verdict("unit/a", Outcome.PASS, device=EMULATED)])
    assert EMULATED in parsed(page).text


def test_a_run_without_provenance_says_so(run, tmp_path):
    said = "The provenance of this run is not stored."
    assert said not in parsed(write_page([run], tmp_path / "page.html")).text
    (run / "provenance.json").unlink()
    assert said in parsed(write_page([run], tmp_path / "page.html")).text


def test_a_training_without_provenance_shows_the_machine_of_its_record_or_says_so(tmp_path):
    metrics(tmp_path / "run", steps=3, count=4)

    def told() -> str:
        return " ".join(parsed(write_page([tmp_path / "run"], tmp_path / "page.html")).text)

    assert "The provenance of this run is not stored." in told()
    fingerprint = {"label": "npu (emulated)", "chip": "none, emulated on x86", "emulated": True}
    write_json(tmp_path / "run" / "run.json", {"device": "npu (emulated)", "workers": [{"fingerprint": fingerprint}]})
    said = told()
    assert "Of the provenance of this run only the device is stored." in said
    assert "The provenance of this run is not stored." not in said
    assert "none, emulated on x86" in said
    rows = {row["name"]: row["values"] for row in gather(tmp_path / "run")["sides"]["rows"]}
    assert rows["label"] == ["npu (emulated)"] and rows["commit"] == rows["driver"] == rows["python"] == ["not stored"]
    write_json(tmp_path / "run" / "provenance.json", {"commit": "c0ffee", "fingerprint": fingerprint})
    assert "Of the provenance of this run" not in told() and "c0ffee" in told()


def test_unavailable_checks_do_not_colour_the_headline(tmp_path):
    for outcomes, colour in (
        ((Outcome.PASS, Outcome.UNAVAILABLE), "pass"),
        ((Outcome.UNAVAILABLE,), "unavailable"),
        ((Outcome.PASS, Outcome.INCONCLUSIVE), "inconclusive"),
        ((Outcome.ERROR, Outcome.FAIL), "fail"),
    ):
        directory = tmp_path / colour
        write_verdicts(directory, [verdict(f"unit/c{i}", o) for i, o in enumerate(outcomes)])
        assert gather(directory)["outcome"] == colour


def test_the_command_writes_it_beside_the_run(run):
    shown = CliRunner().invoke(app, ["report", str(run), "--json"])
    assert shown.exit_code == 0, shown.output
    assert Path(json.loads(shown.output)["page"]) == run / "report.html"


OF_TRAINING = {"reward/before_filter", "acc/before_filter", "response_length/before_filter", GAP}


@pytest.mark.parametrize(
    ("preset", "banded"),
    [
        ("dapo-tiny", {*OF_TRAINING, "response_length/mean"}),
        # What is trained on there is not all of what was generated, and that alone is stored.
        ("dapo-tiny-filtered", OF_TRAINING),
        ("gkd-tiny", {"student/agreement", "student/loss", "response_length/mean"}),
    ],
)
def test_every_curve_that_the_baseline_holds_has_its_band(tmp_path, preset, banded):
    from alignment.baseline.runs import load_curves

    stored = load_curves(next(STORED.glob(f"*/*/e2e/{preset}.curves.json")))
    names = banded | {"actor/entropy", "response_length/mean"}
    for number, config in enumerate([stored.runs[0].config, "another experiment"]):
        folder = tmp_path / "run" / f"training-{number}"
        folder.mkdir(parents=True)
        lines = [json.dumps({"step": step, **dict.fromkeys(names, 0.5)}) for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        write_json(folder / "run.json", {"config": config})
    of_both, of_none = gather(tmp_path / "run", baselines=STORED)["trainings"]
    assert of_none["bands"] == []
    bands = {band["metric"]: band for band in of_both["bands"]}
    assert set(bands) == banded
    steps = [step.step for step in stored.runs[0].steps]
    assert all(band["steps"] == steps for band in bands.values())

    def of_step_1(run) -> dict:
        first = run.steps[0]
        lengths = first.groups["response_length"].mean
        of_groups = {"response_length/mean": sum(lengths) / len(lengths)}
        return {**of_groups, **first.scalars, GAP: first.scalars.get("log_prob_gap")}

    for name in banded & {"response_length/mean", "student/agreement", "student/loss", GAP}:
        values = [of_step_1(run)[name] for run in stored.runs]
        assert (bands[name]["low"][0], bands[name]["high"][0]) == (min(values), max(values))
    text = " ".join(parsed(write_page([tmp_path / "run"], tmp_path / "page.html", baselines=STORED)).text)
    assert text.count(f"The band behind a curve is the lowest and highest of 5 runs of {preset}") == 1
    assert gather(tmp_path / "run")["trainings"][0]["bands"] == []


def test_agreement_with_the_teacher_is_among_the_first_charts(tmp_path):
    metrics(tmp_path / "run", steps=3, count=4)
    line = json.dumps({"step": 1, "student/agreement": 0.5, "student/loss": 0.25})
    (tmp_path / "run" / "metrics.jsonl").write_text(line + "\n")
    text = write_page([tmp_path / "run"], tmp_path / "page.html").read_text()
    drawn = re.findall(r'<figure class="chart" [^>]*data-metric="([^"]*)"', text)
    assert drawn == ["student/agreement", "student/loss"]


def test_a_training_stands_without_its_page(tmp_path, capsys):
    metrics(tmp_path / "run", steps=3, count=4)
    page = tmp_path / "run" / "report.html"
    assert leave_page(tmp_path / "run", baselines=tmp_path / "none") == page and page.is_file()
    assert capsys.readouterr() == ("", "")
    page.unlink()
    (page / "in the way").mkdir(parents=True)
    assert leave_page(tmp_path / "run", baselines=tmp_path / "none") is None
    out, told = capsys.readouterr()
    assert out == "" and told.startswith("the page was not written: ") and "report.html" in told
    assert [path.name for path in sorted((tmp_path / "run").iterdir())] == ["metrics.jsonl", "report.html"]


def test_several_runs_stand_beside_each_other(run, tmp_path):
    metrics(tmp_path / "other", steps=3, count=4)
    reader = parsed(write_page([run, tmp_path / "other"], tmp_path / "page.html"))
    assert " ".join(reader.text).count("Training:") == 2


def test_what_was_not_measured_is_no_number(run, tmp_path):
    phases = [{"phase": "rollout", "peak": 2e6, "modelled": 2e6, "outside": None}]
    write_json(run / "memory.json", {"phases": phases})
    assert "not measured" in parsed(write_page([run], tmp_path / "page.html")).text


@pytest.mark.parametrize(
    "file, content, problem",
    [
        ("triage.json", {"error": "the run cannot be read"}, "alignment triage --json.*axis, outcome, reason"),
        ("triage.json", {"axes": [{"axis": "data", "outcome": "pass"}]}, "expected reason in every row"),
        ("triage.json", [1], "alignment triage --json"),
        ("memory.json", {"phases": [{"phase": "rollout"}]}, "memory profile --json.*peak, modelled in every row"),
        ("memory.json", {"phases": [{"phase": "x", "peak": 1, "modelled": 1, "outside": "?"}]}, "number or null"),
        ("memory.json", {"phases": "none"}, "alignment memory profile --json"),
        ("comparison.json", [1], "alignment compare --json.*stage, outcome, reason"),
        ("comparison.json", {"stages": [{"stage": "train", "outcome": "pass"}]}, "expected reason in every row"),
        (
            "comparison.json",
            {"stages": [{"stage": "train", "outcome": "fail", "reason": "", "where": {"module": "mlp"}}]},
            "module and quantity of every divergence",
        ),
        ("provenance.json", ["a"], "not the provenance of a run"),
    ],
)
def test_a_file_of_another_shape_is_named(run, tmp_path, file, content, problem):
    write_json(run / file, content)
    with pytest.raises(InputError, match=f"(?s){file}.*{problem}"):
        write_page([run], tmp_path / "page.html")


def test_a_trail_ends_in_the_module_or_in_a_quantity_of_another_name(tmp_path):
    places = {
        "layers.0.mlp/mlp": ["layers", "0", "mlp"],
        "model.layers.0/layers.0": ["model", "layers", "0"],
        "layers.0.mlp/p": ["layers", "0", "mlp", "p"],
        "/logits": ["logits"],
    }
    found = []
    for number, place in enumerate(places):
        module, _, quantity = place.partition("/")
        where = Divergence(stage="model", module=module, quantity=quantity, detail="")
        found.append(verdict(f"layer/c{number}", Outcome.FAIL, where=where))
    write_verdicts(tmp_path, found)
    assert [finding["path"] for finding in gather(tmp_path)["findings"]] == [["model", *p] for p in places.values()]


def test_how_far_is_said_once_with_its_unit_or_without(tmp_path):
    sizes = {
        "relative_l2 = 0.5, bound 1 (50 % of the budget)": Measure(name="relative_l2", value=0.5, bound=1.0),
        "reward = 40 tokens, bound 2 (20 times)": Measure(name="reward", value=40.0, unit="tokens", bound=2.0),
        "wrong = 8, bound 0 (exact: differs)": Measure(name="wrong", value=8.0, bound=0.0),
    }
    found = [verdict(f"unit/c{i}", Outcome.FAIL, measures=(measure,)) for i, measure in enumerate(sizes.values())]
    write_verdicts(tmp_path, found)
    assert [finding["how_far"] for finding in gather(tmp_path)["findings"]] == list(sizes)


def test_a_comparison_is_drawn_stage_by_stage_with_its_first_divergence(run, tmp_path):
    found = {"module": "layers.1.mlp", "quantity": "output", "reason": "relative_l2"}
    stage = {"step": 3, "stage": "train", "outcome": "fail", "reason": HOSTILE, "first_forward": found}
    equal = {"step": 3, "stage": "old_log_prob", "outcome": "pass", "reason": "", "first_forward": None}
    write_json(run / "comparison.json", {"stages": [equal, stage]})
    trail = {"name": "step 3 train", "outcome": "fail", "reason": HOSTILE}
    trail["path"] = ["train", "layers", "1", "mlp", "output"]
    plain = {"name": "step 3 old_log_prob", "outcome": "pass", "reason": "", "path": []}
    assert gather(run)["comparison"]["rows"] == [plain, trail]
    text = parsed(write_page([run], tmp_path / "page.html")).text
    assert "step 3 train" in text and HOSTILE in text
    of_runs = verdict("run_stages.step3.reward", Outcome.FAIL, stage="reward", reason="other scores").to_dict()
    write_json(run / "comparison.json", {"stages": [of_runs], "capture": {"stages": [stage]}})
    judged = {"name": "step 3 reward", "outcome": "fail", "reason": "other scores", "path": []}
    assert gather(run)["comparison"]["rows"] == [judged, trail]


def test_a_triage_and_a_profilers_record_are_shown_or_left_out(run, tmp_path):
    write_json(run / "triage.json", {"axes": [{"axis": "data", "outcome": "pass", "reason": "the same prompts"}]})
    write_json(run / "memory.json", {"components": [], "outside_framework": {}})
    write_json(run / "provenance.json", {"commit": "c0ffee", "fingerprint": None})
    text = " ".join(parsed(write_page([run], tmp_path / "page.html")).text)
    assert "the same prompts" in text and "Memory by phase" not in text and "c0ffee" in text


@pytest.mark.parametrize("json_wanted", [False, True], ids=["text", "json"])
def test_verdicts_are_printed_though_nothing_can_be_written_after_them(tmp_path, monkeypatch, json_wanted):
    from alignment.baseline import suite
    from alignment.report import page, run_directory

    def full(*arguments, **more):
        raise OSError("no space left on the device")

    def unreadable(*arguments, **more):
        raise InputError("the stored curve is damaged", where="a baseline")

    def told(outcomes):
        command = ["run", "--device", "cpu", "--only", "unit", "--run-dir", str(tmp_path / "-".join(outcomes))]
        monkeypatch.setattr(
            suite, "run_suite", lambda setting, progress: [verdict(f"unit/{o}", Outcome(o)) for o in outcomes]
        )
        return CliRunner().invoke(app, [*command, *(["--json"] if json_wanted else [])])

    whole = told(["pass"])
    assert whole.exit_code == 0 and " was not written" not in whole.stderr
    if not json_wanted:
        assert "(stack in stack.yaml, machine and packages in provenance.json)" in whole.stdout
    monkeypatch.setattr(run_directory, "write_stack", full)
    monkeypatch.setattr(page, "write_page", unreadable)
    for outcomes, code in ((["pass", "fail"], 1), (["pass", "pass"], 0)):
        shown = told(outcomes)
        assert shown.exit_code == code, shown.output
        assert "stack.yaml was not written: no space left" in shown.stderr
        assert "the page was not written: a baseline: the stored curve is damaged" in shown.stderr
        if json_wanted:
            document = json.loads(shown.stdout)
            assert document["page"] is None and [v["outcome"] for v in document["verdicts"]] == outcomes
        else:
            assert ("MISALIGNED" in shown.stdout) is (code == 1)
            assert "stack in" not in shown.stdout
    monkeypatch.setattr(run_directory, "write_verdicts", full)
    unstored = told(["pass"] * 3)
    assert unstored.exit_code == 2 and "verdicts.json was not written" in unstored.stderr


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no such directory"):
        gather(tmp_path / "nothing")
    with pytest.raises(InputError, match="holds no run"):
        gather(tmp_path)
    with pytest.raises(InputError, match="no run is named"):
        write_page([], tmp_path / "page.html")


# --- in a browser ----------------------------------------------------------------------------------------------------

PROBE = """
<script>
addEventListener("load", () => {
  dispatchEvent(new Event("beforeprint"));
  const chart = document.querySelector(".chart"), svg = chart.querySelector("svg"), said = () => chart.querySelector("output").textContent;
  const press = (key) => svg.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const told = { errors: window.errors, charts: document.querySelectorAll(".chart svg polyline").length, title: document.title };
  press("ArrowRight"); told.first = said();
  press("End"); told.last = said();
  const points = () => svg.querySelector(".line").getAttribute("points").split(" ").length;
  told.whole = points(); press("+"); told.zoomed = points(); press("Escape"); told.back = points();
  const choice = document.querySelector(".choose select");
  choice.value = "more/metric_5"; choice.dispatchEvent(new Event("change"));
  told.chosen = document.querySelector(".choose svg").getAttribute("aria-label");
  document.getElementById("theme").click(); told.theme = document.documentElement.dataset.theme;
  const scale = svg.getScreenCTM(); told.stretched = scale.a / scale.d;
  told.requests = performance.getEntriesByType("resource").map((entry) => entry.name).filter((name) => !name.startsWith("data:"));
  told.milliseconds = performance.now();
  const out = document.createElement("pre"); out.id = "told"; out.textContent = JSON.stringify(told); document.body.append(out);
});
</script>
"""


def asked(page: Path, probe: str, directory: Path) -> dict:
    """What a probe finds in a page that says nothing on the console of the browser."""
    errors = (
        "<script>window.errors = []; addEventListener('error', (e) => window.errors.push(String(e.message)));</script>"
    )
    page.write_text(page.read_text().replace("<style>", errors + "<style>", 1).replace("</body>", probe + "</body>", 1))
    document, console = visited(page, directory)
    assert console == []
    return told_by(document)


@browser
def test_a_real_browser_draws_it_and_it_can_be_used_by_keyboard(run, tmp_path):
    told = asked(write_page([run], tmp_path / "page.html"), PROBE, tmp_path)
    assert told["errors"] == [] and told["requests"] == []
    assert told["charts"] == 3
    assert told["first"] == "step 1: 0.14286" and told["last"] == f"step {STEPS}: 28.571"
    assert told["whole"] == told["back"] == STEPS > told["zoomed"] > 1
    assert told["chosen"].startswith("more/metric_5, 200 steps")
    assert told["theme"] in ("light", "dark")
    assert told["stretched"] == 1
    assert "owned" not in told["title"]


ASK_CHARTS = """
<script>
addEventListener("load", () => {
  dispatchEvent(new Event("beforeprint"));
  const told = { errors: window.errors, title: document.title, charts: {} };
  for (const chart of document.querySelectorAll(".chart")) {
    const svg = chart.querySelector("svg"), count = (name) => svg.querySelectorAll(name).length;
    svg.dispatchEvent(new KeyboardEvent("keydown", { key: "End", bubbles: true, cancelable: true }));
    told.charts[chart.dataset.metric] = [
      count(".line"), count(".beside"), count(".band"), chart.querySelector("output").textContent,
      [...svg.querySelectorAll("text[text-anchor=end]")].map((label) => label.textContent),
    ];
  }
  told.requests = performance.getEntriesByType("resource").map((entry) => entry.name).filter((name) => !name.startsWith("data:"));
  const out = document.createElement("pre"); out.id = "told"; out.textContent = JSON.stringify(told); document.body.append(out);
});
</script>
"""


@browser
def test_a_real_browser_draws_bands_other_arms_and_powers_of_ten(tmp_path):
    told = asked(write_page([write_answers(tmp_path / "answers")], tmp_path / "page.html"), ASK_CHARTS, tmp_path)
    assert told["errors"] == [] and told["requests"] == [] and told["title"].startswith("ALIGNED: 12 replayed steps")
    charts = told["charts"]
    drift, error = (charts[f"actor/loss: {what}"] for what in ("drift of every step", "error so far"))
    assert drift[:3] == [1, 0, 1] and drift[3].startswith("step 12: 1.432") and "(noise " in drift[3]
    assert error[:3] == [1, 0, 1] and error[3].startswith("step 12: 7.1") and "(envelope 0 … " in error[3]
    # Every other step drifts by nothing: that stands on the ground, below the powers of ten.
    assert drift[4][0] == "0" and all(re.fullmatch(r"\d(\.\d)?e-\d+", label) for label in drift[4][1:]), drift
    assert charts["actor/loss"][:4] == [1, 1, 0, "step 12: 12, record 12"]
    assert charts[f"{HOSTILE} with scale"][:4] == [1, 1, 1, "step 3: 11.02 (base 12 … 14), base 13"]


@browser
def test_a_real_browser_draws_the_band_of_each_metric(tmp_path):
    from alignment.baseline.runs import load_curves

    stored = load_curves(next(STORED.glob("*/*/e2e/gkd-tiny.curves.json")))
    run = tmp_path / "run"
    run.mkdir()
    write_json(run / "run.json", {"config": stored.runs[0].config})
    first = {"step": 1, "student/agreement": 0.5, "student/loss": 0.25, "more": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(first) + "\n")
    told = asked(write_page([run], tmp_path / "page.html", baselines=STORED), ASK_CHARTS, tmp_path)
    assert told["errors"] == []
    charts = told["charts"]
    assert [charts[name][2] for name in ("student/agreement", "student/loss", "more")] == [1, 1, 0]
    agreement = [step.scalars["student/agreement"] for step in (r.steps[0] for r in stored.runs)]
    assert charts["student/agreement"][3] == f"step 1: 0.5 (baseline {min(agreement):.5g} … {max(agreement):.5g})"


@browser
def test_the_console_of_the_browser_is_read(run, tmp_path):
    page = write_page([run], tmp_path / "page.html")
    wrong = {
        "planted": "<script>console.error('planted')</script>",
        "Uncaught Error: thrown": "<script>throw new Error('thrown')</script>",
        "violates the following Content Security Policy": '<img alt="" src="http://127.0.0.1:9/x.png">',
    }
    page.write_text(page.read_text().replace("</main>", "".join(wrong.values()) + "</main>", 1))
    _, console = visited(page, tmp_path)
    assert len(console) == len(wrong)
    for message in wrong:
        assert any(message in line for line in console), (message, console)


def printed(text: str, directory: Path, name: str) -> bytes:
    """The page on paper, without the time it was made at."""
    page, paper = directory / f"{name}.html", directory / f"{name}.pdf"
    page.write_text(text)
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer", f"--print-to-pdf={paper}",
        f"--user-data-dir={directory / 'profile'}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    return re.sub(rb"/(Creation|Mod)Date \(.*?\)", b"", paper.read_bytes())


@browser
def test_paper_is_light_whatever_the_theme(run, tmp_path):
    """A page that was switched to dark before would be light ink on white paper."""
    text = write_page([run], tmp_path / "page.html").read_text()
    light, dark = (text.replace("<html", f'<html data-theme="{theme}"', 1) for theme in ("light", "dark"))
    on_paper = printed(light, tmp_path, "light")
    assert on_paper.startswith(b"%PDF") and printed(dark, tmp_path, "dark") == on_paper
    everywhere = dark.replace('@media screen { :root[data-theme="dark"]', '@media all { :root[data-theme="dark"]')
    assert everywhere != dark and printed(everywhere, tmp_path, "everywhere") != on_paper


@browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_rules_of_axe_find_nothing(run, tmp_path, theme):
    """On a page of two: a run with verdicts and metrics, and everything else that ends in a page."""
    from alignment.baseline.runs import select_curves

    stored = select_curves(STORED, "dapo-tiny", kind="cpu", chip="AMD EPYC").title
    write_verdicts(run, [*findings(), verdict("e2e/curve-dapo-length", Outcome.PASS, measures=GATE, baseline=stored)])
    page = write_page([run, write_answers(tmp_path / "answers")], tmp_path / "page.html", baselines=STORED)
    assert "baselines of 1 check" in page.read_text()
    assert violations(page, tmp_path, theme) == []


@browser
def test_the_rules_of_axe_find_what_cannot_be_read(run, tmp_path):
    page = write_page([run], tmp_path / "page.html")
    faint = '<p style="color:#999;background:#aaa">faint</p><select><option>unnamed</option></select></main>'
    page.write_text(page.read_text().replace("</main>", faint, 1))
    assert {rule for _, rule, _ in violations(page, tmp_path, "light")} >= {"color-contrast", "select-name"}


def test_it_is_valid_html(any_run, tmp_path):
    import html5lib

    page = write_page([any_run], tmp_path / "page.html")
    html5lib.HTMLParser(strict=True).parse(page.read_text())
    with pytest.raises(html5lib.html5parser.ParseError):
        html5lib.HTMLParser(strict=True).parse(page.read_text().replace("</main>", "</section></main>", 1))
