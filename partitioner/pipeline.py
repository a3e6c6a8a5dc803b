"""A plan's pipeline: the schedule, and where forward is cut, as asked or as found.

    seconds of a stage = its calls, forward and backward, and the reshards that they need, of one micro-batch
                         and its part of what a step does once, the optimizer included
    cut                the places that make the costliest stage cheapest, what is sent at a cut counted on both sides;
                         of places about as good one where less is sent

`cuts.py` searches for the places and `cut_moves.py` moves them, `stage_work.py` says what stages cost,
`stage_search.py` compares schedules.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch.fx as fx

from .collective_cost import collective_seconds
from .cost import nbytes
from .cut_moves import even_ranks, sending_less
from .cuts import Room, best_cuts
from .errors import PlanError, ScheduleError
from .factors import Factored
from .graph import Graph, is_getitem, is_tensor, where
from .mesh import Mesh
from .plan import Plan
from .schedules.action import COMPUTE
from .schedules.generate import NAMES, generate, in_flight_bound
from .schedules.schedule import Schedule, from_text
from .schedules.send_recv import with_transfers
from .schedules.validate import validate
from .stage_work import Work
from .stages import Anchors, Stages, anchors, parameters_read, stages_of

STAGE = re.compile(r"stage \d+")
"""The text of a pin that says where a stage starts."""


@dataclass(frozen=True)
class Asked:
    """What the user asked of the pipeline.

    Attributes:
        schedule: a name, a schedule's text, or "auto".
        micro_batches: of a step, or "auto".
        stages: of an earlier program of the same model, whose parameters stay where they are.
        starts: {module or call: the virtual stage that starts with it}.
    """

    schedule: str = "auto"
    micro_batches: int | str = "auto"
    stages: Stages | None = None
    starts: Mapping[str, int] = field(default_factory=dict)


def pipeline_axis(mesh: Mesh) -> str | None:
    """The axis of stages, if the mesh has one of more than one rank.

    Raises:
        PlanError: it has several.
    """
    axes = [a for a in mesh.names if mesh.role(a) == "pipeline" and mesh.sizes[a] > 1]
    if len(axes) > 1:
        raise PlanError(f"a mesh has one pipeline axis; {mesh} has {axes}")
    return axes[0] if axes else None


def stage_pins(pin: Mapping[str, str]) -> tuple[dict[str, str], dict[str, int]]:
    """What a user pinned: layouts, and the stages that start with a module or call, written "stage 2"."""
    starts = {name: int(text.split()[1]) for name, text in pin.items() if STAGE.fullmatch(text)}
    return {name: text for name, text in pin.items() if name not in starts}, starts


class Cutter:
    """Cuts one plan into stages, for any schedule.

    Attributes:
        work: what its calls take and hold.
    """

    def __init__(self, graph: Graph, factored: Factored, plan: Plan, asked: Asked):
        axis = pipeline_axis(plan.mesh)
        assert axis is not None
        self.graph, self.plan, self.asked = graph, plan, asked
        self.found = anchors(graph, factored)
        self.work = Work(graph, factored, plan, self.found, axis)
        m = plan.micro_batches
        loop, once = self.work.per_place(self.work.seconds), self.work.per_place(self.work.once)
        self.seconds = [a + (b + c) / m for a, b, c in zip(loop, once, self.work.optimizer_at(), strict=True)]
        link, split = plan.mesh.levels((axis,)), max(1, plan.mesh.world_size // plan.mesh.sizes[axis])
        self.sent = [
            n if n in (0, math.inf) else 2 * float(collective_seconds("permute", link, n / split / m))
            for n in _crossing(self.found)
        ]
        self._held: tuple[list[float], list[float]] | None = None

    def stages(self, placement: tuple[int, ...], room: Room | None = None) -> Stages | None:
        """The best stages for a placement; None where none fit.

        Raises:
            PlanError: the starts asked for cannot be, or forward can be cut nowhere.
        """
        cuts = self._cuts(len(placement), room)
        if cuts is None:
            return None
        made, before = stages_of(self.graph, self.found, cuts, placement), self.asked.stages
        return made if before is None else replace(made, before=before.homes)

    def even_ranks(self, placement: tuple[int, ...]) -> Stages | None:
        """Stages that make ranks rather than stages even; None where that is no difference, or stages stay in place."""
        count = len(placement)
        cuts = self._cuts(count, None)
        ranks = len(set(placement))
        if cuts is None or self.asked.stages is not None or count == ranks or len(self.found.forward) < count:
            return None
        moved = even_ranks(self.seconds, self.sent, cuts, placement, self._pinned(count))
        return None if moved == cuts else stages_of(self.graph, self.found, moved, placement)

    def _cuts(self, count: int, room: Room | None) -> list[int] | None:
        n = len(self.found.forward)
        if self.asked.stages is not None:
            return _as_before(self.graph, self.found, self.asked.stages, count)
        fixed = self._pinned(count)
        if n < count:
            return [min(i, n) for i in range(1, count)]  # the last stages have nothing to do
        cuts = best_cuts(self.seconds, self.sent, count, fixed, room)
        if cuts is None and best_cuts(self.seconds, self.sent, count, fixed) is None:
            barred = [c for c in (*fixed.values(), *range(1, n)) if self.sent[c] == math.inf]
            raise PlanError(
                f"forward cannot be cut into {count} stages: near {where(self.found.forward[barred[0]])} and elsewhere "
                f"something of a size that depends on data would be sent to another stage. Use fewer stages, or pin "
                f"where they start"
            )
        return cuts if cuts is None or room else sending_less(self.seconds, self.sent, cuts, fixed)

    def _pinned(self, count: int) -> dict[int, int]:
        return _fixed(self.found, self.asked.starts, count)

    def room(self, schedule: Schedule, limit: float) -> Room | None:
        """What a stage may hold, where each rank has one; where it has several, only their sum would say."""
        if schedule.stages != schedule.ranks or schedule.name not in NAMES:
            return None
        if self._held is None:
            self._held = self.work.resident_at(), self.work.saved_at()
        return Room(*self._held, in_flight_bound(schedule.name, schedule.ranks, schedule.micro_batches), limit)


def schedule_of(asked: str, ranks: int, micro_batches: int | str) -> Schedule:
    """The schedule that the user named or wrote; a text says how many micro-batches it is for where that is "auto".

    Raises:
        PlanError: there is no such schedule, or it cannot be followed here.
    """
    if asked in NAMES:
        made = generate(asked, ranks, 1 if micro_batches == "auto" else int(micro_batches))
        if not made.trains:
            raise PlanError(
                f"schedule={asked!r} has no backward, and a step needs one: leave it out; the compiled model called as "
                f"the model runs forward alone"
            )
        return made
    try:
        given = from_text(asked)
    except ScheduleError as fault:
        names = ", ".join(NAMES)
        raise PlanError(
            f"schedule={asked[:40]!r} is none of auto, {names}, nor the text of a schedule: {fault}"
        ) from fault
    return followable(given, ranks, given.micro_batches if micro_batches == "auto" else int(micro_batches))


def followable(given: Schedule, ranks: int, micro_batches: int) -> Schedule:
    """The computations of a schedule that was given, in its order.

    Raises:
        PlanError: it is for another number of ranks or micro-batches, or cannot be followed.
    """
    if given.ranks != ranks or given.micro_batches != micro_batches:
        raise PlanError(
            f"the schedule is for {given.ranks} ranks and {given.micro_batches} micro-batches; "
            f"here are {ranks} and {micro_batches}"
        )
    computed = replace(given, orders=tuple(tuple(a for a in order if a.kind in COMPUTE) for order in given.orders))
    try:
        validate(with_transfers(computed))
    except ScheduleError as fault:
        raise PlanError(f"the schedule cannot be followed: {fault}") from fault
    return computed


# -- where to cut
def _fixed(found: Anchors, starts: Mapping[str, int], count: int) -> dict[int, int]:
    """{stage: place} of the starts that the user gave.

    Raises:
        PlanError: a name that no forward call has, a stage that there is not, starts out of order.
    """
    fixed: dict[int, int] = {}
    for name, stage in starts.items():
        at = next((i for i, n in enumerate(found.forward) if _is_in(n, name)), None)
        if at is None:
            raise PlanError(f"the pin {name!r}: 'stage {stage}' names no module and no call of forward")
        if not 0 < stage < count:
            raise PlanError(f"the pin {name!r}: 'stage {stage}': stages 1 to {count - 1} can start somewhere")
        fixed[stage] = at
    places = [fixed[s] for s in sorted(fixed)]
    if places != sorted(set(places)) or any(fixed[s] < s for s in fixed):
        raise PlanError(f"the pins of stages {dict(starts)} are not in the order of forward, or leave a stage empty")
    return fixed


def _is_in(node: fx.Node, name: str) -> bool:
    module = node.meta.get("module") or ""
    return node.name == name or module == name or module.startswith(name + ".")


def _as_before(graph: Graph, found: Anchors, stages: Stages, count: int) -> list[int]:
    """The cuts that leave every parameter where it lives: a stage starts with the first call that reads one of its."""
    cuts, at = [], 0
    reads = parameters_read(graph, found)
    for stage in range(1, count):
        mine = {p for p, on in stages.parameters.items() if min(on) >= stage}
        at = next((i for i in range(at, len(reads)) if reads[i] & mine), len(reads))
        cuts.append(at)
    return cuts


def _crossing(found: Anchors) -> list[float]:
    """Per place, the bytes that go from before it to it or later, in forward; infinite where a size depends on data."""
    n = len(found.forward)
    change, barred = [0] * (n + 1), [0] * (n + 1)
    place = {node: i for i, node in enumerate(found.forward)}
    for node, i in place.items():
        for value in (node, *(u for u in node.users if is_getitem(u))):
            readers = [found.of[u] for u in value.users if found.of.get(u) is not None]
            last = max((a for a in readers if a is not None), default=i)
            if last <= i or (value is node and isinstance(node.meta["val"], (tuple, list))):
                continue
            fixed = is_tensor(value) and all(isinstance(k, int) for k in value.meta["val"].shape)
            for row, amount in ((change, nbytes(value.meta["val"])),) if fixed else ((barred, 1),):
                row[i + 1] += amount
                row[last + 1] -= amount
    sent, closed = itertools.accumulate(change[:n]), itertools.accumulate(barred[:n])
    return [math.inf if b else float(s) for s, b in zip(sent, closed, strict=True)]
