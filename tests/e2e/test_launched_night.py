"""The launcher of the nightly on a real Ray cluster of two nodes of this machine, one of which is lost on the way."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

ROOT = Path(__file__).resolve().parents[2]
MATRIX = """
version: 1
rows:
  - {name: two, chip: CPU, device: cpu, nodes: 2, phases: [doctor-nodes, files]}
phases:
  doctor-nodes: {command: [alignment, doctor, --json], where: every-node, timeout_minutes: 10}
  files: {command: [pytest, tests/unit/test_files.py, --junitxml, "{out}/junit.xml"], timeout_minutes: 10}
"""


def address() -> str:
    """That of this machine, as Ray finds it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 1))  # RFC 5737: nothing is sent
            return sock.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def descendants(process: int) -> list[int]:
    """A process and all below it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


@pytest.fixture
def cluster(tmp_path):
    """Starts the two launchers; whatever they left running is ended."""
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    environ = {
        **os.environ, "ALIGNMENT_RAY_PORT": str(port), "ALIGNMENT_HEAD": address(), "POD_IP": address(),
        "ALIGNMENT_NIGHT": "tonight", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = {}
    for role in ("worker", "head"):
        line = [sys.executable, "ci/launch.py", "--row", "two", "--store", str(tmp_path), "--role", role]
        line += ["--nodes", "2", "--matrix", str(tmp_path / "matrix.yaml"), "--patience", "300", "--goodbye", "10"]
        with open(tmp_path / f"{role}.log", "w") as log:
            started[role] = subprocess.Popen(line, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)
    yield tmp_path, started
    for process in started.values():
        for one in descendants(process.pid):
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def phase(folder, name):
    return json.loads((folder / "nights" / "two" / "tonight" / "night" / name / "phase.json").read_text())


def test_two_nodes_find_each_other_and_end_together(cluster):
    folder, started = cluster
    assert started["head"].wait(timeout=900) == 0, (folder / "head.log").read_text()[-3000:]
    assert started["worker"].wait(timeout=300) == 0
    about = json.loads((folder / "nights" / "two" / "tonight" / "launch.json").read_text())
    assert about["nodes"] == 2 and about["address"] == address() and about["call"] == "ignore"
    assert len(phase(folder, "doctor-nodes")["nodes"]) == 2
    assert not (folder / "nights" / "two" / "tonight" / "ray-token").exists()


def test_a_node_that_is_lost_is_the_environment_and_the_night_goes_on(cluster):
    folder, started = cluster
    while "doctor-nodes …" not in (folder / "head.log").read_text():
        assert started["head"].poll() is None, (folder / "head.log").read_text()[-3000:]
        time.sleep(0.2)
    for one in descendants(started["worker"].pid):
        os.kill(one, signal.SIGKILL)
    assert started["head"].wait(timeout=900) == 3
    lost = phase(folder, "doctor-nodes")
    assert (lost["outcome"], lost["stage"]) == ("error", "environment")
    # Gone before the phase reached it, or while it ran there.
    assert re.search("1 of 2 nodes are in the Ray cluster|the node was lost", lost["cause"])
    assert phase(folder, "files")["outcome"] == "pass"
    about = json.loads((folder / "nights" / "two" / "tonight" / "launch.json").read_text())
    assert about["call"] == "page"
