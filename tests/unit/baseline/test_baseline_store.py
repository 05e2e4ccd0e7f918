"""Baselines on disk: read back bit for bit, and refused when damaged, edited, foreign or of another configuration."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from alignment.backends.subject import get_subject
from alignment.baseline.check import check_case
from alignment.baseline.store import BaselineStore, chip_slug, load, write
from alignment.errors import InputError
from alignment.numerics.verdict import Outcome


def file_of(store, operator="swiglu"):
    (path,) = store.paths(operator=operator)
    return path


def test_one_file_pair_per_operator_chip_and_layer(recorded, cpu):
    slug = chip_slug(cpu.fingerprint().chip)
    assert [str(p.relative_to(recorded.root)) for p in recorded.paths()] == [
        f"cpu/{slug}/unit/rms_norm.json",
        f"cpu/{slug}/unit/swiglu.json",
    ]
    assert all(p.with_suffix(".safetensors").is_file() for p in recorded.paths())
    assert set(load(file_of(recorded)).entries) == {"swiglu-float32/torch", "swiglu-bfloat16/torch"}


def test_golden_values_and_budgets_come_back_bit_for_bit(recorded, the):
    file, case = load(file_of(recorded)), the("swiglu-bfloat16")
    golden = case.golden_observations(case.inputs())
    assert all(torch.equal(file.golden(case.id)[name], golden[name]) for name in golden)
    before = file.entries[f"{case.id}/torch"].budgets()
    write(file)
    assert load(file.path).entries[f"{case.id}/torch"].budgets() == before
    noise = before["output"]["relative_l2"].noise
    assert len(noise.values) == 6 and case.seed not in noise.seeds


def test_json_has_sorted_keys_and_a_schema(recorded):
    data = json.loads(file_of(recorded).read_text())
    assert list(data) == sorted(data) and data["schema"] == 1


def test_an_edited_file_is_refused(recorded):
    path = file_of(recorded)
    path.write_text(path.read_text().replace('"value": ', '"value": 1', 1))
    with pytest.raises(InputError, match="damaged or was edited.*restore it from version control, or record it again"):
        load(path)


def test_a_truncated_file_is_refused(recorded):
    path = file_of(recorded)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(InputError, match="swiglu.json: the file is truncated or not JSON"):
        load(path)


def test_damaged_and_missing_tensors_are_refused(recorded):
    path = file_of(recorded)
    tensors = path.with_suffix(".safetensors")
    whole = bytearray(tensors.read_bytes())
    whole[-3] ^= 1
    tensors.write_bytes(whole)
    with pytest.raises(InputError, match="swiglu.safetensors: the tensors of the baseline are damaged"):
        load(path)
    tensors.unlink()
    with pytest.raises(InputError, match="the tensors of the baseline are missing"):
        load(path)


def test_a_file_that_is_no_baseline_and_another_schema_are_refused(recorded):
    path = file_of(recorded)
    data = json.loads(path.read_text())
    path.write_text('{"a": 1}')
    with pytest.raises(InputError, match="the file is not a baseline"):
        load(path)
    path.write_text(json.dumps({**data, "schema": 99}))
    with pytest.raises(InputError, match="a baseline of another schema; expected 1; found 99"):
        load(path)


def test_a_file_without_a_field_is_refused_by_its_name(recorded):
    from alignment.baseline.provenance import content_hash

    path = file_of(recorded)
    data = json.loads(path.read_text())
    del data["device"], data["content"]
    path.write_text(json.dumps({**data, "content": content_hash(data)}))
    with pytest.raises(InputError, match="lacks a field \\('device'\\)"):
        load(path)


def test_a_check_against_a_damaged_baseline_is_an_error_that_says_so(recorded, the, cpu):
    path = file_of(recorded)
    path.write_text(path.read_text()[:-40])
    verdict = check_case(the("swiglu-float32"), get_subject("torch", "unit"), cpu, recorded)
    assert verdict.outcome is Outcome.ERROR
    assert "truncated or not JSON" in verdict.reason
    assert verdict.next_command == "alignment baseline record --case swiglu-float32 --subject torch --device cpu"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attributes": {"limit": 7.0}}, "belongs to another configuration: 'attributes' differs"),
        ({"seed": 3}, "belongs to another configuration: 'seed' differs"),
    ],
)
def test_a_baseline_of_another_configuration_is_an_error_that_names_the_field(recorded, the, cpu, changed, message):
    case = dataclasses.replace(the("swiglu-float32"), **changed)
    verdict = check_case(case, get_subject("torch", "unit"), cpu, recorded)
    assert verdict.outcome is Outcome.ERROR and message in verdict.reason


def test_a_baseline_of_other_inputs_is_an_error(recorded, the, cpu):
    case = the("swiglu-float32")
    other = dataclasses.replace(case, build=lambda draw: {k: 2 * v for k, v in case.build(draw).items()})
    verdict = check_case(other, get_subject("torch", "unit"), cpu, recorded)
    assert verdict.outcome is Outcome.ERROR and "recorded from other inputs" in verdict.reason


def test_results_of_an_emulated_device_are_never_put_into_a_store(recorded, tmp_path):
    file = load(file_of(recorded))
    entry = file.entries["swiglu-float32/torch"]
    fingerprint = {**entry.provenance.fingerprint, "emulated": True, "label": "npu (emulated)"}
    entry = dataclasses.replace(entry, provenance=dataclasses.replace(entry.provenance, fingerprint=fingerprint))
    store = BaselineStore(tmp_path / "other")
    with pytest.raises(InputError, match="emulated device are never a baseline; found npu \\(emulated\\)"):
        store.put([entry], {})
    assert store.paths() == []


def test_slugs_are_safe_folder_names():
    assert chip_slug("Intel(R) Xeon(R) CPU @ 2.20GHz") == "intel-r-xeon-r-cpu-2-20ghz"
    assert chip_slug("../..") == "unknown"
