"""The container recipes and the scripts that use them: complete, safe to run, and refusing a wrong stack."""

from __future__ import annotations

import re
import subprocess
import zipfile

import pytest
from ci_folder import CI, nightly, script, tool

from alignment.bisect.stack import load_stack

check_stack = script("check_stack")
try_recipe = script("containers/try_recipe")
render, MATRIX, SITE = nightly()
TARGETS = render.targets(MATRIX, SITE)
RECIPES = sorted((CI / "containers").glob("*.Containerfile"))
SCRIPTS = sorted((CI / "rendered").rglob("*.sh"))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_argument_of_a_recipe_that_has_no_default_is_given(target):
    assert list(target.build_arguments) == render.recipe_arguments(target.chip.containerfile)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_holds_no_version_and_ends_by_checking_its_stack(path):
    text = path.read_text(encoding="utf-8")
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert not re.search(r"==\d|FROM (?!\$\{BASE\})", code)
    assert 'python ci/check_stack.py "${STACK}"' in code


def test_the_entry_point_of_the_cann_image_is_taken_away():
    # It sources set_env.sh, which sets what is not deterministic over the environment of the container.
    assert "\nENTRYPOINT []\n" in (CI / "containers" / "atlas.Containerfile").read_text(encoding="utf-8")


def test_hadolint_finds_nothing():
    done = subprocess.run([tool("hadolint"), *map(str, RECIPES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_a_recipe_that_pins_nothing(tmp_path):
    recipe = tmp_path / "cpu.Containerfile"
    text = (CI / "containers" / "cpu.Containerfile").read_text(encoding="utf-8")
    recipe.write_text(text.replace("# hadolint ignore=DL3008\n", "", 1), encoding="utf-8")
    done = subprocess.run([tool("hadolint"), str(recipe)], capture_output=True, text=True)
    assert done.returncode == 1 and "DL3008" in done.stdout, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: "/".join(p.parts[-2:]))
def test_scripts_are_shell_and_may_be_run(path):
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert path.stat().st_mode & 0o111


def test_shellcheck_finds_nothing():
    done = subprocess.run([tool("shellcheck"), *map(str, SCRIPTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_shellcheck_finds_a_folder_that_falls_apart(tmp_path):
    broken = tmp_path / "night.sh"
    text = (CI / "rendered" / "cpu" / "night.sh").read_text(encoding="utf-8")
    broken.write_text(text.replace('mkdir -p "$out"', "mkdir -p $out"), encoding="utf-8")
    done = subprocess.run([tool("shellcheck"), str(broken)], capture_output=True, text=True)
    assert done.returncode == 1 and "SC2086" in done.stdout, done.stdout


@pytest.fixture
def engine(tmp_path):
    """A container engine that writes down how it was called, and exits with 7."""
    path = tmp_path / "engine"
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/called\n[ "$1" = run ] && exit 7\nexit 0\n')
    path.chmod(0o755)
    return path


def run(name, *arguments, engine, cwd, **environ):
    environ |= {"PATH": "/usr/bin:/bin", "CONTAINER_ENGINE": str(engine), "ALIGNMENT_COMMIT": "0123abc"}
    line = ["bash", str(CI / "rendered" / name), *arguments]
    return subprocess.run(line, cwd=cwd, env=environ, capture_output=True, text=True)


def test_build_gives_the_arguments_of_the_stack_and_pushes_when_told(engine, tmp_path):
    assert run("atlas-a2/build.sh", "--push", engine=engine, cwd=tmp_path).returncode == 0
    called = (tmp_path / "called").read_text().splitlines()
    assert "BASE=quay.io/ascend/cann:8.2.rc2-910b-ubuntu22.04-py3.11" in called and "COMMIT=0123abc" in called
    assert called[-2:] == ["push", "registry.example.com/alignment/atlas-a2:nightly"]
    assert not any("TORCH_INDEX" in word for word in called)


def test_build_hands_on_an_index_of_cpu_wheels_and_pushes_nothing_untold(engine, tmp_path):
    index = "https://download.pytorch.org/whl/cpu"
    assert run("cpu/build.sh", engine=engine, cwd=tmp_path, TORCH_INDEX=index).returncode == 0
    called = (tmp_path / "called").read_text().splitlines()
    assert called[:3] == ["build", "--file", "ci/containers/cpu.Containerfile"]
    assert f"TORCH_INDEX={index}" in called and called[-1] == "." and "push" not in called


def test_a_night_in_a_container_has_its_store_and_its_exit_code(engine, tmp_path):
    done = run("cpu/night.sh", "night", engine=engine, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    called = (tmp_path / "called").read_text().splitlines()
    assert f"{tmp_path}/night:/store" in called and f"{tmp_path}/history:/history" in called
    assert called[-6:] == ["python", "ci/launch.py", "--row", "cpu", "--store", "/store"]


def test_the_check_fails_an_image_of_the_wrong_stack(tmp_path, capsys):
    path = tmp_path / "stack.yaml"
    path.write_text('schema: 1\ncomponents: {torch: "1.0.0"}\n')
    assert check_stack.main([str(path)]) == 1
    assert re.search(r"torch: expected 1\.0\.0, found \d", capsys.readouterr().err)


def steps_of(recipe):
    text = (CI / "containers" / f"{recipe}.Containerfile").read_text(encoding="utf-8")
    return [rest for instruction, rest in try_recipe.instructions(text) if instruction == "RUN"]


@pytest.mark.parametrize(
    "recipe, not_asked",
    [("cuda", ["apt-get", "pip install --no-deps --no-build"]), ("atlas", ["apt-get", "git+", "--no-build"])],
)
def test_of_a_recipe_its_pins_are_looked_up_and_installed_nowhere(recipe, not_asked):
    asked = [try_recipe.resolving(step) for step in steps_of(recipe)]
    (pins,) = filter(None, asked)
    torch, rest = pins.split(" && ")
    assert "pip install --quiet --dry-run" in torch and torch.endswith('"$(grep \'^torch==\' /opt/requirements.txt)"')
    assert rest.endswith("pip install --quiet --dry-run --no-deps -r /opt/requirements.txt")
    left = [step for step, dry in zip(steps_of(recipe), asked) if not dry]
    assert [word for word in not_asked if not any(word in step for step in left)] == [] and len(left) == len(not_asked)


@pytest.mark.parametrize("release, ends", [("1.0", "resolved, not installed"), ("2.0", "failed: RUN pip install")])
def test_a_pin_that_the_index_does_not_have_fails_the_step(release, ends, tmp_path, monkeypatch):
    wheel = tmp_path / "torch-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
        archive.writestr("torch-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("torch-1.0.dist-info/RECORD", "")
    # The folder with that wheel in the place of the package index.
    config = tmp_path / "pip.conf"
    config.write_text(f"[install]\nno-index = true\nfind-links = {tmp_path}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    sandbox = try_recipe.Sandbox(tmp_path / "try", {})
    sandbox.folder.joinpath("opt").mkdir()
    sandbox.folder.joinpath("opt", "requirements.txt").write_text(f"torch=={release}\n")
    (step,) = (step for step in steps_of("cuda") if "^torch==" in step)
    try:
        said = sandbox.step("RUN", step, system=False, resolve=True)
    except SystemExit as error:
        said = str(error)
    assert said.startswith(ends)
    listed = subprocess.run(
        [sandbox.folder / "venv" / "bin" / "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    )
    assert "torch" not in listed.stdout


def test_the_stacks_go_together():
    from alignment.bisect.constraints import load_constraints

    for path in (CI / "stacks").glob("*.yaml"):
        load_constraints().for_ends([load_stack(path)])
