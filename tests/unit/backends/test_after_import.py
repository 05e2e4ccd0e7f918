"""A module is changed at the moment it is imported, whoever imports it."""

import sys

import pytest

from alignment.backends.after_import import _Finder, after_import


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A package with a submodule that nobody has imported; the finder of this test is its own."""
    package = tmp_path / "freshly_made"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, _Finder)])
    yield "freshly_made.inner"
    for name in [n for n in sys.modules if n.startswith("freshly_made")]:
        del sys.modules[name]


def test_changes_are_made_when_the_module_is_imported_in_order(fresh):
    after_import(fresh, lambda module: setattr(module, "value", module.value + 1))
    after_import(fresh, lambda module: setattr(module, "value", module.value * 10))
    assert fresh not in sys.modules
    from freshly_made import inner

    assert inner.value == 20


def test_a_module_that_is_there_is_changed_at_once(fresh):
    import freshly_made.inner as inner

    after_import(fresh, lambda module: setattr(module, "value", 7))
    assert inner.value == 7


def test_a_module_that_does_not_exist_is_not_found_all_the_same(fresh):
    after_import("freshly_made.absent", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="freshly_made.absent"):
        import freshly_made.absent  # noqa: F401


def test_a_failing_change_fails_the_import(fresh):
    def fail(module):
        raise RuntimeError("another release")

    after_import(fresh, fail)
    with pytest.raises(RuntimeError, match="another release"):
        import freshly_made.inner  # noqa: F401
