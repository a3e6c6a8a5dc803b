"""What ZeRO sends and holds: 2, 2, 2, 3 units of psi (N - 1) / N, and 18 bytes a parameter under bf16."""

from __future__ import annotations

from functools import cache

import meshwright as mw
import pytest
import torch
from meshwright.partitioner.capture import capture
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.memory import Model
from meshwright.partitioner.planner import Options, make_plan
from small import adamw
from torch import nn

WIDTH = 64
UNITS = {0: 2, 1: 2, 2: 2, 3: 3}
"""An all-reduce; a reduce-scatter and a gather; the same; two gathers and a reduce-scatter (ZeRO, section 7)."""


def net(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH, False), nn.Tanh())]
    return nn.Sequential(*parts)


@cache
def graph() -> Graph:
    return capture(net(), (torch.randn(16, WIDTH),), {}, loss=lambda y, _: y.square().mean())


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("zero", UNITS)
def test_bytes_sent_for_a_parameter(zero: int, ranks: int):
    """Of the first layer backward does not read the weight, since nobody asks for the input's gradient: no second
    gather."""
    _, plan = make_plan(graph().copy(), mw.Mesh(dp=ranks, device="cpu"), Options(zero=zero))
    assert plan.facts is not None and plan.zero == zero
    unit = 4 * WIDTH * WIDTH * (ranks - 1) / ranks
    for name in plan.resting:
        moves = [m for m in plan.facts.moves if m.value == name or ("grad", name) in m.leaves]
        sent = sum(sum(m.way.sent) for m in moves)
        assert sent == pytest.approx((min(UNITS[zero], 2) if name == "0.weight" else UNITS[zero]) * unit), name


@pytest.mark.parametrize("zero", [0, 1])
def test_bytes_a_parameter_under_bf16(zero: int):
    """Master 4, moments 8, gradient 4, working copy 2: 18, and 16 of it over the ranks from stage 1 on."""
    x = torch.randn(4096, WIDTH)
    compiled = mw.compile(
        net(), mw.Mesh(dp=2, device="cpu"), args=(x,), loss=lambda y: y.float().square().mean(), optimizer=adamw,
        zero=zero, precision="bf16",
    )  # fmt: skip
    made, n = Model(compiled.program).of(0), 3 * WIDTH * WIDTH
    share = 2 if zero else 1
    assert made.resident["parameters"] == made.gradients == 4 * n // share
    assert made.resident["optimizer"] == 8 * n // share + 3 * 4
    if zero == 0:
        assert made.by_kind["working copies"] == 2 * (n - WIDTH * WIDTH)  # backward does not read the first layer's
