"""A process that dies, stops, raises or hangs: all others end in time with an error that names it."""

from __future__ import annotations

import os
import signal
import time

import meshwright as mw
import pytest
import torch
from launch import run_outcomes
from meshwright.runtime.watch import Note, _verdict
from torch import nn

pytestmark = pytest.mark.timeout(300)
LIMIT = 6.0


def trains(rank, world, fault, at, bad):
    """Two steps; rank `bad` has the fault before its second step, or while the first is captured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    if at == "capture" and rank == bad:
        model.append(_Bad(fault))
    elif at == "capture":
        model.append(nn.Identity())
    compiled = mw.compile(model, mw.Mesh(dp=world), loss=lambda out: out.square().mean(), timeout=LIMIT)
    x = torch.randn(12, 6)
    begin = time.monotonic()
    try:
        if at == "step":
            compiled.step(x)
            begin = time.monotonic()
            if rank == bad:
                happen(fault)
        compiled.step(x)
    except mw.MeshwrightError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    except ArithmeticError as error:
        return "ArithmeticError", str(error), time.monotonic() - begin
    return "no error", "", 0.0


class _Bad(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x):
        happen(self.fault)
        return x


def happen(fault):
    if fault == "raise":
        raise ArithmeticError("bad sample 17")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


SAYS = {
    "raise": "rank {} raised: ArithmeticError: bad sample 17",
    "kill": "rank {} is gone or silent",
    "stop": "rank {} is gone or silent",
    "hang": "rank {} is behind",
}
"""What the error of every other rank holds, by fault."""


@pytest.mark.parametrize(
    ("fault", "at", "bad", "world"),
    [("raise", "capture", 2, 3), ("hang", "step", 1, 3)],
)
def test_all_others_name_the_process_that_fails(fault, at, bad, world):
    outcomes = run_outcomes(trains, world, fault, at, bad, timeout=100, but=bad)
    for rank, outcome in enumerate(outcomes):
        if rank != bad:
            kind, text, took = outcome.value
            assert kind == "PeerError" and SAYS[fault].format(bad) in text, (rank, outcome)
            assert took < LIMIT + 20, (rank, outcome)


def test_ranks_at_different_points_are_all_named():
    """One had inputs of another shape and captures anew; the other is at a collective of the old program."""
    before = {r: Note(4, 2, "", False, 0.0) for r in range(2)}
    now = {0: Note(9, 3, "all_reduce(sum) over tp", True, 34.0), 1: Note(9, 2, "comparing programs", True, 34.0)}
    for me in range(2):
        said = _verdict(me, before, now, {})
        assert "rank 0 waits: in step 3, for 34 s waiting for all_reduce" in said
        assert "rank 1 waits: in step 2" in said and "another shape" in said
