"""The fused pre-processing of MLA on reordered weights gives what the module gives."""

import pytest
import torch

from alignment.models.attention import attention_mask_from
from alignment.models.causal_lm import CausalLM
from alignment.models.config import preset
from alignment.models.fused_mla import FusedWeights, fused_preprocess
from alignment.models.mla import AttentionContext
from alignment.models.rope import RotaryTable
from alignment.numerics.random import portable_normal
from alignment.weights.fused_mla_weights import fused_mla_weights


@pytest.mark.parametrize("name", ["tiny-moonlight", "tiny-deepseek"])
@torch.no_grad()
def test_fused_and_plain_agree_and_plain_weights_do_not(name):
    config = preset(name)
    attention = CausalLM(config, dtype=torch.float64).init_weights(0).model.layers[0].self_attn
    hidden = portable_normal((2, 5, config.hidden_size), seed=0, stream="hidden")
    cos, sin = RotaryTable(config)(torch.arange(5).expand(2, 5) + 3, hidden.dtype)
    context = AttentionContext(cos=cos, sin=sin, mask=attention_mask_from(torch.ones(2, 5)))
    plain = (*attention.project_query(hidden, context), *attention.project_latent(hidden, context))
    for mine, right in zip(fused_preprocess(attention, fused_mla_weights(attention), hidden, context), plain):
        torch.testing.assert_close(mine, right)
    query = attention.q_proj if config.q_lora_rank is None else attention.q_b_proj
    unordered = FusedWeights(query=query.weight, latent=attention.kv_a_proj_with_mqa.weight)
    assert not torch.allclose(fused_preprocess(attention, unordered, hidden, context)[3], plain[3])
