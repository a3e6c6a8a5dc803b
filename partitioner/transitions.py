"""Every state of one tensor, and the seconds of the cheapest way from each to each.

States and primitive moves (`moves.py`) make a weighted graph; the cheapest ways are its shortest paths, found for whole
rows of sources at once by relaxing all edges until nothing changes (Bellman-Ford; a way has few moves, so few rounds):

    D[s, v] = min( D[s, v],  min over edges (u, v) of D[s, u] + w(u, v) )

The graph's shape depends on the mesh and on the number of factors alone, so it is made once; its weights depend on the
sizes. `collective.path` reads the steps of one pair off the same table that the planner's prices come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .buckets import Bucket, bucketed_seconds
from .collective_cost import collective_curve
from .compute_cost import compute_seconds
from .layout import piece
from .mesh import Mesh
from .moves import LOCAL_KINDS, Move, States, moves

STEP = 1e-9
"""Seconds that a move costs beside its price, so that of equal ways the shorter wins."""


CUTS = frozenset({"reduce_scatter", "all_to_all"})
"""Kinds that send pieces of what they cut."""


FEW = 4
"""Once fewer than one in so many states have changed, only the edges that leave those are relaxed."""


def largest_piece(size: int, axes: Sequence[str], sizes: dict[str, int]) -> int:
    """The longest piece of a factor (the first: `torch.chunk` gives the first ranks the most)."""
    for axis in axes:
        size = -(-size // sizes[axis])
    return size


def wire_share(kind: str, axes: tuple[str, ...], split: int, mesh: Mesh) -> float:
    """Bytes that one rank sends, at most, over those of its local tensor; `split` is the length of what is cut.

    Where pieces are uneven, (k - 1) / k becomes what the rank that keeps least sends.
    """
    k = mesh.group_size(axes)
    if kind in CUTS:
        return cut_share(split, tuple([mesh.sizes[a] for a in axes]))
    if kind == "permute":
        return 1.0 if k > 1 else 0.0
    return {"slice": 0.0, "zero": 0.0, "all_gather": k - 1.0, "all_reduce": 2.0 * (k - 1) / k}[kind]


@lru_cache(maxsize=4096)
def cut_share(length: int, ranks: tuple[int, ...]) -> float:
    """Of a length that is cut over so many ranks, outermost first, what the rank that keeps least sends."""
    kept = piece(length, tuple([(k, k - 1) for k in ranks]))[1]
    return (length - kept) / length if length else 0.0


def packing_seconds(kind: str, before: Any, after: Any, mesh: Mesh) -> Any:
    """Copies into and out of a message's buffer, bytes before and after; an all-reduce works where the tensor lies."""
    return 0.0 if kind == "all_reduce" else compute_seconds(0.0, before + after, "float32", mesh.device)


class Structure:
    """The states and moves of a tensor of so many open factors on these axes, without weights.

    Attributes:
        states, index, by_place: as in `moves.States`.
        leaves, enters: per edge the states it leaves and enters, in order of the state it enters.
        of_move, moves: which of the distinct moves each edge is.
        by_kind: of each (kind, axes) its edges.
        classes: the distinct (kind, axes, target factor, number of its marks before) of edges; `of_edge` says which.
        marks, mark_of: the distinct marks, and which of them each state has on each factor.
        slots: per edge into a state its own number among those; see `_relaxed`.
    """

    def __init__(self, axes: tuple[tuple[str, int], ...], factors: int, ops: tuple[str, ...]):
        every = States(tuple(a for a, _ in axes), factors, ops)
        self.states, self.index, self.by_place = every.states, every.index, every.by_place
        made = [e for e in moves(every, dict(axes)) if len(e.leaves)]
        leaves, enters = (np.concatenate([np.zeros(0, np.intp), *(e[i] for e in made)]) for i in (1, 2))
        numbers = np.repeat(np.arange(len(made)), [len(e.leaves) for e in made])
        order = np.lexsort((leaves, enters))
        self.leaves, self.enters, self.of_move = leaves[order], enters[order], numbers[order]
        self.moves = [e.move for e in made]
        kinds: dict[tuple, int] = {}
        kind_of = np.array([kinds.setdefault((m.kind, m.axes), len(kinds)) for m in self.moves], dtype=np.intp)
        self.by_kind = {k: np.flatnonzero(kind_of[self.of_move] == n) for k, n in kinds.items()}
        self.marks = sorted({m for marks, _ in self.states for m in marks})
        number = {m: i for i, m in enumerate(self.marks)}
        self.mark_of = np.array([[number[m] for m in marks] for marks, _ in self.states], dtype=np.intp)
        self.classes, self.of_edge = self._classes()
        self.slots = _Slots(self.leaves, self.enters, len(self.states))
        self._on: dict[Mesh, _OnMesh] = {}

    def _classes(self) -> tuple[list[tuple], np.ndarray]:
        known: dict[tuple, int] = {}
        alike = [known.setdefault((m.kind, m.axes, m.target), len(known)) for m in self.moves]
        target = np.array([m.target for m in self.moves], dtype=np.intp)[self.of_move]
        before = self.mark_of[self.leaves, target] if self.mark_of.size else np.zeros(len(self.leaves), np.intp)
        before = np.where(target >= 0, before, -1)
        codes = np.array(alike, dtype=np.intp)[self.of_move] * (len(self.marks) + 1) + before + 1
        unique, of_edge = np.unique(codes, return_inverse=True)
        every = list(known)
        pairs = (divmod(int(c), len(self.marks) + 1) for c in unique)
        return [(*every[k], m - 1) for k, m in pairs], of_edge.reshape(-1)

    def on(self, mesh: Mesh) -> _OnMesh:
        if mesh not in self._on:
            self._on[mesh] = _OnMesh(self, mesh)
        return self._on[mesh]


class _OnMesh:
    """What a mesh says of the edges of a structure, whatever the sizes.

    Attributes:
        groups: of the edges that send: their kind, some axes and a curve that is that of all of them, and the edges.
        packs: per edge how much of the bytes before it, and of those after it, it copies.
        shares: per class what it sends of a tensor; of those in `cuts` that depends on the length that is cut.
        cuts: the class, its target factor, the number of that one's marks before, and the ranks of its axes.
    """

    def __init__(self, shape: Structure, mesh: Mesh):
        found: dict[tuple, list[np.ndarray]] = {}
        axes_of: dict[tuple, tuple[str, ...]] = {}
        self.packs = np.zeros((2, len(shape.leaves)))
        for (kind, axes), edges in shape.by_kind.items():
            if kind != "all_reduce":
                self.packs[:, edges] = ((0.0,), (1.0,)) if kind in LOCAL_KINDS else 1.0
            if kind not in LOCAL_KINDS:
                key = (kind, collective_curve(kind, mesh.levels(axes)), mesh.link[axes[0]])
                axes_of.setdefault(key, axes)
                found.setdefault(key, []).append(edges)
        self.groups = [(key[0], axes_of[key], key[1], np.concatenate(edges)) for key, edges in found.items()]
        self.shares = np.zeros(max(1, len(shape.classes)))
        self.cuts: list[tuple[int, int, int, tuple[int, ...]]] = []
        for i, (kind, axes, target, mark) in enumerate(shape.classes):
            if kind in CUTS:
                self.cuts.append((i, target, mark, tuple([mesh.sizes[a] for a in axes])))
            else:
                self.shares[i] = wire_share(kind, axes, 0, mesh)


class _Slots:
    """Edges by how many others enter their state before them: slot k has the k-th edge into each state that has one.

    States are put in order of falling in-degree, so that a slot is a row of them from the first on, and relaxing it is
    three operations on whole blocks.

    Attributes:
        order: the states, by falling in-degree.
        edges: per slot its edges, in the order of the states they enter.
        leaves: per slot the places in `order` of the states that they leave.
    """

    def __init__(self, leaves: np.ndarray, enters: np.ndarray, states: int):
        degree = np.bincount(enters, minlength=states)
        self.order = np.argsort(-degree, kind="stable")
        place = np.empty(states, dtype=np.intp)
        place[self.order] = np.arange(states)
        first = np.concatenate([[0], np.cumsum(degree)[:-1]])[self.order]
        counts = degree[self.order]
        rows = [first[: int(np.searchsorted(-counts, -k))] + k for k in range(int(degree.max(initial=0)))]
        self.edges = rows
        self.leaves = [place[leaves[r]] for r in rows]


@lru_cache(maxsize=256)
def structure(axes: tuple[tuple[str, int], ...], factors: int, ops: tuple[str, ...]) -> Structure:
    return Structure(axes, factors, ops)


class Transitions:
    """The seconds between the states of a tensor whose open factors have these lengths.

    `scale`: bytes of what the open factors do not span (the item size times the lengths of all other factors).
    """

    def __init__(self, shape: Structure, lengths: tuple[int, ...], scale: float, mesh: Mesh):
        self.shape, self.mesh = shape, mesh
        self._at = np.full(len(shape.states), -1)
        self._rows = np.empty((0, len(shape.states)))
        self._in_buckets: dict[Bucket, tuple[np.ndarray, np.ndarray]] = {}
        pieces = [[largest_piece(n, m, mesh.sizes) for n in lengths] for m in shape.marks]
        local = np.ones(len(shape.states))
        if lengths:
            local = np.array(pieces, dtype=float)[shape.mark_of, np.arange(len(lengths))].prod(axis=1)
        self.nbytes = local * scale
        on = shape.on(mesh)
        shares = on.shares.copy()
        for i, target, mark, ranks in on.cuts:
            shares[i] = cut_share(pieces[mark][target], ranks)
        before, after = self.nbytes[shape.leaves], self.nbytes[shape.enters]
        self.sent = before * shares[shape.of_edge]
        self.weights = np.zeros(len(shape.leaves))
        for _, _, curve, edges in on.groups:
            self.weights[edges] = curve(self.sent[edges])
        self.weights += compute_seconds(0.0, before * on.packs[0] + after * on.packs[1], "float32", mesh.device)
        self.weights += STEP

    def rows(self, sources: Sequence[int] | np.ndarray) -> np.ndarray:
        """(sources, states): seconds of the cheapest way from each source to every state."""
        wanted = np.asarray(sources, dtype=np.intp)
        new = np.unique(wanted[self._at[wanted] < 0])
        if len(new):
            self._at[new] = len(self._rows) + np.arange(len(new))
            self._rows = np.concatenate([self._rows, self._relaxed(new)])
        return self._rows[self._at[wanted]]

    def _relaxed(self, sources: np.ndarray) -> np.ndarray:
        slots = self.shape.slots
        place = np.empty(len(slots.order), dtype=np.intp)
        place[slots.order] = np.arange(len(slots.order))
        table = np.full((len(slots.order), len(sources)), math.inf)  # sources innermost: rows are whole vectors
        table[place[sources], np.arange(len(sources))] = 0.0
        weights = [self.weights[e][:, None] for e in slots.edges]
        through = np.empty_like(table)
        changed = np.ones(len(table), dtype=bool)
        while FEW * np.count_nonzero(changed) >= len(table):
            before = table.copy()
            for leaves, w in zip(slots.leaves, weights, strict=True):
                made, held = through[: len(leaves)], table[: len(leaves)]
                np.take(table, leaves, axis=0, out=made, mode="clip")
                made += w
                np.minimum(held, made, out=held)
            changed = (before != table).any(axis=1)
        return self._finished(table[place], changed[place]).T

    def _finished(self, table: np.ndarray, changed: np.ndarray) -> np.ndarray:
        """Relaxes the edges that leave states whose seconds have changed, until none has."""
        while len(edges := np.flatnonzero(changed[self.shape.leaves])):
            enters = self.shape.enters[edges]
            first = np.flatnonzero(np.append(True, enters[1:] != enters[:-1]))  # edges stand in order of them
            ways = table[self.shape.leaves[edges]] + self.weights[edges, None]
            made = np.minimum(table[enters[first]], np.minimum.reduceat(ways, first, axis=0))
            changed = np.zeros(len(table), dtype=bool)
            changed[enters[first]] = (made < table[enters[first]]).any(axis=1)
            table[enters[first]] = made
        return table

    def in_bucket(self, sources: Sequence[int] | np.ndarray, bucket: Bucket | None) -> np.ndarray:
        """`rows`, where the last move of a way, or a first one that is all of it, travels in a bucket."""
        found = self.rows(sources)
        if bucket is None:
            return found
        edges, weights = self._bucketed(bucket)
        made = found.copy()
        if bucket.end == "last" and len(edges):
            enters, first = np.unique(self.shape.enters[edges], return_index=True)  # edges stand in order of them
            ways = np.minimum.reduceat(found[:, self.shape.leaves[edges]] + weights, first, axis=1)
            made[:, enters] = np.minimum(made[:, enters], ways)
            return made
        mine, order = np.unique(sources, return_inverse=True)
        at = np.full(len(self.nbytes), -1)
        at[mine] = np.arange(len(mine))
        row = at[self.shape.leaves[edges]]
        ways = np.full((len(mine), len(self.nbytes)), math.inf)
        np.minimum.at(ways, (row[row >= 0], self.shape.enters[edges[row >= 0]]), weights[row >= 0])
        return np.minimum(made, ways[order.reshape(-1)])

    def _bucketed(self, bucket: Bucket) -> tuple[np.ndarray, np.ndarray]:
        """The edges that may travel in a bucket, in their order, and their seconds there."""
        if bucket not in self._in_buckets:
            seconds = np.full(len(self.weights), math.inf)
            for kind, axes, _, edges in self.shape.on(self.mesh).groups:
                if kind in bucket.kinds:
                    before, after = self.nbytes[self.shape.leaves[edges]], self.nbytes[self.shape.enters[edges]]
                    sent = self.sent[edges]
                    seconds[edges] = STEP + bucketed_seconds(kind, axes, sent, before, after, bucket, self.mesh)
            edges = np.flatnonzero(np.isfinite(seconds))
            self._in_buckets[bucket] = edges, seconds[edges]
        return self._in_buckets[bucket]

    def way_in_bucket(self, start: int, goal: int, bucket: Bucket | None) -> list[tuple[int, Move]]:
        """`way`, at the prices of `in_bucket`."""
        if bucket is None:
            return self.way(start, goal)
        (row,), (edges, weights) = self.rows([start]), self._bucketed(bucket)
        ends = self.shape.enters[edges] == goal
        if bucket.end == "first":
            ends &= self.shape.leaves[edges] == start
        at = np.flatnonzero(ends)
        costs = row[self.shape.leaves[edges[at]]] + weights[at]
        if not len(at) or costs.min() >= row[goal]:
            return self.way(start, goal)
        last = edges[at[costs.argmin()]]
        leaves = int(self.shape.leaves[last])
        return [*self.way(start, leaves), (leaves, self.shape.moves[self.shape.of_move[last]])]

    def way(self, start: int, goal: int) -> list[tuple[int, Move]]:
        """The moves of a cheapest way, each with the number of the state it leaves.

        Raises:
            ValueError: there is none: a partial maximum cannot be made from a whole value.
        """
        row = self.rows([start])[0]
        if not math.isfinite(row[goal]):
            states = self.shape.states
            raise ValueError(f"no way from {states[start]} to {states[goal]}")
        found: list[tuple[int, Move]] = []
        while goal != start:
            low = int(np.searchsorted(self.shape.enters, goal))
            high = int(np.searchsorted(self.shape.enters, goal, side="right"))
            best = low + int((row[self.shape.leaves[low:high]] + self.weights[low:high]).argmin())
            goal = int(self.shape.leaves[best])
            found.append((goal, self.shape.moves[self.shape.of_move[best]]))
        return found[::-1]


@lru_cache(maxsize=4096)
def transitions(
    axes: tuple[tuple[str, int], ...], ops: tuple[str, ...], lengths: tuple[int, ...], scale: float, mesh: Mesh
) -> Transitions:
    return Transitions(structure(axes, len(lengths), ops), lengths, scale, mesh)


def open_factors(used: set[int], lengths: Sequence[int]) -> tuple[int, ...]:
    """The factors that may be split on the way: those that some end splits, and the longest of the others."""
    spare = sorted((i for i in range(len(lengths)) if i not in used), key=lambda i: -lengths[i])
    return tuple(sorted([*used, *spare[:1]]))
