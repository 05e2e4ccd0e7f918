"""Whatever else of a run is read from files survives damage as captures do: read, or refused with the file's name."""

from __future__ import annotations

import json

import pytest
from damage import CASES, survived
from run_samples import READERS

from alignment.errors import InputError

UNIT_CASES = range(0, 20_000, 1000)
FIELDS = ("run settings",)
"""Readers whose errors name the field, which may come from the file or from the command line."""


NEEDS = {"verl by TensorBoard": "tensorboard", "tokenizer": "tokenizers", "prompts and conversations": "pyarrow"}
"""Packages that write or read a sample, where that is not a package of every environment."""


@pytest.fixture(autouse=True)
def needed(request):
    told = getattr(request.node, "callspec", None)
    name = told.params.get("name") or FOUND.get(told.params.get("finding"), ("",))[0] if told else ""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_of_a_run_are_read_or_refused(name, tmp_path):
    make, read = READERS[name]
    clean, refused = survived(name, make(tmp_path / "clean"), read, UNIT_CASES, fields=name in FIELDS)
    assert clean + refused == len(UNIT_CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_twenty_thousand_damaged_files_of_a_run_are_read_or_refused(name, tmp_path):
    make, read = READERS[name]
    clean, refused = survived(name, make(tmp_path / "clean"), read, range(CASES), fields=name in FIELDS)
    assert clean + refused == CASES


DEEP = b"[" * 3000
NOT_UTF8 = "'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte"
TOO_DEEP = "maximum recursion depth exceeded while decoding a JSON array from a unicode string"
METRIC, LINES = "verl by its file logger", "rollouts/1.jsonl"
HYDRA = "outputs/.hydra/config.yaml"
FOUND = {
    "settings of verl that are no text": (
        METRIC,
        HYDRA,
        b"",
        b"\x80",
        f"{HYDRA}: the configuration is not YAML ({NOT_UTF8})",
    ),
    "settings of verl that are no mapping": (
        METRIC,
        HYDRA,
        None,
        b"[1]",
        f"{HYDRA}: a configuration is a mapping; found list",
    ),
    "settings of verl that are nested too deeply": (
        METRIC,
        HYDRA,
        None,
        DEEP[:1200],
        f"{HYDRA}: the configuration is not YAML (",
    ),
    "a score that is a text": (
        METRIC,
        LINES,
        b'"score": -1.0',
        b'"score": "\\ud800"',
        ": rollouts of step 1, sample 1: score: a dumped sample has a score that is no number; "
        "expected a finite number; found '\\ud800'",
    ),
    "a score that is infinite": (METRIC, LINES, b'"score": -1.0', b'"score": 1e400', "found inf"),
    "a penalty that is a list": (
        METRIC,
        LINES,
        b'"overlong_reward": -0.5',
        b'"overlong_reward": []',
        "sample 1: overlong_reward: a dumped sample has a score that is no number",
    ),
    "a line that is nested too deeply": (
        METRIC,
        "rollouts/2.jsonl",
        b'"output": "2"',
        b'"output": ' + DEEP,
        f"rollouts/2.jsonl, line 1: a line is not JSON ({TOO_DEEP})",
    ),
    "a batch whose samples have no names": (
        "batches of a run",
        "batches/step_000001.safetensors",
        b"prompt_ids",
        b"prompt_idz",
        "a recorded batch does not say whose samples it holds; expected step, prompt_ids and samples; found ",
    ),
    "a series that is no text": (
        "a run",
        "groups.jsonl",
        b"",
        b"\x80",
        f"groups.jsonl: the series cannot be read ({NOT_UTF8})",
    ),
    "a series that is nested too deeply": (
        "a run",
        "metrics.jsonl",
        b"0.5",
        DEEP,
        f"metrics.jsonl, line 1: a line is not JSON ({TOO_DEEP})",
    ),
    "a line that is about no step": (
        "a run",
        "metrics.jsonl",
        b'"step": 1,',
        b"",
        "metrics.jsonl, line 1: a line of a series is about a step",
    ),
    "a run that does not say what it is": (
        "a run",
        "run.json",
        b'"config"',
        b'"comfig"',
        "run.json: this is not the record of a run; expected seed, ",
    ),
    "a run of another kind": (
        "a run",
        "run.json",
        b'"total_steps": 2',
        b'"total_steps": null',
        "clean-damaged, run.json and groups.jsonl: CurveRun.total_steps: wrong type; expected int; found None",
    ),
    "a metric that is a list": (
        "triage",
        "metrics.jsonl",
        b'"actor/loss": 0.5',
        b'"actor/loss": [1,2]',
        "metrics.jsonl, step 1: actor/loss: a metric is no number; found [1, 2]",
    ),
    "responses without a mask": (
        "triage",
        "batches/step_000002.safetensors",
        b"response_mask",
        b"response_masc",
        "step_000002.safetensors: tokens and their mask belong together; expected response_mask",
    ),
    "a number of cards that is infinite": (
        "triage",
        "config.json",
        b'"n_gpus_per_node": 1',
        b'"n_gpus_per_node": 1e400',
        "config.json: trainer.n_gpus_per_node: a count is expected; found inf",
    ),
    "a checkpoint whose name is no file's": (
        "triage",
        "config.json",
        b'"path": "',
        b'"path": "' + DEEP,
        "config.json: actor_rollout_ref.model.path: no folder has this name (OSError)",
    ),
    "updates that are a number": (
        "triage",
        "ranks.jsonl",
        None,
        b'{"step": 1, "update_actor": 5}\n',
        "ranks.jsonl, step 1: update_actor: updates are a list; found 5",
    ),
    "an update without ranks": (
        "triage",
        "ranks.jsonl",
        None,
        b'{"step": 2, "update_actor": [[]]}\n',
        "ranks.jsonl, step 2: update_actor, update 1: an update has ranks; found []",
    ),
    "a rank that does not say its tokens": (
        "triage",
        "ranks.jsonl",
        b'"tokens"',
        b'"tokenz"',
        "ranks.jsonl, step 1: update_actor, update 1, rank 0: a rank does not say what it had to compute; "
        "expected tokens: a whole number, 0 or more; found {'",
    ),
    "a rank that is a number": (
        "triage",
        "ranks.jsonl",
        None,
        b'{"step": 1, "update_actor": [[3]]}\n',
        "update 1, rank 0: a rank does not say what it had to compute; "
        "expected tokens: a whole number, 0 or more; found 3",
    ),
    "micro batches that are a text": (
        "triage",
        "ranks.jsonl",
        b'"micro_batches": 2',
        b'"micro_batches": "2"',
        "expected micro_batches: a whole number, 0 or more; found {'",
    ),
    "stages of no piece": (
        "triage",
        "ranks.jsonl",
        b'"pipeline_chunks": 1',
        b'"pipeline_chunks": 0',
        "expected pipeline_chunks: a whole number, 1 or more; found {'",
    ),
    "a pipeline of no stage": (
        "triage",
        "ranks.jsonl",
        b'"pipeline_stages": 1',
        b'"pipeline_stages": 0',
        "expected pipeline_stages: a whole number, 1 or more; found {'",
    ),
    "more tokens than there are": (
        "triage",
        "ranks.jsonl",
        b'"tokens": 20',
        b'"tokens": ' + b"9" * 400,
        "expected tokens: a whole number, 0 or more; found {'",
    ),
    "an operator whose bound is a list": (
        "triage",
        "operators.json",
        b'"bound": 1.0',
        b'"bound": [1,2]',
        "operators.json: not an answer of alignment run",
    ),
    "a collective that lacks its ranks": (
        "recorded collectives",
        "collectives_rank_0.safetensors",
        b"ranks",
        b"rankz",
        "collectives_rank_0.safetensors: a recorded collective is not whole (KeyError: 'ranks')",
    ),
    "settings with half a character": (
        "precision collector settings",
        "collector.yaml",
        b"step_end: 0",
        b'step_end: "\\ud800"',
        "collector.yaml: ",
    ),
    "a range of the collector": (
        "precision collector settings",
        "collector.yaml",
        b"\n  step_start: 0",
        b"\n  step_start: -1",
        "collector.yaml: precision_collector.step_start: the value is out of range; expected 0 or more; found -1",
    ),
    "a whole number that is none": (
        "run settings",
        "run.yaml",
        b"total_epochs: 1",
        b"total_epochs: .nan",
        "trainer.total_epochs: the value has the wrong type; expected a whole number; found nan",
    ),
    "a date that is none": (
        "stack",
        "stack.yaml",
        b"2026-01-01",
        b"2026-02-31",
        "stack.yaml: not YAML (day is out of range for month)",
    ),
    "a tokenizer of another syntax": (
        "tokenizer",
        "tokenizer.json",
        b'"version"',
        b'"ver',
        "tokenizer.json: the file is truncated or not JSON",
    ),
    "a tokenizer of another form": (
        "tokenizer",
        "tokenizer.json",
        b'"pre_tokenizer"',
        b'"normalizer": 5, "pre_tokenizer"',
        "tokenizer.json: not a tokenizers file (",
    ),
    "conversations that are no text": (
        "prompts and conversations",
        "b.jsonl",
        b"",
        b"\x80",
        f"b.jsonl: the file cannot be read ({NOT_UTF8})",
    ),
    "a conversation that is a number": (
        "prompts and conversations",
        "b.jsonl",
        None,
        b"1\n",
        "b.jsonl, line 1: a conversation is a mapping; found int",
    ),
    "a conversation that is nested too deeply": (
        "prompts and conversations",
        "b.jsonl",
        None,
        DEEP,
        f"b.jsonl, line 1: the line is not JSON ({TOO_DEEP})",
    ),
    "a conversation with half a character": (
        "prompts and conversations",
        "b.jsonl",
        b"1 + 1",
        b"\\ud800",
        "tokenizer.json: the text is none; found '<bos><|user|>\\ud800 =<|assistant|>'",
    ),
    "a model that is nested too deeply": (
        "checkpoint",
        "config.json",
        None,
        DEEP,
        f"config.json: the file is not JSON; found {TOO_DEEP}",
    ),
    "a model of no architecture": (
        "checkpoint",
        "config.json",
        b'"architectures": [',
        b'"architectures": [5], "architecture": [',
        "config.json: the configuration is of another architecture; expected DeepseekV3ForCausalLM; found 5",
    ),
    "a state that is a text": (
        "resume doctor",
        "state.json",
        None,
        b'"x"',
        "state.json: a JSON object is expected; found 'x'",
    ),
    "more ranks than there are": (
        "resume doctor",
        "state.json",
        b'"trainer.n_gpus_per_node": 1',
        b'"trainer.n_gpus_per_node": 99999999999',
        "state.json: trainer.n_gpus_per_node: a count is expected; found 99999999999",
    ),
    "an index whose files are lists": (
        "resume doctor",
        "actor/model.safetensors.index.json",
        b'"model-00001',
        b'[], "model-00001',
        "model.safetensors.index.json: the file is truncated or not JSON",
    ),
    "a night of another kind": (
        "night",
        "night.json",
        b'"attempt"',
        b'"attemp"',
        "night.json: not the record of a phase; expected attempt, ",
    ),
    "a commit with half a character": (
        "night",
        "provenance.json",
        b'"c0"',
        b'"\\ud800"',
        "the history cannot be read or written ('utf-8' codec can't encode character '\\ud800'",
    ),
    "a measure whose bound is a list": (
        "night",
        "verdicts.json",
        b'"bound": 1.0',
        b'"bound": []',
        "verdicts.json: not the verdicts of a run (TypeError: the bound of a measure is no number)",
    ),
}
"""Damage that once was an exception of Python, or an error without a file: reader, file, what was there, what is."""


CASES_FOUND = {
    "checkpoint": (4091, 5374, 8939),
    "night": (3553,),
    "prompts and conversations": (6647, 9176),
    "resume doctor": (2001, 4329, 15822, 19305),
    "verl by its console": (2691,),
    "verl by its file logger": (3523, 3553),
}
"""Cases of the long run that once were an exception of Python."""


@pytest.mark.parametrize("name", CASES_FOUND)
def test_cases_of_the_long_run_that_once_failed(name, tmp_path):
    make, read = READERS[name]
    assert sum(survived(name, make(tmp_path / "clean"), read, CASES_FOUND[name])) == len(CASES_FOUND[name])


@pytest.mark.parametrize("finding", FOUND)
def test_what_was_found_is_refused_by_name(finding, tmp_path):
    name, file, old, new, told = FOUND[finding]
    make, read = READERS[name]
    folder = make(tmp_path / "clean-damaged")
    data = (folder / file).read_bytes()
    assert old is None or old in data
    (folder / file).write_bytes(new if old is None else data.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        read(folder)
    assert told in str(caught.value)
    str(caught.value).encode()


def test_what_verl_can_say_and_json_cannot_is_kept_as_text(tmp_path):
    make, read = READERS[METRIC]
    folder = make(tmp_path / "run")
    (folder / HYDRA).write_text("trainer: {device: cpu, clip: .inf, day: 2026-01-01, at: '${nowhere.x}'}\n1: {2: 3}\n")
    read(folder)
    told = json.loads((tmp_path / "recorded" / "config.json").read_text())
    assert told["trainer"] == {"device": "cpu", "clip": "inf", "day": "2026-01-01", "at": "${nowhere.x}"}
    assert told["1"] == {"2": 3}
