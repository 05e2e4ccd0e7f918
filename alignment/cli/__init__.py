"""Does an RL training stack compute on this device what it computes elsewhere? 0 aligned, 1 misaligned, 2 usage."""

from __future__ import annotations

import json
import sys
import traceback

import typer

from alignment.cli import (
    audit,
    baseline,
    bisect,
    checkpoint,
    checks,
    communication,
    compare,
    environment,
    experiments,
    gkd,
    history,
    memory,
    nightly,
    report,
    stress,
    training,
    triage,
    verl,
)
from alignment.errors import InputError
from alignment.numerics.verdict import USAGE

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
app.command("run")(checks.run)
app.command("dapo")(training.dapo)
app.command("gkd")(gkd.gkd)
app.command("rollout")(training.rollout)
app.command("read-verl")(verl.read_verl)
app.command("compare")(compare.compare)
app.command("compare-engines")(environment.compare_engines_command)
app.command("audit")(audit.audit)
app.command("replay")(experiments.replay)
app.command("ablate")(experiments.ablate)
app.command("report")(report.report)
app.command("triage")(triage.triage)
app.command("stress")(stress.stress)
app.command("communication")(communication.communication)
app.command("doctor")(environment.doctor)
app.add_typer(baseline.baseline_app, name="baseline")
app.add_typer(bisect.bisect_app, name="bisect")
app.add_typer(checkpoint.checkpoint_app, name="checkpoint")
app.add_typer(memory.memory_app, name="memory")
app.add_typer(history.history_app, name="history")
app.add_typer(nightly.nightly_app, name="nightly")


def main() -> None:
    """Entry point: every expected error becomes one message and exit code 2."""
    try:
        app()
    except InputError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": str(error)}))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE)
    except Exception:
        # Python's own exit code for this is 1, which here means misaligned.
        traceback.print_exc()
        sys.exit(USAGE)
