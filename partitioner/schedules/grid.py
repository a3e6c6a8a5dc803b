"""A schedule as a grid for people: a row a rank, time to the right, F = B = W = 1 and BW = 2 columns."""

from __future__ import annotations

from collections.abc import Collection

from .action import COMPUTE
from .schedule import Edge, Schedule, flow
from .send_recv import TICKS, start_ticks


def grid(schedule: Schedule, edges: Collection[Edge] | None = None, gradients: Collection[Edge] | None = None) -> str:
    """The computations of a schedule, each as early as it can be; `.` is an idle column.

    The word of an action leaves out its stage where the rank has one only. `edges` and `gradients` as for
    `with_transfers`, whatever transfers the schedule has.

    Raises:
        ScheduleError: computations that wait in a circle.
    """
    starts = start_ticks(schedule, flow(schedule.stages, edges, gradients))
    alone = schedule.stages == schedule.ranks
    rows: list[list[tuple[int, str, int]]] = []
    for order, at in zip(schedule.orders, starts, strict=True):
        timed = [(tick, a) for a, tick in zip(order, at, strict=True) if a.kind in COMPUTE]
        rows.append([(tick, f"{a.kind}{a.micro}" if alone else str(a), TICKS[a.kind]) for tick, a in timed])
    width = max((-(-(len(word) + 1) // ticks) for row in rows for _, word, ticks in row), default=0)
    end = max((tick + ticks for row in rows for tick, _, ticks in row), default=0)
    label = len(f"rank {schedule.ranks - 1}")
    lines = (_row(row, width, end) for row in rows)
    return "".join(f"{f'rank {rank}':<{label}} | {line}".rstrip() + "\n" for rank, line in enumerate(lines))


def _row(row: list[tuple[int, str, int]], width: int, end: int) -> str:
    idle, line, now = ".".ljust(width), "", 0
    for tick, word, ticks in row:
        line += idle * (tick - now) + word.ljust(width * ticks)
        now = tick + ticks
    return line + idle * (end - now)
