"""A smaller problem with the same least: what can be decided beforehand is taken out, equal parts once.

    few        a variable with two neighbours at most is minimised over, which leaves a table between the two
    dominated  value a of i goes where some b that stays is never dearer:
                   u_i(a) - u_i(b) + sum over j of  min over x of t_ij(a, x) - t_ij(b, x)  >= 0

The second is dead-end elimination (Goldstein, "Efficient rotamer elimination", 1994). Tables are known by identity, as
in `elimination.py`: what is done to one layer is done to all that are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .elimination import HELD, Problem, Store

ROUNDS = 3
"""So often what dominates is looked for anew: along a chain of layers each time shows a little more."""

JOINT = 20_000_000
"""Entries of the largest joint table of three variables that one of them is minimised out of."""


class _Gone(NamedTuple):
    """A variable that was minimised over: its own costs, its neighbours with their tables (own values first) and the
    values that each of them still had."""

    variable: int
    unary: np.ndarray
    near: tuple[tuple[int, np.ndarray, np.ndarray], ...]


class Presolved:
    """`problem`: what is left. `numbers`: of each of its variables the number in the problem that was given."""

    def __init__(self, problem: Problem, store: Store):
        self.store, self.constant = store, 0.0
        self.unary = dict(enumerate(problem.unary))
        self.kept = {i: self._once(("all", len(u)), (), lambda u=u: np.arange(len(u))) for i, u in self.unary.items()}
        self.near: dict[int, dict[int, np.ndarray]] = {i: {} for i in self.unary}
        self.gone: list[_Gone] = []
        for (i, j), table in problem.pairs.items():
            self.near[i][j], self.near[j][i] = table, self._turned(table)
        todo = set(self.unary)
        for _ in range(ROUNDS):
            self._take_out(sorted(todo))
            todo = self._drop(sorted(todo & self.unary.keys()))
        self._take_out(sorted(todo))
        self.numbers = sorted(self.unary)
        at = {i: n for n, i in enumerate(self.numbers)}
        self.problem = Problem([self.unary[i] for i in self.numbers])
        self.problem.pairs = {(at[i], at[j]): t for i in at for j, t in self.near[i].items() if i < j}

    def values(self, left: list[int]) -> list[int]:
        """The values of the problem that was given, from those of `problem`."""
        found = {i: int(self.kept[i][x]) for i, x in zip(self.numbers, left, strict=True)}
        for v, unary, near in reversed(self.gone):
            costs = unary
            for w, table, kept in near:
                costs = costs + table[:, int(np.searchsorted(kept, found[w]))]
            found[v] = int(self.kept[v][costs.argmin()])
        return [found[i] for i in range(len(found))]

    # what has few neighbours
    def _take_out(self, todo: list[int]) -> None:
        """In rounds of variables that are no neighbours: a chain of equal parts is halved each time."""
        while todo:
            blocked: set[int] = set()
            for v in todo:
                if v in self.unary and v not in blocked and self._is_simple(v):
                    blocked |= self._minimise(v)
            todo = sorted(blocked)

    def _is_simple(self, v: int) -> bool:
        own, near = len(self.unary[v]), [len(self.unary[w]) for w in self.near[v]]
        return own == 1 or len(near) < 2 or (len(near) == 2 and own * near[0] * near[1] <= JOINT)

    def _minimise(self, v: int) -> set[int]:
        """Returns its neighbours."""
        some = sorted(self.near[v])
        own, tables = self.unary.pop(v), [self.near[v][w] for w in some]
        self.gone.append(_Gone(v, own, tuple((w, t, self.kept[w]) for w, t in zip(some, tables, strict=True))))
        del self.near[v]
        for w in some:
            del self.near[w][v]
        if not some:
            self.constant += float(own.min())
        elif len(own) == 1:
            self.constant += float(own[0])
            for w, t in zip(some, tables, strict=True):
                self._add(w, self._once(("row", id(t)), t, lambda t=t: t[0]))
        elif len(some) == 1:
            t = tables[0]
            self._add(some[0], self._once(("below", id(own), id(t)), (own, t), lambda: (own[:, None] + t).min(axis=0)))
        else:
            key = ("through", id(own), *map(id, tables))
            self._join(some[0], some[1], self._once(key, (own, tables), lambda: _through(own, *tables)))
        return set(some)

    def _add(self, w: int, costs: np.ndarray) -> None:
        self.unary[w] = self._sum(self.unary[w], costs)

    def _join(self, a: int, b: int, table: np.ndarray) -> None:
        table = self._sum(self.near[a][b], table) if b in self.near[a] else table
        self.near[a][b], self.near[b][a] = table, self._turned(table)

    # what is dominated
    def _drop(self, todo: list[int]) -> set[int]:
        """Returns the variables around those that lost values."""
        touched: set[int] = set()
        for i in todo:
            own, tables = self.unary[i], list(self.near[i].values())
            if len(own) > 1:
                key = ("stays", id(own), *sorted(map(id, tables)))
                stays = self._once(key, (own, tables), lambda own=own, tables=tables: self._staying(own, tables))
                if not stays.all():
                    touched |= self._keep(i, stays)
        return touched

    def _staying(self, own: np.ndarray, tables: list[np.ndarray]) -> np.ndarray:
        """Which values stay. Whether b is never dearer than a is asked where it is not when all others suit a best."""
        most = own[:, None] - own
        for t in tables:
            most = most + self._once(("most", id(t)), (t,), lambda t=t: _over_at_best(t))
        np.fill_diagonal(most, -np.inf)
        a, b = np.nonzero(most >= 0.0)
        stays = np.ones(len(own), dtype=bool)
        if not len(a):
            return stays
        least = own[a] - own[b]
        for t in tables:
            least = least + _over(t, a, b)
        a, b = a[least >= 0.0], b[least >= 0.0]
        for x in np.unique(a)[::-1]:  # of equals the first stays
            stays[x] = not stays[b[a == x]].any()
        return stays

    def _keep(self, i: int, stays: np.ndarray) -> set[int]:
        """Keep these values of i alone."""
        mask = stays.tobytes()

        def cut(x: np.ndarray, axis: int) -> np.ndarray:
            return self._once(("cut", id(x), axis, mask), (x,), lambda: x.compress(stays, axis=axis))

        self.unary[i], self.kept[i] = cut(self.unary[i], 0), cut(self.kept[i], 0)
        for j in self.near[i]:
            table = self.near[i][j] = cut(self.near[i][j], 0)
            self.near[j][i] = self._turned(table)
        return {i, *self.near[i]}

    # tables known by what they were made of
    def _once(self, key: Any, parts: Any, make: Callable[[], np.ndarray]) -> np.ndarray:
        found = self.store.done.get(key)
        if found is None:
            found = self.store.done[key] = (make(), parts)
        return found[0]

    def _sum(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self._once(("+", id(a), id(b)), (a, b), lambda: a + b)

    def _turned(self, table: np.ndarray) -> np.ndarray:
        """The table the other way round; turned again it is itself."""
        found = self.store.done.get(("turned", id(table)))
        if found is None:
            turned = np.ascontiguousarray(table.T)
            found = self.store.done["turned", id(table)] = (turned, table)
            self.store.done["turned", id(turned)] = (table, turned)
        return found[0]


def _through(own: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(x, y): the least over v of own(v) + left(v, x) + right(v, y)."""
    first = left + own[:, None]
    if first.shape[1] < right.shape[1]:
        return np.stack([(first[:, [x]] + right).min(axis=0) for x in range(first.shape[1])])
    return np.stack([(first + right[:, [y]]).min(axis=0) for y in range(right.shape[1])], axis=1)


def _over_at_best(table: np.ndarray) -> np.ndarray:
    """(a, b): how much dearer a is than b where the other does what suits a best."""
    best = table.argmin(axis=1)
    return table[np.arange(len(table)), best][:, None] - table[:, best].T


def _over(table: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of each pair how much dearer a is than b at least, whatever the other does."""
    least, step = np.empty(len(a)), max(1, HELD // table.shape[1])
    for i in range(0, len(a), step):
        least[i : i + step] = (table[a[i : i + step]] - table[b[i : i + step]]).min(axis=1)
    return least
