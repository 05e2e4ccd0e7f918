"""Designs, effects and intervals of an ablation, on curves whose truth is known."""

from __future__ import annotations

import json

import pytest
import scipy
from typer.testing import CliRunner

from alignment.cli import app
from alignment.diagnose.ablation import (
    CONFIDENCE,
    NAMED,
    Factor,
    curve_level,
    designs,
    effects,
    first_other_prompts,
    parse_factor,
    run_designs,
)
from alignment.errors import InputError, UnavailableError
from alignment.numerics.random import portable_normal

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


def planted(effect: float, spread: float, seeds: int, *, stream: str, full: bool = False) -> list:
    """The effects of an ablation in which a adds ``effect``, every run has noise and every seed a level of its own."""
    noise = portable_normal((seeds, 4), seed=7, stream=f"ablation/{stream}").tolist()
    numbers = range(seeds)

    def level(setting, changes, seed):
        return 10 * seed + effect * ("a" in setting) + spread * noise[seed][("a" in setting) + 2 * ("b" in setting)]

    return effects((A, B), numbers, run_designs((A, B), numbers, full=full, level=level), full=full), noise


@pytest.mark.parametrize("seeds", (2, 3, 5, 12))
def test_the_interval_is_that_of_a_paired_t_test(seeds):
    """SciPy's, of the two samples, which knows nothing of differences, factors or seeds."""
    (a, _), noise = planted(0.5, 0.1, seeds, stream="paired")
    on = [10 * s + 0.5 + 0.1 * noise[s][1] for s in range(seeds)]
    off = [10 * s + 0.1 * noise[s][0] for s in range(seeds)]
    theirs = scipy.stats.ttest_rel(on, off).confidence_interval(CONFIDENCE)
    assert (a.low, a.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))
    assert a.low < a.value < a.high


def test_the_interval_in_the_full_factorial_is_that_of_the_contrast_regressed_per_seed():
    """Main effect and interaction as least squares on ±1 columns give them, seed by seed; then Student's interval."""
    import numpy as np

    seeds = 5
    found, noise = planted(0.5, 0.1, seeds, stream="contrast", full=True)
    corners = [(0, 0), (1, 0), (0, 1), (1, 1)]
    design = np.array([[1, 2 * a - 1, 2 * b - 1, (2 * a - 1) * (2 * b - 1)] for a, b in corners], dtype=float)
    levels = np.array([[10 * s + 0.5 * a + 0.1 * noise[s][a + 2 * b] for a, b in corners] for s in range(seeds)])
    # An effect goes from -1 to +1: twice the coefficient.
    fitted = 2 * np.linalg.lstsq(design, levels.T, rcond=None)[0]
    for effect, values in zip(found, fitted[1:], strict=True):
        theirs = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(CONFIDENCE)
        assert effect.value == pytest.approx(values.mean())
        assert (effect.low, effect.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))
    assert found[0].decided


def coverage(truth_of: float, planted_effect: float, trials: int) -> int:
    """How many of the intervals hold ``truth_of``."""
    found = [planted(planted_effect, 1.0, 4, stream=f"trial-{trial}")[0][0] for trial in range(trials)]
    return sum(effect.low <= truth_of <= effect.high for effect in found)


def test_a_planted_effect_of_known_size_is_in_95_of_100_intervals():
    """As many as a fair 95 % interval would, to one chance in a million; and another effect is in fewer."""
    trials = 400
    least, most = scipy.stats.binom.interval(1 - 1e-6, trials, CONFIDENCE)
    assert least <= coverage(3.0, 3.0, trials) <= most
    assert coverage(0.0, 3.0, trials) < least


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
    with pytest.raises(InputError, match="name:key=value, or one of mbridge, dist_ckpt, cp, deterministic, nondet"):
        parse_factor(text)


def test_a_factor_of_several_overrides():
    assert parse_factor("fix: a.b=1, c=[2]") == Factor(name="fix", overrides=("a.b=1", "c=[2]"))


@pytest.mark.parametrize("name", NAMED)
def test_what_the_field_ablates_is_known_by_name(name):
    assert parse_factor(f" {name} ") == Factor(name=name, overrides=NAMED[name])


def test_factors_that_set_one_field_run_one_at_a_time_only():
    both = [parse_factor("mbridge"), parse_factor("dist_ckpt")]
    assert len(designs(both, full=False)) == 3
    with pytest.raises(
        InputError, match="(?s)two factors that set one field cannot be crossed.*use_dist_checkpointing.*without --full"
    ):
        designs(both, full=True)
    faults = [parse_factor("a:faults=[x]"), parse_factor("b:faults=[y]")]
    assert len(designs(faults, full=True)) == 4


MEGATRON = ("engine.train=megatron", "trainer.n_gpus_per_node=2")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--factor", "deterministic"], "--factor deterministic: the factor changes nothing: the base has these values"),
    (["--factor", "cp"],
     "--factor cp: the factor changes actor_rollout_ref.actor.megatron.context_parallel_size, which is not read by "
     "this engine.*expected engine.train=megatron.*found engine.train=golden"),
    (["--factor", "dist_ckpt"], "use_dist_checkpointing, which is not read by this engine"),
    (["--factor", "shard:actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false", *MEGATRON],
     "reshard_after_forward, which is not read by this engine.*expected engine.train=fsdp"),
    (["--factor", "mbridge", *MEGATRON], "--factor mbridge: the factor changes nothing"),
    (["--factor", "s:trainer.seed=7"],
     "--factor s: the factor changes trainer.seed, which every setting takes in turn from the seeds that all share; "
     "expected a factor without it; found trainer.seed=7. Next: --seeds N says how many seeds"),
    (["--full", "--factor", "nondeterministic", "--factor", "both:actor_rollout_ref.actor.optim.lr=1,trainer.seed=7"],
     "--factor both: the factor changes trainer.seed"),
    (["--factor", "cp", "engine.train=megatron"],
     r"the number of ranks.*expected a multiple of 2 \(tensor · pipeline · context parallel sizes\); found 1"),
    (["--factor", "cp:actor_rollout_ref.actor.megatron.context_parallel_size=3", *MEGATRON],
     "the number of ranks.*expected a multiple of 3 .*found 2"),
])  # fmt: skip
def test_what_cannot_have_an_effect_is_refused_before_the_first_run(tmp_path, arguments, message):
    run = tmp_path / "run"
    refused = CliRunner().invoke(app, ["ablate", *arguments, "--device", "cpu", "--run-dir", str(run)])
    assert isinstance(refused.exception, InputError), refused.exception
    with pytest.raises(InputError, match=f"(?s){message}"):
        raise refused.exception
    assert not run.exists()


def test_an_engine_that_is_not_installed_is_said_before_the_first_run(tmp_path, monkeypatch):
    from alignment.backends import megatron_model

    monkeypatch.setattr(megatron_model.importlib.util, "find_spec", lambda name: None)
    run = tmp_path / "run"
    refused = CliRunner().invoke(app, ["ablate", "--factor", "cp", *MEGATRON, "--device", "cpu", "--run-dir", str(run)])
    assert isinstance(refused.exception, UnavailableError)
    assert "megatron-core is not installed" in str(refused.exception)
    assert not run.exists()


def test_the_weights_of_another_checkpoint_are_refused_before_the_first_run(tmp_path):
    from alignment.backends.megatron_dist_checkpoint import MARK

    (tmp_path / "dist").mkdir()
    path = f"actor_rollout_ref.actor.megatron.dist_checkpointing_path={tmp_path}/dist"
    factor = f"dist:{NAMED['dist_ckpt'][0]},{path}"
    refused = CliRunner().invoke(
        app, ["ablate", "--factor", factor, *MEGATRON, "--device", "cpu", "--run-dir", str(tmp_path / "run")]
    )
    assert isinstance(refused.exception, InputError) and f"expected {MARK}" in str(refused.exception)
    assert not (tmp_path / "run").exists()


def test_determinism_is_a_factor_and_the_prompts_are_shared(tmp_path):
    """On and off compute the same on a CPU: the effect is none, to the bit."""
    shown = CliRunner().invoke(
        app,
        ["ablate", "trainer.total_training_steps=1", "data.train_batch_size=16", "--seeds", "2", "--device", "cpu",
         "--json", "--metric", "actor/grad_norm", "--factor", "nondeterministic", "--run-dir", str(tmp_path / "run")],
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output + str(shown.exception)
    document = json.loads(shown.stdout)
    (effect,) = document["effects"]
    assert (effect["name"], effect["value"], effect["low"], effect["high"]) == ("nondeterministic", 0.0, 0.0, 0.0)
    assert not effect["decided"] and document["other_prompts"] == {}


@pytest.mark.parametrize(("kind", "factor", "processes"), [
    ("npu", "nondeterministic", "RayExecutor"), ("npu", "lr:actor_rollout_ref.actor.optim.lr=1e-3", "inprocess"),
    ("cpu", "nondeterministic", "inprocess"),
])  # fmt: skip
def test_settings_with_and_without_determinism_take_processes_of_their_own(
    tmp_path, monkeypatch, kind, factor, processes
):
    """Libraries of a device read some switches once, at its first use: a later setting would inherit them."""
    from alignment.cli import experiments
    from alignment.devices.base import Device
    from alignment.rl import run

    seen = []

    def taken(settings, *, executor, **others):
        seen.append(executor if isinstance(executor, str) else type(executor).__name__)
        raise InputError("enough")

    monkeypatch.setattr(experiments, "find_device", lambda name, emulate: Device(kind=kind, index=0))
    monkeypatch.setattr(run, "run_dapo", taken)
    CliRunner().invoke(app, ["ablate", "--factor", factor, "--run-dir", str(tmp_path / "run")])
    assert seen == [processes]


def test_other_prompts_are_seen(tmp_path):
    for name, ids in (("a", [["p", "q"], ["r", "s"]]), ("b", [["p", "q"], ["s", "r"]]), ("c", [["p", "q"]])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "groups.jsonl").write_text("".join(json.dumps({"prompt_ids": i}) + "\n" for i in ids))
    a, b, c = (tmp_path / name for name in "abc")
    assert (first_other_prompts(a, a), first_other_prompts(a, b), first_other_prompts(a, c)) == (None, 2, 2)


def test_the_command_says_who_trained_on_other_prompts(tmp_path):
    shown = CliRunner().invoke(
        app,
        ["ablate", "trainer.total_training_steps=1", "data.train_batch_size=16", "--seeds", "1", "--device", "cpu",
         "--factor", "order:data.seed=2", "--run-dir", str(tmp_path / "run")],
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output + str(shown.exception)
    assert "order: other prompts than the base from step 1 on; what they do is in its effect" in shown.stdout


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
    left = {"ablation.json", "base", "provenance.json", "report.html", "temperature"}
    assert {p.name for p in (tmp_path / "run").iterdir()} == left
    made = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert made["fingerprint"]["label"] == "cpu" and made["commit"]
    assert document["page"] == str(tmp_path / "run" / "report.html")
    kept = json.loads((tmp_path / "run" / "ablation.json").read_text())
    assert {key: kept[key] for key in document if key != "page"} == {k: v for k, v in document.items() if k != "page"}
    curves = [(*one["factors"], one["seed"], one["steps"], len(one["values"])) for one in kept["curves"]]
    assert curves == [(1, [1], 1), (2, [1], 1), ("temperature", 1, [1], 1), ("temperature", 2, [1], 1)]


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
