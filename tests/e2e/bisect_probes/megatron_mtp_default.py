"""megatron-core's default for the weight of the multi-token-prediction loss: 0 where it has none."""

import json
import sys

from megatron.core.transformer.transformer_config import TransformerConfig

config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, mtp_num_layers=1)
value = config.mtp_loss_scaling_factor or 0.0
print(json.dumps({"metric": value, "check": "mtp_loss_scaling_factor"}))
sys.exit(int(value != 0.0))
