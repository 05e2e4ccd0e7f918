"""Environments: what is built, what is run in it, and the proof that it is the stack that was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from alignment.bisect.providers.base import Environment, NotBuilt, verify
from alignment.bisect.providers.choice import kind_for, make_provider
from alignment.bisect.providers.command import CommandProvider, sourced
from alignment.bisect.providers.container import ASCEND_DEVICES, ContainerProvider
from alignment.bisect.providers.git import GitProvider, plain_metadata
from alignment.bisect.providers.venv import VenvProvider, find_uv, site_packages
from alignment.bisect.stack import Pin, stack_from_data
from alignment.errors import InputError

DIGEST = "sha256:" + "ab" * 32
IMAGE = f"registry/alignment@{DIGEST}"


def stack(define=None, image="", **components):
    data = {"schema": 1, "name": "s", "components": components}
    return stack_from_data({**data, **({"define": define} if define else {}), **({"image": image} if image else {})})


# Virtual environments.


def make_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel of one module that says its version, made without any tool."""
    import zipfile

    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{f},,\n" for f in [*files, f"{info}/RECORD"]))
    return path


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "alpha", version)
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(tmp_path / "wheels"))
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
    return tmp_path / "wheels"


DEFINE = {"alpha": {"module": "alpha"}}


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_release_is_installed_over_the_shared_base(tmp_path, wheels, tool):
    if tool == "uv" and find_uv() is None:
        pytest.skip("uv is not installed")
    provider = VenvProvider(directory=tmp_path / "cache", uv=find_uv() if tool == "uv" else None)
    for version in ("1.0", "2.0"):
        asked = stack(DEFINE, alpha=version)
        environment = provider.prepare(asked)
        assert verify(environment, asked, {}) == []
        done = environment.run([environment.python, "-c", "import alpha, pytest; print(alpha.VERSION)"])
        assert done.stdout.strip() == version, done.stderr
    assert len([p for p in (tmp_path / "cache").iterdir() if p.is_dir()]) == 2


def test_an_environment_is_built_once(tmp_path, wheels):
    provider = VenvProvider(directory=tmp_path / "cache", uv=None)
    first = provider.build(stack(DEFINE, alpha="1.0"))
    (first / "mark").touch()
    assert provider.build(stack(DEFINE, alpha="1.0")) == first and (first / "mark").exists()


def test_an_environment_that_was_not_finished_is_built_again(tmp_path, wheels):
    provider = VenvProvider(directory=tmp_path / "cache", uv=None)
    root = provider.build(stack(DEFINE, alpha="1.0"))
    (root / "environment.json").unlink()
    (root / "half").touch()
    assert provider.build(stack(DEFINE, alpha="1.0")) == root and not (root / "half").exists()


def test_what_the_base_has_is_shared(tmp_path):
    import packaging

    asked = stack({"packaging": {"module": "packaging"}}, packaging=packaging.__version__)
    environment = VenvProvider(directory=tmp_path / "cache", uv=None).prepare(asked)
    assert verify(environment, asked, {}) == []
    assert not list(site_packages(Path(environment.python).parents[1]).glob("packaging*"))


def test_a_version_that_is_not_to_be_had_is_a_skip_of_its_class(tmp_path, wheels):
    with pytest.raises(NotBuilt) as caught:
        VenvProvider(directory=tmp_path / "cache", uv=None).prepare(stack(DEFINE, alpha="3.0"))
    assert caught.value.reason == "build" and not caught.value.transient
    assert "alpha==3.0 cannot be installed" in caught.value.detail and "://" not in caught.value.detail.replace(
        "://…", ""
    )
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


def test_revisions_are_not_for_the_venv_provider(tmp_path):
    asked = stack(verl={"git": None, "revision": "abc"})
    with pytest.raises(NotBuilt, match="verl: revisions need the git provider"):
        VenvProvider(directory=tmp_path).prepare(asked)


# The proof.


def test_a_stale_environment_is_found_out(tmp_path, wheels):
    provider = VenvProvider(directory=tmp_path / "cache", uv=None)
    asked = stack(DEFINE, alpha="1.0", CANN="8.2.RC1")
    environment = provider.prepare(asked)
    assert verify(environment, asked, {"CANN": "unknown"}) == []
    assert verify(environment, asked, {"CANN": "8.3.RC1"}) == ["CANN: this machine has 8.3.RC1, 8.2.RC1 was asked for"]
    assert verify(environment, stack(DEFINE, alpha="2.0"), {}) == ["alpha: version 1.0 is there, 2.0 was asked for"]
    shadow = tmp_path / "shadow"
    (shadow / "alpha").mkdir(parents=True)
    (shadow / "alpha" / "__init__.py").touch()
    shadowed = Environment(
        stack=asked, python=environment.python, places=environment.places, variables={"PYTHONPATH": str(shadow)}
    )
    wrong = verify(shadowed, asked, {})
    assert len(wrong) == 1 and wrong[0].startswith(f"alpha: it would be imported from {shadow}")
    missing = {"beta": {"module": "beta"}}
    assert verify(environment, stack(missing, beta="1"), {}) == ["beta: 1 was asked for, and it is not installed"]


def test_python_may_be_asked_for_by_its_minor_version(tmp_path):
    here = Environment(stack=stack(python="3"), python=sys.executable)
    minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert verify(here, stack(python=minor), {}) == []
    assert "was asked for" in verify(here, stack(python="2.7"), {})[0]


# Worktrees.


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "clone"

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(
            ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / "pyproject.toml").write_text('[project]\nname = "beta"\nversion = "0.1"\n')
    (folder / "beta").mkdir()
    revisions = []
    for number in range(3):
        (folder / "beta" / "__init__.py").write_text(f"NUMBER = {number}\n")
        if number == 2:
            (folder / "beta" / "kernel.h").write_text("native\n")
        git("add", ".")
        git("commit", "-qm", str(number))
        revisions.append(git("rev-parse", "HEAD"))
    return folder, revisions


def test_a_worktree_moves_and_is_installed_once(tmp_path, repository):
    folder, revisions = repository
    provider = GitProvider(venv=VenvProvider(directory=tmp_path / "cache", uv=None))
    define = {"beta": {"module": "beta"}}
    seen = []
    for revision in (revisions[0], revisions[1], revisions[0], revisions[2]):
        asked = stack(define, beta={"git": str(folder), "revision": revision[:10]})
        environment = provider.prepare(asked)
        assert verify(environment, asked, {}) == []
        seen.append(environment.run([environment.python, "-c", "import beta; print(beta.NUMBER)"]).stdout.strip())
    assert seen == ["0", "1", "0", "2"]
    roots = [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    assert len(roots) == 1


def test_it_is_installed_again_when_native_files_changed(tmp_path, repository, monkeypatch):
    folder, revisions = repository
    import alignment.bisect.providers.git as git

    linked = []
    original = git.link_package
    monkeypatch.setattr(git, "link_package", lambda *a: linked.append(a) or original(*a))
    provider = GitProvider(venv=VenvProvider(directory=tmp_path / "cache", uv=None))
    for revision in (revisions[0], revisions[1], revisions[2]):
        provider.prepare(stack({"beta": {"module": "beta"}}, beta={"git": str(folder), "revision": revision}))
    assert len(linked) == 2


@pytest.mark.slow
def test_native_code_is_compiled_again_where_it_changed(tmp_path):
    pytest.importorskip("setuptools")
    folder = tmp_path / "clone"
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (folder / "setup.py").write_text(
        "from setuptools import Extension, setup\n"
        "setup(name='gamma', version='1', py_modules=['gamma'], ext_modules=[Extension('_gamma', ['gamma.c'])])\n"
    )
    (folder / ".gitignore").write_text("*.so\nbuild\n*.egg-info\n")
    (folder / "gamma.py").write_text("from _gamma import number\n")
    source = (
        "#include <Python.h>\nstatic PyObject *number(PyObject *s, PyObject *a) { return PyLong_FromLong(%d); }\n"
        'static PyMethodDef m[] = {{"number", number, METH_NOARGS, 0}, {0}};\n'
        'static struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "_gamma", 0, -1, m};\n'
        "PyMODINIT_FUNC PyInit__gamma(void) { return PyModule_Create(&d); }\n"
    )
    revisions = []
    for number in (1, 2):
        (folder / "gamma.c").write_text(source % number)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", str(number)], check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        revisions.append(head.stdout.strip())
    provider = GitProvider(venv=VenvProvider(directory=tmp_path / "cache"))
    for revision, expected in ((revisions[0], "1"), (revisions[1], "2"), (revisions[0], "1")):
        asked = stack({"gamma": {"module": "gamma"}}, gamma={"git": str(folder), "revision": revision})
        environment = provider.prepare(asked)
        assert verify(environment, asked, {}) == []
        done = environment.run([environment.python, "-c", "import gamma; print(gamma.number())"])
        assert done.stdout.strip() == expected, done.stderr


def test_a_checkout_that_was_killed_is_repaired(tmp_path, repository):
    folder, revisions = repository
    provider = GitProvider(venv=VenvProvider(directory=tmp_path / "cache", uv=None))
    asked = stack({"beta": {"module": "beta"}}, beta={"git": str(folder), "revision": revisions[1]})
    environment = provider.prepare(asked)
    tree = environment.places["beta"][0]
    (tree / "beta" / "__init__.py").write_text("half")
    (tree / "leftover.py").touch()
    provider.prepare(asked)
    assert (tree / "beta" / "__init__.py").read_text() == "NUMBER = 1\n" and not (tree / "leftover.py").exists()


def test_slots_have_worktrees_of_their_own(tmp_path, repository):
    folder, revisions = repository
    provider = GitProvider(venv=VenvProvider(directory=tmp_path / "cache", uv=None))
    asked = stack({"beta": {"module": "beta"}}, beta={"git": str(folder), "revision": revisions[1]})
    assert provider.prepare(asked, slot=0).places["beta"] != provider.prepare(asked, slot=1).places["beta"]


def test_a_component_without_a_clone_says_what_to_name(tmp_path):
    provider = GitProvider(venv=VenvProvider(directory=tmp_path / "cache", uv=None))
    with pytest.raises(NotBuilt, match="name one with --repository verl=PATH"):
        provider.prepare(stack(verl={"git": None, "revision": "abc"}))


def test_only_static_metadata_is_linked_without_a_build(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\ndynamic = ["version"]\n')
    assert plain_metadata(tmp_path) is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    assert plain_metadata(tmp_path) == {"name": "x", "version": "1", "source": str(tmp_path)}
    (tmp_path / "setup.py").touch()
    assert plain_metadata(tmp_path) is None


# Activation scripts.


def test_an_activation_sees_the_stack_and_shapes_what_is_run(tmp_path):
    script = tmp_path / "set_env.sh"
    script.write_text('export WHAT="$ALIGNMENT_STACK_TORCH_NPU on $ALIGNMENT_STACK_CANN"\n')
    provider = CommandProvider(activation=sourced(script), python=sys.executable)
    environment = provider.prepare(stack(torch_npu="2.7.1", CANN="8.2.RC2", verl={"git": None, "revision": "abc"}))
    done = environment.run(["bash", "-c", 'echo "$WHAT $ALIGNMENT_STACK_VERL_REVISION $1"', "bash", "a b"])
    assert done.stdout.strip() == "2.7.1 on 8.2.RC2 abc a b"


def test_an_activation_that_fails_is_a_skip_or_tried_again(tmp_path):
    with pytest.raises(NotBuilt, match="the activation failed with code 3") as caught:
        CommandProvider(activation="echo no such CANN >&2; exit 3").prepare(stack(torch="2"))
    assert not caught.value.transient and "no such CANN" in caught.value.detail
    with pytest.raises(NotBuilt) as caught:
        CommandProvider(activation="exit 75").prepare(stack(torch="2"))
    assert caught.value.transient


# Containers: how their commands are made.


def test_the_command_of_a_container(tmp_path):
    provider = ContainerProvider(engine="podman", mounts=(tmp_path,), npus=(0, 1, 2, 3), slots=2)
    line = provider.command(
        stack(image=IMAGE, torch="2.7.1"), ["python3", "-c", "1"], cwd=tmp_path, variables={"A": "b c"}, slot=1
    )
    assert line[:3] == ["podman", "run", "--rm"] and line[-4:] == [IMAGE, "python3", "-c", "1"]
    given = [line[i + 1] for i, word in enumerate(line) if word == "--device"]
    assert given == ["/dev/davinci2", "/dev/davinci3", *ASCEND_DEVICES]
    assert f"{tmp_path}:{tmp_path}" in line and "A=b c" in line
    assert line[line.index("--workdir") + 1] == str(tmp_path)
    assert "/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro" in line


def test_no_npu_no_devices(tmp_path):
    line = ContainerProvider().command(stack(image=IMAGE, torch="2.7.1"), ["true"], cwd=None, variables={})
    assert "--device" not in line and "--volume" not in line


def test_a_mixed_stack_runs_in_the_nearest_image_with_its_packages_installed():
    near = stack(image=IMAGE, torch="2.7.1", CANN="8.2.RC1", verl="0.6", ray="2.46")
    far = stack(image=IMAGE.replace("ab", "cd"), torch="2.6.0", CANN="8.2.RC1", verl="0.5", ray="2.40")
    provider = ContainerProvider(images=(far, near))
    mixed = near.with_pins(
        {
            "verl": Pin(kind="git", revision="abc", repository="https://x/verl"),
            "ray": Pin(kind="release", version="2.47"),
        }
    )
    image, lacking = provider.recipe(mixed)
    assert image == IMAGE and lacking == ["ray==2.47", "verl @ git+https://x/verl@abc"]
    line = provider.command(mixed, ["python3", "probe.py"], cwd=None, variables={})
    place = line.index(IMAGE)
    assert line[place + 1 : place + 3] == ["sh", "-c"] and line[-2:] == ["python3", "probe.py"]
    assert "python3 -m pip install --quiet --no-deps ray==2.47 'verl @ git+https://x/verl@abc'" in line[place + 3]
    with pytest.raises(NotBuilt, match="no image of the given stacks has its CANN"):
        provider.recipe(near.with_pins({"CANN": Pin(kind="fact", version="8.3.RC1")}))


def test_an_image_has_to_be_named_by_its_digest():
    with pytest.raises(NotBuilt, match="is not named by its digest"):
        ContainerProvider().prepare(stack(image="registry/alignment:nightly", torch="2"))


def test_the_job_of_kubernetes(tmp_path):
    provider = ContainerProvider(
        engine="k8s",
        mounts=(tmp_path,),
        npus=(0, 1),
        namespace="nightly",
        job={"spec": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}},
    )
    job = provider.manifest(stack(image=IMAGE, torch="2"), ["python3", "x"], cwd=tmp_path, variables={"K": "v"})
    pod = job["spec"]["template"]["spec"]
    assert job["kind"] == "Job" and job["spec"]["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert pod["nodeSelector"] == {"a": "b"}
    container = pod["containers"][0]
    assert (
        container["image"] == IMAGE
        and container["command"] == ["python3", "x"]
        and container["env"] == [{"name": "K", "value": "v"}]
    )
    assert container["resources"] == {"limits": {"huawei.com/Ascend910": 2}}
    assert pod["volumes"][0]["hostPath"] == {"path": str(tmp_path)}
    commands = provider.job_commands(job)
    assert commands["create"] == ["kubectl", "--namespace", "nightly", "create", "--filename", "-"]
    assert commands["delete"][:5] == ["kubectl", "--namespace", "nightly", "delete", "job"]
    json.dumps(job)


def test_a_container_runs_through_its_engine(tmp_path, monkeypatch):
    """A stand-in engine on the path shows that what is built is what is run."""
    engine = tmp_path / "docker"
    engine.write_text(
        '#!/bin/sh\ncase "$1" in image) exit 0;; esac\n'
        'while [ "${1#registry}" = "$1" ]; do shift; done\nshift\nexec "$@"\n'
    )
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    environment = ContainerProvider(python=sys.executable).prepare(stack(image=IMAGE, torch="2"))
    assert environment.run(["echo", "inside"]).stdout.strip() == "inside"


# Choosing one.


def test_the_provider_that_fits():
    assert kind_for([stack(torch="2")]) == "venv"
    assert kind_for([stack(verl={"git": None, "revision": "a"})]) == "git"


def test_what_a_provider_needs(tmp_path):
    def make(**settings):
        return make_provider(settings, cache=tmp_path, repositories={}, slots=1)

    with pytest.raises(InputError, match="there is no such provider; expected venv?"):
        make(kind="venw")
    with pytest.raises(InputError, match="the command provider needs its script"):
        make(kind="command")
    with pytest.raises(InputError, match="there is no such container engine"):
        make(kind="container", engine="lxc")
    assert make(kind="git").venv.base == sys.executable
