"""Find the version, release or commit that turned a result from good to bad, across a whole software stack."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Optional

import typer

from alignment.cli.options import JsonOption, console_on, say
from alignment.errors import InputError
from alignment.numerics.verdict import ALIGNED

bisect_app = typer.Typer(no_args_is_help=True, help=__doc__)

StateOption = Annotated[Path, typer.Option("--state", help="Folder of the bisection.")]
CACHE = Path("~/.cache/alignment/bisect")


@bisect_app.command("run")
def run(
    good: Annotated[
        Optional[str], typer.Option(help="Stack file of the good end (YAML, TOML or shipped:NAME).")
    ] = None,
    bad: Annotated[Optional[str], typer.Option(help="Stack file of the bad end.")] = None,
    probe: Annotated[
        Optional[list[str]],
        typer.Option(
            help="A test of the suite, an alignment command or a shell command; of several the cheapest that will do."
        ),
    ] = None,
    stacks: Annotated[Optional[Path], typer.Option(help="Folder of dated stack files.")] = None,
    state: Annotated[
        Optional[Path], typer.Option(help="Folder of the bisection; the same one goes on with it.")
    ] = None,
    provider: Annotated[Optional[str], typer.Option(help="venv, git, container or command.")] = None,
    base: Annotated[Optional[Path], typer.Option(help="Python whose packages every environment shares.")] = None,
    extra: Annotated[Optional[list[str]], typer.Option(help="A further requirement of every environment.")] = None,
    activate: Annotated[Optional[str], typer.Option(help="Shell text that enters a stack (provider command).")] = None,
    engine: Annotated[str, typer.Option(help="docker, podman or k8s (provider container).")] = "docker",
    npus: Annotated[Optional[str], typer.Option(help="NPUs for containers: 0,1,2,3")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use the cache of uv only.")] = False,
    dependencies: Annotated[
        bool, typer.Option("--dependencies", help="Install what the packages depend on too.")
    ] = False,
    constraints: Annotated[
        Optional[list[str]], typer.Option(help="Rule files after the shipped ones; `none` drops those before it.")
    ] = None,
    releases: Annotated[
        Optional[list[str]], typer.Option(metavar="COMPONENT=V,V", help="Candidates of a component.")
    ] = None,
    repository: Annotated[
        Optional[list[str]], typer.Option(metavar="COMPONENT=PATH", help="Local clone of a component.")
    ] = None,
    prereleases: Annotated[bool, typer.Option("--prereleases", help="Candidates include pre-releases.")] = False,
    parallel: Annotated[int, typer.Option(min=1, help="Probes at the same time.")] = 1,
    ray: Annotated[Optional[str], typer.Option(help="Address of a Ray cluster whose nodes probe (auto).")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one probe.")] = 3600.0,
    by_value: Annotated[
        bool, typer.Option("--by-value", help="Judge by the probe's value, not by its verdict.")
    ] = False,
    check: Annotated[Optional[str], typer.Option(help="The check to follow, where the probe has several.")] = None,
    end_runs: Annotated[int, typer.Option(min=1, help="Runs of each end.")] = 2,
    noisy_end_runs: Annotated[int, typer.Option(min=5, help="Runs of each end that proved noisy.")] = 20,
    recheck: Annotated[bool, typer.Option(help="Measure the two sides of the step again.")] = True,
    data: Annotated[
        Optional[list[Path]], typer.Option(help="Files the probe reads; a change makes new probes.")
    ] = None,
    suite: Annotated[Optional[Path], typer.Option(help="Another suite than this one.")] = None,
    cache: Annotated[Path, typer.Option(help="Where environments are kept.")] = CACHE,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and the bound; build and measure nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bisect. Killed or interrupted, the same command (or --state alone) goes on where it was."""
    from alignment.bisect.bisection import carry_out, make_plan
    from alignment.bisect.outcomes import BisectError, Ending

    given = dict(locals())
    console = console_on(True)
    try:
        settings = None
        if bad is not None or good is not None or probe:
            settings = _settings(SimpleNamespace(**given))
        elif state is None:
            raise InputError(
                "nothing to bisect",
                where="bisect run",
                expected="--good, --bad and --probe, or --state of one begun before",
            )
        if dry_run:
            if settings is None:
                raise InputError("a plan needs its ends", where="--dry-run", expected="--good, --bad and --probe")
            plan = make_plan(settings)
            if as_json:
                print(json.dumps({"bound": plan.bound, "search": plan.search, "plan": plan.lines()}, indent=1))
            else:
                print("\n".join(plan.lines()))
            raise typer.Exit(ALIGNED)
        from alignment.bisect.frozen_suite import ROOT
        from alignment.report.progress import tasks

        directory = state or Path("runs") / f"bisect-{settings.digest[:8]}"
        say(console, f"state: {directory}; killed or interrupted, go on with: alignment bisect run --state {directory}")
        with tasks(console, "bisect", quiet=as_json) as progress:

            def tell(line: str) -> None:
                say(console, line)
                progress(line)

            answer = carry_out(
                directory, settings, cache=cache.expanduser(), suite_source=suite or ROOT, ray_address=ray, say=tell
            )
    except BisectError as error:
        _fail(error, int(error.ending), as_json)
    except KeyboardInterrupt:
        _fail(InputError("interrupted", next_step="the same command goes on"), int(Ending.ABORTED), as_json)
    print(json.dumps(answer, indent=1) if as_json else answer["words"])
    if not as_json:
        print(f"the page: {directory / 'report.html'}")
    raise typer.Exit(answer["exit_code"])


def _fail(error: Exception, code: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": str(error), "exit_code": code}))
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(code)


def _settings(given: SimpleNamespace):
    """The options of ``run`` as the settings of a bisection."""
    from alignment.bisect.bisection import order_stacks
    from alignment.bisect.components import find_component
    from alignment.bisect.constraints import load_constraints
    from alignment.bisect.frozen_suite import ROOT
    from alignment.bisect.probe import parse_probe
    from alignment.bisect.providers.choice import KINDS, kind_for
    from alignment.bisect.runner import Settings
    from alignment.bisect.stack import load_stack, load_stacks

    if given.bad is None:
        raise InputError("no bad end is given", where="--bad", expected="a stack file")
    if not given.probe:
        raise InputError(
            "no probe is given", where="--probe", expected="a test, an alignment command or a shell command"
        )
    bad_stack = load_stack(given.bad)
    good_stack = load_stack(given.good) if given.good is not None else None
    line = order_stacks(good_stack, bad_stack, load_stacks(given.stacks) if given.stacks else [])
    defined = {n: c for s in line for n, c in s.defined.items()}
    kind = given.provider or ("command" if given.activate else "git" if given.repository else kind_for(line))
    if kind not in KINDS:
        raise InputError("there is no such provider", where="--provider", expected=", ".join(KINDS), found=kind)
    details = {
        "venv": {
            "base": str((given.base or Path(sys.executable)).absolute()),
            "extra": given.extra or [],
            "offline": given.offline,
            "dependencies": given.dependencies,
        },
        "container": {"engine": given.engine, "npus": _numbers(given.npus), "python": str(given.base or "python3")},
        "command": {"activation": given.activate, "python": str(given.base or "python3")},
    }
    details["git"] = details["venv"]
    return Settings(
        stacks=line,
        good_known=good_stack is not None,
        probes=tuple(
            parse_probe(
                text, suite=given.suite or ROOT, by_value=given.by_value, timeout=given.timeout, check=given.check
            )
            for text in given.probe
        ),
        rules=load_constraints(["shipped", *(given.constraints or [])], defined=defined).rules,
        releases={
            find_component(n, defined, where="--releases").name: v.split(",")
            for n, v in _pairs(given.releases, "--releases")
        },
        repositories={
            find_component(n, defined, where="--repository").name: str(Path(v).expanduser().resolve())
            for n, v in _pairs(given.repository, "--repository")
        },
        prereleases=given.prereleases,
        parallel=given.parallel,
        end_runs=given.end_runs,
        noisy_end_runs=given.noisy_end_runs,
        recheck=given.recheck,
        provider={"kind": kind, **details[kind]},
        data=tuple(str(p.absolute()) for p in given.data or ()),
    )


def _pairs(values: list[str] | None, where: str) -> list[tuple[str, str]]:
    pairs = []
    for value in values or ():
        name, sign, rest = value.partition("=")
        if not sign or not rest:
            raise InputError("not a pair", where=where, expected="COMPONENT=VALUE", found=value)
        pairs.append((name, rest))
    return pairs


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise InputError("NPUs are numbers", where="--npus", expected="0,1,2,3", found=text) from None


@bisect_app.command("freeze")
def freeze(
    output: Annotated[
        Optional[Path], typer.Option("--output", "-o", help="Stack file to write; printed otherwise.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the stack.")] = "",
    image: Annotated[str, typer.Option(help="Image it belongs to, by its digest (…@sha256:…).")] = "",
    also: Annotated[Optional[list[str]], typer.Option(help="A further distribution to pin.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the stack file of the running environment."""
    from alignment.bisect.freeze import freeze_stack
    from alignment.bisect.known_bad import known_bad_of
    from alignment.bisect.stack import save_stack, stack_text

    frozen = freeze_stack(name=name or (output.stem if output else ""), image=image, also=also or ())
    if output is not None:
        save_stack(frozen.stack, output)
    known = known_bad_of(frozen.stack)
    if as_json:
        found = {
            "stack": frozen.stack.to_data(),
            "warnings": list(frozen.warnings),
            "known_bad": [k.id for k in known],
        }
        print(json.dumps(found, indent=1))
        return
    if output is None:
        print(stack_text(frozen.stack), end="")
    for warning in frozen.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for entry in known:
        print(f"known bad: {entry.title}: {entry.repair} ({entry.source})", file=sys.stderr)


@bisect_app.command("status")
def show_status(state: StateOption, as_json: JsonOption = False) -> None:
    """How far a bisection is, and how long the rest should take."""
    from alignment.bisect.bisection import status

    found = status(state)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['good']} … {found['bad']}: {found['probe']}")
    print(f"probes: {', '.join(f'{n} {k}' for k, n in found['probes'].items()) or 'none yet'}; bound {found['bound']}")
    if found["answer"] or found["ended"]:
        print(found["answer"] or f"ended: {found['ended']}")
    else:
        print(f"now: {found['stage']}")
        if found["seconds_left"] is not None:
            print(f"at most {found['left_at_most']} more probes, about {found['seconds_left']} s")


@bisect_app.command("log")
def show_log(state: StateOption, as_json: JsonOption = False) -> None:
    """Every event of a bisection, in order."""
    from alignment.bisect.journal import Journal

    events = Journal(state, write=False).events
    if as_json:
        print(json.dumps(list(events), indent=1))
        return
    for event in events:
        if event["event"] == "probe":
            seen = event["observation"]
            told = " ".join(str(seen[k]) for k in ("value", "reason", "detail") if seen.get(k) is not None)
            print(f"{event['at']}  {event['purpose']:8} {seen['result']:14} {event['name']}  {told}")
        elif event["event"] in ("stage", "ended", "answer_found"):
            print(f"{event['at']}  {event.get('text') or event.get('error') or event['answer']['words']}")


@bisect_app.command("replay")
def replay_command(state: StateOption, as_json: JsonOption = False) -> None:
    """Derive the answer again from the recorded values alone; measures nothing."""
    from alignment.bisect.bisection import replay
    from alignment.bisect.outcomes import BisectError

    try:
        answer = replay(state)
    except BisectError as error:
        _fail(error, int(error.ending), as_json)
    print(json.dumps(answer, indent=1) if as_json else answer["words"])
    raise typer.Exit(answer["exit_code"])


@bisect_app.command("report")
def report(
    state: StateOption,
    output: Annotated[
        Optional[Path], typer.Option("--output", "-o", help="Where the page goes; report.html in the folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the page: the chain, each probe's value, the culprit, the proof, what remains unknown."""
    from alignment.bisect.journal import Journal
    from alignment.bisect.report import write_report

    path = write_report(Journal(state, write=False), output)
    print(json.dumps({"page": str(path)}) if as_json else path)


@bisect_app.command("probe")
def probe_here(
    probe: Annotated[str, typer.Argument(help="A test of the suite, an alignment command or a shell command.")],
    timeout: Annotated[float, typer.Option(min=1, help="Seconds.")] = 3600.0,
    check: Annotated[Optional[str], typer.Option(help="Bad only where this check fails.")] = None,
    retries: Annotated[int, typer.Option(min=0, help="Tries after an infrastructure failure.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Run a probe in this environment with the exit codes of `git bisect run`: 0 good, 1 bad, 125 skip, 128 stop."""
    import tempfile

    from alignment.bisect.frozen_suite import ROOT
    from alignment.bisect.observation import Result, Signature
    from alignment.bisect.probe import exit_code, parse_probe
    from alignment.bisect.providers.base import Environment
    from alignment.bisect.stack import Stack
    from alignment.report.progress import waiting

    asked = parse_probe(probe, suite=ROOT, timeout=timeout, check=check)
    here = Environment(stack=Stack(pins={}), python=sys.executable)
    with tempfile.TemporaryDirectory() as folder, waiting(console_on(True), f"probing {probe}", quiet=as_json):
        for _ in range(retries + 1):
            # A shell probe belongs to the tree it is called in, a test to the suite.
            suite = Path.cwd() if asked.kind == "shell" else ROOT
            seen = asked.run(here, suite=suite, scratch=Path(folder))
            if seen.result is not Result.INFRASTRUCTURE:
                break
    code = exit_code(seen, Signature(check=check) if check else None)
    if as_json:
        print(json.dumps({"exit_code": code, **seen.to_data()}, indent=1))
    else:
        reason = f" ({seen.reason}: {seen.detail})" if seen.reason else ""
        print(f"{seen.result.value}{reason}" + (f", {seen.value:.6g}" if seen.value is not None else ""))
    raise typer.Exit(code)
