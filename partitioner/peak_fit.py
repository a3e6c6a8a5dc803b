"""`memory=` met by the peak: plans are asked for by the planner's own sum, and measured by the memory model.

    sum      what the planner counts while it decides: state, what backward reads (`saved.py`); no transients, no time
    peak     what the lowered program holds at most on any rank (`memory.py`)
    level k  a plan whose sum is at most  sum of the plan without a limit * 2^(-k / 16)

The levels do not depend on `memory=`, and a lower one is never faster, so a smaller memory ends at the same level or a
lower one. The first guesses take peak and sum as proportional; then the levels between one whose peak is too large and
one that fits (or that no plan reaches) are halved, until they are neighbours: beside a level that leaves little of the
memory a faster one may fit too. The fastest of the plans found that fit is taken. A plan whose sum is
within the limit of a lower level is the plan of that level too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from .errors import TooLittle
from .facts import Peak
from .fit import counted
from .graph import Graph
from .memory import MemoryTimeline, Model
from .memory_report import hints
from .plan import Plan
from .program import Program
from .stage_search import simulated

A_HALF = 16
"""Levels to half of the bytes: each is 4.2 % below the one before."""

LAST = 8 * A_HALF
"""The last level: a plan with 1/256 of the bytes."""

GUESSES, TRIES = 2, 8
"""At most so many levels are guessed, and so many tried in all."""


@dataclass(frozen=True)
class Measured:
    """A plan, its program, and what it takes. `nbytes`: by the planner's sum."""

    plan: Plan
    program: Program
    seconds: float
    nbytes: float
    most: MemoryTimeline


class PeakFit:
    """The search for the fastest plan within a peak.

    Args:
        planned: from a limit of the planner's sum, or None, to a plan and the graph it is of, which is used up.
        lowered: the program of these.
        model: the memory model of a program.

    Attributes:
        levels: per level tried what was measured there, or the error that says that no plan goes so low.
    """

    def __init__(
        self,
        planned: Callable[[float | None], tuple[Graph, Plan]],
        lowered: Callable[[Graph, Plan], Program],
        model: Callable[[Program], Model],
    ):
        self.planned, self.lowered, self.model = planned, lowered, model
        self.levels: dict[int, Measured | TooLittle] = {}

    def within(self, memory: float) -> Program:
        """The program of the fastest plan found that fits.

        Raises:
            TooLittle: none does; says how much is missing, where, and what stands there.
            PlanError: there is no plan at all, for another reason.
        """
        found = self._search(memory)
        fitting = [m for m in found if m.most.peak <= memory]
        if not fitting:
            least = min(found, key=lambda m: m.most.peak)
            raise TooLittle(self._missing(least, memory), least.most.peak)
        best = min(fitting, key=lambda m: m.seconds)
        assert best.plan.facts is not None
        peak = Peak(best.most.peak, best.most.rank, best.most.at, best.most.module)
        facts = replace(best.plan.facts, asked={**best.plan.facts.asked, "memory": memory}, peak=peak)
        return replace(best.program, plan=replace(best.plan, facts=facts))

    def at(self, level: int) -> Measured | TooLittle:
        """What is found at a level; it is tried once."""
        if level not in self.levels:
            known = self._from_above(level)
            if known is not None:
                self.levels[level] = known
                return known
            try:
                self.levels[level] = self._measured(None if level == 0 else self._limit(level))
            except TooLittle as fault:
                self.levels[level] = fault
        return self.levels[level]

    def _from_above(self, level: int) -> Measured | None:
        """What was found at a higher level and is within the limit of this one."""
        if level == 0:
            return None
        above = (m for at, m in sorted(self.levels.items()) if at < level and isinstance(m, Measured))
        return next((m for m in above if m.nbytes <= self._limit(level)), None)

    def _measured(self, limit: float | None) -> Measured:
        graph, plan = self.planned(limit)
        known = plan.schedule is not None
        seconds, nbytes = simulated(graph, plan) if known else (sum(plan.seconds), counted(graph, plan))
        program = self.lowered(graph, plan)
        return Measured(plan, program, seconds, nbytes, self.model(program).peak())

    @property
    def _free(self) -> Measured:
        found = self.at(0)
        assert isinstance(found, Measured)
        return found

    def _limit(self, level: int) -> float:
        return self._free.nbytes * 2 ** (-level / A_HALF)

    def _level(self, nbytes: float) -> int:
        """The lowest level whose limit is at least so much."""
        return math.floor(A_HALF * math.log2(max(1.0, self._free.nbytes / nbytes)))

    def _search(self, memory: float) -> list[Measured]:
        """What is measured on the way; `over`: the last level known to be too much, `under`: the first that fits, or
        that there is no plan for."""
        found, over, under, guesses = [self._free], 0, LAST + 1, 0
        made: Measured | TooLittle = self._free
        level = 0
        for _ in range(TRIES):
            if isinstance(made, TooLittle):
                under, level = level, self._level(made.least)  # if that is too much too, what lies between is halved
            elif made.most.peak > memory:
                over, guesses = level, guesses + 1
                step = math.ceil(A_HALF * math.log2(made.most.peak / memory))
                level = over + min(step, A_HALF) if guesses <= GUESSES else over
            elif level == 0:
                break
            else:
                under, level = level, over  # halved below
            if under - over < 2:
                break
            if not over < level < under:
                level = (over + min(under, over + 2 * A_HALF)) // 2
            made = self.at(level)
            if isinstance(made, Measured):
                found.append(made)
        return found

    def _missing(self, least: Measured, memory: float) -> str:
        most, plan = least.most, least.plan
        stands = ", ".join(f"{kind} {n}" for kind, n in sorted(most.by_kind.items(), key=lambda kn: -kn[1]))
        where = f"{most.at} of {most.module}" if most.module else most.at
        how = f"zero={plan.zero}, micro_batches={plan.micro_batches}"
        how += f", schedule {plan.schedule.name}" if plan.schedule is not None else ""
        ways = [*hints(self.model(least.program), most), "more ranks of dp, tp or pp, or a smaller batch"]
        return (
            f"memory={memory:.0f} bytes a device cannot hold this model on mesh {plan.mesh}: the least peak found is "
            f"{most.peak} bytes, {most.peak - memory:.0f} too many, on rank {most.rank} at {where} ({how}). There "
            f"stand {stands}. What would take less: {'; '.join(ways)}"
        )
