"""Tasks: what is drawn, that splits cannot overlap, and that the rows are verl's."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise

import pytest

from alignment.errors import InputError
from alignment.rl import tasks
from alignment.rl.tasks import EMBEDDED_TASKS, SPLITS, Task, generate, generate_mixture, split_of, verl_rows

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="unavailable: reasoning-gym is not installed"
)

SUM = EMBEDDED_TASKS[0]


def test_questions_are_reasoning_gyms_own_and_each_occurs_once():
    import reasoning_gym

    questions = generate(SUM, 40, seed=3)
    assert len({q.question for q in questions}) == 40
    entries = reasoning_gym.create_dataset("chain_sum", seed=3 << 32, size=200, **SUM.config)
    answers = {entries[i]["question"]: entries[i]["answer"] for i in range(200)}
    assert all(answers[q.question] == q.answer for q in questions)
    assert {q.data_source for q in questions} == {"reasoning_gym/chain_sum"}


def test_a_draw_is_a_function_of_its_seed():
    assert generate(SUM, 10, seed=1) == generate(SUM, 10, seed=1)
    assert generate(SUM, 10, seed=1) != generate(SUM, 10, seed=2)
    assert generate(SUM, 20, seed=1)[:10] == generate(SUM, 10, seed=1)


def test_no_question_is_in_two_splits_whatever_the_seed():
    drawn = {split: {q.question for s in range(3) for q in generate(SUM, 60, seed=s, split=split)} for split in SPLITS}
    names = list(drawn)
    assert not any(drawn[a] & drawn[b] for a in names for b in names if a < b)
    assert all(split_of(question) == split for split, questions in drawn.items() for question in questions)


def test_the_splits_cover_all_questions():
    edges = sorted(SPLITS.values())
    assert edges[0][0] == 0 and edges[-1][1] == 100
    assert all(a[1] == b[0] for a, b in pairwise(edges))


def test_only_accepted_questions_are_drawn():
    task = next(t for t in EMBEDDED_TASKS if t.name == "spell_backward")
    assert all(q.metadata["word"].islower() for q in generate(task, 50, seed=0))
    every = generate(Task(name=task.name, config=task.config), 200, seed=0)
    assert not all(q.metadata["word"].islower() for q in every)


def test_a_mixture_keeps_the_shares_and_the_count():
    questions = generate_mixture(EMBEDDED_TASKS, 33, seed=0)
    counts = {t.name: sum(q.data_source == t.data_source for q in questions) for t in EMBEDDED_TASKS}
    assert sum(counts.values()) == 33
    total = sum(t.share for t in EMBEDDED_TASKS)
    assert all(abs(counts[t.name] - 33 * t.share / total) < 1 for t in EMBEDDED_TASKS)


def test_rows_have_verls_columns():
    questions = generate(SUM, 3, seed=0)
    for index, (row, q) in enumerate(zip(verl_rows(questions, split="rl"), questions, strict=True)):
        assert row["prompt"] == [{"role": "user", "content": q.question}]
        assert row["data_source"] == "reasoning_gym/chain_sum"
        assert row["reward_model"] == {"style": "rule", "ground_truth": q.answer}
        assert row["extra_info"]["index"] == index and row["extra_info"]["prompt_id"] == q.prompt_id
        assert row["extra_info"]["metadata"] == ""
    (sorting,) = verl_rows(generate(Task(name="number_sorting"), 1, seed=0), split="rl")
    assert json.loads(sorting["extra_info"]["metadata"])["direction"] in ("ascending", "descending")


def test_prompt_ids_differ_between_tasks_and_questions():
    ids = [q.prompt_id for q in generate_mixture(EMBEDDED_TASKS, 60, seed=0)]
    assert len(set(ids)) == 60
    assert ids[0].startswith("chain_sum-")


@pytest.mark.parametrize(
    ("task", "kwargs", "message"),
    [
        (Task(name="chain_sun"), {}, "no task 'chain_sun'; expected 'chain_sum'"),
        (Task(name="chain_sum", config={"max_term": 2}), {}, "refuses this configuration .*max_term"),
        (Task(name="chain_sum", config={"min_terms": 9, "max_terms": 2}), {}, "refuses this configuration"),
        (SUM, {"split": "validation"}, "unknown split; expected held_out | rl | warm_start; found validation"),
    ],
)
def test_wrong_requests_are_named(task, kwargs, message):
    with pytest.raises(InputError, match=message):
        generate(task, 5, seed=0, **kwargs)


def test_a_task_without_enough_questions_says_how_many_there_are():
    tiny = Task(name="chain_sum", config={"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1})
    assert len(generate(tiny, 10, seed=0)) == 10
    with pytest.raises(InputError, match="too few different questions.*expected 11 questions; found 10 after"):
        generate(tiny, 11, seed=0)


@pytest.mark.parametrize("shares", [(), (0.0, 0.0), (1.0, -1.0)])
def test_a_mixture_needs_shares(shares):
    with pytest.raises(InputError, match="a mixture needs tasks with shares"):
        generate_mixture([Task(name="chain_sum", share=s) for s in shares], 4, seed=0)


def test_missing_reasoning_gym_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(InputError, match="reasoning-gym is needed to draw questions.*materialised prompts"):
        generate(SUM, 1, seed=0)
    assert tasks.generate(SUM, 0, seed=0) == []


def test_examples_and_an_instruction_come_before_every_question_and_leave_its_name():
    asked, *shown = generate(Task(name="chain_sum"), 3, seed=0)
    [plain], [told] = verl_rows([asked], split="rl"), verl_rows([asked], split="rl", few_shot=shown, instruction="Add.")
    assert told["prompt"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": shown[0].question},
        {"role": "assistant", "content": shown[0].answer},
        {"role": "user", "content": shown[1].question},
        {"role": "assistant", "content": shown[1].answer},
        *plain["prompt"],
    ]
    assert {**told, "prompt": plain["prompt"]} == plain
