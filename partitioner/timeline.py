"""What happened when: events of a simulated or of a real step, and the file that chrome://tracing and Perfetto open.

busy of a rank      the sum of its computations
idle of a rank      seconds - busy
bubble              1 - sum of busy / (ranks x seconds)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Steps = tuple[tuple[float, int], ...]
"""(seconds, bytes): from then on, so many."""

COMPUTE_STREAM = "compute"


class Event(NamedTuple):
    """Something that took time on a rank.

    Attributes:
        rank: where.
        name: the word of an action, or what a real run calls it.
        start, end: seconds since the step began.
        stream: what was busy: "compute", a link, ...; events of one stream of a rank do not overlap.
    """

    rank: int
    name: str
    start: float
    end: float
    stream: str = COMPUTE_STREAM


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline in time.

    Attributes:
        seconds: from the start of the first event to the end of the last.
        busy: per rank the seconds that it computes.
        peak: per rank the most bytes held at once, resident ones included.
        in_flight: per rank the most pairs of a virtual stage and a micro-batch between F and W.
        memory: per rank the bytes held over time.
        events: in order of start.
    """

    seconds: float
    busy: tuple[float, ...]
    peak: tuple[int, ...]
    in_flight: tuple[int, ...]
    memory: tuple[Steps, ...]
    events: tuple[Event, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank the seconds that it does not compute."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def span(self) -> tuple[float, ...]:
        """Per rank the seconds from its first computation to its last: what a step costs it where steps overlap."""
        own: list[list[Event]] = [[] for _ in self.busy]
        for event in self.events:
            if event.stream == COMPUTE_STREAM:
                own[event.rank].append(event)
        return tuple(events[-1].end - events[0].start if events else 0.0 for events in own)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time that they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def trace_events(events: Iterable[Event], memory: Sequence[Steps] = ()) -> list[dict[str, Any]]:
    """Events in Chrome's trace format: a process a rank, a thread a stream, microseconds; memory as a counter.

    Source: "Trace Event Format", Google, 2016: phases X (complete), C (counter), M (metadata).
    """
    events = list(events)
    streams: dict[tuple[int, str], int] = {}
    for event in sorted(events, key=lambda e: (e.rank, e.stream != COMPUTE_STREAM, e.stream)):
        streams.setdefault((event.rank, event.stream), len(streams))
    out = [_named("process_name", rank, 0, f"rank {rank}") for rank in sorted({rank for rank, _ in streams})]
    out += [_named("thread_name", rank, thread, stream) for (rank, stream), thread in streams.items()]
    out += [
        {
            "name": e.name,
            "cat": e.stream,
            "ph": "X",
            "ts": e.start * 1e6,
            "dur": (e.end - e.start) * 1e6,
            "pid": e.rank,
            "tid": streams[e.rank, e.stream],
        }
        for e in events
    ]
    for rank, steps in enumerate(memory):
        out += [{"name": "bytes", "ph": "C", "ts": t * 1e6, "pid": rank, "args": {"bytes": n}} for t, n in steps]
    return out


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def write_trace(path: str | Path, events: Iterable[Event], memory: Sequence[Steps] = ()) -> None:
    """Writes the trace of a step; several steps or runs go into one file by other ranks' numbers."""
    text = json.dumps({"traceEvents": trace_events(events, memory), "displayTimeUnit": "ms"})
    Path(path).write_text(text + "\n")
