"""The simulated bars, on fewer worlds than the benchmark itself takes, and the file of its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def bisection():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bisection

        yield bisection
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_the_bars_are_kept(bisection):
    found = bisection.measure(12)
    assert found["above_bound"] == 0 and found["wrong"] == 0
    assert found["clean_p95"] <= bisection.CLEAN_P95_BAR
    assert found["two_causes_right"] == found["drift_right"] == found["interaction_right"] == 1.0
    assert (
        found["noisy_right"] >= bisection.RIGHT_BAR - 3 * (bisection.RIGHT_BAR * (1 - bisection.RIGHT_BAR) / 120) ** 0.5
    )
    assert {"clean_p95", "skip10_p95", "noisy_right", "noisy_mean_probes"} <= set(found)


def test_a_search_that_does_not_halve_breaks_the_bar(bisection, monkeypatch):
    import alignment.bisect.line_search as line_search

    monkeypatch.setattr(line_search, "choose", lambda live, count, weights=None: [live[0]])
    found = bisection.single_cause(10, 7, 0.0, bisection.SEED)
    assert found["p95"] > bisection.CLEAN_P95_BAR and found["above_bound"] > 0


def test_other_scripts_of_the_folder_get_the_standard_librarys_bisect():
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import bisect; "
        "print(bisect.bisect_left([1, 3], 2), bisect.__file__)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 ") and str(BENCHMARKS) not in done.stdout
