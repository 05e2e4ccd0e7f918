"""The emulated NPU behaves like a device: identity, aliasing, errors, memory, random numbers, streams, files."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from alignment.devices import emulated_npu

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(not emulated_npu.is_installed(), reason="tests the emulated NPU; run with --emulate-npu"),
]

FLOAT_BYTES = torch.finfo(torch.float32).bits // 8


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct integers, exact in every dtype used here."""
    return torch.arange(int(np.prod(shape)), dtype=torch.float64).reshape(shape).to(dtype)


def storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---- identity and errors


def test_tensors_say_npu():
    cpu = numbers(2, 3)
    npu = cpu.to("npu")
    assert npu.device == torch.device("npu:0") and npu.is_npu and not npu.is_cpu
    assert "device='npu:0'" in repr(npu)
    assert npu.data_ptr() != cpu.data_ptr()
    assert torch.zeros(3, device="npu:1").device.index == 1
    assert nn.Linear(2, 2).npu(1).weight.device == torch.device("npu:1")
    assert torch.tensor([1, 2], device="npu").sum().item() == 3
    assert npu.tolist() == cpu.tolist()


def test_a_cpu_tensor_among_npu_tensors_is_refused():
    npu = numbers(2, 3).npu()
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and cpu"):
        npu + numbers(2, 3)
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and cpu"):
        npu.index_select(0, torch.tensor([1]))
    assert (npu * torch.tensor(2.0)).device.type == "npu"  # a number is welcome, as on hardware
    assert npu[torch.tensor([1])].tolist() == [[3.0, 4.0, 5.0]]


def test_another_npu_is_refused():
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and npu:1"):
        numbers(3).npu(0) + numbers(3).npu(1)


def test_an_index_past_the_last_device_is_refused():
    count = torch.npu.device_count()
    with pytest.raises(RuntimeError, match=f"invalid device index {count}: this process emulates {count} devices"):
        torch.empty(1, device=f"npu:{count}")
    with pytest.raises(RuntimeError, match="invalid device index"):
        torch.npu.set_device(count)


def test_host_only_interfaces_are_refused():
    npu = numbers(3).npu()
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        npu.numpy()
    with pytest.raises(ValueError, match="Unknown device type npu for Dlpack"):
        torch.from_dlpack(npu)
    with pytest.raises(NotImplementedError, match="Could not run .* from the 'Sparsenpu' backend"):
        torch.empty(2, 2, layout=torch.sparse_coo, device="npu")


def test_an_unknown_name_of_torch_npu_says_what_to_do():
    with pytest.raises(AttributeError, match="emulated torch.npu has no 'set_mm_bmm_format_nd': add it to"):
        torch.npu.set_mm_bmm_format_nd(True)


def test_everything_is_labelled_emulated():
    assert torch.npu.get_device_name() == "Ascend (emulated)"
    assert torch.npu.get_device_properties(0).name == "Ascend (emulated)"
    assert emulated_npu.LABEL == "npu (emulated)"
    assert emulated_npu.banner().startswith(f"npu (emulated): {torch.npu.device_count()} devices on host memory")


def test_work_on_the_npu_goes_through_the_device():
    calls = torch.ops.emu_npu.fallback_calls
    npu, cpu = numbers(3).npu(), numbers(3)
    before = calls()
    cpu + cpu
    assert calls() == before
    npu + npu
    assert calls() > before


# ---- aliasing

VIEWS = {
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(2, 0, 1),
    "movedim": lambda t: t.movedim(0, 2),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "mT": lambda t: t.mT,
    "unfold": lambda t: t.unfold(1, 2, 2),
    "slice": lambda t: t[1:3],
    "select": lambda t: t.select(0, 2),
    "narrow": lambda t: t.narrow(1, 1, 2),
    "squeeze": lambda t: t.squeeze(),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "expand": lambda t: t[:, :1].expand(4, 6, 8),
    "chunk": lambda t: t.chunk(2, 1)[1],
    "split": lambda t: t.split(2, 1)[2],
    "unbind": lambda t: t.unbind(0)[1],
    "diagonal": lambda t: t.diagonal(),
    "view": lambda t: t.view(24, 8),
    "view_dtype": lambda t: t.view(torch.int32),
    "view_as_complex": lambda t: torch.view_as_complex(t.view(4, 6, 4, 2)),
    "reshape": lambda t: t.reshape(-1),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "as_strided": lambda t: t.as_strided((2, 2), (1, 2), 3),
    "detach": lambda t: t.detach(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_shares_the_storage(name):
    cpu = numbers(4, 6, 8)
    npu = cpu.npu()
    mine, theirs = VIEWS[name](npu), VIEWS[name](cpu)
    assert storage_address(mine) == storage_address(npu)
    assert (mine.shape, mine.stride(), mine.storage_offset()) == (
        theirs.shape,
        theirs.stride(),
        theirs.storage_offset(),
    )
    assert mine._is_view() == theirs._is_view()
    assert mine.cpu().equal(theirs)
    npu.mul_(2)
    cpu.mul_(2)
    assert mine.cpu().equal(theirs), "a write to the base is seen through the view"


def test_contiguous_copies_only_what_is_not():
    weight = numbers(4, 6).npu()
    assert weight.contiguous().data_ptr() == weight.data_ptr()
    assert storage_address(weight.t().contiguous()) != storage_address(weight)
    assert weight.clone().data_ptr() != weight.data_ptr()
    assert weight[1].data_ptr() == weight.data_ptr() + 6 * FLOAT_BYTES


def test_in_place_geometry():
    tensor = numbers(2, 3).npu()
    address = tensor.data_ptr()
    assert tensor.t_() is tensor and tensor.shape == (3, 2) and tensor.data_ptr() == address
    tensor = numbers(2, 1, 3).npu()
    assert tensor.squeeze_(1).shape == (2, 3)
    tensor.resize_(5, 5).fill_(1)
    assert tensor.sum().item() == tensor.numel() and tensor.untyped_storage().nbytes() >= tensor.numel() * FLOAT_BYTES
    out = torch.empty(0, device="npu")
    torch.add(torch.ones(4, device="npu"), 1, out=out)
    assert out.tolist() == [2.0] * 4
    version = out._version
    out.add_(1)
    assert out._version == version + 1


def test_storages_can_be_emptied_and_exchanged():
    flat = numbers(25).npu()
    flat.untyped_storage().resize_(0)
    assert flat.untyped_storage().nbytes() == 0
    flat.untyped_storage().resize_(25 * FLOAT_BYTES)
    flat.zero_()
    source = numbers(3).npu()
    target = torch.zeros(3, device="npu")
    target.data = source
    assert target.data_ptr() == source.data_ptr()
    target.set_(source.untyped_storage(), 1, (2,), (1,))
    assert target.tolist() == [1.0, 2.0] and target.data_ptr() == source.data_ptr() + FLOAT_BYTES
    assert torch.empty(0, device="npu").set_(source).data_ptr() == source.data_ptr()
    tensors = [torch.ones(3).npu(), torch.ones(2).npu()]
    torch._foreach_add_(tensors, 1.0)
    assert [t.sum().item() for t in tensors] == [6.0, 4.0]


def test_conjugate_views_resolve():
    cpu = torch.complex(numbers(3), numbers(3))
    npu = cpu.npu()
    assert npu.conj().resolve_conj().cpu().equal(cpu.conj().resolve_conj())
    assert (npu.conj() * npu).cpu().equal(cpu.conj() * cpu)
    assert npu.conj().cpu().resolve_conj().equal(cpu.conj().resolve_conj())


def test_a_host_alias_shares_the_bytes():
    npu = numbers(3).npu()
    host = torch.ops.emu_npu.host_alias(npu)
    host[0] = 5
    assert host.is_cpu and host.data_ptr() == npu.data_ptr() and npu[0].item() == 5
    with pytest.raises(RuntimeError, match="expected an npu tensor, got one on cpu"):
        torch.ops.emu_npu.host_alias(torch.ones(1))


# ---- memory


def test_memory_is_counted_per_device():
    before, before_other = torch.npu.memory_allocated(0), torch.npu.memory_allocated(1)
    tensor = torch.empty(1 << 20, device="npu:0")
    assert torch.npu.memory_allocated(0) - before == tensor.numel() * FLOAT_BYTES
    assert torch.npu.memory_allocated(1) == before_other
    result = tensor + 1  # what an operator makes is counted too
    assert torch.npu.memory_allocated(0) - before == 2 * tensor.numel() * FLOAT_BYTES
    peak = torch.npu.max_memory_allocated(0)
    assert peak >= torch.npu.memory_allocated(0)
    del tensor, result
    assert torch.npu.memory_allocated(0) == before
    assert torch.npu.max_memory_allocated(0) == peak
    torch.npu.reset_peak_memory_stats(0)
    assert torch.npu.max_memory_allocated(0) == before


def test_views_are_not_counted():
    tensor = torch.empty(1 << 10, device="npu")
    before = torch.npu.memory_allocated()
    view = tensor.view(2, -1).t()
    assert torch.npu.memory_allocated() == before and view.shape[1] == 2


@pytest.mark.skipif(
    not hasattr(torch.accelerator, "memory_allocated"), reason="torch.accelerator.memory_* is torch 2.9+"
)
def test_torch_accelerator_sees_the_same_memory():
    tensor = torch.empty(1 << 10, device="npu")
    assert torch.accelerator.memory_allocated() == torch.npu.memory_allocated() >= tensor.numel() * FLOAT_BYTES
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.npu.max_memory_allocated() == torch.npu.memory_allocated()
    torch.accelerator.empty_cache()


# ---- devices, streams, events


def test_current_device():
    assert torch.accelerator.current_accelerator().type == "npu"
    assert torch.accelerator.device_count() == torch.npu.device_count()
    assert torch.get_device_module("npu") is torch.npu
    with torch.npu.device(1):
        assert torch.npu.current_device() == 1 and torch.empty(1, device="npu").device.index == 1
    assert torch.npu.current_device() == 0
    with torch.npu.device_of(torch.empty(1, device="npu:1")):
        assert torch.npu.current_device() == 1
    with torch.device("npu"):
        assert torch.ones(2).device.type == "npu"


def test_streams_and_events():
    stream = torch.npu.Stream()
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream
        tensor = torch.ones(3, device="npu") + 1
    assert torch.npu.current_stream() == torch.npu.default_stream()
    end.record()
    end.synchronize()
    tensor.record_stream(stream)
    torch.npu.current_stream().wait_stream(stream)
    stream.synchronize()
    torch.npu.synchronize()
    assert start.elapsed_time(end) > 0 and isinstance(start, torch.npu.Event)
    with pytest.raises(NotImplementedError, match="graph capture is not emulated"):
        torch.npu.NPUGraph()


# ---- random numbers


def test_the_npu_has_a_random_stream_of_its_own():
    torch.npu.manual_seed(5)
    first = torch.randn(4, device="npu")
    torch.randn(4)  # a draw on the CPU does not move it
    second = torch.randn(4, device="npu")
    torch.npu.manual_seed(5)
    assert torch.randn(4, device="npu").equal(first) and torch.randn(4, device="npu").equal(second)
    torch.manual_seed(3)
    cpu = torch.rand(3)
    torch.manual_seed(3)
    torch.rand(3, device="npu")
    assert torch.rand(3).equal(cpu), "a draw on the npu does not move the CPU's"


def test_torch_manual_seed_seeds_every_npu():
    def draws():
        torch.manual_seed(3)
        return [torch.rand(3, device=f"npu:{i}").tolist() for i in range(2)]

    assert draws() == draws()


def test_generators_and_states():
    state = torch.npu.get_rng_state()
    drawn = torch.randperm(9, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.randperm(9, device="npu").equal(drawn)
    states = torch.npu.get_rng_state_all()
    drawn = torch.rand(2, device="npu:1")
    torch.npu.set_rng_state_all(states)
    assert torch.rand(2, device="npu:1").equal(drawn)
    generator = torch.Generator(device="npu").manual_seed(1)
    drawn = torch.randn(3, device="npu", generator=generator)
    assert torch.randn(3, device="npu", generator=generator.manual_seed(1)).equal(drawn)
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        forked = torch.rand(3, device="npu")
    assert torch.rand(3, device="npu").equal(forked)


def test_dropout_draws_from_the_npu():
    ones = torch.ones(1000, device="npu")
    torch.npu.manual_seed(1)
    dropped = nn.functional.dropout(ones, 0.5)
    torch.npu.manual_seed(1)
    assert nn.functional.dropout(ones, 0.5).equal(dropped)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert nn.functional.dropout(ones, 0.5, training=False).equal(ones)


# ---- files and copies


def test_saving_and_loading(tmp_path):
    path = tmp_path / "state.pt"
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).npu()
    torch.save(module.state_dict(), path)
    weight = module[0].weight.detach()
    assert torch.load(path)["0.weight"].device.type == "npu"
    assert torch.load(path)["0.weight"].equal(weight)
    assert torch.load(path, map_location="cpu")["0.weight"].equal(weight.cpu())
    assert torch.load(path, weights_only=True, map_location="npu:1")["0.weight"].device.index == 1
    whole = numbers(4).npu()
    torch.save([whole, whole[1:]], path)
    base, view = torch.load(path)
    assert view.data_ptr() == base.data_ptr() + FLOAT_BYTES
    assert pickle.loads(pickle.dumps(whole)).equal(whole)
    twin = copy.deepcopy(module)
    assert twin[0].weight.equal(module[0].weight) and twin[0].weight.data_ptr() != module[0].weight.data_ptr()


def test_safetensors(tmp_path):
    from safetensors.torch import load_file, load_model, save_file, save_model

    path = str(tmp_path / "state.safetensors")
    module = nn.Linear(3, 4).npu()
    save_file(module.state_dict(), path)
    assert load_file(path)["weight"].equal(module.weight.detach().cpu())
    assert load_file(path, device="npu")["weight"].equal(module.weight.detach())
    save_model(module, path)
    twin = nn.Linear(3, 4).npu()
    load_model(twin, path)
    assert twin.weight.equal(module.weight)


def test_a_data_loader_worker_feeds_the_npu():
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(numbers(8)), batch_size=4, num_workers=1)
    batches = [batch.to("npu", non_blocking=True) for (batch,) in loader]
    assert torch.cat(batches).tolist() == numbers(8).tolist()


def test_pinned_memory_is_known():
    pinned = numbers(3).pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not numbers(3).is_pinned()
    assert pinned.npu(non_blocking=True).tolist() == numbers(3).tolist()
