"""ZeRO under micro-batches whose token counts differ by rank and by micro-batch: the numbers of one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import wrong_in
from torch import nn

MESHES: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2}, "dp4": {"dp": 4}, "dp2xtp2": {"dp": 2, "tp": 2}, "dp2xpp2": {"dp": 2, "pp": 2},
}  # fmt: skip
ROWS, LENGTH, VOCAB = 16, 6, 12
QUICK = {(3, 4, "dp2"), (2, 4, "dp2xpp2")}


class Ragged(nn.Module):
    """Next to nothing, with what matters here: an embedding, norms, weights, and targets of which most are ignored."""

    def __init__(self, d: int = 8):
        super().__init__()
        self.tokens, self.up, self.down = nn.Embedding(VOCAB, d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB)

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten(), ignore_index=-100)


def batch() -> dict[str, torch.Tensor]:
    """Row i has (3 i^2 + i) mod 7 tokens that count: between none and all of 6."""
    ids, y = torch.randint(0, VOCAB, (2, ROWS, LENGTH))
    counts = torch.tensor([(3 * i * i + i) % 7 for i in range(ROWS)])
    return {"ids": ids, "y": torch.where(torch.arange(LENGTH) < counts[:, None], y, -100)}


def cells() -> list[Any]:
    every = itertools.product(range(4), (1, 4), MESHES)
    return [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow, id="-".join(map(str, c))) for c in every]


@pytest.mark.parametrize(("zero", "count", "mesh"), cells())
def test_unequal_token_counts(zero: int, count: int, mesh: str):
    torch.manual_seed(0)
    found = wrong_in(Ragged(), batch(), MESHES[mesh], count, zero=zero)
    assert not found, "\n".join(found)
