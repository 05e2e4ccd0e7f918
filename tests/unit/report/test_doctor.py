"""``alignment doctor`` says what is here, what a run would be held to, and why the rest is not."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
import torch

from alignment.cli.options import BASELINES
from alignment.report.doctor import STACK, examine, print_examination


@pytest.fixture(scope="module")
def found() -> dict:
    return examine(BASELINES)


def shown(found: dict) -> str:
    """The examination as a wide terminal has it."""
    from rich.console import Console

    text = io.StringIO()
    print_examination(Console(file=text, width=400), found)
    return text.getvalue()


def test_every_engine_is_listed_with_a_reason(found):
    chosen = {(row["role"], row["engine"]) for row in found["engines"] if row["device"] == "cpu"}
    assert chosen == {
        ("train", "golden"), ("train", "fsdp"), ("train", "megatron"), ("rollout", "golden"), ("rollout", "vllm")
    }  # fmt: skip
    assert all(row["reason"] for row in found["engines"] + found["subjects"])
    golden = [row for row in found["engines"] if row["engine"] == "golden"]
    assert all(row["available"] for row in golden)


@pytest.mark.parametrize("package, engine", [("megatron", "megatron"), ("vllm", "vllm")])
def test_an_engine_that_is_not_installed_is_named_so(monkeypatch, package, engine):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else real(name, *a))
    rows = [row for row in examine(BASELINES)["engines"] if row["engine"] == engine and row["device"] == "cpu"]
    assert [(row["available"], "not installed" in row["reason"]) for row in rows] == [(False, True)]


def test_baselines_of_this_machine_and_of_none(found, tmp_path):
    by_layer = {row["layer"]: row for row in found["baselines"] if row["device"] == "cpu"}
    assert set(by_layer) == {"unit", "layer", "e2e"}
    assert all(row["stored"] > 0 and row["step"] in ("same chip", "same kind") for row in by_layer.values())
    nothing = examine(tmp_path)["baselines"]
    assert all((row["stored"], row["step"], row["chips"]) == (0, None, []) for row in nothing)


def test_the_stack_names_what_is_missing_too(found):
    assert tuple(found["stack"]) == STACK
    assert found["stack"]["torch"]


def test_switches_that_change_bits_are_told_as_they_are(monkeypatch, tmp_path, found):
    told = ("deterministic_algorithms", "float32_matmul_precision", "cuda_allow_tf32", "threads")
    assert set(told) <= set(found["determinism"])
    monkeypatch.setenv("HCCL_DETERMINISTIC", "strict")
    torch.use_deterministic_algorithms(True)
    try:
        switched = examine(tmp_path)["determinism"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert (switched["HCCL_DETERMINISTIC"], switched["deterministic_algorithms"]) == ("strict", True)
    assert "HCCL_DETERMINISTIC=strict" in shown({**found, "determinism": switched})


def test_contributors_are_told_on_a_page_what_the_doctor_says(found):
    page = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert page.count("\n") < 100 and "alignment doctor --json" in page
    assert set(found) == {"devices", "subjects", "engines", "stack", "determinism", "baselines"}


def test_it_prints_and_is_json(found):
    text = shown(found)
    for part in ("engine.rollout=vllm", found["baselines"][-1]["step"], f"torch {found['stack']['torch']}"):
        assert part in text
    json.dumps(found)
