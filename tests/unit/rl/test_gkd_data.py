"""Which generations are on-policy, which samples are used, and how they become a batch."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from rl_cases import EOS, PAD, philox

from alignment.errors import InputError
from alignment.rl.contracts import check
from alignment.rl.data import PromptSampler
from alignment.rl.distill_loss import IGNORED
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_data import (
    Encoder,
    GkdSample,
    OnPolicySchedule,
    SampleSet,
    collate,
    conversation_sample,
    encode_samples,
    load_samples,
    numbered,
    resample,
)
from alignment.rl.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).resolve().parents[3] / "baselines" / "checkpoints" / "tiny-moonlight-student"


def sample(name: str, prompt: int, response: int, *, teacher: int | None = None, seed: int = 0) -> GkdSample:
    rng = philox(seed + len(name))
    return GkdSample(
        sample_id=name,
        prompt_ids=tuple(rng.integers(2, 20, prompt).tolist()),
        response_ids=(*rng.integers(2, 20, response - 1).tolist(), EOS),
        response_mask=(True,) * response,
        teacher_prompt_ids=None if teacher is None else tuple(rng.integers(2, 20, teacher).tolist()),
    )


# The schedule.


def test_a_thousand_generations_are_python_s_generator_seeded_with_42():
    schedule = OnPolicySchedule(lmbda=0.5)
    generator = random.Random(42)
    assert [schedule.draw() for _ in range(1000)] == [generator.random() < 0.5 for _ in range(1000)]


@pytest.mark.parametrize("at", [0, 1, 499, 999])
def test_a_thousand_steps_continue_exactly_after_a_resume(at):
    straight, first = OnPolicySchedule(lmbda=0.5), OnPolicySchedule(lmbda=0.5)
    whole = [straight.draw() for _ in range(1000)]
    begun = [first.draw() for _ in range(at)]
    resumed = OnPolicySchedule(lmbda=0.5)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + [resumed.draw() for _ in range(1000 - at)] == whole


def test_nobody_else_s_draws_move_it():
    schedule, again = OnPolicySchedule(lmbda=0.5), OnPolicySchedule(lmbda=0.5)
    drawn = []
    for i in range(50):
        random.seed(i)
        torch.manual_seed(i)
        random.random()
        drawn.append(schedule.draw())
    assert drawn == [again.draw() for _ in range(50)]


@pytest.mark.parametrize(("lmbda", "expected"), [(0.0, {False}), (1.0, {True})])
def test_the_ends_of_the_schedule(lmbda, expected):
    schedule = OnPolicySchedule(lmbda=lmbda)
    assert {schedule.draw() for _ in range(200)} == expected


# Cyclic data, resampling.


def test_the_walk_is_cyclic_and_drops_the_last_partial_batch():
    samples = SampleSet([sample(f"s{i}", 2, 2) for i in range(7)])
    sampler = PromptSampler(samples, batch_size=3, seed=1)
    epochs = [[s.sample_id for _ in range(2) for s in sampler.next_batch()] for _ in range(3)]
    assert all(len(set(epoch)) == 6 for epoch in epochs) and sampler.epoch == 2
    assert epochs[0] != epochs[1]


def test_others_take_the_place_of_those_that_do_not_fit():
    fits = Encoder(max_length=6).fits
    short = [sample(f"short{i}", 2, 2) for i in range(4)]
    spare = [[sample("long9", 9, 2), sample("spare", 3, 2)]]
    kept, replaced = resample(
        [short[0], sample("long0", 7, 2), short[1]], fits=fits, more=lambda: spare.pop(0), max_resample_times=3
    )
    assert [s.sample_id for s in kept] == ["short0", "short1", "spare"] and replaced == 2


def test_drawing_again_is_bounded():
    looked = []

    def more():
        looked.append(1)
        return [sample("long", 9, 2)] * 2

    with pytest.raises(
        InputError, match="gkd.max_length: too few samples fit; expected 2 samples; found 0 of the 8 that were"
    ):
        resample([sample("long", 9, 2)] * 2, fits=Encoder(max_length=6).fits, more=more, max_resample_times=3)
    assert len(looked) == 3
    with pytest.raises(InputError, match="found 0 of the 2 that were looked at"):
        resample([sample("long", 9, 2)] * 2, fits=lambda s: False, more=lambda: [], max_resample_times=3)


def test_nothing_is_drawn_where_everything_fits():
    given = [sample("a", 2, 2), sample("b", 2, 2)]
    kept, replaced = resample(given, fits=lambda s: True, more=lambda: pytest.fail("drew"), max_resample_times=3)
    assert kept == given and replaced == 0


# Encoding and collating.


def test_labels_are_the_response_s_tokens():
    s = sample("a", 3, 4)
    [view], teacher = encode_samples([s], Encoder(max_length=10))
    assert teacher is None and list(view.input_ids) == [*s.prompt_ids, *s.response_ids]
    assert list(view.labels) == [IGNORED] * 3 + list(s.response_ids)


def test_turns_of_others_do_not_count():
    s = dataclasses.replace(sample("a", 2, 4), response_mask=(True, True, False, True))
    [view], _ = encode_samples([s], Encoder(max_length=10))
    assert list(view.labels)[2:] == [*s.response_ids[:2], IGNORED, s.response_ids[3]]


def test_a_first_token_never_counts():
    s = sample("a", 0, 3)
    [view], _ = encode_samples([s], Encoder(max_length=10))
    assert list(view.labels) == [IGNORED, *s.response_ids[1:]]


def test_length_is_extended_only_while_a_batch_is_encoded():
    encoder = Encoder(max_length=5)
    s = sample("a", 4, 3)
    assert not encoder.fits(s) and encoder.extended(2).fits(s) and encoder.max_length == 5
    with pytest.raises(InputError, match="sample a: the sample is too long; expected at most 5 tokens; found 7"):
        encode_samples([s], encoder)
    encode_samples([s], encoder.extended(2))


@pytest.mark.parametrize(("strategy", "kept"), [("left", slice(-5, None)), ("right", slice(0, 5))])
def test_cutting(strategy, kept):
    s = sample("a", 4, 3)
    [view], _ = encode_samples([s], Encoder(max_length=5, truncation_strategy=strategy))
    whole = [*s.prompt_ids, *s.response_ids]
    assert list(view.input_ids) == whole[kept]
    assert [t for t in view.labels if t != IGNORED] == [
        t for t in ([IGNORED] * 4 + list(s.response_ids))[kept] if t != IGNORED
    ]


def test_a_batch_of_two_views_passes_the_contract():
    batch = collate(
        [sample("a", 2, 4, teacher=5), sample("bb", 3, 2)], Encoder(max_length=20), dp_size=2, pad_token_id=PAD
    )
    check("teacher_log_prob", batch, moment="before")
    assert batch["input_ids"].shape == (2, 6) and batch["teacher_input_ids"].shape == (2, 9)
    # A sample without a prompt of the teacher's own is seen alike by both.
    assert batch["teacher_input_ids"][1, :5].tolist() == batch["input_ids"][1, :5].tolist()
    assert batch["dataset_response"].tolist() == [1, 1]


def test_a_long_teacher_prompt_is_found_out():
    """Right cutting takes the end of the teacher's response and not of the student's."""
    with pytest.raises(
        InputError, match=r"labels, sample a: teacher and student see different numbers of active tokens"
    ):
        collate(
            [sample("a", 2, 4, teacher=5)],
            Encoder(max_length=7, truncation_strategy="right"),
            dp_size=1,
            pad_token_id=PAD,
        )


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(
        InputError, match="collate: the batch does not divide .* multiple of dp_size = 2 samples; found 3 samples"
    ):
        collate([sample(n, 2, 2) for n in "abc"], Encoder(max_length=9), dp_size=2, pad_token_id=PAD)


def test_a_sample_that_comes_twice_has_two_names():
    assert numbered(["a", "b", "a"]) == ["a#0", "b#0", "a#1"]


def test_a_sample_survives_a_checkpoint():
    s = sample("a", 2, 3, teacher=4).answered([3, 4], [True, False])
    assert GkdSample.from_json(json.loads(json.dumps(s.to_json()))) == s
    assert s.on_policy and s.stripped().response_ids == ()


# Reading.


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(CHECKPOINT)


def chat(**more) -> dict:
    return {"messages": [{"role": "user", "content": "1 + 2 ="}, {"role": "assistant", "content": "3"}], **more}


def test_a_chat_is_prompt_and_response(tokenizer):
    s = conversation_sample(chat(), tokenizer)
    assert tokenizer.decode(s.prompt_ids, skip_special_tokens=False) == "<bos><|user|>1 + 2 =<|assistant|>"
    assert s.response_ids == (*tokenizer.encode("3"), tokenizer.eos_token_id) and s.teacher_prompt_ids is None


def test_the_teacher_s_prompt_takes_the_place_of_the_last_user_message(tokenizer):
    row = chat(teacher_prompt="3 = 1 + 2")
    row["messages"] = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "1"}, *row["messages"]]
    s = conversation_sample(row, tokenizer)
    seen = tokenizer.decode(s.teacher_prompt_ids, skip_special_tokens=False)
    assert seen == "<bos><|user|>0<|assistant|>1<eos><|user|>3 = 1 + 2<|assistant|>"
    assert row["messages"][-2]["content"] == "1 + 2 ="
    other = conversation_sample(chat(teacher_messages=[{"role": "user", "content": "9"}]), tokenizer)
    assert tokenizer.decode(other.teacher_prompt_ids, skip_special_tokens=False) == "<bos><|user|>9<|assistant|>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "messages: a sample is a non-empty list of chat messages"),
        ({"messages": [{"role": "user"}]}, "a chat message has a role and text"),
        (
            {"messages": [{"role": "system", "content": "1"}], "teacher_prompt": "2"},
            "the teacher's prompt has no user message to take the place of",
        ),
    ],
)
def test_rows_that_are_no_chat(tokenizer, row, message):
    with pytest.raises(InputError, match=message):
        conversation_sample(row, tokenizer)


def test_files(tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(chat(id="x")) + "\n" + json.dumps(chat()) + "\n")

    def read(*files: object, lmbda: float = 0.5) -> SampleSet:
        tree = {"data": {"train_files": [str(f) for f in files]}, "gkd": {"teacher_model": "t", "lmbda": lmbda}}
        return load_samples(GkdConfig.from_dict(tree), tokenizer)

    samples = read(path)
    assert [s.sample_id for s in samples] == ["x", "chats-1"]
    assert read(path).content_hash == samples.content_hash
    with pytest.raises(InputError, match="two samples share an id; expected unique ids; found x"):
        read(path, path)
    path.write_text(json.dumps({"messages": chat()["messages"][:1]}) + "\n")
    with pytest.raises(InputError, match="sample chats-0: off-policy generations need responses"):
        read(path)
    assert read(path, lmbda=1.0)[0].response_ids == ()
    path.write_text("{\n")
    with pytest.raises(InputError, match="chats.jsonl, line 1: the line is not JSON"):
        read(path)
    with pytest.raises(InputError, match="data.train_files: there is nothing to train on"):
        read()
    with pytest.raises(InputError, match="the file cannot be read"):
        read(tmp_path / "missing.jsonl")


def test_the_embedded_questions_answer_with_the_reference(tokenizer):
    root = CHECKPOINT.parents[1] / "data" / "rl.json"
    tree = {"data": {"train_files": [str(root)]}, "gkd": {"teacher_model": "t"}}
    first = load_samples(GkdConfig.from_dict(tree), tokenizer)[0]
    assert (
        tokenizer.decode_response(first.response_ids) == first.ground_truth
        and first.response_ids[-1] == tokenizer.eos_token_id
    )
