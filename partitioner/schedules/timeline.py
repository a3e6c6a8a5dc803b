"""What happened when: events of a simulated or of a real step, and the file that chrome://tracing and Perfetto open.

busy of a rank      the sum of its computations
idle of a rank      seconds - busy
bubble              1 - sum of busy / (ranks x seconds)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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


def trace_events(
    runs: Mapping[str, Iterable[Event]], memory: Mapping[str, Sequence[Steps]] | None = None
) -> list[dict[str, Any]]:
    """Events in Chrome's trace format: a process a rank and run, a thread a stream, microseconds; memory as a counter.

    Args:
        runs: by name the events of a run: simulated, measured. The runs of one rank stand next to each other.
        memory: by the name of a run, per rank the bytes held over time.

    Source: "Trace Event Format", Google, 2016: phases X (complete), C (counter), M (metadata).
    """
    out: list[dict[str, Any]] = []
    for number, (run, given) in enumerate(runs.items()):
        events = list(given)
        streams: dict[int, dict[str, int]] = {}
        for event in sorted(events, key=lambda e: (e.rank, e.stream != COMPUTE_STREAM, e.stream)):
            own = streams.setdefault(event.rank, {})
            own.setdefault(event.stream, len(own))
        pids = {rank: rank * len(runs) + number for rank in streams}
        for rank, own in streams.items():
            out.append(_named("process_name", pids[rank], 0, f"rank {rank} {run}"))
            out += [_named("thread_name", pids[rank], thread, stream) for stream, thread in own.items()]
        out += [_complete(event, pids[event.rank], streams[event.rank][event.stream]) for event in events]
        for rank, steps in enumerate((memory or {}).get(run, ())):
            pid = rank * len(runs) + number
            out += [{"name": "bytes", "ph": "C", "ts": t * 1e6, "pid": pid, "args": {"bytes": n}} for t, n in steps]
    return out


def _complete(event: Event, pid: int, thread: int) -> dict[str, Any]:
    start, takes = event.start * 1e6, (event.end - event.start) * 1e6
    return {"name": event.name, "cat": event.stream, "ph": "X", "ts": start, "dur": takes, "pid": pid, "tid": thread}


def _named(what: str, pid: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}}


def write_trace(
    path: str | Path, runs: Mapping[str, Iterable[Event]], memory: Mapping[str, Sequence[Steps]] | None = None
) -> None:
    """Writes the trace of one run or of several beside each other, as `trace_events` takes them."""
    text = json.dumps({"traceEvents": trace_events(runs, memory), "displayTimeUnit": "ms"})
    Path(path).write_text(text + "\n")
