"""The critic: the policy's backbone with a scalar head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alignment.models.backbone import Backbone, init_weights
from alignment.models.causal_lm import CausalLM
from alignment.models.config import ModelConfig
from alignment.models.linear import linear


class ValueModel(nn.Module):
    """One value per token. ``state_dict()`` has the names of ``DeepseekV3ForTokenClassification`` with one label,
    which is the class verl loads critics with: ``model.*`` and ``score.*``.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config, dtype=dtype, device=device)
        self.score = linear(config.hidden_size, 1, bias=True, dtype=dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @classmethod
    @torch.no_grad()
    def from_policy(cls, policy: CausalLM, *, seed: int) -> ValueModel:
        """A critic that starts from a copy of the policy's backbone, with a fresh head."""
        critic = cls(policy.config, dtype=policy.dtype, device=policy.device).init_weights(seed)
        critic.model.load_state_dict(policy.model.state_dict())
        return critic

    def init_weights(self, seed: int) -> ValueModel:
        """See :func:`alignment.models.backbone.init_weights`; the bias of the head starts at zero. Returns the
        model.
        """
        init_weights(self, self.config, seed)
        nn.init.zeros_(self.score.bias)
        return self

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Values ``[b, s]``; arguments as :meth:`CausalLM.forward`."""
        hidden = self.model(
            input_ids, attention_mask=attention_mask, position_ids=position_ids, segment_ids=segment_ids
        )
        return self.score(hidden).squeeze(-1)
