"""A night on a Ray cluster of four nodes, and what must come of it when things break: never a green by accident.

The cluster is real (a raylet of its own per node), so are the phases; the faults come from outside: raylets are killed,
disks are full, files are damaged, the driver is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dapo_world
import pytest
import yaml

from alignment.report.history import History
from alignment.report.night import EXIT_CODES
from alignment.report.night_process import _descendants, _runs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
FAULTS = str(Path(__file__).with_name("night_faults.py"))
STEPS = 3
QUICK = {
    # The raylets are asked every half second, so that Ray notices a lost node within the test.
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}

LOOKS = 100
"""How often the processes of the nodes are looked through for the one to kill."""


@dataclass
class Disk:
    """A small disk, and the environment in which a process sees how small it is."""

    folder: Path
    env: dict[str, str]


@contextlib.contextmanager
def small_disk_in(root: Path, *, mounts: bool = True) -> Iterator[Disk]:
    """A file system of 64 KiB; where none may be mounted, writes that fail in the same way (``full_disk.c``)."""
    folder = root / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if mounts and shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            yield Disk(folder, {})
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    library, source = root / "full_disk.so", Path(__file__).with_name("full_disk.c")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    assert compiler, "neither may a disk be mounted here nor is there a compiler"
    build = [compiler, "-x", "c", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(build, check=True, capture_output=True)
    yield Disk(folder, {"LD_PRELOAD": str(library), "NIGHT_FULL": str(folder.resolve())})


class FourNodes:
    """A cluster of four raylets on this machine, the first of them with the head; the last sees the small disk."""

    def __init__(self, disk: Disk) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        node = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
        self._node = {**node, "env_vars": {"NIGHT_DISK": str(disk.folder.parent)}}
        # Ray keeps LD_PRELOAD from its workers; the command sets it for itself.
        env = {name.replace("LD_PRELOAD", "NIGHT_PRELOAD"): value for name, value in disk.env.items()}
        self._full = {**node, "env_vars": {"NIGHT_DISK": str(disk.folder), **env}}
        self.cluster = Cluster(initialize_head=True, head_node_args={**self._node, "_system_config": QUICK})
        self.mended()

    @property
    def address(self) -> str:
        return self.cluster.address

    def mended(self) -> None:
        """Four nodes again; the last has the full disk."""
        while len(self.cluster.worker_nodes) < 3:
            others = [node for node in self.cluster.worker_nodes if getattr(node, "has_full_disk", False)]
            node = self.cluster.add_node(**(self._node if others else self._full))
            node.has_full_disk = not others

    def kill(self, holding: str = "") -> None:
        """SIGKILL for everything of one node: one whose workers run ``holding``, where one is asked for."""
        nodes = list(self.cluster.worker_nodes)
        for _ in range(LOOKS):  # a worker writes its name anew with every call: one look may miss it
            holders = [node for node in nodes if any(holding in command for command in self._commands(node))]
            if holders:
                break
            time.sleep(0.05)
        assert holders, f"no node but the head runs {holding}: {[self._commands(node) for node in nodes]}"
        self.cluster.remove_node(holders[0], allow_graceful=False)

    def runs(self, holding: str) -> bool:
        return any(holding in c for node in list(self.cluster.worker_nodes) for c in self._commands(node))

    @staticmethod
    def _commands(node) -> list[str]:
        raylet = node.all_processes["raylet"][0].process.pid
        found = []
        for pid in _descendants(raylet):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found

    def shutdown(self) -> None:
        self.cluster.shutdown()


@dataclass
class Told:
    """A night as its driver ended it."""

    code: int
    folder: Path
    printed: dict
    errors: str

    @property
    def phases(self) -> dict[str, dict]:
        return {phase["name"]: phase for phase in self.printed["phases"]}

    def phase(self, name: str) -> tuple[str, str, str]:
        phase = self.phases[name]
        return phase["outcome"], phase["stage"], phase["cause"]


def write_matrix(path: Path, phases: dict, *, nodes: int = 4) -> Path:
    row = {"name": "chaos", "chip": "CPU", "device": "cpu", "nodes": nodes, "phases": list(phases)}
    codes = {0: "ignore", 1: "page", 2: "warn", 3: "page"}
    matrix = {"version": 1, "rows": [row], "phases": phases, "exit_codes": codes}
    path.write_text(yaml.safe_dump(matrix, sort_keys=False))
    return path


def begin(matrix: Path, out: Path, history: Path, *more: str, commit="c0ffee", env=None) -> subprocess.Popen:
    argv = ["nightly", "run", str(matrix), "--row", "chaos", "--out", str(out), "--history", str(history), "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "alignment", *argv, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A night is of one commit; that of this tree may change while the test runs.
        env={**os.environ, "ALIGNMENT_COMMIT": commit, **(env or {})},
    )  # fmt: skip


def end(process: subprocess.Popen, out: Path) -> Told:
    printed, errors = process.communicate(timeout=600)
    assert printed, errors
    told = Told(process.returncode, out, json.loads(printed), errors)
    assert "outcome" in told.printed, printed
    assert told.code == told.printed["exit_code"] == EXIT_CODES[told.printed["outcome"]], errors
    return told


def night(matrix: Path, out: Path, history: Path, *more: str, env=None) -> Told:
    return end(begin(matrix, out, history, *more, env=env), out)


def show(folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "alignment", "nightly", "show", str(folder)], capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    with small_disk_in(tmp_path_factory.mktemp("disks")) as disk:
        yield disk


@pytest.fixture(scope="module")
def four_nodes(small_disk):
    nodes = FourNodes(small_disk)
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def configuration(world, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("configuration") / "chaos.yaml"
    path.write_text(yaml.safe_dump(dapo_world.config(world).to_dict()))
    return path


@pytest.fixture(scope="module")
def phases(configuration, world, tmp_path_factory):
    """The phases of a whole night, small enough for a test."""
    golden = tmp_path_factory.mktemp("golden") / "run"
    dapo = ["alignment", "dapo", "--config", str(configuration), "--device", "cpu", "--run-dir"]
    captured = ["--executor", "inprocess", "capture.detail=statistics", "capture.step_end=1"]
    captured += ["trainer.total_training_steps=1"]
    subprocess.run([sys.executable, "-m", *dapo, str(golden), *captured], check=True, capture_output=True, timeout=300)
    tests, stress = "tests/unit/numerics/test_metrics.py", ["alignment", "stress", "--device", "cpu"]
    return {
        "doctor": {"command": ["alignment", "doctor", "--json"], "timeout_minutes": 5, "where": "every-node"},
        "checks": {
            "command": ["pytest", "-q", "-p", "no:cacheprovider", tests, "--junitxml", "{out}/junit.xml"],
            "timeout_minutes": 5,
        },
        "dapo": {
            "command": [*dapo, "{out}/run", "trainer.n_gpus_per_node=2"], "timeout_minutes": 5, "where": "cluster",
            "steps": STEPS,
        },
        "capture": {
            "command": [*dapo, "{out}/run", *captured], "timeout_minutes": 5,
            "leaves": {"training": ["run"], "capture": ["run/capture"]},
        },
        "compare": {
            "command": ["alignment", "compare", str(golden / "capture"), "{night}/capture/run/capture", "--json"],
            "timeout_minutes": 5,
        },
        "stress": {
            "command": [*stress, "--workers", 1, "--rounds", 1, "--ray", "{ray}", "--json"], "timeout_minutes": 5,
            "where": "cluster",
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def clean(four_nodes, phases, tmp_path_factory) -> Told:
    """A night in which nothing breaks."""
    root = tmp_path_factory.mktemp("clean")
    matrix = write_matrix(root / "m.yaml", phases)
    return night(matrix, root / "night", root / "history.sqlite", "--ray-address", four_nodes.address)


def test_a_clean_night_is_green_and_leaves_everything(clean):
    told = clean.printed
    assert (told["outcome"], clean.code, told["action"]) == ("pass", 0, "ignore"), told["line"]
    assert told["line"].startswith("ALIGNED  chaos  ") and "7 of 7 phases green" in told["line"]
    assert {name: phase["outcome"] for name, phase in clean.phases.items()} == dict.fromkeys(clean.phases, "pass")
    assert len(clean.phases["doctor"]["nodes"]) == 4 and clean.phases["checks"]["counts"]["tests"] > 0
    assert clean.phases["dapo"]["counts"] == {"steps": STEPS} and clean.phases["stress"]["counts"] == {"checks": 4}
    assert show(clean.folder)[0] == 0
    page = (clean.folder / "report.html").read_text()
    for link in ("checks/junit.xml", "dapo/run/metrics.jsonl", "night.json"):
        assert f'href="{link}"' in page and (clean.folder / link).is_file()
    (kept,) = History(clean.folder.parent / "history.sqlite").nights()
    assert kept.outcome == "pass" and kept.run.startswith("night@")


# Nodes.


class Chaos:
    """Kills one node in every phase of a night once that phase is under way, and brings another up."""

    SIGNS = {"doctor": "-m alignment doctor", "dapo": "ray::Rank", "stress": "ray::call"}

    def __init__(self, nodes: FourNodes, folder: Path, phases: list[str]) -> None:
        self.nodes, self.folder, self.phases = nodes, folder, phases

    def run(self, driver: subprocess.Popen) -> list[str]:
        """The phases that lost a node while ``driver`` ran."""
        killed = []
        for phase in self.phases:
            if self._under_way(phase, driver):
                self.nodes.kill(self.SIGNS.get(phase, ""))
                killed.append(phase)
                self.nodes.mended()
        return killed

    def _under_way(self, phase: str, driver: subprocess.Popen) -> bool:
        """Waits for the middle of a phase; False where it ended before."""
        folder = self.folder / phase
        while not (folder / "phase.json").exists() and driver.poll() is None:
            if phase == "dapo":
                metrics = folder / "run" / "metrics.jsonl"
                ready = metrics.is_file() and metrics.read_text().count("\n") > 1
            elif phase in self.SIGNS:
                ready = self.nodes.runs(self.SIGNS[phase])
            else:
                ready = (folder / "running.json").is_file()
            if ready:
                return True
            time.sleep(0.02)
        return False


def chaos(four_nodes, phases, tmp_path, names: list[str], more: dict | None = None) -> Told:
    """A night that loses a node in each of its phases, and then carries out those of ``more`` on whole nodes."""
    phases = {name: dict(phases[name]) for name in names} | (more or {})
    # Long enough that something is left to do when its node dies.
    phases["dapo"]["command"] = [*phases["dapo"]["command"], "trainer.total_training_steps=400"]
    del phases["dapo"]["steps"]
    four_nodes.mended()
    injector = Chaos(four_nodes, tmp_path / "night", names)
    process = begin(
        write_matrix(tmp_path / "m.yaml", phases), tmp_path / "night", tmp_path / "h.sqlite", "--ray-address",
        four_nodes.address,
    )  # fmt: skip
    killed = injector.run(process)
    told = end(process, tmp_path / "night")
    assert killed == names, told.printed["line"]
    return told


def printed_on_nodes(told: Told, phase: str) -> list[str]:
    """What the command of a phase printed on each node."""
    paths = [told.folder / phase / name / "stdout.txt" for name in told.phases[phase]["nodes"]]
    return [path.read_text() if path.is_file() else "" for path in paths]


def assert_every_phase_lost_a_node(told: Told, names: list[str], verdict=(3, "error", "page")) -> None:
    assert (told.code, told.printed["outcome"], told.printed["action"]) == verdict
    for name in names:
        outcome, stage, cause = told.phase(name)
        assert (outcome, stage) == ("error", "environment"), name
        (lost,) = told.phases[name]["lost_nodes"]
        assert f"the node was lost: {lost}" in cause, cause
    # What was finished is kept: the steps of the training, what the other nodes said, the page, the record.
    if "doctor" in names:
        assert sum(bool(text) for text in printed_on_nodes(told, "doctor")) >= 3
    assert (told.folder / "dapo" / "run" / "metrics.jsonl").read_text().count("\n") > 1
    assert "the node was lost" in (told.folder / "report.html").read_text()
    (kept,) = History(told.folder.parent / "h.sqlite").nights()
    assert kept.outcome == verdict[1] and not kept.counts


def test_a_node_killed_in_the_training_and_in_the_stress_is_named_and_never_green(four_nodes, phases, tmp_path):
    names = ["dapo", "stress"]
    assert_every_phase_lost_a_node(chaos(four_nodes, phases, tmp_path, names), names)


@pytest.mark.slow
def test_a_node_killed_in_every_phase_of_a_night_with_a_full_disk_and_damaged_evidence(
    four_nodes, phases, clean, tmp_path
):
    """One night with all of it: each is named in its phase, and what was found outweighs what could not be said."""
    run = clean.folder / "dapo" / "run"
    broken = {
        "full": quick(["fill", "NIGHT_DISK", "200000"], where="every-node"),
        "nan": damage("nan", "training", run),
        "truncated": damage("truncated", "capture", clean.folder / "capture" / "run" / "capture"),
    }
    told = chaos(four_nodes, phases, tmp_path, list(phases), broken)
    assert_every_phase_lost_a_node(told, list(phases), verdict=(1, "fail", "page"))
    assert told.printed["cause"].startswith("nan: new: nan/metrics are finite: actor/grad_norm is nan")
    assert told.phase("nan")[:2] == ("fail", "new")
    for name, words in {"full": "No space left on device", "truncated": ".safetensors"}.items():
        outcome, stage, cause = told.phase(name)
        assert (outcome, stage) == ("error", "environment") and words in cause, (name, cause)


def test_a_cluster_that_lacks_a_node_is_no_environment_for_a_night(four_nodes, tmp_path):
    four_nodes.mended()
    command = ["python", FAULTS, "fill", "{out}", "10"]
    leaves = {"document": "stdout.txt"}
    phases = {"store": {"command": command, "timeout_minutes": 5, "where": "every-node", "leaves": leaves}}
    matrix = write_matrix(tmp_path / "m.yaml", phases, nodes=5)
    told = night(matrix, tmp_path / "night", tmp_path / "h.sqlite", "--ray-address", four_nodes.address)
    assert told.phase("store") == ("error", "environment", "4 of 5 nodes are in the Ray cluster")
    assert told.code == 3 and len(list(tmp_path.glob("night/store/*/filled.json"))) == 4
    # A phase sees every card of its node, as it would without Ray.
    assert [json.loads(text)["cards"] for text in printed_on_nodes(told, "store")] == ["all"] * 4


# Disks and files.


def quick(command: list, **more) -> dict:
    return {"command": ["python", FAULTS, *command], "timeout_minutes": 5, "leaves": {"document": "stdout.txt"}, **more}


def damage(fault: str, kind: str, source: Path) -> dict:
    command = ["python", FAULTS, "damaged", str(source), "{out}/it", fault]
    return {"command": command, "timeout_minutes": 5, "leaves": {kind: ["it"]}}


def test_a_full_disk_of_one_node_is_named(four_nodes, small_disk, tmp_path):
    four_nodes.mended()
    phases = {"full": quick(["fill", "NIGHT_DISK", "200000"], where="every-node")}
    matrix = write_matrix(tmp_path / "m.yaml", phases)
    told = night(matrix, tmp_path / "night", tmp_path / "h.sqlite", "--ray-address", four_nodes.address)
    outcome, stage, cause = told.phase("full")
    assert (outcome, stage, told.code) == ("error", "environment", 3) and "No space left on device" in cause
    ended = {name: node["exit_code"] for name, node in told.phases["full"]["nodes"].items()}
    assert sorted(ended.values()) == [0, 0, 0, 1]
    (bad,) = [name for name, code in ended.items() if code == 1]
    assert cause.startswith(f"{bad}: ")
    for name in ended.keys() - {bad}:  # what the others said is kept
        assert json.loads((told.folder / "full" / name / "stdout.txt").read_text())["written"] == 200000


def test_damaged_evidence_is_found_and_named(clean, tmp_path):
    training, capture = clean.folder / "dapo" / "run", clean.folder / "capture" / "run" / "capture"

    phases = {
        **{fault: damage(fault, "training", training) for fault in ("none", "nan", "short", "empty", "unnamed")},
        "whole": damage("none", "capture", capture),
        "truncated": damage("truncated", "capture", capture),
    }
    told = night(write_matrix(tmp_path / "m.yaml", phases, nodes=1), tmp_path / "night", tmp_path / "h.sqlite")
    assert told.phase("none")[0] == told.phase("whole")[0] == "pass"
    outcome, stage, cause = told.phase("nan")
    assert (outcome, stage) == ("fail", "new") and f"actor/grad_norm is nan in step {STEPS}" in cause
    expected = {
        "short": f"{STEPS - 1} of {STEPS} steps: the run did not come to its end",
        "empty": "the metrics are empty",
        "unnamed": "the run does not say what made it",
        "truncated": ".safetensors",
    }
    for name, words in expected.items():
        outcome, stage, cause = told.phase(name)
        assert (outcome, stage) == ("error", "environment") and words in cause, (name, cause)
    # A failure outweighs the errors: what was found misaligned stays found.
    assert (told.code, told.printed["outcome"], told.printed["action"]) == (1, "fail", "page")
    assert told.printed["cause"].startswith("nan: new: nan/metrics are finite: actor/grad_norm is nan")


@pytest.mark.parametrize("mounts", [True, False], ids=["disk", "writes"])
def test_a_full_disk_costs_no_verdict(tmp_path, monkeypatch, mounts):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    first, after = quick(["fill", "{out}", "10"]), quick(["fill", "{out}", "9"])
    with small_disk_in(tmp_path, mounts=mounts) as disk:
        phases = {"first": first, "hog": quick(["hog", str(disk.folder)]), "after": after}
        matrix = write_matrix(tmp_path / "m.yaml", phases, nodes=1)
        told = night(matrix, disk.folder / "night", tmp_path / "h.sqlite", env=disk.env)
        assert (told.code, told.printed["outcome"]) == (3, "error")
        assert told.phase("first")[0] == "pass" and (disk.folder / "night" / "first" / "filled.json").is_file()
        for name in ("hog", "after"):
            outcome, stage, cause = told.phase(name)
            assert (outcome, stage) == ("error", "environment") and "No space left on device" in cause, cause
        # The verdict is where there was room, and the log says where.
        (elsewhere,) = tmp_path.glob("night-chaos-*.json")
        assert json.loads(elsewhere.read_text())["outcome"] == "error"
        assert f"the verdict lies in {elsewhere}" in told.errors
        if not mounts:
            return
        other = night(write_matrix(tmp_path / "m.yaml", {"first": first}, nodes=1), tmp_path / "other",
                      disk.folder / "h.sqlite", env=disk.env)  # fmt: skip
        # A night that cannot be compared with the next one is not green either.
        assert other.phase("first")[0] == "pass" and (other.code, other.printed["outcome"]) == (3, "error")
        assert "the night was not taken into the history" in other.printed["cause"]
        assert json.loads((other.folder / "night.json").read_text())["outcome"] == "error"


# The driver itself.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_a_driver_that_is_ended_leaves_no_green_and_is_resumed(tmp_path, number):
    flag, out, history = tmp_path / "flag", tmp_path / "night", tmp_path / "h.sqlite"
    first, last = quick(["fill", "{out}", "10"]), quick(["fill", "{out}", "9"])
    phases = {"first": first, "long": quick(["wait", str(flag)]), "last": last}
    matrix = write_matrix(tmp_path / "m.yaml", phases, nodes=1)
    process = begin(matrix, out, history)
    running = out / "long" / "running.json"
    while not (running.is_file() and json.loads(running.read_text())["pid"]):
        assert process.poll() is None
        time.sleep(0.02)
    child = json.loads(running.read_text())["pid"]
    assert "the night is still running, at long" in show(out)[1]
    process.send_signal(number)
    if number == signal.SIGTERM:
        told = end(process, out)
        assert told.code == 3 and told.printed["cause"].startswith("interrupted by SIGTERM; ")
        assert told.phase("first")[0] == "pass"
        assert told.phase("long") == ("error", "environment", "interrupted by SIGTERM")
        assert told.phase("last") == ("error", "environment", "not run: interrupted by SIGTERM")
        assert [n.outcome for n in History(history).nights()] == ["error"]
    else:
        assert process.wait(timeout=60) == -signal.SIGKILL and process.stdout.read() == ""
        assert not (out / "night.json").exists()
    code, text = show(out)
    assert code == 3 and text.startswith("ERROR  chaos")
    assert ("the driver of the night was killed before its verdict, at long" in text) is (number == signal.SIGKILL)
    while _runs(child):  # it dies with its driver
        time.sleep(0.02)
    before = (out / "first" / "phase.json").read_bytes()
    refused = subprocess.run([*process.args], capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2 and "a night lies here already" in refused.stderr
    flag.touch()
    if number == signal.SIGTERM:
        verdict = (out / "night.json").read_bytes()
        _, errors = begin(matrix, out, history, "--resume", commit="deed").communicate(timeout=120)
        assert "the night was begun with other code; expected c0ffee; found deed" in errors
        assert (out / "night.json").read_bytes() == verdict
    told = night(matrix, out, history, "--resume")
    assert (told.code, told.printed["outcome"]) == (0, "pass"), told.errors
    assert [told.phases[name]["kept"] for name in phases] == [True, False, False]
    assert (out / "first" / "phase.json").read_bytes() == before
    assert told.phases["long"]["attempt"] == 2 and told.phases["long"]["earlier"] == ["long.attempt-1"]
    assert (out / "long.attempt-1" / "stderr.txt").is_file()
    # One night, however often it was begun.
    assert [n.outcome for n in History(history).nights()] == ["pass"]
