"""The file of the precision collector: every field of its documentation, and everything that is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from alignment.capture import collector
from alignment.capture.collector import runs_log_prob_twice
from alignment.capture.collector_config import CollectorConfig, load_collector_config
from alignment.capture.collector_steps import CollectedSteps, collected_steps, mock_sequence, mock_step
from alignment.errors import InputError
from alignment.rl.config import TrainConfig, load_config

DOCUMENTED = """
precision_collector:
  msprobe: False
  memory_dump: False
  dump_path: "./collector_save_path"
  configurations_dump: False
  key_data_dump: False
  reference_dump: False
  actor_train_dump: False
  actor_infer_dump: False
  critic_train_dump: False
  step_start: 0
  step_end: 0
  token_range_start: 0
  token_range_end: 0
  level: "L0"
  task: "statistics"
  enable_mock_inference: False
  mock_random_seed: None
  mock_data_path: "./collector_saved_path"
  mock_step_start: 0
  mock_step_end: 0
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "precision_collector.yaml"
    path.write_text(text)
    return path


def test_the_documented_file_is_the_defaults(tmp_path):
    config = load_collector_config(written(tmp_path, DOCUMENTED))
    assert config == CollectorConfig()
    assert not config.dumps and not config.mocks and config.layer_stages == ()
    assert load_collector_config(written(tmp_path, "precision_collector:\n")) == config
    assert CollectorConfig.from_json(config.to_json()) == config
    fields = [line.split(":")[0].strip() for line in DOCUMENTED.strip().splitlines()[1:]]
    assert sorted(fields) == sorted(f.name for f in dataclasses.fields(CollectorConfig))


def test_without_the_master_switch_nothing_acts():
    everything = CollectorConfig(key_data_dump=True, actor_train_dump=True, configurations_dump=True)
    assert not everything.dumps and everything.layer_stages == ()
    assert dataclasses.replace(everything, msprobe=True).dumps
    mock = CollectorConfig(enable_mock_inference=True)
    assert not mock.mocks and dataclasses.replace(mock, msprobe=True).mocks


@pytest.mark.parametrize(
    ("switch", "stages"),
    [
        ("reference_dump", ("reference_compute_log_prob",)),
        ("actor_train_dump", ("actor_compute_log_prob", "actor_update")),
        ("actor_infer_dump", ("actor_generate_sequences",)),
        ("critic_train_dump", ("critic_compute_values", "critic_update")),
    ],
)
def test_each_switch_dumps_its_stages(switch, stages):
    assert CollectorConfig(msprobe=True, **{switch: True}).layer_stages == stages


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step_end": -1}, "precision_collector.step_end: the value is out of range; expected 0 or more; found -1"),
        (
            {"step_start": 3, "step_end": 2},
            "step_end: the range ends before it starts; expected step_start = 3 or more; found 2",
        ),
        (
            {"token_range_start": 1},
            "token_range_end: the range ends before it starts; expected token_range_start = 1 or more",
        ),
        ({"mock_step_start": 1}, "mock_step_end: the range ends before it starts"),
        ({"mock_step_start": -2}, "mock_step_start: the value is out of range"),
        (
            {"mock_random_seed": -2},
            r"mock_random_seed: this is no mode of mock inference; expected None \(real steps\), -1 \(cycle\)",
        ),
        (
            {"memory_dump": True},
            "memory_dump: memory is dumped for the stages whose layers are dumped, and there are none",
        ),
        ({"memory_dump": True, "key_data_dump": True}, "memory_dump: memory is dumped for the stages"),
        (
            {"enable_mock_inference": True, "actor_infer_dump": True},
            "actor_infer_dump: mock inference generates nothing",
        ),
        (
            {"enable_mock_inference": True, "dump_path": "./a", "mock_data_path": "a/../a"},
            "dump_path: the replay would write over",
        ),
        ({"dump_path": " "}, "dump_path: a folder has to be named"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        CollectorConfig(**fields)


def test_what_is_no_contradiction_is_accepted():
    CollectorConfig(memory_dump=True, reference_dump=True)
    CollectorConfig(enable_mock_inference=True, actor_train_dump=True, key_data_dump=True)
    CollectorConfig(dump_path="./same", mock_data_path="./same")  # nothing is replayed
    CollectorConfig(step_start=2, step_end=2, token_range_start=3, token_range_end=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "precision_collector:\n  dump_paht: x\n",
            r"precision_collector\.dump_paht: there is no such field. Next: the nearest known field is dump_path",
        ),
        (
            "precision_collector:\n  msprobe: 1\n",
            r"msprobe: the value has another type; expected True or False; found 1",
        ),
        (
            "precision_collector:\n  step_end: True\n",
            "step_end: the value has another type; expected a whole number; found True",
        ),
        (
            "precision_collector:\n  step_end: '3'\n",
            "step_end: the value has another type; expected a whole number; found '3'",
        ),
        ("precision_collector:\n  level: L2\n", r"level: there is no such choice; expected L0 \| L1 \| mix; found L2"),
        (
            "precision_collector:\n  task: overflow\n",
            r"task: there is no such choice; expected statistics \| tensor; found overflow",
        ),
        ("precision_collector:\n  mock_random_seed: often\n", "mock_random_seed: the value has another type"),
        ("precision_collector: [1]\n", "the settings are a mapping; found list"),
        ("collector:\n  msprobe: True\n", "the file has one key; expected precision_collector; found "),
        ("precision_collector: {}\nother: 1\n", r"the file has one key; expected precision_collector; found \['other'"),
        ("- 1\n", "the file has one key; expected precision_collector; found list"),
        ("a: [", "the file is not YAML"),
    ],
)
def test_unknown_and_malformed_settings_are_refused(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(InputError, match=message) as found:
        load_collector_config(path)
    assert str(path) in str(found.value)


def test_a_missing_file_says_how_to_switch_the_collector_off(tmp_path):
    with pytest.raises(InputError, match="cannot be read .*Next: create it, or set ascend_precision_collector to None"):
        load_collector_config(tmp_path / "absent.yaml")


# --- the key of the trainer's configuration -------------------------------------------------------------------------


@pytest.mark.parametrize("off", [None, "None", "null", "none", "", " NULL "])
def test_none_and_null_are_off_and_change_no_hash(off):
    plain = load_config("dapo-tiny")
    given = TrainConfig.from_dict({**plain.to_dict(), "ascend_precision_collector": off})
    assert given == plain and given.config_hash() == plain.config_hash()


def test_the_key_may_carry_its_plus_and_decides_nothing():
    plain = load_config("dapo-tiny")
    for overrides in (["+ascend_precision_collector=a.yaml"], ["ascend_precision_collector=a.yaml"]):
        given = load_config("dapo-tiny", overrides)
        assert given.ascend_precision_collector == "a.yaml" and given.config_hash() == plain.config_hash()
    tree = {k: v for k, v in plain.to_dict().items() if k != "ascend_precision_collector"}
    assert (
        TrainConfig.from_dict({**tree, "+ascend_precision_collector": "a.yaml"}).ascend_precision_collector == "a.yaml"
    )
    assert load_config("dapo-tiny", ["+ascend_precision_collector=None"]) == plain
    with pytest.raises(InputError, match="keys are neither added nor removed"):
        load_config("dapo-tiny", ["+trainer.seed=3"])


# --- steps ------------------------------------------------------------------------------------------------------------


def test_step_ranges_include_both_ends():
    steps = CollectedSteps(first=1, last=3)
    assert [s for s in range(6) if steps.takes("actor_update", s)] == [1, 2, 3]
    assert steps.describe() == "collects steps 1 … 3 (3)"
    assert list(CollectedSteps(first=4, last=4).of("data")) == [4]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_lora_on_fsdp_counts_two_calls_a_step(n):
    steps = CollectedSteps(first=0, last=2 * n, twice=True)
    for stage in ("actor_compute_log_prob", "actor_update"):
        assert list(steps.of(stage)) == list(range(n))
    # The calls themselves, as the collector of the source counts them: two a step, in order.
    calls = [(step, call) for step in range(n + 2) for call in (2 * step, 2 * step + 1)]
    taken = [step for step, call in calls if 0 <= call <= 2 * n]
    assert [s for s in range(n + 2) if taken.count(s) == 2] == list(range(n)) and taken.count(n) == 1
    assert list(steps.of("reference_compute_log_prob")) == list(range(2 * n + 1))
    assert f"which is {n} whole step" in steps.describe() and "set step_end to 2·N" in steps.describe()


@pytest.mark.parametrize(
    ("engine", "lora_rank", "adapter", "twice"),
    [
        ("fsdp", 8, 0, True),
        ("fsdp", 0, 4, True),
        ("fsdp", 0, 0, False),
        ("megatron", 8, 0, False),
        ("golden", 8, 4, False),
    ],
)
def test_only_an_adapter_on_fsdp_runs_the_log_probs_twice(engine, lora_rank, adapter, twice):
    model = SimpleNamespace(lora_rank=lora_rank)
    config = SimpleNamespace(
        engine=SimpleNamespace(train=engine),
        actor_rollout_ref=SimpleNamespace(model=model),
        gkd=SimpleNamespace(lora=SimpleNamespace(rank=adapter)),
    )
    assert runs_log_prob_twice(config) is twice
    assert not runs_log_prob_twice(load_config("dapo-tiny", ["engine.train=fsdp"]))


def test_the_run_says_how_it_counts(capsys, monkeypatch):
    monkeypatch.setattr(collector, "runs_log_prob_twice", lambda config: True)
    settings = CollectorConfig(msprobe=True, actor_train_dump=True, step_end=4)
    collector.Collector(settings, load_config("dapo-tiny"), None).begin()
    said = capsys.readouterr().err
    assert said.startswith("precision collector: LoRA on FSDP: actor_compute_log_prob runs twice a step")
    assert "which is 2 whole steps (0 … 1)" in said
    monkeypatch.setattr(collector, "runs_log_prob_twice", lambda config: False)
    collector.Collector(settings, load_config("dapo-tiny"), None).begin()
    assert capsys.readouterr().err == ""


def test_a_switch_of_a_stage_that_the_run_lacks_is_said(capsys):
    settings = CollectorConfig(msprobe=True, critic_train_dump=True, reference_dump=True)
    collector.Collector(settings, load_config("dapo-tiny"), None).begin()
    assert capsys.readouterr().err.splitlines() == [
        "precision collector: critic_train_dump: this run has no critic, so there is nothing to dump",
        "precision collector: reference_dump: this run has no reference, so there is nothing to dump",
    ]
    collector.Collector(settings, load_config("ppo-tiny"), None).begin()
    assert "critic" not in capsys.readouterr().err


def test_dumps_of_an_earlier_run_are_said(tmp_path, capsys):
    settings = CollectorConfig(msprobe=True, configurations_dump=True, dump_path=str(tmp_path))
    collector.Collector(settings, load_config("dapo-tiny"), None).begin()
    assert capsys.readouterr().err == ""
    assert [p.name for p in tmp_path.iterdir()] == ["configurations.json"]
    collector.Collector(settings, load_config("dapo-tiny"), None).begin()
    assert "holds dumps already: steps of this run replace theirs, others stay" in capsys.readouterr().err


def test_without_lora_the_same_range_is_that_many_steps():
    assert list(CollectedSteps(first=0, last=4).of("actor_update")) == [0, 1, 2, 3, 4]


def test_a_range_without_a_whole_step_is_refused():
    config = CollectorConfig(msprobe=True, actor_train_dump=True)
    with pytest.raises(InputError, match="holds no whole step; expected 2·N for N steps; found 0"):
        collected_steps(config, twice=True)
    assert collected_steps(config, twice=False).of("actor_update") == range(0, 1)


# --- the three modes of mock inference ------------------------------------------------------------------------------


def test_real_steps_are_loaded_at_their_own_places():
    config = CollectorConfig(mock_step_start=1, mock_step_end=3)
    assert list(mock_sequence(config, 6)) == [None, 1, 2, 3, None, None]


def test_minus_one_cycles_through_the_steps():
    config = CollectorConfig(mock_random_seed=-1, mock_step_start=2, mock_step_end=4)
    assert list(mock_sequence(config, 7)) == [2, 3, 4, 2, 3, 4, 2]


def test_any_other_seed_draws_steps_and_repeats_itself():
    config = CollectorConfig(mock_random_seed=7, mock_step_start=5, mock_step_end=9)
    drawn = list(mock_sequence(config, 60))
    assert set(drawn) == {5, 6, 7, 8, 9} and drawn == list(mock_sequence(config, 60))
    assert drawn != list(mock_sequence(dataclasses.replace(config, mock_random_seed=8), 60))
    assert mock_step(config, 41) == drawn[41]  # a resumed run draws on where it was
