"""The versions known to be bad."""

from __future__ import annotations

import pytest

from alignment.bisect.known_bad import known_bad_of, load_known_bad
from alignment.bisect.stack import load_stack, stack_from_data
from alignment.errors import InputError


def stack(**components):
    return stack_from_data({"schema": 1, "components": components})


def ids(one):
    return {entry.id for entry in known_bad_of(one)}


def test_the_two_faults_of_the_field_are_known():
    by_id = {e.id: e for e in load_known_bad()}
    assert by_id["mindspeed-mla-softmax-scale"].repaired_by == {"MindSpeed": "a25e413e"}
    assert "4130" in by_id["vllm-ascend-stale-absorbed-weights"].source
    assert all(e.source and e.symptom and e.repair for e in by_id.values())


def test_the_field_stack_has_the_stale_matrices():
    assert "vllm-ascend-stale-absorbed-weights" in ids(load_stack("shipped:deepseek-v3-671b-dapo-a2"))


def test_affected_and_repaired_versions():
    assert "mindspeed-mla-softmax-scale" in ids(stack(MindSpeed="2.1.0_core_r0.12.1"))
    assert "mindspeed-mla-softmax-scale" not in ids(stack(MindSpeed="2.2.0_core_r0.12.1"))
    for version in ("0.9.1", "0.10.0rc1"):
        assert "vllm-ascend-stale-absorbed-weights" in ids(stack(**{"vllm-ascend": version, "verl": "0.6.1"}))
    assert "vllm-ascend-stale-absorbed-weights" not in ids(stack(**{"vllm-ascend": "0.9.1", "verl": "0.7.0"}))
    assert "megatron-core-mscale" in ids(stack(**{"megatron-core": "0.13.1"}))
    assert "megatron-core-mscale" not in ids(stack(**{"megatron-core": "0.14.0"}))
    assert ids(stack(ray="2.40.0")) == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 2\n", "known-bad versions of another schema"),
        ("schema: 1\nentries: [{id: a}]\n", "an entry is incomplete"),
        ("schema: 1\nentries: [{idd: a}]\n", "unknown key; expected id?"),
    ],
)
def test_what_the_file_may_not_say(tmp_path, text, message):
    (tmp_path / "k.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_known_bad(tmp_path / "k.yaml")
    assert message in str(caught.value)
