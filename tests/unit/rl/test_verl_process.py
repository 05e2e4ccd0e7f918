"""A trainer that hangs, dies or falls silent ends its run with a message, and leaves no process behind."""

import os
import subprocess
import sys
import time

import pytest

from alignment.errors import InputError
from alignment.rl.verl_process import DEATH, MARK, Limits, follow, kill_marked, last_lines, marked_processes

# Long against what a busy machine needs to start a shell, short against what the sleepers below would take.
QUICK = Limits(silence=60.0, total=120.0, grace=0.5)


def run(tmp_path, script, limits=QUICK, watch=None, pulse=None):
    follow(
        ["bash", "-c", script],
        log=tmp_path / "run.log",
        environment=dict(os.environ),
        directory=tmp_path,
        limits=limits,
        watch=watch,
        pulse=pulse,
        poll=0.05,
    )


def test_a_run_that_ends_well_is_followed_line_by_line(tmp_path):
    seen = []
    run(tmp_path, "echo first; echo second >&2", watch=lambda text: seen.extend(text.split("\n")))
    assert seen == ["first", "second"]
    assert (tmp_path / "run.log").read_text() == "first\nsecond\n"


def test_an_exit_code_is_told_with_the_end_of_the_log(tmp_path):
    with pytest.raises(InputError, match=r"run\.log: the run ended with exit code 3(?s:.*)something went wrong"):
        run(tmp_path, "echo something went wrong; exit 3")


def test_a_dead_worker_ends_a_run_that_would_wait_for_ever(tmp_path):
    with pytest.raises(InputError, match=r"a worker died \(ActorDiedError\)(?s:.*)rank 1 is gone"):
        run(
            tmp_path, "echo 'ray.exceptions.ActorDiedError: rank 1 is gone'; while true; do echo alive; sleep 0.2; done"
        )


def test_a_run_that_goes_on_without_its_worker_is_left_alone(tmp_path):
    steps = tmp_path / "steps"
    script = "echo ActorDiedError; for i in 1 2 3 4 5 6; do echo $i > steps; echo step $i; sleep 0.3; done"
    run(tmp_path, script, pulse=lambda: steps.read_text() if steps.exists() else "")


def test_last_words_followed_by_a_good_end_are_no_failure(tmp_path):
    run(tmp_path, "echo ActorDiedError at shutdown; exit 0")


def test_silence_ends_a_run(tmp_path):
    with pytest.raises(InputError, match="said nothing for 1 s"):
        run(tmp_path, "echo started; sleep 300", Limits(silence=1.0))


def test_a_run_that_talks_for_ever_runs_out_of_time(tmp_path):
    with pytest.raises(InputError, match="took longer than 1 s"):
        run(tmp_path, "while true; do echo still; sleep 0.1; done", Limits(silence=30.0, total=1.0, grace=0.5))


@pytest.mark.parametrize(
    "leaves", ["setsid sleep 300 &", "(trap '' TERM; exec sleep 300) & setsid bash -c 'sleep 300' &"]
)
def test_everything_the_run_started_is_gone_whatever_group_it_went_to(tmp_path, leaves):
    marks = []

    def watch(text):
        marks.extend(line for line in text.split("\n") if len(line) == 16)

    with pytest.raises(InputError, match="exit code 1"):
        run(tmp_path, f"echo ${MARK}; {leaves} exit 1", watch=watch)
    assert len(marks) == 1
    assert marked_processes(marks[0]) == []


def test_processes_of_others_are_left_alone(tmp_path):
    mine = subprocess.Popen(["sleep", "300"], env={**os.environ, MARK: "mine"}, start_new_session=True)
    other = subprocess.Popen(["sleep", "300"], env={**os.environ, MARK: "other"}, start_new_session=True)
    try:
        # until both have replaced the image they were forked from
        while not (marked_processes("mine") and marked_processes("other")):
            time.sleep(0.01)
        kill_marked(mine, "mine", grace=5.0)
        assert mine.poll() is not None
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    def watch(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, f"echo ${MARK}; sleep 300", watch=watch)
    assert marked_processes((tmp_path / "run.log").read_text().strip()) == []


def test_the_end_of_a_log_has_no_colours(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"\x1b[36m(WorkerDict pid=1)\x1b[0m line {i}\n" for i in range(100)))
    assert last_lines(log, 2) == "(WorkerDict pid=1) line 98\n(WorkerDict pid=1) line 99"


@pytest.mark.parametrize(
    "line, dead",
    [
        ("ray.exceptions.RayTaskError(ValueError): ray::WorkerDict.actor_update()", True),
        ("RuntimeError: Engine core initialization failed. See root cause above.", True),
        ("(raylet) A worker died or was killed while executing a task", True),
        ("step:1 - actor/loss:0.1 - critic/score/mean:-1.0", False),
        ("WARNING: deprecated argument; use RayActor instead", False),
    ],
)
def test_what_counts_as_last_words(line, dead):
    assert bool(DEATH.search(line)) is dead


def test_the_program_runs_where_it_is_told_to(tmp_path):
    below = tmp_path / "work"
    below.mkdir()
    follow(
        [sys.executable, "-c", "open('made', 'w')"],
        log=tmp_path / "run.log",
        environment=dict(os.environ),
        directory=below,
        limits=Limits(silence=60.0),
        poll=0.05,
    )
    assert (below / "made").exists()
