"""The audit: what it counts, what it prints, and what it says of faults nobody knows."""

from __future__ import annotations

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alignment.cli import app
from alignment.errors import InputError
from alignment.faults import catalogue
from alignment.faults.audit import Alarm, audit, choose
from alignment.faults.catalogue import all_faults, find_faults
from alignment.faults.check import Check, Finding, Setting, differs, integer_ratio
from alignment.faults.checks import all_checks
from alignment.faults.fault import Fault
from alignment.faults.injection import faults_and_overrides
from alignment.faults.seam import wrapped
from alignment.numerics.precision import Precision
from alignment.report.audit_view import BEGIN, END, markdown_table

ROOT = Path(__file__).resolve().parents[3]
BAR_PLACED, BAR_LAYER = 0.95, 0.90
"""Shares of the defects that must be placed right, and caught by the cheapest layer the catalogue names."""
BENIGN_RUNS = 200
ONE_FAULT_SECONDS = 10


def fault(id="made-up", **fields) -> Fault:
    given = {
        "title": "t", "source": "s", "category": "moe", "stage": ("rollout",), "culprit": "rope", "layer": "unit-op",
        "setting": "any", "why": "w",
        "apply": lambda: wrapped("alignment.models.rope:softmax_mscale", lambda original: lambda scaling: 7.0),
    } | fields  # fmt: skip
    return Fault(id=id, **given)


def scale(setting: Setting):
    from alignment.models import rope

    if rope.softmax_mscale(None) != 1.0:
        yield Finding(stage="rollout", place="rope.scale", evidence="7 instead of 1")


def crash(setting: Setting):
    from alignment.models import mla

    if mla.softmax_mscale(None) != 1.0:
        raise ValueError("out of range")
    yield from ()


CHEAP = Check(name="a.cheap", layer="layer-logits", cost=0.1, run=scale)
DEAR = Check(name="a.dear", layer="layer-grad", cost=0.1, run=scale)


def test_a_fault_is_caught_by_the_first_check_and_placed_by_its_first_finding():
    result = audit([fault()], [CHEAP, DEAR])
    (row,) = result.rows
    assert (row.check, row.stage, row.place, row.placed) == ("a.cheap", "rollout", "rope.scale", True)
    assert not row.by_cheapest_layer, "layer-logits is dearer than unit-op"
    assert result.passes


def test_a_wrong_stage_or_a_wrong_name_is_not_placed():
    assert not audit([fault(stage=("advantage",))], [CHEAP]).rows[0].placed
    assert not audit([fault(culprit="gate | mlp")], [CHEAP]).rows[0].placed
    assert audit([fault(culprit="gate | scale")], [CHEAP]).rows[0].placed


def test_what_is_missed_fails_the_audit():
    result = audit([fault(apply=nullcontext)], [CHEAP])
    assert not result.rows[0].caught and not result.passes and result.to_dict()["caught"] == 0


def test_a_crash_of_the_product_is_a_finding_and_says_where():
    row = audit([fault()], [Check(name="a.crash", layer="unit-op", cost=0.1, run=crash)]).rows[0]
    assert row.caught and row.evidence == "ValueError: out of range"


def test_benign_differences_run_with_what_they_declare_and_alarms_are_counted():
    seen: list[Precision] = []

    def note(setting: Setting):
        seen.append(setting.precision)
        yield from scale(setting)

    declared = Precision(matmul="hf32")
    benign = fault("harmless", benign=True, declares=declared)
    result = audit([benign], [Check(name="a.note", layer="unit-op", cost=0.1, run=note)], seeds=3)
    assert result.benign_runs == 3 and seen[1:] == [declared] * 3
    assert result.alarms[0] == Alarm(fault="harmless", seed=0, finding="a.note: rollout · rope.scale: 7 instead of 1")
    assert not result.passes and result.to_dict()["false_alarms"] == 3


def test_what_is_wrong_without_a_fault_fails_the_audit():
    always = Check(
        name="a.always", layer="unit-op", cost=0.1, run=lambda s: [Finding(stage="rollout", place="p", evidence="e")]
    )
    result = audit([], [always])
    assert not result.passes and result.to_dict()["clean"] == ["rollout · p: e"]


def test_the_ablation_names_what_only_one_check_catches():
    result = audit([fault("one"), fault("two")], [CHEAP, DEAR], ablation=True)
    assert result.only_catch() == {"a.cheap": [], "a.dear": []}
    assert audit([fault("one")], [CHEAP], ablation=True).only_catch() == {"a.cheap": ["one"]}


def test_integer_ratios_are_named():
    import torch

    golden = torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert integer_ratio(4 * golden, golden, {"TP": 4}) == "it is TP (= 4) times the right value"
    assert integer_ratio(golden / 2, golden, {"CP": 2}) == "it is 1/CP (= 1/2) times the right value"
    assert integer_ratio(golden + 1, golden, {"TP": 4}) == ""
    found = differs(3 * golden, golden, stage="rollout", place="p", ratios={"DP": 3})[0].evidence
    assert found.endswith("it is DP (= 3) times the right value")


def test_nan_and_another_shape_differ():
    import torch

    golden = torch.zeros(2, dtype=torch.float64)
    assert differs(golden * float("nan"), golden, stage="rollout", place="p")
    assert "shape [3] instead of [2]" in differs(torch.zeros(3), golden, stage="rollout", place="p")[0].evidence


def test_an_unknown_id_is_answered_with_the_nearest_one():
    with pytest.raises(InputError, match="did you mean rope-interleave-vs-half"):
        find_faults(["rope-interleaved-vs-half"])
    with pytest.raises(InputError, match="there is no such category"):
        choose(all_faults(), ["mole"])


def test_an_unknown_layer_or_stage_is_refused():
    with pytest.raises(InputError, match="unknown layer"):
        fault(layer="unit")
    with pytest.raises(InputError, match="unknown stage"):
        fault(stage=("generation",))
    with pytest.raises(InputError, match="a fault says everything about itself; expected why"):
        fault(why="")


def test_other_packages_add_faults_by_an_entry_point(monkeypatch):
    mine = fault("mine-17")

    class Point:
        name = "mine"

        def load(self):
            return [mine]

    monkeypatch.setattr(catalogue, "entry_points", lambda group: [Point()] if group == "alignment.faults" else [])
    all_faults.cache_clear()
    try:
        assert find_faults(["mine-17"]) == (mine,)
    finally:
        all_faults.cache_clear()


def test_faults_are_an_override_of_every_training_command():
    named, rest = faults_and_overrides(["faults=[a-b, c-d]", "trainer.seed=3"], ["e.py:f"])
    assert named == ["e.py:f", "a-b", "c-d"] and rest == ["trainer.seed=3"]


def test_the_command_prints_what_machines_read_and_writes_what_people_do(tmp_path):
    ids, page = "z-loss-on-probabilities,rope-second-half-not-written", tmp_path / "page.html"
    done = CliRunner().invoke(app, ["audit", "--faults", ids, "--json", "--jobs", "1", "--html", str(page)])
    printed = json.loads(done.stdout)
    assert done.exit_code == 0 and "PASSED: 2 of 2 defects caught, 0 false alarms" in page.read_text()
    counts = {
        k: printed[k] for k in ("defects", "caught", "placed", "by_cheapest_layer", "benign_runs", "false_alarms")
    }
    assert counts == {
        "defects": 2,
        "caught": 2,
        "placed": 2,
        "by_cheapest_layer": 2,
        "benign_runs": 0,
        "false_alarms": 0,
    }
    assert printed["seconds"] > 0
    assert [row["fault"] for row in printed["matrix"]] == ids.split(",")


def test_the_command_takes_a_fault_from_a_file_and_fails_where_nothing_catches_it(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import contextlib\n\n@contextlib.contextmanager\ndef nothing():\n    yield\n")
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["audit", "--faults", f"{path}:nothing", "--html", str(page)])
    assert done.exit_code == 1 and "MISSED" in done.stdout and done.stdout.endswith(f"as a page: {page}\n")
    assert "NOT PASSED: 0 of 1 defects caught, 0 false alarms" in page.read_text()


def test_a_context_manager_that_declares_nothing_is_shown_where_it_is_caught(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from alignment.faults.seam import wrapped\n\n"
        "def twice():\n"
        "    return wrapped('alignment.models.rope:yarn_mscale', lambda original: lambda *given: 2 * original(*given))\n"
    )
    done = CliRunner().invoke(app, ["audit", "--faults", f"{path}:twice"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.stdout
    assert "(no culprit declared)" in done.stdout and "not said" not in done.stdout


def test_the_example_of_the_page_works(tmp_path):
    """The first Python block of docs/faults.md is a fault, and it is caught as the page says."""
    page = (ROOT / "docs" / "faults.md").read_text()
    path = tmp_path / "my_fault.py"
    path.write_text(page.split("```python\n")[1].split("```")[0])
    done = CliRunner().invoke(app, ["audit", "--faults", f"{path}:scaling_twice", "--json"])
    (row,) = json.loads(done.stdout)["matrix"]
    assert (row["check"], row["place"], row["placed"]) == ("router.selection", "mlp.gate.select_experts.weights", True)
    assert f"scaling-twice  {row['check']}" in page and row["place"] in page


def script():
    spec = importlib.util.spec_from_file_location("update_audit_table", ROOT / "scripts" / "update_audit_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_the_pages_is_the_stored_audit():
    stored = json.loads((ROOT / "docs" / "audit.json").read_text())
    table = markdown_table(stored)
    for page in script().PAGES:
        text = page.read_text()
        if BEGIN in text:
            shown = text.partition(BEGIN)[2].partition(END)[0].strip()
            assert shown == table.strip(), f"{page.name}: python scripts/update_audit_table.py --from-json"
    assert BEGIN in (ROOT / "docs" / "faults.md").read_text()


def test_the_stored_audit_is_of_this_catalogue_and_these_checks():
    stored = json.loads((ROOT / "docs" / "audit.json").read_text())
    own = {f.id for f in all_faults() if not f.benign}
    assert {row["fault"] for row in stored["matrix"]} == own, "python scripts/update_audit_table.py"
    assert {check for row in stored["matrix"] for check in row["all_checks"]} <= {check.name for check in all_checks()}


def test_a_check_without_a_catch_of_its_own_says_why_it_stays():
    stored = json.loads((ROOT / "docs" / "audit.json").read_text())
    reasons = {check.name: check.kept_because for check in all_checks()}
    for name, caught in stored["only_catch"].items():
        if name in reasons and not caught:
            assert reasons[name], f"{name} catches nothing that no other check catches"


def test_a_table_that_is_not_current_is_seen():
    with_table = script().with_table
    assert with_table(f"a {BEGIN} old {END} b", "new") == f"a {BEGIN}\n\nnew\n{END} b"
    assert with_table("no table", "new") == "no table"


@pytest.mark.slow
def test_the_whole_audit_keeps_its_bars():
    result = audit(all_faults(), all_checks(), jobs=2)
    missed = [row.fault for row in result.rows if not row.caught]
    assert result.clean == [] and missed == [] and result.alarms == []
    assert len(result.rows) >= 125 and result.benign_runs >= BENIGN_RUNS
    assert result.placed >= BAR_PLACED * len(result.rows)
    assert result.by_cheapest_layer >= BAR_LAYER * len(result.rows)
    stored = json.loads((ROOT / "docs" / "audit.json").read_text())
    assert markdown_table(result.to_dict()) == markdown_table(stored), "python scripts/update_audit_table.py"
