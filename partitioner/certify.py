"""How far a plan can be from the best: a lower bound by linear programming, one variable for every call.

    minimise   sum_i seconds_i . p_i  +  sum_t price_t . pay_t                                  (`untied.py`)
    such that  p_i is a distribution over the columns of part i
               flow_tr (held, needed) has the marginals that the giver of t and its reader r give it
               pay_t >= flow_tr            for every reader r: a reshard is paid once however many need it
               nbytes . p + kept . keep <= memory;   keep <= flow in forward, keep <= flow in backward, pay less by keep

Whole columns are the plans of the per-call problem, so the least is a lower bound. It is read off the duals, whatever
state the solver leaves them in: for any multipliers y of the rows,

    bound = y . rhs + sum_j min(0, cost_j - (A' y)_j)                    as no column is above 1

Before that what is exact is taken out: a part with one neighbour, or two, none of them shared, is eliminated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np

from .graph import Graph
from .mesh import Mesh
from .plan import Plan
from .planner import Options
from .states import UNREACHABLE
from .untied import Part, Read, Tensor, Untied

SECONDS = 60.0
"""The solver stops after so long; what it has by then is a bound too."""


@dataclass(frozen=True)
class Certificate:
    """No plan of one choice a call costs less than `bound` seconds; the plan costs `cost`.

    Attributes:
        gap: (cost - bound) / bound.
    """

    bound: float
    cost: float

    @property
    def gap(self) -> float:
        return (self.cost - self.bound) / self.bound if self.bound > 0 else 0.0

    def __str__(self) -> str:
        return f"{self.cost:.6g} s, at most {100 * self.gap:.3g}% above the least ({self.bound:.6g} s)"


def certify(graph: Graph, mesh: Mesh, options: Options, plan: Plan, limit: float = SECONDS) -> Certificate:
    """The certificate of a plan, on the graph that `make_plan` gave with it. `limit`: seconds of the solver."""
    made = Untied(graph, mesh, options, plan)
    return certificate(made, limit)


def certificate(made: Untied, limit: float = SECONDS) -> Certificate:
    cost = made.cost()
    bound = bound_of(made, limit)
    return Certificate(min(bound, cost) if bound <= cost * (1 + 1e-9) else bound, cost)


def bound_of(made: Untied, limit: float = SECONDS) -> float:
    """A lower bound of the seconds of every plan."""
    memory = made.options.memory
    reduced = Reduced(made, memory is not None)
    reduced.run()
    program = _Program(reduced, memory)
    return reduced.constant + program.bound(limit)


@dataclass(eq=False)
class _Edge:
    """A tensor in the reduced problem."""

    giver: int
    held: np.ndarray
    price: np.ndarray
    kept: np.ndarray
    reads: list[Read]
    again: bool
    plain: bool  # one reader, nothing to keep: a pair table on states


class Reduced:
    """The problem without the parts that can be eliminated."""

    def __init__(self, made: Untied, memory: bool):
        self.constant = 0.0
        self.seconds: dict[int, np.ndarray] = {i: p.seconds.copy() for i, p in enumerate(made.parts)}
        self.nbytes = {i: p.nbytes for i, p in enumerate(made.parts)}
        self.memory = memory
        self.edges: list[_Edge] = []
        for t in made.tensors:
            self.edges.append(self._edge(t))

    def _edge(self, t: Tensor) -> _Edge:
        reads: dict[Any, Read] = {}
        for r in t.reads:
            late = r.late and (t.again or self.memory)
            reads.setdefault((r.reader, r.wants.tobytes(), late), Read(r.reader, r.wants, late))
        found = list(reads.values())
        return _Edge(t.giver, t.held, t.price, t.kept, found, t.again, len(found) == 1)

    def run(self) -> None:
        todo = list(self.seconds)
        self._touch()
        while todo:
            i = todo.pop()
            if i in self.seconds:
                todo += self._eliminate(i)

    def _touch(self) -> None:
        self.near: dict[int, dict[int, _Edge]] = {i: {} for i in self.seconds}
        for e in self.edges:
            for i in {e.giver, *(r.reader for r in e.reads)}:
                self.near[i][id(e)] = e

    def _eliminate(self, i: int) -> list[int]:
        """Take part i out if that is exact; returns the parts to look at again."""
        edges = list(self.near[i].values())
        if self.memory and np.ptp(self.nbytes[i]) > 0:
            return []
        if not all(e.plain and e.giver != e.reads[0].reader for e in edges) or len(edges) > 2:
            return []
        sides = [self._side(e, i) for e in edges]
        if not edges:
            self.constant += float(self.seconds.pop(i).min())
            return []
        if len(edges) == 2 and sides[0][0] == sides[1][0]:
            return []
        for e in edges:
            del self.near[sides[edges.index(e)][0]][id(e)]
        own, _ = self.seconds.pop(i), self.near.pop(i)
        self._bytes_of(i)
        if len(edges) == 1:
            other, places, table = sides[0]
            self.seconds[other] = self.seconds[other] + (own[:, None] + table).min(0)[places]
            return [other]
        (a, at_a, left), (b, at_b, right) = sides
        joined = np.stack([(own + right[:, j] + left.T).min(1) for j in range(right.shape[1])], axis=1)
        edge = _Edge(a, at_a, joined, np.zeros(joined.shape[1]), [Read(b, at_b, False)], False, True)
        self.near[a][id(edge)] = self.near[b][id(edge)] = edge
        return [a, b]

    def _bytes_of(self, i: int) -> None:
        self.fixed_bytes = getattr(self, "fixed_bytes", 0.0) + float(self.nbytes[i].min())

    def _side(self, e: _Edge, i: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The other part, its places, and seconds by (column of i, state of the other)."""
        (r,) = e.reads
        if e.giver == i:
            return r.reader, r.wants, e.price[e.held]
        return e.giver, e.held, e.price.T[r.wants]

    def live(self) -> list[_Edge]:
        found: dict[int, _Edge] = {}
        for edges in self.near.values():
            found |= edges
        return list(found.values())


class _Program:
    """The linear programme, built column by column."""

    def __init__(self, reduced: Reduced, memory: int | None):
        self.costs: list[np.ndarray] = []
        self.count, self.height = 0, 0
        self.lower: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.first: dict[int, int] = {}
        self.sizes = {i: len(s) for i, s in reduced.seconds.items()}
        for i, seconds in reduced.seconds.items():
            self.first[i] = self._columns(seconds)
            row = self._rows(1, 1.0, 1.0)
            self._put(np.full(len(seconds), row), self._of(i), 1.0)
        budget = self._rows(1, -math.inf, memory - getattr(reduced, "fixed_bytes", 0.0)) if memory is not None else -1
        if memory is not None:
            for i in reduced.seconds:
                self._put(np.full(self.sizes[i], budget), self._of(i), reduced.nbytes[i])
        self.scale = max(1.0, float(memory or 1))
        self.budget = budget
        for e in reduced.live():
            self._edge(e)

    def _columns(self, costs: np.ndarray) -> int:
        self.costs.append(costs)
        self.count += len(costs)
        return self.count - len(costs)

    def _rows(self, n: int, lower: float, upper: float) -> int:
        self.lower.append(np.full(n, lower))
        self.upper.append(np.full(n, upper))
        self.height += n
        return self.height - n

    def _put(self, rows: np.ndarray, columns: np.ndarray, values: Any) -> None:
        self.entries.append((rows, columns, np.broadcast_to(np.asarray(values, dtype=float), rows.shape)))

    def _of(self, i: int) -> np.ndarray:
        return self.first[i] + np.arange(self.sizes[i])

    def _edge(self, e: _Edge) -> None:
        reach = e.price < UNREACHABLE / 2
        if e.plain:
            self._flow(e, e.reads[0], e.price, reach)
            return
        for late in (False, True):
            phase = [r for r in e.reads if r.late == late]
            if phase and (e.again or self.budget >= 0):
                self._shared(e, phase, reach)
        if not e.again and self.budget < 0:
            self._shared(e, e.reads, reach)

    def _shared(self, e: _Edge, reads: list[Read], reach: np.ndarray) -> None:
        """Payments above the flows of these readers; one reader's flows are its payments."""
        if len(reads) == 1:
            self._flow(e, reads[0], e.price, reach)
            return
        pays = self._columns(e.price[reach])
        pay = np.full(e.price.shape, -1)
        pay[reach] = pays + np.arange(reach.sum())
        for r in reads:
            flow = self._flow(e, r, None, reach)
            used = flow >= 0
            n = int(used.sum())
            rows = self._rows(n, 0.0, math.inf) + np.arange(n)
            self._put(rows, pay[used], 1.0)
            self._put(rows, flow[used], -1.0)

    def _flow(self, e: _Edge, r: Read, price: np.ndarray | None, reach: np.ndarray) -> np.ndarray:
        """Flow from what the giver holds to what a reader needs; the number of each column, -1 where there is none."""
        held, wanted = np.unique(e.held), np.unique(r.wants)
        used = np.zeros(reach.shape, dtype=bool)
        used[np.ix_(held, wanted)] = True
        used &= reach
        n = int(used.sum())
        flow = np.full(reach.shape, -1)
        flow[used] = self._columns(np.zeros(n) if price is None else price[used]) + np.arange(n)
        for part, at, axis in ((e.giver, e.held, 0), (r.reader, r.wants, 1)):
            row = np.full(reach.shape[axis], -1)
            states = np.unique(at)
            row[states] = self._rows(len(states), 0.0, 0.0) + np.arange(len(states))
            where = np.nonzero(used)
            self._put(row[where[axis]], flow[used], 1.0)
            self._put(row[at], self._of(part), -1.0)
        return flow

    def bound(self, limit: float) -> float:
        if not self.count:
            return 0.0
        rows, columns, values = (np.concatenate(x) for x in zip(*self.entries, strict=True))
        costs, lower, upper = (np.concatenate(x) for x in (self.costs, self.lower, self.upper))
        scale = 1e4 / max(1e-12, sum(float(c.max()) for c in self.costs[: len(self.first)]))
        duals = _duals(costs * scale, lower, upper, rows, columns, values, limit) / scale
        duals = np.where((duals > 0) & ~np.isfinite(lower), 0.0, np.where((duals < 0) & ~np.isfinite(upper), 0.0, duals))
        reduced = costs - np.bincount(columns, values * duals[rows], len(costs))
        sides = np.where(duals > 0, lower, upper)
        return float((duals * np.where(duals == 0, 0.0, sides)).sum() + np.minimum(reduced, 0.0).sum())


SOLVER = "choose"


def _duals(
    costs: np.ndarray, lower: np.ndarray, upper: np.ndarray,
    rows: np.ndarray, columns: np.ndarray, values: np.ndarray, limit: float,
) -> np.ndarray:  # fmt: skip
    """Multipliers of the rows, as HiGHS leaves them."""
    order = np.lexsort((rows, columns))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(costs), len(lower)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = costs, np.zeros(len(costs)), np.ones(len(costs))
    lp.row_lower_, lp.row_upper_ = lower, upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(np.bincount(columns, minlength=len(costs)))))
    lp.a_matrix_.index_, lp.a_matrix_.value_ = rows[order], values[order]
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("solver", SOLVER)
    solver.setOptionValue("time_limit", limit)
    solver.passModel(lp)
    solver.run()
    found = np.array(solver.getSolution().row_dual)
    _duals.last = (len(costs), len(lower), str(solver.getModelStatus()), solver.getInfo().objective_function_value / 1)
    return found if len(found) == len(lower) else np.zeros(len(lower))
