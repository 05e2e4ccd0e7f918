"""What a page shows of an audit: how many defects are caught, what cried wolf, and which check catches which fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alignment.report.answer import mapping, rows

COMMAND = "audit --json"


def audit_part(found: Any, source: Path | str) -> dict[str, Any]:
    """``found`` as ``alignment audit --json`` prints it; the matrix by name of its columns.

    Raises:
        InputError: it is something else.
    """
    found = mapping(found, source, {"matrix": list}, COMMAND)
    matrix = rows(found["matrix"], source, {"fault": str, "caught": bool}, COMMAND)
    columns = list(dict.fromkeys(key for row in matrix for key in row if not isinstance(row[key], (dict, list))))
    missed = sum(not row["caught"] for row in matrix)
    alarms, wrong = (len(found[key]) if isinstance(found.get(key), list) else 0 for key in ("alarms", "clean"))
    passes = not (missed or alarms or wrong)
    told = [f"{len(matrix) - missed} of {len(matrix)} defects caught", f"{alarms} false alarms"]
    told += [f"{wrong} findings without a fault"] if wrong else []
    return {
        "headline": f"{'PASSED' if passes else 'NOT PASSED'}: {', '.join(told)}",
        "outcome": "pass" if passes else "fail",
        "totals": {key: found[key] for key in found if isinstance(found[key], (int, float, str))},
        "columns": columns,
        "rows": [[row.get(column, "") for column in columns] for row in matrix],
    }
