"""Both sides of a comparison: the run and the baselines that its verdicts name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alignment.baseline.runs import select_curves, select_replay
from alignment.baseline.select import Selection, fallback_order
from alignment.baseline.store import BaselineStore
from alignment.files import write_json
from alignment.numerics.verdict import Outcome, Verdict
from alignment.report.provenance_view import both_sides

STORED = Path(__file__).parents[3] / "baselines"


def provenance(**changes) -> dict:
    return {
        "date": "2026-11-01T02:00:00+00:00", "commit": "c0ffee00c0ffee00", "python": "3.11.7", "platform": "Linux",
        "fingerprint": {"label": "cuda", "chip": "H200", "driver": "580.65", "runtime": "CUDA 13.0", "kind": "cuda"},
        "packages": {"torch": "2.13.0", "numpy": "2.4.6", "regex": "1"}, "determinism": {"threads": 1}, "hashes": {},
        **changes,
    }  # fmt: skip


def title(key: str, made: dict) -> str:
    return f"cuda/h200/{key}, recorded {made['date'][:10]} at {made['commit'][:12]} with torch 2.13.0 (same chip)"


def verdict(baseline: str | None) -> Verdict:
    return Verdict(
        check="unit/rope", layer="unit", stage="operator", subject="torch", device="npu", outcome=Outcome.PASS,
        reason="within its budget", baseline=baseline,
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    later = provenance(date="2026-11-03T02:00:00+00:00")
    write_json(
        tmp_path / "cuda" / "h200" / "unit" / "rope.json",
        {
            "entries": {"rope-plain/torch": {"provenance": "a"}, "rope-yarn/torch": {"provenance": "b"}},
            "provenance": {"a": provenance(), "b": later},
        },
    )
    write_json(tmp_path / "cuda" / "h200" / "e2e" / "dapo.curves.json", {"provenance": provenance(commit="beef" * 4)})
    return tmp_path


NAMED = [
    verdict(title("unit/rope-plain/torch", provenance())),
    verdict(title("unit/rope-yarn/torch", provenance(date="2026-11-03"))),
    verdict(title("e2e/dapo.curves.json", provenance(commit="beef" * 4))),
]


def by_name(found: dict) -> dict[str, dict]:
    return {row["name"]: row for row in (*found["rows"], *found["more"])}


def test_a_run_stands_beside_the_origins_of_its_baselines(store):
    chip = {"label": "npu", "chip": "Ascend 910B", "driver": "25.2", "runtime": "CANN 8.5"}
    run = provenance(
        commit="0123456789abcdef-dirty",
        fingerprint=chip,
        packages={"torch": "2.13.0", "torch-npu": "2.13.0", "numpy": "2.4.5", "regex": "1"},
    )
    found = both_sides(NAMED, run, store)
    assert found["columns"] == ["this run", "baselines of 2 checks", "baselines of 1 check"]
    told = by_name(found)
    assert told["chip"] == {"name": "chip", "values": ["Ascend 910B", "H200", "H200"], "differs": True}
    assert told["driver"]["values"] == ["25.2", "580.65", "580.65"]
    assert told["date"]["values"] == ["2026-11-01", "2026-11-01 … 2026-11-03", "2026-11-01"]
    assert told["commit"]["values"] == ["0123456789ab-dirty", "c0ffee00c0ff", "beefbeefbeef"]
    assert told["torch-npu"]["values"] == ["2.13.0", "none", "none"]
    assert not told["torch"]["differs"] and told["numpy"]["differs"]
    assert "regex" not in told and found["same"] == 2
    assert found["missing"] == []


@pytest.mark.parametrize(
    "named, why",
    [
        ("cuda/h200", "not the name of a stored baseline"),
        (title("../../unit/rope-plain/torch", provenance()), "not the name of a stored baseline"),
        (title("unit/rope-none/torch", provenance()), "it is not among the stored baselines"),
        (title("e2e/none.curves.json", provenance()), "none.curves.json.*the file does not exist"),
        (title("unit/rope-plain/torch", provenance(commit="0" * 16)), "recorded again since, 2026-11-01 at c0ffee"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_so(store, named, why):
    found = both_sides([verdict(named), NAMED[0]], provenance(), store)
    assert [told for told, _ in found["missing"]] == [named]
    assert re.search(f"(?s){why}", found["missing"][0][1])
    assert len(found["columns"]) == 2


def test_damaged_files_and_a_missing_folder_are_missing_baselines(store, tmp_path):
    (store / "cuda" / "h200" / "e2e" / "dapo.curves.json").write_text("[1]")
    (found,) = both_sides(NAMED[2:], provenance(), store)["missing"]
    assert found[1] == "not a baseline of this schema"
    for root in (None, tmp_path / "nowhere"):
        told = both_sides(NAMED, provenance(), root)
        assert {why for _, why in told["missing"]} == {"the folder of the stored baselines is not here"}


def test_a_run_without_provenance_is_said_so(store):
    found = both_sides(NAMED, None, store)
    assert by_name(found)["chip"] == {"name": "chip", "values": ["not stored", "H200", "H200"], "differs": False}
    assert both_sides([verdict(None)], None, store) is None


def test_the_titles_that_checks_give_are_understood():
    file = next(BaselineStore(STORED).files(layer="unit"))
    entry = next(iter(file.entries.values()))
    step = fallback_order(file.kind, file.chip)[0]
    where = {"kind": file.kind, "chip": file.chip}
    titles = [
        Selection(file=file, entry=entry, step=step, tried=()).title,
        select_curves(STORED, "dapo-tiny", **where).title,
        select_replay(STORED, "dapo-tiny", **where).title,
    ]
    found = both_sides([verdict(each) for each in titles], None, STORED)
    assert found["missing"] == []
    assert set(by_name(found)["chip"]["values"]) == {"not stored", file.chip}
