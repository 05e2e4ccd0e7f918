"""A small policy that is no part of the product: what engines and stages are fed with, so that only they are judged."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alignment.numerics.random import portable_normal


class ToyPolicy(nn.Module):
    """Context, position and padding all matter: h_t = tanh(mix · Σ_{s ≤ t, real} embed[x_s] / (1 + p_s)); logits =
    head h.

    Args:
        vocab, width: sizes.
        values: a scalar head instead of logits.
    """

    def __init__(
        self, *, seed: int, vocab: int = 13, width: int = 5, values: bool = False, dtype=torch.float64
    ) -> None:
        super().__init__()

        def drawn(name: str, *shape: int) -> nn.Parameter:
            return nn.Parameter(portable_normal(shape, seed=seed, stream=f"toy/{name}").to(dtype))

        self.embed, self.mix = drawn("embed", vocab, width), drawn("mix", width, width)
        self.gain = drawn("gain", width)
        self.lm_head = nn.Linear(width, 1 if values else vocab, bias=False, dtype=dtype)
        self.lm_head.weight = drawn("head", 1 if values else vocab, width)
        self.values = values

    def forward(self, input_ids: Tensor, *, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Logits ``[b, s, v]``, or values ``[b, s]``."""
        seen = self.embed[input_ids] / (1.0 + position_ids).to(self.embed.dtype).unsqueeze(-1)
        seen = torch.where(attention_mask.unsqueeze(-1) != 0, seen, torch.zeros_like(seen)).cumsum(1)
        out = self.lm_head(torch.tanh(seen @ self.mix.t()) * self.gain)
        return out.squeeze(-1) if self.values else out


def forward_alone(model: ToyPolicy, tokens: list[int]) -> Tensor:
    """What the model says at each position of one unpadded sequence, ``[s, v]`` or ``[s]``."""
    ids = torch.tensor([tokens])
    return model(ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(len(tokens))[None])[0]
