"""Where forward is cut into stages, and the schedule that they follow.

    seconds of a stage = its calls, forward and backward, and the reshards that they need, for the whole batch
    cut                the places that make the costliest stage cheapest, what is sent at a cut counted on both sides

Places where little is sent are candidates: of all forward calls, those after which no fewer bytes go on than after
their neighbours. The search is exact over these (a table over candidates and stages).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.fx as fx

from .action import COMPUTE
from .collective_cost import collective_seconds
from .cost import nbytes
from .errors import PlanError, ScheduleError
from .factors import Factored
from .graph import Graph, is_getitem, is_tensor, where
from .mesh import Mesh
from .plan import Plan
from .schedule import Schedule, from_text
from .schedules.generate import NAMES, generate
from .send_recv import with_transfers
from .stages import Anchors, Stages, anchors, stages_of
from .validate import validate


@dataclass(frozen=True)
class Asked:
    """What the user asked of the pipeline.

    Attributes:
        schedule: a name, a schedule's text, or "auto".
        micro_batches: of a step.
        stages: of an earlier program of the same model, whose parameters stay where they are.
        starts: {module or call: the virtual stage that starts with it}.
    """

    schedule: str = "auto"
    micro_batches: int = 1
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


def with_pipeline(graph: Graph, factored: Factored, plan: Plan, asked: Asked) -> Plan:
    """The plan with its stages and schedule, where its mesh has a pipeline axis."""
    axis = pipeline_axis(plan.mesh)
    if axis is None:
        return plan
    schedule = schedule_of(asked.schedule, plan.mesh.sizes[axis], asked.micro_batches)
    placement = asked.stages.placement if asked.stages is not None else schedule.placement
    found = anchors(graph, factored)
    cuts = _cuts(graph, plan, found, len(placement), asked, axis)
    stages = stages_of(graph, found, cuts, placement)
    return replace(plan, stages=stages, schedule=schedule if plan.micro_batches > 1 else None)


def schedule_of(asked: str, ranks: int, micro_batches: int) -> Schedule:
    if asked in NAMES:
        return generate(asked, ranks, micro_batches)
    if asked == "auto":
        return generate("1f1b", ranks, micro_batches)
    try:
        given = from_text(asked)
    except ScheduleError as fault:
        names = ", ".join(NAMES)
        raise PlanError(
            f"schedule={asked[:40]!r} is none of auto, {names}, nor the text of a schedule: {fault}"
        ) from fault
    return followable(given, ranks, micro_batches)


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
def _cuts(graph: Graph, plan: Plan, found: Anchors, count: int, asked: Asked, axis: str) -> list[int]:
    if asked.stages is not None:
        return _as_before(graph, found, asked.stages, count)
    fixed = _fixed(found, asked.starts, count)
    costs = _Costs(plan, found, axis)
    n = len(found.forward)
    if n < count:
        return [min(i, n) for i in range(1, count)]  # the last stages have nothing to do
    cuts = best_cuts(costs.seconds, costs.sent, count, fixed)
    if any(costs.sent[c] == math.inf for c in cuts):
        where_ = ", ".join(dict.fromkeys(where(found.forward[c]) for c in cuts if costs.sent[c] == math.inf))
        raise PlanError(
            f"forward cannot be cut into {count} stages: at every cut near {where_} something of a size that depends "
            f"on data would be sent to another stage. Use fewer stages, or pin where they start"
        )
    return cuts


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
    reads = _parameters_read(graph, found)
    for stage in range(1, count):
        mine = {p for p, on in stages.parameters.items() if min(on) >= stage}
        at = next((i for i in range(at, len(reads)) if reads[i] & mine), len(reads))
        cuts.append(at)
    return cuts


def _parameters_read(graph: Graph, found: Anchors) -> list[set[str]]:
    """Per forward call the parameters that it reads, itself or through what is made of them alone."""
    known: dict[fx.Node, set[str]] = {}
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        known[node] = {str(role.name)} if role.kind == "param" else set()
    for node in graph.fx.nodes:
        if node.op == "call_function" and found.of.get(node, 0) is None:
            known[node] = set().union(*(known.get(x, set()) for x in node.all_input_nodes))
    return [set().union(*(known.get(x, set()) for x in n.all_input_nodes)) for n in found.forward]


class _Costs:
    """Attributes:
    seconds: per forward call what it and its backward cost.
    sent: per forward call the seconds to send what goes on if a stage starts with it.
    """

    def __init__(self, plan: Plan, found: Anchors, axis: str):
        assert plan.facts is not None
        self.seconds = [0.0] * len(found.forward)
        place = {n.name: a for n, a in found.of.items() if a is not None}
        for name, took in plan.facts.seconds.items():
            if name in place:
                self.seconds[place[name]] += took
        for move in plan.facts.moves:
            at = next((place[r] for r in move.readers if r in place), place.get(move.value))
            if at is not None:
                self.seconds[at] += move.way.total
        link = plan.mesh.levels((axis,))
        crossing = _crossing(found)
        split = max(1, plan.mesh.world_size // plan.mesh.sizes[axis])
        self.sent = [
            n if n in (0, math.inf) else 2 * float(collective_seconds("permute", link, n / split)) for n in crossing
        ]


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


def best_cuts(
    seconds: Sequence[float], sent: Sequence[float], count: int, fixed: Mapping[int, int] | None = None
) -> list[int]:
    """The starts of stages 1 to `count` - 1 that make the costliest stage cheapest.

    Args:
        seconds: of each place; a stage costs what its places do, and what is sent where it starts and where it ends.
        sent: seconds to send what crosses a cut before each place.
        fixed: {stage: place} of starts that are given.
    """
    fixed = dict(fixed or {})
    n = len(seconds)
    total = [0.0]
    for s in seconds:
        total.append(total[-1] + s)
    places = sorted({*_candidates(sent, count), *fixed.values(), n})
    inf = float("inf")
    # best[k][j]: the least bottleneck of the first k stages where stage k starts at places[j]
    best = [[inf] * len(places) for _ in range(count + 1)]
    back = [[-1] * len(places) for _ in range(count + 1)]
    for j, end in enumerate(places):
        if _allowed(fixed, 1, end, count, n):
            best[1][j] = total[end] + (sent[end] if end < n else 0.0)
    for k in range(2, count + 1):
        for j, end in enumerate(places):
            if not _allowed(fixed, k, end, count, n):
                continue
            for i in range(j - 1, -1, -1):
                start = places[i]
                mine = total[end] - total[start] + sent[start] + (sent[end] if end < n else 0.0)
                if mine >= best[k][j] and total[end] - total[start] >= best[k][j]:
                    break
                cost = max(best[k - 1][i], mine)
                if cost < best[k][j]:
                    best[k][j], back[k][j] = cost, i
    cuts, j = [], len(places) - 1
    for k in range(count, 1, -1):
        j = back[k][j]
        cuts.append(places[j])
    return cuts[::-1]


def _allowed(fixed: Mapping[int, int], k: int, end: int, count: int, n: int) -> bool:
    """Whether the first k stages may end at a place: where stage k starts, or forward ends."""
    if k == count:
        return end == n
    return k <= end <= n - (count - k) and fixed.get(k, end) == end


def _candidates(sent: Sequence[float], count: int) -> list[int]:
    """Places where no less is sent right before or after; all where those are too few."""
    n = len(sent)
    low = [i for i in range(1, n) if sent[i] <= sent[i - 1] and (i + 1 == n or sent[i] <= sent[i + 1])]
    return low if len(low) >= 4 * count else list(range(1, n))
