"""Checks know no fault, faults touch no check: what judges is other code than what is judged."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from pathlib import Path

import pytest

import alignment.faults
from alignment.errors import InputError
from alignment.faults import checks, reference, seam
from alignment.faults.catalogue import all_faults
from alignment.faults.checks import all_checks

ROOT = Path(alignment.faults.__file__).parent
JUDGES = sorted(
    [
        *(ROOT / "checks").glob("*.py"),
        *(ROOT / "reference").glob("*.py"),
        *(ROOT / n for n in ("check.py", "toy.py", "observation.py")),
    ]
)
PURE = (
    "alignment.models.config",
    "alignment.errors",
    "alignment.numerics",
    "alignment.faults.reference",
    "alignment.faults.check",
)
SEAMS = seam.PRODUCT


def imported(path: Path) -> list[tuple[str, str]]:
    """(module, name) of every import of a file, also inside functions; name is empty for ``import module``."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module, alias.name) for alias in node.names]
    return found


def judge_modules():
    names = [
        f"{package.__name__}.{m.name}"
        for package in (checks, reference)
        for m in pkgutil.iter_modules(package.__path__)
    ]
    return [importlib.import_module(name) for name in [*names, "alignment.faults.check", "alignment.faults.toy"]]


def test_no_check_names_a_fault():
    ids = [fault.id for fault in all_faults()]
    assert ids
    for path in JUDGES:
        text = path.read_text()
        assert [one for one in ids if one in text] == [], path.name
        assert not [module for module, _ in imported(path) if module.startswith("alignment.faults.catalogue")], (
            path.name
        )


def test_a_check_that_named_a_fault_would_be_seen(tmp_path):
    path = tmp_path / "partial.py"
    path.write_text("from alignment.faults.catalogue import moe\n")
    assert imported(path) == [("alignment.faults.catalogue", "moe")]


@pytest.mark.parametrize("path", sorted((ROOT / "reference").glob("*.py")), ids=lambda path: path.stem)
def test_references_use_nothing_of_the_product_but_its_configuration(path):
    for module, name in imported(path):
        if module.startswith("alignment") and f"{module}.{name}" not in PURE:
            assert module.startswith(PURE), f"{path.name} imports {module}"


def test_checks_bind_no_function_of_the_product_by_name():
    """A name bound at import would be the original while a fault is on: the check would judge what is not there."""
    bound = []
    for module in judge_modules():
        for name, value in vars(module).items():
            owner = getattr(value, "__module__", "") or ""
            if inspect.isfunction(value) and owner.startswith(SEAMS):
                bound.append(f"{module.__name__}.{name} is {owner}.{value.__name__}")
    assert bound == []


@pytest.mark.parametrize("fault", all_faults(), ids=lambda fault: fault.id)
def test_a_fault_replaces_seams_of_the_product_and_nothing_that_judges(fault):
    judges = judge_modules()
    before = {(m.__name__, k): id(v) for m in judges for k, v in vars(m).items()}
    product_before = _functions_of_the_product()
    with fault():
        assert seam.replaced and all(target.startswith(SEAMS) for target in seam.replaced)
        assert {(m.__name__, k): id(v) for m in judges for k, v in vars(m).items()} == before
    assert seam.replaced == []
    product_after = _functions_of_the_product()
    assert {k: v for k, v in product_after.items() if k in product_before} == product_before, (
        "the product is not as it was"
    )


def _functions_of_the_product() -> dict[str, int]:
    found = {}
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith(SEAMS):
            continue
        for key, value in vars(module).items():
            if inspect.isfunction(value):
                found[f"{name}.{key}"] = id(value)
            elif inspect.isclass(value) and value.__module__ == name:
                found |= {f"{name}.{key}.{k}": id(v) for k, v in vars(value).items() if inspect.isfunction(v)}
    return found


def test_no_product_code_knows_about_faults():
    root = ROOT.parent
    for room in ("numerics", "devices", "models", "weights", "backends", "rl", "capture"):
        for path in (root / room).rglob("*.py"):
            known = [module for module, _ in imported(path) if (module or "").startswith("alignment.faults")]
            assert known == [], path


def test_what_is_outside_the_product_cannot_be_replaced():
    with pytest.raises(InputError, match="a fault replaces a seam of the product"):
        with seam.wrapped("alignment.faults.check:differs", lambda original: original):
            pass
    with pytest.raises(InputError, match="there is no such seam"):
        with seam.wrapped("alignment.models.mla:no_such_thing", lambda original: original):
            pass


def test_a_function_is_replaced_wherever_the_product_bound_it():
    from alignment.models import mla, rope

    with seam.wrapped("alignment.models.rope:softmax_mscale", lambda original: lambda scaling: 7.0):
        assert mla.softmax_mscale(None) == rope.softmax_mscale(None) == 7.0
    assert mla.softmax_mscale(None) == rope.softmax_mscale(None) == 1.0


def test_every_check_has_a_name_of_its_topic_and_runs_in_the_order_of_cost():
    from alignment.faults.check import LAYERS

    order = [(LAYERS.index(check.layer), check.cost) for check in all_checks()]
    assert order == sorted(order)
    assert all(check.name.count(".") == 1 for check in all_checks())
