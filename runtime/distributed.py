"""One rank a process, over torch.distributed: gloo between CPUs, NCCL between GPUs.

Process groups are made by all ranks at construction, in one order: every set of axes of a mesh with up to three axes
of more than one rank; of a larger mesh, every axis alone and all together, and more by `prepare`, which all ranks call
with the same list. None is made while programs run: ranks may start collectives in different orders, and would wait for
each other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..partitioner.mesh import Mesh
from .comm import Counts, Expect, Pause, Post, Program, Start, Wait, add_counts, check, count_sent
from .faults import MeshwrightError, MismatchError, PeerError, RankError
from .watch import Watch
from .wire import Group, Pending, begin, receive, send

_ALL_SETS = 3
"""Meshes with at most this many axes of more than one rank get a process group for every set of them."""


class _Handle:
    __slots__ = ("pending", "text")

    def __init__(self, pending: Pending, text: str):
        self.pending: Pending | None = pending
        self.text = text


class DistributedComm:
    """Runs this process's rank of a mesh; see `comm.Comm`.

    Args:
        device: "cpu" for gloo, "cuda" for NCCL.
        timeout: seconds after which a collective that does not complete is a `PeerError`; torch's own when None.
        watch: the notes of what ranks are at; made here when None.

    Attributes:
        ranks: this process's rank alone.
        sent: {rank: {kind: (calls, payload bytes)}}.

    Raises:
        ValueError: the mesh is not as large as the world.
    """

    def __init__(
        self,
        mesh: Mesh,
        device: str | torch.device = "cpu",
        timeout: float | None = None,
        watch: Watch | None = None,
    ):
        device = torch.device(device)
        self.backend = backend_for(device)
        join(device, timeout)
        if dist.get_world_size() != mesh.world_size:
            raise ValueError(
                f"mesh {mesh} has {mesh.world_size} ranks, but {dist.get_world_size()} processes run; "
                f"launch as many, as with torchrun --nproc-per-node {mesh.world_size}"
            )
        self.mesh, self.timeout = mesh, timeout
        self.rank = dist.get_rank()
        if device.type == "cuda":
            own_cache(self.rank)
        self.ranks = (self.rank,)
        self.sent: dict[int, Counts] = {self.rank: {}}
        self._process_groups: dict[tuple[int, ...], Any] = {}
        self._groups: dict[tuple[str, ...], Group] = {}
        self._sending: list[_Handle] = []
        self._pairs: dict[tuple[int, int], Any] = {}
        self.watch = watch or Watch(device)
        self.watch.closing.append(self.close)
        self.prepare(_first_sets(mesh))

    @property
    def counted(self) -> Counts:
        """Of this rank, kind -> (calls, payload bytes)."""
        return self.sent[self.rank]

    def prepare(self, axes_sets: Iterable[tuple[str, ...]]) -> None:
        """Make the process groups of these sets of axes. Every rank must call it, with the same list."""
        for axes in axes_sets:
            ordered = tuple(a for a in self.mesh.names if a in axes and self.mesh.sizes[a] > 1)
            if not ordered:
                continue
            for ranks in sorted({self.mesh.group(ordered, r) for r in range(self.mesh.world_size)}):
                if ranks not in self._process_groups:
                    self._process_groups[ranks] = self._new_group(ranks)

    def _new_group(self, ranks: tuple[int, ...]) -> Any:
        """A process group, for which its ranks wait for each other."""
        text = f"making the process group of ranks {', '.join(map(str, ranks))}"
        try:
            self.watch.waiting = text
            made: Any = dist.new_group(list(ranks), backend=self.backend, timeout=_delta(self.timeout))
            if self.backend == "nccl" and self.rank in ranks:
                dist.barrier(made)  # NCCL joins a group at its first call, which all members must make
            return made
        except RuntimeError as error:
            raise self._failed(text, ranks, error) from error
        finally:
            self.watch.waiting = ""

    def prepare_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make ready for messages from the first rank of each pair to the second. Every rank must call it alike.

        NCCL does what one group is asked in order, each send waiting for its receive, so every direction between two
        ranks gets a group; gloo needs none.
        """
        for pair in sorted(set(pairs) - self._pairs.keys()) if self.backend == "nccl" else ():
            self._pairs[pair] = self._new_group(tuple(sorted(pair)))

    def _messages(self, source: int, to: int) -> Any:
        """The process group for messages between two ranks: that of all ranks, which has this comm's timeout."""
        return self._pairs.get((source, to)) or self._process_groups.get(tuple(range(self.mesh.world_size)))

    def close(self) -> None:
        """Leave the process groups: peers that still wait for this rank get an error at once."""
        mine = [made for ranks, made in self._process_groups.items() if self.rank in ranks]
        self._process_groups.clear()
        self._groups.clear()
        mine += [made for pair, made in self._pairs.items() if self.rank in pair]
        self._pairs.clear()
        for made in mine:
            with contextlib.suppress(ValueError):  # the script has destroyed the groups already
                dist.destroy_process_group(made)

    def run(self, programs: Sequence[Program]) -> list[Any]:
        """Run this rank's program to its end; what it returns.

        Raises:
            RankError, PeerError, MismatchError: after which the comm is closed.
            MeshwrightError: the program paused.
        """
        paused, value = self._drive(_only(programs), None)
        if paused:
            programs[0].close()
            raise MeshwrightError(f"rank {self.rank} paused; run_until_pause and resume run programs that pause")
        return [value]

    def run_until_pause(self, programs: Sequence[Program]) -> list[Any]:
        """Run until the program pauses or ends; the value it paused with or returned."""
        return [self._drive(_only(programs), None)[1]]

    def resume(self, programs: Sequence[Program], values: Sequence[Any]) -> list[Any]:
        """Send the paused program a value and run until it pauses again or ends."""
        return [self._drive(_only(programs), values[0])[1]]

    def _drive(self, program: Program, answer: Any) -> tuple[bool, Any]:
        try:
            while True:
                try:
                    request = program.send(answer)
                except StopIteration as stop:
                    self._sent_all()
                    return False, stop.value
                answer = None
                if isinstance(request, Start):
                    answer = self.start(request)
                elif isinstance(request, Wait):
                    answer = self.wait(request.handle)
                elif isinstance(request, Post):
                    answer = self.post(request)
                elif isinstance(request, Expect):
                    answer = self.expect(request)
                elif isinstance(request, Pause):
                    return True, request.value
                else:
                    raise TypeError(f"a program yields Start, Wait, Post, Expect or Pause; got {request!r}")
                del request
        except RankError as error:
            self._leave(error)
            raise error.on(self.rank) from error.__cause__
        except MeshwrightError as error:
            self._leave(error)
            raise
        except Exception as error:
            self._leave(error)
            raise RankError(self.rank, error) from error
        finally:
            answer = None

    def _leave(self, error: Exception) -> None:
        """The others are told first, then what they wait for ends."""
        self.watch.leave(error)
        self.close()

    def start(self, request: Start) -> _Handle:
        """Begin the collectives of a request."""
        try:
            check(request)
        except MismatchError as error:
            raise MismatchError(f"rank {self.rank}: {error}") from None
        group = self._group(request.transfers[0].axes)
        add_counts(self.sent[self.rank], request, group.index, len(group.ranks))
        text = str(request)
        try:
            return _Handle(begin(request, group), text)
        except RuntimeError as error:
            raise self._failed(text, group.ranks, error) from error

    def wait(self, handle: _Handle) -> list[torch.Tensor]:
        """The results of a `start`, once."""
        pending, handle.pending = handle.pending, None
        if pending is None:
            raise RankError(self.rank, ValueError("a handle is waited for twice"))
        try:
            self.watch.waiting = handle.text
            return list(pending.results())
        except RuntimeError as error:
            raise self._failed(handle.text, pending.group.ranks, error) from error
        finally:
            self.watch.waiting = ""

    def post(self, request: Post) -> _Handle:
        """Begin to send; what is under way is kept until it has gone."""
        count_sent(self.sent[self.rank], request)
        try:
            self._sending = [s for s in self._sending if s.pending is not None and not s.pending.done]
            group = self._messages(self.rank, request.to)
            handle = _Handle(send(request, group), str(request))
        except RuntimeError as error:
            raise self._failed(str(request), (request.to,), error) from error
        self._sending.append(handle)
        return handle

    def expect(self, request: Expect) -> _Handle:
        """Begin to receive."""
        text = str(request)
        try:
            group = self._messages(request.source, self.rank)
            return _Handle(receive(request, self.rank, group, self.backend == "nccl"), text)
        except RuntimeError as error:
            raise self._failed(text, (request.source,), error) from error

    def _sent_all(self) -> None:
        sending, self._sending = self._sending, []
        for handle in sending:
            if handle.pending is not None:
                self.wait(handle)

    def _failed(self, text: str, ranks: tuple[int, ...], error: BaseException) -> PeerError:
        others = ", ".join(str(r) for r in ranks if r != self.rank)
        limit = "" if self.timeout is None else f" within {self.timeout:g} s"
        why = self.watch.blame() or f"a peer (of ranks {others}) stopped or did not answer{limit}"
        return PeerError(f"rank {self.rank}: {text} failed ({_short(error)})", why)

    def _group(self, axes: tuple[str, ...]) -> Group:
        found = self._groups.get(axes)
        if found is not None:
            return found
        ranks = self.mesh.group(axes, self.rank)
        made = self._process_groups.get(tuple(sorted(ranks))) if len(ranks) > 1 else None
        if made is None and len(ranks) > 1:
            raise MeshwrightError(
                f"rank {self.rank}: no process group over {'+'.join(axes)}; "
                "call prepare with the same axes on every rank before programs run"
            )
        found = self._groups[axes] = Group(made, ranks, ranks.index(self.rank), self.backend == "nccl")
        return found


def _short(error: BaseException) -> str:
    """What the backend says, without where in its source, and without its advice."""
    return re.sub(r"^(\[[^]]*\]\s*)+", "", str(error).splitlines()[0]).partition(". This is")[0][:120]


def backend_for(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def join(device: torch.device, timeout: float | None = None) -> None:
    """Join the launch, where the script has not done it."""
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend_for(device), timeout=_delta(timeout))


def own_cache(rank: int) -> None:
    """Triton's compiled kernels in a folder of this process's own, unless `TRITON_CACHE_DIR` says where: processes of
    one launch compile the same kernels at the same moment, and in a shared home folder they race for one file."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(home, ".triton", "cache", f"rank{rank}"))


def _delta(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


def _only(programs: Sequence[Program]) -> Program:
    if len(programs) != 1:
        raise ValueError(f"a process runs one rank; got {len(programs)} programs")
    return programs[0]


def _first_sets(mesh: Mesh) -> list[tuple[str, ...]]:
    """The sets of axes that get process groups at construction, in the order in which all ranks make them."""
    axes = tuple(a for a in mesh.names if mesh.sizes[a] > 1)
    sizes = range(1, len(axes) + 1) if len(axes) <= _ALL_SETS else (1, len(axes))
    return [c for n in sizes for c in itertools.combinations(axes, n)]
