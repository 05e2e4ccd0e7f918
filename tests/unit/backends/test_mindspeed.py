"""How MindSpeed is brought in, against a stand-in that has its two entry points."""

from __future__ import annotations

import sys
import types

import pytest

from alignment.backends import mindspeed
from alignment.errors import InputError, UnavailableError
from alignment.models.config import preset
from alignment.weights.megatron_layout import ParallelSizes

STAND_IN = """
import sys
argv_at_import = list(sys.argv)
told = []
def repatch(args):
    assert vars(args) == dict(args)
    told.append(dict(args))
"""


@pytest.fixture
def no_megatron(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] in ("megatron", "mindspeed")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def stand_in(tmp_path, monkeypatch, no_megatron):
    (tmp_path / "mindspeed").mkdir()
    (tmp_path / "mindspeed" / "__init__.py").write_text("")
    (tmp_path / "mindspeed" / "megatron_adaptor.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] == "mindspeed"]:
        del sys.modules[name]


def test_the_adaptor_does_not_see_our_command_line(stand_in, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["alignment", "run", "--device", "npu"])
    adaptor = mindspeed.import_first()
    assert adaptor.argv_at_import == ["alignment"]
    assert sys.argv == ["alignment", "run", "--device", "npu"]
    assert mindspeed.import_first() is adaptor


def test_latent_attention_is_switched_on_with_its_widths(stand_in):
    config = preset("deepseek-v3-671b")
    mindspeed.configure(config, ParallelSizes(tensor_model_parallel_size=8, expert_tensor_parallel_size=1), bf16=True)
    [told] = mindspeed.import_first().told
    assert told["multi_latent_attention"] is True and told["use_flash_attn"] is True
    assert (told["qk_head_dim"], told["qk_pos_emb_head_dim"], told["v_head_dim"]) == (128, 64, 128)
    assert (told["tensor_model_parallel_size"], told["expert_tensor_parallel_size"], told["sequence_parallel"]) == (
        8,
        1,
        True,
    )


def test_a_late_adaptor_is_refused(stand_in, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(InputError, match="megatron-core was imported before MindSpeed's adaptor"):
        mindspeed.import_first()


def test_without_mindspeed_it_says_what_to_install(no_megatron):
    with pytest.raises(UnavailableError, match="needs MindSpeed on an NPU.*2.2.0_core_r0.12.1"):
        mindspeed.import_first()


def test_a_mindspeed_that_cannot_be_configured_is_refused(stand_in):
    (stand_in / "mindspeed" / "megatron_adaptor.py").write_text("")
    with pytest.raises(InputError, match="expected a function repatch"):
        mindspeed.configure(preset("tiny-deepseek"), ParallelSizes(), bf16=False)
