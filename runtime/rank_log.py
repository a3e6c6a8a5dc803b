"""One rank watched while it runs: what it computed and when, what it waited for, what it started.

In one process ranks take turns. `replayed` puts what they did beside each other anew, each part taking as long as it
did, as if every rank ran by itself and links took no time:

    end of a wait = the latest of when its members came to it (a message: when it was sent)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..partitioner.mesh import Mesh
from ..partitioner.schedules.timeline import COMPUTE_STREAM
from ..partitioner.units import bytes_text
from .comm import Expect, Pause, Post, Start, Wait

WAIT, LINK, OUTSIDE = "wait", "link", "outside"
"""Streams beside "compute"; the last is between forward and backward of a model that is called."""

Key = tuple[str, tuple[int, ...], int]
"""A meeting: its kind or axes, its ranks, the how-many-th of these it is."""


class Entry(NamedTuple):
    """One thing that a rank did, from when to when on its clock. `key`: the meeting it came to or waited for."""

    stream: str
    name: str
    start: float
    end: float
    key: Key | None = None


@dataclass
class Log:
    """What one rank did, in order.

    Attributes:
        in_flight: the most pairs of a virtual stage and a micro-batch for which something was kept.
    """

    mesh: Mesh
    rank: int
    settled: Callable[[], None] | None = None
    entries: list[Entry] = field(default_factory=list)
    in_flight: int = 0
    doing: str = ""
    _met: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    _since: float = 0.0

    def act(self, name: str, in_flight: int) -> None:
        """The rank ends what it did and begins `name`."""
        self._computed()
        self.doing, self.in_flight = name, max(self.in_flight, in_flight)

    def following(self, program: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """The program, watched. It yields what the program yields, and is sent what the program is."""
        handles: dict[int, tuple[Key, str, float]] = {}
        answer, self.doing = None, ""
        try:
            while True:
                self._since, request = time.time(), None
                try:
                    request = program.send(answer)
                except StopIteration as stop:
                    self._computed()
                    self._name("after the last wait")
                    return stop.value
                answer = None
                self._computed()
                begun = self._since
                if isinstance(request, Wait):
                    key, text, started = handles.pop(id(request.handle))
                    self._name(f"before {text}")
                    answer = yield request
                    self.entries += (
                        Entry(WAIT, text, begun, time.time(), key), Entry(LINK, text, started, time.time(), key)
                    )  # fmt: skip
                elif isinstance(request, Pause):
                    answer = yield request
                    self.entries.append(Entry(OUTSIDE, "between forward and backward", begun, time.time()))
                else:
                    key, text = self._key(request), _text(request)
                    answer = yield request
                    self.entries.append(Entry("start", text, begun, time.time(), key))
                    if not isinstance(request, Post):
                        handles[id(answer)] = (key, text, begun)
                del request
        finally:
            program.close()

    def _name(self, name: str) -> None:
        """Without acts: what has been computed since the last wait is named."""
        for i in reversed(range(len(self.entries))):
            if self.entries[i].stream == "start":
                continue
            if self.entries[i].name:
                break
            self.entries[i] = self.entries[i]._replace(name=name)

    def _computed(self) -> None:
        if self.settled is not None:
            self.settled()
        now = time.time()
        self.entries.append(Entry(COMPUTE_STREAM, self.doing, self._since, now))
        self._since = now

    def _key(self, request: Start | Post | Expect) -> Key:
        if isinstance(request, Start):
            axes = request.transfers[0].axes
            what, ranks = "+".join(axes), self.mesh.group(axes, self.rank)
        elif isinstance(request, Post):
            what, ranks = "send", (self.rank, request.to)
        else:
            what, ranks = "receive", (request.source, self.rank)
        number = self._met.get((what, ranks), 0)
        self._met[what, ranks] = number + 1
        return ("message" if what in ("send", "receive") else what, ranks, number)


def _text(request: Start | Post | Expect) -> str:
    """What is on its way, in few words."""
    if isinstance(request, Start):
        nbytes = sum(x.numel() * x.element_size() for x in request.tensors)
        what = f"{request.transfers[0].kind} over {'+'.join(request.transfers[0].axes)}, {bytes_text(nbytes)}"
        return what + (f", at {request.where}" if request.where else "")
    end = f"to rank {request.to}" if isinstance(request, Post) else f"from rank {request.source}"
    return f"{request.where} {end}"


def replayed(logs: Sequence[Sequence[Entry]]) -> list[list[Entry]]:
    """Ranks that took turns, as if they had run side by side on links that take no time."""
    now, at = [0.0] * len(logs), [0] * len(logs)
    came: dict[tuple[Key, int], float] = {}
    out: list[list[Entry]] = [[] for _ in logs]
    moved = True
    while moved:
        moved = False
        for rank, entries in enumerate(logs):
            while at[rank] < len(entries):
                entry = entries[at[rank]]
                if entry.stream == WAIT:
                    assert entry.key is not None
                    what, ranks, _ = entry.key
                    times = [came.get((entry.key, r)) for r in (ranks[:1] if what == "message" else ranks)]
                    if None in times:
                        break
                    end = max(now[rank], *(t for t in times if t is not None))
                    out[rank].append(entry._replace(start=now[rank], end=end))
                    now[rank] = end
                elif entry.stream == LINK:
                    assert entry.key is not None
                    out[rank].append(entry._replace(start=came[entry.key, rank], end=now[rank]))
                elif entry.stream == "start":
                    assert entry.key is not None
                    came[entry.key, rank] = now[rank]
                elif entry.stream == COMPUTE_STREAM:
                    end = now[rank] + entry.end - entry.start
                    out[rank].append(entry._replace(start=now[rank], end=end))
                    now[rank] = end
                at[rank], moved = at[rank] + 1, True
    return out
