"""Pieces that several cases use."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def sq(out: torch.Tensor) -> torch.Tensor:
    """Mean square of one tensor: a loss with dense, uneven gradients."""
    return out.float().pow(2).mean() if out.dtype in (torch.bfloat16, torch.float16) else out.pow(2).mean()


def randn(*shape_and_seed: int) -> torch.Tensor:
    *shape, seed = shape_and_seed
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sgd(lr: float) -> MakeOptimizer:
    return lambda m: torch.optim.SGD(m.parameters(), lr=lr)


def adamw(lr: float) -> MakeOptimizer:
    return lambda m: torch.optim.AdamW(m.parameters(), lr=lr)


class TokenLM(nn.Module):
    def __init__(self, v: int = 20, d: int = 12):
        super().__init__()
        self.emb, self.f, self.head = nn.Embedding(v, d), nn.Linear(d, d), nn.Linear(d, v)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.head(torch.tanh(self.f(self.emb(ids))))
        return F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=-100)


class SmallBlock(nn.Module):
    def __init__(self, d: int = 8, h: int = 16):
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.ln(x))))
