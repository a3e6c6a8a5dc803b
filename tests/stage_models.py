"""Models whose layers cost unequal amounts, and the even split of their layers over two or four stages, as pins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pipeline_models import EncoderDecoder
from random_plans import Block
from torch import nn

D, HEADS, VOCAB = 192, 4, 1000


class HeavyHead(nn.Module):
    """A GPT of eight layers whose head costs as much as four: 2 d v = 4 * 24 d d flops a token."""

    def __init__(self, d: int = D, layers: int = 8):
        super().__init__()
        self.tokens = nn.Embedding(48 * d, d)
        self.blocks = nn.ModuleList(Block(d, HEADS, HEADS, 0.0) for _ in range(layers))
        self.head = nn.Linear(d, 48 * d, bias=False)

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, None)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Experts(nn.Module):
    """Four experts, each on every token, their sum weighted by a softmax."""

    def __init__(self, d: int, experts: int = 4):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(d), nn.Linear(d, experts)
        self.up = nn.Parameter(torch.randn(experts, d, 4 * d) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 4 * d, d) * 0.02)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, 1)
        each = F.gelu(tokens @ self.up) @ self.down
        weights = self.gate(tokens).softmax(-1).t().unsqueeze(-1)
        return x + (each * weights).sum(0).view_as(x)


class EveryThird(nn.Module):
    """Nine layers, the first and every third after it of experts."""

    def __init__(self, d: int = D):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, d)
        self.blocks = nn.ModuleList(Block(d, HEADS, HEADS, 0.0) if i % 3 else Experts(d) for i in range(9))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, None)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def _ids(rows: int, length: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length))


MODELS: dict[str, Callable[[int], tuple[nn.Module, dict[str, Any]]]] = {
    "head of 4 layers": lambda n: (HeavyHead(), {"ids": _ids(n, 64), "y": _ids(n, 64)}),
    "encoder-decoder": lambda n: (
        EncoderDecoder(D, VOCAB, HEADS, layers=4),  # a long text in, a short one out
        {"ids": _ids(n, 128), "out": _ids(n, 32), "y": _ids(n, 32)},
    ),
    "every third of experts": lambda n: (EveryThird(), {"ids": _ids(n, 64), "y": _ids(n, 64)}),
}
"""From a number of rows to a model and a batch."""


def even_split(name: str, ranks: int) -> dict[str, int]:
    """{module: stage that starts with it} where stages have as many layers, the first ones one more if need be."""
    if name == "encoder-decoder":
        layers = [f"{part}.{i}" for part in ("encoder", "decoder") for i in range(4)]
    else:
        layers = [f"blocks.{i}" for i in range(9 if name == "every third of experts" else 8)]
    return {layers[-(-s * len(layers) // ranks)]: s for s in range(1, ranks)}
