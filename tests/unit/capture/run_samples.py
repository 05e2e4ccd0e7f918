"""Small examples of the files of a run that people bring: settings, series, tables, checkpoints, records of nights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import capture_samples
import numpy as np
import torch
import yaml

from alignment.backends.training import Workload
from alignment.bisect.stack import load_stack
from alignment.capture.collector_config import CollectorConfig, load_collector_config
from alignment.capture.collector_data import write_key_data
from alignment.capture.mock_replay import MockRollouts
from alignment.diagnose.collective_record import RECORD, Call, CollectiveRecorder, load_records
from alignment.diagnose.memory_profile import read_module_memory
from alignment.diagnose.resume_doctor import examine_checkpoint
from alignment.diagnose.triage import triage
from alignment.files import write_json
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.curve_run import CurveStep
from alignment.numerics.verdict import Measure, Outcome, Verdict
from alignment.report.history import History
from alignment.report.night import NIGHT, NightRecord, PhaseRecord, read_night
from alignment.report.night_evidence import gather_evidence
from alignment.report.night_matrix import Phase
from alignment.report.run_directory import finite, write_verdicts
from alignment.rl.batch import Batch
from alignment.rl.batch_record import BatchRecord, batch_path, read_batch, write_batch
from alignment.rl.config import load_config
from alignment.rl.data import Prompt, PromptSet, from_parquet, prompt_batch, write_parquet
from alignment.rl.gkd_config import GkdConfig
from alignment.rl.gkd_data import load_samples
from alignment.rl.mock_rollout import RecordedRollouts
from alignment.rl.run import read_run
from alignment.rl.tokenizer import Tokenizer, train_tokenizer
from alignment.rl.verl_config import read_verl_yaml
from alignment.rl.verl_record import record_verl_run
from alignment.weights.checkpoint import iter_tensors, save_checkpoint
from alignment.weights.checkpoint import load_config as load_model_config
from alignment.weights.tensor_file import stored_tensors

MODEL = dataclasses.replace(preset("tiny-deepseek"), num_hidden_layers=1, first_k_dense_replace=1, vocab_size=16)
N, PAD, EOS = 2, 0, 1
PROMPTS = PromptSet(
    [Prompt(prompt_id=f"p{i}", token_ids=(5 + i, 6), data_source="x", ground_truth=str(i)) for i in range(2)],
    tokenizer_hash="",
)


def _lines(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- what verl leaves ------------------------------------------------------------------------------------------------


def verl(root: Path, logger: str) -> Path:
    """Two steps by one of verl's loggers, dumped rollouts and Hydra's configuration."""
    values = {"critic/score/mean": -1.0, "actor/lr": 1e-6, "training/global_step": 1, "timing_s/gen": 13.2}
    if logger == "file":
        _lines(root / "x" / "y.jsonl", [{"step": s, "data": {**values, "actor/loss": s}} for s in (1, 2)])
    elif logger == "console":
        root.mkdir(parents=True)
        told = " - ".join(f"{k}:{v}" for k, v in values.items())
        (root / "main.log").write_text(f"begin\n(pid=5) step:1 - {told}\nstep:2 - {told} - odd:np.float64(0.5)\n")
    else:
        root.mkdir(parents=True)
        parts = [capture_samples.event(s, "training/global_step", float(s)) for s in (1, 2)]
        name = "events.out.tfevents.1.host.1.0"
        (root / name).write_bytes(b"".join(map(capture_samples.record, parts)))
    for step in (1, 2):
        _lines(root / "rollouts" / f"{step}.jsonl", [
            {"input": p, "output": "2", "gts": "2", "score": -1.0, "step": step, "acc": 1.0, "overlong_reward": -0.5}
            for p in "aabb"
        ])  # fmt: skip
    config = {
        "actor_rollout_ref": {"rollout": {"n": 2, "seed": 7, "t": "${trainer.device}"}},
        "trainer": {"device": "cpu"},
    }
    (root / "outputs" / ".hydra").mkdir(parents=True)
    (root / "outputs" / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    return root


def read_verl(root: Path) -> None:
    """What ``alignment verl record`` does."""
    record_verl_run(root, root.with_name("recorded"), device="cpu")


# --- runs of ours ----------------------------------------------------------------------------------------------------


def _batch(step: int) -> BatchRecord:
    tensors = {
        "prompts": np.arange(8).reshape(4, 2), "prompt_mask": np.ones((4, 2), int),
        "responses": np.arange(12).reshape(4, 3), "response_mask": np.ones((4, 3), int),
        "rollout_log_probs": np.full((4, 3), -1.0, "f4"), "old_log_probs": np.full((4, 3), -1.5, "f4"),
        "token_level_scores": np.ones((4, 3), "f4"), "advantages": np.ones((4, 3), "f4"),
    }  # fmt: skip
    return BatchRecord(step=step, tensors=tensors, prompt_ids=["a", "a", "b", "b"], samples=[0, 1, 0, 1])


def batches(root: Path) -> Path:
    """One recorded batch."""
    write_batch(batch_path(root, 1), _batch(1))
    return root


def run_of_ours(root: Path) -> Path:
    """Everything that the axes of a triage read beside two steps of metrics."""
    _lines(root / "metrics.jsonl", [{"step": s, "actor/loss": 0.5, "reward/after_filter": 1.0} for s in (1, 2)])
    steps = (CurveStep.from_samples(step=s, prompt_ids=list("aabb"), values={"reward": [1.0] * 4}) for s in (1, 2))
    _lines(root / "groups.jsonl", [dataclasses.asdict(step) for step in steps])
    ranks = [dataclasses.asdict(Workload(tokens=20, micro_batches=2)) for _ in range(2)]
    _lines(root / "ranks.jsonl", [{"step": s, "update_actor": [ranks, ranks]} for s in (1, 2)])
    about = {"seed": 1, "device": "cpu", "config": "f", "total_steps": 2, "filtered": False, "workers": []}
    write_json(root / "run.json", {**about, "provenance": {"model_hash": "m", "data_hash": "d"}})
    config = load_config("dapo-tiny", [f"actor_rollout_ref.model.path={root / 'model'}"])
    write_json(root / "config.json", config.to_dict())
    for step in (1, 2):
        write_batch(batch_path(root, step), _batch(step))
    told = [finite(_verdict("stress/card 0").to_dict()), finite(_verdict("unit/rope", Outcome.FAIL).to_dict())]
    write_json(root / "stress.json", {"verdicts": told[:1]})
    write_json(root / "operators.json", {"verdicts": told[1:]})
    (root / "stack.yaml").write_text("schema: 1\nname: a\ndate: 2026-01-01\ncomponents: {torch: {release: '2.7.1'}}\n")
    dotted = f"{'tensor_model_parallel_size':.<48} 2"
    (root / "log.txt").write_text(f"------ arguments ------\n  {dotted}\n------ end of arguments ------\n")
    write_json(root / "ckpt" / "global_step_2" / "actor" / "transformer_config.json", {"num_layers": 4})
    return root


def triaged(root: Path) -> None:
    """The six axes between a run and itself."""
    triage(root, root).to_dict()


def _verdict(check: str, outcome: Outcome = Outcome.PASS) -> Verdict:
    return Verdict(
        check=check, layer="unit", stage="operator", subject="torch", device="npu", outcome=outcome, reason="why",
        measures=(Measure(name="relative_l2", value=0.5, bound=1.0),),
    )  # fmt: skip


def collectives(root: Path) -> Path:
    """Two calls of one rank."""
    made = CollectiveRecorder()
    x, about = torch.arange(4.0), {"ranks": (0, 1), "group": "0", "rank": 0}
    made.calls = [
        Call(op="all_reduce", reduce="SUM", inputs=[x], outputs=[x * 2], **about),
        Call(op="all_gather", inputs=[x + 0], outputs=[x * 1, x + 1], **about),
    ]
    made.save(root / RECORD.format(rank=0))
    return root


# --- settings, data, tables ---


def collector_file(root: Path) -> Path:
    root.mkdir(parents=True)
    settings = dataclasses.asdict(CollectorConfig(msprobe=True, task="tensor"))
    (root / "collector.yaml").write_text(yaml.safe_dump({"precision_collector": settings}))
    return root


def run_file(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "run.yaml").write_text(yaml.safe_dump(load_config("dapo-tiny").to_dict()))
    return root


def read_run_file(root: Path) -> None:
    load_config(str(root / "run.yaml"))
    read_verl_yaml(root / "run.yaml")


def stack_file(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "stack.yaml").write_text(
        "schema: 1\nname: a\ndate: 2026-01-01\ncomponents:\n  torch: '2.7.1'\n  cann: {fact: '8.0'}\n"
    )
    return root


def module_memory(root: Path) -> Path:
    root.mkdir(parents=True)
    rows = ["Component,Timestamp(us),Total Reserved(KB),Device_id", "HCCL,1.5,2048.0,0", "APP,2,-1,0", "APP,3,5,1"]
    (root / "npu_module_mem_0.csv").write_text("\n".join(rows) + "\n")
    return root


def tokenizer(root: Path) -> Path:
    train_tokenizer(["1 + 1 = 2", "what is 7 ?"], root, vocab_size=102)
    return root


def read_tokenizer(root: Path) -> None:
    made = Tokenizer(root)
    made.decode(made.encode_chat([{"role": "user", "content": "1 + 1"}]))


def prompts(root: Path) -> Path:
    """Prompts in verl's table, and conversations, beside the tokenizer that reads both."""
    tokenizer(root)
    rows = [{
        "prompt": [{"role": "user", "content": f"1 + {i} ="}], "data_source": "x", "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)}, "extra_info": {"index": i, "split": "train"},
    } for i in range(2)]  # fmt: skip
    write_parquet(rows, root / "a.parquet")
    turns = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    _lines(root / "b.jsonl", [{"id": "x", "messages": turns, "ground_truth": "2"}, {"messages": turns}])
    return root


def read_prompts(root: Path) -> None:
    made = Tokenizer(root)
    from_parquet(root / "a.parquet", made, max_prompt_length=64)
    config = load_config("gkd-tiny", kind=GkdConfig)
    data = dataclasses.replace(config.data, train_files=(str(root / "b.jsonl"),))
    load_samples(dataclasses.replace(config, data=data), made)


# --- recorded rollouts ---


def _asked() -> Batch:
    batch = prompt_batch(list(PROMPTS), pad_token_id=PAD, prompt_length=4).repeat(N)
    about = {"n": N, "step": 1, "eos_token_id": EOS, "pad_token_id": PAD}
    return batch.add(meta={"sample_key": list(range(len(batch)))}, info=about)


def recorded(root: Path) -> Path:
    """A rollout as a run of ours keeps it."""
    asked = _asked()
    rows, width = len(asked), 3
    held = {"responses": torch.full((rows, width), 7), "response_mask": torch.ones(rows, width, dtype=torch.int64)}
    RecordedRollouts(root, key={"model": "m"}).save(1, 0, asked.add(held))
    return root


def read_recorded(root: Path) -> None:
    RecordedRollouts(root, key={"model": "m"}).load(1, 0, _asked())


def mock(root: Path) -> Path:
    """A step as another device recorded it with the collector."""
    rows = [p.token_ids for p in PROMPTS for _ in range(N)]
    values = {
        "prompts": np.array(rows), "responses": np.array([[20, 21, EOS]] * len(rows)),
        "attention_mask": np.ones((len(rows), 5), np.int64),
    }  # fmt: skip
    write_key_data(root, values, step=0, rank=0, micro_step=0)
    return root


def read_mock(root: Path) -> None:
    config = CollectorConfig(msprobe=True, enable_mock_inference=True, mock_data_path=str(root))
    MockRollouts(
        config, prompts=PROMPTS, prompt_length=4, response_length=5, pad_token_id=PAD, eos_token_id=EOS, vocab_size=64
    ).load(1, 0, _asked())


# --- checkpoints ---


def checkpoint(root: Path) -> Path:
    """A Hugging Face checkpoint in several files with an index."""
    state = CausalLM(MODEL, dtype=torch.bfloat16).init_weights(0).state_dict()
    save_checkpoint(root, MODEL, state, max_shard_bytes=100_000)
    assert (root / "model.safetensors.index.json").exists()
    return root


def read_checkpoint(root: Path) -> None:
    load_model_config(root)
    for _ in iter_tensors(root):
        pass
    stored_tensors(root)


def resumable(root: Path) -> Path:
    """A checkpoint of the golden engine, as a run saves it."""
    config = {
        "trainer.n_gpus_per_node": 1, "data.train_batch_size": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.model.dtype": "bfloat16",
    }  # fmt: skip
    write_json(root / "state.json", {"step": 1, "config": config})
    checkpoint(root / "actor")
    write_json(root / "actor" / "schedule.json", {"updates": 2})
    return root


def examined(root: Path) -> None:
    for _ in examine_checkpoint(root):
        pass


# --- nights ---


def night(root: Path) -> Path:
    """A night with one phase, its verdicts and what made it."""
    record = NightRecord(
        identity="n", row="r", chip="910B", outcome="pass", action="ignore",
        phases=(PhaseRecord(name="checks", outcome="pass", nodes={"a": {"exit_code": 0}}, counts={"tests": 3}),),
    )  # fmt: skip
    write_json(root / NIGHT, record.to_dict())
    write_verdicts(root, [_verdict("unit/rope")])
    write_json(root / "provenance.json", {"date": "2026-01-01T02:00", "commit": "c0", "fingerprint": {"chip": "910B"}})
    return root


def read_kept_night(root: Path) -> None:
    read_night(root)
    beside = root.with_name("history.sqlite")
    beside.unlink(missing_ok=True)
    History(beside).add(root)


def evidence(root: Path) -> Path:
    """What the phases of a night leave: tests, a training, a capture, a document."""
    cases = (
        '<testcase classname="tests.unit.rope" name="a[1]"/>'
        '<testcase classname="t" name="b"><failure message="x"/></testcase>'
    )
    root.mkdir(parents=True)
    (root / "junit.xml").write_text(f'<testsuites><testsuite tests="2">{cases}</testsuite></testsuites>')
    run_of_ours(root / "training")
    capture_samples.own(root / "capture")
    (root / "said.json").write_text("a banner\n" + json.dumps({"verdicts": [finite(_verdict("stress/a").to_dict())]}))
    return root


def gathered(root: Path) -> None:
    """Evidence takes what is damaged for a problem of the phase, and never for an error of the night."""
    leaves = (("junit", "junit.xml"), ("training", "training"), ("capture", "capture"), ("document", "said.json"))
    phase = Phase(name="checks", command=("x",), timeout_minutes=1.0, leaves=leaves)
    gather_evidence(phase, root, device="npu", require=True)


READERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "verl by its file logger": (lambda root: verl(root, "file"), read_verl),
    "verl by TensorBoard": (lambda root: verl(root, "tensorboard"), read_verl),
    "verl by its console": (lambda root: verl(root, "console"), read_verl),
    "batches of a run": (batches, lambda root: read_batch(batch_path(root, 1))),
    "a run": (run_of_ours, read_run),
    "triage": (run_of_ours, triaged),
    "recorded collectives": (collectives, load_records),
    "precision collector settings": (collector_file, lambda root: load_collector_config(root / "collector.yaml")),
    "run settings": (run_file, read_run_file),
    "stack": (stack_file, lambda root: load_stack(root / "stack.yaml")),
    "component memory": (module_memory, read_module_memory),
    "tokenizer": (tokenizer, read_tokenizer),
    "prompts and conversations": (prompts, read_prompts),
    "recorded rollouts": (recorded, read_recorded),
    "mock replay": (mock, read_mock),
    "checkpoint": (checkpoint, read_checkpoint),
    "resume doctor": (resumable, examined),
    "night": (night, read_kept_night),
    "night evidence": (evidence, gathered),
}
"""Name of a reader to what writes an example and what reads it."""
