"""What every rank really holds over a step, all ranks in this process: each storage is seen come and go.

A storage belongs to the rank whose program runs when it is made; what a collective makes belongs to the rank that gets
it, what it makes on the way to nobody; a message to its receiver, from when its receive begins. The user's own batch is
counted as the model counts it: a rank's part. What an ATen op allocates inside itself is not seen.

    tracked = track(compiled, x, target=y)     # one step, after at least one; a list of bytes, by rank
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..partitioner.allocations import Storages
from .comm import Expect, Post, Start
from .inprocess import InProcessComm, _Handle
from .request import Request


@dataclass
class Tracked:
    """Bytes of one rank. `at`: the last op before the peak; `host`: the most that it had on the host, which are not
    among the others."""

    now: int = 0
    peak: int = 0
    at: str = ""
    host: int = 0

    def change(self, nbytes: int, at: str = "") -> None:
        self.now += nbytes
        if self.now > self.peak:
            self.peak, self.at = self.now, at


class Watch(Storages):
    """Storages by rank. `rank`: whose program runs; None: nobody's."""

    def __init__(self, ranks: int, known: list[torch.Tensor]):
        super().__init__(known)
        self.ranks = [Tracked() for _ in range(ranks)]
        self.rank: int | None = None
        self.owner: dict[int, int] = {}
        self.fresh: list[int] = []
        self.away: dict[int, tuple[int, int]] = {}
        self.last = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.last = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def came(self, key: int) -> None:
        if self.rank is None:
            self.fresh.append(key)
        else:
            self.give(key, self.rank)

    def to_host(self, key: int, nbytes: int) -> None:
        assert self.rank is not None
        self.away[key] = (self.rank, nbytes)
        mine = self.ranks[self.rank]
        mine.host = max(mine.host, sum(n for rank, n in self.away.values() if rank == self.rank))

    def from_host(self, key: int) -> None:
        super().from_host(key)
        del self.away[key]

    def give(self, key: int, rank: int) -> None:
        if key in self.sizes and key not in self.owner:
            self.owner[key] = rank
            self.ranks[rank].change(self.sizes[key], self.last)

    def gone(self, key: int) -> None:
        nbytes, rank = self.sizes.pop(key), self.owner.pop(key, None)
        if rank is not None:
            self.ranks[rank].change(-nbytes)


class WatchedComm(InProcessComm):
    """An `InProcessComm` that says whose program runs. `watch`: None while nothing is tracked."""

    watch: Watch | None = None

    def __init__(self, mesh: Any):
        super().__init__(mesh)
        self._posts: dict[tuple[int, int], list[list[int]]] = {}
        self._expects: dict[tuple[int, int], list[int]] = {}

    def _advance(self, rank: Any, session: Any) -> bool:
        if self.watch is None:
            return super()._advance(rank, session)
        before, self.watch.rank = self.watch.rank, rank.number
        try:
            return super()._advance(rank, session)
        finally:
            self.watch.rank = before

    def _start(self, start: Start, rank: int, session: Any) -> _Handle:
        watch = self.watch
        if watch is None:
            return super()._start(start, rank, session)
        watch.rank = None
        handle = super()._start(start, rank, session)
        for member, results in zip(handle.meeting.group, handle.meeting.results or (), strict=False):
            for x in results or ():
                watch.give(x.untyped_storage()._cdata, member)
        watch.rank = rank
        return handle

    def _message(self, request: Post | Expect, rank: int, session: Any) -> _Handle | None:
        watch = self.watch
        if watch is None:
            return super()._message(request, rank, session)
        watch.rank, watch.fresh = None, []
        handle = super()._message(request, rank, session)
        watch.rank = rank
        if isinstance(request, Post):
            self._posted(watch, (rank, request.to), list(watch.fresh))
        else:
            self._expected(watch, (request.source, rank), request)
        return handle

    def _posted(self, watch: Watch, pair: tuple[int, int], copies: list[int]) -> None:
        """The receiver's memory is there by now, or is not yet asked for."""
        waiting = self._expects.setdefault(pair, [])
        if not waiting:
            self._posts.setdefault(pair, []).append(copies)
            return
        watch.ranks[pair[1]].change(-waiting.pop(0))
        for key in copies:
            watch.give(key, pair[1])

    def _expected(self, watch: Watch, pair: tuple[int, int], request: Expect) -> None:
        there = self._posts.setdefault(pair, [])
        if there:
            for key in there.pop(0):
                watch.give(key, pair[1])
            return
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in request.kinds)
        self._expects.setdefault(pair, []).append(nbytes)
        watch.ranks[pair[1]].change(nbytes, f"receive of {request.where}")


def track(compiled: Any, *args: Any, target: Any = None, **kwargs: Any) -> list[Tracked]:
    """One step of a model that has made one, on a `WatchedComm`; by rank what it held."""
    comm = compiled.comm
    compiled._zero_grad()
    runner = compiled._runner(Request("step", args, kwargs, target))
    held = [list(_resting(compiled, runner, i)) for i in range(len(comm.ranks))]
    tensors = [x for x in pytree.tree_leaves((args, kwargs, target)) if isinstance(x, torch.Tensor)]
    watch = Watch(len(held), [*tensors, *(x for mine in held for x in mine)])
    for rank, mine in enumerate(held):
        watch.ranks[rank].change(sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in mine}.values()))
        inputs = runner._inputs(rank, comm.ranks[rank], tensors, 0, False)
        roles = zip(inputs, runner.program.graph.inputs, strict=True)
        watch.ranks[rank].change(sum(x.nbytes for x, role in roles if role.kind == "input"))
    del held, inputs, mine
    comm.watch = watch
    optimizer, compiled.optimizer = compiled.optimizer, None
    try:
        with watch:
            compiled.step(*args, target=target, **kwargs)
            compiled.optimizer = optimizer
            away = optimizer is not None and optimizer.offload.offload_optimizer != "none"
            for rank, one in enumerate(optimizer.each if optimizer and not away else ()):
                watch.rank = rank
                one.step()
        if optimizer is not None and away:  # on the host, which is no rank's memory
            optimizer.step()
    finally:
        comm.watch, compiled.optimizer = None, optimizer
    return watch.ranks


def _resting(compiled: Any, runner: Any, index: int) -> Iterator[torch.Tensor]:
    """What a rank holds between steps."""
    state = compiled._have_state()
    for _, p in state.shards(index):
        yield p.detach()
    yield from (buffers[index] for buffers in state.buffers.values())
    yield from runner.constants.values()
    if compiled.optimizer is None:
        return
    copies = set(getattr(compiled.optimizer.host[index], "copies", {}).values())  # on the host, as their state is
    for p, moments in compiled.optimizer.each[index].state.items():
        yield from (x for x in moments.values() if isinstance(x, torch.Tensor) and p not in copies)
