"""Two captures of the plain formats: what one side lacks is missed, what measures the machine is left out by name."""

from __future__ import annotations

import json

import capture_samples
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from alignment.capture.readers import open_capture
from alignment.diagnose.capture_comparison import compare_captures
from alignment.diagnose.names import NameMap
from alignment.errors import InputError
from alignment.report.comparison_view import comparison_lines


def both_ways(golden, target, **options):
    """(stage, the side that has more) of golden against target and of target against golden."""
    yield compare_captures(golden, target, **options).stages[0], "golden", "target"
    yield compare_captures(target, golden, **options).stages[0], "target", "golden"


def events(root, tags, steps=3):
    root.mkdir(parents=True)
    found = [capture_samples.event(s, tag, s + v) for s in range(steps) for tag, v in tags.items()]
    (root / "events.out.tfevents.1.host.1.0").write_bytes(b"".join(map(capture_samples.record, found)))
    return root


def folder(root, *, left=10):
    root.mkdir()
    for i in range(left):
        save_file({"weight": np.full((2, 2), i + 1.0)}, root / f"layer{i}.safetensors")
    return open_capture(root)


def test_a_folder_that_lost_tensors_fails_and_names_them(tmp_path):
    for stage, more, less in both_ways(folder(tmp_path / "whole"), folder(tmp_path / "one", left=2)):
        assert stage.pairs == 2 and not stage.aligned
        assert len(stage.failures) == 8
        assert stage.failures[0] == f"value layer2.weight only in {more}, missing in {less} (value, forward)"


def test_a_column_that_only_one_rollout_has_fails_unless_it_may(tmp_path):
    both = [capture_samples.lines(tmp_path / name) for name in ("golden", "target")]
    for path in both[1].iterdir():
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            del line["acc"]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    readers = [open_capture(root) for root in both]
    for stage, more, less in both_ways(*readers):
        assert stage.failures == [f"value acc only in {more}, missing in {less} (value, forward)"]
    assert all(stage.aligned for stage, _, _ in both_ways(*readers, allow_missing=["acc"]))
    assert not any(stage.aligned for stage, _, _ in both_ways(*readers, allow_missing=["gts"]))


def test_a_curve_that_only_one_run_logged_fails(tmp_path):
    whole = open_capture(capture_samples.events(tmp_path / "whole"))
    less = open_capture(events(tmp_path / "less", {"reward": -1.0}))
    [stage, *_] = compare_captures(whole, less).stages
    assert stage.failures == ["value actor/loss only in golden, missing in target (value, forward)"]


# --- other names ------------------------------------------------------------------------------------------------------

WEIGHTS = {"model.layers.0.a.weight": 1.0, "model.layers.1.a.weight": 2.0, "head.weight": 3.0}


def weights(path, names, *, rows=2, scale=1.0):
    """The weights under the names that ``names`` has for them, the last one scaled."""
    path.mkdir()
    tensors = {name: np.full((rows, 2), v, np.float32) for name, v in zip(names, WEIGHTS.values(), strict=True)}
    tensors[list(names)[-1]] *= np.float32(scale)
    save_file(tensors, path / "weights.safetensors")
    return open_capture(path)


def test_tensors_are_paired_by_the_names_of_the_user(tmp_path):
    renamed = ["net.blocks.0.b.weight", "net.blocks.1.b.weight", "top.weight"]
    golden, target = weights(tmp_path / "golden", WEIGHTS), weights(tmp_path / "target", renamed)
    names = NameMap.parse(["model.layers.*.a=net.blocks.*.b", "head=top"])
    with pytest.raises(InputError, match="name the pairs, for example --map 'head.weight=top.weight'"):
        compare_captures(golden, target)
    assert compare_captures(golden, target, names=NameMap.parse(["head.weight=top.weight"])).stages[0].pairs == 1
    [stage] = compare_captures(golden, target, names=names).stages
    assert stage.aligned and stage.pairs == len(WEIGHTS) and not stage.unpaired
    [stage] = compare_captures(golden, weights(tmp_path / "off", renamed, scale=1.5), names=names).stages
    assert [f.quantity for f in stage.localisation.findings] == ["value head.weight"]
    [stage] = compare_captures(golden, weights(tmp_path / "wider", renamed, rows=3), names=names).stages
    assert {f.reason for f in stage.localisation.findings} == {"shape [3, 2], golden has [2, 2]"}
    assert len(stage.localisation.findings) == len(WEIGHTS)


def test_wrappers_and_names_of_megatron_are_known_in_folders_as_well(tmp_path):
    megatron = ["module.decoder.layers.0.a.weight", "module.decoder.layers.1.a.weight", "module.head.weight"]
    golden = weights(tmp_path / "golden", WEIGHTS)
    assert compare_captures(golden, weights(tmp_path / "target", megatron)).stages[0].pairs == len(WEIGHTS)
    wrong = weights(tmp_path / "wrong", megatron, scale=1.5)
    assert compare_captures(golden, wrong).stages[0].first.quantity == "value head.weight"


def test_curves_are_paired_by_the_names_of_the_user(tmp_path):
    golden = open_capture(events(tmp_path / "golden", {"actor/loss": 0.5, "router": 1.0}))
    target = open_capture(events(tmp_path / "target", {"policy/loss": 0.5, "router": 1.0}))
    names = NameMap({"actor/*": "policy/*"})
    assert all(stage.aligned and stage.pairs == 2 for stage in compare_captures(golden, target, names=names).stages)
    assert not compare_captures(golden, target).stages[0].aligned
    wrong = open_capture(events(tmp_path / "wrong", {"policy/loss": 0.75, "router": 1.5}))
    findings = compare_captures(golden, wrong, names=names).stages[0].localisation.findings
    assert [f.quantity for f in findings] == ["value actor/loss", "value router"]


@pytest.mark.parametrize("root", ["state_dict", "model_state_dict"])
def test_a_lone_root_around_the_weights_is_left_out(tmp_path, root):
    state = {"a.weight": torch.ones(2, 2), "b": torch.zeros(3)}
    kinds = {"plain": state, "around": {root: state, "epoch": 3}, "beside": {root: state, "x": torch.ones(1)}}
    for name, saved in kinds.items():
        (tmp_path / name).mkdir()
        torch.save(saved, tmp_path / name / "checkpoint.pt")
    plain, around, beside = (open_capture(tmp_path / name) for name in ("plain", "around", "beside"))
    assert [row.module for row in around.rows(0, "tensors", 0)] == ["a.weight", "b"]
    assert [row.module for row in beside.rows(0, "tensors", 0)] == [f"{root}.a.weight", f"{root}.b", "x"]
    [stage] = compare_captures(plain, around).stages
    assert stage.aligned and stage.pairs == len(state)
    torch.save({root: {**state, "b": torch.ones(3)}}, tmp_path / "around" / "checkpoint.pt")
    assert compare_captures(plain, open_capture(tmp_path / "around")).stages[0].first.quantity == "value b"


# --- what measures the machine --------------------------------------------------------------------------------------

MACHINE = {"timing/step": 3.0, "timing_s/gen": 2.0, "perf/throughput": 9.0, "actor/max_memory_allocated_gb": 1.0}


def test_time_and_memory_of_two_runs_are_left_out_by_name(tmp_path):
    computed = {"actor/loss": 0.5, "val/timing": 1.0}
    golden = open_capture(events(tmp_path / "golden", computed | MACHINE))
    slower = open_capture(events(tmp_path / "slower", computed | {tag: 2 * v for tag, v in MACHINE.items()}))
    remark = (
        "timing/step and 3 more not compared: time, memory and throughput are of the machine, not of what it computes"
    )
    found = compare_captures(golden, slower)
    assert [stage.aligned for stage in found.stages] == [True] * 3
    assert {stage.pairs for stage in found.stages} == {len(computed)} and found.stages[0].declared == remark
    assert f"step 0 metrics: {remark}" in list(comparison_lines(found))
    wrong = open_capture(events(tmp_path / "wrong", computed | {"actor/loss": 0.75} | MACHINE))
    [stage, *_] = compare_captures(golden, wrong).stages
    assert not stage.aligned and stage.first.quantity == "value actor/loss"
    late = open_capture(events(tmp_path / "late", computed | {"val/timing": 1.5} | MACHINE))
    assert not compare_captures(golden, late).stages[0].aligned


def test_a_step_of_which_only_the_time_is_known_is_none(tmp_path):
    root = events(tmp_path / "run", {"actor/loss": 0.5})
    extra = capture_samples.record(capture_samples.event(7, "timing/step", 1.0))
    (root / "events.out.tfevents.2.host.1.0").write_bytes(extra)
    assert open_capture(root).steps() == [0, 1, 2]
