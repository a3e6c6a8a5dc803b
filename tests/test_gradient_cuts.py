"""Factors of a parameter that are cut more finely than its gradient's."""

from __future__ import annotations

import copy

import meshwright as mw
import torch
from torch import nn


class Skips(nn.Module):
    """A norm over groups of channels that were put together, as a U-Net has it."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(8, 24), nn.Conv2d(24, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.one(x)
        both = torch.cat([self.two(first), first], 1)
        return self.last(torch.nn.functional.silu(self.norm(both))).square().mean()


def test_a_norm_over_groups_of_joined_channels_trains():
    """An 860M U-Net could not be planned: `IndexError`, where gradients go to how their parameters rest."""
    model, x = Skips(), torch.randn(4, 4, 4, 4)
    alone = copy.deepcopy(model)
    alone(x).backward()
    compiled = mw.compile(model, mw.Mesh(x=2), kwargs={"x": x})
    compiled.step(x=x)
    found = compiled.gather("grads")
    for name, p in alone.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-6)
