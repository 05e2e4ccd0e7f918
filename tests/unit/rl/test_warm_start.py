"""The demonstrator behind the warm start, and that the stored weights are those its record speaks of."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from alignment.rl.tasks import EMBEDDED_TASKS, Question, generate

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "baselines" / "checkpoints" / "tiny-moonlight-warm"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_warm_start", ROOT / "scripts" / "make_warm_start.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def asked(task: str, question: str, answer: str) -> Question:
    return Question(data_source=f"reasoning_gym/{task}", question=question, answer=answer, metadata={})


@pytest.mark.parametrize(
    ("question", "answers"),
    [
        (asked("chain_sum", "…: 89 + 69 =", "158"), ["158", "48", "20", "89 + 69 = 158"]),
        (asked("chain_sum", "…: 23 - 57 =", "-34"), ["-34", "34", "34", "23 - 57 = -34"]),
        (asked("chain_sum", "…: 7 + 12 =", "19"), ["19", "19", "-5", "7 + 12 = 19"]),
        (asked("spell_backward", "…: neon", "noen"), ["noen", "neon", "noe", "none"]),
        (asked("gcd", "…: 26, 13. …", "13"), ["13", "13", "13", "1"]),
        (asked("gcd", "…: 8, 12. …", "4"), ["4", "8", "4", "1"]),
    ],
)
def test_each_procedure_answers_as_its_name_says(script, question, answers):
    shown = script.demonstrations(question)
    assert [d.answer for d in shown] == answers
    assert shown[0].procedure == "right" and math.fsum(d.share for d in shown) == 1.0


def test_every_embedded_question_has_a_demonstration(script):
    pytest.importorskip("reasoning_gym")
    for task in EMBEDDED_TASKS:
        for question in generate(task, 100, seed=1):
            shown = script.demonstrations(question)
            assert shown[0].answer == question.answer and len(shown) == 4


def test_a_draw_falls_on_each_item_by_its_share(script):
    shares = [("a", 0.25), ("b", 0.5), ("c", 0.25)]
    picked = [script._pick(shares, (i + 0.5) / 8) for i in range(8)]
    assert picked == ["a"] * 2 + ["b"] * 4 + ["c"] * 2
    assert script._pick([("a", 0.5), ("b", 0.25)], 0.99) == "b"


def test_the_stored_weights_are_those_of_the_record():
    from alignment.weights.checkpoint import load_state, weights_hash

    record = json.loads((CHECKPOINT / "warm_start.json").read_text())
    state = load_state(CHECKPOINT)
    assert weights_hash(state) == record["weights_hash"]
    assert sum(t.numel() for name, t in state.items() if "e_score" not in name) == record["parameters"]
