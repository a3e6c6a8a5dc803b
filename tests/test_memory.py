"""The memory model: the predicted peak against the bytes that ranks really hold, and what it says of a step."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.partitioner.memory import Model, first_ranks
from meshwright.runtime.tracked import WatchedComm, track
from small import adamw, tied
from zoo import ZOO

NEVER_UNDER, NEVER_OVER = 0.97, 1.05
CASES: list[Any] = [
    ("llama", {"dp": 2}, {}),
    ("llama", {"dp": 2}, {"micro_batches": 2}),
    ("llama", {"tp": 2}, {}),
    ("llama", {"dp": 2}, {"precision": "bf16", "zero": 1}),
    ("llama", {"dp": 2}, {"precision": "bf16", "micro_batches": 2}),
    ("bert", {"pp": 2}, {"micro_batches": 4, "schedule": "1f1b"}),
    pytest.param("mixtral", {"dp": 2, "tp": 2}, {}, marks=pytest.mark.slow),
    pytest.param("unet", {"dp": 2}, {"zero": 1}, marks=pytest.mark.slow),
    pytest.param("t5", {"pp": 2}, {"micro_batches": 4, "schedule": "zb-h1"}, marks=pytest.mark.slow),
]


def stepped(name: str, axes: dict[str, int], asked: dict[str, Any]) -> tuple[mw.Compiled, dict[str, Any]]:
    model, batch = ZOO[name]()
    compiled = mw.compile(model, mw.Mesh(**axes, device="cpu"), optimizer=adamw, **asked)  # type: ignore[arg-type]
    compiled._comm = WatchedComm(compiled.mesh)
    compiled.step(**batch)
    return compiled, batch


@pytest.mark.parametrize(("name", "axes", "asked"), CASES, ids=str)
def test_the_predicted_peak_is_what_ranks_hold(name: str, axes: dict[str, int], asked: dict[str, Any]):
    compiled, batch = stepped(name, axes, asked)
    tracked, model = track(compiled, **batch), Model(compiled.program)
    predicted = [model.of(rank) for rank in range(compiled.mesh.world_size)]
    found = [p.peak / t.peak for p, t in zip(predicted, tracked, strict=True)]
    seen = [f"{p.at}: {p.peak}, {t.at}: {t.peak}" for p, t in zip(predicted, tracked, strict=True)]
    assert min(found) >= NEVER_UNDER and max(found) <= NEVER_OVER, seen


def test_what_stands_adds_up_and_what_is_made_is_let_go_of():
    model, batch = tied()
    compiled = mw.compile(model, mw.Mesh(dp=2, device="cpu"), kwargs=batch, optimizer=adamw)
    made = Model(compiled.program).of(0)
    assert made.peak == max(m.most for m in made.moments) == sum(made.by_kind.values())
    assert all(m.after <= m.most for m in made.moments)
    loss = 4
    assert made.moments[-1].after == sum(made.resident.values()) + made.gradients + loss


def test_stages_hold_their_own():
    model, batch = ZOO["llama"]()
    compiled = mw.compile(model, mw.Mesh(pp=2, device="cpu"), kwargs=batch, optimizer=adamw, micro_batches=4)
    model_ = Model(compiled.program)
    whole = sum(p.numel() * 4 for p in model.parameters())
    ranks = [model_.of(rank) for rank in first_ranks(compiled.program)]
    assert sum(r.resident["parameters"] for r in ranks) == sum(r.gradients for r in ranks) == whole
    assert model_.peak().peak == max(r.peak for r in ranks)


@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.SGD], ids=lambda c: c.__name__)
def test_what_an_optimizer_makes_while_it_steps(made: Any):
    from meshwright.partitioner.allocations import Storages
    from meshwright.partitioner.optimizer_bytes import ADAMW, SGD

    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (1000, 3000, 2000)]
    optimizer = made(parameters, lr=0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = [x for moments in optimizer.state.values() for x in moments.values()]
    seen = Storages([*parameters, *(p.grad for p in parameters), *state])  # type: ignore[list-item]
    with seen:
        optimizer.step()
    stepper = ADAMW if made is torch.optim.AdamW else SGD
    shards = [(p.numel(), p.dtype) for p in parameters]
    assert stepper.state(shards) == sum(x.nbytes for x in state)
    assert abs(stepper.inside(shards, cuda=False) - seen.peak) <= 64


def test_a_report_says_what_stands_and_what_would_take_less():
    model, batch = tied()
    compiled = mw.compile(model, mw.Mesh(dp=2, device="cpu"), kwargs=batch, optimizer=adamw, zero=0)
    report = compiled.memory_report()
    n = sum(p.numel() for p in model.parameters())
    (rank,) = report.ranks
    assert report.elements == (n,) and report.fits and report.peak == rank.peak
    counts = 4 * sum(1 for _ in model.parameters())
    assert (rank.resident["parameters"], rank.gradients) == (4 * n, 4 * n)
    assert rank.resident["optimizer"] == 8 * n + counts
    page = str(report)
    wanted = ("bytes a parameter", "peak", "zero=1: up to", "micro_batches=2", "holds most at")
    assert all(words in page for words in wanted)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_at_rest_are_those_of_zero(zero: int, ranks: int):
    """fp32 Adam: 16 bytes an element without, 16 / N with a stage; see docs/memory.md."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64, False), torch.nn.Tanh(), torch.nn.Linear(64, 64, False))
    x = torch.randn(8, 64)
    compiled = mw.compile(
        net, mw.Mesh(dp=ranks, device="cpu"), args=(x,), loss=lambda y: y.square().mean(), optimizer=adamw, zero=zero
    )
    made = Model(compiled.program).of(0)
    share = ranks if zero else 1
    n = 2 * 64 * 64 // share
    assert (made.resident["parameters"], made.gradients, made.resident["optimizer"]) == (4 * n, 4 * n, 8 * n + 8)
