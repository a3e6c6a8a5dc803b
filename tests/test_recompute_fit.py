"""recompute="auto": within a falling memory= plans fit as they count, take ever longer, and give equal numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.partitioner.capture import capture
from meshwright.partitioner.fit import Fitted, as_asked
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.micro import make_plan_in_time
from meshwright.partitioner.planner import Options
from random_plans import GPT

TOKENS, TARGETS = (torch.arange(32 * 8).reshape(32, 8) % n for n in (13, 11))


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(drop=0.1, layers=4).train()


@cache
def graph() -> Graph:
    return capture(gpt(), (TOKENS, TARGETS), {}, loss=lambda out, target: out)


def counted(**options: Any) -> Fitted:
    made = make_plan_in_time(graph(), mw.Mesh(dp=2, device="cpu"), Options(**options), 1)
    return as_asked(*made, (1.0, 1.0), "none", {})


def test_plans_fit_and_take_longer_as_the_memory_falls():
    free = counted()
    found = [counted(memory=int(free.nbytes * share)) for share in (1.0, 0.9, 0.8, 0.7)]
    for share, one in zip((1.0, 0.9, 0.8, 0.7), found, strict=True):
        assert one.nbytes <= share * free.nbytes
    seconds = [sum(one.plan.seconds) for one in found]
    assert seconds == sorted(seconds) and seconds[0] == pytest.approx(sum(free.plan.seconds), rel=1e-3)
    made = [len(one.plan.recompute) for one in found]
    assert made[0] == 0 < made[1] < made[2]


def test_recompute_none_is_kept_to():
    free = counted()
    with pytest.raises(mw.PlanError, match="cannot hold this model"):
        counted(memory=int(free.nbytes * 0.7), recompute="none")


def test_too_little_for_any_recompute():
    with pytest.raises(mw.PlanError, match=r"With recompute of every block the least found takes \d+ bytes, \d+ of it"):
        counted(memory=100_000)


def test_a_plan_within_the_memory_gives_the_same_numbers():
    runs = []
    for memory in (None, int(counted().nbytes * 0.8)):
        compiled = mw.compile(gpt(), mw.Mesh(dp=2, device="cpu"), memory=memory)
        runs.append({"loss": compiled.step(TOKENS, TARGETS)} | compiled.gather("grads"))
        assert bool(compiled.plan.recompute) == (memory is not None)
    assert all(torch.equal(runs[0][n], runs[1][n]) for n in runs[0])
