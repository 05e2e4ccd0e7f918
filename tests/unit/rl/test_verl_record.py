"""verl's output read into our run format, from each of its loggers; written here as verl 0.9.1 writes it."""

import json

import numpy as np
import pytest

from alignment.diagnose.run_data import config_differences, open_run
from alignment.errors import InputError
from alignment.rl.batch_record import BatchRecord, batch_path, read_batch, recorded_steps, write_batch
from alignment.rl.run import read_run
from alignment.rl.verl_record import config_fingerprint, our_names, read_verl_output, record_verl_run

METRICS = {
    "actor/grad_norm": 1.5, "actor/lr": 0.001, "actor/pg_loss": -2.5e-08, "actor/entropy": 4.5,
    "critic/score/mean": -1.5, "training/rollout_probs_diff_mean": 0.0027, "training/global_step": 1,
    "timing_s/gen": 13.2, "timing_s/adv": 0.005, "timing_s/update_weights": 0.03, "timing_s/step": 13.8,
    "timing_s/agent_loop/tool_calls/min": 0.0, "perf/throughput": 23.1,
}  # fmt: skip
CONFIG = """
trainer: {device: cpu, project_name: x, use_v1: false}
actor_rollout_ref:
  rollout: {n: 2, seed: 7, temperature: 1.0}
  actor: {rollout_n: '${oc.select:actor_rollout_ref.rollout.n,1}'}
algorithm: {filter_groups: {enable: true}}
"""

INTERPOLATED = "${oc.select:actor_rollout_ref.rollout.n,1}"


def row(prompt, answer, score, **more):
    return {
        "input": f"user {prompt}assistant",
        "output": answer,
        "gts": "1",
        "score": score,
        "step": 1,
        "acc": 0.0,
        **more,
    }


def verl_folder(root, *, logger="file", steps=(1, 2), score=-1.0):
    root.mkdir(parents=True, exist_ok=True)
    lines = [{"step": s, "data": {**METRICS, "training/global_step": s}} for s in steps]
    if logger == "file":
        (root / "project").mkdir()
        (root / "project" / "name.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if logger == "console":
        text = "".join(
            f"\x1b[36m(TaskRunner pid=5)\x1b[0m step:{line['step']} - "
            + " - ".join(f"{k}:{v}" for k, v in line["data"].items())
            + " - perf/odd:np.float64(0.5)\nsomething else step: 3\n"
            for line in lines
        )
        (root / "main.log").write_text("[validate_config] All checks passed\n" + text)
    hydra = root / "outputs" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "config.yaml").write_text(CONFIG)
    dumps = root / "rollouts"
    dumps.mkdir()
    for step in steps:
        rows = [row(p, f"{p}{i}", score, overlong_reward=-0.5, step=step) for p in "ab" for i in range(2)]
        (dumps / f"{step}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (root / "ckpt" / "global_step_2" / "actor").mkdir(parents=True)
    return root


@pytest.mark.parametrize("logger", ["file", "console"])
def test_metrics_rollouts_configuration_and_checkpoints_are_found(tmp_path, logger):
    output = read_verl_output(verl_folder(tmp_path / "run", logger=logger))
    assert output.origin.startswith(f"{logger} logger: ")
    assert sorted(output.metrics) == [1, 2]
    assert output.metrics[2]["actor/grad_norm"] == 1.5
    assert output.metrics[1]["actor/pg_loss"] == -2.5e-08
    assert [r["output"] for r in output.rollouts[1]] == ["a0", "a1", "b0", "b1"]
    assert output.config["actor_rollout_ref"]["actor"]["rollout_n"] == 2, "interpolations are resolved"
    assert list(output.checkpoints) == [2]


@pytest.mark.parametrize("more", ["", "at: '${nowhere.x}'\n"], ids=["resolved", "of an unknown resolver"])
def test_a_number_is_one_however_it_is_written(tmp_path, more):
    """Hydra takes 1e-6 for a number, and writes 1.0e-06; runs with either have one learning rate."""
    runs = []
    for name, written in (("typed", "1e-6"), ("written", "1.0e-06"), ("other", "2e-6"), ("text", "'1e-6'")):
        root = verl_folder(tmp_path / name)
        settings = f"{CONFIG}optim: {{lr: {written}, day: 2026-01-01}}\n{more}"
        (root / "outputs" / ".hydra" / "config.yaml").write_text(settings)
        runs.append(open_run(root))
    typed, written, other, text = runs
    assert (typed.config["optim.lr"], typed.config["optim.day"]) == (1e-6, "2026-01-01")
    assert config_differences(typed, written) == {}
    assert config_differences(typed, other) == {"optim.lr": (1e-6, 2e-6)}
    assert config_differences(typed, text) == {"optim.lr": (1e-6, "1e-6")}
    assert typed.config["actor_rollout_ref.actor.rollout_n"] == (INTERPOLATED if more else 2)


def test_weights_of_a_checkpoint_are_those_everyone_can_load(tmp_path):
    output = read_verl_output(verl_folder(tmp_path / "run"))
    with pytest.raises(InputError, match="holds verl's shards only.*model_merger"):
        output.weights(2)
    folder = output.checkpoints[2] / "actor" / "huggingface"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    assert output.weights(2) == folder
    with pytest.raises(InputError, match="no checkpoint of step 3; expected one of 2; found 3"):
        output.weights(3)


def test_metrics_from_tensorboard(tmp_path):
    writer = pytest.importorskip("torch.utils.tensorboard", reason="TensorBoard is not installed").SummaryWriter
    board = writer(str(tmp_path / "board"))
    for step in (1, 2):
        board.add_scalar("training/global_step", step, step)
        board.add_scalar("actor/grad_norm", 0.5 * step, step)
    board.close()
    output = read_verl_output(tmp_path)
    assert output.origin.startswith("tensorboard logger")
    assert output.metrics[2]["actor/grad_norm"] == 1.0


def test_a_torn_last_line_is_left_out(tmp_path):
    root = verl_folder(tmp_path / "run")
    path = root / "project" / "name.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "data": {"actor/gr')
    assert sorted(read_verl_output(root).metrics) == [1, 2]


def test_a_folder_without_a_run_and_one_with_two_are_refused(tmp_path):
    (tmp_path / "notes.jsonl").write_text('{"text": "no metrics"}\n')
    with pytest.raises(InputError, match="there are no metrics of a verl run.*trainer.logger"):
        read_verl_output(tmp_path)
    verl_folder(tmp_path / "one")
    verl_folder(tmp_path / "two")
    with pytest.raises(InputError, match=r"holds several verl runs.*one/project/name\.jsonl, two/project/name\.jsonl"):
        read_verl_output(tmp_path)
    with pytest.raises(InputError, match="there is no such folder"):
        read_verl_output(tmp_path / "absent")


def test_names_timings_and_what_is_not_finite():
    metrics, seconds, odd = our_names({**METRICS, "actor/kl_loss": float("nan"), "a/text": "x", "a/flag": True})
    assert metrics["actor/grad_norm"] == 1.5 and metrics["reward/before_filter"] == -1.5
    assert seconds == {"rollout": 13.2, "advantage": 0.005, "weight_sync": 0.03, "step": 13.8}
    assert odd == ["actor/kl_loss"]
    assert not [name for name in metrics if name.startswith(("timing", "perf", "a/"))]


def test_a_recorded_run_is_read_like_one_of_ours(tmp_path):
    run_dir = tmp_path / "ours"
    record_verl_run(verl_folder(tmp_path / "theirs"), run_dir, device="cpu", versions={"verl": "0.9.1"})
    run = read_run(run_dir)
    assert [m["step"] for m in run.metrics] == [1, 2]
    assert run.curve.seed == 7 and run.curve.device == "cpu" and run.curve.provenance["version of verl"] == "0.9.1"
    assert run.curve.filtered is False, "the legacy trainer does not filter whatever its configuration says"
    assert run.curve.steps[0].group_size == 2 and len(run.curve.steps[0].prompt_ids) == 2
    assert run.curve.curve("correctness") == [0.0, 0.0]


@pytest.mark.parametrize("logged, reward, score", [(-1.0, -1.0, -0.5), (-1.5, -1.5, -1.0)])
def test_the_dumps_score_is_the_reward_or_what_the_reward_function_returned(tmp_path, logged, reward, score):
    """verl 0.9.1 lets a reward function's own `score` take the place of the reward in the dump; the metrics tell."""
    root = verl_folder(tmp_path / "theirs")
    path = root / "project" / "name.jsonl"
    path.write_text(path.read_text().replace('"critic/score/mean": -1.5', f'"critic/score/mean": {logged}'))
    record_verl_run(root, tmp_path / "ours", device="cpu")
    curve = read_run(tmp_path / "ours").curve
    assert (curve.curve("reward")[0], curve.curve("score")[0]) == (reward, score)


@pytest.mark.parametrize("dumped_by", ["legacy", "v1"])
def test_a_recorded_batch_knows_the_reward_of_either_trainer(tmp_path, dumped_by):
    """The v1 trainer's dump is in another order, under names of its own: only the batch says who earned what."""
    root = verl_folder(tmp_path / "theirs", steps=(1,))
    if dumped_by == "v1":
        rows = [row(p, f"{p}{i}", -1.0, uid=f"{p}_{i}_0", acc=None) for p in "ba" for i in range(2)]
        (root / "rollouts" / "1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    scores = np.array([[0, -1.0], [0, -2.0], [-3.0, 0], [0, -4.0]], np.float32)
    mask = np.array([[1, 1], [1, 1], [1, 0], [1, 1]], np.int32)
    tensors = {"token_level_scores": scores, "response_mask": mask}
    write_batch(
        batch_path(root, 1), BatchRecord(step=1, tensors=tensors, prompt_ids=tuple("aabb"), samples=(0, 1, 0, 1))
    )
    record_verl_run(root, tmp_path / "run", device="cpu")
    step = read_run(tmp_path / "run").curve.steps[0]
    assert step.prompt_ids == ("a", "b") and step.groups["reward"].mean == (-1.5, -3.5)
    assert step.groups["response_length"].mean == (2.0, 1.5)
    penalty = 0.5 if dumped_by == "legacy" else 0.0
    assert step.groups["score"].mean == (-1.5 + penalty, -3.5 + penalty)
    assert ("correctness" in step.groups) == (dumped_by == "legacy")


def test_metrics_that_are_not_finite_are_named_and_not_written(tmp_path):
    root = verl_folder(tmp_path / "theirs")
    path = root / "project" / "name.jsonl"
    # the file logger writes NaN as null
    path.write_text(path.read_text().replace('"actor/grad_norm": 1.5', '"actor/grad_norm": null', 1))
    record_verl_run(root, tmp_path / "ours", device="cpu")
    about = json.loads((tmp_path / "ours" / "run.json").read_text())
    assert about["verl"]["not_finite"] == [[1, "actor/grad_norm"]]
    assert "actor/grad_norm" not in read_run(tmp_path / "ours").metrics[0]


def test_the_fingerprint_forgets_places_and_seeds_only():
    base = {"trainer": {"device": "cpu"}, "actor_rollout_ref": {"rollout": {"seed": 1, "temperature": 1.0}}}
    moved = {"trainer": {"device": "npu"}, "actor_rollout_ref": {"rollout": {"seed": 2, "temperature": 1.0}}}
    hotter = {"trainer": {"device": "cpu"}, "actor_rollout_ref": {"rollout": {"seed": 1, "temperature": 1.1}}}
    assert config_fingerprint(base) == config_fingerprint(moved) != config_fingerprint(hotter)


def test_a_batch_is_kept_to_the_bit(tmp_path):
    tensors = {
        "responses": np.array([[1, 2], [3, 0]]),
        "old_log_probs": np.array([[-0.1, -1e-30], [-3, 0]], np.float32),
    }
    path = batch_path(tmp_path, 3)
    write_batch(path, BatchRecord(step=3, tensors=tensors, prompt_ids=("p", "q"), samples=(0, 0)))
    found = read_batch(path)
    assert (found.step, found.prompt_ids, found.samples) == (3, ("p", "q"), (0, 0))
    assert all(np.array_equal(found.tensors[k], v) and found.tensors[k].dtype == v.dtype for k, v in tensors.items())
    assert recorded_steps(tmp_path) == [3]


def test_a_damaged_batch_and_a_foreign_file_are_refused(tmp_path):
    from safetensors.numpy import save_file

    path = batch_path(tmp_path, 1)
    with pytest.raises(InputError, match="one row per sample; expected 1; found 2"):
        write_batch(path, BatchRecord(step=1, tensors={"x": np.zeros((2, 1))}, prompt_ids=("p",), samples=(0,)))
    path.parent.mkdir()
    path.write_bytes(b"\x10")
    with pytest.raises(InputError, match=r"step_000001\.safetensors: a recorded batch cannot be read"):
        read_batch(path)
    save_file({"x": np.zeros(1)}, path)
    with pytest.raises(InputError, match="this is no recorded batch"):
        read_batch(path)
