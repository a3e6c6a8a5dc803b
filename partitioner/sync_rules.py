"""What a parameter server does with gradients as they come: the state machines of `sync_clock`, without a clock.

    restarting (sync, ps-sync, k-sync, k-batch-sync)   an update goes to all workers, which give up what they are at; a
                                                       gradient at older weights is dropped
    going on   (async, k-async, k-batch-async)         it goes to those that wait; nothing is dropped

A worker waits for weights once its gradient counts, unless more of its own may count for the same update (`batch`):
then it goes on at once, at the weights it has (restarting), or at the newest. Workers may leave: an update then takes
no more gradients than there are workers, where each may give one.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PlanError
from .sync_clock import SYNCS, Delay, threshold

RESTARTING = ("sync", "ps-sync", "k-sync", "k-batch-sync")


@dataclass(frozen=True)
class Sync:
    """How data-parallel workers of a parameter server keep in step.

    Attributes:
        name: one of `sync_clock.SYNCS`; "sync" is lock step by collectives, without a server.
        k: gradients an update, of those that start with "k-".
        servers: ranks that each serve a part of the parameters.
        delay: seconds that a gradient takes at least, drawn anew for each; None for as long as it takes.
        staleness: "inverse" divides a gradient that is s updates late by max(1, s).
        on_loss: when a worker is lost: "stop" ends all with an error that names it, "continue" goes on without it.
    """

    name: str = "sync"
    k: int | None = None
    servers: int = 1
    delay: Delay | None = None
    staleness: str | None = None
    on_loss: str = "stop"

    def check(self, workers: int) -> None:
        """Raises:
        PlanError: it cannot be so with this number of workers.
        """
        threshold(self.name, workers, self.k)
        if not isinstance(self.servers, int) or isinstance(self.servers, bool) or not 1 <= self.servers <= workers:
            raise PlanError(f"Sync(servers={self.servers!r}): give a whole number from 1 to {workers}, the workers")
        if self.staleness not in (None, "inverse"):
            raise PlanError(f"Sync(staleness={self.staleness!r}): say 'inverse', which divides by it, or None")
        if self.on_loss not in ("stop", "continue"):
            raise PlanError(f"Sync(on_loss={self.on_loss!r}): say 'stop' or 'continue'")
        if not isinstance(self.delay, (Delay, type(None))):
            raise PlanError(f"Sync(delay={self.delay!r}): give a mw.Delay, or None")


def sync_of(sync: str | Sync, k: int | None) -> Sync:
    """The two options of `compile` as one.

    Raises:
        PlanError: they are none.
    """
    if isinstance(sync, Sync):
        if k is not None:
            raise PlanError(f"k={k!r} beside sync={sync}: say it once, as Sync(k={k!r})")
        return sync
    if not isinstance(sync, str) or sync not in SYNCS:
        raise PlanError(f"sync={sync!r}: say {', '.join(map(repr, SYNCS))}, or give a mw.Sync")
    return Sync(sync, k)


Key = tuple[int, int, int]
"""A gradient: its worker, the number of its mini-batch there, and the version of the weights it was taken at."""


@dataclass(frozen=True)
class Decision:
    """What follows from a gradient that came, or a worker that left.

    Attributes:
        taken: the gradients of an update, () where there is none yet.
        dropped: gradients that are in no update.
        reply: workers that are sent the weights.
    """

    taken: tuple[Key, ...] = ()
    dropped: tuple[Key, ...] = ()
    reply: tuple[int, ...] = ()


class Rules:
    """The state of one server.

    Attributes:
        version: updates so far.
        alive: workers that have not left.
    """

    def __init__(self, sync: str, workers: int, k: int | None):
        self.need = threshold(sync, workers, k)
        self.restarts, self.batch = sync in RESTARTING, "batch" in sync
        self.alive, self.version = set(range(workers)), 0
        self._found: list[Key] = []
        self._waiting: list[int] = []

    def push(self, worker: int, draw: int, version: int) -> Decision:
        """A gradient has come."""
        key = (worker, draw, version)
        if worker not in self.alive or (self.restarts and version != self.version):
            return Decision(dropped=(key,))
        self._found.append(key)
        if self.batch and len(self._found) < self.need:
            return Decision(reply=() if self.restarts else (worker,))
        self._waiting.append(worker)
        return self._due()

    def leave(self, worker: int) -> Decision:
        """A worker is no more; gradients of it that came before count."""
        self.alive.discard(worker)
        if worker in self._waiting:
            self._waiting.remove(worker)
        return self._due()

    def _due(self) -> Decision:
        need = self.need if self.batch else min(self.need, len(self.alive))
        if not self.alive or not self._found or len(self._found) < need:
            return Decision()
        taken, reply = tuple(self._found), tuple(sorted(self.alive) if self.restarts else self._waiting)
        self._found, self._waiting, self.version = [], [], self.version + 1
        return Decision(taken, (), reply)
