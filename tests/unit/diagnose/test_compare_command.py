"""``alignment compare`` from outside: exit codes, what is printed, and files that are not what they should be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from alignment.capture.config import CaptureConfig
from alignment.capture.session import capture
from alignment.cli import main
from alignment.numerics.random import portable_normal


def record(directory, *, scale=1.0, detail="sketch", steps=(0,)):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(portable_normal(tuple(parameter.shape), seed=0, stream=name, dtype=torch.float32))
    model[1].register_forward_hook(lambda module, args, output: output * scale, prepend=True)
    x = portable_normal((6, 8), seed=1, stream="x", dtype=torch.float32)
    with capture(model, CaptureConfig(detail=detail), directory=directory) as session:
        for step in steps:
            with session.step(step):
                model(x).sum().backward()
    return directory


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["alignment", "compare", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.mark.parametrize("detail", ("statistics", "sketch", "tensor"))
def test_equal_captures_exit_with_0_and_unequal_ones_with_1(tmp_path, monkeypatch, capsys, detail):
    golden = record(tmp_path / "golden", detail=detail)
    code, out, _ = run(monkeypatch, capsys, golden, record(tmp_path / "same", detail=detail))
    assert (code, out.splitlines()[-1].split(":")[0]) == (0, "ALIGNED"), out
    code, out, _ = run(monkeypatch, capsys, golden, record(tmp_path / "wrong", detail=detail, scale=1.5))
    assert code == 1
    assert "first misaligned: step 0 train: first introduced divergence: 1, out output" in out


def test_json_holds_the_first_divergence(tmp_path, monkeypatch, capsys):
    golden, target = record(tmp_path / "golden"), record(tmp_path / "target", scale=1.5)
    code, out, _ = run(monkeypatch, capsys, golden, target, "--json")
    data = json.loads(out)
    assert (code, data["aligned"]) == (1, False)
    assert data["stages"][0]["first_forward"]["module"] == "1"
    assert data["stages"][0]["details"] == ["sketch"]


def test_a_calibration_is_written_and_used(tmp_path, monkeypatch, capsys):
    golden, target = record(tmp_path / "golden"), record(tmp_path / "same")
    code, out, _ = run(monkeypatch, capsys, golden, target, "--save-noise", tmp_path / "noise.json")
    assert (code, "noise of" in out) == (0, True)
    assert run(monkeypatch, capsys, golden, target, "--noise", tmp_path / "noise.json")[0] == 0


def test_a_calibration_of_whole_runs_is_that_of_their_captures(tmp_path, monkeypatch, capsys):
    for name in ("golden", "same"):
        record(tmp_path / name / "capture")
        (tmp_path / name / "run.json").write_text("{}")
    code, out, _ = run(
        monkeypatch, capsys, tmp_path / "golden", tmp_path / "same", "--save-noise", tmp_path / "noise.json"
    )
    assert (code, out.count("capture"), (tmp_path / "noise.json").is_file()) == (0, 2, True)


def whole_run(directory, *, extra=False):
    """A run of one step with a capture; with a module more than the others have."""
    model = nn.ModuleDict({"first": nn.Linear(4, 4)} | ({"extra": nn.Identity()} if extra else {}))
    with torch.no_grad():
        model["first"].weight.copy_(torch.eye(4))
        model["first"].bias.zero_()
    config = CaptureConfig(detail="sketch")
    with capture(model, config, directory=directory / "capture") as session, session.step(1):
        x = model["first"](torch.ones(2, 4))
        (model["extra"](x) if extra else x).sum().backward()
    (directory / "run.json").write_text("{}")
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/before_filter": 0.5}) + "\n")
    return directory


def test_modules_that_one_of_two_runs_may_lack_are_allowed_there(tmp_path, monkeypatch, capsys):
    golden, target = whole_run(tmp_path / "golden", extra=True), whole_run(tmp_path / "target")
    code, out, _ = run(monkeypatch, capsys, golden, target, "--json")
    gaps = [gap for stage in json.loads(out)["capture"]["stages"] for gap in stage["unpaired"]]
    assert (code, {(gap["fails"], "extra" in str(gap)) for gap in gaps}) == (1, {(True, True)})
    code, out, _ = run(monkeypatch, capsys, golden, target, "--json", "--allow-missing", "extra*")
    assert (code, [stage["aligned"] for stage in json.loads(out)["capture"]["stages"]]) == (0, [True]), out


@pytest.mark.parametrize(
    "options, said",
    [
        (("--stage", "train", "--step", "1"), "--stage, --step is not read for two runs"),
        (("--golden-format", "own"), "--golden-format is not read for two runs"),
        (("--save-noise", "n.json", "--step", "1"), "--step is not read with --save-noise"),
        (("--save-noise", "n.json", "--allow-missing", "a"), "--allow-missing is not read with --save-noise"),
    ],
)
def test_an_option_that_two_runs_do_not_read_is_usage(tmp_path, monkeypatch, capsys, options, said):
    golden, target = whole_run(tmp_path / "golden"), whole_run(tmp_path / "target")
    assert run(monkeypatch, capsys, golden, target)[0] == 0
    code, out, err = run(monkeypatch, capsys, golden, target, *options)
    assert (code, out) == (2, "") and f"error: compare: {said}" in err, err
    if "two runs" in said:
        assert f"alignment compare {golden / 'capture'} {target / 'capture'}" in err


def test_a_repeat_is_not_read_for_captures(tmp_path, monkeypatch, capsys):
    golden, target = record(tmp_path / "golden"), record(tmp_path / "target")
    code, _, err = run(monkeypatch, capsys, golden, target, "--repeat", golden)
    assert (code, "--repeat is not read for captures" in err, "--save-noise" in err) == (2, True, True)


def test_the_help_says_what_an_inconclusive_comparison_exits_with(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(monkeypatch, capsys, "--help")
    assert (code, "inconclusive" in out) == (0, True)


def test_a_path_that_does_not_exist_is_usage(tmp_path, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, tmp_path / "nowhere", tmp_path / "nowhere")
    assert (code, "no such capture" in err) == (2, True)


@pytest.mark.parametrize("how", ("missing", "truncated", "emptied"))
@pytest.mark.parametrize("suffix", (".json", ".safetensors"))
def test_a_damaged_file_is_usage_and_named(tmp_path, monkeypatch, capsys, how, suffix):
    golden, target = record(tmp_path / "golden"), record(tmp_path / "target")
    victim = next(path for path in sorted(target.rglob(f"*{suffix}")) if path.name.startswith("rank"))
    if how == "missing":
        victim.unlink()
    else:
        data = victim.read_bytes()
        victim.write_bytes(data[: len(data) // 2] if how == "truncated" else b"")
    code, _, err = run(monkeypatch, capsys, golden, target)
    assert code == 2
    assert err.startswith("error: ")
    # without the file that says "finished" the step was never captured
    assert ("the target has []" if (suffix, how) == (".json", "missing") else str(target)) in err


def test_a_step_that_one_side_lacks_fails(tmp_path, monkeypatch, capsys):
    golden, target = record(tmp_path / "golden", steps=(0, 1)), record(tmp_path / "target")
    code, out, _ = run(monkeypatch, capsys, golden, target)
    assert (code, "MISSING  step 1 only in golden" in out) == (1, True)
    assert run(monkeypatch, capsys, golden, target, "--step", "0")[0] == 0
    code, _, err = run(monkeypatch, capsys, golden, target, "--step", "7")
    assert (code, "no such step" in err) == (2, True)


def test_comparing_statistics_and_sketches_does_not_import_torch(tmp_path):
    golden, target = record(tmp_path / "golden"), record(tmp_path / "target")
    script = (
        "import sys\n"
        f"sys.argv = ['alignment', 'compare', {str(golden)!r}, {str(target)!r}]\n"
        "from alignment.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    code = ended.code\n"
        "print('torch' in sys.modules, 'ray' in sys.modules, code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False 0"
