"""The scripts of ci/ as modules, and rows and sites to plant errors in."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CI = ROOT / "ci"


def script(name: str):
    """``ci/<name>.py``, freshly loaded."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def nightly():
    """The renderer, and the matrix and the site of this repository: read once for all tests."""
    from alignment.report.night_matrix import read_matrix

    render = script("render")
    return render, read_matrix(CI / "nightly.yaml"), render.read_site(CI / "site.yaml")


def documents(path: Path) -> list[dict]:
    """Every document of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def changed(folder: Path, *, matrix=None, site=None) -> tuple[Path, Path]:
    """A copy of the matrix and the site with their data changed by the given functions; the paths of both."""
    shutil.copytree(CI / "stacks", folder / "stacks", dirs_exist_ok=True)
    shutil.copy(CI / "known_failures.yaml", folder)
    paths = []
    for name, change in (("nightly.yaml", matrix), ("site.yaml", site)):
        data = yaml.safe_load((CI / name).read_text(encoding="utf-8"))
        if change is not None:
            change(data)
        path = folder / name
        path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        paths.append(path)
    return paths[0], paths[1]


def linter(module: str):
    """A checker that the extra ``ci`` brings; absent, its tests are skipped and say how to have them."""
    return pytest.importorskip(module, reason=f"{module} is not installed. Next: pip install 'npu-alignment[ci]'")


def tool(name: str) -> str:
    """A program of the extra ``ci``: on the path, or beside the interpreter of an environment that is not active."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed. Next: pip install 'npu-alignment[ci]'")
    return found
