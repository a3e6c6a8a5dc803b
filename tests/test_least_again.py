"""What is made again is the least that fits: against all choices of a small model, and against the ladder of a GPT."""

from __future__ import annotations

import itertools
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.partitioner.capture import capture
from meshwright.partitioner.fit import Fitted, _bytes, _ladder, _local, fitted
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.least_again import LeastAgain
from meshwright.partitioner.micro import make_plan_in_time
from meshwright.partitioner.plan import Plan
from meshwright.partitioner.planner import Options
from meshwright.partitioner.recompute import made_again
from random_plans import GPT
from torch import nn

HELD = (1.0, 1.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(torch.nn.functional.gelu(self.up(torch.sin(x)))))


def planned(model: nn.Module, *args: torch.Tensor, loss: Any) -> tuple[Graph, Plan]:
    return make_plan_in_time(capture(model, args, {}, loss=loss), mw.Mesh(dp=2, device="cpu"), Options(zero=0), 1)


def of(graph: Graph, plan: Plan, names: frozenset[str]) -> Fitted:
    made = made_again(graph, plan, names) if names else (graph, plan)
    return Fitted(*made, *_bytes(*made, HELD))


def seconds(one: Fitted) -> float:
    return sum(one.plan.seconds)


def test_no_choice_of_values_within_the_memory_loses_less():
    graph, plan = planned(nn.Sequential(Block(), Block()), torch.randn(512, 16), loss=lambda out, _: out.square().sum())
    choice = LeastAgain(graph, plan, {}, _local(graph, plan), 1.0)
    every_block = [block for run in choice.runs for block in run]
    values = [v.name for b in every_block for k, v in enumerate(b.values) if b.read[k] or b.makers()[k]]
    assert len(values) == 8
    subsets = (frozenset(s) for n in range(9) for s in itertools.combinations(values, n))
    every = [of(graph, plan, names) for names in subsets]
    free, least = every[0].nbytes, min(one.nbytes for one in every)
    for share in (0.8, 0.5, 0.3, 0.1):
        budget = least + share * (free - least)
        found = fitted(graph, plan, budget, HELD, "auto", {})
        best = min(seconds(one) for one in every if one.nbytes <= budget)
        assert found.nbytes <= budget and seconds(found) == pytest.approx(best, rel=1e-6), share


def test_never_slower_than_the_ladder():
    torch.manual_seed(0)
    ids = torch.arange(256).reshape(32, 8) % 11
    graph, plan = planned(GPT(drop=0.1, layers=4), ids, ids, loss=lambda out, _: out)
    for names in _ladder(graph, {})[1:]:
        level = of(graph, plan, names)
        found = fitted(graph, plan, level.nbytes, HELD, "auto", {})
        assert found.nbytes <= level.nbytes and seconds(found) <= seconds(level) * (1 + 1e-6)
