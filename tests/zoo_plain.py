"""The zoo's models that are plain PyTorch: an image-to-image net with skips, and a diffusion transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def conv_block(i: int, o: int) -> nn.Sequential:
    first = (nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())
    return nn.Sequential(*first, nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, c: int = 8):
        super().__init__()
        self.down1, self.down2, self.middle = conv_block(3, c), conv_block(c, 2 * c), conv_block(2 * c, 2 * c)
        self.pool, self.grow = nn.MaxPool2d(2), nn.ConvTranspose2d(2 * c, 2 * c, 2, stride=2)
        self.up2, self.up1, self.out = conv_block(4 * c, c), conv_block(2 * c, c), nn.Conv2d(c, 2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        m = self.grow(self.middle(self.pool(b)))
        u = F.interpolate(self.up2(torch.cat([m, b], 1)), scale_factor=2.0, mode="nearest")
        return F.cross_entropy(self.out(self.up1(torch.cat([u, a], 1))), y)


class DiTBlock(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(d, elementwise_affine=False, eps=1e-6)
        self.qkv, self.o, self.condition = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 6 * d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(F.silu(c))[:, None].chunk(6, -1)
        b, n, d = x.shape
        h = self.norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(h).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + gate * self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + gate2 * self.mlp(self.norm(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """Predicts the noise that was mixed into an image at time t, for a class y."""

    keep: torch.Tensor

    def __init__(self, d: int = 32, heads: int = 4, layers: int = 2, patch: int = 4, classes: int = 10):
        super().__init__()
        self.patches, self.classes = nn.Conv2d(3, d, patch, patch), nn.Embedding(classes, d)
        self.time = nn.Sequential(nn.Linear(16, d), nn.SiLU(), nn.Linear(d, d))
        self.blocks = nn.ModuleList(DiTBlock(d, heads) for _ in range(layers))
        self.out = nn.Linear(d, 3 * patch * patch)
        self.patch = patch
        self.register_buffer("keep", torch.linspace(0.99, 0.01, 100))

    def forward(self, x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = self.keep[t][:, None, None, None]
        mixed = kept.sqrt() * x + (1 - kept).sqrt() * noise
        angle = t[:, None].to(x.dtype) * torch.exp(-torch.arange(8) / 8 * 9.2).to(x.dtype)
        c = self.time(torch.cat([angle.cos(), angle.sin()], -1)) + self.classes(y)
        h = self.patches(mixed).flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = block(h, c)
        return F.mse_loss(self.unpatch(self.out(h), x), noise)

    def unpatch(self, h: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        n, p = like.shape[-1] // self.patch, self.patch
        return h.view(-1, n, n, p, p, 3).permute(0, 5, 1, 3, 2, 4).reshape(like.shape)
