"""All ranks in one process and one thread: programs run in turn; a collective is done when its whole group has started.

A rank runs until it waits for a collective that some member has not started, pauses, or ends; then the next rank runs.
The order is fixed, so every run is the same. Within a group (the ranks of `axes` that differ on `axes` only) the n-th
start of one rank meets the n-th of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..partitioner.mesh import Mesh
from .comm import (
    Counts,
    Expect,
    Pause,
    Post,
    Program,
    Start,
    Wait,
    add_counts,
    check,
    count_sent,
    cut,
    join,
    reduce_parts,
    seen,
    signature,
)  # fmt: skip
from .faults import DeadlockError, MeshwrightError, MismatchError, RankError


@dataclass(slots=True, eq=False)
class _Meeting:
    """One collective of one group, or a message from the first of two ranks to the second.

    `starts` and then `results` are by index in the group.
    """

    number: int
    group: tuple[int, ...]
    starts: list[Start | Post | Expect | None]
    missing: int
    results: list[tuple[torch.Tensor, ...] | None] | None = None

    def text(self, index: int) -> str:
        return f"{self.starts[index]} (number {self.number} among ranks {', '.join(map(str, self.group))})"


@dataclass(slots=True, eq=False)
class _Handle:
    meeting: _Meeting
    index: int


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank's program and where it stands: "ready", "waiting", "paused" or "done"."""

    number: int
    program: Program | None
    state: str = "ready"
    send: Any = None
    waits: _Handle | None = None
    value: Any = None


@dataclass(slots=True, eq=False)
class _Session:
    """One set of programs that talk to each other. `open`: meetings not all have come to, by (axes, group, number)."""

    ranks: list[_Rank]
    posted: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)
    open: dict[tuple[tuple[str, ...], tuple[int, ...], int], _Meeting] = field(default_factory=dict)


class InProcessComm:
    """Runs the programs of all ranks of a mesh; see `comm.Comm`.

    Attributes:
        sent: of each rank, kind -> (calls, payload bytes), as a wire would carry them.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.ranks = tuple(range(mesh.world_size))
        self.sent: dict[int, Counts] = {r: {} for r in self.ranks}
        self._groups: dict[tuple[int, tuple[str, ...]], tuple[int, ...]] = {}
        self._paused: WeakKeyDictionary[Program, tuple[_Session, int]] = WeakKeyDictionary()

    @property
    def counted(self) -> Counts:
        """The counts of rank 0."""
        return self.sent[0]

    def run(self, programs: Sequence[Program]) -> list[Any]:
        """Run to the end; the values they return.

        Raises:
            DeadlockError, MismatchError, RankError: after which all programs are closed.
            MeshwrightError: a program paused.
        """
        session = self._session(programs)
        self._advance_all(session)
        paused = [r.number for r in session.ranks if r.state == "paused"]
        if paused:
            _close(session)
            raise MeshwrightError(f"ranks {paused} paused; run_until_pause and resume run programs that pause")
        return [r.value for r in session.ranks]

    def prepare_pairs(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Nothing to make ready."""

    def run_until_pause(self, programs: Sequence[Program]) -> list[Any]:
        """Run until each pauses or ends; the values they paused with or returned."""
        session = self._session(programs)
        for i, program in enumerate(programs):
            self._paused[program] = (session, i)
        return self._values(session)

    def resume(self, programs: Sequence[Program], values: Sequence[Any]) -> list[Any]:
        """Send each paused program a value and run until each pauses again or ends."""
        found = [self._paused.get(p, (None, -1)) for p in programs]
        session = found[0][0]
        ordered = all(s is session and i == k for i, (s, k) in enumerate(found))
        if session is None or not ordered or len(found) != len(session.ranks):
            raise MeshwrightError("resume needs the programs that run_until_pause was given, in the same order")
        for rank, program, value in zip(session.ranks, programs, values, strict=True):
            if rank.state != "paused":
                raise MeshwrightError(f"rank {rank.number} is {rank.state}, not paused: it cannot be resumed")
            rank.state, rank.send, rank.program = "ready", value, program
        return self._values(session)

    def _values(self, session: _Session) -> list[Any]:
        self._advance_all(session)
        values = [r.value for r in session.ranks]
        for r in session.ranks:
            r.value, r.program = None, None  # the caller holds the program: if it lets go, what was saved is freed
        return values

    def _session(self, programs: Sequence[Program]) -> _Session:
        if len(programs) != len(self.ranks):
            raise ValueError(f"mesh {self.mesh} has {len(self.ranks)} ranks; got {len(programs)} programs")
        return _Session([_Rank(i, p) for i, p in enumerate(programs)])

    def _advance_all(self, session: _Session) -> None:
        try:
            moved = True
            while moved:
                moved = False
                for rank in session.ranks:
                    moved |= self._advance(rank, session)
            if any(r.state == "waiting" for r in session.ranks):
                raise DeadlockError(_deadlock_text(session))
        except BaseException:
            _close(session)
            raise

    def _advance(self, rank: _Rank, session: _Session) -> bool:
        """Run one rank as far as it gets; whether it moved at all."""
        if rank.state == "waiting":
            assert rank.waits is not None
            if rank.waits.meeting.results is None:
                return False
            rank.send, rank.waits, rank.state = _take(rank.waits, rank.number), None, "ready"
        elif rank.state != "ready":
            return False
        while rank.state == "ready":
            answer, rank.send = rank.send, None
            try:
                assert rank.program is not None
                request = rank.program.send(answer)
            except StopIteration as stop:
                rank.state, rank.value = "done", stop.value
                break
            except RankError as error:
                raise error.on(rank.number) from error.__cause__
            except Exception as error:
                raise RankError(rank.number, error) from error
            finally:
                del answer
            self._answer(request, rank, session)
            del request
        return True

    def _answer(self, request: Any, rank: _Rank, session: _Session) -> None:
        if isinstance(request, Start):
            rank.send = self._start(request, rank.number, session)
        elif isinstance(request, Wait):
            if request.handle.meeting.results is None:
                rank.state, rank.waits = "waiting", request.handle
            else:
                rank.send = _take(request.handle, rank.number)
        elif isinstance(request, (Post, Expect)):
            rank.send = self._message(request, rank.number, session)
        elif isinstance(request, Pause):
            rank.state, rank.value = "paused", request.value
        else:
            what = f"a program yields Start, Wait, Post, Expect or Pause; got {request!r}"
            raise RankError(rank.number, TypeError(what))

    def _start(self, start: Start, rank: int, session: _Session) -> _Handle:
        try:
            check(start)
        except MismatchError as error:
            raise MismatchError(f"rank {rank}: {error}") from None
        axes = start.transfers[0].axes
        group = self._group(rank, axes)
        number = session.posted.get((rank, axes), 0)
        session.posted[rank, axes] = number + 1
        meeting = session.open.get((axes, group, number))
        if meeting is None:
            meeting = session.open[axes, group, number] = _Meeting(number, group, [None] * len(group), len(group))
        index = group.index(rank)
        meeting.starts[index] = start
        meeting.missing -= 1
        add_counts(self.sent[rank], start, index, len(group))
        if not meeting.missing:
            del session.open[axes, group, number]
            _complete(meeting)
        return _Handle(meeting, index)

    def _message(self, request: Post | Expect, rank: int, session: _Session) -> _Handle:
        """One end of a message; what is sent is copied, so that ranks share no memory."""
        sends = isinstance(request, Post)
        pair = (rank, request.to) if sends else (request.source, rank)
        kind = ("send" if sends else "receive", str(request.channel))
        number = session.posted.get((pair[0] * len(self.ranks) + pair[1], kind), 0)
        session.posted[pair[0] * len(self.ranks) + pair[1], kind] = number + 1
        key = (("message", str(request.channel)), pair, number)
        meeting = session.open.get(key)
        if meeting is None:
            meeting = session.open[key] = _Meeting(number, pair, [None, None], 2)
        meeting.starts[0 if sends else 1] = request
        meeting.missing -= 1
        if sends:
            count_sent(self.sent[rank], request)
            meeting.results = [None, tuple(_copy(x) for x in request.tensors)]
            request.tensors = tuple(x.detach().to("meta") for x in request.tensors)
        if not meeting.missing:
            del session.open[key]
            post, expect = meeting.starts
            assert isinstance(post, Post) and isinstance(expect, Expect)
            if post.kinds != expect.kinds:
                raise MismatchError(f"message {number} from rank {pair[0]} to rank {pair[1]}: {post}, but {expect}")
        return _Handle(_GONE, 0) if sends else _Handle(meeting, 1)

    def _group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        group = self._groups.get((rank, axes))
        if group is None:
            group = self._groups[rank, axes] = self.mesh.group(axes, rank)
        return group


_GONE = _Meeting(0, (), [], 0, [])
"""Of what is sent: it was copied, and has gone at once."""


def _take(handle: _Handle, rank: int) -> list[torch.Tensor]:
    results = handle.meeting.results
    assert results is not None
    if handle.meeting is _GONE:
        return []
    mine = results[handle.index]
    if mine is None:
        raise RankError(rank, ValueError("a handle is waited for twice"))
    results[handle.index] = None
    return list(mine)


def _close(session: _Session) -> None:
    for rank in session.ranks:
        if rank.program is not None:
            rank.program.close()


def _complete(meeting: _Meeting) -> None:
    """Check that the members agree, and give each its results."""
    starts = [s for s in meeting.starts if isinstance(s, Start)]
    want = signature(starts[0])
    if any(signature(s) != want for s in starts[1:]) or not _peers_agree(starts):
        named = zip(meeting.group, starts, strict=True)
        lines = [f"\n  rank {r} started {s} with {', '.join(map(str, s.transfers))}" for r, s in named]
        ranks = ", ".join(map(str, meeting.group))
        raise MismatchError(f"ranks {ranks} do not agree on their collective number {meeting.number}:" + "".join(lines))
    columns = [_results([s.tensors[i] for s in starts], [s.transfers[i] for s in starts]) for i in range(len(want))]
    meeting.results = list(zip(*columns, strict=True))
    meeting.starts = []


def _peers_agree(starts: list[Start]) -> bool:
    """Whom a rank sends to receives from it, and as much."""
    for t in range(len(starts[0].transfers)):
        halos = [s.transfers[t] for s in starts]
        if any(a.gives[j][1] != b.gets[i] for i, a in enumerate(halos) if a.gives for j, b in enumerate(halos)):
            return False
        for i, start in enumerate(starts):
            one = start.transfers[t]
            if one.kind != "permute":
                continue
            other = starts[one.peers[0]].transfers[t]
            size = 1
            for n in other.out_shape:
                size *= n
            if other.peers[1] != i or size != start.tensors[t].numel():
                return False
    return True


def _results(tensors: list[torch.Tensor], transfers: list[Any]) -> list[torch.Tensor]:
    """Of one transfer, each member's result."""
    kind, op = transfers[0].kind, transfers[0].op
    if kind == "all_gather":
        pieces = [seen(x, t) for x, t in zip(tensors, transfers, strict=True)]
        return [join(pieces, t) for t in transfers]
    if kind == "all_reduce":
        total = reduce_parts([seen(x, t) for x, t in zip(tensors, transfers, strict=True)], op)
        return [(total.clone() if i else total).reshape(t.out_shape) for i, t in enumerate(transfers)]
    if kind == "permute":
        return [_copy(tensors[t.peers[1]]).reshape(t.out_shape) for t in transfers]
    to = list(zip(*(cut(x, t) for x, t in zip(tensors, transfers, strict=True)), strict=True))
    if kind == "reduce_scatter":
        return [reduce_parts(parts, op).reshape(t.out_shape) for parts, t in zip(to, transfers, strict=True)]
    if kind in ("all_to_all", "halo"):
        return [join(parts, t) for parts, t in zip(to, transfers, strict=True)]
    raise MismatchError(f"no collective is called {kind!r}")


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _deadlock_text(session: _Session) -> str:
    lines = [_standing(rank, session) for rank in session.ranks]
    return "no rank can move:\n" + "\n".join(lines)


def _standing(rank: _Rank, session: _Session) -> str:
    if rank.state == "waiting":
        assert rank.waits is not None
        meeting = rank.waits.meeting
        late = ", ".join(str(r) for r, s in zip(meeting.group, meeting.starts, strict=True) if s is None)
        line = f"  rank {rank.number} waits for {meeting.text(rank.waits.index)}; not started by ranks {late}"
    else:
        line = f"  rank {rank.number} {'has ended' if rank.state == 'done' else 'has paused'}"
    others = [
        m.text(m.group.index(rank.number))
        for m in session.open.values()
        if rank.number in m.group
        and m.starts[m.group.index(rank.number)] is not None
        and (rank.waits is None or m is not rank.waits.meeting)
    ]
    return line + "".join(f"\n    has also started {text}" for text in others)
