"""Times a schedule: computations on each rank in order, transfers on links, reductions and copies beside them.

A rank's actions are started one after another. A computation occupies the rank, and starts when what it receives has
arrived. A transfer occupies the link between two ranks in its direction, from when both have come to its SEND and RECV,
and blocks neither (`post_ahead`). REDUCE and UNSHARD run on the rank's collective stream, OFFLOAD and RELOAD on its
host stream, each started in its turn and waited for where its result is used.

    start = max(last end on the stream, ends of what is waited for)
"""

from __future__ import annotations

from ..collection import no_collection
from ..errors import ScheduleError
from .schedule import Schedule
from .stage_cost import Costs, StageCost
from .timeline import COMPUTE_STREAM, Event, Steps, Timeline
from .walk import Walk, walk


@no_collection()
def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """One step in time.

    Args:
        schedule: a legal one, with transfers (`with_transfers`, `validate`).
        costs: of its stages and hops.

    Raises:
        ScheduleError: other stages than in the costs, a schedule without transfers, or one that never ends.
    """
    if len(costs.stages) != schedule.stages:
        raise ScheduleError(f"schedule {schedule.name} has {schedule.stages} stages, the costs {len(costs.stages)}")
    if schedule.ranks > 1 and not schedule.has_transfers and costs.hops != {}:  # without hops nothing is sent
        raise ScheduleError(f"schedule {schedule.name} has no transfers: simulate(with_transfers(schedule), costs)")
    walked = walk(schedule)
    events = _events(walked, costs)
    memory = _memory(walked, events, costs, schedule)
    busy = [0.0] * schedule.ranks
    for event in events:
        if event.stream == COMPUTE_STREAM:
            busy[event.rank] += event.end - event.start
    return Timeline(
        seconds=max((event.end for event in events), default=0.0),
        busy=tuple(busy),
        peak=tuple(max(nbytes for _, nbytes in steps) for steps in memory),
        in_flight=walked.in_flight,
        memory=memory,
        events=tuple(sorted(events, key=lambda event: event.start)),
    )


def _events(walked: Walk, costs: Costs) -> list[Event]:
    """When each step starts and ends, in the order of the walk."""
    seconds = {
        (stage, kind): takes for stage, cost in enumerate(costs.stages) for kind, takes in _seconds(cost).items()
    }
    events: list[Event] = []
    free: dict[tuple[int, str], float] = {}
    for rank, (stage, kind, _, other), name, stream, awaits in walked.steps:
        start = free.get((rank, stream), 0.0)
        for step in awaits:
            start = max(start, events[step].end)
        end = start + (seconds[stage, kind] if other is None else costs.hop(stage, other))
        free[rank, stream] = end
        events.append(Event(rank, name, start, end, stream))
    return events


def _seconds(cost: StageCost) -> dict[str, float]:
    """By kind, what is no transfer."""
    return {
        "F": cost.forward,
        "B": cost.backward,
        "W": cost.weight,
        "BW": cost.backward + cost.weight,
        "REDUCE": cost.reduce,
        "UNSHARD": cost.unshard,
        "RESHARD": 0.0,
        "OFFLOAD": cost.offload,
        "RELOAD": cost.offload,
    }


def _bytes(cost: StageCost) -> dict[str, tuple[int, int]]:
    """By kind, by how much the bytes held change at its start and at its end."""
    forward, backward, weight = cost.transient
    saved = cost.until_backward + cost.until_weight
    both = max(backward, weight)
    return {
        "F": (saved + forward, -forward),
        "B": (cost.between + backward, -cost.until_backward - backward),
        "W": (weight, -cost.until_weight - cost.between - weight),
        "BW": (cost.between + both, -saved - cost.between - both),
        "UNSHARD": (cost.unsharded, 0),
        "RESHARD": (-cost.unsharded, 0),
        "OFFLOAD": (0, -cost.offloaded),
        "RELOAD": (cost.offloaded, 0),
    }


def _memory(walked: Walk, events: list[Event], costs: Costs, schedule: Schedule) -> tuple[Steps, ...]:
    """Per rank the bytes held over time; a schedule without a backward saves nothing."""
    table = {(stage, kind): pair for stage, cost in enumerate(costs.stages) for kind, pair in _bytes(cost).items()}
    if not schedule.trains:
        table |= {(s, "F"): (cost.transient[0], -cost.transient[0]) for s, cost in enumerate(costs.stages)}
    changes: list[list[tuple[float, int]]] = [[] for _ in schedule.orders]
    for step, event in zip(walked.steps, events, strict=True):
        if step.action[:2] in table:
            first, last = table[step.action[:2]]
            changes[event.rank] += [(event.start, first), (event.end, last)]
    out = []
    for rank, changed in enumerate(changes):
        nbytes = sum(costs.stages[stage].resident for stage in schedule.stages_of(rank))
        steps = [(0.0, nbytes)]
        for seconds, change in sorted(changed, key=lambda step: step[0]):
            if change:
                nbytes += change
                steps.append((seconds, nbytes))
        out.append(tuple(steps))
    return tuple(out)
