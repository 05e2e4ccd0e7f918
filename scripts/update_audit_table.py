"""Runs the whole audit, keeps its result in docs/audit.json and writes its table into docs/faults.md and README.md.

python scripts/update_audit_table.py            # run the audit, then write
python scripts/update_audit_table.py --from-json # write what docs/audit.json holds
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from alignment.report.audit_view import BEGIN, END, markdown_table

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "docs" / "audit.json"
PAGES = (
    ROOT / "docs" / "faults.md",
    ROOT / "docs" / "faults.zh-CN.md",
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
)


def with_table(text: str, table: str) -> str:
    """``text`` with the table between its two marks; unchanged where it has none."""
    before, mark, rest = text.partition(BEGIN)
    if not mark:
        return text
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"there is no {END} behind {BEGIN}")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def stored_form(result: dict) -> dict:
    """What is kept: without times, which belong to a machine."""
    matrix = [
        {key: value for key, value in row.items() if key not in ("seconds", "evidence")} for row in result["matrix"]
    ]
    return {key: value for key, value in result.items() if key != "seconds"} | {"matrix": matrix}


def main() -> None:
    """See the module."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--from-json", action="store_true")
    arguments.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    arguments.add_argument("--seeds", type=int, default=20, help="per benign difference")
    given = arguments.parse_args()
    if not given.from_json:
        from alignment.faults.audit import audit
        from alignment.faults.catalogue import all_faults
        from alignment.faults.checks import all_checks

        result = audit(
            all_faults(),
            all_checks(),
            seeds=given.seeds,
            ablation=True,
            jobs=given.jobs,
            progress=lambda line: print(line, file=sys.stderr),
        )
        STORED.write_text(json.dumps(stored_form(result.to_dict()), indent=1) + "\n")
        print(
            f"{result.caught} of {len(result.rows)} caught, {len(result.alarms)} false alarms, {result.seconds:.0f} s"
        )
    table = markdown_table(json.loads(STORED.read_text()))
    for page in PAGES:
        page.write_text(with_table(page.read_text(), table))


if __name__ == "__main__":
    main()
