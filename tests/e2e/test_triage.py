"""Triage of real runs: two aligned ones, and copies of one that were really run otherwise."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from unittest import mock

import dapo_world
import pytest
from typer.testing import CliRunner

from alignment.bisect.known_bad import load_known_bad
from alignment.cli import app
from alignment.diagnose.axes import AXES
from alignment.diagnose.triage import triage
from alignment.rl.data import PromptSet
from alignment.rl.run import run_dapo
from alignment.rl.tasks import Question
from alignment.weights.checkpoint import load_config, load_state, save_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "diagnose"))
import stress_faults  # noqa: E402

HYPER, DATA, HARDWARE, SOFTWARE, MODEL, SCORING = AXES


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return dapo_world.build(tmp_path_factory.mktemp("world"))


def run(world: Path, directory: Path, *, fault=None, **changes) -> Path:
    settings = dapo_world.config(world, trainer__record_batches=True, **changes)
    with fault() if fault else contextlib.nullcontext():
        run_dapo(settings, run_dir=directory)
    return directory


@pytest.fixture(scope="module")
def baseline(world, tmp_path_factory):
    return run(world, tmp_path_factory.mktemp("baseline") / "run")


def copied(world: Path, tmp_path: Path) -> Path:
    """The same world in another place: tokenizer, checkpoint and prompts to change one of."""
    shutil.copytree(world, tmp_path / "world")
    return tmp_path / "world"


# --- what is planted ---


def other_prompt(world: Path) -> None:
    """One question is another one: its name changes with its content, as names of real sets do."""
    import dataclasses

    prompts = PromptSet.load(world / "prompts.json")
    changed = [dataclasses.replace(p, prompt_id=f"{p.prompt_id}-edited") if i < 8 else p for i, p in enumerate(prompts)]
    PromptSet(changed, tokenizer_hash=prompts.tokenizer_hash).save(world / "prompts")


def other_template(world: Path) -> None:
    """Every prompt ends otherwise, under the name it had."""
    import dataclasses

    prompts = PromptSet.load(world / "prompts.json")
    changed = [dataclasses.replace(p, token_ids=(*p.token_ids, p.token_ids[0])) for p in prompts]
    PromptSet(changed, tokenizer_hash=prompts.tokenizer_hash).save(world / "prompts")


def other_tensor(world: Path) -> None:
    config, state = load_config(world / "model"), load_state(world / "model")
    state["model.layers.1.self_attn.o_proj.weight"] = state["model.layers.1.self_attn.o_proj.weight"] * 1.01
    save_checkpoint(world / "changed", config, state)
    for path in (world / "changed").glob("*.safetensors"):
        shutil.copy(path, world / "model" / path.name)


def other_structure(world: Path) -> None:
    path = world / "model" / "config.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "routed_scaling_factor": document["routed_scaling_factor"] * 1.5}))


@contextlib.contextmanager
def stale_weights():
    """The engine never gets the trainer's weights after the first time."""
    from alignment.backends.golden_rollout import GoldenRollout

    right, calls = GoldenRollout.update_weights, []

    def wrong(self, stream, **arguments):
        calls.append(1)
        if len(calls) == 1:
            return right(self, stream, **arguments)
        kept = {name: tensor.clone() for name, tensor in self.first.items()}
        for _ in stream:
            pass
        return right(self, iter(kept.items()), **arguments)

    def first(self, stream, **arguments):
        held = [(name, tensor.clone()) for name, tensor in stream]
        if not hasattr(self, "first"):
            self.first = dict(held)
        return wrong(self, iter(held), **arguments)

    with mock.patch.object(GoldenRollout, "update_weights", first):
        yield


@contextlib.contextmanager
def garbage():
    """What the engine says is near uniform, as with dummy weights that were never replaced."""
    from alignment.backends.golden_rollout import GoldenRollout

    right = GoldenRollout.update_weights

    def wrong(self, stream, **arguments):
        right(self, stream, **arguments)
        head = dict(self.named_parameters())["lm_head.weight"]
        head.zero_()

    with mock.patch.object(GoldenRollout, "update_weights", wrong):
        yield


@contextlib.contextmanager
def scale_of_the_value_width():
    """The trainer's attention is scaled by another width than the engine's."""
    from alignment.backends.golden_training import GoldenTrainingEngine
    from alignment.models import attention

    right, training = attention.scaled_dot_product, []

    def wrong(query, key, value, *, scale, mask):
        return right(query, key, value, scale=scale * 1.2 if training else scale, mask=mask)

    def within(method):
        def called(self, *arguments, **keywords):
            training.append(True)
            try:
                return method(self, *arguments, **keywords)
            finally:
                training.pop()

        return called

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(attention, "scaled_dot_product", wrong))
        for name in ("forward", "update"):
            stack.enter_context(
                mock.patch.object(GoldenTrainingEngine, name, within(getattr(GoldenTrainingEngine, name)))
            )
        yield


@contextlib.contextmanager
def no_bias_correction():
    """AdamW divides by nothing: every step is another one than the baseline's."""
    from alignment.backends import golden_training

    right = golden_training.adamw_step

    def wrong(*arguments, step, **keywords):
        return right(*arguments, step=10_000, **keywords)

    with mock.patch.object(golden_training, "adamw_step", wrong):
        yield


@contextlib.contextmanager
def lenient_scorer():
    """Whatever was said is right."""
    from alignment.rl import stages
    from alignment.rl.scoring import Score

    def wrong(sources, texts, truths, **keywords):
        return [Score(score=1.0, acc=1.0, credit=1.0) for _ in texts]

    with mock.patch.object(stages, "score_responses", wrong):
        yield


@contextlib.contextmanager
def strict_extraction():
    """The answer is looked for behind its first character."""
    from alignment.rl import stages

    right = stages.score_responses

    def wrong(sources, texts, truths, **keywords):
        return right(sources, [text[1:] for text in texts], truths, **keywords)

    with mock.patch.object(stages, "score_responses", wrong):
        yield


PLANTED = {
    "learning rate": (HYPER, "actor_rollout_ref.actor.optim.lr", {"actor_rollout_ref__actor__optim__lr": 2e-3}, None, None),
    "temperature": (HYPER, "actor_rollout_ref.rollout.temperature", {"actor_rollout_ref__rollout__temperature": 0.7}, None, None),
    "other prompts": (DATA, "prompts", {}, other_prompt, None),
    "chat template": (DATA, "tokenizer or chat template", {}, other_template, None),
    "softmax scale": (SOFTWARE, "old_log_prob computes differently", {}, None, scale_of_the_value_width),
    "optimizer": (SOFTWARE, "computes differently", {}, None, no_bias_correction),
    "tensor": (MODEL, "other first weights", {}, other_tensor, None),
    "structure": (MODEL, "model configuration: routed_scaling_factor", {}, other_structure, None),
    "stale weights": (MODEL, "weight sync", {}, None, stale_weights),
    "garbled": (MODEL, "garbled rollout", {}, None, garbage),
    "lenient scorer": (SCORING, "one text, two scores", {}, None, lenient_scorer),
    "strict extraction": (SCORING, "one text, two scores", {}, None, strict_extraction),
}  # fmt: skip


COMPARE, SYNC = "alignment compare ", "alignment run --only weight_sync "
NEXT = {
    "learning rate": "run again with actor_rollout_ref.actor.optim.lr=0.001",
    "temperature": "run again with actor_rollout_ref.rollout.temperature=1.0",
    "other prompts": "run again with 'data.train_files=[",
    "chat template": "run again with 'data.train_files=[",
    "softmax scale": COMPARE,
    "optimizer": COMPARE,
    "tensor": "run again with actor_rollout_ref.model.path=",
    "structure": "run again with actor_rollout_ref.model.path=",
    "stale weights": SYNC,
    "garbled": SYNC,
    "lenient scorer": COMPARE,
    "strict extraction": COMPARE,
}
"""How the first command after each begins: that of the axis that was convicted."""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_first(world, baseline, tmp_path, name):
    axis, cause, changes, prepare, fault = PLANTED[name]
    place = world
    if prepare:
        place = copied(world, tmp_path)
        prepare(place)
    found = triage(run(place, tmp_path / "run", fault=fault, **changes), baseline)
    assert found.exit_code == 1
    assert found.causes, [str(report) for report in found.axes]
    first = found.causes[0]
    assert (first.axis, cause in first.cause) == (axis, True), first
    assert found.next_commands[0].startswith(NEXT[name])
    assert found.open_commands[0].startswith("alignment stress"), "nobody has stressed the cards"


def test_an_aligned_run_has_no_cause(world, baseline, tmp_path):
    found = triage(run(world, tmp_path / "run"), baseline)
    assert (found.causes, found.modes, found.first, found.exit_code) == ((), (), None, 0)
    shown = CliRunner().invoke(app, ["triage", str(tmp_path / "run"), str(baseline), "--json"])
    assert shown.exit_code == 0, shown.output
    assert [axis["outcome"] for axis in json.loads(shown.output)["axes"]] == [
        "pass", "pass", "unavailable", "pass", "pass", "pass"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "workers, fault, card",
    [(3, "second_card", "/cpu/1"), (1, "lone_card", "/cpu/0")],
    ids=["between cards", "over time"],
)
def test_a_bad_card_is_named_first(world, baseline, tmp_path, workers, fault, card):
    directory = run(world, tmp_path / "run")
    told = CliRunner().invoke(
        app,
        [
            "stress",
            "--device",
            "cpu",
            "--workers",
            str(workers),
            "--json",
            "--fault",
            f"{stress_faults.__file__}:{fault}",
        ],
    )
    (directory / "stress.json").write_text(told.stdout)
    found = triage(directory, baseline)
    assert found.causes[0].axis == HARDWARE and card in found.causes[0].cause
    assert found.next_commands and not any(c.startswith("alignment stress") for c in found.open_commands)


def test_a_known_bad_version_is_named_with_its_repair(world, baseline, tmp_path):
    """A stack with the release that fault A was found in; the baseline's has a later one."""
    directory = run(world, tmp_path / "run")
    good = shutil.copytree(baseline, tmp_path / "good")
    for folder, ascend in ((directory, "0.10.0rc1"), (good, "0.30.0")):
        text = f"schema: 1\nname: planted\ncomponents:\n  vllm-ascend: '{ascend}'\n  verl: '0.7.0.dev0'\n"
        (folder / "stack.yaml").write_text(text)
    found = triage(directory, good)
    (known,) = [entry for entry in load_known_bad() if entry.id == "vllm-ascend-stale-absorbed-weights"]
    assert [(cause.axis, cause.cause) for cause in found.causes] == [(SOFTWARE, known.title)]
    assert known.repair in found.causes[0].evidence
    software = found.axes[AXES.index(SOFTWARE)]
    assert any(remark.startswith("vllm-ascend:") for remark in software.remarks)
    assert "alignment bisect run --good" in software.next_command


def test_runs_that_cannot_be_compared_are_no_pass(world, baseline, tmp_path):
    """No step, no configuration, no hash in common: the answer is that nothing was shown."""
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"device": "cpu"}))
        (folder / "metrics.jsonl").write_text(json.dumps({"step": {"a": 1, "b": 2}[name], "actor/loss": 0.5}) + "\n")
    found = triage(tmp_path / "a", tmp_path / "b")
    assert {axis.outcome.value for axis in found.axes} == {"unavailable"}
    assert found.exit_code == 2


def test_one_stack_alone_shows_nothing(world, baseline, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "run.json").write_text(json.dumps({"device": "cpu"}))
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 99, "actor/loss": 0.5}) + "\n")
    (directory / "stack.yaml").write_text("schema: 1\nname: alone\ncomponents:\n  torch: '2.13.0'\n")
    software = triage(directory, baseline).axes[AXES.index(SOFTWARE)]
    assert software.outcome.value == "unavailable"


def test_wrong_scores_on_both_sides_are_no_pass(world, tmp_path):
    one, other = (run(world, tmp_path / name, fault=lenient_scorer) for name in ("a", "b"))
    found = triage(one, other)
    assert {cause.cause for cause in found.causes} == {"scores that the scorer does not give"}
    assert "every recorded score" not in found.axes[AXES.index(SCORING)].reason


def test_the_command_shows_the_cause_and_exits_1(world, baseline, tmp_path):
    directory = run(world, tmp_path / "run", actor_rollout_ref__actor__optim__lr=2e-3)
    shown = CliRunner().invoke(app, ["triage", str(directory), str(baseline)])
    assert shown.exit_code == 1
    assert "1. hyper-parameters: actor_rollout_ref.actor.optim.lr: 0.001 → 0.002" in shown.output
    told = [line for line in shown.output.splitlines() if line.startswith(("next: ", "still to run: "))]
    assert told[0] == "next: run again with actor_rollout_ref.actor.optim.lr=0.001"
    assert told[1].startswith("still to run: alignment stress --json > RUN/stress.json")


def test_without_a_cause_every_axis_says_what_to_run_next(world, baseline, tmp_path):
    found = triage(run(world, tmp_path / "run"), baseline)
    assert found.next_commands[0].startswith("alignment stress --json") and found.open_commands == ()
    assert found.to_dict()["next_commands"] == list(found.next_commands)


# --- what is asked around the questions ---

SHOWN = [
    Question(data_source="reasoning_gym/gcd", question=f"{a} + 1 =", answer=str(a + 1), metadata={}) for a in range(3)
]
RECIPE = {"few_shot": SHOWN[:2], "instruction": "0 + 0 ="}


@pytest.fixture(scope="module")
def asked(world, tmp_path_factory):
    """A run whose prompts have an instruction and two examples."""
    pytest.importorskip("pyarrow")
    place = tmp_path_factory.mktemp("asked")
    return run(world, place / "run", **dapo_world.asked_in_chat(world, place, **RECIPE))


def other_way_of_writing(world: Path) -> None:
    path = world / "model" / "tokenizer_config.json"
    document = json.loads(path.read_text())
    document["chat_template"] = document["chat_template"].replace("{{ bos_token }}", "{{ bos_token }}{{ bos_token }}")
    path.write_text(json.dumps(document))


FEW_SHOT = "the few-shot examples of the prompts"


@pytest.mark.parametrize(
    "recipe, axis, cause, evidence",
    [
        ({"few_shot": SHOWN}, SCORING, FEW_SHOT, "2 examples → 3, number 3: none → '2 + 1 = → 3'"),
        ({"few_shot": SHOWN[1:]}, SCORING, FEW_SHOT, "2 examples → 2, number 1: '0 + 1 = → 1' → '1 + 1 = → 2'"),
        ({"few_shot": ()}, SCORING, FEW_SHOT, "2 examples → 0, number 1: '0 + 1 = → 1' → none"),
        ({"instruction": ""}, SCORING, "the instruction of the prompts", "'0 + 0 =' → none"),
        ({}, DATA, "one prompt is written in two ways: chat template", "token 1: "),
    ],
    ids=["one more", "others", "none", "instruction", "template"],
)
def test_the_part_of_a_prompt_that_differs_is_named(world, asked, tmp_path, recipe, axis, cause, evidence):
    place = world
    if not recipe:
        place = copied(world, tmp_path)
        other_way_of_writing(place)
    changes = dapo_world.asked_in_chat(place, tmp_path, **{**RECIPE, **recipe})
    found = triage(run(place, tmp_path / "run", **changes), asked)
    first = found.causes[0]
    assert (first.axis, first.cause) == (axis, cause), found.causes
    assert first.evidence.startswith("batch 1, prompt gcd-") and evidence in first.evidence
    assert found.next_commands[0].startswith("run again with 'data.train_files=[")


def test_equal_prompts_in_chat_are_no_cause(world, asked, tmp_path):
    found = triage(run(world, tmp_path / "run", **dapo_world.asked_in_chat(world, tmp_path, **RECIPE)), asked)
    assert (found.causes, found.exit_code) == ((), 0)
