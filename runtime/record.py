"""A real step in time: what each rank computed and when, what it waited for, what was on its way.

compute     from when a rank goes on to when it waits next; with micro-batches, one event an act, named as in a schedule
wait        from when a rank needs what has not come to when it goes on
link        from when a collective or a receive is started to when what it brings is there
in flight   pairs of a virtual stage and a micro-batch between F and W, for whose B or W something is kept

One rank a process: times as measured, on the clocks of the machines. All ranks in one process: as `rank_log.replayed`
puts them. On a GPU a rank is waited for at the end of each act and before each wait: the kernels, not their launches,
are timed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..partitioner.mesh import Mesh
from ..partitioner.schedules.timeline import COMPUTE_STREAM, Event, Timeline, write_trace
from ..partitioner.transfer import Transfer
from ..partitioner.units import seconds_text
from .comm import Comm, Start, Wait
from .rank_log import LINK, WAIT, Entry, Log, replayed


class Record:
    """The steps that ran while it was made (`Compiled.recorded`), once they have.

    Attributes:
        events: of every rank, from 0 on.
        in_flight: per rank the most pairs of a virtual stage and a micro-batch kept at once.
        simulated: the planned step, where the plan has a schedule.
    """

    def __init__(self) -> None:
        self.logs: dict[int, Log] = {}
        self.events: tuple[Event, ...] = ()
        self.in_flight: tuple[int, ...] = ()
        self.simulated: Timeline | None = None

    def of(self, mesh: Mesh, rank: int, device: torch.device) -> Log:
        settled = torch.cuda.synchronize if device.type == "cuda" else None
        return self.logs.setdefault(rank, Log(mesh, rank, settled))

    def close(self, comm: Comm, mesh: Mesh, device: torch.device) -> None:
        """Put the ranks' logs together; every process calls it."""
        logs = [self.logs[rank] for rank in comm.ranks if rank in self.logs]
        if len(logs) == mesh.world_size:
            entries, self.in_flight = replayed([log.entries for log in logs]), tuple(log.in_flight for log in logs)
        else:
            mine = json.dumps([logs[0].entries, logs[0].in_flight] if logs else [[], 0])
            given = [json.loads(text) for text in _everyones(mine, comm, mesh, device)]
            entries, self.in_flight = [[Entry(*e) for e in one] for one, _ in given], tuple(n for _, n in given)
        self.logs = {}
        self.events = tuple(_events(entries))

    def write(self, path: str | Path) -> None:
        """The trace for Perfetto or chrome://tracing; the simulated step beside the measured one, if there is one."""
        runs = {"measured": self.events}
        memory = None
        if self.simulated is not None:
            runs["simulated"], memory = self.simulated.events, {"simulated": self.simulated.memory}
        write_trace(path, runs, memory)

    def seconds(self, rank: int, stream: str = COMPUTE_STREAM) -> float:
        """How long a rank computed, or waited ("wait")."""
        return sum(e.end - e.start for e in self.events if e.rank == rank and e.stream == stream)

    def __str__(self) -> str:
        """A line a rank, and which one the others wait for."""
        busy = [self.seconds(r) for r in range(len(self.in_flight))]
        if not any(busy):
            return "nothing was recorded"
        lines = ["rank    compute       wait  in flight"]
        for rank, computed in enumerate(busy):
            waited = seconds_text(self.seconds(rank, WAIT))
            lines.append(f"{rank:<4} {seconds_text(computed):>10} {waited:>10} {self.in_flight[rank]:>10}")
        longest, mean = max(busy), sum(busy) / len(busy)
        lines.append(f"rank {busy.index(longest)} computes longest, {longest / mean:.2f} of the mean")
        return "\n".join(lines)


def _events(logs: Sequence[Sequence[Entry]]) -> Iterator[Event]:
    """Events from 0 on: computations of one name that follow each other are one; links that overlap are on several
    streams; what took no time is left out."""
    first = min((e.start for entries in logs for e in entries), default=0.0)
    for rank, entries in enumerate(logs):
        lanes: list[float] = []
        open_: Event | None = None
        for e in sorted((e for e in entries if e.stream != "start" and e.end > e.start), key=lambda e: e.start):
            stream = e.stream
            if stream == LINK:
                lane = next((i for i, end in enumerate(lanes) if end <= e.start), len(lanes))
                lanes[lane:lane + 1] = [e.end]  # fmt: skip
                stream = LINK if lane == 0 else f"{LINK} {lane + 1}"
            event = Event(rank, e.name, e.start - first, e.end - first, stream)
            if open_ is not None and stream == COMPUTE_STREAM and open_.name == e.name and _next_to(open_, event):
                open_ = open_._replace(end=event.end)
                continue
            if stream == COMPUTE_STREAM:
                if open_ is not None:
                    yield open_
                open_ = event
            else:
                yield event
        if open_ is not None:
            yield open_


def _next_to(a: Event, b: Event) -> bool:
    return b.start - a.end < 1e-5


def _everyones(text: str, comm: Comm, mesh: Mesh, device: torch.device) -> list[str]:
    """Every rank's text, on all of them."""
    axes = tuple(a for a in mesh.names if mesh.sizes[a] > 1)
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    longest = torch.tensor(len(mine), device=device)
    (program,) = (_together(mine, longest, axes, mesh.group(axes, comm.ranks[0])),)
    rows = comm.run([program])[0]  # type: ignore[list-item]
    order = mesh.group(axes, comm.ranks[0])
    by_rank = dict(zip(order, rows.cpu(), strict=True))
    return [bytes(by_rank[r].tolist()).rstrip(b" ").decode() for r in range(mesh.world_size)]


def _together(mine: torch.Tensor, length: torch.Tensor, axes: tuple[str, ...], ranks: Sequence[int]) -> Iterator[Any]:
    largest = Transfer("all_reduce", axes, (), (), op="max")
    (most,) = yield Wait((yield Start((largest,), (length,), where="recording")))
    size, count = int(most), len(ranks)
    row = torch.full((1, size), ord(" "), dtype=torch.uint8, device=length.device)
    row[0, : len(mine)] = mine.to(row.device)
    gathered = Transfer(
        "all_gather", axes, (1, size), (count, size), gather_dim=0, gather_sizes=(1,) * count
    )  # fmt: skip
    (rows,) = yield Wait((yield Start((gathered,), (row,), where="recording")))
    return rows
