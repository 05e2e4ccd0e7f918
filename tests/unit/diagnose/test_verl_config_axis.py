"""Axis 1 on verl's own configurations: composed by its Hydra tree at test time, read from the folder a run leaves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from alignment.diagnose.axes import hyperparameters
from alignment.diagnose.run_stages import open_run
from alignment.numerics.verdict import Outcome

pytestmark = pytest.mark.engine


def composed(directory: Path, *overrides: str) -> Path:
    """A folder as verl leaves it: the resolved configuration where Hydra puts it, and a line of metrics."""
    if importlib.util.find_spec("verl") is None or importlib.util.find_spec("hydra") is None:
        pytest.skip("verl is not installed")
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    root = Path(importlib.util.find_spec("verl").submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(config_dir=str(root), version_base=None):
        config = compose("ppo_trainer", overrides=list(overrides))
    (directory / ".hydra").mkdir(parents=True)
    OmegaConf.save(config, directory / ".hydra" / "config.yaml")
    row = {"step": 1, "data": {"training/global_step": 1, "actor/grad_norm": 1.0}}
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return directory


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    return open_run(composed(tmp_path_factory.mktemp("verl") / "baseline"))


def test_every_field_of_the_tree_is_read_and_equal_trees_agree(baseline, tmp_path):
    again = open_run(composed(tmp_path / "again"))
    assert len(baseline.config) > 300
    report = hyperparameters.check(again, baseline)
    assert report.outcome is Outcome.PASS, report.findings


@pytest.mark.parametrize(
    "override, field",
    [
        ("actor_rollout_ref.actor.optim.lr=3e-6", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.clip_ratio_high"),
        ("actor_rollout_ref.rollout.temperature=0.7", "actor_rollout_ref.rollout.temperature"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator"),
        ("data.train_batch_size=512", "data.train_batch_size"),
    ],
)
def test_a_difference_that_moves_the_curve_comes_first(baseline, tmp_path, override, field):
    """Beside a difference of layout, which is named behind it, and one that only says where."""
    other = composed(
        tmp_path / "run", override, "trainer.experiment_name=npu", "data.filter_overlong_prompts_workers=2"
    )
    report = hyperparameters.check(open_run(other), baseline)
    assert report.outcome is Outcome.FAIL
    assert report.findings[0].cause == field
    assert any("trainer.experiment_name" in remark for remark in report.remarks)
    assert all(finding.weight <= report.findings[0].weight for finding in report.findings)
