"""Four blocks each of a GPT, a Llama and a ViT, in plain torch, with a small head: what backward reads is theirs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from race_model import GPT, Config
from torch import nn

LAYERS, D, HEADS, FF, VOCAB, B, S = 4, 2048, 16, 8192, 2048, 4, 2048

Entry = tuple[nn.Module, dict[str, torch.Tensor]]


class Lm(nn.Module):
    """A language model with its loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(ids).flatten(0, -2), y.flatten())


class LlamaBlock(nn.Module):
    """RMS norms, rotary angles, two key/value heads for four of queries, SwiGLU."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, half = nn.RMSNorm(D), nn.RMSNorm(D), D // 2
        sizes = {"q": (D, D), "k": (D, half), "v": (D, half), "o": (D, D)}
        sizes |= {"gate": (D, FF), "up": (D, FF), "down": (FF, D)}
        self.w = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = (self.w[n](h).view(b, s, -1, D // HEADS).transpose(1, 2) for n in "qkv")
        q, k = (t * cos + torch.cat([-t[..., D // HEADS // 2 :], t[..., : D // HEADS // 2]], -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.w["o"](y.transpose(1, 2).reshape(b, s, -1))
        h = self.norm2(x)
        return x + self.w["down"](F.silu(self.w["gate"](h)) * self.w["up"](h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(VOCAB, D), nn.RMSNorm(D), nn.Linear(D, VOCAB, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(LAYERS))
        angles = torch.arange(S)[:, None] * 10000.0 ** -(torch.arange(0, D // HEADS, 2) / (D // HEADS)).repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class ViTBlock(nn.Module):
    """Pre-norm, biases, attention over all patches, gelu."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, FF), nn.Linear(FF, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, s, -1, D // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patches of 16 x 16 of pictures of 512 x 512, a class token, 10 classes."""

    def __init__(self):
        super().__init__()
        self.patch, self.norm, self.head = nn.Conv2d(3, D, 16, 16), nn.LayerNorm(D), nn.Linear(D, 10)
        self.first, self.places = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, 1025, D))
        self.blocks = nn.ModuleList(ViTBlock() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], 1, D), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def _words(model: nn.Module) -> Entry:
    ids = torch.randint(0, VOCAB, (B, S))
    return Lm(model), {"ids": ids, "y": ids.clone()}


MODELS: dict[str, Callable[[], Entry]] = {
    "GPT": lambda: _words(GPT(Config(LAYERS, D, HEADS, B, S, VOCAB))),
    "Llama": lambda: _words(Llama()),
    "ViT": lambda: (Lm(ViT()), {"ids": torch.randn(B, 3, 512, 512), "y": torch.randint(0, 10, (B,))}),
}
