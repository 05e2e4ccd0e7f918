"""Measured phases against the model, and the record of Ascend's profiler."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from alignment.cli import app
from alignment.devices.base import Device, get_device
from alignment.diagnose import memory_profile
from alignment.diagnose.memory_profile import PhaseMemory, outside_framework, profile_step, read_module_memory
from alignment.errors import InputError
from alignment.models.config import preset

# Measured peak of each named phase within 10 % of the estimate: the bar of the project.
BAR = 0.10
SMALL = dataclasses.replace(
    preset("tiny-moonlight"), hidden_size=256, intermediate_size=1024, moe_intermediate_size=256, vocab_size=4096
)
# 169 million parameters, 675 MB in float32.
LARGE = dataclasses.replace(
    preset("tiny-moonlight"), hidden_size=1024, intermediate_size=4096, moe_intermediate_size=1024, vocab_size=16384,
    num_hidden_layers=5, num_attention_heads=8, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32,
    v_head_dim=64,
)  # fmt: skip

RECORD = """Device_id,Component,Timestamp(us),Total Reserved(KB),Device
0,APP,100.5,1048576,NPU:0
0,HCCL,100.5,2097152,NPU:0
0,APP,90,524288,NPU:0
0,HCCL,120,-1,NPU:0
0,RUNTIME,130,1024,NPU:0
"""


@pytest.mark.npu
@pytest.mark.parametrize("config", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "675 MB"])
def test_each_phase_peaks_where_the_model_says(config):
    phases = {p.phase: p for p in profile_step(config, device=get_device("npu"))}
    assert list(phases) == ["rollout", "sleep", "old_log_prob", "ref_log_prob", "update_actor", "offload"]
    for phase in phases.values():
        assert abs(phase.residual) <= BAR * phase.modelled, phase
    asleep = phases["sleep"]
    # Level 2 gives the weights back and leaves the absorbed copies.
    assert asleep.released > 0.9 * asleep.before
    assert phases["offload"].after < 0.1 * phases["offload"].before


@pytest.mark.npu
def test_an_engine_that_does_not_let_go_is_seen(monkeypatch):
    """The model is a check: weights kept alive through the sleep move every later phase out of its band."""
    from alignment.backends.golden_rollout import GoldenRollout

    monkeypatch.setattr(GoldenRollout, "sleep", lambda self, level=1: None)
    phases = {p.phase: p for p in profile_step(SMALL, device=get_device("npu"))}
    assert phases["sleep"].released == 0
    assert phases["old_log_prob"].residual > BAR * phases["old_log_prob"].modelled


@pytest.mark.npu
def test_a_policy_that_stays_on_the_device_is_seen_while_the_reference_computes(monkeypatch):
    from alignment.backends.golden_training import GoldenTrainingEngine

    monkeypatch.setattr(GoldenTrainingEngine, "offload", lambda self: None)
    phases = {p.phase: p for p in profile_step(SMALL, device=get_device("npu"))}
    assert phases["ref_log_prob"].residual > BAR * phases["ref_log_prob"].modelled
    assert phases["offload"].released == 0


def test_the_record_of_the_profiler(tmp_path):
    path = tmp_path / "npu_module_mem_20260101.csv"
    path.write_text(RECORD)
    for given in (path, tmp_path):
        parts = {part.component: part for part in read_module_memory(given)}
        assert set(parts) == {"APP", "HCCL", "RUNTIME"}
        assert parts["APP"].times == (90.0, 100.5) and parts["APP"].peak == 1024**3
        assert (parts["HCCL"].unmatched, len(parts["HCCL"].times)) == (1, 1)
        assert outside_framework(tuple(parts.values())) == {"NPU:0": 2 * 1024**3 + 1024**2}
    shown = CliRunner().invoke(app, ["memory", "profile", "--trace", str(tmp_path), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["outside_framework"] == {"NPU:0": 2 * 1024**3 + 1024**2}


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "an empty file"),
        ("Component,Timestamp(us)\nAPP,1\n", r"Total Reserved\(KB\)"),
        (RECORD.replace("2097152", "lots"), r"line 3.*'lots'"),
        (RECORD.replace("2097152", "-7"), "line 3"),
        (RECORD.replace("130,", "nan,"), "line 6"),
    ],
)
def test_a_damaged_record_names_its_line(tmp_path, text, problem):
    path = tmp_path / "npu_module_mem.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=f"(?s)npu_module_mem.csv.*{problem}"):
        read_module_memory(path)


def test_no_record_and_several(tmp_path):
    with pytest.raises(InputError, match="found none"):
        read_module_memory(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"npu_module_mem_{name}.csv").write_text(RECORD)
    with pytest.raises(InputError, match="(?s)npu_module_mem_a.csv, npu_module_mem_b.csv"):
        read_module_memory(tmp_path)


def test_the_command_takes_a_model_or_a_record():
    refused = CliRunner().invoke(app, ["memory", "profile"])
    assert isinstance(refused.exception, InputError) and "--trace" in str(refused.exception)


@pytest.mark.parametrize(
    "kind, emulated, measured",
    [("cpu", False, True), ("npu", True, True), ("npu", False, False), ("cuda", False, False)],
)
def test_a_card_says_that_nothing_outside_was_measured(kind, emulated, measured, monkeypatch):
    """The pages of the process are not the memory of a card: no number is better than 0."""
    device = Device(kind=kind, emulated=emulated)
    outside = memory_profile._outside(device, 0)
    assert (outside is not None and outside > 0) if measured else outside is None
    phase = PhaseMemory(phase="rollout", before=0, peak=2, after=1, outside=outside, modelled=2)
    monkeypatch.setattr(memory_profile, "profile_step", lambda config, **sizes: (phase,))
    shown = CliRunner().invoke(app, ["memory", "profile", "tiny-moonlight", "--device", "cpu"])
    assert shown.exit_code == 0 and ("not measured" in shown.output) is not measured
    told = CliRunner().invoke(app, ["memory", "profile", "tiny-moonlight", "--device", "cpu", "--json"])
    assert json.loads(told.stdout)["phases"][0]["outside"] == outside
