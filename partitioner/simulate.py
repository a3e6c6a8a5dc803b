"""Times a schedule: computations on each rank in order, transfers on links, reductions and copies beside them.

A rank's actions are started one after another. A computation occupies the rank, and starts when what it receives has
arrived. A transfer starts at its SEND, occupies the link between the two ranks in its direction, and waits for nothing
else: receives are taken to be posted ahead. REDUCE and UNSHARD run on the rank's collective stream, OFFLOAD and RELOAD
on its host stream, each started in its turn and waited for where its result is used.

Every start follows from earlier ends, so each rank is walked as far as it goes and woken by what it waits for: the time
taken grows with the number of actions alone.
"""

from __future__ import annotations

from .action import COMPUTE, Action
from .collection import no_collection
from .errors import ScheduleError
from .schedule import Schedule
from .stage_cost import Costs, StageCost
from .timeline import Event, Steps, Timeline


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
    if schedule.ranks > 1 and not schedule.has_transfers:
        raise ScheduleError(f"schedule {schedule.name} has no transfers: simulate(with_transfers(schedule), costs)")
    run = _Run(schedule, costs)
    run.walk()
    return run.timeline()


class _Run:
    """The state of a simulation; times in seconds."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.now = [0.0] * schedule.ranks
        self.place = [0] * schedule.ranks
        self.busy = [0.0] * schedule.ranks
        self.events: list[Event] = []
        self.changes: list[list[tuple[float, int]]] = [[] for _ in schedule.orders]
        self.saves = schedule.trains
        self.streams: dict[tuple[int, str], float] = {}
        """When each link and side stream is free."""
        self.arrived: dict[Action, float] = {}
        """By SEND, when its value is there."""
        self.expected: dict[Action, list[Action]] = {}
        """By F or B, the SENDs of what it receives."""
        self.blocked: dict[Action, int] = {}
        """By SEND, the rank that waits for it."""
        self.ready: dict[tuple[int, int | None], float] = {}
        """When a stage's weights are gathered, or a micro-batch's saved tensors are where they shall be."""

    def walk(self) -> None:
        todo = list(range(self.schedule.ranks))
        while todo:
            rank = todo.pop()
            order = self.schedule.orders[rank]
            while self.place[rank] < len(order):
                action = order[self.place[rank]]
                if action.kind in COMPUTE:
                    if not self._compute(rank, action):
                        break
                elif action.kind in ("SEND_F", "SEND_B"):
                    self._send(rank, action, todo)
                elif action.kind in ("RECV_F", "RECV_B"):
                    use = Action(action.stage, "F" if action.kind == "RECV_F" else "B", action.micro)
                    self.expected.setdefault(use, []).append(action.partner)
                else:
                    self._beside(rank, action)
                self.place[rank] += 1
        stuck = [f"rank {r} at {o[i]}" for r, (o, i) in enumerate(zip(self._orders, self.place, strict=True)) if o[i:]]
        if stuck:
            raise ScheduleError(f"schedule {self.schedule.name} never ends: {', '.join(stuck)}; validate says why")

    @property
    def _orders(self) -> tuple[tuple[Action, ...], ...]:
        return self.schedule.orders

    def _compute(self, rank: int, action: Action) -> bool:
        """Runs a computation; False where it has to wait for a send that has not been reached."""
        stage, kind, micro, _ = action
        start = self.now[rank]
        if kind != "W":
            for send in self.expected.get(action if kind != "BW" else Action(stage, "B", micro), ()):
                if send not in self.arrived:
                    self.blocked[send] = rank
                    return False
                start = max(start, self.arrived[send])
        if self.ready:
            start = max(start, self.ready.get((stage, None), 0.0), self.ready.get((stage, micro), 0.0))
        cost = self.costs.stages[stage]
        seconds = _seconds(cost, kind)
        end = self.now[rank] = start + seconds
        self.busy[rank] += seconds
        self.events.append(Event(rank, str(action), start, end))
        if self.saves:
            self._hold(rank, cost, kind, start, end)
        return True

    def _hold(self, rank: int, cost: StageCost, kind: str, start: float, end: float) -> None:
        made, freed, transient = _bytes(cost, kind)
        self.changes[rank] += [(start, made + transient), (end, -freed - transient)]

    def _send(self, rank: int, action: Action, todo: list[int]) -> None:
        assert action.other is not None
        link = f"{rank}>{self.schedule.placement[action.other]}"
        self.arrived[action] = self._on(rank, link, action, self.now[rank], self.costs.hop(action.stage, action.other))
        if action in self.blocked:
            todo.append(self.blocked.pop(action))

    def _on(self, rank: int, stream: str, action: Action, start: float, seconds: float) -> float:
        """Occupies a stream; the end."""
        start = max(start, self.streams.get((rank, stream), 0.0))
        end = self.streams[rank, stream] = start + seconds
        self.events.append(Event(rank, str(action), start, end, stream))
        return end

    def _beside(self, rank: int, action: Action) -> None:
        """What runs beside the computations of its rank."""
        stage, kind, micro, _ = action
        cost, now, changes = self.costs.stages[stage], self.now[rank], self.changes[rank]
        if kind == "REDUCE":
            self._on(rank, "collective", action, now, cost.reduce)
        elif kind == "UNSHARD":
            end = self.ready[stage, None] = self._on(rank, "collective", action, now, cost.unshard)
            changes.append((end - cost.unshard, cost.unsharded))
        elif kind == "RESHARD":
            changes.append((now, -cost.unsharded))
        elif kind == "OFFLOAD":
            end = self._on(rank, "host", action, now, cost.offload)
            changes.append((end, -cost.offloaded))
        elif kind == "RELOAD":
            end = self.ready[stage, micro] = self._on(rank, "host", action, now, cost.offload)
            changes.append((end - cost.offload, cost.offloaded))

    def timeline(self) -> Timeline:
        memory = tuple(self._memory(rank) for rank in range(self.schedule.ranks))
        return Timeline(
            seconds=max((event.end for event in self.events), default=0.0),
            busy=tuple(self.busy),
            peak=tuple(max(nbytes for _, nbytes in steps) for steps in memory),
            in_flight=tuple(_in_flight(order) if self.saves else 0 for order in self._orders),
            memory=memory,
            events=tuple(sorted(self.events, key=lambda event: event.start)),
        )

    def _memory(self, rank: int) -> Steps:
        nbytes = sum(self.costs.stages[s].resident for s in self.schedule.stages_of(rank))
        steps = [(0.0, nbytes)]
        for seconds, change in sorted(self.changes[rank], key=lambda step: step[0]):
            if change:
                nbytes += change
                steps.append((seconds, nbytes))
        return tuple(steps)


def _seconds(cost: StageCost, kind: str) -> float:
    if kind == "F":
        return cost.forward
    if kind == "B":
        return cost.backward
    return cost.weight if kind == "W" else cost.backward + cost.weight


def _bytes(cost: StageCost, kind: str) -> tuple[int, int, int]:
    """What a computation holds from its start on, what it frees at its end, and what it holds in between."""
    forward, backward, weight = cost.transient
    if kind == "F":
        return cost.until_backward + cost.until_weight, 0, forward
    if kind == "B":
        return cost.between, cost.until_backward, backward
    if kind == "W":
        return 0, cost.until_weight + cost.between, weight
    return cost.between, cost.until_backward + cost.until_weight + cost.between, max(backward, weight)


def _in_flight(order: tuple[Action, ...]) -> int:
    """The most pairs between F and W."""
    count = most = 0
    for action in order:
        count += (action.kind == "F") - (action.kind in ("W", "BW"))
        most = max(most, count)
    return most
