"""Finding a plugin's source: trees, revisions, wheels, the index, an installation, and what is said without one."""

from __future__ import annotations

import subprocess
import zipfile

import pytest

from alignment.backends.plugin_sources import MINDSPEED, VLLM_ASCEND, asked_sources, opened
from alignment.errors import InputError, UnavailableError


def _git(folder, *arguments):
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _write(root, plugin, text="a = 1\n"):
    path = root / plugin.driven
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def repository(tmp_path):
    """Two commits of a MindSpeed tree; the first is tagged v0.5."""
    root = tmp_path / "repository"
    _write(root, MINDSPEED, "scale = 1\n")
    (root / "setup.py").write_text("__version__ = '0.12.1'\n")
    _git(root, "init", "-q")
    for message in ("first", "second"):
        _git(root, "add", ".")
        _git(root, "commit", "-q", "-m", message)
        if message == "first":
            _git(root, "tag", "v0.5")
            _write(root, MINDSPEED, "scale = 2\n")
    return root


def _wheel(folder, plugin, version="9.9.9", **files):
    path = folder / f"{plugin.package}-{version}-py3-none-any.whl"
    information = f"{plugin.package}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(plugin.driven, "a = 1\n")
        metadata = f"Metadata-Version: 2.1\nName: {plugin.distribution}\nVersion: {version}\n"
        archive.writestr(f"{information}/METADATA", metadata)
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return path


def test_a_git_tree_tells_version_and_commit(repository):
    head = _git(repository, "rev-parse", "HEAD")
    with opened(MINDSPEED, str(repository)) as source:
        assert (source.version, source.commit, source.modified) == ("0.12.1", head, False)
        assert source.subject == f"MindSpeed 0.12.1 (commit {head[:12]})"


def test_a_changed_tree_is_not_named_as_its_commit_alone(repository):
    _write(repository, MINDSPEED, "scale = 3\n")
    head = _git(repository, "rev-parse", "HEAD")
    with opened(MINDSPEED, str(repository)) as source:
        assert source.subject == f"MindSpeed 0.12.1 (commit {head[:12]} and changes)"


def test_a_revision_is_read_without_being_checked_out(repository):
    first = _git(repository, "rev-parse", "HEAD^")
    with opened(MINDSPEED, f"{repository}@HEAD^") as source:
        assert (source.root / MINDSPEED.driven).read_text() == "scale = 1\n"
        assert source.subject == f"MindSpeed 0.12.1 (commit {first[:12]}, tag v0.5)"
        unpacked = source.root
    assert (repository / MINDSPEED.driven).read_text() == "scale = 2\n"
    assert not unpacked.exists()


def test_a_revision_of_a_bare_repository(repository, tmp_path):
    _git(tmp_path, "clone", "-q", "--bare", str(repository), "bare")
    head = _git(repository, "rev-parse", "HEAD")
    with opened(MINDSPEED, f"{tmp_path / 'bare'}@{head[:9]}") as source:
        assert source.subject == f"MindSpeed 0.12.1 (commit {head[:12]})"
        assert (source.root / MINDSPEED.driven).read_text() == "scale = 2\n"


def test_a_branch_is_named_beside_its_commit(repository):
    _git(repository, "branch", "2.2.0_core")
    head = _git(repository, "rev-parse", "HEAD")
    with opened(MINDSPEED, f"{repository}@2.2.0_core") as source:
        assert source.subject == f"MindSpeed 0.12.1 (commit {head[:12]}, 2.2.0_core)"


def test_the_version_of_a_tagged_commit_that_states_none(tmp_path):
    _write(tmp_path, VLLM_ASCEND)
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "first")
    _git(tmp_path, "tag", "v0.9.1")
    head = _git(tmp_path, "rev-parse", "HEAD")
    with opened(VLLM_ASCEND, str(tmp_path)) as source:
        assert source.subject == f"vLLM-Ascend 0.9.1 (commit {head[:12]}, tag v0.9.1)"


@pytest.mark.parametrize(
    "name, text",
    [
        ("PKG-INFO", "Metadata-Version: 2.1\nVersion: 1.2rc3\n"),
        ("vllm_ascend/_version.py", "__version__ = version = '1.2rc3'\n"),
    ],
)
def test_a_tree_without_history_is_identified_by_its_file(tmp_path, name, text):
    _write(tmp_path, VLLM_ASCEND)
    (tmp_path / name).write_text(text)
    with opened(VLLM_ASCEND, str(tmp_path)) as source:
        assert source.subject == f"vLLM-Ascend 1.2rc3 (source tree, sha256 of mla_v1.py {source.digest[:12]})"
        assert len(source.digest) == 64
    other = tmp_path / "other"
    _write(other, VLLM_ASCEND, "a = 2\n")
    with opened(VLLM_ASCEND, str(other)) as changed:
        assert changed.digest != source.digest
        assert changed.subject.startswith("vLLM-Ascend of unknown version (source tree, ")


def test_a_folder_inside_another_repository_does_not_take_its_commit(repository):
    inner = repository / "inner"
    _write(inner, VLLM_ASCEND)
    with opened(VLLM_ASCEND, str(inner)) as source:
        assert source.commit is None


def test_a_wheel(tmp_path):
    wheel = _wheel(tmp_path, VLLM_ASCEND)
    with opened(VLLM_ASCEND, str(wheel)) as source:
        assert source.subject == f"vLLM-Ascend 9.9.9 (wheel, sha256 of mla_v1.py {source.digest[:12]})"


def test_a_wheel_of_the_index(tmp_path, monkeypatch):
    pytest.importorskip("pip")
    _wheel(tmp_path, VLLM_ASCEND)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with opened(VLLM_ASCEND, "index:9.9.9") as source:
        assert source.subject.startswith("vLLM-Ascend 9.9.9 (wheel of the package index, sha256 of mla_v1.py ")


def test_an_index_that_has_no_such_version_is_unavailable(monkeypatch, tmp_path):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UnavailableError) as absent, opened(VLLM_ASCEND, "index:0.9.1"):
        pass
    assert str(absent.value) == (
        "vLLM-Ascend: vllm-ascend 0.9.1 cannot be had from the package index: No matching distribution found for "
        "vllm-ascend==0.9.1. Next: pass a source tree with --vllm-ascend-src"
    )


def test_without_a_source_and_without_an_installation(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError) as absent, opened(MINDSPEED):
        pass
    assert str(absent.value) == (
        "MindSpeed: no source of MindSpeed was given and mindspeed is not installed. Next: pass --mindspeed-src PATH "
        "(or set ALIGNMENT_MINDSPEED_SRC)"
    )


def test_what_is_installed(tmp_path, monkeypatch):
    path = _write(tmp_path, MINDSPEED)
    (tmp_path / "mindspeed" / "__init__.py").write_text("raise RuntimeError('located, not imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with opened(MINDSPEED) as source:
        assert source.root / MINDSPEED.driven == path
        assert source.origin == "installed"


@pytest.mark.parametrize("kind", ["path", "revision", "other project", "not a wheel"])
def test_what_is_no_source_is_one_clear_error(kind, repository, tmp_path):
    (tmp_path / "broken.whl").write_text("nothing")
    text, message = {
        "path": ("/no/such/folder", "--mindspeed-src /no/such/folder: there is no such source; expected a folder, "),
        "revision": (f"{repository}@nowhere", "the repository does not have that revision (or is no git repository)"),
        "other project": (
            str(tmp_path),
            f"{tmp_path}: not a source of MindSpeed; expected {MINDSPEED.driven}; found broken.whl, repository. Next: "
            "pass the folder that holds mindspeed/ with --mindspeed-src",
        ),
        "not a wheel": (str(tmp_path / "broken.whl"), "not a wheel (File is not a zip file)"),
    }[kind]
    with pytest.raises(InputError) as refused, opened(MINDSPEED, text):
        pass
    assert message in str(refused.value)


def test_which_sources_are_asked_for():
    environment = {MINDSPEED.variable: "x, y@z"}
    assert asked_sources(MINDSPEED, ["a,b", "c"], environment) == ["a", "b", "c"]
    assert asked_sources(MINDSPEED, None, environment) == ["x", "y@z"]
    assert asked_sources(MINDSPEED, None, {}) == []


def test_a_machine_with_the_real_torch_npu_is_unavailable_not_wrong(monkeypatch):
    from alignment.backends.plugin_process import install_emulated_npu
    from alignment.devices import emulated_npu

    def refuse():
        raise InputError("the NPU is not emulated where the real torch_npu is installed", where="torch_npu/__init__.py")

    monkeypatch.setattr(emulated_npu, "install", refuse)
    with pytest.raises(UnavailableError, match="npu \\(emulated\\): the NPU is not emulated where the real torch_npu"):
        install_emulated_npu()
