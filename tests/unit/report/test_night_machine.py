"""A night is held to the stack of its row."""

from __future__ import annotations

import json

import pytest
import torch

from alignment.errors import InputError
from alignment.report.night_machine import write_provenance


def stack(folder, **components):
    path = folder / "stack-of-the-row.yaml"
    path.write_text(json.dumps({"schema": 1, "components": components}))
    return path


def test_a_night_on_its_own_stack_has_provenance(tmp_path):
    release = torch.__version__.split("+")[0]  # the label says of which build it is
    write_provenance(tmp_path, stack(tmp_path, torch=release))
    assert (tmp_path / "provenance.json").is_file() and (tmp_path / "stack.yaml").is_file()


@pytest.mark.parametrize(
    "components, said",
    [
        ({"torch": "1.0.0"}, "torch: expected 1.0.0, found"),
        ({"torch_npu": "2.7.1"}, "torch_npu: 2.7.1 is not installed"),
    ],
)
def test_a_night_on_another_stack_says_what_differs(components, said, tmp_path):
    with pytest.raises(InputError, match="the stack here is not the one of the row") as error:
        write_provenance(tmp_path, stack(tmp_path, **components))
    assert said in str(error.value)
