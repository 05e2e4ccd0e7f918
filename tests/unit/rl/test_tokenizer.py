"""The tokenizer: exact vocabulary, exact round trips, the chat template, decoding without the tokenizers package."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.errors import InputError, UnavailableError
from alignment.rl.tokenizer import SPECIAL_TOKENS, Tokenizer, train_tokenizer

TEXTS = [f"Spell this word backward (example: sun -> nus): {word}" for word in ("neon", "state", "the")]
TEXTS += [f"State the final answer to the following arithmetic problem: {a} + {a * 7 % 90} =" for a in range(90)]
SIZE = 140


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, path, vocab_size=SIZE)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


def test_the_vocabulary_is_filled_exactly_and_starts_with_the_special_tokens(tokenizer):
    assert tokenizer.vocab_size == SIZE
    pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in range(SIZE)]
    assert len(set(pieces)) == SIZE
    assert tuple(pieces[: len(SPECIAL_TOKENS)]) == SPECIAL_TOKENS
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_training_is_reproducible(folder, tmp_path):
    train_tokenizer(TEXTS, tmp_path, vocab_size=SIZE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_digits_and_the_letters_of_the_last_word_stand_alone(tokenizer):
    words = [tokenizer.decode([i]) for i in tokenizer.encode("Spell this word backward (example: sun -> nus): state")]
    assert words[-5:] == list("state")
    assert max(map(len, words[:-5])) > 1
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == list("1234")


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40))
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_characters_outside_the_alphabet_are_refused(tokenizer):
    with pytest.raises(InputError, match="the tokenizer's alphabet lacks; found 'é'"):
        tokenizer.encode("é 1")


def test_the_chat_template_ends_where_the_answer_begins(tokenizer):
    messages = [
        {"role": "system", "content": "1"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "4"},
    ]
    assert tokenizer.render_chat(messages) == "<bos><|system|>1<|user|>2<|assistant|>3<eos><|user|>4<|assistant|>"
    ids = tokenizer.encode_chat(messages)
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids) == "1234"


def test_transformers_reads_the_same_tokenizer(folder, tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": TEXTS[0]}]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(ids) == tokenizer.encode_chat(messages)
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


def test_a_response_ends_at_its_first_end_of_sequence(tokenizer):
    one, two = tokenizer.encode("12")
    assert tokenizer.decode_response([one, tokenizer.eos_token_id, two]) == "1"
    assert tokenizer.decode_response([one, two, tokenizer.pad_token_id]) == "12"
    assert tokenizer.decode_response([]) == ""


def test_decoding_needs_no_tokenizers_package_and_encoding_says_so(folder, tokenizer, monkeypatch):
    ids = tokenizer.encode("12 + 3")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    alone = Tokenizer(folder)
    assert alone.decode(ids) == "12 + 3"
    with pytest.raises(UnavailableError, match="tokenizers is needed to encode text"):
        alone.encode("1")


def test_a_model_with_another_vocabulary_is_refused(tokenizer):
    tokenizer.check_model(SIZE)
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(InputError, match=f"vocab_size is not the tokenizer's; expected {SIZE} .* found {size}"):
            tokenizer.check_model(size)


def test_an_unknown_token_id_is_refused(tokenizer):
    with pytest.raises(InputError, match=rf"not in the vocabulary; expected 0 … {SIZE - 1}; found {SIZE}"):
        tokenizer.decode([1, SIZE])


def test_more_tokens_than_the_texts_give_is_an_error(tmp_path):
    with pytest.raises(InputError, match="do not fill the vocabulary exactly; expected 5000 tokens; found"):
        train_tokenizer(TEXTS, tmp_path, vocab_size=5000)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="characters outside the alphabet"):
        train_tokenizer(["naïve"], tmp_path, vocab_size=SIZE)


def test_a_broken_folder_names_the_file(folder, tmp_path):
    with pytest.raises(InputError, match="tokenizer.json: the file does not exist"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match="tokenizer.json: not a tokenizers file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<nothing>"}))
    with pytest.raises(InputError, match="pad_token is not in the vocabulary.*found '<nothing>'"):
        Tokenizer(tmp_path)


def test_a_template_that_refuses_says_why(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="the chat template refuses the messages .roles must alternate."):
        Tokenizer(tmp_path).render_chat([])
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="the tokenizer has no chat template"):
        Tokenizer(tmp_path).render_chat([])
