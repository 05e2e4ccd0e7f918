"""What a run leaves behind can be read again, bit for bit."""

import math

import pytest

from alignment.errors import InputError
from alignment.numerics.verdict import Measure, Outcome, Verdict
from alignment.report.run_directory import new_run_directory, read_verdicts, write_verdicts


@pytest.mark.parametrize("value", [0.1 + 0.2, math.nan, math.inf, -math.inf])
def test_verdicts_survive_the_file(tmp_path, value):
    verdict = Verdict(
        check="c", layer="unit", stage="operator", subject="torch", device="cpu", outcome=Outcome.FAIL, reason="r",
        measures=(Measure(name="x", value=value, bound=1.0),),
    )
    write_verdicts(tmp_path, [verdict])
    (read,) = read_verdicts(tmp_path)
    assert repr(read) == repr(verdict)


def test_two_runs_never_share_a_directory(tmp_path):
    assert new_run_directory(tmp_path) != new_run_directory(tmp_path)
    write_verdicts(tmp_path / "mine", [])
    with pytest.raises(InputError, match="already holds a finished run"):
        new_run_directory(tmp_path, requested=tmp_path / "mine")


def test_a_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(InputError, match="verdicts.json: the file does not exist"):
        read_verdicts(tmp_path)
