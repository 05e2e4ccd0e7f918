"""Determinism: which switches count where, that they hold, that too late is refused, and that all is undone."""

from __future__ import annotations

import json
import os
import random

import numpy as np
import pytest
import torch

from alignment.devices import determinism
from alignment.devices.base import Device, get_device
from alignment.devices.determinism import ProcessState, deterministic, refuse_if_late, switches
from alignment.errors import InputError

AIV = {"HCCL_OP_EXPANSION_MODE": "AIV"}
MATMUL = {"CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0"}
ROLLOUT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def applying(kind, world_size, environ):
    return {
        s.name: s.wanted
        for s in switches(kind, world_size, environ)
        if s.applies and s.where == determinism.ENVIRONMENT
    }


@pytest.mark.parametrize(
    ("kind", "world_size", "environ", "expected"),
    [
        ("npu", 1, {}, {**MATMUL, **ROLLOUT}),
        ("npu", 1, AIV, {**MATMUL, **ROLLOUT}),
        ("npu", 16, {}, {**MATMUL, **ROLLOUT, "HCCL_DETERMINISTIC": "true"}),
        ("npu", 16, {"HCCL_OP_EXPANSION_MODE": "AI_CPU"}, {**MATMUL, **ROLLOUT, "HCCL_DETERMINISTIC": "true"}),
        ("npu", 16, AIV, {**MATMUL, **ROLLOUT, "LCCL_DETERMINISTIC": "1", "ATB_LLM_LCOC_ENABLE": "0"}),
        ("cuda", 1, {}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **ROLLOUT}),
        ("cuda", 8, AIV, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **ROLLOUT}),
        ("cpu", 1, {}, ROLLOUT),
        ("cpu", 2, {}, ROLLOUT),
    ],
)
def test_what_applies_depends_on_device_cards_and_collective_library(kind, world_size, environ, expected):
    assert applying(kind, world_size, environ) == expected


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_every_switch_is_listed_with_its_reason_and_source_on_every_kind(kind):
    listed = switches(kind, 1, {})
    assert {s.name for s in listed} >= {
        "torch.use_deterministic_algorithms",
        "CUBLAS_WORKSPACE_CONFIG",
        "HCCL_DETERMINISTIC",
        "LCCL_DETERMINISTIC",
        "CLOSE_MATMUL_K_SHIFT",
        "ATB_MATMUL_SHUFFLE_K_ENABLE",
        "ATB_LLM_LCOC_ENABLE",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
    }
    assert all(s.why and s.source for s in listed)


def why(name, *args):
    return next(s.why for s in switches(*args) if s.name == name)


def test_the_reason_says_which_library_the_cards_use():
    assert why("HCCL_DETERMINISTIC", "npu", 8, {}) == "8 cards communicate over HCCL"
    assert why("HCCL_DETERMINISTIC", "npu", 1, {}) == "a single card does not communicate"
    assert why("HCCL_DETERMINISTIC", "npu", 8, AIV).startswith(
        "HCCL_OP_EXPANSION_MODE=AIV: the cards communicate over LCCL"
    )
    assert (
        why("LCCL_DETERMINISTIC", "npu", 8, {}) == "the cards communicate over HCCL (HCCL_OP_EXPANSION_MODE is not AIV)"
    )
    assert why("LCCL_DETERMINISTIC", "cuda", 8, {}) == "cuda does not use HCCL"


def test_deciding_reads_nothing_but_its_arguments(monkeypatch):
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
    assert "HCCL_DETERMINISTIC" in applying("npu", 2, {})


@pytest.mark.parametrize(
    ("kind", "world_size", "environ", "state", "message"),
    [
        (
            "npu",
            8,
            MATMUL,
            ProcessState(process_group=True),
            "HCCL_DETERMINISTIC: too late for determinism: the process group is already initialised; "
            "expected true or strict",
        ),
        (
            "npu",
            8,
            {**MATMUL, **AIV, "LCCL_DETERMINISTIC": "0"},
            ProcessState(process_group=True),
            "LCCL_DETERMINISTIC: too late for determinism: the process group is already initialised; "
            "expected 1 or true; found 0",
        ),
        (
            "npu",
            1,
            {},
            ProcessState(npu=True),
            "CLOSE_MATMUL_K_SHIFT: too late for determinism: the NPU is already initialised",
        ),
        (
            "cuda",
            1,
            {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
            ProcessState(cublas=True),
            "CUBLAS_WORKSPACE_CONFIG: too late for determinism: tensors have already lived on the GPU, so the cuBLAS "
            "handle may exist; expected :4096:8 or :16:8; found :0:0",
        ),
    ],
)
def test_too_late_is_refused_by_name(kind, world_size, environ, state, message):
    with pytest.raises(InputError) as caught:
        refuse_if_late(switches(kind, world_size, environ), environ, state)
    assert str(caught.value).startswith(message)
    assert "before the process starts" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "world_size", "environ"),
    [
        ("npu", 8, {**MATMUL, "HCCL_DETERMINISTIC": "strict"}),
        ("npu", 8, {**MATMUL, "HCCL_DETERMINISTIC": "TRUE"}),
        ("npu", 8, {**MATMUL, **AIV, "LCCL_DETERMINISTIC": "1", "ATB_LLM_LCOC_ENABLE": "0"}),
        ("npu", 1, MATMUL),
        ("cuda", 8, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
        ("cpu", 8, {}),
    ],
)
def test_late_is_fine_when_the_environment_already_says_so(kind, world_size, environ):
    refuse_if_late(
        switches(kind, world_size, environ), environ, ProcessState(process_group=True, cublas=True, npu=True)
    )


def test_a_process_group_that_is_up_is_seen(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert ProcessState.read().process_group


@pytest.fixture
def clean_environment(monkeypatch):
    for switch in switches("npu", 1, {}):
        monkeypatch.delenv(switch.name, raising=False)
    monkeypatch.delenv("HCCL_OP_EXPANSION_MODE", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_equal_seeds_give_equal_draws_and_other_seeds_others(clean_environment):
    device = get_device("cpu")
    seen = []
    for seed in (7, 7, 8):
        with deterministic(seed, device):
            seen.append(draws())
    assert seen[0] == seen[1]
    assert all(a != b for a, b in zip(seen[0], seen[2], strict=True))


def test_everything_is_restored_on_exit_and_after_an_error(clean_environment, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = dict(os.environ)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(ZeroDivisionError), deterministic(3, get_device("cpu")):
            assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            draws()
            raise ZeroDivisionError
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert dict(os.environ) == before
    assert draws() == expected


def test_the_report_holds_the_verified_value_of_every_switch(clean_environment):
    with deterministic(5, get_device("cpu")) as report:
        rows = {row[0]: row for row in report.rows()}
    assert rows["torch.use_deterministic_algorithms"][1:4] == ("True", "True", "yes")
    assert rows["VLLM_ENABLE_V1_MULTIPROCESSING"][1:4] == ("0", "0", "yes")
    assert rows["HCCL_DETERMINISTIC"][1:] == ("true", "not set", "no", "cpu does not use HCCL")
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["seed"], data["device"], data["world_size"]) == (5, "cpu", 1)
    assert data["switches"]["CUBLAS_WORKSPACE_CONFIG"]["verified"] is None


def test_a_value_the_user_already_set_is_kept(clean_environment, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "false")
    with deterministic(5, get_device("cpu")) as report:
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "false"
    assert {r[0]: r[2] for r in report.rows()}["VLLM_ENABLE_V1_MULTIPROCESSING"] == "false"


def test_a_variable_no_native_library_would_see_is_refused(clean_environment, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(
        InputError,
        match="VLLM_ENABLE_V1_MULTIPROCESSING: the switch does not hold after it was set; expected 0; found not set",
    ):
        with deterministic(5, get_device("cpu")):
            pass


def test_an_npu_over_several_cards_sets_the_hccl_switches(clean_environment, monkeypatch):
    backend = determinism.base._backend("npu")
    for name in ("seed", "set_rng_state"):
        monkeypatch.setattr(backend, name, lambda value: None)
    monkeypatch.setattr(backend, "rng_state", lambda: None)
    monkeypatch.setattr(backend, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with deterministic(1, Device(kind="npu")) as report:
        assert os.environ["HCCL_DETERMINISTIC"] == "true"
        assert os.environ["CLOSE_MATMUL_K_SHIFT"] == "1"
        assert "LCCL_DETERMINISTIC" not in os.environ
    assert report.world_size == 8
    assert "HCCL_DETERMINISTIC" not in os.environ


def test_it_really_refuses_a_nondeterministic_kernel(clean_environment):
    def nondeterministic():
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

    nondeterministic()
    with deterministic(1, get_device("cpu")), pytest.raises(RuntimeError, match="does not have a deterministic"):
        nondeterministic()
    nondeterministic()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(InputError, match="not a seed; expected 0 ≤ seed"), deterministic(seed, get_device("cpu")):
        pass


def test_a_bad_world_size_is_refused(clean_environment, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(InputError, match="WORLD_SIZE: not a number of cards; expected an integer ≥ 1; found many"):
        with deterministic(1, get_device("cpu")):
            pass
    with pytest.raises(InputError, match="expected world_size ≥ 1; found 0"):
        switches("cpu", 0, {})
    with pytest.raises(InputError, match="unknown kind of device"):
        switches("tpu", 1, {})


@pytest.mark.gpu
def test_on_a_gpu_the_workspace_is_set_before_the_first_allocation_or_refused():
    device = get_device("cuda")
    try:
        with deterministic(1, device) as report:
            a = torch.rand(64, 64, device=device.torch_device)
            assert torch.equal(a @ a, a @ a)
        assert {r[0]: r[2] for r in report.rows()}["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
    except InputError as error:
        assert "too late for determinism" in str(error)


@pytest.mark.npu
def test_on_the_emulated_npu_the_device_is_seeded_and_reductions_become_repeatable(clean_environment):
    device = get_device("npu")
    if not device.emulated:
        pytest.skip("only the emulated NPU can switch non-determinism on")
    from alignment.devices.emulated_npu import semantics

    a = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)).to(device.torch_device)

    def products():
        return [(a @ a.T).cpu() for _ in range(6)]

    def all_equal(tensors):
        return all(torch.equal(t, tensors[0]) for t in tensors)

    with semantics.nondeterministic_reductions():
        assert not all_equal(products())
        with deterministic(4, device) as report:
            assert all_equal(products())
            first = torch.rand(5, device=device.torch_device).cpu()
        with deterministic(4, device):
            assert torch.equal(torch.rand(5, device=device.torch_device).cpu(), first)
        assert not all_equal(products())
    assert report.device == "npu (emulated)"
    assert {row[0]: row[2] for row in report.rows()}["CLOSE_MATMUL_K_SHIFT"] == "1"


@pytest.mark.npu
def test_the_state_of_the_npus_generator_comes_back(clean_environment):
    device = get_device("npu")
    torch.npu.manual_seed_all(21)
    expected = torch.rand(3, device=device.torch_device).cpu()
    torch.npu.manual_seed_all(21)
    with deterministic(4, device):
        torch.rand(3, device=device.torch_device)
    assert torch.equal(torch.rand(3, device=device.torch_device).cpu(), expected)
