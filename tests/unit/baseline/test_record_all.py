"""The recording script on a machine that has only torch, numpy, safetensors and pyyaml, resumed after an interruption."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignment.baseline.record_all import main
from alignment.baseline.runs import load_curves, load_replay
from alignment.baseline.store import BaselineStore

ROOT = Path(__file__).resolve().parents[3]
ABSENT = (
    "scipy", "omegaconf", "rich", "typer", "ray", "tensordict", "reasoning_gym", "pyarrow", "jinja2", "tensorboard",
    "math_verify", "hypothesis",
)  # fmt: skip
BLOCK = f"""
import sys
class WithoutThem:
    def __init__(self, finders):
        self.finders = finders
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)
    def find_distributions(self, *context):
        for finder in self.finders:
            yield from getattr(finder, "find_distributions", lambda *context: ())(*context)
    def invalidate_caches(self):
        pass
sys.meta_path[:] = [WithoutThem(list(sys.meta_path))]
"""


def script(out, *arguments, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path),
        "ALIGNMENT_COMMIT": "0123456789abcdef",
    }
    command = ["bash", str(ROOT / "scripts" / "record_gpu_baselines.sh"), *map(str, (out, *arguments))]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)


def test_the_script_records_every_layer_without_what_a_gpu_machine_lacks_and_resumes(tmp_path):
    out = tmp_path / "out"
    small = ("--case", "swiglu", "--case", "decoder_layer.tiny-deepseek-dense-float32", "--subject", "torch")
    first = script(out, "cpu", *small, "--preset", "dapo-tiny", "--steps", "1", tmp_path=tmp_path)
    assert first.returncode == 0, first.stderr
    store = BaselineStore(out)
    kept = {key for file in store.files() for key in file.entries}
    assert kept == {
        "swiglu-float32/torch", "swiglu-bfloat16/torch", "decoder_layer.tiny-deepseek-dense-float32/torch",
    }  # fmt: skip
    (curves,) = out.glob("cpu/*/e2e/dapo-tiny.curves.json")
    assert [run.seed for run in load_curves(curves).runs] == [101, 102, 103, 104, 105]
    (replay,) = out.glob("cpu/*/e2e/dapo-tiny.replay/replay.json")
    assert load_replay(replay).steps == 1
    assert not (out / ".work").exists()

    again = script(out, "cpu", *small, "--preset", "dapo-tiny", "--steps", "1", tmp_path=tmp_path)
    assert again.returncode == 0
    assert "values changed" not in again.stdout, "what is complete is skipped"
    assert "dapo-tiny.curves.json is complete" in again.stdout


def test_the_packages_are_really_absent(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    code = f"import importlib.util as u, torch; print([n for n in {ABSENT!r} if u.find_spec(n)])"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


def test_without_arguments_the_script_explains_itself(tmp_path):
    done = subprocess.run(["bash", str(ROOT / "scripts" / "record_gpu_baselines.sh")], capture_output=True, text=True)
    assert done.returncode == 2 and "record_gpu_baselines.sh OUT [DEVICE]" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "unknown device"),
        (["--device", "cpu", "--layer", "e2e", "--preset", "dapo-huge"], "no such setting is recorded"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setenv("ALIGNMENT_COMMIT", "0123456789abcdef")
    assert main([str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dirty_tree_records_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ALIGNMENT_COMMIT", "0123-dirty")
    assert main([str(tmp_path / "out"), "--device", "cpu"]) == 2
    assert "not recorded from a dirty tree" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
