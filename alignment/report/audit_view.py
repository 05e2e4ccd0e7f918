"""The audit on a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from alignment.faults.audit import UNDECLARED, Audit
from alignment.faults.fault import Fault

if TYPE_CHECKING:
    from rich.console import Console

BEGIN, END = "<!-- audit table: scripts/update_audit_table.py -->", "<!-- end of audit table -->"


def print_catalogue(console: Console, faults: Sequence[Fault]) -> None:
    """One line per fault."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("fault", "category", "layer", "what", box=None, pad_edge=False, header_style="bold")
    for fault in faults:
        table.add_row(fault.id, "benign" if fault.benign else fault.category, fault.layer, escape(fault.title))
    console.print(table)


def print_audit(console: Console, audit: Audit) -> None:
    """The matrix, what was missed, false alarms, and totals."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        "fault", "caught by", "layer", "stage", "placed at", "s", box=None, pad_edge=False, header_style="bold"
    )
    for row in audit.rows:
        place = escape(row.place)
        if row.caught and not row.placed:
            place += " (no culprit declared)" if row.culprit == UNDECLARED else f" (not {escape(row.culprit)})"
        layer = row.layer if row.by_cheapest_layer or not row.caught else f"{row.layer} (not {row.expected_layer})"
        table.add_row(row.fault, row.check or "MISSED", layer, row.stage, place, f"{row.seconds:.2f}")
    console.print(table)
    for finding in audit.clean:
        _say(console, f"WITHOUT A FAULT  {finding.check}: {finding}")
    for alarm in audit.alarms:
        _say(console, f"FALSE ALARM  {alarm.fault}, seed {alarm.seed}: {alarm.finding}")
    if audit.ablated:
        _say(console, "only this check catches:")
        reasons = {check.name: check.kept_because for check in audit.checks}
        for name, faults in audit.only_catch().items():
            _say(console, f"  {name}: {', '.join(faults) or f'nothing; kept because {reasons[name]}'}")
    _say(
        console,
        f"{audit.caught} of {len(audit.rows)} defects caught, {audit.placed} placed right, "
        f"{audit.by_cheapest_layer} by the cheapest layer; "
        f"{len(audit.alarms)} false alarms in {audit.benign_runs} benign runs; {audit.seconds:.1f} s",
    )


def markdown_table(audit: dict[str, Any]) -> str:
    """The summary of an audit (:meth:`Audit.to_dict`) by category, without anything that depends on the machine."""
    lines = [
        "| category | defects | caught | placed right | by the cheapest layer | caught by |",
        "|---|---|---|---|---|---|",
    ]
    by_category: dict[str, list[dict[str, Any]]] = {}
    for row in audit["matrix"]:
        by_category.setdefault(row["category"], []).append(row)
    for category, rows in by_category.items():
        layers = {
            layer: sum(row["layer"] == layer for row in rows) for layer in dict.fromkeys(r["layer"] for r in rows)
        }
        told = ", ".join(
            f"{layer} {count}" for layer, count in sorted(layers.items(), key=lambda pair: -pair[1]) if layer
        )
        lines.append(f"| {category} | {_counts(rows)} | {told} |")
    lines.append(f"| **all** | {_counts(audit['matrix'])} | |")
    alarms = f"{audit['false_alarms']} false alarms in {audit['benign_runs']} runs of benign differences"
    return "\n".join([*lines, "", f"{alarms}.", ""])


def _counts(rows: Sequence[dict[str, Any]]) -> str:
    counts = (len(rows), *(sum(row[key] for row in rows) for key in ("caught", "placed", "by_cheapest_layer")))
    return " | ".join(map(str, counts))


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
