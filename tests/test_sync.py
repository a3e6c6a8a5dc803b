"""The SGD family under a virtual clock: the published times, the equalities that are exact, and what is refused."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from meshwright.partitioner.sync_clock import SYNCS, updates
from torch import nn

P, K = 8, (1, 2, 4, 8)
EXPONENTIAL = {
    "k-sync": (0.125, 0.268, 0.635, 2.718),
    "k-batch-sync": (0.125, 0.25, 0.5, 1.0),
    "k-async": (0.125, 0.268, 0.635, 2.718),
    "k-batch-async": (0.125, 0.25, 0.5, 1.0),
}
SHIFTED = {
    "k-sync": (0.625, 0.768, 1.135, 3.218),
    "k-batch-sync": (0.626, 0.767, 1.107, 1.863),
    "k-async": (0.188, 0.401, 0.917, 3.22),
    "k-batch-async": (0.1875, 0.375, 0.75, 1.5),
}
ORACLE = [(s, k, 0.0, want) for s, row in EXPONENTIAL.items() for k, want in zip(K, row, strict=True)]
ORACLE += [(s, k, 0.5, want) for s, row in SHIFTED.items() for k, want in zip(K, row, strict=True)]
ORACLE += [("sync", None, 0.0, 2.718), ("ps-sync", None, 0.5, 3.218)]
ORACLE += [("async", None, 0.0, 0.125), ("async", None, 0.5, 0.1875)]


def mean_time(sync: str, workers: int, k: int | None, delay: mw.Delay, count: int) -> float:
    return next(itertools.islice(updates(sync, workers, k, delay, seed=1), count - 1, None)).time / count


@pytest.mark.parametrize("sync,k,shift,want", ORACLE)
def test_time_an_update_is_that_of_theory(sync: str, k: int | None, shift: float, want: float):
    """E[X_{K:P}] = shift + (H_P - H_{P-K}) / mu and K E[X] / P; the shifted k-batch-sync and k-async were simulated."""
    count = 60000 if sync in ("k-sync", "k-batch-sync") and k == 1 else 25000
    assert mean_time(sync, P, k, mw.Delay(shift=shift), count) == pytest.approx(want, rel=0.01)


def test_pareto_and_constant():
    pareto = mw.Delay("pareto", mean=3.0, alpha=4.0)
    assert mean_time("k-batch-async", 4, 2, pareto, 40000) == pytest.approx(1.5, rel=0.02)
    assert mean_time("sync", 4, None, mw.Delay("constant", mean=3.0, shift=1.0), 10) == 4.0


@pytest.mark.parametrize("sync", SYNCS)
def test_the_state_machines(sync: str):
    k = 3 if sync.startswith("k-") else None
    seen: dict[int, int] = {}
    before = 0.0
    for update in itertools.islice(updates(sync, 5, k, mw.Delay(shift=0.2), seed=3), 400):
        workers = [g.worker for g in update.gradients]
        assert update.time >= before and len(workers) == {"async": 1, "sync": 5, "ps-sync": 5}.get(sync, 3)
        before = update.time
        if "batch" not in sync:
            assert len(set(workers)) == len(workers), "distinct workers"
        if sync.endswith("async"):
            assert update.cancelled == 0 and min(update.staleness) >= 0
        else:
            assert not any(update.staleness)
        for g in update.gradients:
            assert g.draw > seen.get(g.worker, -1), "no gradient counts twice"
            seen[g.worker] = g.draw
            assert g.version >= 0 and max(update.held) <= update.version + 1
    if sync.endswith("async"):
        assert sum(g + 1 for g in seen.values()) == sum(len(u.gradients) for u in _first(sync, k, 400)), "none is lost"


def _first(sync: str, k: int | None, count: int) -> list:
    return list(itertools.islice(updates(sync, 5, k, mw.Delay(shift=0.2), seed=3), count))


def test_cancelled_work_is_counted_and_never_applied():
    for update in _first("k-sync", 2, 50):
        assert update.cancelled == 3
        assert all(g.draw == update.version for g in update.gradients), "those who were cancelled drew too"
    assert all(u.cancelled == 4 for u in _first("k-batch-sync", 2, 50))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(worker: int, number: int) -> tuple[tuple, Any]:
    generator = torch.Generator().manual_seed(1000 * worker + number)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return (x,), x[:, :3].argmax(1)


def server(model: nn.Module, **options: Any) -> mw.ParameterServer:
    given: dict[str, Any] = {"workers": 4, "loss": F.cross_entropy, "optimizer": adam} | options
    return mw.ParameterServer(model, batch, **given)


def adam(m: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(m.parameters(), lr=0.01)


def trained(count: int = 12, **options: Any) -> tuple[list[torch.Tensor], list]:
    model = net()
    steps = list(server(model, **options).run(count))
    return [p.detach().clone() for p in model.parameters()], steps


def same(a, b) -> bool:
    equal = all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    return equal and [s.time for s in a[1]] == [s.time for s in b[1]]


def test_sync_is_k_sync_of_all_and_one_device_on_the_large_batch():
    sync = trained(sync="sync")
    assert same(sync, trained(sync="ps-sync")) and not same(sync, trained(sync="async"))
    by_k = trained(sync="k-sync", k=4)
    for got in (sync, by_k):
        model = net()
        optimizer = adam(model)
        for i in range(12):
            parts = [batch(w, i) for w in range(4)]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.cat([a[0] for a, _ in parts])), torch.cat([t for _, t in parts]))
            loss.backward()
            optimizer.step()
        for p, q in zip(model.parameters(), got[0], strict=True):
            torch.testing.assert_close(q, p.detach(), rtol=1e-9, atol=1e-11)
    assert same(sync, by_k)


def test_async_is_k_async_and_k_batch_async_of_one():
    one = trained(sync="async")
    assert same(one, trained(sync="k-async", k=1)) and same(one, trained(sync="k-batch-async", k=1))
    assert any(max(s.staleness) > 0 for s in one[1])


def errors(sync: str, seed: int, seconds: float = 120.0) -> list[tuple[float, float]]:
    """(virtual time, F - least F) of every update: least squares over 100 rows under noise, mini-batches of 2."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(100, 6, generator=draw)
    y = x @ torch.ones(6, 1) + torch.randn(100, 1, generator=draw)
    least = F.mse_loss(x @ torch.linalg.lstsq(x, y).solution, y)
    model = nn.Linear(6, 1, bias=False)
    nn.init.zeros_(model.weight)

    def batch(worker: int, number: int) -> tuple[tuple, Any]:
        rows = torch.randint(0, 100, (2,), generator=torch.Generator().manual_seed(1000 * (8 * seed + worker) + number))
        return (x[rows],), y[rows]

    server = mw.ParameterServer(
        model, batch, workers=P, sync=sync, loss=F.mse_loss, seed=seed,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    )  # fmt: skip
    with torch.no_grad():
        return [(s.time, float(F.mse_loss(model(x), y) - least)) for s in server.run(seconds=seconds)]


def test_async_falls_faster_and_to_a_higher_floor():
    """The published trade-off at one learning rate: the floors differ by more than the seeds do."""
    fast, floor = {}, {}
    for sync in ("sync", "async"):
        runs = [errors(sync, seed) for seed in range(3)]
        fast[sync] = [min(error for time, error in run if time < 12) for run in runs]
        late = [[error for time, error in run if time > 60] for run in runs]
        floor[sync] = [sum(of) / len(of) for of in late]
    assert max(fast["async"]) < min(fast["sync"])
    spread = max(max(of) - min(of) for of in floor.values())
    assert min(floor["async"]) > max(floor["sync"]) + spread, floor


def test_a_run_repeats_bit_for_bit():
    assert same(trained(sync="k-async", k=2), trained(sync="k-async", k=2))
    assert not same(trained(sync="k-async", k=2), trained(sync="k-async", k=2, seed=5))


def test_one_worker_is_plain_training_whatever_the_sync():
    want = trained(workers=1, sync="sync")
    assert same(want, trained(workers=1, sync="async")) and same(want, trained(workers=1, sync="k-async", k=1))


def test_a_stale_gradient_is_of_old_weights_and_scaled():
    """Two workers of constant times: by hand, plain gradient descent."""
    model, twin = net(), net()
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.5)  # noqa: E731
    options = {"sync": "async", "workers": 3, "delay": mw.Delay("constant"), "staleness": "inverse", "optimizer": sgd}
    steps = list(server(model, **options).run(6))
    assert [s.staleness for s in steps] == [(0,), (1,), (2,), (2,), (2,), (2,)]
    assert [s.workers for s in steps] == [(0,), (1,), (2,), (0,), (1,), (2,)]
    versions = [copy.deepcopy(twin)]
    for i, step in enumerate(steps):
        old = versions[i - step.staleness[0]]
        args, target = batch(step.workers[0], i // 3)
        grads = torch.autograd.grad(F.cross_entropy(old(*args), target), list(old.parameters()))
        new = copy.deepcopy(versions[-1])
        for p, g in zip(new.parameters(), grads, strict=True):
            p.data -= 0.5 / max(1, step.staleness[0]) * g
        versions.append(new)
    for p, q in zip(model.parameters(), versions[-1].parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach())


def test_weights_kept_are_at_most_one_a_worker_and_the_newest():
    made = server(net(), sync="async", workers=4)
    for _ in made.run(60):
        assert len(made._weights) <= 5


def test_learning_rate_decay_is_stepped_an_update():
    made = server(net(), scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    list(made.run(3))
    assert made.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 8)


def test_dropout_draws_by_worker_and_mini_batch():
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        list(server(model, sync="k-async", k=2).run(5))
        return list(model.parameters())

    state = torch.random.get_rng_state()
    first = run()
    torch.random.set_rng_state(state)
    torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


WRONG = [
    ({"sync": "soon"}, "sync='soon': say 'sync', 'ps-sync'"),
    ({"sync": "k-sync"}, "needs k=, a whole number of at least 1 and at most 4, the workers; got k=None"),
    ({"sync": "k-async", "k": 5}, "at most 4, the workers; got k=5"),
    ({"sync": "async", "k": 2}, "k=2 goes with a sync that starts with 'k-', not with 'async': leave it out"),
    ({"workers": 0}, "workers=0: give a whole number of at least 1"),
    ({"staleness": "square"}, "staleness='square': say 'inverse'"),
]


@pytest.mark.parametrize("options,says", WRONG, ids=str)
def test_wrong_options_are_named(options: dict[str, Any], says: str):
    with pytest.raises(mw.PlanError, match=says.replace("(", r"\(")):
        server(net(), **options)


def test_wrong_delays_and_runs_are_named():
    with pytest.raises(mw.PlanError, match="no delay 'normal'"):
        mw.Delay("normal")
    with pytest.raises(mw.PlanError, match="alpha of a Pareto above 1"):
        mw.Delay("pareto", alpha=1.0)
    with pytest.raises(mw.PlanError, match="say when to stop"):
        next(server(net()).run())
    norm = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(mw.MeshwrightError, match="forward changed the buffer 1.running_mean.*GroupNorm"):
        next(server(norm).run(1))
