"""Workers of a parameter server in processes: times as theory has them, equalities that are exact, workers that die."""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import time
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from launch import run_outcomes, run_ranks
from meshwright.partitioner.sync_clock import SYNCS, Gradient, updates
from meshwright.partitioner.sync_rules import RESTARTING, Rules
from torch import nn

P, K, DELAY = 4, 2, mw.Delay(mean=0.3, shift=0.1)
COUNT = {"ps-sync": 5, "k-sync": 8, "k-batch-sync": 8, "async": 20, "k-async": 8, "k-batch-async": 9}
"""Updates of each kind: two to four seconds of sleep; `benchmarks/sync_time.py` has times beside theory."""


# -- the rules, under a clock
def by_rules(sync: str, k: int | None, delay: mw.Delay, count: int) -> list[tuple[float, list[Gradient], list[int]]]:
    """(time, gradients, staleness) of updates: events of workers that do as `runtime/worker.py` does."""
    rules, draws = Rules(sync, P, k), [delay.draws(1, w) for w in range(P)]
    numbers, has, running, found = [0] * P, [0] * P, [], []
    version = {w: 0 for w in range(P)}

    def begin(w: int, at: float) -> None:
        heapq.heappush(running, (at + next(draws[w]), w, numbers[w], version[w]))
        has[w], numbers[w] = numbers[w], numbers[w] + 1

    for w in range(P):
        begin(w, 0.0)
    while len(found) < count:
        at, w, number, at_version = heapq.heappop(running)
        decision = rules.push(w, number, at_version)
        assert not decision.dropped
        if decision.taken:
            late = [rules.version - 1 - v for _, _, v in decision.taken]
            found.append((at, [Gradient(*key) for key in decision.taken], late))
            if rules.restarts:
                running.clear()
        for to in decision.reply:
            version[to] = rules.version
            begin(to, at)
        if rules.batch and rules.restarts and not decision.reply:
            begin(w, at)
    return found


@pytest.mark.parametrize("sync", SYNCS)
def test_the_rules_are_those_of_the_clock(sync: str):
    k, delay = K if sync.startswith("k-") else None, mw.Delay(shift=0.1)
    clock = itertools.islice(updates(sync, P, k, delay, seed=1), 200)
    for (at, gradients, late), want in zip(by_rules(sync, k, delay, 200), clock, strict=True):
        assert at == pytest.approx(want.time)
        assert gradients == list(want.gradients) and tuple(late) == want.staleness


@pytest.mark.parametrize("sync", SYNCS)
def test_an_update_needs_no_worker_that_has_left(sync: str):
    rules = Rules(sync, 3, 2 if sync.startswith("k-") else None)
    rules.push(0, 0, 0)
    rules.leave(1)
    version = rules.version
    rules.push(2, 0, rules.version)
    assert rules.version > min(version, 1 if sync == "async" else 0) and 1 not in rules.alive
    rules.leave(2)
    before = rules.version
    for n in range(3):
        rules.push(0, n + 1, rules.version)
    assert rules.version > before
    assert rules.push(1, 9, rules.version).dropped


# -- processes
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(worker: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(97 * worker + number)
    x = torch.randn(4, 6, generator=generator).double()
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def made(sync: str | mw.Sync, world: int, k: int | None = None, **options: Any) -> Any:
    return mw.compile(
        net(), mw.Mesh(dp=world, device="cpu"), loss=F.cross_entropy, sync=sync, k=k, timeout=60, seed=1,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), **options,
    )  # fmt: skip


def all_kinds(rank: int, world: int) -> dict[str, Any]:
    """Each kind with delays; and K-sync with K = P, without."""
    out: dict[str, Any] = {}
    for sync in SYNCS[1:]:
        kept = mw.Sync(sync, K if sync.startswith("k-") else None, 2, DELAY)
        compiled = made(kept, world)
        for number in itertools.count():
            if compiled.version >= COUNT[sync]:
                break
            x, y = data(rank, number)
            compiled.step(x, target=y)
        compiled.close()
        out[sync] = compiled.history[: COUNT[sync]], compiled.cancelled
    compiled = made("k-sync", world, world)
    losses = [float(compiled.step(x, target=y)) for x, y in (data(rank, n) for n in range(4))]
    out["equal"] = losses, compiled.gather("params")
    compiled.close()
    return out


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(600)
def test_processes_keep_to_the_rules_and_equal_one_device():
    found = run_ranks(all_kinds, P, timeout=500)
    for sync in SYNCS[1:]:
        history, k = found[0][sync][0], K if sync.startswith("k-") else None
        clock = list(itertools.islice(updates(sync, P, k, DELAY, seed=1), COUNT[sync]))
        took, want = history[-1].time - history[0].time, clock[-1].time - clock[0].time
        print(f"{sync}: {took / (COUNT[sync] - 1):.4f} s an update, {want / (COUNT[sync] - 1):.4f} by the clock")
        assert [u.number for u in history] == list(range(1, COUNT[sync] + 1))
        assert all(len(u.workers) == {"async": 1, "ps-sync": P}.get(sync, K) for u in history)
        assert took > want / 2, (sync, took, want)  # the delays are real; how near to theory, docs/sync.md has
        assert (sum(f[sync][1] for f in found) > 0) == (sync in ("k-sync", "k-batch-sync"))
        assert sync in RESTARTING or max(s for u in history for s in u.staleness) > 0
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for n in range(4):
        batches = [data(w, n) for w in range(P)]
        losses = [F.cross_entropy(model(x), y) for x, y in batches]
        sgd.zero_grad()
        F.cross_entropy(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).backward()
        sgd.step()
        for loss, other in zip(losses, found, strict=True):
            assert other["equal"][0][n] == pytest.approx(float(loss.detach()), rel=1e-9)
    for other in found:
        for name, p in model.named_parameters():
            torch.testing.assert_close(other["equal"][1][name], p.detach(), rtol=1e-9, atol=1e-12)


def one_dies(rank: int, world: int, bad: int, on_loss: str) -> Any:
    compiled = made(mw.Sync("ps-sync", servers=1, on_loss=on_loss), world)
    begin = time.monotonic()
    try:
        for number in range(6):
            if number == 3 and rank == bad:
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = data(rank, number)
            compiled.step(x, target=y)
        compiled.close()
    except mw.MeshwrightError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return compiled.version, [len(u.workers) for u in compiled.history]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("bad,on_loss", [(2, "continue"), (2, "stop"), (0, "continue")])
def test_a_process_that_dies_is_named_or_left_behind(bad: int, on_loss: str):
    outcomes = run_outcomes(one_dies, 3, bad, on_loss, timeout=200, but=bad)
    values = [o.value for o in outcomes if o.rank != bad]
    if bad == 2 and on_loss == "continue":
        assert [v[0] for v in values] == [6, 6], outcomes
        assert values[0][1] == [3, 3, 3, 2, 2, 2]
        return
    for kind, text, _ in values:
        assert kind == "PeerError" and ("rank 2 is gone" if bad == 2 else "rank 0 is gone") in text, text
