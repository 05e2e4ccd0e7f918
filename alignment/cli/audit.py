"""Does the suite catch what it should? The catalogue of real defects against the checks."""

from __future__ import annotations

import json
import os
from typing import Annotated, Optional

import typer

from alignment.cli.options import HtmlOption, JsonOption, console_on, one_thread, say
from alignment.cli.report import leave_answer
from alignment.numerics.verdict import ALIGNED, MISALIGNED

FaultsArgument = Annotated[
    Optional[list[str]], typer.Option("--faults", "--fault", metavar="ID,…", help="Only these: ids, or PATH.PY:OBJECT.")
]
CategoryOption = Annotated[Optional[list[str]], typer.Option("--category", help="Only this category (repeatable).")]


def audit(
    faults: FaultsArgument = None,
    category: CategoryOption = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per benign difference.")] = 20,
    ablation: Annotated[
        bool, typer.Option(help="Every check against every fault: what only one check catches.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = min(2, os.cpu_count() or 1),
    list_faults: Annotated[bool, typer.Option("--list", help="Print the catalogue and stop.")] = False,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Inject every fault of the catalogue and say which check catches it, in which layer, and where it puts it."""
    from alignment.faults.audit import audit as run_audit
    from alignment.faults.audit import choose, faults_named
    from alignment.faults.catalogue import all_faults
    from alignment.faults.checks import all_checks
    from alignment.report.audit_view import print_audit, print_catalogue
    from alignment.report.progress import suite_progress

    named = [one for given in faults or () for one in given.split(",") if one]
    chosen = choose(faults_named(named) if named else all_faults(), category or ())
    console = console_on(as_json)
    if list_faults:
        if as_json:
            listed = [
                {"id": f.id, "category": f.category, "layer": f.layer, "benign": f.benign, "title": f.title}
                for f in chosen
            ]
            print(json.dumps(listed, indent=1))
        else:
            print_catalogue(console, chosen)
        return
    runs = 1 + sum(seeds if fault.benign else 1 for fault in chosen)
    with one_thread(), suite_progress(console_on(True), quiet=as_json) as progress:
        progress.begin("audit", runs)
        result = run_audit(chosen, all_checks(), seeds=seeds, ablation=ablation, jobs=jobs, progress=progress.advance)
    document = result.to_dict()
    page = leave_answer(html, f"audit of {len(chosen)} faults", audit=document)
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        print_audit(console, result)
        if page is not None:
            say(console, f"as a page: {page}")
    raise typer.Exit(ALIGNED if result.passes else MISALIGNED)
