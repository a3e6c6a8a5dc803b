"""A U-Net of the size of Stable Diffusion's (860 M parameters), in plain torch modules, with its loss.

Four levels of 320, 640, 1280 and 1280 channels, two residual blocks each, attention over the image and to a text on
the first three (Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", 2022).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """Two convolutions; the time shifts what lies between them."""

    def __init__(self, wide: int, out: int, time: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, wide), nn.GroupNorm(32, out)
        self.conv1, self.conv2 = nn.Conv2d(wide, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.skip = nn.Conv2d(wide, out, 1) if wide != out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, wide: int, context: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.out = nn.Linear(wide, wide, bias=False), nn.Linear(wide, wide)
        self.k, self.v = nn.Linear(context, wide, bias=False), nn.Linear(context, wide, bias=False)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        every = (self.q(x), self.k(context), self.v(context))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in every)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Attention over the image, attention to the text, and a gated MLP."""

    def __init__(self, wide: int, context: int, heads: int = 8):
        super().__init__()
        self.norm, self.into, self.back = nn.GroupNorm(32, wide), nn.Conv2d(wide, wide, 1), nn.Conv2d(wide, wide, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for _ in range(3))
        self.image, self.text = Attention(wide, wide, heads), Attention(wide, context, heads)
        self.up, self.gate, self.down = nn.Linear(wide, 4 * wide), nn.Linear(wide, 4 * wide), nn.Linear(4 * wide, wide)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        h = self.into(self.norm(x)).flatten(2).transpose(1, 2)
        own = self.norms[0](h)
        h = h + self.image(own, own)
        h = h + self.text(self.norms[1](h), text)
        own = self.norms[2](h)
        h = h + self.down(self.up(own) * F.gelu(self.gate(own)))
        return x + self.back(h.transpose(1, 2).unflatten(2, x.shape[2:]))


class Block(nn.Module):
    def __init__(self, wide: int, out: int, time: int, text: int | None):
        super().__init__()
        self.residual = Residual(wide, out, time)
        self.attention = Transformer(out, text) if text else None

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.residual(x, time)
        return x if self.attention is None else self.attention(x, text)


class UNet(nn.Module):
    """From a noisy image, a time embedding and a text to the mean squared error of the noise."""

    def __init__(self, widths: tuple[int, ...] = (320, 640, 1280, 1280), blocks: int = 2, text: int = 768):
        super().__init__()
        time, last = 4 * widths[0], len(widths) - 1
        self.time = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.first, wide, seen = nn.Conv2d(4, widths[0], 3, padding=1), widths[0], [widths[0]]
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        for level, out in enumerate(widths):
            for _ in range(blocks):
                self.down.append(Block(wide, out, time, text if level < last else None))
                wide = out
                seen.append(wide)
            if level < last:
                self.shrink.append(nn.Conv2d(wide, wide, 3, stride=2, padding=1))
                seen.append(wide)
        self.middle = nn.ModuleList([Block(wide, wide, time, text), Block(wide, wide, time, None)])
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, out in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                self.up.append(Block(wide + seen.pop(), out, time, text if level < last else None))
                wide = out
            if level > 0:
                self.grow.append(nn.Conv2d(wide, wide, 3, padding=1))
        self.norm, self.last, self.blocks = nn.GroupNorm(32, wide), nn.Conv2d(wide, 4, 3, padding=1), blocks

    def forward(self, image: torch.Tensor, time: torch.Tensor, text: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        time, x = self.time(time), self.first(image)
        seen = [x]
        for i, block in enumerate(self.down):
            x = block(x, time, text)
            seen.append(x)
            if (i + 1) % self.blocks == 0 and i + 1 < len(self.down):
                x = self.shrink[i // self.blocks](x)
                seen.append(x)
        for block in self.middle:
            x = block(x, time, text)
        for i, block in enumerate(self.up):
            x = block(torch.cat([x, seen.pop()], 1), time, text)
            if (i + 1) % (self.blocks + 1) == 0 and i + 1 < len(self.up):
                x = self.grow[i // (self.blocks + 1)](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.last(F.silu(self.norm(x))), noise)
