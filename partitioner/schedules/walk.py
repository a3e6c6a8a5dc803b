"""One order of all actions of all ranks in which everything stands after what it waits for; the times are not in it.

Transfers block no rank: a SEND and its RECV start it, when both ranks have come to them, and the computation that reads
what is received waits for it. Each rank is walked as far as it goes, and woken by the transfer that it waits for, so
the work grows with the number of actions alone. The simulator needs it once for a schedule, whatever the costs are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..errors import ScheduleError
from .action import COMPUTE, RECEIVES, SENDS, Action
from .schedule import Schedule
from .timeline import COMPUTE_STREAM
from .waits import Wait, cycle_text

BESIDE = {"REDUCE": "collective", "UNSHARD": "collective", "OFFLOAD": "host", "RELOAD": "host"}
"""Streams of what runs beside the computations."""


class Step(NamedTuple):
    """An action that takes time. It starts when its stream is free and all that it awaits has ended.

    Attributes:
        rank: where it is started; a transfer, by its sender.
        action: what it is.
        name: its word.
        stream: what it occupies: the rank, a link, or a stream beside.
        awaits: the numbers of the steps that it waits for, besides those of its stream.
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


@lru_cache(maxsize=8)  # a search times one schedule with many costs; a big one has 100,000 steps
def walk(schedule: Schedule) -> Walk:
    """The schedule in one order.

    Raises:
        ScheduleError: ranks wait for each other, or for what is never sent.
    """
    walker = _Walker(schedule)
    walker.walk()
    waits = walker.waits()
    if waits:
        raise ScheduleError(f"schedule {schedule.name} never ends: {cycle_text(waits)}")
    held = tuple(_in_flight(order) if schedule.trains else 0 for order in schedule.orders)
    return Walk(tuple(walker.steps), held)


def stuck(schedule: Schedule) -> str | None:
    """The cycle of ranks that wait for each other though no transfer blocks its rank, or None."""
    walker = _Walker(schedule)
    walker.walk()
    waits = walker.waits()
    return cycle_text(waits) if waits else None


class _Walker:
    """The state of a walk."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.place = [0] * schedule.ranks
        self.steps: list[Step] = []
        self.last: list[tuple[int, ...]] = [()] * schedule.ranks
        """By rank, its last computation so far."""
        self.started: dict[Action, tuple[int, ...]] = {}
        """By SEND, of transfers that one rank has come to: what that rank last computed."""
        self.moved: dict[Action, int] = {}
        """By SEND, of transfers that both ranks have come to: the step."""
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

    def waits(self) -> dict[int, Wait]:
        """What each rank that cannot go on waits for."""
        orders, waits = self.schedule.orders, {}
        for send, rank in self.blocked.items():
            sender = self.schedule.placement[send.stage]
            at = orders[rank][self.place[rank]]
            waits[rank] = Wait(at, send, sender if send in orders[sender][self.place[sender] :] else None)
        return waits

    def _passes(self, rank: int, action: Action, todo: list[int]) -> bool:
        """Writes an action down; False where its rank has to wait for a transfer."""
        stage, kind, micro, _ = action
        if kind in COMPUTE:
            return self._computes(rank, action)
        if kind in RECEIVES:
            send = action.partner
            self.expected.setdefault((stage, kind[-1], micro), []).append(send)
            self._starts(rank, send, todo)
        elif kind in SENDS:
            self._starts(rank, action, todo)
        else:
            if kind in ("UNSHARD", "RELOAD"):
                self.ready[stage, micro] = len(self.steps)
            self.steps.append(Step(rank, action, str(action), BESIDE.get(kind, COMPUTE_STREAM), self.last[rank]))
        return True

    def _computes(self, rank: int, action: Action) -> bool:
        stage, kind, micro, _ = action
        awaits: list[int] = []
        for send in self.expected.get((stage, kind[0], micro), ()):
            if send not in self.moved:
                self.blocked[send] = rank
                return False
            awaits.append(self.moved[send])
        if self.ready:
            awaits += [self.ready[key] for key in ((stage, None), (stage, micro)) if key in self.ready]
        self.last[rank] = (len(self.steps),)
        self.steps.append(Step(rank, action, str(action), COMPUTE_STREAM, tuple(awaits)))
        return True

    def _starts(self, rank: int, send: Action, todo: list[int]) -> None:
        """One end of a transfer; it runs from the moment when both ranks have come to it."""
        if send not in self.started:
            self.started[send] = self.last[rank]
            return
        assert send.other is not None
        placement = self.schedule.placement
        sender = placement[send.stage]
        awaits = (*self.started[send], *self.last[rank])
        self.moved[send] = len(self.steps)
        self.steps.append(Step(sender, send, str(send), f"{sender}>{placement[send.other]}", awaits))
        if send in self.blocked:
            todo.append(self.blocked.pop(send))


def _in_flight(order: tuple[Action, ...]) -> int:
    count = most = 0
    for action in order:
        if action.kind == "F":
            count += 1
            most = max(most, count)
        elif action.kind in ("W", "BW"):
            count -= 1
    return most
