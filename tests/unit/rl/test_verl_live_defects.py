"""Live defects of verl 0.9.1 that its users meet, each with its signature; docs/live-defects.md describes them."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest

from alignment.backends.verl_platform import ENVIRONMENT, has_value_head, require_value_head
from alignment.rl.verl_plugin import MODULE
from alignment.rl.verl_sampling import END, boundaries_by_tokenizer, sample_seed, seeded

pytestmark = pytest.mark.engine

DEFECTS_OF = "0.9.1"
PROBE = Path(__file__).with_name("verl_probe.py")
CHECKPOINT = Path(__file__).resolve().parents[3] / "baselines" / "checkpoints" / "tiny-moonlight-warm"


@pytest.fixture(scope="module", autouse=True)
def verl_is_here():
    """Looked for when a test runs: a check that is not carried out shows as such."""
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")


class LiveDefect(AssertionError):
    """The described defect, with its signature; any other failure is a failure of the test."""


def live_defect(what: str):
    """A strict expected failure, pinned to the release it was found in: a release that mends it breaks the test."""
    version = metadata.version("verl") if importlib.util.find_spec("verl") else "not installed"
    return pytest.mark.xfail(version == DEFECTS_OF, raises=LiveDefect, strict=True, reason=f"verl {version}: {what}")


def show(signature: bool) -> None:
    if signature:
        raise LiveDefect("the defect shows where and how docs/live-defects.md says")


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer that is not DeepSeek's, of a model whose model_type is deepseek_v3: as Moonlight has it."""
    from transformers import AutoTokenizer

    assert json.loads((CHECKPOINT / "config.json").read_text())["model_type"] == "deepseek_v3"
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def builder(tokenizer, **named):
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    return create_continuous_token_builder(tokenizer, **named)


@live_defect("turn boundaries follow model_type, and deepseek_v3 means DeepSeek's own tokenizer")
def test_a_model_of_type_deepseek_v3_may_have_another_tokenizer(tokenizer):
    try:
        builder(tokenizer, hf_model_type="deepseek_v3")
    except ValueError as error:
        show(f"does not define required token {END!r}" in str(error))
        raise


@live_defect("with an unknown token in the vocabulary, that becomes the end of a sentence in silence")
def test_the_end_of_a_sentence_is_not_the_unknown_token(tokenizer):
    with_unknown = copy.deepcopy(tokenizer)
    with_unknown.unk_token = tokenizer.pad_token
    made = builder(with_unknown, hf_model_type="deepseek_v3")
    show(made._eos_id == with_unknown.unk_token_id)
    assert made._eos_id == tokenizer.eos_token_id


def test_with_the_way_round_the_tokenizer_decides(tokenizer):
    named = {"tokenizer": tokenizer, "hf_model_type": "deepseek_v3"}
    assert boundaries_by_tokenizer(named)["hf_model_type"] is None
    builder(tokenizer, hf_model_type=None)
    deepseek = types.SimpleNamespace(get_vocab=lambda: {END: 1})
    for kept in (
        {"tokenizer": deepseek, "hf_model_type": "deepseek_v3"},
        {"tokenizer": tokenizer, "hf_model_type": "qwen3"},
    ):
        assert boundaries_by_tokenizer(kept) == kept


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What verl's own code says about itself (:mod:`verl_probe`)."""
    done = subprocess.run(
        [sys.executable, PROBE, tmp_path_factory.mktemp("dump")],
        env={**os.environ, **ENVIRONMENT, "VERL_USE_EXTERNAL_MODULES": MODULE},
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and said, done.stderr[-3000:]
    return json.loads(said[0].removeprefix("FOUND "))


def test_a_trl_without_the_value_head_is_none_to_verl_with_the_way_round():
    """Stock verl takes any trl for one that has the class, and dies in ``init_model``."""
    from verl.utils.import_utils import is_trl_available

    if importlib.util.find_spec("trl") is None or has_value_head():
        pytest.skip("no trl is installed that lacks the class")
    stock = types.SimpleNamespace(is_trl_available=getattr(is_trl_available, "__wrapped__", is_trl_available))
    assert stock.is_trl_available()
    require_value_head(stock)
    assert not stock.is_trl_available()


@live_defect("a score of the reward function takes the place of the reward in the dump of rollouts")
def test_the_dump_of_rollouts_shows_the_reward(found):
    show(found["dumped_score"] == -1.0)
    assert found["dumped_score"] == -1.5


@live_defect("actor.fsdp_config.dtype is declared, documented and never read: FSDP computes in bfloat16")
def test_the_dtype_of_the_fsdp_engine_has_an_effect(found):
    assert found["fsdp_reads"]["mixed_precision"], "what does have an effect"
    show(not found["fsdp_reads"]["dtype"])


@live_defect("the legacy trainer accepts algorithm.filter_groups and trains on every group")
def test_dynamic_sampling_is_done_or_refused_by_the_legacy_trainer(found):
    show(not found["filters_groups"])


@live_defect("full_determinism gives every request one seed: the samples of a prompt are copies of each other")
def test_samples_of_a_prompt_are_drawn_independently_under_full_determinism(found):
    """In a group of copies every advantage of GRPO is zero: nothing is learnt, and no metric says why."""
    show(found["seeds"] == [42] * 4)
    assert len(set(found["seeds"])) == 4


def test_with_seeds_per_sample_no_two_samples_share_one_and_two_runs_share_all():
    async def run(sampling_params, **fields):
        return sampling_params["seed"]

    def draw():
        loop = seeded(run, base=42, samples=4, seen={})
        samples = [(prompt, 4 * i + k) for _ in range(2) for i, prompt in enumerate("ab") for k in range(4)]
        return [asyncio.run(loop({}, extra_info={"prompt_id": p}, priority=number)) for p, number in samples]

    first, second = draw(), draw()
    assert first == second and len(set(first)) == 16
    assert first[0] == sample_seed(base=42, prompt="a", sample=0, occurrence=0)
    given = asyncio.run(seeded(run, base=1, samples=4, seen={})({"seed": 7}, extra_info={"prompt_id": "a"}))
    assert given == 7, "who decides on a seed gets it"
