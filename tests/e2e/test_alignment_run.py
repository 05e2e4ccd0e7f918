"""``alignment run`` from the outside: 0 when aligned, 1 with stage, layer and quantity for each deliberate fault, 2 for usage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("deliberate_faults.py")


def alignment(*arguments, cwd, timeout=600):
    """The command as a user starts it: exit code, what it printed, and where it left its files."""
    done = subprocess.run(
        [sys.executable, "-m", "alignment", *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd, timeout=timeout, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"},
    )  # fmt: skip
    return done


def run_json(*arguments, cwd):
    done = alignment("run", "--json", "--device", "cpu", "--baseline", ROOT / "baselines", *arguments, cwd=cwd)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert document["exit_code"] == done.returncode
    return done.returncode, document["verdicts"]


@pytest.mark.parametrize(
    ("fault", "part", "stage", "module", "quantity"),
    [
        ("softmax_scale_of_value_width", "layer", "decoder layer", "layers.0.self_attn.core", "core"),
        ("stale_absorbed_weights", "weight_sync", "weight_sync", "model.layers.0.self_attn", "w_u"),
        ("prompt_token_in_loss_mask", "replay", "actor_update", "response tokens", "actor/entropy"),
    ],
)
def test_a_fault_is_found_and_placed_and_the_clean_run_is_aligned(fault, part, stage, module, quantity, tmp_path):
    code, verdicts = run_json("--only", part, cwd=tmp_path)
    assert code == 0, [v["reason"] for v in verdicts if v["outcome"] != "pass"]
    code, verdicts = run_json("--only", part, "--fault", f"{FAULTS}:{fault}", cwd=tmp_path)
    assert code == 1
    places = [v["where"] for v in verdicts if v["outcome"] == "fail"]
    assert any(
        p["stage"] == stage and p["module"].startswith(module) and p["quantity"].startswith(quantity) for p in places
    ), places


def test_a_finding_reads_as_the_readme_says(tmp_path):
    done = alignment(
        "run", "--only", "weight_sync", "--device", "cpu", "--fault", f"{FAULTS}:stale_absorbed_weights", cwd=tmp_path
    )
    assert done.returncode == 1
    for words in ("what ", "where ", "how far ", "next ", "weight_sync · model.layers.0.self_attn · w_u", "MISALIGNED"):
        assert words in done.stdout


def test_a_policy_that_does_not_learn_fails_the_curve_gate(tmp_path):
    """Nothing but the curve can see it: rollouts, log-probs and gradients are all right."""
    code, verdicts = run_json(
        "--only", "curve", "--executor", "inprocess", "--fault", f"{FAULTS}:updates_that_change_nothing", cwd=tmp_path
    )
    assert code == 1
    outcome = {v["check"]: v["outcome"] for v in verdicts}
    assert outcome["e2e/curve-dapo-tiny-reward"] == "fail"
    assert outcome["e2e/identities"] == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("config", ["dapo-tiny", "dapo-tiny-four-updates", "dapo-tiny-filtered"])
def test_every_stored_setting_is_aligned_with_itself(config, tmp_path):
    """Paired and unpaired gates, one update and four, on a seed that no baseline used."""
    code, verdicts = run_json("--only", "replay,curve", "--config", config, cwd=tmp_path)
    assert code == 0, [v["reason"] for v in verdicts if v["outcome"] != "pass"]
    replayed = [v["outcome"] for v in verdicts if "replay" in v["check"]]
    assert replayed == ["unavailable" if config.endswith("filtered") else "pass"]


@pytest.mark.slow
def test_the_whole_run_finds_each_fault(tmp_path):
    for fault in ("softmax_scale_of_value_width", "stale_absorbed_weights", "prompt_token_in_loss_mask"):
        code, verdicts = run_json("--fault", f"{FAULTS}:{fault}", cwd=tmp_path)
        assert code == 1
        assert any(v["where"] for v in verdicts if v["outcome"] == "fail")


@pytest.mark.slow
def test_the_whole_run_twice_leaves_the_same_bytes(tmp_path):
    written = []
    for name in ("first", "second"):
        code, _ = run_json("--only", "curve", "--run-dir", tmp_path / name, cwd=tmp_path)
        assert code == 0
        written.append((tmp_path / name / "dapo" / "metrics.jsonl").read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "actor_rollout_ref.actor.clip_ratio_hihg=0.3"], "clip_ratio_high"),
        (["run", "--only", "units"], "there is no such part"),
        (["run", "--subject", "torhc"], "there is no such subject"),
        (["run", "--baseline", "nowhere"], "the folder of the baselines does not exist"),
        (["run", "--device", "cuda:7"], "cuda"),
        (["run", "--fault", "nothing.py:x"], "the file of the fault does not exist"),
        (["dapo", "--config", "dapo-tniy"], "dapo-tiny"),
        (["baseline", "show", "rms_nrm-float32"], "nothing is stored under this name"),
        (["baseline", "list", "--layer", "units"], "there is no such layer"),
        (["baseline", "record", "--subject", "torhc"], "there is no such subject"),
        (["rollout", "engine.rollout=golde"], "golde"),
        (["checkpoint", "cut", "nowhere", "there", "--layers", "a,b"], "layers are numbers"),
        (["checkpoint", "fp8-to-bf16", "nowhere", "there"], "config.json"),
    ],
)
def test_bad_usage_is_one_message_exit_2_and_no_file(arguments, message, tmp_path):
    done = alignment(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def _without_a_tensor(tensors):
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]


def _with_one_more(tensors):
    tensors["model.extra.weight"] = torch.zeros(2)


def _with_nan(tensors):
    tensors["model.layers.0.mlp.gate_proj.weight"][0, 0] = float("nan")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_a_tensor, "model.layers.1.mlp.experts.3.down_proj.weight"),
        (_with_one_more, "model.extra.weight"),
        (_with_nan, "not finite"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_exit_2(damage, message, tmp_path):
    from safetensors.torch import load_file, save_file

    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(ROOT / "baselines" / "checkpoints" / "tiny-moonlight-warm", checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    damage(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    done = alignment(
        "dapo", "--executor", "inprocess", "--device", "cpu", f"actor_rollout_ref.model.path={checkpoint}",
        "trainer.total_training_steps=1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not any(path.stat().st_size for path in tmp_path.glob("runs/*/metrics.jsonl"))


def test_a_baseline_of_another_configuration_is_exit_2(tmp_path):
    """The run is refused before it starts to compare: the stored curves belong to another experiment."""
    done = alignment(
        "run", "--only", "replay", "--device", "cpu", "--baseline", ROOT / "baselines",
        "actor_rollout_ref.actor.clip_ratio_high=0.5", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert "not the recorded one" in done.stdout


def test_a_damaged_baseline_is_exit_2_and_named(tmp_path):
    folder = tmp_path / "baselines"
    shutil.copytree(ROOT / "baselines", folder, ignore=shutil.ignore_patterns("checkpoints", "data"))
    path = next(folder.glob("cpu/*/unit/rms_norm.json"))
    path.write_text(path.read_text().replace("1", "2", 1))
    done = alignment("run", "--device", "cpu", "--only", "unit", "--subject", "torch", "--baseline", folder, cwd=tmp_path)
    assert done.returncode == 2
    assert "rms_norm.json: the baseline file is damaged or was edited" in done.stdout
