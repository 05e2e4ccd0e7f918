"""A whole bisection: the ends, the journal, resumption after SIGKILL, and every way it can end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alignment.bisect.bisection import carry_out, make_plan, order_stacks, replay, status
from alignment.bisect.frozen_suite import freeze_suite
from alignment.bisect.journal import FILE, Journal
from alignment.bisect.outcomes import BisectError, Ending
from alignment.bisect.probe import Probe
from alignment.bisect.runner import Settings
from alignment.bisect.stack import load_stack, stack_from_data
from alignment.errors import InputError

DAYS = 40
# Facts only: the command provider "enters" such a stack by its variables, so a probe costs a shell.
DEFINE = {name: {"external": True} for name in ("left", "right", "other")}


def day(number: int):
    return stack_from_data(
        {
            "schema": 1,
            "name": f"day {number}",
            "date": f"2025-{1 + number // 28:02}-{1 + number % 28:02}",
            "define": DEFINE,
            "components": {"left": str(number), "right": str(number // 2), "other": str(number // 3)},
        }  # fmt: skip
    )


def settings_for(script: str, *, days: int = DAYS, **rest) -> Settings:
    rest.setdefault("probes", (Probe(kind="shell", text=script, timeout=20.0),))
    return Settings(
        stacks=tuple(day(d) for d in range(days)),
        provider={"kind": "command", "activation": "true", "python": sys.executable},
        **rest,
    )


def run(folder: Path, settings: Settings | None, **rest):
    suite = folder.parent / "suite"
    suite.mkdir(exist_ok=True)
    (suite / "empty").touch()
    rest.setdefault("sleep", lambda seconds: None)
    return carry_out(folder, settings, cache=folder.parent / "cache", suite_source=suite, index=None, **rest)


BAD_FROM_23 = '[ "$ALIGNMENT_STACK_LEFT" -lt 23 ]'


def test_the_answer_in_words_and_on_the_page(tmp_path):
    answer = run(tmp_path / "state", settings_for(BAD_FROM_23))
    assert answer["exit_code"] == 0 and answer["findings"][0]["edges"][0]["changes"] == [
        {"component": "left", "old": "22", "new": "23", "commit": ""}
    ]
    assert "left 22 → 23 turned the result from good to bad." in answer["words"]
    assert "left: closed binaries, so the search ends at the version." in answer["words"]
    assert "Confirmed both ways: the bad end without it is good, and the good end with it is bad." in answer["words"]
    page = (tmp_path / "state" / "report.html").read_text()
    assert (
        "left" in page and "What remains unknown" in page and answer["words"].split(".")[0].replace(">", "&gt;") in page
    )
    assert (
        "http" not in page
        and "<script" not in page
        and page.count("<circle") >= len(list(Journal(tmp_path / "state", write=False).of("probe")))
    )


def test_asking_again_measures_nothing(tmp_path):
    run(tmp_path / "state", settings_for(BAD_FROM_23))
    before = (tmp_path / "state" / FILE).read_bytes()
    assert run(tmp_path / "state", None)["exit_code"] == 0
    assert (tmp_path / "state" / FILE).read_bytes() == before


def test_a_replay_gives_the_same_answer_and_notices_another(tmp_path):
    answer = run(tmp_path / "state", settings_for(BAD_FROM_23))
    assert replay(tmp_path / "state")["words"] == answer["words"]
    path = tmp_path / "state" / FILE
    path.write_text(path.read_text().replace('"component": "left"', '"component": "right"'))
    with pytest.raises(InputError, match="the journal gives another answer than it gave before"):
        replay(tmp_path / "state")


def test_a_replay_of_an_unfinished_one_says_where_it_ends(tmp_path):
    run(tmp_path / "state", settings_for(BAD_FROM_23))
    path = tmp_path / "state" / FILE
    lines = path.read_text().splitlines(keepends=True)
    probes = [i for i, line in enumerate(lines) if '"event": "probe"' in line]
    path.write_text("".join(lines[: probes[6]]))
    with pytest.raises(InputError, match="the journal ends here: the next probe was not finished"):
        replay(tmp_path / "state")
    found = status(tmp_path / "state")
    assert (
        not found["finished"]
        and found["left_at_most"] >= 1
        and found["probes"]["ends"] == 4
        and found["seconds_left"] is not None
    )


_DRIVER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import test_bisect_runner as world
world.run(Path({state!r}), world.settings_for({script!r}))
"""


def test_killed_at_five_random_moments_it_ends_the_same_without_repeating_a_probe(tmp_path):
    state, calls = tmp_path / "killed" / "state", tmp_path / "calls"
    state.parent.mkdir()
    script = f"echo $ALIGNMENT_STACK_LEFT >> {calls}; sleep 0.05; {BAD_FROM_23}"
    source = _DRIVER.format(path=[str(Path(__file__).parent)], state=str(state), script=script)
    draw, kills = random.Random(20261129), 0
    deadline = time.monotonic() + 120
    while kills < 5 and time.monotonic() < deadline:
        process = subprocess.Popen([sys.executable, "-c", source], start_new_session=True, stderr=subprocess.DEVNULL)
        before = _finished(state)
        # Wait for it to be at work, then some moments more, so that every kill falls into another part.
        target = len(before) + draw.randint(1, 3)
        while process.poll() is None and len(_finished(state)) < target and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.08)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills == 5
    undisturbed = tmp_path / "whole"
    undisturbed.mkdir()
    expected = run(undisturbed / "state", settings_for(script))
    finished_before = _finished(state)
    answer = run(state, None)
    assert answer["findings"] == expected["findings"]
    keys = [e["key"] for e in Journal(state, write=False).of("probe")]
    assert len(keys) == len(set(keys)), "a finished probe was measured again"
    assert set(finished_before) <= set(keys)
    assert replay(state)["words"] == answer["words"]


def _finished(state: Path) -> list[str]:
    try:
        return [
            json.loads(line)["key"]
            for line in (state / FILE).read_text().splitlines()
            if '"event": "probe"' in line and line.endswith("}")
        ]
    except (OSError, ValueError):
        return []


def ended(tmp_path, settings) -> BisectError:
    with pytest.raises(BisectError) as caught:
        run(tmp_path / "state", settings)
    page = (tmp_path / "state" / "report.html").read_text()
    assert str(caught.value).split(";")[0].split(": ", 1)[-1][:30].replace("'", "&#39;") in page
    return caught.value


def test_the_good_end_is_bad(tmp_path):
    error = ended(tmp_path, settings_for("false"))
    assert error.ending is Ending.GOOD_END_IS_BAD
    assert "day 0: the good end is bad: the probe fails on it too" in str(error)


def test_the_bad_end_is_good(tmp_path):
    error = ended(tmp_path, settings_for("true"))
    assert error.ending is Ending.BAD_END_IS_GOOD
    assert "the bad end is good: the probe passes on it, so there is nothing to find" in str(error)


def test_an_end_that_fails_in_another_way_was_not_measured(tmp_path):
    script = f'if {BAD_FROM_23}; then echo crash; exit 1; fi; echo \'{{"check": "scale"}}\'; exit 1'
    error = ended(tmp_path, settings_for(script))
    assert error.ending is Ending.END_NOT_MEASURED
    assert "the good end fails in another way than the bad end" in str(error)


def test_an_end_that_cannot_be_measured(tmp_path):
    error = ended(tmp_path, settings_for("exit 125"))
    assert error.ending is Ending.END_NOT_MEASURED and "the bad end could not be measured" in str(error)


def test_a_probe_that_stops_everything(tmp_path):
    error = ended(tmp_path, settings_for("exit 130"))
    assert error.ending is Ending.ABORTED and "the probe ended the bisection" in str(error)


def test_a_probe_that_collects_nothing(tmp_path):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_none.py").write_text("")
    error = ended(tmp_path, settings_for("", probes=(Probe(kind="pytest", text="test_none.py"),)))
    assert (
        error.ending is Ending.NOTHING_COLLECTED
        and "the probe collects nothing; found pytest collected no test" in str(error)
    )


def test_equal_ends(tmp_path):
    same = Settings(
        stacks=(day(1), day(1)),
        probes=(Probe(kind="shell", text="true"),),
        provider={"kind": "command", "activation": "true"},
    )
    error = ended(tmp_path, same)
    assert error.ending is Ending.ENDS_EQUAL and "the two ends are the same stack" in str(error)
    with pytest.raises(BisectError, match="the same stack"):
        make_plan(same)


def test_ends_that_overlap(tmp_path):
    script = f"[ -e {tmp_path}/tick ] && {{ rm {tmp_path}/tick; exit 1; }}; touch {tmp_path}/tick; exit 0"
    error = ended(tmp_path, settings_for(script, noisy_end_runs=6))
    assert error.ending is Ending.NOT_SEPARABLE
    assert "the two ends cannot be told apart: both fail now and then" in str(
        error
    ) and "3 of 6 runs of the good end failed" in str(error)


def test_values_alone_tell_the_ends_apart(tmp_path):
    script = 'echo "{\\"metric\\": $(( ALIGNMENT_STACK_LEFT < 23 ? 100 : 200 ))}"'
    answer = run(tmp_path / "state", settings_for(script, probes=(Probe(kind="shell", text=script, by_value=True),)))
    assert answer["findings"][0]["edges"][0]["changes"][0]["new"] == "23"
    flat = 'echo "{\\"metric\\": 7}"'
    (tmp_path / "flat").mkdir()
    with pytest.raises(BisectError, match="the two ends cannot be told apart") as caught:
        run(tmp_path / "flat" / "state", settings_for(flat, probes=(Probe(kind="shell", text=flat, by_value=True),)))
    assert caught.value.ending is Ending.NOT_SEPARABLE


def test_noise_at_the_ends_starts_the_posterior(tmp_path):
    # Every tenth run lies: the numbers of the runs are kept in a file, so that the test itself is no dice.
    count = f"n=$(cat {tmp_path}/n 2>/dev/null || echo 0); echo $((n+1)) > {tmp_path}/n"
    script = f"{count}; {BAD_FROM_23}; r=$?; [ $((n % 10)) = 1 ] && r=$((1-r)); exit $r"
    answer = run(tmp_path / "state", settings_for(script, noisy_end_runs=10))
    assert answer["findings"][0]["edges"][0]["changes"][0]["new"] == "23"
    assert answer["probes"]["ends"] == 20 and "The posterior of this step is" in answer["words"]


def test_infrastructure_is_tried_again_and_never_an_answer(tmp_path):
    waited = []
    down = f"[ $ALIGNMENT_STACK_LEFT != 39 ] || [ -e {tmp_path}/up ] || {{ touch {tmp_path}/up; exit 75; }}"
    script = f"{down}; {BAD_FROM_23}"
    answer = run(tmp_path / "state", settings_for(script), sleep=waited.append)
    assert answer["exit_code"] == 0 and waited == [5.0]
    found = [e["observation"]["result"] for e in Journal(tmp_path / "state", write=False).of("probe")]
    assert found[0] == "infrastructure" and found.count("infrastructure") == 1


def test_a_good_end_is_looked_for_backwards(tmp_path):
    answer = run(tmp_path / "state", settings_for(BAD_FROM_23, good_known=False))
    assert answer["findings"][0]["edges"][0]["changes"][0]["new"] == "23"
    asked = [e["text"] for e in Journal(tmp_path / "state", write=False).of("stage") if "days before" in e["text"]]
    assert [int(t.split(", ")[1].split()[0]) for t in asked] == [1, 2, 4, 8, 16, 32][: len(asked)] or len(asked) >= 5
    (tmp_path / "none").mkdir()
    with pytest.raises(BisectError, match="no good end was found: the oldest stack is not good either"):
        run(tmp_path / "none" / "state", settings_for("false", good_known=False))


def test_the_cheapest_probe_that_tells_the_ends_apart_is_taken(tmp_path):
    unit, layer = (
        Probe(kind="shell", text="true # tests/unit"),
        Probe(kind="shell", text=f"{BAD_FROM_23} # tests/layer"),
    )
    end_to_end = Probe(kind="shell", text="exit 128 # the whole")
    answer = run(tmp_path / "state", settings_for("", probes=(end_to_end, layer, unit)))
    assert answer["exit_code"] == 0
    asked = [e["check"] for e in Journal(tmp_path / "state", write=False).of("probe")]
    assert asked[0] == unit.text and set(asked[2:]) == {layer.text}


def test_parallel_probes_give_the_same_answer(tmp_path):
    for parallel in (1, 3):
        (tmp_path / str(parallel)).mkdir()
    one = run(tmp_path / "1" / "state", settings_for(BAD_FROM_23))
    three = run(tmp_path / "3" / "state", settings_for(BAD_FROM_23, parallel=3))
    assert one["findings"][0]["edges"][0]["changes"] == three["findings"][0]["edges"][0]["changes"]


def test_a_folder_with_another_bisection_is_refused(tmp_path):
    run(tmp_path / "state", settings_for(BAD_FROM_23))
    with pytest.raises(InputError, match="the folder holds another bisection"):
        run(tmp_path / "state", settings_for("true"))
    with pytest.raises(InputError, match="there is no bisection to go on with"):
        run(tmp_path / "other", None)


def test_a_changed_suite_is_refused(tmp_path):
    run(tmp_path / "state", settings_for(BAD_FROM_23))
    (tmp_path / "state" / "suite" / ".hypothesis").mkdir()
    (tmp_path / "state" / "suite" / ".hypothesis" / "left by a probe").touch()
    assert run(tmp_path / "state", None)["exit_code"] == 0
    (tmp_path / "state" / "suite" / "empty").write_text("changed")
    with pytest.raises(InputError, match="the frozen suite was changed since the bisection began"):
        run(tmp_path / "state", None)


def test_the_suite_is_frozen_from_what_git_knows(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    (source / ".gitignore").write_text("ignored\n")
    for name in ("kept", "ignored"):
        (source / name).write_text(name)
    frozen = freeze_suite(tmp_path / "suite", source=source)
    assert sorted(p.name for p in (tmp_path / "suite").iterdir()) == [".gitignore", "kept"]
    assert freeze_suite(tmp_path / "suite", source=source) == frozen


def test_the_plan_states_the_bound_of_the_design():
    """60 nightlies, 7 packages, 64 commits, two runs of each end: 21."""
    stacks, defined = [], {f"p{i}": {"distribution": f"p{i}"} for i in range(7)}
    for number in range(60):
        pins = {f"p{i}": str(number * 64) for i in range(7)}
        stacks.append(stack_from_data({"schema": 1, "name": str(number), "define": defined, "components": pins}))
    releases = {f"p{i}": [str(v) for v in range(59 * 64 + 1)] for i in range(7)}
    plan = make_plan(
        Settings(stacks=tuple(stacks), probes=(Probe(kind="shell", text="true"),), releases=releases), index=None
    )
    assert (plan.stacks, plan.packages, plan.candidates, plan.bound) == (59, 7, 64, 21)
    assert any("at most 21 probes" in line for line in plan.lines())


def test_the_order_of_given_stacks():
    line = order_stacks(day(3), day(9), [day(5), day(1), day(12), day(9)])
    assert [s.name for s in line] == ["day 3", "day 5", "day 9"]
    assert [s.name for s in order_stacks(None, day(9), [day(5), day(12), day(1)])] == ["day 1", "day 5", "day 9"]
    with pytest.raises(InputError, match="neither a good end nor older stacks are given"):
        order_stacks(None, day(9), [])


def test_settings_go_round_through_the_journal():
    settings = settings_for(BAD_FROM_23, days=3, releases={"left": ["1"]})
    again = Settings.from_data(json.loads(json.dumps(settings.to_data())))
    assert again == settings and again.digest == settings.digest
    assert load_stack("shipped:deepseek-v3-671b-dapo-a2").digest


def test_virtual_environments_cannot_change_cann(tmp_path):
    stacks = tuple(
        stack_from_data({"schema": 1, "name": v, "components": {"CANN": v, "ray": "2.40.0"}})
        for v in ("8.1.RC1", "8.2.RC1")
    )
    settings = Settings(stacks=stacks, probes=(Probe(kind="shell", text="true"),), provider={"kind": "venv"})
    with pytest.raises(
        InputError, match="virtual environments cannot change CANN; expected container or command; found venv"
    ):
        run(tmp_path / "state", settings)


def test_a_cann_that_an_activation_did_not_bring_is_found_out(tmp_path):
    """The activation script enters the same CANN whatever is asked for: a skip of its class, never a result."""
    home = tmp_path / "cann"
    home.mkdir()
    (home / "version.cfg").write_text("runtime_running_version=[7.7.0:8.1.RC1]\n")
    stacks = tuple(stack_from_data({"schema": 1, "name": v, "components": {"CANN": v}}) for v in ("8.1.RC1", "8.2.RC1"))
    activation = f"export ASCEND_TOOLKIT_HOME={home}"
    settings = Settings(
        stacks=stacks,
        probes=(Probe(kind="shell", text="true"),),
        provider={"kind": "command", "activation": activation, "python": sys.executable},
    )
    with pytest.raises(BisectError) as caught:
        run(tmp_path / "state", settings)
    assert caught.value.ending is Ending.END_NOT_MEASURED
    assert "environment: CANN: this machine has 8.1.RC1, 8.2.RC1 was asked for" in str(caught.value)
