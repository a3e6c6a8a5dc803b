"""The primitive moves between the states of one tensor: what `collective.path` searches and `transitions` tabulates.

A state is (marks, partial): of each factor the axes that split it, outermost first, and the partial marks. A move is
one collective (or a local slice or zeroing) over some axes:

    all_reduce       partial -> whole                  any partial axes of one op at once
    reduce_scatter   partial -> split                  one axis onto any open factor
    all_gather       split -> whole                    the last axes of a factor
    all_to_all       split -> split elsewhere          the last axes of a factor onto another
    permute          same pieces, other owners         a renaming of axes of equal size
    slice, zero      whole -> split, whole -> sum      nothing is sent

All states are held as arrays, of each axis its place (the factor that it splits, WHOLE, or PARTIAL less the number of
its op) and its rank among the axes of that factor, so that a move is made from all states at once that it can leave.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

Marks = tuple[tuple[str, ...], ...]
Partial = tuple[tuple[str, str], ...]
State = tuple[Marks, Partial]

WHOLE, PARTIAL = -1, -2

LOCAL_KINDS = frozenset({"slice", "zero"})
"""Primitives that send nothing."""


class Move(NamedTuple):
    """A kind of edge; `source` (gathered) and `target` (split) are indices of factors, -1 where there is none."""

    kind: str
    axes: tuple[str, ...]
    source: int = -1
    target: int = -1
    op: str = "sum"


class Edges(NamedTuple):
    """A move from every state that it can leave, by their numbers, and the states that it enters."""

    move: Move
    leaves: np.ndarray
    enters: np.ndarray


class States:
    """Every state of a tensor of so many open factors on these axes.

    Attributes:
        states, index: the states, and the number of each.
        by_place: the number of the state whose axes stand in mesh order, by the place of each axis, counted from the
            last op.
        place, rank: (states, axes); see above.
        count: (states, factors): how many axes split each factor.
    """

    def __init__(self, names: tuple[str, ...], factors: int, ops: tuple[str, ...]):
        self.names, self.factors, self.ops = names, factors, ops
        listed = list(_states(names, factors, ops))
        self.states = [s for _, s in listed]
        self.index = {s: i for i, s in enumerate(self.states)}
        shape = (len(listed), len(names))
        self.place = np.array([place for place, _ in listed], dtype=np.intp).reshape(shape)
        self.by_place = np.zeros((factors + 1 + len(ops),) * len(names), dtype=np.intp)
        backwards = np.arange(len(listed))[::-1]  # the first at a place is in mesh order, and is written last
        if names:  # else there is one state, the first
            self.by_place[tuple((self.place[backwards] + 1 + len(ops)).T)] = backwards
        ranks = [{a: r for some in marks for r, a in enumerate(some)} for marks, _ in self.states]
        self.rank = np.array([[of.get(a, 0) for a in names] for of in ranks], dtype=np.intp).reshape(shape)
        self.count = (self.place[:, None, :] == np.arange(factors)[:, None]).sum(axis=2)
        # a state's code: per axis where it stands (its place and its rank there), times the unit of the axis
        self._stands = (self.place + 1 + len(ops)) * len(names) + self.rank
        self._units = ((factors + 1 + len(ops)) * len(names)) ** np.arange(len(names), dtype=np.int64)
        self._codes = self._stands @ self._units
        self._by_code = np.argsort(self._codes)
        self._sorted = self._codes[self._by_code]

    def _numbers(self, codes: np.ndarray) -> np.ndarray:
        return self._by_code[np.searchsorted(self._sorted, codes)]

    def moved(self, move: Move, leaves: np.ndarray, axes: tuple[int, ...], to: int) -> Edges:
        """The edges that put these axes, in this order, at a place."""
        if not len(leaves):
            return Edges(move, leaves, leaves)
        codes, first = self._codes[leaves], (to + 1 + len(self.ops)) * len(self.names)
        rank = self.count[leaves, to] if to >= 0 else 0
        for n, a in enumerate(axes):
            codes += (first + rank + (n if to >= 0 else 0) - self._stands[leaves, a]) * self._units[a]
        return Edges(move, leaves, self._numbers(codes))

    def renamed(self, move: Move, leaves: np.ndarray, order: list[int]) -> Edges:
        """The edges after which each axis stands where the axis `order` names stood."""
        enters = self._numbers(self._stands[leaves][:, order] @ self._units)
        return Edges(move, leaves[enters != leaves], enters[enters != leaves])


def _states(
    names: tuple[str, ...], factors: int, ops: tuple[str, ...]
) -> Iterator[tuple[tuple[int, ...], State]]:
    for where in itertools.product(range(WHOLE - len(ops), factors), repeat=len(names)):
        partial = tuple(sorted((a, ops[PARTIAL - w]) for a, w in zip(names, where, strict=True) if w <= PARTIAL))
        groups = [[a for a, w in zip(names, where, strict=True) if w == f] for f in range(factors)]
        for marks in itertools.product(*(itertools.permutations(g) for g in groups)):
            yield where, (tuple(marks), partial)


def moves(s: States, sizes: Mapping[str, int]) -> Iterator[Edges]:
    """Every move from every state. `sizes`: of the axes; those of one size may be renamed. `s.ops` has "sum"."""
    yield from _reductions(s)
    yield from _regroupings(s)
    for a, name in enumerate(s.names):
        whole = np.flatnonzero(s.place[:, a] == WHOLE)
        for j in range(s.factors):
            yield s.moved(Move("slice", (name,), target=j), whole, (a,), j)
        yield s.moved(Move("zero", (name,)), whole, (a,), PARTIAL - s.ops.index("sum"))
    yield from _renamings(s, sizes)


def _reductions(s: States) -> Iterator[Edges]:
    for o, op in enumerate(s.ops):
        partial = s.place == PARTIAL - o
        for n in range(1, len(s.names) + 1):
            for axes in itertools.combinations(range(len(s.names)), n):
                leaves = np.flatnonzero(partial[:, axes].all(axis=1))
                yield s.moved(Move("all_reduce", _names(s, axes), op=op), leaves, axes, WHOLE)
        for a, name in enumerate(s.names):
            leaves = np.flatnonzero(partial[:, a])
            for j in range(s.factors):
                yield s.moved(Move("reduce_scatter", (name,), target=j, op=op), leaves, (a,), j)


def _regroupings(s: States) -> Iterator[Edges]:
    for i in range(s.factors):
        on = s.place == i
        for n in range(1, len(s.names) + 1):
            for axes in itertools.permutations(range(len(s.names)), n):
                last = s.count[:, i, None] - n + np.arange(n)
                leaves = np.flatnonzero((on[:, axes] & (s.rank[:, axes] == last)).all(axis=1))
                yield s.moved(Move("all_gather", _names(s, axes), source=i), leaves, axes, WHOLE)
                for j in range(s.factors):
                    if j != i:
                        yield s.moved(Move("all_to_all", _names(s, axes), source=i, target=j), leaves, axes, j)


def _renamings(s: States, sizes: Mapping[str, int]) -> Iterator[Edges]:
    """Every renaming of axes among those of one size; a renamed axis is not partial."""
    for new in itertools.permutations(range(len(s.names))):
        axes = tuple(a for a, b in enumerate(new) if a != b)
        if axes and all(sizes[s.names[a]] == sizes[s.names[b]] for a, b in enumerate(new)):
            leaves = np.flatnonzero((s.place[:, axes] > PARTIAL).all(axis=1))
            order = [new.index(a) for a in range(len(new))]
            yield s.renamed(Move("permute", _names(s, axes)), leaves, order)


def _names(s: States, axes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(s.names[a] for a in axes)
