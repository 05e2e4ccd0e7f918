"""A prompt taken apart by its chat template: instruction, examples, question."""

from __future__ import annotations

import json

import numpy as np
import pytest

from alignment.diagnose.axes import data
from alignment.diagnose.axes.prompt_parts import (
    FEW_SHOT,
    INSTRUCTION,
    QUESTION,
    TEMPLATE,
    TOKENS,
    PromptParts,
    first_difference,
    parts_of,
)
from alignment.diagnose.run_data import RunData
from alignment.rl.batch_record import BatchRecord, batch_path, write_batch
from alignment.rl.tokenizer import Tokenizer, train_tokenizer

EXAMPLES = "Question: 1 + 1\nAnswer: 2\n\nQuestion: 1 + 2\nAnswer: 3"
ASKED = "Question: 2 + 2\nAnswer:"

WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}[end]{% endfor %}[assistant]"
)
WITH_DEFAULT = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}Be brief.{% endif %}"
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "[{{ message['role'] }}]{{ message['content'] }}[end]{% endif %}{% endfor %}[assistant]"
)

WITHOUT_SEPARATORS = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}\nAnswer:{% endif %}"
)
AFTER_A_QUESTION = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'user' %}\nAnswer:{% endif %}{% endfor %}"
)
AFTER_AN_ANSWER = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}\n{% endif %}{% endfor %}\nAnswer:"
)
"""What base models are given: nothing stands between some messages."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([f"{a} + {b} =" for a in range(4) for b in range(4)] * 4, folder, vocab_size=105)
    return folder


def retold(folder, tmp_path, name, **changes):
    """The tokenizer with another configuration."""
    place = tmp_path / name
    place.mkdir()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
    (place / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    return place


def chat(*contents: str, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


@pytest.mark.parametrize("template", [None, WITHOUT_SYSTEM, WITH_DEFAULT], ids=["ours", "no system", "default system"])
def test_turns_before_the_last_are_examples(folder, tmp_path, template):
    tokenizer = Tokenizer(retold(folder, tmp_path, "told", **({"chat_template": template} if template else {})))
    text = tokenizer.render_chat(chat("1 + 1 =", "2", "1 + 2 =", "3", "2 + 2 ="))
    assert parts_of(text, tokenizer) == PromptParts(
        instruction="", few_shot=("1 + 1 = → 2", "1 + 2 = → 3"), question="2 + 2 ="
    )


@pytest.mark.parametrize("template", [None, WITH_DEFAULT], ids=["ours", "default system"])
def test_a_system_message_is_the_instruction(folder, tmp_path, template):
    tokenizer = Tokenizer(retold(folder, tmp_path, "told", **({"chat_template": template} if template else {})))
    text = tokenizer.render_chat(chat("2 + 2 =", system="Add."))
    assert parts_of(text, tokenizer) == PromptParts(instruction="Add.", few_shot=(), question="2 + 2 =")


def test_paragraphs_that_begin_as_the_question_are_examples(folder):
    tokenizer = Tokenizer(folder)

    def of(message):
        return parts_of(tokenizer.render_chat(chat(message)), tokenizer)

    assert of(f"Add.\n\n{EXAMPLES}\n\n{ASKED}") == PromptParts(
        instruction="Add.", few_shot=tuple(EXAMPLES.split("\n\n")), question=ASKED
    )
    story = "Ann has 2.\n\nBob: how many have both?"
    assert of(story) == PromptParts(instruction="", few_shot=(), question=story)


def test_what_is_not_in_the_template_is_not_taken_apart(folder):
    tokenizer = Tokenizer(folder)
    assert parts_of("2 + 2 =", tokenizer) is None
    assert parts_of(tokenizer.render_chat(chat("2 + 2 =")).removeprefix("<bos>"), tokenizer) is None


@pytest.mark.parametrize(
    "template", [WITHOUT_SEPARATORS, AFTER_A_QUESTION, AFTER_AN_ANSWER], ids=["none", "question only", "answer only"]
)
def test_messages_with_nothing_between_them_are_not_taken_apart(folder, tmp_path, template):
    told = retold(folder, tmp_path, "told", chat_template=template)
    tokenizer = Tokenizer(told)
    for messages in (chat("2 + 2 ="), chat("1 + 1 =", "2", "2 + 2 =")):
        assert parts_of(tokenizer.render_chat(messages), tokenizer) is None
    runs = [a_run(tmp_path / name, told, chat(text)) for name, text in (("a", "2 + 3 ="), ("b", "2 + 2 ="))]
    ids = [tokenizer.encode_chat(chat(text)) for text in ("2 + 3 =", "2 + 2 =")]
    at = next(i for i, (x, y) in enumerate(zip(*ids)) if x != y)
    found = first_difference(*runs)
    place = f"token {at}: [{ids[1][at]}] → [{ids[0][at]}]"
    assert (found.part, found.evidence) == ("", f"batch 2, prompt p, {place}")


def a_run(directory, folder, messages) -> RunData:
    ids = Tokenizer(folder).encode_chat(messages)
    tensors = {"prompts": [ids], "prompt_mask": [[1] * len(ids)], "responses": [[3]], "response_mask": [[1]]}
    arrays = {name: np.array(value) for name, value in tensors.items()}
    write_batch(batch_path(directory, 2), BatchRecord(step=2, tensors=arrays, prompt_ids=["p"], samples=[0]))
    (directory / "groups.jsonl").write_text(json.dumps({"step": 2, "prompt_ids": ["p"]}) + "\n")
    return RunData(directory, "alignment", "cpu", {2: {}}, {"actor_rollout_ref.model.path": str(folder)})


PLAIN = chat("1 + 1 =", "2", "2 + 2 =", system="Add.")


@pytest.mark.parametrize(
    "messages, part, evidence",
    [
        (chat("1 + 1 =", "3", "2 + 2 =", system="Add."), FEW_SHOT, "number 1: '1 + 1 = → 2' → '1 + 1 = → 3'"),
        (chat("1 + 1 =", "2", "2 + 2 =", system="Sum."), INSTRUCTION, "'Add.' → 'Sum.'"),
        (chat("1 + 1 =", "2", "2 + 3 =", system="Add."), QUESTION, "'2 + 2 =' → '2 + 3 ='"),
        (PLAIN, None, None),
    ],
    ids=["few-shot", "instruction", "question", "equal"],
)
def test_the_first_part_that_differs(folder, tmp_path, messages, part, evidence):
    found = first_difference(a_run(tmp_path / "a", folder, messages), a_run(tmp_path / "b", folder, PLAIN))
    assert (found and found.part) == part
    assert found is None or (found.evidence.startswith("batch 2, prompt p, ") and found.evidence.endswith(evidence))


def test_the_way_a_prompt_is_written_is_told_from_its_tokens(folder, tmp_path):
    """Equal messages in another template, and equal text in other tokens."""
    baseline = a_run(tmp_path / "b", folder, PLAIN)
    template = retold(folder, tmp_path, "template", chat_template=WITH_DEFAULT)
    assert first_difference(a_run(tmp_path / "a", template, PLAIN), baseline).part == TEMPLATE
    renumbered = retold(folder, tmp_path, "renumbered")
    definition = json.loads((renumbered / "tokenizer.json").read_text())
    words = definition["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    (renumbered / "tokenizer.json").write_text(json.dumps(definition))
    run = a_run(tmp_path / "c", renumbered, PLAIN)
    assert first_difference(run, baseline).part == TOKENS
    report = data.check(run, baseline)
    causes = ["one prompt is tokenised in two ways: tokenizer", "another vocabulary"]
    assert [finding.cause for finding in report.findings] == causes


def test_a_question_of_one_name_is_the_datas_and_examples_are_the_scorings(folder, tmp_path):
    baseline = a_run(tmp_path / "b", folder, PLAIN)
    asked = a_run(tmp_path / "a", folder, chat("1 + 1 =", "2", "2 + 3 =", system="Add."))
    assert [f.cause for f in data.check(asked, baseline).findings] == ["one name, two questions"]
    shown = data.check(a_run(tmp_path / "c", folder, chat("2 + 2 =", system="Add.")), baseline)
    assert (shown.outcome.value, shown.reason) == (
        "pass",
        "1 batches have the same prompts in the same order; the few-shot examples around them differ: see the scoring",
    )


def test_without_a_tokenizer_nothing_is_taken_apart(folder, tmp_path):
    runs = [a_run(tmp_path / name, folder, m) for name, m in (("a", chat("2 + 2 =")), ("b", PLAIN))]
    found = first_difference(*(RunData(run.directory, "verl", "npu", run.metrics, {}) for run in runs))
    assert (found.part, found.evidence) == ("", "batch 2, prompt p, token 1: [3] → [4]")
