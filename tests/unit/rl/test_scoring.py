"""Scores: reasoning-gym's verdict, the built-in rules' identity with it, math-verify, and DAPO's reward."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.errors import InputError, UnavailableError
from alignment.rl import scoring
from alignment.rl.data import PromptSet
from alignment.rl.scoring import BUILT_IN, Score, final_answer, score_response, score_responses
from alignment.rl.tasks import EMBEDDED_TASKS, Task, generate
from alignment.rl.tokenizer import Tokenizer

BASELINES = Path(__file__).parents[3] / "baselines"

TASKS = (*EMBEDDED_TASKS, Task(name="products", config={"max_digits": 2}), Task(name="lcm"))


def variants(answer: str) -> list[str]:
    """What a policy may write instead of the answer: right in other words, partly right, or wrong."""
    return [
        answer, f" {answer}\n", f"+{answer}", f"0{answer}", f"{answer}.0", f"{answer}.", f"-{answer}", f"{answer}0",
        f"{answer}{answer}", f"1 + 1 = {answer}", answer[::-1], answer[:-1], answer[1:], answer.upper(), f"1,{answer}",
        f"<answer>{answer}</answer>", f"<answer>1</answer> so <answer> {answer} </answer>", f"{answer}x",
        "", " ", "1", "NaN", "Infinity", "1e0", "1_0", "٣", "-", "no",
    ]  # fmt: skip


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_built_in_rule_is_reasoning_gyms(task):
    pytest.importorskip("reasoning_gym")
    outcomes = set()
    for q in generate(task, 60, seed=5):
        for response in variants(q.answer):
            built_in = score_response(q.data_source, response, q.answer, verifier="built_in")
            gym = score_response(q.data_source, response, q.answer, metadata=q.metadata, verifier="reasoning_gym")
            assert built_in == gym, (q.question, response)
            outcomes.add(built_in.acc)
    assert outcomes == {0.0, 1.0}


@given(
    st.sampled_from(sorted(BUILT_IN)),
    st.text("0123456789+-., eE_ab", max_size=8),
    st.text("0123456789ab-", min_size=1, max_size=5),
)
def test_the_built_in_rule_is_reasoning_gyms_on_any_text(name, response, truth):
    pytest.importorskip("reasoning_gym")
    source = f"reasoning_gym/{name}"
    assert score_response(source, response, truth, verifier="built_in") == score_response(
        source, response, truth, verifier="reasoning_gym"
    )


@pytest.mark.parametrize("split", ["rl", "held_out"])
def test_scores_from_stored_token_ids_are_reasoning_gyms(split):
    """On every stored prompt: responses as token ids, judged with and without reasoning-gym."""
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("tokenizers")
    tokenizer, accs = Tokenizer(BASELINES / "checkpoints" / "tiny-moonlight-warm"), set()
    for prompt in PromptSet.load(BASELINES / "data" / split, tokenizer=tokenizer):
        truth = prompt.ground_truth
        for text in (truth, f"0{truth}", truth[::-1], truth[:-1], f"{truth}0", f"1 + 1 = {truth}"):
            response = tokenizer.decode_response(
                [*tokenizer.encode(text), tokenizer.eos_token_id, tokenizer.pad_token_id]
            )
            built_in = score_response(prompt.data_source, response, truth, verifier="built_in")
            assert built_in == score_response(prompt.data_source, response, truth, verifier="reasoning_gym")
            accs.add((prompt.data_source, built_in.acc))
    assert accs == {(task.data_source, acc) for task in EMBEDDED_TASKS for acc in (0.0, 1.0)}


def test_answers_are_found_as_reasoning_gym_finds_them():
    gym = pytest.importorskip("reasoning_gym").utils
    for text in (
        "<answer>4</answer>",
        "a <answer> 4 \n</answer> b",
        "<answer>1</answer><answer>2</answer>",
        "<answer>\n5</answer>",
    ):
        assert final_answer(text) == gym.extract_answer(text)
    assert final_answer(" 12\n") == "12"


@pytest.mark.parametrize(
    ("response", "score", "acc", "credit"),
    [
        ("42", 1.0, 1.0, 1.0),
        ("+42.0", 1.0, 1.0, 1.0),
        ("40 + 2 = 42", -1.0, 0.0, 2 / 11),
        ("24", -1.0, 0.0, 0.0),
        ("", -1.0, 0.0, 0.0),
    ],
)
def test_the_reward_is_plus_or_minus_one_by_full_credit(response, score, acc, credit):
    for verifier in ("built_in", "auto"):
        found = score_response("reasoning_gym/chain_sum", response, "42", verifier=verifier)
        assert found == Score(score=score, acc=acc, credit=credit)


def test_a_verifier_that_reads_metadata_gets_it():
    pytest.importorskip("reasoning_gym")
    source, truth = "reasoning_gym/number_sorting", "['1', '2']"
    up = '{"direction": "ascending"}'
    assert score_response(source, "['1', '2']", truth, metadata=up).acc == 1.0
    assert score_response(source, "['2', '1']", truth, metadata={"direction": "ascending"}).acc == 0.0


@pytest.mark.parametrize(
    ("response", "truth", "acc"),
    [
        ("The answer is $\\frac{1}{2}$", "0.5", 1.0),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        ("it is 41", "42", 0.0),
        ("", "42", 0.0),
    ],
)
@pytest.mark.parametrize("source", ["math_dapo", "openai/gsm8k"])
def test_mathematics_sets_are_judged_by_math_verify(source, response, truth, acc):
    pytest.importorskip("math_verify")
    assert score_response(source, response, truth).acc == acc


def test_mathematics_can_be_judged_outside_the_main_thread():
    pytest.importorskip("math_verify")
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(score_response, "math", "\\boxed{42}", "42").result().acc == 1.0


def test_a_batch_is_its_responses():
    sources = ["reasoning_gym/gcd", "reasoning_gym/spell_backward"]
    scores = score_responses(sources, ["4", "nus"], ["4", "sun"], verifier="built_in")
    assert [s.acc for s in scores] == [1.0, 0.0]
    assert scores[0] == score_response(sources[0], "4", "4", verifier="built_in")
    with pytest.raises(InputError, match=r"the columns of a batch differ in length; found \[1, 2\]"):
        score_responses(sources, ["4"], ["4"])


@pytest.mark.parametrize(
    ("source", "verifier", "message"),
    [
        ("chain_sum", "auto", "no verifier for this data source"),
        ("reasoning_gym/chain_sum", "gym", "unknown verifier; expected auto"),
        ("reasoning_gym/no_such_task", "reasoning_gym", "reasoning-gym has no such task"),
        ("reasoning_gym/number_sorting", "built_in", "no built-in rule for this task"),
    ],
)
def test_what_cannot_be_scored_is_an_error(source, verifier, message):
    with pytest.raises(InputError, match=message):
        score_response(source, "1", "1", verifier=verifier)


@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.1])
def test_a_verifier_that_leaves_the_unit_interval_is_refused(value):
    with pytest.raises(InputError, match="lies in"):
        Score.of(value)


def test_without_reasoning_gym_the_built_in_rules_score_and_the_rest_is_unavailable(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    scoring._has_reasoning_gym.cache_clear()
    scoring._gym_verifier.cache_clear()
    try:
        assert score_response("reasoning_gym/chain_sum", "7", "7").acc == 1.0
        with pytest.raises(UnavailableError, match="pip install reasoning-gym"):
            score_response("reasoning_gym/number_sorting", "7", "7")
        with pytest.raises(UnavailableError, match="reasoning-gym is needed to score"):
            score_response("reasoning_gym/gcd", "7", "7", verifier="reasoning_gym")
    finally:
        scoring._has_reasoning_gym.cache_clear()
        scoring._gym_verifier.cache_clear()
