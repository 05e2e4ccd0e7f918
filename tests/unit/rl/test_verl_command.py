"""The command line around verl runs, short of running one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignment.errors import InputError
from alignment.rl.verl_config import refuse_watching

PROGRAM = Path(sys.executable).with_name("alignment")


def command(tmp_path, *arguments):
    # One interpreter start on a busy machine.
    return subprocess.run(
        [PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    "options, said",
    [
        (("--emulate-npu",), "--emulate-npu: verl trains in processes of its own"),
        (("--executor", "inprocess"), "--executor inprocess"),
    ],
)
def test_options_that_do_not_reach_verl_are_refused(tmp_path, options, said):
    done = command(tmp_path, "dapo", "engine=verl", *options)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists(), "nothing is left of a run that was refused"


def test_what_would_watch_modules_is_refused_before_verl_starts(tmp_path):
    done = command(tmp_path, "dapo", "engine=verl", "--device", "cpu", "capture.detail=sketch")
    said = (
        "error: capture.detail: verl computes in workers of its own, whose modules are not watched from here; "
        "expected no such key with engine=verl. Next: let verl dump with msprobe "
        "(global_profiler.tool=precision_debugger) and compare the dumps, or run without engine=verl"
    )
    assert done.returncode == 2 and " ".join(done.stderr.split()) == said
    assert not (tmp_path / "runs").exists(), "nothing is left of a run that was refused"


@pytest.mark.parametrize("override", ["+capture=true", "++ascend_precision_collector=c.yaml", "~capture"])
def test_every_key_that_would_watch_modules_is_refused(override):
    with pytest.raises(InputError, match=f"^{override.strip('+~').partition('=')[0]}: verl computes in workers of its"):
        refuse_watching(["trainer.seed=1", override])


@pytest.mark.parametrize("override", ["actor_rollout_ref.actor.profiler.capture=true", "captured=1"])
def test_other_keys_with_such_names_are_verls(override):
    refuse_watching([override])


def test_a_folder_is_read_into_a_run_and_compared_with_itself(tmp_path):
    (tmp_path / "mine").mkdir()
    entry = {"step": 1, "data": {"actor/lr": 0.1, "critic/score/mean": -1.0, "timing_s/gen": 3.0}}
    (tmp_path / "mine" / "log.jsonl").write_text(json.dumps(entry) + "\n")
    done = command(tmp_path, "read-verl", "mine", "--run-dir", "read", "--device", "npu", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 1
    assert json.loads((tmp_path / "read" / "run.json").read_text())["device"] == "npu"
    again = command(tmp_path, "read-verl", "mine", "--run-dir", "read")
    assert again.returncode == 2 and "already holds a run" in again.stderr
    assert command(tmp_path, "compare", "mine", "read").returncode == 0
