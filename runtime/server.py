"""A parameter server: a thread of a worker's process that has some of the parameters, and steps them.

    to every server        [GRAD, worker, number, version, bits of the loss] and the bytes of its part of the gradient
    to the first server    [LEAVE, worker]
    first to the others    [DECIDE, gradients, workers to answer] and a list of both
    to a worker            version and the bytes of a server's part of the weights

The first server alone decides (`sync_rules.py`), by the gradients whose first part has come, so that all parts of an
update are of the same gradients; the others do as it says once those have come. Messages to a server are received from
any source, in the order in which they come.

    weights <- optimizer(weights, mean over the gradients of  scale * gradient),   scale = 1, or 1 / max(1, staleness)
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.nn as nn

from ..partitioner.sync_rules import Decision, Rules, Sync
from .flat import Flat
from .watch import Lookout, Watch

LEAVE, GRAD, DECIDE = range(3)
HEAD = 6
HEADERS, GRADS, LISTS, WEIGHTS, NOTHING = 1, 2, 3, 4, 5
"""Tags: the messages of a kind between two ranks keep their order."""

FLUSH = 5.0
"""Seconds that messages have to leave at the end of the script."""


@dataclass(frozen=True, slots=True)
class SyncUpdate:
    """One update of the server.

    Attributes:
        number: updates so far, this one included.
        time: seconds since the server began.
        loss: mean of the losses of its gradients, each at its worker's weights.
        workers, staleness: of each of its gradients, whose it is and how many updates it came late.
    """

    number: int
    time: float
    loss: float
    workers: tuple[int, ...]
    staleness: tuple[int, ...]


class Part:
    """What an optimizer factory is given: the parameters of one server, under the model's names."""

    def __init__(self, values: dict[str, torch.Tensor]):
        self._params = {n: nn.Parameter(x.detach().cpu().clone()) for n, x in values.items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._params.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._params.values()

    __iter__ = parameters


class Wire:
    """Messages between the processes of a process group of all, sent by a thread for each process they go to.

    (A send that nobody waits for is lost when its handle is freed before it has gone.) The group itself is asked, for
    the script may have destroyed all groups before its end.
    """

    def __init__(self, group: Any, rank: int):
        self.group, self.rank = group, rank
        self._to: dict[int, queue.SimpleQueue[tuple[torch.Tensor, int] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def send(self, x: torch.Tensor, to: int, tag: int) -> None:
        """Send in the order of calls, and go on at once. A peer that is gone does not hear it."""
        with self._lock:
            if to not in self._to:
                self._to[to] = queue.SimpleQueue()
                thread = threading.Thread(target=self._sends, args=(to,), daemon=True, name=f"messages to {to}")
                thread.start()
                self._threads.append(thread)
        self._to[to].put((x, tag))

    def _sends(self, to: int) -> None:
        while (found := self._to[to].get()) is not None:
            try:
                self.group.send([found[0]], to, found[1]).wait()
            except RuntimeError:
                return  # it is gone, as the lookout finds, or the process group is closed

    def receive(self, x: torch.Tensor, source: int | None, tag: int) -> int:
        """Receive from a rank, or from any; whose it was."""
        work = self.group.recv_anysource([x], tag) if source is None else self.group.recv([x], source, tag)
        work.wait()
        return work._source_rank()

    def end(self, receivers: Sequence[threading.Thread]) -> None:
        """Before the interpreter ends: send what is still to be sent, then end the threads that send and receive.

        A thread that comes back from C++ when Python is already ending is ended there and then, which aborts the
        process ("terminate called without an active exception"). A receive that times out closes all connections of
        its group, which wakes all that wait for one.
        """
        for mine in self._to.values():
            mine.put(None)
        _join(self._threads, FLUSH)
        peer = (self.rank + 1) % self.group.size()
        with contextlib.suppress(RuntimeError):
            self.group.recv([torch.empty(1)], peer, NOTHING).wait(timedelta(milliseconds=1))
        _join([*self._threads, *receivers], FLUSH)


def _join(threads: Sequence[threading.Thread], seconds: float) -> None:
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


class Server:
    """One server, in the process of a worker.

    Args:
        index: its number among the servers; it lives on that rank.
        sync: how.
        flats: of each server, how its part lies.
        values: of its own part, the first values.
        answer: takes a message of weights to the worker of this process.
    """

    def __init__(
        self,
        wire: Wire,
        watch: Watch,
        index: int,
        sync: Sync,
        flats: Sequence[Flat],
        values: dict[str, torch.Tensor],
        optimizer: Callable[[Any], torch.optim.Optimizer],
        schedulers: Sequence[Callable[[torch.optim.Optimizer], Any]],
        answer: Callable[[torch.Tensor], None],
    ):
        self.wire, self.watch, self.index, self.sync, self.flat = wire, watch, index, sync, flats[index]
        self.others = [s for s in range(len(flats)) if s != index]
        self.part, self.answer, self.version = Part(values), answer, 0
        self.optimizer = optimizer(self.part) if values else None
        self.schedulers = [make(self.optimizer) for make in schedulers if self.optimizer]
        self.rules = Rules(sync.name, watch.world, sync.k)
        self.history: list[SyncUpdate] = []
        self.begun = time.monotonic()
        self._grads: dict[tuple[int, int], torch.Tensor] = {}
        self._losses: dict[tuple[int, int], float] = {}
        self._todo: deque[Decision] = deque()
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._receives, daemon=True, name=f"server {index}").start()
        self._lookout = threading.Thread(target=self._looks, daemon=True, name="server's lookout")
        if index == 0:
            self._lookout.start()

    def end(self) -> None:
        """No more looks whether workers are there; nobody is."""
        self._over.set()
        if self.index == 0:
            self._lookout.join(5)

    # -- what comes
    def _receives(self) -> None:
        try:
            while not self._over.is_set():
                try:
                    message = self._next()
                except RuntimeError:  # its process has ended, as the lookout finds; messages of the others go on
                    time.sleep(0.05)
                else:
                    self.take(*message)
        except BaseException as error:  # a thread has nobody to raise to
            self.error = error
            if self.rules.alive:
                self.watch.raised(error)

    def _next(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next message of any process."""
        head, extra = torch.zeros(HEAD, dtype=torch.int64), None
        source = self.wire.receive(head, None, HEADERS)
        if int(head[0]) == GRAD:
            extra = torch.empty(self.flat.nbytes, dtype=torch.uint8)
            self.wire.receive(extra, source, GRADS)
        elif int(head[0]) == DECIDE:
            extra = torch.empty(4 * int(head[1] + head[2] + head[3]), dtype=torch.int64)
            self.wire.receive(extra, source, LISTS)
        return head, extra

    def take(self, head: torch.Tensor, extra: torch.Tensor | None = None) -> None:
        """A message, from another process or from the worker of this one."""
        kind, worker, number, version, bits = (int(x) for x in head[:5])
        with self._lock:
            if kind == GRAD:
                assert extra is not None
                self._grads[worker, number] = extra
                if self.index == 0:
                    self._losses[worker, number] = struct.unpack("d", struct.pack("q", bits))[0]
                    self._decided(self.rules.push(worker, number, version))
            elif kind == DECIDE:
                assert extra is not None
                self._todo.append(_listed(head, extra))
            elif worker in self.rules.alive:
                self._decided(self.rules.leave(worker))
            self._act()

    def _decided(self, decision: Decision) -> None:
        self._todo.append(decision)
        if decision != Decision():
            head, body = _list_of(decision)
            for s in self.others:
                self.wire.send(head, s, HEADERS)
                self.wire.send(body, s, LISTS)

    def _looks(self) -> None:
        """Workers whose script has ended have left, and where that is no fault, those that are gone."""
        lookout = Lookout(self.watch)
        while not self._over.wait(self.watch.beat / 2):
            for rank, why in lookout.gone(self.rules.alive - {self.watch.rank}).items():
                if why != "ended" and self.sync.on_loss == "stop":
                    continue
                self.take(torch.tensor([LEAVE, rank, 0, 0, 0, 0]))

    # -- what is done
    def _act(self) -> None:
        while self._todo:
            decision = self._todo[0]
            if any(key[:2] not in self._grads for key in (*decision.taken, *decision.dropped)):
                return
            self._todo.popleft()
            for key in decision.dropped:
                self._grads.pop(key[:2])
                self._losses.pop(key[:2], None)
            if decision.taken:
                self._update(decision)
            if decision.reply:
                self._reply(decision.reply)

    def _update(self, decision: Decision) -> None:
        late = [self.version - version for _, _, version in decision.taken]
        params = dict(self.part.named_parameters())
        total: dict[str, torch.Tensor] = {}
        for (worker, number, _), s in zip(decision.taken, late, strict=True):
            scale = 1 / max(1, s) if self.sync.staleness == "inverse" else 1.0
            for name, g in self.flat.unpack(self._grads.pop((worker, number))).items():
                if g is not None:
                    into = total.setdefault(name, torch.zeros_like(params[name]))
                    into.add_(g, alpha=scale / len(decision.taken))
        for name, p in params.items():
            p.grad = total.get(name)
        if self.optimizer:
            self.optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.version += 1
        if self.index == 0:
            losses = [self._losses.pop(key[:2]) for key in decision.taken]
            who = tuple(key[0] for key in decision.taken)
            at = time.monotonic() - self.begun
            self.history.append(SyncUpdate(self.version, at, sum(losses) / len(losses), who, tuple(late)))

    def _reply(self, workers: tuple[int, ...]) -> None:
        flat = self.flat.pack(dict(self.part.named_parameters()))
        message = torch.cat([torch.tensor([self.version, 0]).view(torch.uint8), flat])
        for worker in workers:
            if worker == self.wire.rank:
                self.answer(message.clone())
            else:
                self.wire.send(message, worker, WEIGHTS)


def _list_of(decision: Decision) -> tuple[torch.Tensor, torch.Tensor]:
    keys = [(*key, 0) for key in (*decision.taken, *decision.dropped)]
    body = [*keys, *((worker, 0, 0, 0) for worker in decision.reply)]
    head = [DECIDE, len(decision.taken), len(decision.dropped), len(decision.reply), 0, 0]
    return torch.tensor(head), torch.tensor(body).reshape(-1)


def _listed(head: torch.Tensor, body: torch.Tensor) -> Decision:
    taken, dropped = int(head[1]), int(head[2])
    rows = [tuple(row) for row in body.reshape(-1, 4).tolist()]
    keys = tuple((w, n, v) for w, n, v, _ in rows[: taken + dropped])
    return Decision(keys[:taken], keys[taken:], tuple(row[0] for row in rows[taken + dropped :]))
