from __future__ import annotations

import pytest
import torch

from alignment.errors import InputError
from alignment.rl.batch import Batch
from alignment.rl.mock_rollout import RecordedRollouts, hash_checkpoint

KEY = {"model": "m" * 8, "data": "d" * 8, "temperature": 1.0, "n": 2}


def prompts(token: int = 5) -> Batch:
    ids = torch.full((4, 3), token)
    return Batch({"prompts": ids, "prompt_mask": torch.ones_like(ids)}, {"uid": ["a", "a", "b", "b"]}, {"n": 2})


def rollout() -> Batch:
    batch = prompts()
    responses = torch.arange(8).reshape(4, 2)
    mask = torch.ones_like(responses)
    return batch.add(
        {
            "responses": responses,
            "response_mask": mask,
            "input_ids": torch.cat([batch["prompts"], responses], 1),
            "attention_mask": torch.ones(4, 5, dtype=torch.int64),
            "position_ids": torch.arange(5).repeat(4, 1),
            "rollout_log_probs": -torch.rand(4, 2, generator=torch.Generator().manual_seed(0)),
        }
    )


def test_what_was_recorded_is_found_and_loaded_bit_for_bit(tmp_path):
    first = RecordedRollouts(tmp_path, key=KEY)
    assert not first.has(1)
    first.save(1, 0, rollout())
    later = RecordedRollouts(tmp_path, key=KEY)
    assert later.has(1) and not later.has(2) and not later.has(1, 1)
    assert later.steps() == 1
    loaded = later.load(1, 0, prompts())
    assert set(loaded) == set(rollout())
    assert all(torch.equal(loaded[name], rollout()[name]) for name in rollout().tensors)
    assert loaded.meta == rollout().meta and loaded.info == {"n": 2}


@pytest.mark.parametrize("change", [{"model": "other"}, {"data": "other"}, {"temperature": 0.9}])
def test_a_stale_record_is_refused_and_kept(tmp_path, change):
    RecordedRollouts(tmp_path, key=KEY).save(1, 0, rollout())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    [(name, value)] = change.items()
    with pytest.raises(InputError) as error:
        RecordedRollouts(tmp_path, key={**KEY, **change})
    told = f"they belong to another run; expected {name}={value}; found {name}={KEY[name]}"
    assert f"the recorded rollouts are stale: {told}" in str(error.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_other_prompts_are_refused(tmp_path):
    record = RecordedRollouts(tmp_path, key=KEY)
    record.save(1, 0, rollout())
    with pytest.raises(InputError, match="the rollout was recorded for other prompts"):
        record.load(1, 0, prompts(token=6))


def test_a_damaged_record_is_refused(tmp_path):
    record = RecordedRollouts(tmp_path, key=KEY)
    record.save(1, 0, rollout())
    [path] = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match="a recorded rollout cannot be read"):
        record.load(1, 0, prompts())


def test_the_model_hash_sees_configuration_and_weights(tmp_path):
    with pytest.raises(InputError, match="there is no checkpoint"):
        hash_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = hash_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("no part of the model")
    assert hash_checkpoint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert hash_checkpoint(tmp_path) != first
