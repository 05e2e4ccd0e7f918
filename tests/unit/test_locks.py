"""The locked environments hold what the package asks for, as plain pins."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "scripts" / "locks").glob("*.txt"))
NAMES = {"atlas", "cpu", "cpu-engines", "cuda"}
# Section 3 of the notes this product is built from: the stack on which DeepSeek-V3 was brought into line.
ATLAS = {
    "torch": "2.7.1", "torch-npu": "2.7.1", "transformers": "4.53.3", "vllm": "0.10.0", "vllm-ascend": "0.10.0rc1",
    "megatron-core": "0.12.1", "mbridge": "0.13.1",
}  # fmt: skip


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line), f"{path.name}: {line}"
    return {re.sub(r"[-_.]+", "-", name.lower()): version for name, version in (line.split("==") for line in lines)}


def direct_requirements() -> list[Requirement]:
    if sys.version_info < (3, 11):
        pytest.skip("reads pyproject.toml with tomllib")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"]["test"]]
    return [requirement for requirement in wanted if not requirement.marker]


def test_there_is_one_for_each_environment():
    assert {path.stem for path in LOCKS} == NAMES


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_what_the_package_asks_for_is_pinned_within_its_bounds(path):
    pinned = pins(path)
    for requirement in direct_requirements():
        name = re.sub(r"[-_.]+", "-", requirement.name.lower())
        assert name in pinned, f"{path.name} lacks {name}: run scripts/lock_environments.sh"
        assert requirement.specifier.contains(Version(pinned[name]), prereleases=True), f"{name}=={pinned[name]}"


def test_the_atlas_stack_is_the_published_one():
    pinned = pins(ROOT / "scripts" / "locks" / "atlas.txt")
    assert {name: pinned.get(name) for name in ATLAS} == ATLAS


@pytest.mark.parametrize("name", ["cpu", "cpu-engines"])
def test_a_lock_for_cpus_leaves_what_cuda_needs_to_the_wheel_of_torch(name):
    for_cuda = [
        pin for pin in pins(ROOT / "scripts" / "locks" / f"{name}.txt") if re.match(r"(cuda|nvidia|triton)\b", pin)
    ]
    assert for_cuda == []
