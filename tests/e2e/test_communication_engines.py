"""The communication test on megatron-core: its groups are watched through the functions it calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alignment.cli import app
from alignment.diagnose.communication import LIMIT

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "diagnose"))
import collective_faults  # noqa: E402

pytestmark = pytest.mark.engine
SIZES = "actor_rollout_ref.actor.megatron."


def told(into: Path, *arguments: str) -> tuple[int, dict]:
    pytest.importorskip("megatron.core")
    asked = ["--device", "cpu", "--run-dir", str(into), "--json"]
    made = CliRunner().invoke(app, ["communication", "engine.train=megatron", *asked, *arguments])
    assert made.stdout, made.exception
    return made.exit_code, json.loads(made.stdout)


LAYOUTS = {
    "pipeline": (
        ["pipeline_model_parallel_size=2", "override_transformer_config.num_layers_in_first_pipeline_stage=1"],
        {"send and recv", "all_gather", "all_reduce"},
    ),
    "tensor and expert": (
        ["tensor_model_parallel_size=2", "expert_model_parallel_size=2", "expert_tensor_parallel_size=1"],
        {"all_to_all", "all_gather", "reduce_scatter", "all_reduce"},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_aligned_and_every_collective_of_it_is_judged(ray_cluster, tmp_path, name):
    sizes, kinds = LAYOUTS[name]
    code, found = told(tmp_path / "a", *(SIZES + size for size in sizes))
    assert (code, [v["outcome"] for v in found["verdicts"]]) == (0, ["pass"] * 3), found["verdicts"]
    assert kinds <= found["replay"]["judged"].keys() and found["replay"]["unjudged"] == {}
    assert max(found["differences"].values()) < LIMIT


def test_a_lost_contribution_is_named_with_its_group(ray_cluster, tmp_path):
    fault = f"{collective_faults.__file__}:lost_contribution"
    code, found = told(tmp_path / "a", f"{SIZES}tensor_model_parallel_size=2", "--fault", fault)
    assert code == 1
    first = found["replay"]["wrong"][0]
    assert first["op"] == "all_reduce" and first["cause"] == "the contribution of rank 1 is lost"
    assert first["ranks"] == [0, 1] and "PARALLEL_GROUP" in first["group"].upper()
