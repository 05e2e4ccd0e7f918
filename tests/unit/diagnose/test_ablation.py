"""Designs, effects and intervals of an ablation, on curves whose truth is known."""

from __future__ import annotations

import json

import pytest
import scipy
from typer.testing import CliRunner

from alignment.cli import app
from alignment.diagnose.ablation import Factor, curve_level, designs, effects, parse_factor, run_designs
from alignment.errors import InputError

A, B = (Factor(name=name, overrides=(f"{name}=1",)) for name in "ab")
SEEDS = (1, 2, 3, 4)


def truth(setting: frozenset[str], changes: tuple[str, ...], seed: int) -> float:
    """a adds 2, b adds 1, together 4 instead of 3; every seed has a level of its own, and a slight one of a's."""
    assert changes == tuple(f"{name}=1" for name in sorted(setting))
    return 10 * seed + (2 + 0.01 * seed) * ("a" in setting) + ("b" in setting) + (len(setting) == 2)


def found(factors, full):
    levels = run_designs(factors, SEEDS, full=full, level=truth)
    return {effect.name: effect for effect in effects(factors, SEEDS, levels, full=full)}, levels


def test_one_at_a_time_takes_one_run_per_factor_beside_the_base():
    told, levels = found((A, B), full=False)
    assert len(levels) == 3 * len(SEEDS)
    assert told["a"].value == pytest.approx(2.025) and told["b"].value == pytest.approx(1.0)


def test_the_full_factorial_has_main_effects_and_the_interaction():
    told, levels = found((A, B), full=True)
    assert len(levels) == 4 * len(SEEDS)
    assert told["a"].value == pytest.approx(2.525) and told["b"].value == pytest.approx(1.5)
    assert told["a × b"].value == pytest.approx(0.5)


def test_the_interval_is_students_over_paired_seeds():
    """What a seed does to every setting cancels: its tens do not widen the interval."""
    told, levels = found((A,), full=False)
    differences = [levels[frozenset("a"), s] - levels[frozenset(), s] for s in SEEDS]
    low, high = scipy.stats.t.interval(0.95, len(SEEDS) - 1, loc=sum(differences) / len(SEEDS), scale=scipy.stats.sem(differences))
    assert (told["a"].low, told["a"].high) == (pytest.approx(low), pytest.approx(high))
    assert told["a"].decided


def test_an_effect_that_is_none_is_not_decided():
    noise = {1: 0.3, 2: -0.2, 3: 0.1, 4: -0.25}
    levels = run_designs((A,), SEEDS, full=False, level=lambda s, c, seed: seed + bool(s) * noise[seed])
    (effect,) = effects((A,), SEEDS, levels, full=False)
    assert not effect.decided and effect.low < 0 < effect.high
    (alone,) = effects((A,), SEEDS[:1], levels, full=False)
    assert not alone.decided and alone.seeds == 1


def test_designs():
    assert designs((A, B), full=False) == [frozenset(), frozenset("a"), frozenset("b")]
    assert set(designs((A, B), full=True)) == {frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")}
    for factors, message in (((), "names of their own"), ((A, A), "names of their own")):
        with pytest.raises(InputError, match=message):
            designs(factors, full=False)
    with pytest.raises(InputError, match="at most 6"):
        designs([Factor(name=str(i), overrides=("a=1",)) for i in range(7)], full=True)


def test_the_level_is_the_last_quarter():
    assert curve_level([0.0, 0, 0, 0, 0, 0, 2, 4]) == 3.0
    assert curve_level([5.0]) == 5.0
    for broken in ([], [1.0, float("nan")]):
        with pytest.raises(InputError, match="empty or not finite"):
            curve_level(broken)


@pytest.mark.parametrize("text", ["", "a", "a:", ":b=1", "a:b"])
def test_what_is_no_factor_is_refused(text):
    with pytest.raises(InputError, match="name:key=value"):
        parse_factor(text)


def test_a_factor_of_several_overrides():
    assert parse_factor("fix: a.b=1, c=[2]") == Factor(name="fix", overrides=("a.b=1", "c=[2]"))


def test_the_command_refuses_an_unknown_key_before_the_first_run(tmp_path):
    refused = CliRunner().invoke(app, ["ablate", "--factor", "typo:trainer.sead=2", "--run-dir", str(tmp_path / "run")])
    assert isinstance(refused.exception, InputError) and "trainer.seed" in str(refused.exception)
    assert not (tmp_path / "run").exists()


def test_the_command_runs_every_setting(tmp_path):
    shown = CliRunner().invoke(
        app,
        ["ablate", "trainer.total_training_steps=1", "data.train_batch_size=16", "--seeds", "2", "--device", "cpu",
         "--json", "--factor", "temperature:actor_rollout_ref.rollout.temperature=0.5", "--run-dir", str(tmp_path / "run")],
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.stdout)
    assert [effect["name"] for effect in document["effects"]] == ["temperature"]
    assert len(document["levels"]) == 4
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"base", "temperature"}


SCORER_OF_TWO = """
import contextlib
from unittest import mock

from alignment.rl import stages


@contextlib.contextmanager
def generous():
    honest = stages.score_responses

    def wrong(*arguments, **keywords):
        import dataclasses

        return [dataclasses.replace(score, score=score.score + 2.0) for score in honest(*arguments, **keywords)]

    with mock.patch.object(stages, "score_responses", wrong):
        yield
"""


def test_what_a_fix_is_worth_is_the_effect_of_what_it_mends(tmp_path):
    """A fault as a factor: on in its own setting only."""
    fault = tmp_path / "fault.py"
    fault.write_text(SCORER_OF_TWO)
    shown = CliRunner().invoke(
        app,
        ["ablate", "trainer.total_training_steps=1", "data.train_batch_size=16", "--seeds", "2", "--device", "cpu",
         "--json", "--factor", f"scorer:faults=[{fault}:generous]", "--run-dir", str(tmp_path / "run")],
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output + str(shown.exception)
    (effect,) = json.loads(shown.stdout)["effects"]
    assert effect["value"] == pytest.approx(2.0) and effect["decided"]
    unknown = CliRunner().invoke(app, ["ablate", "--factor", "scorer:faults=[nothing]", "--run-dir", str(tmp_path / "no")])
    assert isinstance(unknown.exception, InputError) and not (tmp_path / "no").exists()


def test_one_seed_has_no_interval_and_the_json_stays_json(tmp_path):
    shown = CliRunner().invoke(
        app,
        ["ablate", "trainer.total_training_steps=1", "data.train_batch_size=16", "--seeds", "1", "--device", "cpu",
         "--json", "--factor", "temperature:actor_rollout_ref.rollout.temperature=0.5", "--run-dir", str(tmp_path / "run")],
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    (effect,) = json.loads(shown.stdout, parse_constant=refuse)["effects"]
    assert (effect["low"], effect["high"], effect["decided"]) == ("-inf", "inf", False)
