"""What a run leaves behind can be read again, bit for bit."""

import math

import pytest

from alignment.devices.base import Device, get_device
from alignment.errors import InputError
from alignment.files import read_json, write_json
from alignment.numerics.verdict import Measure, Outcome, Verdict
from alignment.report.run_directory import (
    new_run_directory,
    read_verdicts,
    stored_fingerprint,
    write_training_provenance,
    write_verdicts,
)


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


EMULATED = {"kind": "npu", "label": "npu (emulated)", "chip": "emulated", "emulated": True}


def training(directory, *, deterministic: bool) -> None:
    write_json(directory / "config.json", {"trainer": {"deterministic": deterministic}})
    about = {"device": "npu (emulated)", "provenance": {"model_hash": "m", "data_hash": "d"}}
    write_json(directory / "run.json", {**about, "workers": [{"fingerprint": EMULATED}] * 2})


def test_a_training_says_on_what_its_workers_ran_and_by_which_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("ALIGNMENT_COMMIT", "c0ffee")
    monkeypatch.delenv("HCCL_DETERMINISTIC", raising=False)
    monkeypatch.setattr(Device, "fingerprint", get_device("cpu").fingerprint)
    for deterministic in (True, False):
        training(tmp_path, deterministic=deterministic)
        path = write_training_provenance(tmp_path, Device(kind="npu", index=0, emulated=True))
        assert path.name == "provenance.json"
        made = read_json(path)
        assert made["commit"] == "c0ffee" and made["packages"]["torch"]
        assert made["fingerprint"] == EMULATED, "the machine of the workers, which may be another"
        assert made["hashes"] == {"model": "m", "data": "d"}
        assert made["determinism"]["deterministic_algorithms"] is deterministic
        # Two workers: a collective between NPUs has a switch of its own.
        assert made["determinism"].get("HCCL_DETERMINISTIC") == ("true" if deterministic else None)


@pytest.mark.parametrize(
    ("about", "found"),
    [
        ({"device": "npu (emulated)", "workers": [{"fingerprint": EMULATED}]}, EMULATED),
        ({"device": "npu (emulated)", "workers": [{"device": "npu (emulated)"}]}, {"label": "npu (emulated)"}),
        ({"device": "npu (emulated)"}, {"label": "npu (emulated)"}),
        ({"workers": []}, {}),
    ],
)
def test_the_machine_of_a_training_is_what_its_record_tells(about, found):
    assert stored_fingerprint(about) == found
