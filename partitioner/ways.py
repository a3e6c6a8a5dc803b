"""What simpler calls may do under each way of splitting the call that they are written out for, and their least sum.

On an axis where the call asks to be written out, or runs on partial sums, they may split what its ends split there, run
on partial sums, or run whole. Where it only splits a dim, or nothing, they do the same as far as they can: whatever
else they did would be undone at the ends.

    least(way) = min over values that fit the way of  sum_i u_i(x_i) + sum_(i,j) t_ij(x_i, x_j)

Ways differ in the values that fit and in nothing else, so variables are eliminated (`elimination.py`) for many ways at
once: a table has the ways as its first axis, and of each variable as many values as the way with most of them. Fewer
are filled up by one of them again, which changes no minimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .elimination import HELD, Problem
from .factors import Factored

if TYPE_CHECKING:
    from .tables import Variable

WHOLE, PARTIAL = -1, -2
"""Stand for an atom where nothing is split."""


class Ends(NamedTuple):
    """What stands around simpler calls: per axis the atoms that are split there, and whether calls must do as it says
    where they can."""

    atoms: tuple[frozenset[int], ...]
    exact: tuple[bool, ...]


class Values:
    """The values of a variable by the atoms that they split."""

    def __init__(self, variable: Variable, factored: Factored):
        self.columns, self.place = _atoms_of(variable, factored)
        self._known: dict[tuple, np.ndarray] = {}

    def fitting(self, ends: Ends) -> np.ndarray:
        """The numbers of the values that fit; of all where none does."""
        kept = np.ones(len(self.place), dtype=bool)
        for axis, own in enumerate(self.columns):
            key = (axis, ends.atoms[axis], ends.exact[axis])
            if key not in self._known:
                self._known[key] = _fits(own, *key[1:])[self.place[:, axis]]
            kept &= self._known[key]
        return np.flatnonzero(kept) if kept.any() else np.arange(len(kept))


def _atoms_of(variable: Variable, factored: Factored) -> tuple[list[list[int]], np.ndarray]:
    """Per axis the atoms that are split there, and of each value which of those it is on each axis."""
    made = variable.joint
    if made is not None:
        named = {m.atom[leaf]: a for m in variable.members for leaf, a in factored.atoms[m.node].items()}
        kinds = ((v[1] if isinstance(v, tuple) else v for v in values) for values in made.values)
        alone = [[isinstance(v, tuple) for v in values] for values in made.values]
        return [
            [named[v] if split else WHOLE if v is None else PARTIAL for v, split in zip(own, splits, strict=True)]
            for own, splits in zip(kinds, alone, strict=True)
        ], made.joint
    assert variable.states is not None
    atoms = [a for d in variable.dims for a in d]
    codes = np.array(variable.states.unique, dtype=np.intp).reshape(len(variable.states.unique), -1)
    found, place = [], np.empty_like(codes)
    for axis in range(codes.shape[1]):
        own, place[:, axis] = np.unique(codes[:, axis], return_inverse=True)
        found.append([atoms[c - 1] if c > 0 else WHOLE if c == 0 else PARTIAL for c in own.tolist()])
    return found, place


def _fits(own: Sequence[int], atoms: frozenset[int], exact: bool) -> np.ndarray:
    same = np.array([a in atoms for a in own], dtype=bool)
    whole = np.array([a == WHOLE for a in own], dtype=bool)
    if exact:
        return same if same.any() else whole
    return same | whole | np.array([a == PARTIAL for a in own], dtype=bool)


def least(problem: Problem, at: int, rows: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Per way the least sum. `rows`: per way and variable the values that fit; the value of `at` is the way."""
    found = np.empty(len(rows))
    order = sorted(range(len(rows)), key=lambda way: sum(map(len, rows[way])))  # those alike in size go together
    while order:
        some = order[-1:]  # the largest that is left, and as many as stay in the cache beside it
        first_to_last, widest = _order(problem, [len(r) for r in rows[some[0]]])
        count = max(1, HELD // widest)
        some, order = order[-count:], order[:-count]
        found[some] = _eliminated(problem, at, [rows[way] for way in some], some, first_to_last)
    return found


def _order(problem: Problem, sizes: list[int]) -> tuple[list[int], int]:
    """An order of elimination, that with the smallest joint table first; and the entries of the largest."""
    near: dict[int, set[int]] = {i: set() for i in range(len(sizes))}
    for i, j in problem.pairs:
        near[i].add(j)
        near[j].add(i)
    order, widest = [], 1
    while near:
        weights = {v: sizes[v] * math.prod(sizes[w] for w in some) for v, some in near.items()}
        v = min(weights, key=lambda v: (weights[v], v))
        widest = max(widest, weights[v])
        order.append(v)
        around = near.pop(v)
        for w in around:
            near[w] |= around - {w}
            near[w].discard(v)
    return order, widest


def _eliminated(
    problem: Problem, at: int, rows: list[Sequence[np.ndarray]], ways: list[int], order: list[int]
) -> np.ndarray:
    values = [_filled(own) for own in zip(*rows, strict=True)]
    values[at] = np.array(ways)[:, None]
    tables: dict[tuple[int, ...], np.ndarray] = {(i,): u[values[i]] for i, u in enumerate(problem.unary)}
    for (i, j), t in problem.pairs.items():
        tables[i, j] = t[values[i][:, :, None], values[j][:, None, :]]
    total = np.zeros(len(ways))
    for v in order:
        mine = [s for s in tables if v in s]
        scope = tuple(sorted({w for s in mine for w in s} - {v}))
        made = _joined(((s, tables.pop(s)) for s in sorted(mine, key=len)), (*scope, v)).min(axis=-1)
        if scope in tables:
            made = made + tables[scope]
        if scope:
            tables[scope] = made
        else:
            total = total + made
    return total


def _filled(own: Sequence[np.ndarray]) -> np.ndarray:
    """(ways, most values)"""
    most = max(map(len, own))
    return np.stack([np.concatenate([r, np.full(most - len(r), r[0])]) for r in own])


def _joined(tables: Iterable[tuple[tuple[int, ...], np.ndarray]], scope: tuple[int, ...]) -> np.ndarray:
    """The sum, with the ways and then the variables of `scope` as axes."""
    total: np.ndarray | None = None
    for s, t in tables:
        axes = sorted(range(len(s)), key=lambda k: scope.index(s[k]))
        shape = [t.shape[0], *[1] * len(scope)]
        for k in axes:
            shape[1 + scope.index(s[k])] = t.shape[1 + k]
        spread = t.transpose(0, *[1 + k for k in axes]).reshape(shape)
        total = spread if total is None else total + spread
    assert total is not None
    return total
