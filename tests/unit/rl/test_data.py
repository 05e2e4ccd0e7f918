"""Prompt data: verl's parquet and its errors, materialised prompts, left padding, an order that resumes exactly."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alignment.errors import InputError
from alignment.rl.data import (
    Prompt,
    PromptSampler,
    PromptSet,
    from_parquet,
    prompt_batch,
    prompt_ids_hash,
    write_parquet,
)
from alignment.rl.tokenizer import Tokenizer, train_tokenizer

BASELINES = Path(__file__).parents[3] / "baselines"
DATA, CHECKPOINT = BASELINES / "data", BASELINES / "checkpoints" / "tiny-moonlight-warm"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = [f"What is {a} + {b}, and why is it that?" for a in range(5) for b in range(5)]
    return train_tokenizer(texts, tmp_path_factory.mktemp("tokenizer"), vocab_size=120)


def rows(count: int = 4) -> list[dict]:
    return [
        {
            "data_source": "reasoning_gym/chain_sum",
            "prompt": [{"role": "user", "content": "1 + 1" + " + 1" * i}],
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": str(2 + i)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(count)
    ]


def prompts(count: int, length: int = 3) -> PromptSet:
    made = [
        Prompt(
            prompt_id=f"p{i}",
            token_ids=tuple(range(3, 4 + i % length)),
            data_source="reasoning_gym/gcd",
            ground_truth=str(i),
        )
        for i in range(count)
    ]
    return PromptSet(made, tokenizer_hash="0" * 64)


def test_verls_parquet_is_read(tokenizer, tmp_path):
    path = tmp_path / "train.parquet"
    write_parquet(rows(), path)
    read = from_parquet(path, tokenizer, max_prompt_length=32)
    assert [p.prompt_id for p in read] == [f"reasoning_gym/chain_sum-{i}" for i in range(4)]
    assert [p.ground_truth for p in read] == ["2", "3", "4", "5"]
    assert all(list(p.token_ids) == tokenizer.encode_chat(r["prompt"]) for p, r in zip(read, rows(), strict=True))
    assert read.tokenizer_hash == tokenizer.content_hash and read.dropped == 0


def test_prompt_ids_and_metadata_are_taken_where_the_data_has_them(tokenizer, tmp_path):
    data = rows(1)
    data[0]["extra_info"] |= {"prompt_id": "sum-1", "metadata": '{"direction": "ascending"}'}
    write_parquet(data, tmp_path / "a.parquet")
    (prompt,) = from_parquet(tmp_path / "a.parquet", tokenizer, max_prompt_length=32)
    assert (prompt.prompt_id, prompt.metadata) == ("sum-1", '{"direction": "ascending"}')


def test_embedded_questions_survive_verls_parquet(tokenizer, tmp_path):
    pytest.importorskip("reasoning_gym")
    from alignment.rl.data import from_questions
    from alignment.rl.tasks import EMBEDDED_TASKS, Task, generate_mixture, verl_rows

    tasks = (*EMBEDDED_TASKS, Task(name="number_sorting"))
    questions = generate_mixture(tasks, 20, seed=0)
    write_parquet(verl_rows(questions, split="rl"), tmp_path / "a.parquet")
    read = from_parquet(tmp_path / "a.parquet", tokenizer, max_prompt_length=1000)
    assert list(read) == list(from_questions(questions, tokenizer))
    assert {bool(p.metadata) for p in read} == {False, True}


def drop_column(name):
    return lambda data: [row.pop(name) for row in data]


def edit(row, *path, value):
    def apply(data):
        place = data[row]
        for key in path[:-1]:
            place = place[key]
        if value is KeyError:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_column("prompt"), "lacks a column; expected prompt; found .*reward_model"),
        (drop_column("data_source"), "lacks a column; expected data_source"),
        (drop_column("reward_model"), "lacks a column; expected reward_model"),
        (drop_column("extra_info"), "lacks a column; expected extra_info"),
        (
            edit(1, "reward_model", "ground_truth", value=KeyError),
            "row 1, reward_model: the data lacks a field; expected ground_truth",
        ),
        (edit(2, "extra_info", "index", value=KeyError), "row 2, extra_info: the data lacks a field; expected index"),
        (edit(1, "prompt", value=[]), "row 1, prompt: a prompt is a non-empty list of chat messages"),
        (edit(1, "prompt", value=[{"role": "user", "content": ""}]), "row 1, prompt: the prompt is empty"),
        (edit(3, "prompt", value=[{"role": "user"}]), "row 3, prompt: the data lacks a field; expected content"),
        (
            edit(3, "extra_info", "index", value=0),
            "two prompts share an id; expected unique prompt ids; found reasoning_gym/chain_sum-0",
        ),
        (edit(0, "data_source", value=None), "row 0: data_source is not a string"),
        (list.clear, "lacks a column; expected data_source; found no columns"),
    ],
)
def test_bad_data_is_one_clear_error(tokenizer, tmp_path, damage, message):
    data = copy.deepcopy(rows())
    damage(data)
    write_parquet(data, tmp_path / "bad.parquet")
    with pytest.raises(InputError, match=message) as caught:
        from_parquet(tmp_path / "bad.parquet", tokenizer, max_prompt_length=32)
    assert "bad.parquet" in str(caught.value)


def test_a_parquet_without_rows_has_no_prompts(tokenizer, tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows(1)).slice(0, 0)
    parquet.write_table(table, tmp_path / "empty.parquet")
    with pytest.raises(InputError, match="empty.parquet: the data set has no prompts"):
        from_parquet(tmp_path / "empty.parquet", tokenizer, max_prompt_length=32)


def test_missing_and_foreign_files_are_named(tokenizer, tmp_path):
    with pytest.raises(InputError, match="none.parquet: the file does not exist"):
        from_parquet(tmp_path / "none.parquet", tokenizer, max_prompt_length=32)
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(InputError, match="text.parquet: the file is not readable as parquet"):
        from_parquet(tmp_path / "text.parquet", tokenizer, max_prompt_length=32)


def test_overlong_prompts_follow_the_policy(tokenizer, tmp_path):
    path = tmp_path / "long.parquet"
    write_parquet(rows(), path)
    full = [p.token_ids for p in from_parquet(path, tokenizer, max_prompt_length=99)]
    limit = len(full[1])
    with pytest.raises(
        InputError, match=rf"row 2: the prompt is too long; expected at most {limit} tokens.*filter_overlong_prompts"
    ):
        from_parquet(path, tokenizer, max_prompt_length=limit)
    kept = from_parquet(path, tokenizer, max_prompt_length=limit, filter_overlong_prompts=True)
    assert [p.token_ids for p in kept] == full[:2] and kept.dropped == 2
    with pytest.raises(InputError, match="no prompts; found 4 dropped for their length"):
        from_parquet(path, tokenizer, max_prompt_length=1, filter_overlong_prompts=True)
    head = limit // 2
    cuts = {"left": full[3][-limit:], "right": full[3][:limit], "middle": full[3][:head] + full[3][head - limit :]}
    for truncation, expected in cuts.items():
        cut = from_parquet(path, tokenizer, max_prompt_length=limit, truncation=truncation)
        assert cut[3].token_ids == expected and cut[0].token_ids == full[0]
    with pytest.raises(InputError, match="unknown truncation; expected error | left"):
        from_parquet(path, tokenizer, max_prompt_length=limit, truncation="centre")


def test_materialised_prompts_come_back_the_same(tmp_path):
    made = prompts(7)
    made.save(tmp_path / "set")
    read = PromptSet.load(tmp_path / "set")
    assert list(read) == list(made)
    assert (read.content_hash, read.tokenizer_hash) == (made.content_hash, made.tokenizer_hash)
    first = [(tmp_path / f"set{suffix}").read_bytes() for suffix in (".json", ".safetensors")]
    made.save(tmp_path / "again")
    assert first == [(tmp_path / f"again{suffix}").read_bytes() for suffix in (".json", ".safetensors")]


def test_damaged_materialised_prompts_are_refused(tmp_path, tokenizer):
    with pytest.raises(InputError, match="set.json: the file does not exist"):
        PromptSet.load(tmp_path / "set")
    prompts(3).save(tmp_path / "set")
    with pytest.raises(InputError, match="made with another tokenizer"):
        PromptSet.load(tmp_path / "set", tokenizer=tokenizer)
    header = json.loads((tmp_path / "set.json").read_text())
    for key, value, message in (
        ("format_version", 99, "another format version; expected 1; found 99"),
        ("content_hash", "0", "not those the file was written with"),
        ("columns", {**header["columns"], "ground_truth": ["9", "9", "9"]}, "not those the file was written with"),
        ("columns", {k: v[:2] for k, v in header["columns"].items()}, "corrupted"),
        ("columns", {k: v + v[:1] for k, v in header["columns"].items()}, "not those the file was written with"),
    ):
        (tmp_path / "set.json").write_text(json.dumps({**header, key: value}))
        with pytest.raises(InputError, match=message):
            PromptSet.load(tmp_path / "set")
    (tmp_path / "set.json").write_text(json.dumps(header))
    tensors = (tmp_path / "set.safetensors").read_bytes()
    (tmp_path / "set.safetensors").write_bytes(tensors[:-3])
    with pytest.raises(InputError, match="set.safetensors: the prompt file is corrupted"):
        PromptSet.load(tmp_path / "set")
    (tmp_path / "set.safetensors").unlink()
    with pytest.raises(InputError, match="set.safetensors: the file does not exist"):
        PromptSet.load(tmp_path / "set")


@pytest.mark.parametrize("field", ["prompt_id", "token_ids", "data_source", "ground_truth", "metadata"])
def test_the_content_hash_covers_every_field(field):
    base = list(prompts(2))
    changed = copy.copy(base[1])
    object.__setattr__(changed, field, (9,) if field == "token_ids" else "other")
    hashes = {PromptSet(p, tokenizer_hash="").content_hash for p in (base, [base[0], changed], base[::-1])}
    assert len(hashes) == 3


def test_an_empty_prompt_is_refused():
    with pytest.raises(InputError, match="row 0: the prompt is empty"):
        PromptSet([Prompt(prompt_id="a", token_ids=(), data_source="s", ground_truth="1")], tokenizer_hash="")


def test_a_batch_is_left_padded_and_carries_what_scoring_needs():
    data = prompts(3)
    batch = prompt_batch(list(data), pad_token_id=0, prompt_length=4)
    assert batch["prompts"].tolist() == [[0, 0, 0, 3], [0, 0, 3, 4], [0, 3, 4, 5]]
    assert batch["prompt_mask"].tolist() == [[0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1]]
    assert batch["prompts"].dtype == batch["prompt_mask"].dtype == torch.int64
    assert batch["uid"] == batch["prompt_id"] == ["p0", "p1", "p2"]
    assert batch["ground_truth"] == ["0", "1", "2"] and set(batch["data_source"]) == {"reasoning_gym/gcd"}
    assert prompt_batch(list(data), pad_token_id=0)["prompts"].shape == (3, 3)
    with pytest.raises(InputError, match="prompt p2: the prompt does not fit; expected at most 2 tokens.*found 3"):
        prompt_batch(list(data), pad_token_id=0, prompt_length=2)
    with pytest.raises(InputError, match="at least one prompt"):
        prompt_batch([], pad_token_id=0)


def ids(batch: list[Prompt]) -> list[str]:
    return [p.prompt_id for p in batch]


def test_every_epoch_meets_each_prompt_once_in_an_order_of_its_own():
    sampler = PromptSampler(prompts(12), batch_size=4, seed=1)
    epochs = [[i for _ in range(3) for i in ids(sampler.next_batch())] for _ in range(3)]
    assert all(sorted(e) == sorted(ids(list(prompts(12)))) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3


def test_the_order_is_a_function_of_the_seed():
    def first(seed, **kwargs):
        return ids(PromptSampler(prompts(40), batch_size=30, seed=seed, **kwargs).next_batch())

    assert first(1) == first(1) != first(2)
    assert first(1, shuffle=False) == [f"p{i}" for i in range(30)]


def test_the_incomplete_rest_of_an_epoch_is_left_out():
    sampler = PromptSampler(prompts(7), batch_size=3, seed=0, shuffle=False)
    assert [ids(sampler.next_batch()) for _ in range(3)] == [["p0", "p1", "p2"], ["p3", "p4", "p5"], ["p0", "p1", "p2"]]
    assert (sampler.epoch, sampler.position) == (1, 3)


@pytest.mark.parametrize("taken", range(8))
def test_a_walk_resumed_anywhere_continues_exactly(taken):
    whole = PromptSampler(prompts(10), batch_size=3, seed=5)
    expected = [ids(whole.next_batch()) for _ in range(12)]
    stopped = PromptSampler(prompts(10), batch_size=3, seed=5)
    for _ in range(taken):
        stopped.next_batch()
    resumed = PromptSampler(prompts(10), batch_size=3, seed=5)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [ids(resumed.next_batch()) for _ in range(12 - taken)] == expected[taken:]
    if taken:
        fresh = PromptSampler(prompts(10), batch_size=3, seed=5)
        assert [ids(fresh.next_batch()) for _ in range(12 - taken)] != expected[taken:]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 6}, "seed"),
        ({"batch_size": 2}, "batch_size"),
        ({"shuffle": False}, "shuffle"),
        ({"prompts": prompts(11)}, "content_hash"),
    ],
)
def test_a_state_of_another_run_is_refused(change, name):
    arguments = {"prompts": prompts(10), "batch_size": 3, "seed": 5}
    state = PromptSampler(**arguments).state_dict()
    other = PromptSampler(**{**arguments, **change})
    with pytest.raises(InputError, match=f"data position, {name}: the saved data position belongs to another run"):
        other.load_state_dict(state)
    with pytest.raises(InputError, match="data position, epoch: the saved data position is broken"):
        PromptSampler(**arguments).load_state_dict({**state, "epoch": None})


def test_the_reserve_depends_on_the_step_alone():
    sampler, other = (PromptSampler(prompts(30), batch_size=4, seed=5) for _ in range(2))
    first = ids(sampler.reserve(3, 8))
    sampler.next_batch()
    assert ids(sampler.reserve(3, 8)) == first == ids(sampler.reserve(3, 12))[:8] != ids(sampler.reserve(4, 8))
    other.next_batch()
    other.next_batch()
    sampler.next_batch()
    assert ids(sampler.next_batch()) == ids(other.next_batch())
    with pytest.raises(InputError, match="the reserve does not fit the data set; expected 0 … 30; found 31"):
        sampler.reserve(1, 31)


@pytest.mark.parametrize("size", [0, 11])
def test_a_batch_that_does_not_fit_is_refused(size):
    with pytest.raises(InputError, match=f"the batch does not fit the data set; expected 1 … 10; found {size}"):
        PromptSampler(prompts(10), batch_size=size, seed=0)


def test_the_hash_of_a_steps_prompts_sees_order_and_identity():
    hashes = {prompt_ids_hash(x) for x in (["a", "b"], ["b", "a"], ["a", "c"], ["ab"], ["a"])}
    assert len(hashes) == 5 and prompt_ids_hash(["a", "b"]) in hashes


@pytest.mark.parametrize("split", ["rl", "held_out"])
def test_the_stored_prompts_are_those_the_script_makes(split):
    pytest.importorskip("reasoning_gym")
    from alignment.rl.data import from_questions
    from alignment.rl.tasks import EMBEDDED_TASKS, generate_mixture, split_of

    manifest = json.loads((DATA / "manifest.json").read_text())
    tokenizer = Tokenizer(CHECKPOINT)
    stored = PromptSet.load(DATA / split, tokenizer=tokenizer)
    questions = generate_mixture(EMBEDDED_TASKS, len(stored), seed=manifest["seed"], split=split)
    assert list(stored) == list(from_questions(questions, tokenizer))
    assert list(stored) == list(from_parquet(DATA / f"{split}.parquet", tokenizer, max_prompt_length=stored.max_length))
    assert manifest["sets"][split]["content_hash"] == stored.content_hash
    assert manifest["tokenizer_hash"] == stored.tokenizer_hash == tokenizer.content_hash
    assert {split_of(q.question) for q in questions} == {split}


def test_the_stored_checkpoint_has_exactly_the_tokenizers_vocabulary():
    from alignment.weights.checkpoint import load_config

    config, tokenizer = load_config(CHECKPOINT), Tokenizer(CHECKPOINT)
    tokenizer.check_model(config.vocab_size)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )


def test_stored_prompts_can_be_read_and_scored_on_a_bare_machine():
    """What a GPU recording machine has: torch, numpy, safetensors; none of the packages that made the data."""
    script = f"""
import sys
for name in ("pyarrow", "reasoning_gym", "tokenizers", "math_verify", "scipy", "omegaconf", "ray", "transformers"):
    sys.modules[name] = None
from alignment.rl.data import PromptSampler, PromptSet, prompt_batch
from alignment.rl.scoring import score_responses
from alignment.rl.tokenizer import Tokenizer
tokenizer = Tokenizer({str(CHECKPOINT)!r})
prompts = PromptSet.load({str(DATA / "held_out")!r}, tokenizer=tokenizer)
batch = prompt_batch(PromptSampler(prompts, batch_size=64, seed=0).next_batch(), pad_token_id=tokenizer.pad_token_id)
digits = {{tokenizer.decode([i]): i for i in range(tokenizer.vocab_size)}}
answers = [tokenizer.decode_response([digits[c] for c in a] + [tokenizer.eos_token_id]) for a in batch["ground_truth"]]
print(sum(s.acc for s in score_responses(batch["data_source"], answers, batch["ground_truth"])))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ran.stdout.strip(), ran.returncode) == ("64.0", 0), ran.stderr
