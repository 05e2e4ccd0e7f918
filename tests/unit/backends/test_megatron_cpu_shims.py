"""Every shim of the CPU is needed (without it a named thing fails), is gone afterwards, and touches nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from alignment.backends import megatron_cpu
from alignment.backends.megatron_cpu import SHIMS, on_cpu
from alignment.backends.megatron_model import installed_version
from alignment.errors import InputError, UnavailableError

pytestmark = pytest.mark.engine


def installed_release() -> str:
    try:
        return installed_version()
    except UnavailableError:
        return ""


FITTING = [shim.name for shim in SHIMS if shim.fits(installed_release())]


@pytest.fixture(scope="module", autouse=True)
def imported():
    if not installed_release():
        pytest.skip("megatron-core is not installed")
    with on_cpu():
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
        import megatron.core.optimizer  # noqa: F401


def names_of(owner) -> dict[str, object]:
    return dict(vars(owner))


def test_what_was_replaced_is_back_afterwards():
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import torch.distributed as dist
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    owners = (torch.cuda, torch.nn.Module, random, dispatcher, dist, HybridDeviceOptimizer)
    before = [names_of(owner) for owner in owners]
    with on_cpu():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert [names_of(owner) for owner in owners] != before
    assert [names_of(owner) for owner in owners] == before


def test_it_is_back_after_an_error_too():
    before = names_of(torch.cuda)
    with pytest.raises(KeyError), on_cpu():
        raise KeyError("inside")
    assert names_of(torch.cuda) == before


def test_nested_uses_are_one():
    with on_cpu():
        inside = torch.cuda.current_device
        with on_cpu():
            assert torch.cuda.current_device is inside
        assert torch.cuda.current_device is inside


def test_an_unknown_shim_is_refused():
    with pytest.raises(InputError, match="no shim is called 'rotary'"), on_cpu(without=["rotary"]):
        pass


def test_every_shim_says_what_it_is_for():
    assert len({shim.name for shim in SHIMS}) == len(SHIMS)
    assert all(shim.why for shim in SHIMS)


def test_cuda_requests_are_answered_on_the_cpu():
    with on_cpu():
        made = torch.zeros(2, device="cuda", pin_memory=False)
        assert made.device.type == made.cuda().device.type == made.to("cuda").device.type == "cpu"
        assert made.type() == "torch.cuda.FloatTensor" and made.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_a_missing_transformer_engine_is_made_up_for_without_touching_the_device():
    import megatron.core.transformer.torch_norm as torch_norm

    before, norm = names_of(torch.cuda), torch_norm.WrappedTorchNorm.__new__
    with megatron_cpu.without_transformer_engine():
        assert names_of(torch.cuda) == before
        use_norm()
        if "router_gemm" in FITTING:
            use_router_gemm()
    assert torch_norm.WrappedTorchNorm.__new__ is norm


# --- each is needed: the smallest use of megatron-core that fails without it
# --------------------------------------------


def use_device_module():
    torch.cuda.current_device()
    torch.cuda.synchronize()


def use_streams():
    torch.cuda.Stream().wait_stream(torch.cuda.current_stream())


def use_generators():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker().add("one", 1)


def use_tensors():
    torch.tensor([1.0], device="cuda")


def use_eager():
    """The compiler would run here; nothing but its absence can be seen."""
    compiled = torch.compile(lambda x: x + 1, backend=refuse_to_compile)
    compiled(torch.ones(1))


def refuse_to_compile(module, inputs):
    raise RuntimeError("compiled")


def config_like(**fields):
    import types

    base = {
        "layernorm_zero_centered_gamma": False, "persist_layer_norm": False, "memory_efficient_layer_norm": False,
        "normalization": "RMSNorm", "sequence_parallel": True, "params_dtype": torch.float32,
    }  # fmt: skip
    return types.SimpleNamespace(**{**base, **fields})


def use_norm():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norm = WrappedTorchNorm(config_like(), 4)
    assert norm.weight.sequence_parallel


def use_split_sizes():
    from megatron.core.transformer.moe import token_dispatcher

    sizes = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)
    assert not torch.is_tensor(sizes)


def use_router_gemm():
    from megatron.core.transformer.moe import moe_utils

    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    moe_utils.router_gating_linear(x, weight, None, torch.float32)


def use_engine_version():
    from megatron.core.utils import is_te_min_version

    assert not is_te_min_version("2.1.0")


def use_quantized_shards():
    from megatron.core.optimizer import distrib_optimizer

    distrib_optimizer.quantize_param_shard([], [], [], None)


def use_uneven_collectives():
    """One rank alone: the sizes differ from the input's, which gloo refuses whatever the number of ranks."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.all_gather.__module__ == megatron_cpu.__name__


def use_offload_copies():
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = HybridDeviceOptimizer(
        [{"params": [parameter]}], offload_fraction=1.0, cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW, pin_cpu_grads=False, pin_cpu_params=False,
        overlap_cpu_optimizer_d2h_h2d=False, param_update_in_fp32=True, lr=0.1,
    )  # fmt: skip
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(parameter.detach(), torch.ones(3))


USES = {name.removeprefix("use_"): use for name, use in list(globals().items()) if name.startswith("use_")}


def test_every_shim_has_its_use():
    assert set(USES) == {shim.name for shim in SHIMS}


@pytest.mark.parametrize("name", FITTING)
def test_with_the_shims_it_works(name):
    with on_cpu():
        USES[name]()


@pytest.mark.parametrize("name", FITTING)
def test_without_it_that_fails(name):
    with pytest.raises(Exception) as failure, on_cpu(without=[name]):
        USES[name]()
    assert not isinstance(failure.value, InputError)


def test_uneven_parts_are_gathered_and_summed(tmp_path):
    """Two gloo ranks with 1 and 3 rows: what NCCL does, against the parts themselves."""
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=gather_unevenly, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]


def gather_unevenly(rank: int, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    rows = [1, 3]
    mine = torch.full((rows[rank], 2), float(rank + 1))
    patches = megatron_cpu.Patches()
    megatron_cpu._uneven_collectives(patches)
    parts = [torch.empty(n, 2) for n in rows]
    dist.all_gather(parts, mine)
    assert all(torch.equal(p, torch.full((n, 2), float(i + 1))) for i, (p, n) in enumerate(zip(parts, rows)))
    total = torch.empty(rows[rank], 2)
    dist.reduce_scatter(total, [torch.full((n, 2), float(rank + i)) for i, n in enumerate(rows)])
    assert torch.equal(total, torch.full((rows[rank], 2), float(sum(r + rank for r in range(2)))))
    patches.undo()
    dist.destroy_process_group()


def test_shims_fit_only_the_releases_they_are_for():
    versions = ("0.12.1", "0.13.1", "0.16.1")
    fitting = {(shim.name, v): shim.fits(v) for shim, v in itertools.product(SHIMS, versions)}
    assert fitting["router_gemm", "0.16.1"] and not fitting["router_gemm", "0.12.1"]
    assert fitting["quantized_shards", "0.12.1"] and not fitting["quantized_shards", "0.16.1"]
