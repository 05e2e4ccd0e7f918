"""The scale that megatron-core's own MLA gives its attention for DeepSeek-V3's widths and YaRN factors, as one
number.
"""

import json
import math
import os
import tempfile

import torch


class Attention(torch.nn.Module):
    """In the place of the attention kernel: keeps the scale it is given."""

    def __init__(self, *arguments, softmax_scale=None, **options) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale


def main() -> int:
    from alignment.backends.megatron_cpu import on_cpu

    with tempfile.TemporaryDirectory() as folder, on_cpu():
        import megatron.core.transformer.multi_latent_attention as mla
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.spec_utils import build_module
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        if not isinstance(getattr(mla, "TELinear", ()), (type, tuple)):
            mla.TELinear = ()  # 0.16 asks for it, and where Transformer Engine is not installed it is no class
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        config = MLATransformerConfig(
            num_layers=1,
            hidden_size=64,
            num_attention_heads=4,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_head_dim=128,
            qk_pos_emb_head_dim=64,
            v_head_dim=128,
            rotary_scaling_factor=40,
            mscale=0.707,
            mscale_all_dim=1.3,
            use_cpu_initialization=True,
        )
        spec = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
        spec.submodules.core_attention = Attention
        layer = build_module(spec, config=config, layer_number=1)
        scale = float(layer.core_attention.softmax_scale)
    # YaRN: (0.1 · mscale_all_dim · ln(factor) + 1)² / √(128 + 64); see DeepSeek-V3's modeling code.
    expected = (0.1 * 1.3 * math.log(40) + 1) ** 2 / math.sqrt(192)
    wrong = abs(scale - expected) > 8 * torch.finfo(torch.float64).eps * expected
    print(json.dumps({"metric": scale, "check": "mla_softmax_scale", "where": "self_attention"}), flush=True)
    return int(wrong)


if __name__ == "__main__":
    code = main()
    os._exit(code)  # without the tear-down of process groups
