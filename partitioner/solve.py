"""Exact minimisation of a sum of unary and pairwise tables by variable elimination, equal parts solved once.

    minimise  sum_i u_i(x_i) + sum_(i,j) t_ij(x_i, x_j)

Min-plus elimination (Dechter, "Bucket elimination", 1999): take a variable whose neighbours' joint table is smallest,
add up every table that holds it, minimise over it, keep the sum for the way back. Two things keep the cost independent
of depth:

    rounds        in each round many variables that are no neighbours of each other are eliminated, so a chain of
                  layers is halved each time
    hash-consing  tables are known by identity; an elimination is known by its tables and how they meet, and done once

A variable that many others see (every layer reads one tensor) would join them all. It is set aside: fixed at a value,
the rest solved exactly, its value bettered while that helps. Letting it differ for every reader gives a lower bound, so
the answer says how far from the least it can be. The same where the joint table would pass `LIMIT` entries.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LIMIT = 6_000_000
"""Entries of the largest table that elimination may build."""

EASY = 1_000_000
"""Entries of the largest table that is built to spare hubs."""

SLACK = 1000
"""How much larger than the least a table may be for its variable to go in the same round, if it has two neighbours at
most (which then gain none): the ends of a chain are cheaper than its middle, and would go one by one."""

MANY = 12
"""Neighbours that make a variable a hub."""


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


@dataclass(frozen=True)
class Solution:
    """`values`: the choice of each variable; `cost`: its objective; `bound`: no choice costs less."""

    values: list[int]
    cost: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether no choice can cost less."""
        return self.cost <= self.bound + 1e-9 * abs(self.bound)

    @property
    def gap(self) -> float:
        """How far above the least the cost can be, relative."""
        return (self.cost - self.bound) / self.bound if self.bound > 0 else 0.0


class Store:
    """Eliminations done so far, by the tables that went in. One store may serve many solves."""

    def __init__(self) -> None:
        self.done: dict[Any, tuple] = {}
        self.kept: list[Any] = []


def solve(problem: Problem, store: Store | None = None, hubs: Iterable[int] = ()) -> Solution:
    """The values with the least sum. `hubs`: variables to set aside, beside those with many neighbours."""
    store = store or Store()
    aside = {h for h in hubs if len(problem.unary[h]) > 1}
    hubs = sorted({*aside, *_hubs(problem, aside)[0]})
    if hubs:
        values, complete = _Elimination(problem, {}, store, EASY).run()
        if complete:
            cost = objective(problem, values)
            return Solution(values, cost, cost)
    if not hubs:
        values, complete = _Elimination(problem, {}, store).run()
        cost = objective(problem, values)
        return Solution(values, cost, cost if complete else relaxed(problem, set(), store))
    return _with_hubs(problem, hubs, store)


def objective(problem: Problem, values: list[int]) -> float:
    """The sum at given values."""
    total = sum(float(u[values[i]]) for i, u in enumerate(problem.unary))
    return total + sum(float(t[values[i], values[j]]) for (i, j), t in problem.pairs.items())


def _hubs(problem: Problem, aside: set[int], many: int = MANY) -> tuple[list[int], int]:
    """Variables to set aside beside `aside`, and the entries of all tables of the elimination without them.

    Those with more than `many` neighbours; and where elimination, played through without tables, would still pass
    `LIMIT`, the one with most neighbours there.
    """
    sizes = {i: len(u) for i, u in enumerate(problem.unary) if len(u) > 1 and i not in aside}
    near: dict[int, set[int]] = {i: set() for i in sizes}
    for i, j in problem.pairs:
        if i in near and j in near:
            near[i].add(j)
            near[j].add(i)
    hubs, entries = [i for i, n in near.items() if len(n) > many], 0
    for h in hubs:
        _remove(near, h)
    heap = [(_joint_size(near, sizes, i), i) for i in near]
    heapq.heapify(heap)
    while near:
        weight, v = heapq.heappop(heap)
        if v not in near or weight != _joint_size(near, sizes, v):
            continue  # since pushed, a neighbour has gone; it was pushed again
        if weight > LIMIT:
            heapq.heappush(heap, (weight, v))
            v = max(near, key=lambda w: (len(near[w]), -sizes[w]))
            hubs.append(v)
            touched = _remove(near, v)
        else:
            entries += weight
            touched = _remove(near, v)
            for w in touched:
                near[w] |= touched - {w}
        for w in touched:
            heapq.heappush(heap, (_joint_size(near, sizes, w), w))
    return hubs, entries


def _remove(near: dict[int, set[int]], v: int) -> set[int]:
    touched = near.pop(v)
    for w in touched:
        near[w].discard(v)
    return touched


def _joint_size(near: dict[int, set[int]], sizes: dict[int, int], v: int) -> int:
    return math.prod(sizes[w] for w in near[v]) * sizes[v]


def relaxed(problem: Problem, hubs: set[int], store: Store) -> float:
    """A lower bound: each reader of a hub may take the hub's value that suits it."""
    loose = Problem(list(problem.unary), {}, problem.sums)
    for i in hubs:
        loose.unary[i] = np.array([float(problem.unary[i].min())])
    for (i, j), table in problem.pairs.items():
        if i in hubs and j in hubs:
            continue
        if i in hubs or j in hubs:
            other = j if i in hubs else i
            loose.add(other, _least(store, table, 0 if i in hubs else 1))
        else:
            loose.pairs[i, j] = table
    values, complete = _Elimination(loose, {}, store).run()
    return objective(loose, values) if complete else sum(float(u.min()) for u in problem.unary)


def _least(store: Store, table: np.ndarray, axis: int) -> np.ndarray:
    key = ("least", id(table), axis)
    if key not in store.done:
        store.done[key] = (table.min(axis=axis), table)
    return store.done[key][0]


def _with_hubs(problem: Problem, hubs: list[int], store: Store) -> Solution:
    """Fix the hubs, solve the rest, better the hubs; from several starts."""
    bound = relaxed(problem, set(hubs), store)
    near: dict[int, list[tuple[int, np.ndarray]]] = {h: [] for h in hubs}
    for (i, j), table in problem.pairs.items():
        if i in near:
            near[i].append((j, table))
        if j in near:
            near[j].append((i, table.T))
    best: tuple[float, list[int]] | None = None
    start = {h: int(np.argmin(_alone(problem, near, h))) for h in hubs}
    seen: set[tuple] = set()
    fixed = start
    while tuple(fixed.values()) not in seen:
        seen.add(tuple(fixed.values()))
        values, _ = _Elimination(problem, fixed, store).run()
        fixed = _bettered(problem, near, values)
        cost = objective(problem, values)
        if best is None or cost < best[0]:
            best = (cost, list(values))
    assert best is not None
    best, bound = _freed(problem, hubs, best, bound, store)
    best = _one_by_one(problem, hubs, near, best, bound, store)
    return Solution(best[1], best[0], min(bound, best[0]))


def _freed(
    problem: Problem, hubs: list[int], best: tuple[float, list[int]], bound: float, store: Store
) -> tuple[tuple[float, list[int]], float]:
    """Solve with one hub free and the others fixed, hub after hub, while that helps; the bounds of the same kind."""
    free = []
    for h in hubs[:FREED]:
        more, entries = _hubs(problem, set(hubs) - {h}, len(problem.unary))
        if not more and entries <= WORTH:
            free.append(h)
    for h in free:
        if best[0] - bound > ENOUGH * abs(bound):
            bound = max(bound, relaxed(problem, set(hubs) - {h}, store))
    better = True
    while better and best[0] - bound > ENOUGH * abs(bound):
        better = False
        for h in free:
            values, _ = _Elimination(problem, {g: best[1][g] for g in hubs if g != h}, store).run()
            cost = objective(problem, values)
            if cost < best[0] - 1e-12 * abs(best[0]):
                best, better = (cost, values), True
    return best, bound


def _bettered(problem: Problem, near: dict, values: list[int]) -> dict[int, int]:
    """Each hub at its best beside all other values."""
    for h, tables in near.items():
        values[h] = int(np.argmin(problem.unary[h] + sum(t[:, values[j]] for j, t in tables)))
    return {h: values[h] for h in near}


ENOUGH = 1e-3
"""A relative gap below which hubs are not searched further."""

FREED = 8
"""So many hubs are freed at most."""

WORTH = 20_000_000
"""Entries of all tables up to which a hub is freed."""

TRIES = 8
"""Values of hubs that are tried with all else solved anew, the likeliest first."""


def _one_by_one(
    problem: Problem, hubs: list[int], near: dict, best: tuple, bound: float, store: Store
) -> tuple[float, list[int]]:
    """While the gap is open, try values of hubs with the rest solved anew."""
    likely = sorted((float(c), h, v) for h in hubs for v, c in enumerate(_alone(problem, near, h)) if v != best[1][h])
    for _, h, value in likely[:TRIES]:
        if best[0] - bound <= ENOUGH * abs(bound):
            break
        fixed = {g: best[1][g] for g in hubs} | {h: value}
        values, _ = _Elimination(problem, fixed, store).run()
        cost = objective(problem, values)
        if cost < best[0]:
            best = (cost, values)
    return best


def _alone(problem: Problem, near: dict, h: int) -> np.ndarray:
    """What each value of a hub costs at least above its best, its readers as suits them."""
    cost = problem.unary[h] + sum((t.min(axis=1) for _, t in near[h]), np.zeros(len(problem.unary[h])))
    return cost - cost.min()


class _Elimination:
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
        self.order: list[tuple[int, tuple[int, ...], np.ndarray]] = []
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

    def _near(self, v: int) -> set[int]:
        return {w for scope in self.tables[v] for w in scope} - {v}

    def _weight(self, v: int) -> int:
        size = self.sizes[v]
        for w in self._near(v):
            size *= self.sizes[w]
        return size

    def run(self) -> tuple[list[int], bool]:
        weights = {v: self._weight(v) for v in self.tables}
        while self.tables:
            least = min(weights.values())
            if least > self.limit:
                if self.limit < LIMIT:
                    return [], False
                self._give_up(weights)
                continue
            blocked: set[int] = set()
            touched: set[int] = set()
            for w, v in sorted((w, v) for v, w in weights.items() if w <= min(self.limit, least * SLACK)):
                if v in blocked or (w > least and len(self._near(v)) > 2):
                    continue
                near = self._near(v)
                blocked |= near | {v}
                touched |= near
                self._eliminate(v)
                del weights[v]
            for w in touched:
                if w in weights:
                    weights[w] = self._weight(w)
        for v, scope, joint in reversed(self.order):
            self.values[v] = int(joint[tuple(self.values[w] for w in scope)].argmin())
        return [self.values[i] for i in range(len(self.sizes))], self.complete

    def _eliminate(self, v: int) -> None:
        tables = sorted(self.tables.pop(v).items())
        scope = tuple(sorted({w for s, _ in tables for w in s} - {v}))
        role = {w: i for i, w in enumerate(scope)} | {v: -1}
        key = tuple((id(t), *(role[w] for w in s)) for s, t in tables)
        made = self.store.done.get(key)
        if made is None:
            joint = _sum_over([(s, t) for s, t in tables], (*scope, v), self.sizes)
            made = self.store.done[key] = (joint, joint.min(axis=-1), tables)
        for s, _ in tables:
            for w in s:
                if w != v:
                    self.tables[w].pop(s, None)
        self.order.append((v, scope, made[0]))
        if scope:
            self._put(scope, made[1])

    def _give_up(self, weights: dict[int, int]) -> None:
        """Condition on the variable with most neighbours: its best value, the neighbours at their least."""
        self.complete = False
        v = max(self.tables, key=lambda w: (len(self._near(w)), -w))
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
        for w in {w for scope in tables for w in scope} - {v}:
            weights[w] = self._weight(w)


def _sum_over(tables: list[tuple[tuple[int, ...], np.ndarray]], scope: tuple[int, ...], sizes: list[int]) -> np.ndarray:
    """The sum of tables as one over `scope`, whose last variable may be out of order."""
    out = np.zeros([sizes[v] for v in scope])
    place = {v: i for i, v in enumerate(scope)}
    for names, table in tables:
        order = sorted(range(len(names)), key=lambda i: place[names[i]])
        shape = [1] * len(scope)
        for i in order:
            shape[place[names[i]]] = sizes[names[i]]
        out += table.transpose(order).reshape(shape)
    return out
