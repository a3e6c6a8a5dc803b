"""Workers and a parameter server under a virtual clock: which gradients make which update, and when.

X: one gradient's time. P workers, threshold K (Dutta et al., arXiv 1803.01113 and 2003.10579):

    sync, ps-sync    all P, then all start again                                              E = E[X_{P:P}]
    k-sync           the first K workers; the others are cancelled, all start again           E = E[X_{K:P}]
    k-batch-sync     the first K gradients of anyone at the same weights, the rest cancelled  K / (P mu), exponential
    k-async          the first K workers; they wait, the others go on at their old weights    E <= E[X_{K:P}]
    k-batch-async    the first K gradients of anyone; a worker goes on at the newest weights  E = K E[X] / P
    async            k-async with K = 1

Time is that of the workers alone: messages and the server's own work take none. What a worker computes does not change
when it ends, so a run's order is known before any gradient is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .errors import PlanError

SYNCS = ("sync", "ps-sync", "k-sync", "k-batch-sync", "async", "k-async", "k-batch-async")
_BLOCK = 1024


@dataclass(frozen=True)
class Delay:
    """How long a gradient takes, in seconds.

    Attributes:
        name: "exponential" (shift + an exponential of `mean`), "constant" (`mean`), or "pareto" (of this `mean`, which
            needs alpha > 1).
        mean: of what is drawn, without the shift.
        shift: seconds that every gradient takes at least.
        alpha: of the Pareto distribution.

    Raises:
        PlanError: no such name, or numbers that it cannot have.
    """

    name: str = "exponential"
    mean: float = 1.0
    shift: float = 0.0
    alpha: float = 2.0

    def __post_init__(self) -> None:
        if self.name not in ("exponential", "constant", "pareto"):
            raise PlanError(f"no delay {self.name!r}; there are 'exponential' (with shift=), 'constant', 'pareto'")
        if not (self.mean > 0 and self.shift >= 0) or (self.name == "pareto" and not self.alpha > 1):
            raise PlanError(f"{self}: the mean must be positive, the shift at least 0, alpha of a Pareto above 1")

    def draws(self, seed: int, worker: int) -> Iterator[float]:
        """The seconds of one worker's gradients, one after another; they depend on seed and worker alone."""
        source = np.random.default_rng((seed, worker))
        while True:
            if self.name == "constant":
                some = np.full(_BLOCK, self.mean)
            elif self.name == "exponential":
                some = source.exponential(self.mean, _BLOCK)
            else:
                some = (1 + source.pareto(self.alpha, _BLOCK)) * self.mean * (self.alpha - 1) / self.alpha
            yield from (some + self.shift).tolist()


@dataclass(frozen=True, slots=True)
class Gradient:
    """A worker's gradient of its mini-batch number `draw`, at the weights after `version` updates."""

    worker: int
    draw: int
    version: int


@dataclass(frozen=True, slots=True)
class Update:
    """One update of the server.

    Attributes:
        version: updates before it.
        time: virtual seconds since the start.
        gradients: those whose mean it takes, in the order in which they came.
        cancelled: gradients that were begun and given up.
        held: the versions of the weights that workers compute at after it.
    """

    version: int
    time: float
    gradients: tuple[Gradient, ...]
    cancelled: int
    held: frozenset[int]

    @property
    def staleness(self) -> tuple[int, ...]:
        """Of each gradient, updates between its weights and this one; 0 is up to date."""
        return tuple(self.version - g.version for g in self.gradients)


def threshold(sync: str, workers: int, k: int | None) -> int:
    """Gradients an update.

    Raises:
        PlanError: no such synchronisation, or a K that it cannot have.
    """
    if sync not in SYNCS:
        raise PlanError(f"sync={sync!r}: say {', '.join(map(repr, SYNCS))}")
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise PlanError(f"workers={workers!r}: give a whole number of at least 1")
    if not sync.startswith("k-"):
        if k is not None:
            raise PlanError(f"k={k!r} goes with a sync that starts with 'k-', not with {sync!r}: leave it out")
        return 1 if sync == "async" else workers
    if not isinstance(k, int) or isinstance(k, bool) or k < 1 or ("batch" not in sync and k > workers):
        most = "" if "batch" in sync else f" and at most {workers}, the workers"
        raise PlanError(f"sync={sync!r} needs k=, a whole number of at least 1{most}; got k={k!r}")
    return k


def updates(sync: str, workers: int, k: int | None, delay: Delay, seed: int = 0) -> Iterator[Update]:
    """The server's updates, without end; the same for the same arguments.

    Raises:
        PlanError: see `threshold`.
    """
    count = threshold(sync, workers, k)
    draws = [delay.draws(seed, w) for w in range(workers)]
    numbers = [itertools.count() for _ in range(workers)]

    def begin(worker: int, at: float, version: int) -> tuple[float, int, Gradient]:
        """When it ends, whose it is, and what it gives; equal times go by worker."""
        return at + next(draws[worker]), worker, Gradient(worker, next(numbers[worker]), version)

    run = _restarting if sync in ("sync", "ps-sync", "k-sync", "k-batch-sync") else _going_on
    return run(workers, count, "batch" in sync, begin)


Begin = Callable[[int, float, int], tuple[float, int, Gradient]]


def _restarting(workers: int, k: int, batch: bool, begin: Begin) -> Iterator[Update]:
    """All compute at the same weights; what is not among the first K is cancelled."""
    at = 0.0
    for version in itertools.count():
        running = [begin(w, at, version) for w in range(workers)]
        heapq.heapify(running)
        found: list[Gradient] = []
        while len(found) < k:
            at, worker, gradient = heapq.heappop(running)
            found.append(gradient)
            if batch and len(found) < k:
                heapq.heappush(running, begin(worker, at, version))
        yield Update(version, at, tuple(found), len(running), frozenset({version + 1}))


def _going_on(workers: int, k: int, batch: bool, begin: Begin) -> Iterator[Update]:
    """Nothing is cancelled; a worker that has finished goes on at once (`batch`), or waits for the update."""
    running = [begin(w, 0.0, 0) for w in range(workers)]
    heapq.heapify(running)
    for version in itertools.count():
        found: list[Gradient] = []
        at, waiting = 0.0, []
        while len(found) < k:
            at, worker, gradient = heapq.heappop(running)
            found.append(gradient)
            if batch and len(found) < k:
                heapq.heappush(running, begin(worker, at, version))
            else:
                waiting.append(worker)
        for worker in waiting:
            heapq.heappush(running, begin(worker, at, version + 1))
        yield Update(version, at, tuple(found), 0, frozenset(g.version for _, _, g in running))
