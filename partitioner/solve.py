"""Exact minimisation of a sum of unary and pairwise tables by variable elimination.

    minimise  sum_i u_i(x_i) + sum_(i,j) t_ij(x_i, x_j)

Min-plus elimination (Dechter, "Bucket elimination", 1999): take the variable whose neighbours' joint table is
smallest, add up every table that holds it, minimise over it, keep the sum for the way back. Where the smallest joint
table would exceed `LIMIT` entries, the variable with the most neighbours is fixed at its best value so far instead, and
the answer says so: it is then an upper bound.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

LIMIT = 2_000_000
"""Entries of the largest table that elimination may build."""


@dataclass
class Problem:
    """Tables by variable number. Pairs are kept once, as (smaller, larger)."""

    unary: list[np.ndarray] = field(default_factory=list)
    pairs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def variable(self, costs: np.ndarray) -> int:
        self.unary.append(costs)
        return len(self.unary) - 1

    def pair(self, i: int, j: int, table: np.ndarray) -> None:
        """Add a table with axes (x_i, x_j)."""
        if i == j:
            self.unary[i] = self.unary[i] + np.diagonal(table)
            return
        key, table = ((i, j), table) if i < j else ((j, i), table.T)
        self.pairs[key] = self.pairs[key] + table if key in self.pairs else table


@dataclass(frozen=True)
class Solution:
    """`values`: the choice of each variable; `cost`: its objective; `exact`: no variable had to be fixed."""

    values: list[int]
    cost: float
    exact: bool


def solve(problem: Problem) -> Solution:
    """The values with the least sum."""
    free = [i for i, u in enumerate(problem.unary) if len(u) > 1]
    values = [0] * len(problem.unary)
    found = _Elimination(_only(problem, free)).run()
    for i, value in zip(free, found.values, strict=True):
        values[i] = value
    return Solution(values, objective(problem, values), found.exact)


def _only(problem: Problem, free: list[int]) -> Problem:
    """The problem over the variables that have a choice, the tables of the others folded in."""
    number = {i: n for n, i in enumerate(free)}
    out = Problem([problem.unary[i].copy() for i in free])
    for (i, j), table in problem.pairs.items():
        if i in number and j in number:
            out.pair(number[i], number[j], table)
        elif i in number:
            out.unary[number[i]] += table[:, 0]
        elif j in number:
            out.unary[number[j]] += table[0, :]
    return out


class _Elimination:
    def __init__(self, problem: Problem):
        self.problem = problem
        self.sizes = [len(u) for u in problem.unary]
        self.tables: dict[int, dict[tuple[int, ...], np.ndarray]] = {i: {} for i in range(len(self.sizes))}
        for i, u in enumerate(problem.unary):
            self._put((i,), u)
        for key, table in problem.pairs.items():
            self._put(key, table)
        self.order: list[tuple[int, tuple[int, ...], np.ndarray | None]] = []
        self.fixed: dict[int, int] = {}
        self.exact = True

    def _put(self, scope: tuple[int, ...], table: np.ndarray) -> None:
        for v in scope:
            mine = self.tables[v]
            mine[scope] = mine[scope] + table if scope in mine else table

    def _take(self, v: int) -> dict[tuple[int, ...], np.ndarray]:
        mine = self.tables.pop(v)
        for scope in mine:
            for w in scope:
                if w != v:
                    del self.tables[w][scope]
        return mine

    def _neighbours(self, v: int) -> set[int]:
        return {w for scope in self.tables[v] for w in scope} - {v}

    def _weight(self, v: int) -> int:
        size = self.sizes[v]
        for w in self._neighbours(v):
            size *= self.sizes[w]
        return size

    def run(self) -> Solution:
        heap = [(self._weight(v), v) for v in self.tables]
        heapq.heapify(heap)
        while self.tables:
            weight, v = heapq.heappop(heap)
            if v not in self.tables:
                continue
            now = self._weight(v)
            if now != weight:
                heapq.heappush(heap, (now, v))
                continue
            if weight > LIMIT:
                heapq.heappush(heap, (weight, v))  # another may be fixed; this one stays to be eliminated
                v = max(self.tables, key=lambda w: (len(self._neighbours(w)), -w))
                touched = self._fix(v)
            else:
                touched = self._eliminate(v)
            for w in touched:
                heapq.heappush(heap, (self._weight(w), w))
        return self._back()

    def _eliminate(self, v: int) -> set[int]:
        tables = self._take(v)
        scope = tuple(sorted({w for s in tables for w in s} - {v}))
        joint = _sum_over(tables, (*scope, v), self.sizes)
        self.order.append((v, scope, joint))
        if scope:
            self._put(scope, joint.min(axis=-1))
        return set(scope)

    def _fix(self, v: int) -> set[int]:
        """Condition on a variable: its best value by its own tables, its neighbours at their least."""
        self.exact = False
        tables = self._take(v)
        score = np.zeros(self.sizes[v])
        for scope, table in tables.items():
            at = scope.index(v)
            score = score + table.min(axis=tuple(i for i in range(len(scope)) if i != at))
        best = int(score.argmin())
        self.fixed[v] = best
        touched: set[int] = set()
        for scope, table in tables.items():
            rest = tuple(w for w in scope if w != v)
            if rest:
                self._put(rest, table.take(best, axis=scope.index(v)))
                touched |= set(rest)
        return touched

    def _back(self) -> Solution:
        values = dict(self.fixed)
        for v, scope, joint in reversed(self.order):
            assert joint is not None
            values[v] = int(joint[tuple(values[w] for w in scope)].argmin())
        answer = [values[i] for i in range(len(self.sizes))]
        return Solution(answer, 0.0, self.exact)


def _sum_over(tables: dict[tuple[int, ...], np.ndarray], scope: tuple[int, ...], sizes: list[int]) -> np.ndarray:
    """The sum of tables as one over `scope`, whose last variable may be out of order."""
    out = np.zeros([sizes[v] for v in scope])
    place = {v: i for i, v in enumerate(scope)}
    for names, table in tables.items():
        order = sorted(range(len(names)), key=lambda i: place[names[i]])
        shape = [1] * len(scope)
        for i in order:
            shape[place[names[i]]] = sizes[names[i]]
        out += table.transpose(order).reshape(shape)
    return out


def objective(problem: Problem, values: list[int]) -> float:
    """The sum at given values."""
    total = sum(float(u[values[i]]) for i, u in enumerate(problem.unary))
    return total + sum(float(t[values[i], values[j]]) for (i, j), t in problem.pairs.items())
