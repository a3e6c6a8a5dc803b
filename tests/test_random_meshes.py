"""Random numbers belong to elements: the same loss and gradients, whatever the mesh and the number of micro-batches."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from small import mesh
from torch import nn


class Noisy(nn.Module):
    """Every kind of draw: noise like an activation, a mask, one row for the whole batch, dropout, and residuals."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(F.dropout(x, 0.2)))
        h = h + 0.1 * torch.randn_like(h)
        h = h * torch.bernoulli(torch.full_like(h, 0.8)) + torch.rand(h.shape[-1])
        h = h + F.dropout(self.mid(h), 0.3) + 0.1 * torch.rand_like(h)
        return self.down(F.dropout(F.gelu(h), 0.5))


def step(axes: dict[str, int], width: int, **more: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, x, y = Noisy(width), torch.randn(8, 6), torch.randint(0, 5, (8,))
    compiled = mw.compile(model, mesh(axes), loss=F.cross_entropy, seed=5, **more)
    losses = torch.stack([compiled.step(x, target=y) for _ in range(2)])
    assert losses[0] != losses[1]
    return {"losses": losses, **compiled.gather("grads")}


QUICK: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2, "tp": 2}, {}),
    ({"dp": 1}, {"micro_batches": 4}),
    ({"pp": 2}, {"micro_batches": 4, "schedule": "1f1b"}),
]
SLOW: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"dp": 3}, {"zero": 3}),
    ({"x": 4}, {}),
    ({"dp": 2}, {"micro_batches": 2}),
    ({"pp": 2, "tp": 2}, {"micro_batches": 2}),
]


@pytest.mark.parametrize(
    "width,cases",
    [
        pytest.param(7, QUICK, id="odd"),
        pytest.param(7, SLOW, marks=pytest.mark.slow, id="odd-more"),
        pytest.param(8, QUICK + SLOW, marks=pytest.mark.slow, id="even"),
    ],
)
def test_every_draw_is_the_same_everywhere(width, cases):
    """7 columns: the runs of most ranks start within a block of four words."""
    want = step({"dp": 1}, width)
    for axes, more in cases:
        got = step(axes, width, **more)
        for name, t in want.items():
            torch.testing.assert_close(got[name], t, rtol=1e-4, atol=1e-6, msg=lambda m: f"{axes} {name}: {m}")  # noqa: B023
