"""Faults are loaded by name, last as long as their block, and reach worker processes through the environment."""

import os
import subprocess
import sys

import pytest

from alignment.errors import InputError
from alignment.faults.injection import ENVIRONMENT, active, load_fault

FAULT = """
import contextlib, string

@contextlib.contextmanager
def upside_down():
    before, string.digits = string.digits, string.digits[::-1]
    try:
        yield
    finally:
        string.digits = before
"""


@pytest.fixture
def fault_file(tmp_path):
    path = tmp_path / "fault.py"
    path.write_text(FAULT)
    return path


def test_a_fault_lasts_as_long_as_its_block(fault_file):
    import string

    with active([f"{fault_file}:upside_down"]):
        assert string.digits == "9876543210"
        assert os.environ[ENVIRONMENT].endswith("fault.py:upside_down")
    assert string.digits == "0123456789"
    assert ENVIRONMENT not in os.environ


def test_a_worker_process_takes_the_faults_of_its_parent(fault_file):
    code = (
        "import string; from alignment.faults.injection import activate_from_environment as a; a(); print(string.digits)"
    )
    with active([f"{fault_file}:upside_down"]):
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "9876543210"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "there is no such fault; expected an id of the catalogue"),
        ("x.py:not a name", "a fault is named path.py:object"),
        ("missing.py:fault", "the file of the fault does not exist"),
        ("{file}:sideways", "the file has no such fault; expected one of ['upside_down']; found sideways"),
    ],
)
def test_a_fault_that_cannot_be_loaded_is_named(fault_file, spec, message):
    with pytest.raises(InputError) as error:
        load_fault(spec.replace("{file}", str(fault_file)))
    assert message in str(error.value)


def test_a_fault_file_that_is_broken_is_named_and_nothing_runs(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def fault(:")
    with pytest.raises(InputError, match=r"broken.py: the file of the fault cannot be loaded \(SyntaxError"):
        load_fault(f"{path}:fault")
