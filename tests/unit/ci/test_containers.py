"""The container recipes and the scripts that use them: complete, safe to run, and refusing a wrong stack."""

from __future__ import annotations

import re
import subprocess

import pytest
from ci_folder import CI, nightly, script, tool

from alignment.bisect.stack import load_stack

check_stack = script("check_stack")
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


def test_the_stacks_go_together():
    from alignment.bisect.constraints import load_constraints

    for path in (CI / "stacks").glob("*.yaml"):
        load_constraints().for_ends([load_stack(path)])
