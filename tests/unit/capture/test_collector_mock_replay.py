"""Recorded responses in place of generation: pairing, modes, padding, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alignment.capture.collector_config import CollectorConfig
from alignment.capture.collector_data import summary, write_key_data
from alignment.capture.mock_replay import MockRollouts
from alignment.errors import InputError
from alignment.rl.data import Prompt, PromptSet, prompt_batch

PAD, EOS, N = 0, 1, 2
PROMPTS = PromptSet(
    [
        Prompt(prompt_id=f"p{i}", token_ids=(5 + i,) * (i % 3 + 1), data_source="x", ground_truth=str(i))
        for i in range(6)
    ],
    tokenizer_hash="",
)


def batch_of(ids, *, step=1):
    batch = prompt_batch([PROMPTS[i] for i in ids], pad_token_id=PAD, prompt_length=4).repeat(N)
    keys = list(range(len(batch)))
    return batch.add(meta={"sample_key": keys}, info={"n": N, "step": step, "eos_token_id": EOS, "pad_token_id": PAD})


def answer(prompt, sample):
    """A response that says whose it is."""
    return [20 + prompt] * (sample + 1) + [EOS]


def record(root, step, ids, *, ranks=1, width=5, pad=9, masks=True, micro_step=0):
    """A step as another device recorded it: its own padding, its rows shared out over ranks."""
    rows = [(i, s) for i in ids for s in range(N)]
    for rank in range(ranks):
        mine = rows[rank * len(rows) // ranks : (rank + 1) * len(rows) // ranks]
        prompts = np.full((len(mine), 6), pad)
        responses = np.full((len(mine), width), pad)
        mask = np.zeros((len(mine), 6 + width), dtype=np.int64)
        for row, (i, s) in enumerate(mine):
            tokens, said = PROMPTS[i].token_ids, answer(i, s)
            prompts[row, 6 - len(tokens) :], mask[row, 6 - len(tokens) : 6] = tokens, 1
            responses[row, : len(said)], mask[row, 6 : 6 + len(said)] = said, 1
        values = {"prompts": prompts, "responses": responses} | ({"attention_mask": mask} if masks else {})
        write_key_data(root, values, step=step, rank=rank, micro_step=micro_step)


def rollouts(root, **settings):
    known = {
        k: settings.pop(k) for k in ("prompts", "vocab_size", "response_length", "on_replay", "pad") if k in settings
    }
    config = CollectorConfig(msprobe=True, enable_mock_inference=True, mock_data_path=str(root), **settings)
    return MockRollouts(
        config, prompts=known.get("prompts", PROMPTS), prompt_length=4, response_length=known.get("response_length", 5),
        pad_token_id=known.get("pad", PAD), eos_token_id=EOS, vocab_size=known.get("vocab_size"),
        on_replay=known.get("on_replay"),
    )  # fmt: skip


def said(batch):
    return [row[kept != 0].tolist() for row, kept in zip(batch["responses"], batch["response_mask"])]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_samples_find_their_prompts_whatever_the_order_and_the_ranks(tmp_path, ranks):
    record(tmp_path, 0, [3, 1, 2], ranks=ranks)
    batch = rollouts(tmp_path).load(1, 0, batch_of([1, 2, 3]))
    assert said(batch) == [answer(i, s) for i in (1, 2, 3) for s in range(N)]
    assert batch["responses"].shape == (6, 5) and int(batch["responses"][batch["response_mask"] == 0].max()) == PAD
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], dim=1))
    assert torch.equal(batch["attention_mask"][:, 4:], batch["response_mask"])
    assert batch["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 3, 3, 3, 3]
    assert batch["ground_truth"] == ["1", "1", "2", "2", "3", "3"]


def test_without_masks_padding_is_found_by_its_tokens(tmp_path):
    record(tmp_path, 0, [1, 2], masks=False, pad=PAD)
    assert said(rollouts(tmp_path).load(1, 0, batch_of([1, 2]))) == [answer(i, s) for i in (1, 2) for s in range(N)]


def test_real_steps(tmp_path):
    for step in (0, 1, 2):
        record(tmp_path, step, [step, step + 1])
    mock = rollouts(tmp_path, mock_step_end=1)
    assert [mock.has(step) for step in (1, 2, 3)] == [True, True, False] and mock.steps() == 2
    assert said(mock.load(2, 0, batch_of([1, 2])))[0] == answer(1, 0)
    assert not mock.has(1, 1)
    record(tmp_path, 0, [4], micro_step=1)
    assert rollouts(tmp_path).has(1, 1) and said(rollouts(tmp_path).load(1, 1, batch_of([4])))[1] == answer(4, 1)
    assert rollouts(tmp_path, mock_step_start=1, mock_step_end=2).steps() == 0  # the first step needs an engine


def test_cycling_takes_the_recorded_prompts_and_their_answers(tmp_path):
    record(tmp_path, 0, [0, 1])
    record(tmp_path, 1, [4, 5])
    mock = rollouts(tmp_path, mock_random_seed=-1, mock_step_end=1)
    assert mock.steps() > 10**9 and mock.has(100)
    for step, ids in ((1, [0, 1]), (2, [4, 5]), (3, [0, 1])):
        batch = mock.load(step, 0, batch_of([2, 3], step=step))
        assert batch["prompt_id"] == [f"p{i}" for i in ids for _ in range(N)]
        assert batch["ground_truth"] == [str(i) for i in ids for _ in range(N)]
        assert said(batch) == [answer(i, s) for i in ids for s in range(N)]
        assert batch.info["step"] == step and len(set(batch["uid"])) == 2


def test_replays_are_told_by_the_rank_that_recorded_them(tmp_path):
    told = []
    record(tmp_path, 0, [1, 2], ranks=2)
    rollouts(tmp_path, on_replay=lambda *a: told.append(a)).load(1, 0, batch_of([2, 1]))
    [(step, attempt, by_rank)] = told
    assert (step, attempt, list(by_rank)) == (0, 0, [0, 1])
    assert said(by_rank[0]) == [answer(1, 0), answer(1, 1)] and said(by_rank[1]) == [answer(2, 0), answer(2, 1)]


@pytest.mark.parametrize(
    ("prepare", "settings", "ids", "message"),
    [
        (
            lambda r: record(r, 0, [1, 2]),
            {},
            [1, 3],
            r"step 0: the recorded step is about other prompts; expected prompt p3 \(2 samples\)",
        ),
        (
            lambda r: record(r, 0, [1, 2]),
            {},
            [1],
            "has more samples than this run asks for; expected 2 samples; found 4 samples",
        ),
        (
            lambda r: record(r, 0, [1]),
            {"mock_step_end": 3},
            None,
            r"this step was not recorded; expected data/responses/step3/…/micro_step0; found steps 0",
        ),
        (
            lambda r: record(r, 0, [1], width=8),
            {"response_length": 2},
            [1],
            r"a recorded response does not fit; expected at most 2 tokens \(data.max_response_length\); found 3",
        ),
        (
            lambda r: record(r, 0, [1]),
            {"vocab_size": 21},
            [1],
            "a recorded token is not in the vocabulary; expected 0 … 20; found",
        ),
        (
            lambda r: record(r, 0, [1, 2]),
            {"mock_random_seed": -1},
            [1],
            "does not have the shape of this run's; expected 2 samples, 2 of every prompt; found 4 samples",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, prepare, settings, ids, message):
    prepare(tmp_path)
    mock = rollouts(tmp_path, **settings)
    with pytest.raises(InputError, match=message):
        mock.load(4 if ids is None else 1, 0, batch_of(ids or [1]))


def test_a_recorded_prompt_that_nobody_knows_is_refused(tmp_path):
    record(tmp_path, 0, [5])
    few = PromptSet([PROMPTS[0], PROMPTS[1]], tokenizer_hash="")
    with pytest.raises(
        InputError, match="a recorded prompt is not in the training data, so its reward cannot be judged"
    ):
        rollouts(tmp_path, mock_random_seed=3, prompts=few).load(1, 0, batch_of([1]))


def test_distillation_replays_real_steps_only(tmp_path):
    record(tmp_path, 0, [1])
    with pytest.raises(
        InputError, match="mock_random_seed: only recorded steps at their own places .*expected None; found -1"
    ):
        rollouts(tmp_path, mock_random_seed=-1, prompts=None)
    assert said(rollouts(tmp_path, prompts=None).load(1, 0, batch_of([1]))) == [answer(1, 0), answer(1, 1)]


def test_a_recording_that_is_none_is_refused_before_the_run(tmp_path):
    with pytest.raises(InputError, match="there is no recording to replay.*Next: record with key_data_dump"):
        rollouts(tmp_path / "absent")
    write_key_data(tmp_path, {"old_log_probs": np.zeros((2, 3), np.float32)}, step=0, rank=0, micro_step=0)
    with pytest.raises(InputError, match="cannot be replayed; expected responses, prompts; found old_log_probs"):
        rollouts(tmp_path)


def test_damaged_masks_are_refused(tmp_path):
    record(tmp_path, 0, [1])
    [path] = (tmp_path / "data" / "attention_mask").rglob("*.npy")
    np.save(path, np.ones((2, 3)))
    with pytest.raises(
        InputError, match="recorded prompts, responses and masks do not fit each other; expected 2 samples, masks of 11"
    ):
        rollouts(tmp_path).load(1, 0, batch_of([1]))


def test_key_data_keeps_values_and_says_what_is_not_finite(tmp_path):
    values = torch.tensor([[1.0, float("nan")], [-3.0, float("inf")]], dtype=torch.bfloat16)
    write_key_data(tmp_path, {"entropys": values}, step=2, rank=1, micro_step=3)
    folder = tmp_path / "data" / "entropys" / "step2" / "rank1" / "micro_step3"
    assert sorted(p.name for p in folder.iterdir()) == ["entropys0.json", "entropys0.npy"]
    np.testing.assert_array_equal(np.load(folder / "entropys0.npy"), values.float().numpy())
    found = summary(np.load(folder / "entropys0.npy"))
    assert found == {
        "max": 1.0,
        "min": -3.0,
        "mean": -1.0,
        "norm": 10**0.5,
        "shape": [2, 2],
        "nan_count": 1,
        "inf_count": 1,
    }
    write_key_data(tmp_path, {"responses": torch.arange(3)}, step=0, rank=0, micro_step=0)
    assert (tmp_path / "data" / "responses" / "step0" / "rank0" / "micro_step0" / "response0.npy").is_file()
