from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest
import torch

from alignment.errors import InputError
from alignment.rl import checkpoint

CONFIG = {"data.train_batch_size": 4, "trainer.seed": 1}


def save(root, step, **more):
    def write(directory):
        (directory / "actor").mkdir()
        (directory / "actor" / "model.safetensors").write_bytes(b"x" * 1000)

    return checkpoint.save(root, step, state={"config": CONFIG, "data": {"position": 4 * step}}, write=write, **more)


def test_a_saved_checkpoint_is_found_and_read(tmp_path):
    path = save(tmp_path, 3)
    assert path.name == "global_step_3"
    assert (tmp_path / checkpoint.LATEST).read_text() == "3\n"
    assert checkpoint.find(tmp_path, resume_mode="auto") == path
    state = checkpoint.read_state(path, config=CONFIG)
    assert state["step"] == 3 and state["data"] == {"position": 12}


def test_the_three_resume_modes(tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 10)
    assert checkpoint.find(tmp_path, resume_mode="disable") is None
    assert checkpoint.find(tmp_path, resume_mode="auto").name == "global_step_10"
    assert checkpoint.find(tmp_path / "none", resume_mode="auto") is None
    named = tmp_path / "global_step_2"
    assert checkpoint.find(tmp_path, resume_mode="resume_path", resume_from_path=str(named)) == named
    with pytest.raises(InputError, match="resume_mode=resume_path needs the path"):
        checkpoint.find(tmp_path, resume_mode="resume_path")
    with pytest.raises(InputError, match="there is no finished checkpoint; expected a directory global_step_<N>"):
        checkpoint.find(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path))
    with pytest.raises(
        InputError, match="trainer.resume_mode: unknown resume mode; expected disable | auto | resume_path; found maybe"
    ):
        checkpoint.find(tmp_path, resume_mode="maybe")


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, step, keep=2)
    assert checkpoint.finished(tmp_path) == [2, 10]


def test_another_configuration_is_refused_with_both_values(tmp_path):
    path = save(tmp_path, 1)
    with pytest.raises(InputError) as error:
        checkpoint.read_state(path, config={**CONFIG, "trainer.seed": 2, "actor.lr": 1.0})
    text = str(error.value)
    assert "the checkpoint belongs to another configuration" in text
    assert "expected actor.lr=None, trainer.seed=1; found actor.lr=1.0, trainer.seed=2" in text


def test_a_failed_write_leaves_the_previous_checkpoint_and_the_next_save_clears_up(tmp_path):
    save(tmp_path, 1)

    def fail(directory):
        (directory / "half").write_bytes(b"x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path, 2, state={"config": CONFIG}, write=fail)
    assert checkpoint.find(tmp_path, resume_mode="auto").name == "global_step_1"
    save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_1", "global_step_2", checkpoint.LATEST]


@pytest.mark.parametrize("call", ["fsync", "replace", "rmdir"])
def test_a_process_killed_in_the_middle_of_a_write_leaves_only_whole_checkpoints(tmp_path, call):
    """Dies at the n-th flush, rename or removal of a save over an older one, for every n until a save survives."""
    for n in range(1, 30):
        root = tmp_path / str(n)
        save(root, 1)
        save(root, 2)
        child = os.fork()
        if child == 0:
            die_at_call(call, n)
            save(root, 2, keep=1)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        found = checkpoint.find(root, resume_mode="auto")
        assert found.name in ("global_step_1", "global_step_2")
        checkpoint.read_state(found, config=CONFIG)
        assert (found / "actor" / "model.safetensors").read_bytes() == b"x" * 1000
        if not killed:
            assert n > 1 and found.name == "global_step_2"
            return
    pytest.fail("no save survived")


def die_at_call(name: str, n: int) -> None:
    calls, real = [], getattr(os, name)

    def counted(*arguments, **keywords):
        calls.append(name)
        if len(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **keywords)

    setattr(os, name, counted)


def test_the_generators_continue_where_they_were(tmp_path):
    for _ in range(3):
        random.gauss(0, 1), np.random.randn(), torch.randn(3)
    checkpoint.save_rng(tmp_path / "rng.safetensors")
    expected = [
        random.gauss(0, 1),
        random.random(),
        np.random.randn(),
        np.random.randint(1000),
        torch.randn(4).tolist(),
    ]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    checkpoint.load_rng(tmp_path / "rng.safetensors")
    assert [
        random.gauss(0, 1),
        random.random(),
        np.random.randn(),
        np.random.randint(1000),
        torch.randn(4).tolist(),
    ] == expected
    with pytest.raises(InputError, match="lacks the state of the generators"):
        checkpoint.load_rng(tmp_path / "absent.safetensors")
