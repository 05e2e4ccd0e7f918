"""Every command prints one JSON document where a machine asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import date, timedelta

import click
import typer
from typer.testing import CliRunner

from alignment.cli import app
from alignment.files import write_json
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.numerics.verdict import Outcome, Verdict
from alignment.report.history import History
from alignment.report.run_directory import PROVENANCE, write_verdicts
from alignment.weights.checkpoint import save_checkpoint

EXCEPTIONS: dict[str, str] = {}
"""Commands without ``--json`` and the reason; there are none."""


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its words."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    for name, below in command.commands.items():
        yield from leaves(below, (*path, name))


def without_json(program: typer.Typer) -> list[str]:
    found = leaves(typer.main.get_command(program))
    return [name for name, command in found if not any("--json" in option.opts for option in command.params)]


def test_every_command_takes_json():
    names = [name for name, _ in leaves(typer.main.get_command(app))]
    assert {"run", "triage", "history decide", "checkpoint cut"} <= set(names)
    assert without_json(app) == sorted(EXCEPTIONS)


def test_a_command_without_it_is_named():
    bare, group = typer.Typer(), typer.Typer()
    group.command("silent")(lambda: None)
    group.command("other")(lambda: None)
    bare.add_typer(group, name="group")
    assert without_json(bare) == ["group silent", "group other"]


def told(*arguments: object):
    """The one document a command prints with ``--json``."""
    shown = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def test_a_cut_says_what_it_kept(tmp_path):
    config = preset("tiny-moonlight")
    model = CausalLM(config)
    model.init_weights(seed=0)
    save_checkpoint(tmp_path / "large", config, model.state_dict())
    document = told("checkpoint", "cut", tmp_path / "large", tmp_path / "small", "--layers", "0,1")
    assert document == {
        "target": str(tmp_path / "small"), "source": str(tmp_path / "large"), "layers": [0, 1], "keep_mtp": False,
    }  # fmt: skip
    assert (tmp_path / "small" / "config.json").is_file()


def test_a_persons_word_is_told_back(tmp_path):
    night = tmp_path / "night-1"
    passed = Verdict(
        check="unit/rope", layer="unit", stage="operator", subject="torch", device="cpu",
        outcome=Outcome.PASS, reason="within its budget",
    )  # fmt: skip
    write_verdicts(night, [passed])
    write_json(night / PROVENANCE, {"date": "2026-11-01T02:00:00+00:00", "commit": "c0ffee", "fingerprint": {}})
    history = tmp_path / "history.sqlite"
    name = History(history).add(night).name
    document = told("history", "decide", name, "--reject", "--reason", "a hot node", "--history", history)
    assert document == {"name": name, "decision": "rejected", "reason": "a hot node"}
    last = (date.today() + timedelta(days=3)).isoformat()
    document = told(
        "history", "quarantine", "unit/rope", "--until", last, "--reason", "driver bug 12, Wei", "--history", history
    )
    assert document == {"check": "unit/rope", "until": last, "reason": "driver bug 12, Wei"}


def test_a_baseline_is_shown_as_the_same_document_either_way():
    document = told("baseline", "show", "dapo-tiny.curves")
    plain = CliRunner().invoke(app, ["baseline", "show", "dapo-tiny.curves"])
    assert document == json.loads(plain.stdout) and document[0]["preset"] == "dapo-tiny"


def test_a_distributed_checkpoint_says_who_wrote_it(tmp_path, monkeypatch):
    from alignment.rl import megatron_policy

    monkeypatch.setattr(megatron_policy, "write_dist_checkpoint", lambda *given, **options: "0.0.0")
    source, target = str(tmp_path / "hf"), str(tmp_path / "dist")
    document = told("checkpoint", "to-dist", source, target, "--dtype", "bfloat16")
    assert document == {"target": target, "source": source, "dtype": "bfloat16", "megatron_core": "0.0.0"}
