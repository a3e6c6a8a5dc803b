"""One order of all actions of all ranks in which everything stands after what it waits for; the times are not in it.

Each rank is walked as far as it goes, and woken by the send that it waits for, so the work grows with the number of
actions alone. The simulator needs it once for a schedule, whatever the costs are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .action import COMPUTE, RECEIVES, SENDS, Action
from .errors import ScheduleError
from .schedule import Schedule
from .timeline import COMPUTE_STREAM

BESIDE = {"REDUCE": "collective", "UNSHARD": "collective", "OFFLOAD": "host", "RELOAD": "host"}
"""Streams of what runs beside the computations."""


class Step(NamedTuple):
    """An action that takes time.

    Attributes:
        rank: where it is started.
        action: what it is.
        name: its word.
        stream: what it occupies: the rank, a link, or a stream beside.
        awaits: the numbers of the steps whose ends it waits for, besides those of its stream.
    """

    rank: int
    action: Action
    name: str
    stream: str
    awaits: tuple[int, ...]


@dataclass(frozen=True)
class Walk:
    """A schedule, walked.

    Attributes:
        steps: each after what it waits for.
        in_flight: per rank, the most pairs of a virtual stage and a micro-batch between F and W.
    """

    steps: tuple[Step, ...]
    in_flight: tuple[int, ...]


@lru_cache(maxsize=64)
def walk(schedule: Schedule) -> Walk:
    """The schedule in one order.

    Raises:
        ScheduleError: a rank waits for what is never sent.
    """
    walker = _Walker(schedule)
    walker.walk()
    held = tuple(_in_flight(order) if schedule.trains else 0 for order in schedule.orders)
    return Walk(tuple(walker.steps), held)


class _Walker:
    """The state of a walk."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.place = [0] * schedule.ranks
        self.steps: list[Step] = []
        self.sent: dict[Action, int] = {}
        """By SEND, the number of its step."""
        self.expected: dict[tuple[int, str, int | None], list[Action]] = {}
        """By stage, F or B, and micro-batch: the SENDs of what it receives."""
        self.blocked: dict[Action, int] = {}
        """By SEND, the rank that waits for it."""
        self.ready: dict[tuple[int, int | None], int] = {}
        """By stage, or stage and micro-batch: the step that gathered its weights, or brought back what it saved."""

    def walk(self) -> None:
        orders, place = self.schedule.orders, self.place
        todo = list(range(self.schedule.ranks))
        while todo:
            rank = todo.pop()
            order = orders[rank]
            while place[rank] < len(order) and self._passes(rank, order[place[rank]], todo):
                place[rank] += 1
        stuck = [f"rank {rank} at {o[i]}" for rank, (o, i) in enumerate(zip(orders, place, strict=True)) if o[i:]]
        if stuck:
            raise ScheduleError(f"schedule {self.schedule.name} never ends: {', '.join(stuck)}; validate says why")

    def _passes(self, rank: int, action: Action, todo: list[int]) -> bool:
        """Writes an action down; False where its rank has to wait for a send."""
        stage, kind, micro, other = action
        if kind in RECEIVES:
            self.expected.setdefault((stage, kind[-1], micro), []).append(action.partner)
            return True
        awaits: tuple[int, ...] = ()
        stream = BESIDE.get(kind, COMPUTE_STREAM)
        if kind in COMPUTE:
            sends = self.expected.get((stage, kind[0], micro), ())
            missing = next((send for send in sends if send not in self.sent), None)
            if missing is not None:
                self.blocked[missing] = rank
                return False
            ready = (self.ready[key] for key in ((stage, None), (stage, micro)) if key in self.ready)
            awaits = (*(self.sent[send] for send in sends), *ready)
        elif kind in SENDS:
            assert other is not None
            stream = f"{rank}>{self.schedule.placement[other]}"
            self.sent[action] = len(self.steps)
            if action in self.blocked:
                todo.append(self.blocked.pop(action))
        elif kind in ("UNSHARD", "RELOAD"):
            self.ready[stage, micro] = len(self.steps)
        self.steps.append(Step(rank, action, str(action), stream, awaits))
        return True


def _in_flight(order: tuple[Action, ...]) -> int:
    count = most = 0
    for action in order:
        if action.kind == "F":
            count += 1
            most = max(most, count)
        elif action.kind in ("W", "BW"):
            count -= 1
    return most
