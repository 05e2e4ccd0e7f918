"""A small model in which everything a capture has to cope with occurs: residuals, a norm that uses its input twice, a
module that is called twice, a list of layers, token ids and a mask."""

from __future__ import annotations

import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.left, self.right = Norm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.left(h).sigmoid() * self.right(h)


class Model(nn.Module):
    def __init__(self, width: int = 24, vocab: int = 31, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.twice = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None].to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(self.twice(self.twice(x).tanh()))}


def make_model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return Model().to(dtype)


def batch(seed=0, rows=3, length=7):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(31, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for i in range(rows):
        mask[i, :i] = 0
    return ids, mask


def train(model, steps=3, around=None):
    """Losses and gradients of a few steps, as bytes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        ids, mask = batch(step)
        with around(step) if around else torch.enable_grad():
            optimizer.zero_grad(set_to_none=True)
            logits = model(input_ids=ids, attention_mask=mask)["logits"]
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
            loss.backward()
            seen.append(loss.detach().clone())
            seen += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
    return seen
