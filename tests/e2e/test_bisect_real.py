"""Bisection in real environments: a git repository of the test's own always, published releases with -m slow."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bisect_world import BAD_VALUE, COMMITS, GOOD_VALUE, PROBE, Planted, make_repository, write_stack, write_suite

from alignment.bisect.history import index_releases
from alignment.bisect.journal import Journal

PROBES = "tests/e2e/bisect_probes"


def bisect(*arguments, timeout=600):
    command = [sys.executable, "-m", "alignment", "bisect", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    return done, json.loads(done.stdout) if done.stdout.startswith("{") else None


def changes(answer):
    return [
        [(c["component"], c["old"], c["new"]) for c in e["changes"]] for f in answer["findings"] for e in f["edges"]
    ]


def zones(state: Path) -> list[str]:
    from alignment.bisect.report import page_data

    return [p["zone"] for p in page_data(Journal(state, write=False))["probes"]]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """200 commits in three packages: commits 90 to 110 of beta do not import, 46 is flaky, 130 is the fault."""
    folder = tmp_path_factory.mktemp("bisect")
    planted = Planted(fault=130, broken=range(90, 112), flaky=46)
    revisions = make_repository(folder / "repository", planted)
    assert len(revisions) == COMMITS
    return folder, revisions, write_suite(folder / "suite")


def test_three_packages_in_one_repository(world):
    folder, revisions, suite = world
    good = write_stack(folder / "good.yaml", folder / "repository", revisions[0])
    bad = write_stack(folder / "bad.yaml", folder / "repository", revisions[-1])
    state = folder / "state"
    common = ["--suite", suite, "--state", state, "--cache", folder / "cache", "--json"]
    done, answer = bisect("run", "--good", good, "--bad", bad, "--probe", PROBE, *common)
    assert done.returncode == 0, done.stderr
    assert changes(answer) == [[("beta", revisions[127][:12], revisions[130][:12])]]
    finding = answer["findings"][0]
    assert finding["necessary"] and finding["sufficient"]
    edge = finding["edges"][0]
    assert (edge["low"]["value"], edge["high"]["value"]) == (GOOD_VALUE, BAD_VALUE)
    assert "Change beta (130)" in edge["changes"][0]["commit"]
    assert answer["probes"]["search"] <= answer["bound"]
    found = zones(state)
    assert "skip" in found, "the search never met the stretch that does not build"
    assert any("is flaky" in e["text"] for e in Journal(state, write=False).of("stage")), (
        "it never met the flaky commit"
    )
    replayed, again = bisect("replay", "--state", state, "--json")
    assert replayed.returncode == 0 and again["words"] == answer["words"]


def test_the_stretch_that_does_not_build_hides_a_fault(tmp_path):
    revisions = make_repository(tmp_path / "repository", Planted(fault=100, broken=range(90, 112)))
    suite = write_suite(tmp_path / "suite")
    good = write_stack(tmp_path / "good.yaml", tmp_path / "repository", revisions[0])
    bad = write_stack(tmp_path / "bad.yaml", tmp_path / "repository", revisions[-1])
    common = ["--suite", suite, "--state", tmp_path / "state", "--cache", tmp_path / "cache", "--json", "--no-recheck"]
    done, answer = bisect("run", "--good", good, "--bad", bad, "--probe", PROBE, *common)
    assert done.returncode == 10, done.stderr
    assert changes(answer) == [[("beta", revisions[88][:12], revisions[112][:12])]]
    assert answer["findings"][0]["edges"][0]["hidden"] == 7


@pytest.mark.slow
def test_killed_in_its_environments_it_names_the_same_commit(tmp_path):
    """SIGKILL at five random moments, checkouts and installations among them; each time it goes on."""
    revisions = make_repository(tmp_path / "repository", Planted(fault=130, broken=range(90, 112)))
    suite = write_suite(tmp_path / "suite")
    good = write_stack(tmp_path / "good.yaml", tmp_path / "repository", revisions[0])
    bad = write_stack(tmp_path / "bad.yaml", tmp_path / "repository", revisions[-1])
    state = tmp_path / "state"
    arguments = ["run", "--good", good, "--bad", bad, "--probe", PROBE, "--suite", suite, "--state", state]
    command = [sys.executable, "-m", "alignment", "bisect", *map(str, [*arguments, "--cache", tmp_path / "cache"])]
    draw, finished = random.Random(20261129), []
    for _ in range(5):
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        goal = len(finished) + draw.randint(1, 3)
        while process.poll() is None and len(_probes(state)) < goal:
            time.sleep(0.02)
        time.sleep(0.5 * draw.random())
        assert process.poll() is None, "it ended before it was killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        finished = _probes(state)
    done, answer = bisect(*arguments, "--cache", tmp_path / "cache", "--json")
    assert done.returncode == 0, done.stderr
    assert changes(answer) == [[("beta", revisions[127][:12], revisions[130][:12])]]
    keys = _probes(state)
    assert keys[: len(finished)] == finished and len(keys) == len(set(keys))


def _probes(state: Path) -> list[str]:
    """Keys of the probes that are whole in the journal."""
    try:
        lines = (state / "journal.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line)["key"] for line in lines if '"event": "probe"' in line]


def write_releases(path: Path, **components) -> Path:
    lines = ["schema: 1", f"name: {path.stem}", "components:", *(f'  {n}: "{v}"' for n, v in components.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def releases(folder: Path, component: str, good: str, bad: str, probe: str, *options):
    """A bisection between two releases in virtual environments over this one, with the suite as it is here."""
    if not index_releases(component):
        pytest.skip("the package index does not answer")
    ends = [
        write_releases(folder / f"{what}.yaml", **{component: version})
        for what, version in (("good", good), ("bad", bad))
    ]
    common = ["--state", folder / "state", "--cache", folder / "cache", "--timeout", "600", "--json", *options]
    return bisect("run", "--good", ends[0], "--bad", ends[1], "--probe", probe, *common, timeout=3600)


@pytest.mark.slow
def test_megatron_core_where_the_softmax_scale_was_mended(tmp_path):
    """Real releases 0.12.0 … 0.16.1: YaRN's mscale_all_dim in the softmax scale of MLA came with 0.14.0."""
    probe = f'shell: "$ALIGNMENT_BISECT_PYTHON" {PROBES}/megatron_softmax_scale.py'
    done, answer = releases(tmp_path, "megatron-core", "0.16.1", "0.12.0", probe)
    assert done.returncode == 0, done.stderr
    assert changes(answer) == [[("megatron-core", "0.14.0", "0.13.1")]]
    assert answer["findings"][0]["edges"][0]["known_bad"] == ["megatron-core-mscale"]


@pytest.mark.slow
def test_megatron_core_with_a_release_that_cannot_be_had(tmp_path):
    """A default that came with 0.16.0; a release inside the step that the index does not have leaves a range."""
    probe = f'shell: "$ALIGNMENT_BISECT_PYTHON" {PROBES}/megatron_mtp_default.py'
    known = "0.13.0,0.14.0,0.15.0,0.15.3,0.15.4,0.16.0"
    done, answer = releases(
        tmp_path, "megatron-core", "0.12.0", "0.16.1", probe, "--releases", f"megatron-core={known}"
    )
    assert done.returncode == 10, done.stderr
    assert changes(answer) == [[("megatron-core", "0.15.3", "0.16.0")]]
    assert answer["findings"][0]["edges"][0]["hidden"] == 1
    skipped = [
        e["observation"]
        for e in Journal(tmp_path / "state", write=False).of("probe")
        if e["observation"]["result"] == "skip"
    ]
    assert [s["reason"] for s in skipped] == ["build"]


@pytest.mark.slow
def test_transformers_on_the_oracle_of_the_golden_model(tmp_path):
    """Releases 4.51.0 … 5.24.0: the oracle test holds from 4.53.0 on."""
    file = "tests/unit/models/test_oracle_transformers.py"
    node = f"{file}::test_logits_and_every_gradient_equal_transformers[tiny-moonlight]"
    done, answer = releases(tmp_path, "transformers", "5.24.0", "4.51.0", node, "--dependencies")
    assert done.returncode == 0, done.stderr
    assert changes(answer) == [[("transformers", "4.53.0", "4.52.4")]]
