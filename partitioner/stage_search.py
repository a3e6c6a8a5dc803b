"""The search for a pipeline: schedules and numbers of micro-batches compared in the simulator, within the memory.

    step         simulated seconds of the schedule on the stages cut for it + the longest of what ranks do once;
                 with several stages a rank, on even stages or even ranks, whichever takes less
    fits         peak bytes of every rank <= memory, resident and in flight
    chosen       of those that fit (without a limit: that the device can hold, if any), and take at most `CLOSE` longer
                 than the fastest, the one with the least peak, then the fewest micro-batches

Where nothing fits, more micro-batches are tried, if their number is free, and then the planner is asked for plans that
hold less (`Options.held`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .errors import PlanError, TooLittle
from .factors import factor_graph
from .graph import Graph
from .mesh import Mesh
from .micro import batch_sizes, can_be_cut, make_plan_in_time, retimed
from .pipeline import Asked, Cutter, pipeline_axis, schedule_of
from .plan import Plan
from .planner import Options
from .schedules.generate import NAMES, generate
from .schedules.post_ahead import post_ahead
from .schedules.schedule import Schedule
from .schedules.send_recv import with_transfers
from .schedules.simulate import simulate
from .schedules.timeline import Timeline
from .stage_work import Stagewise
from .stages import Stages
from .units import bytes_text, seconds_text

COMPARED = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "gpipe")
"""What `schedule="auto"` compares."""

ROUNDS = (1, 2, 4, 8)
"""Micro-batches that are compared, in numbers of ranks of the pipeline."""

CLOSE = 0.01
"""Relative; what is so close to the fastest may be chosen for needing less."""

MORE = (16, 32)
"""The same, where nothing fits the memory with so few."""

TIGHTER = (1.0, 0.8, 0.6, 0.4)
"""Shares of the memory that the planner is asked to do with, one after another, where nothing fits: it counts an even
pipeline, and the simulator what each rank holds."""


@dataclass(frozen=True)
class Candidate:
    """A schedule on the stages cut for it.

    Attributes:
        seconds: of a step.
        peak: bytes of the rank that holds most.
    """

    plan: Plan
    schedule: Schedule
    stages: Stages
    seconds: float
    peak: int

    @property
    def name(self) -> str:
        return f"schedule {self.schedule.name}, micro_batches={self.schedule.micro_batches}"

    def __str__(self) -> str:
        return f"{self.name}: {seconds_text(self.seconds)} a step, at most {bytes_text(self.peak)} a rank"


def plan_step(graph: Graph, mesh: Mesh, options: Options, micro_batches: int | str, asked: Asked) -> tuple[Graph, Plan]:
    """Everything that is decided of a step: layouts, micro-batches, stages, schedule.

    Args:
        micro_batches: how many, or "auto": 1 without a pipeline, else the best of some.

    Raises:
        PlanError: what was asked cannot be had; the message names the facts in conflict.
    """
    axis = pipeline_axis(mesh)
    if axis is None:
        count = 1 if micro_batches == "auto" else int(micro_batches)
        return make_plan_in_time(graph, mesh, replace(options, held=(1.0, 1 / count)), count)
    if micro_batches == "auto" and asked.schedule not in ("auto", *NAMES):
        micro_batches = schedule_of(asked.schedule, mesh.sizes[axis], "auto").micro_batches
    counts = _counts(graph, mesh, micro_batches, mesh.sizes[axis], ROUNDS)
    if counts == [1]:
        return _in_one_go(graph, mesh, options, asked, mesh.sizes[axis])
    limit = options.memory
    free = replace(options, memory=None)
    found = _Search(graph, mesh, free, counts, asked, limit)
    if limit is None or found.fitting:
        return found.graph, found.plan()
    more = _counts(graph, mesh, micro_batches, mesh.sizes[axis], MORE)
    least, last, bound = found.least, max(counts[-1], more[-1]), math.inf
    tries = [(free, more)] if last > counts[-1] else []
    held = _held(mesh.sizes[axis], last)
    tries += [(replace(options, memory=limit * share, held=held), [last]) for share in TIGHTER]
    for ask, some in tries:
        try:
            found = _Search(graph, mesh, ask, some, asked, limit)
        except TooLittle as fault:  # no plan holds so little
            bound = fault.least
            break
        except PlanError:  # it cannot be cut into more micro-batches
            continue
        if found.fitting:
            return found.graph, found.plan()
        least = min(least, found.least, key=lambda c: c.peak)
    raise TooLittle(_too_much(limit, mesh, least), min(least.peak, bound))


def _in_one_go(graph: Graph, mesh: Mesh, options: Options, asked: Asked, ranks: int) -> tuple[Graph, Plan]:
    """Stages without a schedule: one after another. The planner counts one of equal stages, the cut each as it is."""
    name = "1f1b" if asked.schedule == "auto" else asked.schedule
    schedule = schedule_of(name, ranks, asked.micro_batches)
    placement = asked.stages.placement if asked.stages else schedule.placement
    graph, plan = make_plan_in_time(graph, mesh, replace(options, held=_held(ranks, 1)), 1)
    cutter = Cutter(graph, graph.factored, plan, asked)
    room = None if options.memory is None else cutter.room(schedule, options.memory)
    stages = (cutter.stages(placement, room) if room is not None else None) or cutter.stages(placement)
    return graph, replace(plan, stages=stages)


def _held(ranks: int, micro_batches: int) -> tuple[float, float]:
    """Of all bytes of parameters and of a batch's saved tensors, what the first rank of an even 1F1B holds."""
    return 1 / ranks, 1 / max(ranks, micro_batches)


def _counts(graph: Graph, mesh: Mesh, micro_batches: int | str, ranks: int, rounds: Sequence[int]) -> list[int]:
    """The numbers of micro-batches to compare: those that divide the batch where one is near."""
    if micro_batches != "auto":
        return [int(micro_batches)]
    if not batch_sizes(graph):
        return [1]
    rows = math.gcd(*batch_sizes(graph)) // math.prod(n for a, n in mesh.axes if mesh.role(a) == "data")
    wanted = [n * ranks for n in rounds]
    even = [next((m for m in range(w, w // 2, -1) if rows and rows % m == 0), w) for w in wanted]
    counts = sorted({m for m in even if can_be_cut(graph, mesh, m)})
    return counts or [next(m for m in range(ranks, 0, -1) if m == 1 or can_be_cut(graph, mesh, m))]


def _too_much(limit: float, mesh: Mesh, least: Candidate) -> str:
    return (
        f"memory={limit:.0f} bytes a device cannot hold this model on mesh {mesh} in any schedule compared: the least "
        f"peak found is {least.peak} bytes ({least.name}). More micro_batches or a smaller batch make what is in "
        f"flight smaller, more ranks of pp, tp or dp (with zero='auto') what rests"
    )


class _Search:
    """Attributes:
    all: the candidates of one plan, one for each schedule and number of micro-batches.
    fitting: those within the memory.
    """

    def __init__(
        self, graph: Graph, mesh: Mesh, options: Options, counts: Sequence[int], asked: Asked, limit: float | None
    ):
        self.limit, self.asked = limit, asked
        self.graph, first = make_plan_in_time(graph, mesh, options, counts[-1])
        self.all: list[Candidate] = []
        axis = pipeline_axis(mesh)
        assert axis is not None
        for count in counts:
            plan = first if count == first.micro_batches else retimed(self.graph, first, count)
            cutter = Cutter(self.graph, self.graph.factored, plan, asked)
            self.all += (self._candidate(cutter, s) for s in _schedules(asked, mesh.sizes[axis], count))
        self.fitting = [c for c in self.all if limit is None or c.peak <= limit]

    @property
    def least(self) -> Candidate:
        return min(self.all, key=lambda c: c.peak)

    @property
    def best(self) -> Candidate:
        room = self.fitting[0].plan.mesh.device.memory
        held = [c for c in self.fitting if c.peak <= room] or self.fitting
        fastest = min(c.seconds for c in held)
        close = [c for c in held if c.seconds <= fastest * (1 + CLOSE)]
        return min(close, key=lambda c: (c.peak, c.schedule.micro_batches, c.seconds))

    def _candidate(self, cutter: Cutter, schedule: Schedule) -> Candidate:
        open_ = cutter.stages(schedule.placement)
        assert open_ is not None
        found = self._timed(cutter, schedule, open_)
        even = cutter.even_ranks(schedule.placement)
        if even is not None:
            found = min(found, self._timed(cutter, schedule, even), key=lambda c: c.seconds)
        if self.limit is not None and found.peak > self.limit:
            room = cutter.room(schedule, self.limit)
            smaller = None if room is None else cutter.stages(schedule.placement, room)
            if smaller is not None and smaller.cuts != open_.cuts:
                found = min(found, self._timed(cutter, schedule, smaller), key=lambda c: c.peak)
        return found

    def _timed(self, cutter: Cutter, schedule: Schedule, stages: Stages) -> Candidate:
        seconds, peak = step_seconds(schedule, cutter.work.staged(stages))
        return Candidate(cutter.plan, schedule, stages, seconds, peak)

    def plan(self) -> Plan:
        best = self.best
        facts = best.plan.facts
        assert facts is not None
        facts = replace(facts, asked={**facts.asked, "memory": self.limit})
        device, compared = best.plan.mesh.device, tuple(self._lines(best))
        made = replace(best.plan, stages=best.stages, schedule=best.schedule, compared=compared, facts=facts)
        if best.peak <= device.memory:
            return made
        much = f"{bytes_text(best.peak)} in {best.name}, {device.name} has {bytes_text(device.memory)}"
        return replace(made, notes=(*made.notes, f"a rank holds {much}: memory= asks for a plan that fits"))

    def _lines(self, best: Candidate) -> Iterator[str]:
        """What was compared: each schedule with as many micro-batches as chosen, the chosen one with others."""
        m = best.schedule.micro_batches
        for c in sorted(self.all, key=lambda c: c.seconds):
            if c.schedule.micro_batches == m or c.schedule.name == best.schedule.name:
                why = " (chosen)" if c is best else "" if c in self.fitting else " (does not fit)"
                yield f"{c}{why}"


def simulated(graph: Graph, plan: Plan) -> tuple[float, int]:
    """Seconds of a step of a plan with a schedule, and the bytes of the rank that holds most."""
    assert plan.stages is not None and plan.schedule is not None
    return step_seconds(plan.schedule, _staged(graph, plan))


def simulated_timeline(graph: Graph, plan: Plan) -> Timeline:
    """The loop over micro-batches of a plan with a schedule, in time."""
    assert plan.schedule is not None
    return _in_time(plan.schedule, _staged(graph, plan))


def _staged(graph: Graph, plan: Plan) -> Stagewise:
    assert plan.stages is not None
    return Cutter(graph, graph.factored or factor_graph(graph), plan, Asked()).work.staged(plan.stages)


def _in_time(schedule: Schedule, stagewise: Stagewise) -> Timeline:
    return simulate(post_ahead(with_transfers(schedule, stagewise.edges, stagewise.gradients)), stagewise.costs)


def _schedules(asked: Asked, ranks: int, micro_batches: int) -> list[Schedule]:
    """Those to compare.

    Stages of an earlier program keep their places. Starts that are pinned speak of stages by number, so those of one
    stage a rank are compared alone, unless a number is too large for them.

    Raises:
        PlanError: there is no such schedule.
    """
    if asked.schedule != "auto":
        return [schedule_of(asked.schedule, ranks, micro_batches)]
    every = [generate(name, ranks, micro_batches) for name in COMPARED]
    if asked.stages is not None:
        return [s for s in every if s.placement == asked.stages.placement]
    if asked.starts:
        virtual = 1 if max(asked.starts.values()) < ranks else 2
        return [s for s in every if s.stages == virtual * ranks]
    return every


def step_seconds(schedule: Schedule, stagewise: Stagewise) -> tuple[float, int]:
    """Seconds of a step on given stages, and the bytes of the rank that holds most."""
    timed = _in_time(schedule, stagewise)
    once = [math.fsum(stagewise.once[s] for s in schedule.stages_of(r)) for r in range(schedule.ranks)]
    return timed.seconds + max(once), max(timed.peak)
