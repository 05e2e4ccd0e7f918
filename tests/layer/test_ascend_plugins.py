"""The Ascend plugins' own source on the emulated NPU, each in a process of its own.

The driver is proven on trees written here, right and wrong ones. The plugins themselves are driven where a source is
given (``--mindspeed-src``, ``--vllm-ascend-src``) or installed; see docs/ascend-plugins.md.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from alignment.backends import mindspeed_attention
from alignment.backends.mindspeed_attention import check_mindspeed
from alignment.backends.plugin_process import drive_in_process
from alignment.backends.plugin_sources import MINDSPEED, VLLM_ASCEND, asked_sources, opened
from alignment.backends.vllm_ascend_mla import check_vllm_ascend
from alignment.errors import InputError, UnavailableError
from alignment.numerics.verdict import Outcome
from alignment.report.terminal import explain

# The fix of the attention scale on MindSpeed's branch 2.2.0_core_r0.12.1 ("different scale for mla").
SCALE_FIX = "a25e413e"
# Releases that were driven and found stale after an update in place: a copy is how they are made.
STALE_RELEASES = ("0.9.1", "0.10.0rc1", "0.11.0", "0.13.0", "0.18.0", "0.25.1rc1")
SOURCES = {"mindspeed_source": MINDSPEED, "vllm_ascend_source": VLLM_ASCEND}


def pytest_generate_tests(metafunc):
    for fixture, plugin in SOURCES.items():
        if fixture in metafunc.fixturenames:
            asked = asked_sources(plugin, metafunc.config.getoption(plugin.option))
            metafunc.parametrize(fixture, asked or [None], ids=[Path(text).name for text in asked] or ["installed"])


def outcomes(verdicts) -> dict[str, str]:
    return {verdict.check.rpartition(".")[2]: verdict.outcome.value for verdict in verdicts}


def by_check(verdicts) -> dict:
    return {verdict.check.rpartition(".")[2]: verdict for verdict in verdicts}


def value_of(verdict, name: str) -> float:
    return next(measure.value for measure in verdict.measures if measure.name.startswith(name))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        for folder in path.parents:
            if folder == root:
                break
            (folder / "__init__.py").touch()
    return root


# --- a tree with the shape of vLLM-Ascend ----------------------------------------------------------------------------

COPIES = """
self.W_UV = v.transpose(0, 1).contiguous()
self.W_UK_T = k.permute(1, 2, 0).contiguous()
"""
VIEWS = COPIES.replace(".contiguous()", "")
SWAPPED = COPIES.replace("k.permute(1, 2, 0)", "k.permute(1, 2, 0).flip(0)")  # right shape, heads in reverse
ONLY_ONCE = "if hasattr(self, 'W_UV'): return" + COPIES
IN_PLACE = """
if hasattr(self, 'W_UV'):
    self.W_UV.copy_(v.transpose(0, 1))
    self.W_UK_T.copy_(k.permute(1, 2, 0))
    return
""" + COPIES


def vllm_ascend_tree(root: Path, body: str) -> Path:
    head = """
        import torch
        import torch_npu
        from vllm.attention.backends.abstract import MLAAttentionImpl
        from vllm.logger import init_logger
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        logger = init_logger(__name__)


        class AscendMLAImpl(MLAAttentionImpl):
            def process_weights_after_loading(self, act_dtype: torch.dtype):
                assert isinstance(self.kv_b_proj.quant_method, UnquantizedLinearMethod)
                logger.info("processing")
                weight = torch_npu.npu_format_cast(self.kv_b_proj.weight.data, 2)
                weight = weight.T.view(self.kv_lora_rank, self.num_heads, -1)
                k, v = weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        """
    text = textwrap.dedent(head) + textwrap.indent(body.strip("\n"), 8 * " ") + "\n"
    return write(root, {VLLM_ASCEND.driven: text, "PKG-INFO": "Version: 0.0.1\n"})


def drive_vllm_ascend(root: Path) -> list:
    with opened(VLLM_ASCEND, str(root)) as source:
        return check_vllm_ascend(source)


def test_copies_are_right_after_loading_stale_after_an_update_and_right_again(tmp_path):
    verdicts = by_check(drive_vllm_ascend(vllm_ascend_tree(tmp_path, COPIES)))
    assert outcomes(verdicts.values()) == {
        "after_loading": "pass",
        "in_place_update": "fail",
        "post_processing_again": "pass",
    }
    stale = verdicts["in_place_update"]
    assert stale.reason == "W_UV, W_UK_T are stale after kv_b_proj.weight was updated in place"
    assert str(stale.where) == (
        "weight_sync · vllm_ascend.attention.mla_v1.AscendMLAImpl · W_UV "
        "(a copy: no write to kv_b_proj.weight reaches it)"
    )
    assert stale.subject.startswith("vLLM-Ascend 0.0.1 (source tree, sha256 of mla_v1.py ")
    assert stale.device == "npu (emulated)"
    assert value_of(verdicts["post_processing_again"], "derived tensors at a new address") == 2
    assert value_of(verdicts["after_loading"], "W_UV sees a write") == 0
    assert "(imported with " in verdicts["after_loading"].reason


def test_views_follow_an_update_in_place(tmp_path):
    verdicts = by_check(drive_vllm_ascend(vllm_ascend_tree(tmp_path, VIEWS)))
    assert set(outcomes(verdicts.values()).values()) == {"pass"}
    assert value_of(verdicts["after_loading"], "W_UK_T sees a write") == 1


def test_post_processing_that_keeps_its_addresses_is_told_from_one_that_does_not(tmp_path):
    verdicts = by_check(drive_vllm_ascend(vllm_ascend_tree(tmp_path, IN_PLACE)))
    assert outcomes(verdicts.values())["post_processing_again"] == "pass"
    assert value_of(verdicts["post_processing_again"], "derived tensors at a new address") == 0


def test_post_processing_that_runs_only_once_fails_where_it_is_run_again(tmp_path):
    verdicts = by_check(drive_vllm_ascend(vllm_ascend_tree(tmp_path, ONLY_ONCE)))
    again = verdicts["post_processing_again"]
    assert again.outcome is Outcome.FAIL
    assert again.reason == (
        "W_UV, W_UK_T are not what kv_b_proj gives although the post-processing has run again"
    )


def test_a_wrong_derivation_fails_after_loading_and_names_the_tensor(tmp_path):
    verdicts = by_check(drive_vllm_ascend(vllm_ascend_tree(tmp_path, SWAPPED)))
    assert verdicts["after_loading"].outcome is Outcome.FAIL
    assert verdicts["after_loading"].reason == "W_UK_T are not what kv_b_proj gives"
    assert verdicts["after_loading"].where.quantity == "W_UK_T"


def test_a_source_that_raises_is_an_error_with_its_place(tmp_path):
    [verdict] = drive_vllm_ascend(vllm_ascend_tree(tmp_path, "raise ValueError('not supported here')"))
    assert verdict.outcome is Outcome.ERROR
    assert verdict.reason == "could not be driven: ValueError: not supported here (mla_v1.py:18)"


def test_a_process_that_gives_no_verdict_is_an_error(tmp_path):
    root = vllm_ascend_tree(tmp_path, "import os; os._exit(3)")
    [verdict] = drive_vllm_ascend(root)
    assert verdict.outcome is Outcome.ERROR
    assert verdict.reason.startswith("could not be driven: the process ended with status 3: ")


def test_a_process_that_does_not_end_is_stopped(tmp_path):
    root = vllm_ascend_tree(tmp_path, COPIES)
    with opened(VLLM_ASCEND, str(root)) as source:
        [verdict] = drive_in_process("alignment.backends.vllm_ascend_mla", source, limit_seconds=0.01)
    assert verdict.reason == "could not be driven: no verdict after 0.01 s"


# --- a tree with the shape of MindSpeed ------------------------------------------------------------------------------

FROM_MODULE = "self.softmax_scale"
FROM_HEAD_WIDTH = (
    "1.0 / self.hidden_size_per_attention_head**0.5 if self.scale_mask_softmax.scale is None else self.softmax_scale"
)


def adaptor(scale: str, mask: str = "attention_mask") -> str:
    return f"""
        import torch_npu

        def dot_product_attention_forward_impl(
            self, query, key, value, attention_mask,
            attn_mask_type=None, attention_bias=None, packed_seq_params=None,
        ):
            heads, ends, layout = query.shape[-2], None, "TND"
            if packed_seq_params is not None:
                ends = packed_seq_params.cu_seqlens_q.tolist()
            else:
                layout = "SBH"
                query, key, value = (x.flatten(2) for x in (query, key, value))
            return torch_npu.npu_fusion_attention(
                query, key, value, heads, layout, atten_mask={mask}, scale={scale}, sparse_mode=self.config.sparse_mode,
                pre_tockens=self.config.pre_tockens, next_tockens=self.config.next_tockens,
                actual_seq_qlen=ends, actual_seq_kvlen=ends,
            )[0]
        """


# As much of megatron-core as the driver uses, so that it is proven where megatron-core is not installed.
MEGATRON = {
    "einops.py": "",
    "megatron/core/parallel_state.py": """
        def initialize_model_parallel(): ...
        def destroy_model_parallel(): ...
        """,
    "megatron/core/packed_seq_params.py": """
        from types import SimpleNamespace as PackedSeqParams
        """,
    "megatron/core/transformer/enums.py": """
        import enum

        class AttnMaskType(enum.Enum):
            causal = 2
        """,
    "megatron/core/transformer/transformer_config.py": """
        from types import SimpleNamespace as TransformerConfig
        """,
    "megatron/core/transformer/dot_product_attention.py": """
        from types import SimpleNamespace

        from torch import nn

        class DotProductAttention(nn.Module):
            def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None):
                super().__init__()
                self.config = config
                self.hidden_size_per_attention_head = config.kv_channels
                self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
                self.scale_mask_softmax = SimpleNamespace(scale=None)
        """,
}


def mindspeed_tree(root: Path, text: str, *, megatron: bool = True) -> Path:
    write(root, {MINDSPEED.driven: text, "setup.py": "__version__ = '0.0.1'\n", **(MEGATRON if megatron else {})})
    if megatron:
        (root / "megatron/core/__init__.py").write_text("__version__ = '0.0.2'\n")
    return root


def drive_mindspeed(root: Path) -> list:
    with opened(MINDSPEED, str(root)) as source:
        return check_mindspeed(source)


def assert_takes_the_head_width(verdicts) -> None:
    """Right where the module has no scale of its own, and named with both numbers where it has one."""
    assert outcomes(verdicts) == {
        "plain": "pass",
        "mla_mscale": "fail",
        "mla_head_widths": "fail",
        "mla_packed": "fail",
    }
    mscale = by_check(verdicts)["mla_mscale"]
    assert mscale.reason == (
        "npu_fusion_attention was handed the scale 0.250000 = 1/√16, the head width, and not softmax_scale 0.468464"
    )
    assert mscale.where.quantity == "scale"
    assert value_of(mscale, "scale handed to the kernel") == 1 / 4
    assert not next(measure for measure in mscale.measures if measure.name == "output relative_l2").within


def test_a_scale_from_the_head_width_is_failed_where_the_module_has_its_own(tmp_path):
    verdicts = drive_mindspeed(mindspeed_tree(tmp_path, adaptor(FROM_HEAD_WIDTH)))
    assert_takes_the_head_width(verdicts)
    assert verdicts[0].subject.startswith("MindSpeed 0.0.1 (source tree, sha256 of adaptor.py ")
    assert verdicts[0].subject.endswith(" with megatron-core 0.0.2")
    assert verdicts[0].device == "npu (emulated)"


def test_the_scale_of_the_module_passes_with_output_and_gradients(tmp_path):
    verdicts = drive_mindspeed(mindspeed_tree(tmp_path, adaptor(FROM_MODULE)))
    assert set(outcomes(verdicts).values()) == {"pass"}, [v.reason for v in verdicts]
    judged = {m.name for m in verdicts[0].measures if m.bound is not None}
    assert judged == {
        "|scale handed to npu_fusion_attention - softmax_scale|",
        "output relative_l2",
        "query gradient relative_l2",
        "key gradient relative_l2",
        "value gradient relative_l2",
    }


def test_a_right_scale_with_a_wrong_mask_fails_at_the_output(tmp_path):
    verdicts = by_check(drive_mindspeed(mindspeed_tree(tmp_path, adaptor(FROM_MODULE, mask="None"))))
    assert verdicts["plain"].outcome is Outcome.FAIL
    assert verdicts["plain"].reason.startswith("the scale is right, but output, query gradient")
    assert verdicts["plain"].where.quantity == "output"


def test_one_case_that_raises_does_not_hide_the_others(tmp_path):
    text = adaptor(FROM_MODULE).replace("cu_seqlens_q.tolist()", "no_such_field")
    verdicts = by_check(drive_mindspeed(mindspeed_tree(tmp_path, text)))
    assert [v.outcome.value for v in verdicts.values()] == ["pass", "pass", "pass", "error"]
    assert "AttributeError: " in verdicts["mla_packed"].reason


@pytest.mark.parametrize("absent", ["megatron.core", "einops"])
def test_without_megatron_or_einops_it_is_unavailable(absent, monkeypatch, tmp_path):
    found = mindspeed_attention._importable
    monkeypatch.setattr(mindspeed_attention, "_importable", lambda name: name != absent and (found(name) or True))
    with pytest.raises(UnavailableError) as error:
        mindspeed_attention.drive(tmp_path, "MindSpeed")
    assert str(error.value) == (
        f"MindSpeed: {absent} is not installed, and MindSpeed's attention is made of it"
    )


@pytest.mark.engine
@pytest.mark.parametrize("scale", [FROM_HEAD_WIDTH, FROM_MODULE], ids=["head_width", "softmax_scale"])
def test_the_driver_on_the_installed_megatron(scale, tmp_path):
    verdicts = drive_mindspeed(mindspeed_tree(tmp_path, adaptor(scale), megatron=False))
    if scale is FROM_MODULE:
        assert set(outcomes(verdicts).values()) == {"pass"}, [v.reason for v in verdicts]
    else:
        assert_takes_the_head_width(verdicts)


# --- the plugins themselves ------------------------------------------------------------------------------------------


def judge(verdicts) -> None:
    wrong = [explain(verdict) for verdict in verdicts if verdict.outcome is not Outcome.PASS]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def expect_stale(verdicts) -> None:
    assert outcomes(verdicts) == {"after_loading": "pass", "in_place_update": "fail", "post_processing_again": "pass"}
    assert by_check(verdicts)["in_place_update"].reason.startswith("W_UV, W_UK_T are stale")


def test_mindspeed_hands_softmax_scale_to_the_kernel(mindspeed_source):
    with opened(MINDSPEED, mindspeed_source) as source:
        judge(check_mindspeed(source))


def test_vllm_ascend_derives_its_mla_tensors_from_the_weight_it_holds(vllm_ascend_source):
    with opened(VLLM_ASCEND, vllm_ascend_source) as source:
        verdicts = check_vllm_ascend(source)
        known = source.version in STALE_RELEASES
    if known:  # strict: a release on the list that is not stale, or is wrong elsewhere, fails
        expect_stale(verdicts)
        pytest.xfail(explain(by_check(verdicts)["in_place_update"]))
    judge(verdicts)


def repository_with(plugin, text: str | None, revision: str) -> str:
    """``REPOSITORY@revision`` for the repository a source was named from.

    Raises:
        UnavailableError: no repository was named, or it lacks the revision.
    """
    for repository in filter(None, (text, (text or "").rpartition("@")[0])):
        try:
            with opened(plugin, f"{repository}@{revision}"):
                return f"{repository}@{revision}"
        except InputError:
            continue
    raise UnavailableError(f"no repository with {revision} was given with {plugin.option}", where=plugin.name)


def test_mindspeed_is_failed_before_the_fix_and_passes_from_it_on(mindspeed_source):
    before = repository_with(MINDSPEED, mindspeed_source, f"{SCALE_FIX}^")
    with opened(MINDSPEED, before) as source:
        assert_takes_the_head_width(check_mindspeed(source))
    with opened(MINDSPEED, before.removesuffix("^")) as source:
        assert set(outcomes(check_mindspeed(source)).values()) == {"pass"}


@pytest.mark.parametrize("release", ["v0.9.1", "v0.10.0rc1"])
def test_vllm_ascend_releases_are_found_stale(release, vllm_ascend_source):
    with opened(VLLM_ASCEND, repository_with(VLLM_ASCEND, vllm_ascend_source, release)) as source:
        assert source.version == release.removeprefix("v")
        expect_stale(check_vllm_ascend(source))


@pytest.mark.engine
def test_the_release_the_package_index_carries_is_found_stale():
    with opened(VLLM_ASCEND, "index:0.10.0rc1") as source:
        expect_stale(check_vllm_ascend(source))
