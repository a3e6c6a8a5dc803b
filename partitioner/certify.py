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
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from .graph import Graph
from .mesh import Mesh
from .plan import Plan
from .planner import Options
from .states import UNREACHABLE
from .tables import FREE
from .untied import Read, Tensor, Untied

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
    return Certificate(bound_of(made, limit), made.cost())


def bound_of(made: Untied, limit: float = SECONDS) -> float:
    """No plan of the per-call problem costs less."""
    reduced = Reduced(made)
    reduced.run()
    # what a solver that was stopped may not reach
    least = sum(float(s.min()) for s in reduced.seconds.values())
    return reduced.constant + max(least, Program(reduced).bound(limit))


@dataclass(eq=False)
class _Edge:
    """A tensor, or what stands for an eliminated part between two others.

    `plain`: it has one reader, and nothing of it can be kept: a table between two parts.
    """

    giver: int
    held: np.ndarray
    price: np.ndarray
    kept: np.ndarray
    reads: list[Read]
    again: bool
    plain: bool


class Reduced:
    """The problem without the parts that can be eliminated. `constant`, `nbytes_gone`: what those cost and keep."""

    def __init__(self, made: Untied):
        self.memory = made.options.memory
        self.constant, self.nbytes_gone = 0.0, 0.0
        self.seconds: dict[int, np.ndarray] = {i: p.seconds for i, p in enumerate(made.parts)}
        self.nbytes = {i: p.nbytes for i, p in enumerate(made.parts)}
        self.near: dict[int, dict[int, _Edge]] = {i: {} for i in self.seconds}
        for t in made.tensors:
            self._join(self._edge(t))

    def _edge(self, t: Tensor) -> _Edge:
        reads: dict[Any, Read] = {}
        for r in t.reads:
            late = r.late and (t.again or self.memory is not None)
            reads.setdefault((r.reader, r.wants.tobytes(), late), Read(r.reader, r.wants, late))
        plain = len(reads) == 1 and t.giver != t.reads[0].reader
        return _Edge(t.giver, t.held, t.price, t.kept, list(reads.values()), t.again, plain)

    def _join(self, e: _Edge) -> None:
        for i in {e.giver, *(r.reader for r in e.reads)}:
            self.near[i][id(e)] = e

    def run(self) -> None:
        todo = list(self.seconds)
        while todo:
            i = todo.pop()
            if i in self.seconds and self._is_simple(i):
                todo += self._eliminate(i)

    def _is_simple(self, i: int) -> bool:
        edges = list(self.near[i].values())
        if len(edges) > 2 or not all(e.plain for e in edges):
            return False
        if self.memory is not None and np.ptp(self.nbytes[i]) > 0:
            return False
        return len({e.giver + e.reads[0].reader for e in edges}) == len(edges)  # not both to the same other part

    def _eliminate(self, i: int) -> list[int]:
        """Take part i out; returns its neighbours."""
        edges, own = list(self.near.pop(i).values()), self.seconds.pop(i)
        self.nbytes_gone += float(self.nbytes[i].min())
        sides = [self._side(e, i) for e in edges]
        for e, (other, _, _) in zip(edges, sides, strict=True):
            del self.near[other][id(e)]
        if not sides:
            self.constant += float(own.min())
        elif len(sides) == 1:
            ((other, at, table),) = sides
            self.seconds[other] = self.seconds[other] + (own[:, None] + table).min(0)[at]
        else:
            (a, at_a, left), (b, at_b, right) = sides
            price = np.stack([(own + right[:, j] + left.T).min(1) for j in range(right.shape[1])], axis=1)
            self._join(_Edge(a, at_a, price, np.zeros(price.shape[1]), [Read(b, at_b, False)], False, True))
        return [other for other, _, _ in sides]

    def _side(self, e: _Edge, i: int) -> tuple[int, np.ndarray, np.ndarray]:
        """The other part, the state of each of its columns, and seconds by (column of i, state)."""
        (r,) = e.reads
        if e.giver == i:
            return r.reader, r.wants, e.price[e.held]
        return e.giver, e.held, e.price.T[r.wants]

    def edges(self) -> list[_Edge]:
        return list({k: e for some in self.near.values() for k, e in some.items()}.values())


class _Rows:
    """A sparse matrix in the making: columns with costs, rows with sides."""

    def __init__(self) -> None:
        self.costs: list[np.ndarray] = []
        self.sides: list[tuple[int, float, float]] = []
        self.entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.width, self.height = 0, 0

    def columns(self, costs: np.ndarray) -> np.ndarray:
        """The numbers of new columns."""
        self.costs.append(costs)
        self.width += len(costs)
        return self.width - len(costs) + np.arange(len(costs))

    def rows(self, n: int, lower: float, upper: float) -> np.ndarray:
        """The numbers of new rows."""
        self.sides.append((n, lower, upper))
        self.height += n
        return self.height - n + np.arange(n)

    def put(self, rows: np.ndarray, columns: np.ndarray, values: Any) -> None:
        self.entries.append((rows, columns, np.broadcast_to(np.asarray(values, dtype=float), columns.shape)))


class Program:
    """The linear programme of a reduced problem."""

    def __init__(self, reduced: Reduced):
        self.reduced, self.made = reduced, _Rows()
        self.of = {i: self.made.columns(seconds) for i, seconds in reduced.seconds.items()}
        for columns in self.of.values():
            self.made.put(np.repeat(self.made.rows(1, 1.0, 1.0), len(columns)), columns, 1.0)
        self.unit, self.budget = 1.0, np.zeros(0, dtype=np.intp)
        if reduced.memory is not None:
            self.unit = max(1.0, float(reduced.memory))
            self.budget = self.made.rows(1, -math.inf, (reduced.memory - reduced.nbytes_gone) / self.unit)
            for i, columns in self.of.items():
                self._keep(columns, reduced.nbytes[i])
        for e in reduced.edges():
            self._edge(e)

    def _keep(self, columns: np.ndarray, nbytes: np.ndarray) -> None:
        self.made.put(np.repeat(self.budget, len(columns)), columns, nbytes / self.unit)

    def _edge(self, e: _Edge) -> None:
        early, late = ([r for r in e.reads if r.late == phase] for phase in (False, True))
        pays = [self._payments(e, reads) for reads in (early, late) if reads]
        if len(pays) == 2 and not e.again:
            self._kept(e, *pays)

    def _payments(self, e: _Edge, reads: list[Read]) -> np.ndarray:
        """Columns above the flows of these readers, by (held, needed); one reader's flows are its payments."""
        if len(reads) == 1:
            return self._flow(e, reads[0], e.price)
        reach = e.price < UNREACHABLE / 2
        pay = np.full(e.price.shape, -1)
        pay[reach] = self.made.columns(e.price[reach])
        for r in reads:
            flow = self._flow(e, r, np.zeros(e.price.shape))
            used = flow >= 0
            rows = self.made.rows(int(used.sum()), 0.0, math.inf)
            self.made.put(rows, pay[used], 1.0)
            self.made.put(rows, flow[used], -1.0)
        return pay

    def _flow(self, e: _Edge, r: Read, price: np.ndarray) -> np.ndarray:
        """Columns from what the giver holds to what a reader needs; -1 where no way leads."""
        used = np.zeros(e.price.shape, dtype=bool)
        used[np.ix_(np.unique(e.held), np.unique(r.wants))] = True
        used &= e.price < UNREACHABLE / 2
        flow = np.full(e.price.shape, -1)
        flow[used] = self.made.columns(price[used])
        for part, at, axis in ((e.giver, e.held, 0), (r.reader, r.wants, 1)):
            states = np.unique(at)
            row = np.full(e.price.shape[axis], -1)
            row[states] = self.made.rows(len(states), 0.0, 0.0)
            self.made.put(row[np.nonzero(used)[axis]], flow[used], 1.0)
            self.made.put(row[at], self.of[part], -1.0)
        return flow

    def _kept(self, e: _Edge, early: np.ndarray, late: np.ndarray) -> None:
        """Copies that both phases need: kept, they are paid once and take memory."""
        both = (early >= 0) & (late >= 0)
        kept = self.made.columns(-e.price[both])
        for pays in (early, late):
            rows = self.made.rows(len(kept), 0.0, math.inf)
            self.made.put(rows, pays[both], 1.0)
            self.made.put(rows, kept, -1.0)
        nbytes = np.broadcast_to(e.kept, e.price.shape)
        self._keep(kept, np.where(e.price > FREE, nbytes, 0.0)[both])

    def bound(self, limit: float) -> float:
        if not self.made.width:
            return 0.0
        rows, columns, values = (np.concatenate(x) for x in zip(*self.made.entries, strict=True))
        costs = np.concatenate(self.made.costs)
        lower, upper = (np.concatenate([np.full(s[0], s[k]) for s in self.made.sides]) for k in (1, 2))
        unit = sum(float(s.max()) for s in self.reduced.seconds.values()) / 1e4 or 1.0
        y = unit * multipliers(costs / unit, (lower, upper), (rows, columns, values), limit)
        y = np.clip(y, np.where(np.isfinite(upper), -np.inf, 0.0), np.where(np.isfinite(lower), np.inf, 0.0))
        sides = np.where(y > 0, lower, np.where(y < 0, upper, 0.0))
        left = costs - np.bincount(columns, values * y[rows], len(costs))
        return float((y * sides).sum() + np.minimum(left, 0.0).sum())


def multipliers(
    costs: np.ndarray, sides: tuple[np.ndarray, np.ndarray], entries: tuple[np.ndarray, ...], limit: float
) -> np.ndarray:
    """Multipliers of the rows, as HiGHS leaves them; columns lie between 0 and 1."""
    rows, columns, values = entries
    order = np.lexsort((rows, columns))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(costs), len(sides[0])
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = costs, np.zeros(len(costs)), np.ones(len(costs))
    lp.row_lower_, lp.row_upper_ = sides
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum(np.bincount(columns, minlength=len(costs)))))
    lp.a_matrix_.index_, lp.a_matrix_.value_ = rows[order], values[order]
    solver = highspy.Highs()
    for option, value in (("output_flag", False), ("threads", 1), ("time_limit", float(limit))):
        solver.setOptionValue(option, value)
    solver.passModel(lp)
    solver.run()
    found = np.array(solver.getSolution().row_dual, dtype=float)
    return found if len(found) == len(sides[0]) and np.isfinite(found).all() else np.zeros(len(sides[0]))
