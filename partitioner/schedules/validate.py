"""Proves a schedule before anything runs. Six laws, each checked only where those before it hold:

placed     every action names a stage of its rank, a micro-batch, and an edge that leaves the rank
once       each F, each B and W (or BW) once for every stage and micro-batch; each transfer once, at both ends
ordered    on its rank, each action stands after what it needs
in flight  no rank holds more between F and W than the bound
shared     what a rank sends to another and what the other receives stand in one order
no cycle   no deadlock (`rendezvous`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..collection import no_collection
from ..errors import ScheduleError
from .action import COMPUTE, SENDS, TRANSFERS, Action
from .placed import PLACED, faults_text, unplaced
from .rendezvous import Mode, deadlock, meeting
from .schedule import Edge, Flow, Schedule, flow


@no_collection()
def validate(
    schedule: Schedule,
    edges: Collection[Edge] | None = None,
    gradients: Collection[Edge] | None = None,
    *,
    bound: Sequence[int] | None = None,
    mode: Mode = "blocking",
) -> None:
    """Returns if the schedule is legal.

    Args:
        schedule: with its transfers.
        edges, gradients: between stages, as for `with_transfers`.
        bound: per rank, the most pairs of a stage and a micro-batch that may be in flight (`in_flight_bound`).
        mode: "blocking": every transfer blocks both ranks until it has happened. "batched": transfers that stand next
            to each other are started together, a rank goes on meanwhile, and its batches happen one after another.
            "async": a rank only starts transfers, and each direction between two ranks goes on by itself. What is free
            of deadlock under one mode is so under those after it.

    Raises:
        ScheduleError: all faults of the first law that does not hold; each names rank and action, a deadlock its cycle.
            A bound for other ranks than the schedule has.
    """
    if bound is not None and len(bound) != schedule.ranks:
        raise ScheduleError(f"schedule {schedule.name} has {schedule.ranks} ranks, the bound {len(bound)}")
    checked = _Checked(schedule, flow(schedule.stages, edges, gradients), bound, mode)
    for law, faults in LAWS:
        found = list(faults(checked))
        if found:
            raise ScheduleError(faults_text(schedule, law, found))


Key = tuple[int, str, int | None, int | None]
"""An action, or a plain tuple of its fields, which is equal and made faster."""

Need = tuple[int, str, int | None]
"""An action of any micro-batch: stage, kind, the other stage."""


@dataclass(frozen=True)
class _Checked:
    schedule: Schedule
    ways: Flow
    bound: Sequence[int] | None
    mode: Mode

    @cached_property
    def at(self) -> dict[Key, int]:
        """The place of each action on the rank of its stage."""
        return {action: place for order in self.schedule.orders for place, action in enumerate(order)}

    def crosses(self, source: int, target: int) -> bool:
        return self.schedule.placement[source] != self.schedule.placement[target]


def _misplaced(checked: _Checked) -> Iterator[str]:
    yield from unplaced(checked.schedule)
    for rank, order in enumerate(checked.schedule.orders):
        for action in order:
            if action.kind in TRANSFERS and 0 <= action.stage < checked.schedule.stages:
                fault = _misrouted(action, checked)
                if fault:
                    yield f"rank {rank}, {action}: {fault}"


def _misrouted(action: Action, checked: _Checked) -> str | None:
    here, other, ways = action.stage, action.other, checked.ways
    if action.kind.endswith("B") and not checked.schedule.trains:
        return "there is no backward"
    others = {
        "SEND_F": ways.targets,
        "RECV_F": ways.sources,
        "SEND_B": ways.gradients_to,
        "RECV_B": ways.gradients_from,
    }[action.kind][here]
    if other not in others:
        what = "value" if action.kind.endswith("F") else "gradient"
        pair = f"from stage {here} to {other}" if action.kind in SENDS else f"from stage {other} to {here}"
        return f"no {what} goes {pair}"
    if not checked.crosses(here, other):
        return f"stages {here} and {other} lie on one rank, so nothing is sent"
    return None


def _not_once(checked: _Checked) -> Iterator[str]:
    schedule, at = checked.schedule, checked.at
    for rank, order in enumerate(schedule.orders):
        if len(set(order)) < len(order):
            for action, times in Counter(order).items():
                if times > 1 and action.kind not in ("UNSHARD", "RESHARD"):
                    yield f"rank {rank}, {action}: stands {times} times"
    # Forward calls first: one backward action too many in a schedule without any makes all others of backward missing.
    for stage, rank in enumerate(schedule.placement):
        for micro in range(schedule.micro_batches):
            if (stage, "F", micro, None) not in at:
                yield f"rank {rank}, {Action(stage, 'F', micro)}: missing"
    for stage, rank in enumerate(schedule.placement):
        ways = _expected_transfers(checked, stage)
        for micro in range(schedule.micro_batches):
            if schedule.trains:
                yield from _backward_not_once(at, rank, stage, micro)
            for kind, back, other in ways:
                send, receive = (stage, kind, micro, other), (other, back, micro, stage)
                if send not in at:
                    yield _end_missing(checked, Action(*send))
                if receive not in at:
                    yield _end_missing(checked, Action(*receive))


def _backward_not_once(at: dict[Key, int], rank: int, stage: int, micro: int) -> Iterator[str]:
    both = (stage, "BW", micro, None) in at
    for kind in ("B", "W"):
        apart = (stage, kind, micro, None) in at
        if both == apart:
            word = Action(stage, "BW", micro)
            fault = f"stands beside {word}, which does the same" if both else f"missing, and there is no {word}"
            yield f"rank {rank}, {Action(stage, kind, micro)}: {fault}"


def _expected_transfers(checked: _Checked, stage: int) -> list[tuple[str, str, int]]:
    """What a stage sends for each micro-batch: kind of the send, kind of the receive, the other stage."""
    ways = checked.ways
    sends = [("SEND_F", "RECV_F", t) for t in ways.targets[stage]]
    if checked.schedule.trains:
        sends += [("SEND_B", "RECV_B", s) for s in ways.gradients_to[stage]]
    return [send for send in sends if checked.crosses(stage, send[2])]


def _end_missing(checked: _Checked, end: Action) -> str:
    partner = end.partner
    rank, other = (checked.schedule.placement[a.stage] for a in (end, partner))
    beside = f"stands on rank {other}" if partner in checked.at else f"is missing on rank {other} too"
    return f"rank {rank}, {end}: missing; its partner {partner} {beside}"


def _disordered(checked: _Checked) -> Iterator[str]:
    at, needed = checked.at, _needed(checked)
    last_weight: dict[int, Action] = {}
    for rank, order in enumerate(checked.schedule.orders):
        for place, action in enumerate(order):
            stage, kind, micro, _ = action
            for from_stage, what, other in needed.get((stage, kind), ()):
                if at.get((from_stage, what, micro, other), -1) > place:
                    before = Action(from_stage, what, micro, other)
                    yield f"rank {rank}, {action}: stands before {before}, which it needs"
            if kind in ("W", "BW"):
                last_weight[stage] = action
        yield from _side_faults(rank, order)
    for stage, weight in last_weight.items():
        reduce = Action(stage, "REDUCE")
        if at.get(reduce, len(at)) < at[weight]:
            rank = checked.schedule.placement[stage]
            yield f"rank {rank}, {reduce}: stands before {weight}, whose gradient it sums"


def _needed(checked: _Checked) -> dict[tuple[int, str], list[Need]]:
    """By stage and kind of an action, what must stand before it on its rank, as far as it is there.

    A value of another stage is received, or computed on the same rank.
    """
    needed: dict[tuple[int, str], list[Need]] = {}
    for stage in range(checked.schedule.stages):
        forward: Need = (stage, "F", None)
        values: list[Need] = []
        gradients: list[Need] = [forward]
        for source in checked.ways.sources[stage]:
            values.append((stage, "RECV_F", source) if checked.crosses(source, stage) else (source, "F", None))
        for target in checked.ways.gradients_from[stage]:
            crosses = checked.crosses(stage, target)
            gradients += [(stage, "RECV_B", target)] if crosses else [(target, "B", None), (target, "BW", None)]
        needed[stage, "F"], needed[stage, "B"], needed[stage, "BW"] = values, gradients, gradients
        needed[stage, "W"] = [(stage, "B", None)]
        needed[stage, "SEND_F"] = needed[stage, "OFFLOAD"] = [forward]
        needed[stage, "SEND_B"] = [(stage, "B", None), (stage, "BW", None)]
    return needed


def _side_faults(rank: int, order: Sequence[Action]) -> Iterator[str]:
    """Saved tensors are on the device when backward reads them; weights are gathered when used, and gathered once."""
    offloaded: set[tuple[int, int | None]] = set()
    gathered: dict[int, bool] = {a.stage: False for a in order if a.kind in ("UNSHARD", "RESHARD")}
    for action in order:
        stage, kind, micro, _ = action
        if kind == "OFFLOAD":
            offloaded.add((stage, micro))
        elif kind == "RELOAD" and (stage, micro) not in offloaded:
            yield f"rank {rank}, {action}: stands before {Action(stage, 'OFFLOAD', micro)}, or without it"
        elif kind == "RELOAD":
            offloaded.remove((stage, micro))
        elif kind in ("B", "W", "BW") and (stage, micro) in offloaded:
            reload = Action(stage, "RELOAD", micro)
            yield f"rank {rank}, {action}: what it reads is offloaded; {reload} must stand before"
        elif kind in ("UNSHARD", "RESHARD"):
            if gathered[stage] == (kind == "UNSHARD"):
                yield f"rank {rank}, {action}: the weights of stage {stage} are {'not ' * (kind == 'RESHARD')}gathered"
            gathered[stage] = kind == "UNSHARD"
        if kind in COMPUTE and not gathered.get(stage, True):
            yield f"rank {rank}, {action}: {Action(stage, 'UNSHARD')} must stand before"


def _too_much_in_flight(checked: _Checked) -> Iterator[str]:
    if checked.bound is None:
        return
    for rank, (order, bound) in enumerate(zip(checked.schedule.orders, checked.bound, strict=True)):
        held = 0
        for action in order if checked.schedule.trains else ():
            held += (action.kind == "F") - (action.kind in ("W", "BW"))
            if held > bound:
                yield f"rank {rank}, {action}: makes {held} in flight; the bound is {bound}"


def _crossed(checked: _Checked) -> Iterator[str]:
    queues: dict[tuple[int, int], tuple[list[Action], list[Action]]] = {}
    for rank, order in enumerate(checked.schedule.orders):
        for action in order:
            if action.kind in TRANSFERS:
                send, other = meeting(action, checked.schedule.placement)
                sends = action.kind in SENDS
                queue = queues.setdefault((rank, other) if sends else (other, rank), ([], []))
                queue[0 if sends else 1].append(send)
    for (source, target), (sent, received) in sorted(queues.items()):
        if sent != received:
            n, send, other = next((i, a, b) for i, (a, b) in enumerate(zip(sent, received, strict=True), 1) if a != b)
            yield f"rank {source} sends {send} as number {n} to rank {target}, where {other.partner} is number {n}"


def _deadlocked(checked: _Checked) -> Iterator[str]:
    cycle = deadlock(checked.schedule, checked.mode)
    if cycle:
        yield cycle


LAWS: tuple[tuple[str, Callable[[_Checked], Iterator[str]]], ...] = (
    (PLACED, _misplaced),
    ("actions that do not stand exactly once", _not_once),
    ("actions before what they need", _disordered),
    ("more in flight than the bound", _too_much_in_flight),
    ("sends and receives in different orders", _crossed),
    ("deadlock", _deadlocked),
)
