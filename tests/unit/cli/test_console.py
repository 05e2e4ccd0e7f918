"""What commands print with: a reader that stops reading stops nothing else."""

from __future__ import annotations

import subprocess
import sys


def test_a_reader_that_has_seen_enough_does_not_end_the_run(tmp_path):
    talks = (
        "from alignment.cli.options import console_on, say\n"
        "console = console_on(False)\n"
        "for _ in range(1000): say(console, 'line ' * 100)\n"
        "console.print('a table')\n"
        "print('and plain words')\n"
        "open('written', 'w').close()\n"
    )
    piped = f"{sys.executable} -c \"$TALKS\" | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {piped}"],
        cwd=tmp_path, env={"TALKS": talks, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("line line") and (tmp_path / "written").exists()
