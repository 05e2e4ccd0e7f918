from __future__ import annotations

import pytest
import torch

from alignment.errors import InputError
from alignment.rl.batch import Batch


@pytest.fixture
def batch() -> Batch:
    return Batch({"x": torch.arange(6).reshape(3, 2)}, {"uid": ["a", "b", "c"]}, {"step": 4})


def test_length_fields_and_text(batch):
    assert len(batch) == 3
    assert list(batch) == ["x", "uid"]
    assert "uid" in batch and "y" not in batch
    assert repr(batch) == "Batch(3 samples; x[3, 2]:int64; meta: uid)"
    assert len(Batch()) == 0


def test_fields_of_unequal_length_are_refused():
    with pytest.raises(
        InputError, match=r"batch\['y'\]: every field has one entry per sample; expected 3 samples, as in 'x'; found 2"
    ):
        Batch({"x": torch.zeros(3, 1), "y": torch.zeros(2, 1)})
    with pytest.raises(InputError, match=r"expected 3 samples, as in 'x'; found 1 samples"):
        Batch({"x": torch.zeros(3, 1)}, {"uid": ["a"]})


def test_a_text_is_not_a_list_and_a_number_is_not_a_tensor():
    with pytest.raises(InputError, match="sequence with one entry per sample; found str"):
        Batch(meta={"uid": "abc"})
    with pytest.raises(InputError, match="first dimension is the sample; found int"):
        Batch({"x": 3})
    with pytest.raises(InputError, match="a tensor without dimensions"):
        Batch({"x": torch.tensor(1.0)})
    with pytest.raises(InputError, match="used for a tensor and for a list"):
        Batch({"x": torch.zeros(1)}, {"x": [1]})


def test_missing_field_names_the_nearest(batch):
    with pytest.raises(InputError, match=r"did you mean 'uid'\?"):
        batch["uids"]


@pytest.mark.parametrize("rows", [[2, 0], torch.tensor([2, 0]), (2, -3)], ids=["list", "tensor", "negative"])
def test_rows_keep_the_order_they_are_named_in(batch, rows):
    picked = batch[rows]
    assert picked["x"].tolist() == [[4, 5], [0, 1]]
    assert picked["uid"] == ["c", "a"]
    assert picked.info == {"step": 4}


def test_rows_by_mask_slice_and_number(batch):
    assert batch[torch.tensor([True, False, True])]["uid"] == ["a", "c"]
    assert batch[1:]["uid"] == ["b", "c"]
    assert batch[-1]["x"].tolist() == [[4, 5]]
    with pytest.raises(InputError, match="there is no such sample; expected 0 … 2; found 3"):
        batch[[3]]
    with pytest.raises(InputError, match="a row mask has one entry per sample; expected 3; found 2"):
        batch[torch.tensor([True, False])]


def test_selection_of_fields(batch):
    assert list(batch.select(["uid"])) == ["uid"]
    assert list(batch.drop(["uid", "absent"])) == ["x"]
    with pytest.raises(InputError, match="no such field"):
        batch.select(["y"])


def test_add_leaves_the_batch_as_it_was(batch):
    more = batch.add({"y": torch.zeros(3)}, {"acc": [1, 0, 1]}, {"n": 1})
    assert set(more) == {"x", "uid", "y", "acc"} and more.info == {"step": 4, "n": 1}
    assert set(batch) == {"x", "uid"} and batch.info == {"step": 4}


def test_repeat_interleaved_or_tiled(batch):
    assert batch.repeat(2)["uid"] == ["a", "a", "b", "b", "c", "c"]
    assert batch.repeat(2, interleave=False)["uid"] == ["a", "b", "c"] * 2
    assert batch.repeat(2)["x"][:2].tolist() == [[0, 1], [0, 1]]
    with pytest.raises(InputError, match="repeated at least once"):
        batch.repeat(0)


def test_chunks_and_pieces_join_to_the_whole(batch):
    pieces = batch.split(2)
    assert [len(x) for x in pieces] == [2, 1]
    for parts in (pieces, batch.chunk(3)):
        whole = Batch.concat(parts)
        assert torch.equal(whole["x"], batch["x"]) and whole.meta == batch.meta and whole.info == batch.info
    with pytest.raises(InputError, match="expected a number of samples that divides by 2; found 3 samples"):
        batch.chunk(2)
    with pytest.raises(InputError, match="at least one sample"):
        batch.split(0)


def test_concat_refuses_batches_that_do_not_fit(batch):
    with pytest.raises(InputError, match="nothing to concatenate"):
        Batch.concat([])
    with pytest.raises(InputError, match="batch 1 has other fields than batch 0"):
        Batch.concat([batch, batch.drop(["uid"])])
    wide = batch.add({"x": torch.zeros(3, 3, dtype=torch.int64)})
    with pytest.raises(
        InputError, match=r"Batch.concat, x: batch 1 does not fit batch 0; expected \[2\] torch.int64; found \[3\]"
    ):
        Batch.concat([batch, wide])
    with pytest.raises(InputError, match="torch.float32"):
        Batch.concat([batch, batch.add({"x": batch["x"].float()})])
