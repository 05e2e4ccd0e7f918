"""The comparison of training engines: what it counts is what the model's size says it must be."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from alignment.backends import engine_comparison
from alignment.backends.engine_comparison import LinesRun, Tally, compare_engines, live_storages
from alignment.errors import InputError
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset

MODEL = "tiny-deepseek"
FLOAT = 4
MICRO_BATCHES = 2


@pytest.fixture(scope="module")
def rows():
    return {row.engine: row for row in compare_engines(("golden", "fsdp-golden"), model=MODEL)}


@pytest.fixture(scope="module")
def sizes():
    """Bytes of parameters and of buffers, parameters by unit of sharding."""
    model = CausalLM(preset(MODEL), device="meta")
    parameters = FLOAT * sum(p.numel() for p in model.parameters())
    return parameters, FLOAT * sum(b.numel() for b in model.buffers()), len(model.model.layers) + 1


def test_memory_at_rest_is_weights_and_two_moments(rows, sizes):
    parameters, buffers, _ = sizes
    golden, fsdp = rows["golden"].held_bytes, rows["fsdp-golden"].held_bytes
    # The rows of the workload come on top, and the padding of shards; a fourth copy of anything would be far more.
    assert 3 * parameters + buffers <= golden < 3.1 * parameters
    assert 3 * parameters / 2 + buffers <= fsdp < 3.1 * parameters / 2 + parameters / 20


def test_peaks_hold_gradients_as_well(rows, sizes):
    parameters, buffers, _ = sizes
    assert rows["golden"].peak_bytes > 4 * parameters + buffers
    assert rows["fsdp-golden"].held_bytes < rows["fsdp-golden"].peak_bytes < rows["golden"].peak_bytes


def test_the_golden_engine_sends_each_gradient_once(rows, sizes):
    assert rows["golden"].collectives == {"allreduce": (1, sizes[0])}
    # A ring sends everything twice, less the part that is here.
    assert rows["golden"].sent_bytes == 2 * sizes[0] // 2


def test_fsdp_gathers_twice_and_scatters_once_per_micro_batch(rows, sizes):
    parameters, _, units = sizes
    found = rows["fsdp-golden"].collectives
    assert found["allgather_base"][0] == 2 * units * MICRO_BATCHES
    assert found["reduce_scatter_base"][0] == units * MICRO_BATCHES
    # Rows that do not divide by the ranks are padded.
    assert parameters * MICRO_BATCHES <= found["reduce_scatter_base"][1] < parameters * MICRO_BATCHES * 1.05
    assert (
        rows["fsdp-golden"].calls > rows["golden"].calls and rows["fsdp-golden"].sent_bytes > rows["golden"].sent_bytes
    )


def test_more_source_lies_between_a_call_and_a_sharded_kernel(rows):
    golden, fsdp = rows["golden"], rows["fsdp-golden"]
    assert 0 < golden.lines_to_kernel < golden.lines_in_update < fsdp.lines_in_update
    assert golden.lines_to_kernel < fsdp.lines_to_kernel and 0 < golden.frames <= fsdp.frames


def test_seconds_are_there(rows):
    assert all(row.start_seconds > 0 and row.step_seconds > 0 for row in rows.values())
    assert rows["golden"].to_dict()["calls"] == 1


def test_an_engine_that_is_not_installed_says_why(monkeypatch, tmp_path):
    """The reason comes from a process of its own, where nothing can be patched: a package of that name that fails to
    import."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [row] = compare_engines(["megatron"], model=MODEL, ranks=1)
    assert "megatron-core is not installed" in row.unavailable and row.peak_bytes == 0


def test_an_unknown_engine_is_refused():
    with pytest.raises(
        InputError, match="engines: there is no such engine to compare; expected golden, .*found deepspeed"
    ):
        compare_engines(["deepspeed"])


def test_an_engine_that_fails_is_named_with_its_error():
    import dataclasses

    tied = dataclasses.replace(preset(MODEL), tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"fsdp-golden, rank 0: the engine failed; found (?s:.*)tie_word_embeddings"):
        compare_engines(["fsdp-golden"], model=tied, ranks=1)


def test_the_tally_sees_tensors_come_shrink_and_go():
    kept, before = torch.zeros(1000), torch.UntypedStorage.resize_
    with Tally() as tally:
        start = tally.live
        assert start >= kept.nbytes
        first = torch.ones(256)
        second = first * 2
        assert tally.live == start + 2 * first.nbytes
        del second
        gc.collect()
        assert tally.live == start + first.nbytes and tally.peak == start + 2 * first.nbytes
        first.untyped_storage().resize_(0)
        assert tally.live == start
        view = kept[:10].view(2, 5)
        assert tally.live == start and view.numel() == 10
    assert torch.UntypedStorage.resize_ is before


def test_storages_are_counted_once():
    base = torch.zeros(64)
    views = [base[i:] for i in range(5)]
    found = [s for s in live_storages().values() if s.data_ptr() == base.untyped_storage().data_ptr()]
    assert len(found) == 1 and len(views) == 5


def deeper(model: nn.Module, x: torch.Tensor, levels: int) -> torch.Tensor:
    if levels:
        return deeper(model, x, levels - 1)
    y = x + 1
    y = y - 1
    return model(y)


def test_lines_and_frames_up_to_the_first_matrix_product():
    model, x = nn.Linear(3, 3), torch.ones(1, 3)
    counted = []
    # The first call of anything runs lines that later ones do not.
    for levels in (4, 0, 4):
        with LinesRun() as run:
            deeper(model, x, levels)
        counted.append(run)
    _, shallow, deep = counted
    assert deep.frames == shallow.frames + 4
    # Only one more line is different: the call of itself.
    assert deep.at_kernel == shallow.at_kernel + 1
    assert len(shallow.lines) >= shallow.at_kernel > 3


def test_the_measuring_does_not_measure_itself():
    with LinesRun() as run:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert not any(file == engine_comparison.__file__ for file, _ in run.lines)
