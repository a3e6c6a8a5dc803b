"""Puts what ranks send and receive into a schedule of computations.

The computations are timed with F = B = W = 1 and transfers that take no time. A value is sent when it is there, and
that moment is one event for both ranks: the send stands right after its producer, the receive on the other rank stands
before whatever starts there later. So every rank's order is a part of one order of all events, in which each transfer
is one event: no deadlock even if a send waits for its receive and blocks its rank, and both sides share one order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..collection import no_collection
from ..errors import ScheduleError
from .action import COMPUTE, Action
from .placed import PLACED, faults_text, unplaced
from .schedule import Edge, Flow, Schedule, flow
from .waits import Wait, cycle_text

TICKS = {"F": 1, "B": 1, "W": 1, "BW": 2}
Value = tuple[str, int, int | None]
"""(F or B, stage, micro-batch): what forward or backward of a stage hands on."""


@no_collection()
def with_transfers(
    schedule: Schedule, edges: Collection[Edge] | None = None, gradients: Collection[Edge] | None = None
) -> Schedule:
    """The schedule with a send and a receive for each value that goes from a rank to another.

    Args:
        schedule: computations only.
        edges: pairs (source stage, target stage) that values go between in forward; a plain chain by default.
        gradients: the edges along which a gradient comes back; all by default.

    Raises:
        ScheduleError: it has transfers already, a value that is computed nowhere, computations that wait in a circle.
    """
    if schedule.has_transfers:
        raise ScheduleError(f"schedule {schedule.name} has transfers already; give its computations alone")
    ways = flow(schedule.stages, edges, gradients)
    starts = start_ticks(schedule, ways)
    timed: list[list[tuple[int, int, Action]]] = [[] for _ in schedule.orders]
    moments: list[tuple[int, int, Action]] = []
    for rank, order in enumerate(schedule.orders):
        for action, start in zip(order, starts[rank], strict=True):
            timed[rank].append((start, 1, action))
            end = start + TICKS.get(action.kind, 0)
            moments += [(end, rank, send) for send in _sends(action, schedule, ways)]
    moments.sort(key=lambda moment: moment[0])
    for tick, rank, send in moments:
        timed[rank].append((tick, 0, send))
        timed[schedule.placement[send.partner.stage]].append((tick, 0, send.partner))
    orders = (sorted(line, key=lambda item: item[:2]) for line in timed)
    return replace(schedule, orders=tuple(tuple(action for _, _, action in line) for line in orders))


def _sends(action: Action, schedule: Schedule, ways: Flow) -> list[Action]:
    """What leaves the rank when an action ends."""
    if action.kind == "F":
        kind, targets = "SEND_F", ways.targets[action.stage]
    elif action.kind in ("B", "BW"):
        kind, targets = "SEND_B", ways.gradients_to[action.stage]
    else:
        return []
    here = schedule.placement[action.stage]
    return [Action(action.stage, kind, action.micro, t) for t in targets if schedule.placement[t] != here]


def needs(action: Action, ways: Flow) -> list[Value]:
    """The values of other stages that a computation takes."""
    if action.kind == "F":
        return [("F", stage, action.micro) for stage in ways.sources[action.stage]]
    if action.kind in ("B", "BW"):
        return [("B", stage, action.micro) for stage in ways.gradients_from[action.stage]]
    return []


def start_ticks(schedule: Schedule, ways: Flow) -> list[list[int]]:
    """Per rank, when each action starts, as early as its operands and the rank allow.

    Raises:
        ScheduleError: an action of no stage of its rank, computations that wait in a circle or for what stands nowhere.
    """
    faults = list(unplaced(schedule))
    if faults:
        raise ScheduleError(faults_text(schedule, PLACED, faults))
    starts: list[list[int]] = [[] for _ in schedule.orders]
    free = [0] * schedule.ranks
    done: dict[Value, int] = {}
    blocked: dict[Value, list[int]] = {}
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        order, line, now = schedule.orders[rank], starts[rank], free[rank]
        while len(line) < len(order):
            action = order[len(line)]
            values = needs(action, ways)
            missing = next((v for v in values if v not in done), None)
            if missing is not None:
                blocked.setdefault(missing, []).append(rank)
                break
            now = max([now, *(done[v] for v in values)])
            line.append(now)
            now += TICKS.get(action.kind, 0)
            if action.kind in COMPUTE and action.kind != "W":
                value = (action.kind[0], action.stage, action.micro)
                done[value] = now
                ready += blocked.pop(value, ())
        free[rank] = now
    if blocked:
        raise ScheduleError(f"schedule {schedule.name} never ends: {cycle_text(_waits(schedule, starts, blocked))}")
    return starts


def _waits(schedule: Schedule, starts: list[list[int]], blocked: dict[Value, list[int]]) -> dict[int, Wait]:
    stands = {(a.kind[0], a.stage, a.micro): r for r, o in enumerate(schedule.orders) for a in o if a.kind in COMPUTE}
    waits = {}
    for value, ranks in blocked.items():
        for rank in ranks:
            at = schedule.orders[rank][len(starts[rank])]
            waits[rank] = Wait(at, Action(value[1], value[0], value[2]), stands.get(value))
    return waits
