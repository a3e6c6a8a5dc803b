"""The states of one tensor under every value of a group, and prices between two such lists.

A state says of each mesh axis whether it splits a factor of the tensor, leaves a partial sum, or does nothing. A group
of a hundred values gives a tensor a dozen different states; prices are looked up between those and spread over the
values:

    price[x, y] = D[state given by x, state needed by y]          (D: `transitions.Transitions`)

A dim seen through a window is reached as `collective.path` does it: from a layout w without windows, its own piece held
or the whole dim, then a halo or a slice.

    price[x, y] = min over w of  D[state given by x, w] + seconds(w -> state needed by y)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from . import halo, transitions
from .buckets import Bucket
from .collective import seconds, window_steps
from .layout import Factor, Layout
from .mesh import Mesh
from .strategies import Seen, State
from .transitions import STEP, Transitions, open_factors

WHOLE = 0
OPS = {"sum": -1, "max": -2, "min": -3}
"""Codes of a state on one axis: WHOLE, an op, or 1 + the factor split (its place among the tensor's factors)."""

FIRST = min(OPS.values())
"""The least code."""

UNREACHABLE = 1e9
"""Seconds of what no path joins."""

FEW_AXES = 3
"""On meshes of more axes, factors that neither end splits take no part in a reshard."""


@dataclass(eq=False)
class States:
    """Per value of a variable the state of one tensor.

    Attributes:
        unique: the distinct states, per axis of the mesh a code.
        place: per value the index of its state in `unique`.
        seen: per (index in `unique`, axis) what is seen through a window there.
        marks: for parameters, per unique state the ordered axes of each factor; None: axes stand in mesh order.
    """

    unique: list[tuple[int, ...]]
    place: np.ndarray
    seen: dict[tuple[int, int], Seen] = field(default_factory=dict)
    marks: list[tuple[tuple[str, ...], ...]] | None = None

    @cached_property
    def codes(self) -> np.ndarray:
        """(unique states, axes)"""
        return np.array(self.unique, dtype=np.intp).reshape(len(self.unique), -1)

    @cached_property
    def used(self) -> frozenset[int]:
        """The factors that some state splits."""
        return frozenset(c - 1 for state in self.unique for c in state if c > 0)

    @cached_property
    def ops(self) -> frozenset[str]:
        return frozenset(op for op, code in OPS.items() if any(code in state for state in self.unique))


def code_of(state: State | Seen, offsets: Sequence[int]) -> int:
    """The code of a state on one axis; `offsets`: per dim how many factors stand before it."""
    if isinstance(state, Seen):
        state = state.spot
    if state is None:
        return WHOLE
    if isinstance(state, str):
        return OPS[state]
    return 1 + offsets[state[0]] + state[1]


def states_of(per_axis: Sequence[Sequence[State | Seen]], joint: np.ndarray, factors: Sequence[int]) -> States:
    """From the state of each value on each axis, and the joint values (values, axes), the joint states.

    `factors`: per dim of the tensor its number of factors.
    """
    offsets = [sum(factors[:i]) for i in range(len(factors))]
    codes = [np.array([code_of(s, offsets) for s in states]) for states in per_axis]
    columns = [c[joint[:, i]] for i, c in enumerate(codes)]
    key = np.zeros(len(joint), dtype=np.int64)
    for column in columns:
        key = key * 64 + (column + 3)
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    made = States([tuple(int(c[i]) for c in columns) for i in first], place.reshape(-1))
    for n, i in enumerate(first):
        for axis, states in enumerate(per_axis):
            state = states[joint[i, axis]]
            if isinstance(state, Seen):
                made.seen[n, axis] = state
    return made


def layout_states(layouts: Sequence[Layout], names: tuple[str, ...]) -> States:
    """The states of given layouts, the order of axes on a factor kept."""
    unique, marks = [], []
    for layout in layouts:
        flat = [f.axes for d in layout.dims for f in d]
        code = {a: 1 + i for i, axes in enumerate(flat) for a in axes}
        code |= {a: OPS[op] for a, op in layout.partial}
        unique.append(tuple(code.get(a, WHOLE) for a in names))
        marks.append(tuple(flat))
    return States(unique, np.arange(len(unique)), marks=marks)


class Prices:
    """Seconds between states of tensors on one mesh."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.axes = tuple((a, n) for a, n in mesh.axes if n > 1 and mesh.role(a) != "pipeline")
        self.names = tuple(a for a, _ in self.axes)
        self._known: dict[tuple, tuple[np.ndarray, States, States]] = {}
        self._windows: dict[tuple, list[tuple[Layout, float]]] = {}
        self._partial_of: dict[int, tuple[list, States]] = {}

    def between(
        self, lengths: tuple[int, ...], itemsize: int, have: States, want: States, bucket: Bucket | None = None
    ) -> np.ndarray:
        """(unique states of `have`, unique states of `want`): seconds. `lengths`: the tensor's factors."""
        key = (lengths, itemsize, id(have), id(want), bucket)
        found = self._known.get(key)
        if found is None:
            priced = self._priced(lengths, itemsize, have, want, bucket)
            found = self._known[key] = (priced, have, want)  # held: known by id
        return found[0]

    def union(self, some: Sequence[States], factors: int) -> States:
        """Every state of some lists once, for a tensor of so many factors; orders of axes count where one has them."""
        if all(s.marks is None for s in some):
            unique = dict.fromkeys(c for s in some for c in s.unique)
            return States(list(unique), np.arange(len(unique)))
        found: dict[tuple, None] = {}
        for s in some:
            plain = (self._in_mesh_order(c, factors) for c in s.unique)
            found |= dict.fromkeys(zip(s.unique, s.marks if s.marks is not None else plain, strict=True))
        return States([c for c, _ in found], np.arange(len(found)), marks=[m for _, m in found])

    def _in_mesh_order(self, state: tuple[int, ...], factors: int) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(a for a, c in zip(self.names, state, strict=True) if c == f + 1) for f in range(factors))

    def _priced(
        self, lengths: tuple[int, ...], itemsize: int, have: States, want: States, bucket: Bucket | None
    ) -> np.ndarray:
        used = set(have.used | want.used)
        chosen = open_factors(used, lengths) if len(self.axes) <= FEW_AXES else tuple(sorted(used))
        rest = math.prod(n for i, n in enumerate(lengths) if i not in chosen)
        ops = tuple(sorted({"sum"} | have.ops | want.ops))
        spanned = tuple(lengths[i] for i in chosen)
        table = transitions.transitions(self.axes, ops, spanned, float(rest * itemsize), self.mesh)
        rows, columns = self._numbers(table, have, chosen, ops), self._numbers(table, want, chosen, ops)
        found = table.in_bucket(rows, bucket)
        price = np.minimum(found[:, columns], UNREACHABLE)
        if want.seen:
            self._through_windows(lengths, itemsize, price, want, _To(table, chosen, table.rows(rows)))
        return price

    def _numbers(self, table: Transitions, states: States, chosen: tuple[int, ...], ops: tuple[str, ...]) -> np.ndarray:
        """The number in a table of each unique state."""
        if states.marks is None:
            return table.shape.by_place[tuple(_places(chosen, ops)[states.codes - FIRST].T)].reshape(-1)
        index, partial = table.shape.index, self._partials(states)
        return np.array([index[tuple([m[f] for f in chosen]), p] for m, p in zip(states.marks, partial, strict=True)])

    def _partials(self, states: States) -> list[tuple[tuple[str, str], ...]]:
        """Per unique state the axes over which it is partial."""
        found = self._partial_of.get(id(states))
        if found is None:
            named = {code: op for op, code in OPS.items()}
            each = ([(a, named[c]) for a, c in zip(self.names, s, strict=True) if c < 0] for s in states.unique)
            found = self._partial_of[id(states)] = ([tuple(sorted(some)) for some in each], states)  # held: known by id
        return found[0]

    def _through_windows(self, lengths: tuple[int, ...], size: int, price: np.ndarray, want: States, to: _To) -> None:
        """Put the seconds of the needs that see through windows in their columns of `price`."""
        for j in dict.fromkeys(j for j, _ in want.seen):
            ways = [(to.rows[:, to.number(start)], after) for start, after in self._ways(lengths, size, want, j)]
            price[:, j] = np.minimum(np.minimum.reduce([first + after for first, after in ways]), UNREACHABLE)

    def _ways(self, lengths: tuple[int, ...], itemsize: int, want: States, j: int) -> list[tuple[Layout, float]]:
        """The layouts, without windows, that lead to a need, and the seconds from there on: `halo.ways`."""
        marks = want.marks[j] if want.marks is not None else self._in_mesh_order(want.unique[j], len(lengths))
        seen = {want.unique[j][axis] - 1: s for (n, axis), s in want.seen.items() if n == j}
        key = (lengths, itemsize, want.unique[j], marks, tuple(seen.items()))
        if key not in self._windows:
            before, after = _layouts(lengths, marks, seen)
            named = {code: op for op, code in OPS.items()}
            partial = tuple(sorted((a, named[c]) for a, c in zip(self.names, want.unique[j], strict=True) if c < 0))
            found = self._windows[key] = []
            for way in halo.ways(before, replace(after, partial=partial)):
                took = sum(seconds(s, self.mesh, itemsize) + STEP for s in window_steps(way, self.mesh))
                found.append((way[0], took))
        return self._windows[key]


@lru_cache(maxsize=4096)
def _places(chosen: tuple[int, ...], ops: tuple[str, ...]) -> np.ndarray:
    """By code, from the first on: its place in a table of these factors, counted from the last op (`moves.States`)."""
    place = np.zeros(max(chosen, default=-1) + 2 - FIRST, dtype=np.intp)
    place[[OPS[op] - FIRST for op in ops]] = len(ops) - 1 - np.arange(len(ops))
    place[WHOLE - FIRST] = len(ops)
    place[[1 + f - FIRST for f in chosen]] = len(ops) + 1 + np.arange(len(chosen))
    return place


@dataclass(frozen=True)
class _To:
    """A table of transitions read from some states: `rows` of seconds to each of its states."""

    table: Transitions
    chosen: tuple[int, ...]
    rows: np.ndarray

    def number(self, layout: Layout) -> int:
        flat = [f.axes for d in layout.dims for f in d]
        return self.table.shape.index[tuple([flat[i] for i in self.chosen]), layout.partial]


def _layouts(
    lengths: tuple[int, ...], marks: tuple[tuple[str, ...], ...], seen: Mapping[int, Seen]
) -> tuple[Layout, Layout]:
    """A tensor of these factors whole, and as it is needed; `seen`: by the first factor of a dim what sees it.

    Dims that no window sees are of one factor each: to a window it is all the same.
    """
    before, after, i = [], [], 0
    while i < len(lengths):
        size, stop = lengths[i], i + 1
        while i in seen and size < seen[i].size:
            size, stop = size * lengths[stop], stop + 1
        before.append(tuple(Factor(n) for n in lengths[i:stop]))
        after.append((Factor(size, marks[i], seen[i].through if i in seen else None),))
        i = stop
    return Layout(tuple(before)), Layout(tuple(after))


def local_bytes(lengths: tuple[int, ...], itemsize: int, states: States, prices: Prices) -> np.ndarray:
    """Per unique state the bytes of the largest local tensor."""
    found = []
    for state in states.unique:
        local = list(lengths)
        for code, (_, ranks) in zip(state, prices.axes, strict=True):
            if code > 0:
                local[code - 1] = -(-local[code - 1] // ranks)
        found.append(float(math.prod(local) * itemsize))
    return np.array(found)
