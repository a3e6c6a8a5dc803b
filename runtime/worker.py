"""A worker of a parameter server: `compile(..., sync=...)`. Each process has the whole model and data of its own.

    step    forward and backward of this worker's mini-batch at the weights it has; the injected delay; the gradient
            goes to the servers; the worker waits for weights, where its kind of synchronisation does

The program is captured and planned for a mesh of one rank, so everything else of a `Compiled` holds for it alone.
Servers are threads of the first ranks' processes (`server.py`). Weights come by a thread that receives from each
server; a worker that is to give up what it is at (K-sync) learns it there, while it computes or is delayed.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from ..partitioner.errors import MeshwrightError, PlanError
from ..partitioner.mesh import Mesh
from ..partitioner.sync_rules import RESTARTING, Sync
from .comm import Comm
from .compiled import Compiled, tensors_of
from .faults import PeerError
from .flat import Flat, shared_out
from .in_step import compare_first_values
from .inprocess import InProcessComm
from .request import Request, Settings
from .roll_call import LIMIT, ranks_text
from .runner import Runner
from .server import GRAD, GRADS, HEADERS, LEAVE, WEIGHTS, Server, SyncUpdate, Wire
from .watch import Lookout

LOOK = 0.5
"""Seconds between two looks whether the other processes are there."""


class Worker(Compiled):
    """A worker, and where its rank is one of the first, a server. See `meshwright.compile` with `sync=`.

    Attributes:
        version: updates whose weights this worker has.
        cancelled: its gradients that it gave up.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, settings: Settings, sync: Sync):
        super().__init__(model, mesh, device, replace(settings, optimizer=None))
        self.sync, self._make = sync, settings.optimizer
        self.version = self.cancelled = 0
        self._number = self._came = 0
        self._server: Server | None = None
        self._wire: Wire | None = None
        self._schedulers: list[Callable[[torch.optim.Optimizer], Any]] = []
        self._inbox: queue.Queue[tuple[int, torch.Tensor]] = queue.Queue()
        self._early: list[deque[torch.Tensor]] = [deque() for _ in range(sync.servers)]
        self._looked = 0.0
        self._receivers: list[threading.Thread] = []

    @property
    def comm(self) -> Comm:
        if self._comm is None:
            self._comm = InProcessComm(self.mesh)
        return self._comm

    @property
    def history(self) -> list[SyncUpdate]:
        """The updates so far: when each was, of whose gradients, how stale. The first rank alone has it."""
        return list(self._server.history) if self._server is not None else []

    def scheduler(self, make: Callable[[torch.optim.Optimizer], Any]) -> Any:
        """A learning-rate scheduler of the servers' optimizers, stepped once an update; given before the first step.

        Raises:
            MeshwrightError: training has begun.
        """
        if self._wire is not None:
            raise MeshwrightError("the servers have begun: give scheduler() before the first step")
        self._schedulers.append(make)

    # -- a step
    def _step(self, args: tuple, kwargs: dict[str, Any], target: Any) -> torch.Tensor:
        runner = self._runner(Request("step", args, kwargs, target))
        self._begin(runner)
        begin = time.monotonic()
        self._take_all_that_came()
        self._look()
        self._zero_grad()
        (loss,) = runner.run(tensors_of((args, kwargs, target)), self._next_step())
        number, self._number = self._number, self._number + 1
        if self._given_up(begin):
            self.cancelled += 1
            return loss
        had = self._came
        self._push(number, loss)
        if self.sync.name != "k-batch-sync":
            self._wait(had)
        return loss

    def _compare(self, runner: Runner, inputs: list[torch.Tensor]) -> bool:
        """Batches differ, and so may weights: only what the model came with is compared, when servers begin."""
        return False

    def _alike(self) -> dict[str, str]:
        return super()._alike() | {"sync": repr(self.sync)}

    def _next_step(self) -> int:
        """Steps are numbered over all workers, so that no two draw the same random numbers."""
        assert self._watch is not None
        return super()._next_step() * self._watch.world + self._watch.rank

    def _given_up(self, begin: float) -> bool:
        """Wait out the delay; whether newer weights have come meanwhile that make this gradient void."""
        end = begin + (next(self._delays) if self.sync.delay else 0.0)
        restarts, had = self.sync.name in RESTARTING, self._came
        while True:
            left = end - time.monotonic()
            try:
                self._put(*(self._inbox.get(timeout=min(left, LOOK)) if left > 0 else self._inbox.get_nowait()))
            except queue.Empty:
                if left <= 0:
                    return False
            else:
                if restarts:
                    self._wait(had)
                    return True
            self._look()

    def _push(self, number: int, loss: torch.Tensor) -> None:
        assert self._wire is not None and self._watch is not None
        rank = self._watch.rank
        grads = {n: p.grad for n, p in self._have_state().shards()}
        (bits,) = struct.unpack("q", struct.pack("d", float(loss)))
        for s, flat in enumerate(self._flats):
            head = torch.tensor([GRAD, rank, number, self.version, bits, 0])
            self._tell(s, head, flat.pack({n: grads[n] for n in flat.kinds}))

    def _tell(self, server: int, head: torch.Tensor, extra: torch.Tensor | None = None) -> None:
        assert self._wire is not None
        if server == self._wire.rank:
            assert self._server is not None
            self._server.take(head, extra)
            return
        self._wire.send(head, server, HEADERS)
        if extra is not None:
            self._wire.send(extra, server, GRADS)

    # -- weights
    def _put(self, server: int, message: torch.Tensor) -> None:
        """Keep a message until those of the other servers have come, then take the weights."""
        self._early[server].append(message)
        while all(self._early):
            parts = [each.popleft() for each in self._early]
            self.version, self._came = int(parts[0][:8].view(torch.int64)), self._came + 1
            params = self._have_state().params
            with torch.no_grad():
                for flat, part in zip(self._flats, parts, strict=True):
                    for name, x in flat.unpack(part[16:]).items():
                        if x is not None:
                            for p in params[name]:
                                assert p is not None
                                p.copy_(x)

    def _take_all_that_came(self) -> None:
        while any(self._early) or not self._inbox.empty():
            self._put(*self._next_message())

    def _wait(self, had: int) -> None:
        """Until weights have come since there were `had`; they may be of the same version (K-batch-async)."""
        while self._came == had or any(self._early):
            self._put(*self._next_message())

    def _next_message(self) -> tuple[int, torch.Tensor]:
        assert self._watch is not None
        begin, limit = time.monotonic(), self.settings.timeout or LIMIT
        try:
            self._watch.waiting = "weights from the servers"
            while True:
                try:
                    return self._inbox.get(timeout=LOOK)
                except queue.Empty:
                    self._look()
                if time.monotonic() - begin > limit:
                    text = f"rank {self._watch.rank}: no weights within {limit:g} s"
                    raise PeerError(text, self._watch.blame())
        finally:
            self._watch.waiting = ""

    def _look(self) -> None:
        """Raises:
        PeerError: a server is gone; or a worker, where that is to end all.
        """
        if time.monotonic() - self._looked < LOOK or self._watch is None:
            return
        self._looked = time.monotonic()
        servers = range(self.sync.servers)
        needed = servers if self.sync.on_loss == "continue" else range(self._watch.world)
        gone = {r: why for r, why in self._lookout.gone(set(needed) - {self._watch.rank}).items() if why != "ended"}
        if gone:
            what = "a server" if min(gone) in servers else "a worker"
            text = f"rank {self._watch.rank}: {what} is gone, {ranks_text(sorted(gone))}"
            raise PeerError(text, self._watch.blame())

    # -- beginning and end
    def _begin(self, runner: Runner) -> None:
        """Servers and the threads that receive from them, at the first step; all processes do it together."""
        if self._wire is not None:
            return
        _check_program(runner)
        watch, call, state = self._watch, self._roll_call, self._have_state()
        assert watch is not None and call is not None and self._make is not None
        compare_first_values(call, self.model)
        self._lookout = Lookout(watch)
        values = {n: p.detach() for n, p in state.shards()}
        dealt = shared_out({n: x.nbytes for n, x in values.items()}, self.sync.servers)
        self._flats = [Flat({n: values[n] for n in names}) for names in dealt]
        group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        self._wire = wire = Wire(group, watch.rank)
        self._delays: Iterator[float] = (
            self.sync.delay.draws(self.settings.seed, watch.rank) if self.sync.delay else iter(())
        )
        for s in range(self.sync.servers):
            if s == watch.rank:
                mine = {n: values[n] for n in dealt[s]}
                self._server = Server(
                    wire, watch, s, self.sync, self._flats, mine, self._make, self._schedulers, self._own_answer
                )
            else:
                thread = threading.Thread(target=self._receives, args=(s,), daemon=True, name=f"weights of {s}")
                thread.start()
                self._receivers.append(thread)
        watch.closing.insert(0, self._end)
        call.everyones("beginning to train with servers", 0)

    def _own_answer(self, message: torch.Tensor) -> None:
        assert self._wire is not None
        self._inbox.put((self._wire.rank, message))

    def _receives(self, server: int) -> None:
        assert self._wire is not None
        try:
            while True:
                message = torch.empty(16 + self._flats[server].nbytes, dtype=torch.uint8)
                self._wire.receive(message, server, WEIGHTS)
                self._inbox.put((server, message))
        except RuntimeError:
            return  # the lookout says who is gone

    def close(self) -> None:
        """This worker takes no more steps, and the others do not wait for it; called at the end of the script too.

        Where a server lives it returns when all workers have done so, or are gone.
        """
        if self._wire is None or self._closed or self._watch is None:
            return
        self._closed = True
        self._tell(0, torch.tensor([LEAVE, self._wire.rank, 0, 0, 0, 0]))
        store, others = self._watch.store, set(range(self._watch.world)) - {self._wire.rank}
        try:
            store.set(f"left {self._wire.rank}", "")
            while self._server is not None and others:
                over = self._lookout.gone(others)
                others = {r for r in others if r not in over and not store.check([f"left {r}"])}
                time.sleep(0.05)
        except RuntimeError:
            return  # rank 0, which serves the store, has seen all leave

    _closed = False

    def _end(self) -> None:
        """At the end of the script: leave, and end the threads that stand in calls of torch."""
        self.close()
        assert self._wire is not None
        if self._server is not None:
            self._server.end()
        self._wire.end(self._receivers)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        raise MeshwrightError(_NO_CHECKPOINT)

    def load(self, *args: Any, **kwargs: Any) -> Any:
        raise MeshwrightError(_NO_CHECKPOINT)


_NO_CHECKPOINT = (
    "with sync= each worker has weights of its own age, which make no checkpoint: keep compiled.state_dict() of one "
    "rank, and start from it by load_state_dict in the model before compile"
)


def _check_program(runner: Runner) -> None:
    changed = [o.name for o in runner.program.graph.outputs if o.kind == "new_buffer"]
    if changed:
        raise PlanError(
            f"forward changes the buffer {changed[0]}: every worker would have one of its own. Use layers without "
            f"running statistics, such as GroupNorm in place of BatchNorm, or model.eval()"
        )


def check_sync(sync: Sync, mesh: Mesh, world: int, given: dict[str, Any]) -> None:
    """Raises:
    PlanError: options that do not go with a parameter server.
    """
    faults = []
    if any(n > 1 and mesh.role(a) != "data" for a, n in mesh.axes):
        faults.append(f"sync={sync.name!r} is for workers that each have the whole model: mesh {mesh} has more than dp")
    if world == 1:
        faults.append(
            f"sync={sync.name!r} needs one process a worker, as with torchrun --nproc-per-node {mesh.world_size}; in "
            f"one process mw.ParameterServer does the same under a virtual clock"
        )
    if given["optimizer"] is None:
        faults.append(f"sync={sync.name!r}: the servers step the weights, so optimizer= must say how")
    for name, plain in (("clip_grad_norm", (None,)), ("zero", (0, "auto")), ("check_every", (None,))):
        if given[name] not in plain:
            faults.append(f"{name}={given[name]!r} goes with sync='sync' alone, not with {sync.name!r}")
    if faults:
        raise PlanError("; ".join(faults))
    sync.check(mesh.world_size)
