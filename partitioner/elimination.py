"""Min-plus elimination of a sum of unary and pairwise tables, equal parts done once.

    minimise  sum_i u_i(x_i) + sum_(i,j) t_ij(x_i, x_j)

(Dechter, "Bucket elimination", 1999): take a variable whose neighbours' joint table is smallest, add up every table
that holds it, minimise over it; on the way back take its best value beside its neighbours'. Two things keep the cost
independent of depth:

    rounds        in each round many variables that are no neighbours of each other are eliminated, so a chain of
                  layers is halved each time
    hash-consing  tables are known by identity; an elimination is known by its tables and how they meet, and done once
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LIMIT = 6_000_000
"""Entries of the largest joint table that elimination may go through; what it keeps is smaller by one variable."""

SLACK = 1000
"""How much larger than the least a table may be for its variable to go in the same round, if it has two neighbours at
most (which then gain none): the ends of a chain are cheaper than its middle, and would go one by one."""

HELD = 1 << 18
"""Entries of a sum of tables that is built at once: 2 MB, which a core's cache holds."""

Scoped = tuple[tuple[int, ...], np.ndarray]
"""A table and its variables, in ascending order."""


@dataclass
class Problem:
    """Tables by variable number. Pairs are kept once, as (smaller, larger)."""

    unary: list[np.ndarray] = field(default_factory=list)
    pairs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    sums: dict[Any, tuple] = field(default_factory=dict, repr=False)

    def variable(self, costs: np.ndarray) -> int:
        self.unary.append(costs)
        return len(self.unary) - 1

    def add(self, i: int, costs: np.ndarray) -> None:
        """Add to a variable's own costs."""
        self.unary[i] = self._sum(self.unary[i], costs)

    def pair(self, i: int, j: int, table: np.ndarray) -> None:
        """Add a table with axes (x_i, x_j)."""
        if i == j:
            self.add(i, np.diagonal(table))
            return
        key = (i, j) if i < j else (j, i)
        table = table if i < j else self._turned(table)
        self.pairs[key] = self._sum(self.pairs[key], table) if key in self.pairs else table

    def _sum(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a + b; sums of the same two are one object."""
        key = (id(a), id(b))
        if key not in self.sums:
            self.sums[key] = (a + b, a, b)
        return self.sums[key][0]

    def _turned(self, table: np.ndarray) -> np.ndarray:
        key = ("T", id(table))
        if key not in self.sums:
            self.sums[key] = (np.ascontiguousarray(table.T), table)
        return self.sums[key][0]


def objective(problem: Problem, values: list[int]) -> float:
    """The sum at given values."""
    total = sum(float(u[values[i]]) for i, u in enumerate(problem.unary))
    return total + sum(float(t[values[i], values[j]]) for (i, j), t in problem.pairs.items())


class Store:
    """Eliminations done so far, by the tables that went in. One store may serve many solves."""

    def __init__(self) -> None:
        self.done: dict[Any, tuple] = {}
        self.kept: list[Any] = []


class Elimination:
    """One run. Tables are held by scope, the variables in ascending order."""

    def __init__(self, problem: Problem, fixed: dict[int, int], store: Store, limit: int = 0):
        self.problem, self.store, self.limit = problem, store, limit or LIMIT
        self.sizes = [len(u) for u in problem.unary]
        self.values: dict[int, int] = dict(fixed) | {i: 0 for i, n in enumerate(self.sizes) if n == 1}
        self.tables: dict[int, dict[tuple[int, ...], np.ndarray]] = {
            i: {} for i in range(len(self.sizes)) if i not in self.values
        }
        for i, u in enumerate(problem.unary):
            if i in self.tables:
                self._put((i,), u)
        for (i, j), table in problem.pairs.items():
            if i in self.tables and j in self.tables:
                self._put((i, j), table)
            elif i in self.tables:
                self._put((i,), self._column(table, 1, self.values[j]))
            elif j in self.tables:
                self._put((j,), self._column(table, 0, self.values[i]))
        self.near = {v: {w for scope in tables for w in scope} - {v} for v, tables in self.tables.items()}
        self.order: list[tuple[int, list[Scoped]]] = []
        self.complete = True

    def _column(self, table: np.ndarray, axis: int, at: int) -> np.ndarray:
        key = ("column", id(table), axis, at)
        if key not in self.store.done:
            self.store.done[key] = (table.take(at, axis=axis), table)
        return self.store.done[key][0]

    def _put(self, scope: tuple[int, ...], table: np.ndarray) -> None:
        held = self.tables[scope[0]].get(scope)
        if held is not None:
            key = ("+", id(held), id(table))
            if key not in self.store.done:
                self.store.done[key] = (held + table, held, table)
            table = self.store.done[key][0]
        for v in scope:
            self.tables[v][scope] = table

    def _weight(self, v: int) -> int:
        size = self.sizes[v]
        for w in self.near[v]:
            size *= self.sizes[w]
        return size

    def run(self) -> tuple[list[int], bool]:
        weights = {v: self._weight(v) for v in self.tables}
        while self.tables:
            least = min(weights.values())
            if least > self.limit:
                self._give_up(weights)
                continue
            blocked: set[int] = set()
            touched: set[int] = set()
            for w, v in sorted((w, v) for v, w in weights.items() if w <= min(self.limit, least * SLACK)):
                near = self.near[v]
                if v in blocked or (w > least and len(near) > 2):
                    continue
                blocked |= near | {v}
                touched |= near
                self._eliminate(v)
                del weights[v]
            for w in touched:
                if w in weights:
                    weights[w] = self._weight(w)
        for v, tables in reversed(self.order):
            self.values[v] = self._best(v, tables)
        return [self.values[i] for i in range(len(self.sizes))], self.complete

    def _best(self, v: int, tables: list[Scoped]) -> int:
        """The value with the least sum, its neighbours as they are."""
        costs = np.zeros(self.sizes[v])
        for scope, table in tables:
            costs += table[tuple([slice(None) if w == v else self.values[w] for w in scope])]
        return int(costs.argmin())

    def _eliminate(self, v: int) -> None:
        tables = sorted(self.tables.pop(v).items())
        near = self.near.pop(v)
        for w in near:
            self.near[w] |= near
            self.near[w] -= {v, w}
        scope = tuple(sorted(near))
        role = {w: i for i, w in enumerate(scope)} | {v: -1}
        key = tuple((id(t), *(role[w] for w in s)) for s, t in tables)
        made = self.store.done.get(key)
        if made is None:
            made = self.store.done[key] = (_least_over(v, tables, scope, self.sizes), tables)
        for s, _ in tables:
            for w in s:
                if w != v:
                    self.tables[w].pop(s, None)
        self.order.append((v, tables))
        if scope:
            self._put(scope, made[0])

    def _give_up(self, weights: dict[int, int]) -> None:
        """Condition on the variable with most neighbours: its best value, the neighbours at their least."""
        self.complete = False
        v = max(self.tables, key=lambda w: (len(self.near[w]), -w))
        score = np.zeros(self.sizes[v])
        tables = self.tables.pop(v)
        for scope, table in tables.items():
            at = scope.index(v)
            score = score + table.min(axis=tuple(i for i in range(len(scope)) if i != at))
        best = int(score.argmin())
        self.values[v] = best
        for scope, table in tables.items():
            for w in scope:
                if w != v:
                    self.tables[w].pop(scope, None)
            rest = tuple(w for w in scope if w != v)
            if rest:
                self._put(rest, table.take(best, axis=scope.index(v)))
        del weights[v]
        for w in self.near.pop(v):
            self.near[w].discard(v)
            weights[w] = self._weight(w)


def _least_over(v: int, tables: list[Scoped], scope: tuple[int, ...], sizes: list[int]) -> np.ndarray:
    """The least over x_v of the sum of tables, with axes as in `scope`. A large sum is never held whole."""
    place = {w: 1 + i for i, w in enumerate(scope)} | {v: 0}
    spread = []
    for names, table in sorted(tables, key=lambda t: len(t[0])):
        order = sorted(range(len(names)), key=lambda i: place[names[i]])
        shape = [1] * len(place)
        for i in order:
            shape[place[names[i]]] = sizes[names[i]]
        spread.append(table.transpose(order).reshape(shape))
    if math.prod(sizes[w] for w in place) <= HELD:
        return _sum(spread).min(axis=0)
    least = np.full([sizes[w] for w in scope], np.inf)
    for x in range(sizes[v]):
        np.minimum(least, _sum([t[x] for t in spread]), out=least)
    return least


def _sum(tables: list[np.ndarray]) -> np.ndarray:
    """The smaller ones come first: a sum is as large as it has to be, and no larger."""
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    return total
