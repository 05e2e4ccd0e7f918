"""The reference is what the program is: every page is generated, and a page that is not up to date is found."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import pytest
from docs_pages import ROOT

CALL = "python scripts/generate_reference.py"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "scripts" / "generate_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_of_the_reference_is_up_to_date(generator):
    assert sorted(path.name for path in generator.stale()) == [], CALL


@pytest.mark.parametrize("name", ["cli.zh-CN.md", "file-formats.md"])
def test_a_page_that_was_changed_is_stale(generator, name, tmp_path, monkeypatch):
    shutil.copytree(generator.REFERENCE, tmp_path / "reference")
    monkeypatch.setattr(generator, "REFERENCE", tmp_path / "reference")
    page = tmp_path / "reference" / name
    before = page.read_text(encoding="utf-8")
    row = next(line for line in before.splitlines() if line.startswith("| `"))
    page.write_text(before.replace(row, row.replace("`", "`x", 1)), encoding="utf-8")
    assert list(generator.stale()) == [page]
    monkeypatch.setattr(sys, "argv", ["generate_reference.py", "--check"])
    with pytest.raises(SystemExit, match=CALL):
        generator.main()
    monkeypatch.setattr(sys, "argv", ["generate_reference.py"])
    generator.main()
    assert page.read_text(encoding="utf-8") == before


def test_every_argument_and_option_says_what_it_is(generator):
    text = generator.cli_page("")
    silent = [line for line in text.splitlines() if line.startswith("| `") and line.split(" | ")[-1].strip(" |") == ""]
    assert silent == []
    # A command of three words is a group's: all of them are there.
    for name in ("## alignment run\n", "### alignment bisect probe\n", "`--emulate-npu`", "`[KEY=VALUE]...`"):
        assert name in text


def test_a_field_without_a_meaning_is_refused(generator):
    from dataclasses import dataclass

    @dataclass
    class Silent:
        """A section.

        Attributes:
            told: has one.
        """

        told: int = 1
        untold: int = 2

    with pytest.raises(SystemExit, match="Silent.untold: nothing says what this field means"):
        generator._fields(Silent, "", "")


def test_commands_and_configuration_are_read_without_torch():
    program = (
        "import runpy, sys; g = runpy.run_path('scripts/generate_reference.py'); "
        "g['cli_page'](''); g['configuration_page'](''); g['exit_codes_page'](''); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
