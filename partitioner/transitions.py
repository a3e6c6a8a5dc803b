"""Every state of one tensor, and the seconds of the cheapest way from each to each.

States and primitive moves (`moves.py`) make a weighted graph; the cheapest ways are its shortest paths, found for whole
rows of sources at once by relaxing all edges until nothing changes (Bellman-Ford; a way has few moves, so few rounds):

    D[s, v] = min( D[s, v],  min over edges (u, v) of D[s, u] + w(u, v) )

The graph's shape depends on the mesh and on the number of factors alone, so it is made once; its weights depend on the
sizes. `collective.path` reads the steps of one pair off the same table that the planner's prices come from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .collective_cost import collective_seconds
from .compute_cost import compute_seconds
from .layout import piece
from .mesh import Mesh
from .moves import LOCAL_KINDS, Move, State, moves, relabelings

STEP = 1e-9
"""Seconds that a move costs beside its price, so that of equal ways the shorter wins."""


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
    if kind in ("reduce_scatter", "all_to_all"):
        kept = piece(split, tuple((mesh.sizes[a], mesh.sizes[a] - 1) for a in axes))[1]
        return (split - kept) / split if split else 0.0
    if kind == "permute":
        return 1.0 if k > 1 else 0.0
    return {"slice": 0.0, "zero": 0.0, "all_gather": k - 1.0, "all_reduce": 2.0 * (k - 1) / k}[kind]


def packing_seconds(kind: str, before: Any, after: Any, mesh: Mesh) -> Any:
    """Copies into and out of a message's buffer, bytes before and after; an all-reduce works where the tensor lies."""
    return 0.0 if kind == "all_reduce" else compute_seconds(0.0, before + after, "float32", mesh.device)


class Structure:
    """The states and moves of a tensor of so many open factors on these axes, without weights.

    Attributes:
        states, index: every state, and the number of each.
        by_place: the number of the state whose axes stand in mesh order, by where each axis is: the factor it splits,
            WHOLE, or PARTIAL less the number of its op.
        edges: per edge the move and the number of the state it leaves, in order of the state it enters.
        classes: the distinct (kind, axes, target factor, its marks before) of the edges; `of_edge` says which.
    """

    def __init__(self, axes: tuple[tuple[str, int], ...], factors: int, ops: tuple[str, ...]):
        names, sizes = tuple(a for a, _ in axes), dict(axes)
        placed = list(_states(names, factors, ops))
        self.states = [s for _, s in placed]
        self.by_place: dict[tuple[int, ...], int] = {}
        for i, (place, _) in enumerate(placed):
            self.by_place.setdefault(place, i)
        self.index = {s: i for i, s in enumerate(self.states)}
        renamed = relabelings(names, sizes)
        found: list[tuple[int, int, Move]] = []
        for i, state in enumerate(self.states):
            for move in moves(state, names, range(factors), names, renamed):
                found.append((self.index[move.after], i, move))
        found.sort(key=lambda e: e[:2])
        self.edges = [(move, i) for _, i, move in found]
        self.leaves = np.array([i for _, i, _ in found], dtype=np.intp)
        self.enters = np.array([j for j, _, _ in found], dtype=np.intp)
        classes: dict[tuple, int] = {}
        numbers = [classes.setdefault(self._class(i, m), len(classes)) for _, i, m in found]
        self.of_edge = np.array(numbers, dtype=np.intp)
        self.classes = list(classes)
        by_kind: dict[tuple, list[int]] = {}
        for e, (_, _, move) in enumerate(found):
            by_kind.setdefault((move.kind, move.axes), []).append(e)
        self.by_kind = {k: np.array(v, dtype=np.intp) for k, v in by_kind.items()}
        self.marks = sorted({m for marks, _ in self.states for m in marks})
        number = {m: i for i, m in enumerate(self.marks)}
        self.mark_of = np.array([[number[m] for m in marks] for marks, _ in self.states], dtype=np.intp)

    def _class(self, i: int, move: Move) -> tuple:
        before = self.states[i][0][move.target] if move.target >= 0 else ()
        return (move.kind, move.axes, move.target, before)


WHOLE, PARTIAL = -1, -2


def _states(
    names: tuple[str, ...], factors: int, ops: tuple[str, ...]
) -> Iterator[tuple[tuple[int, ...], State]]:
    for where in itertools.product(range(WHOLE - len(ops), factors), repeat=len(names)):
        partial = tuple(sorted((a, ops[PARTIAL - w]) for a, w in zip(names, where, strict=True) if w <= PARTIAL))
        groups = [[a for a, w in zip(names, where, strict=True) if w == f] for f in range(factors)]
        for marks in itertools.product(*(itertools.permutations(g) for g in groups)):
            yield where, (tuple(marks), partial)


@lru_cache(maxsize=256)
def structure(axes: tuple[tuple[str, int], ...], factors: int, ops: tuple[str, ...]) -> Structure:
    return Structure(axes, factors, ops)


class Transitions:
    """The seconds between the states of a tensor whose open factors have these lengths.

    `scale`: bytes of what the open factors do not span (the item size times the lengths of all other factors).
    """

    def __init__(self, shape: Structure, lengths: tuple[int, ...], scale: float, mesh: Mesh):
        self.shape = shape
        self._rows: dict[int, np.ndarray] = {}
        local = np.ones(len(shape.states))
        if lengths:
            pieces = np.array([[largest_piece(n, m, mesh.sizes) for n in lengths] for m in shape.marks], dtype=float)
            local = pieces[shape.mark_of, np.arange(len(lengths))].prod(axis=1)
        self.nbytes = local * scale
        share = np.array([self._share(c, lengths, mesh) for c in shape.classes])[shape.of_edge] if shape.edges else None
        self.weights = np.zeros(len(shape.edges))
        for (kind, axes), edges in shape.by_kind.items():
            if kind in LOCAL_KINDS:
                made = self.nbytes[shape.enters[edges]]
                self.weights[edges] = compute_seconds(0.0, made, "float32", mesh.device)
            else:
                assert share is not None
                before, after = self.nbytes[shape.leaves[edges]], self.nbytes[shape.enters[edges]]
                self.weights[edges] = collective_seconds(kind, mesh.levels(axes), before * share[edges])
                self.weights[edges] += packing_seconds(kind, before, after, mesh)
        self.weights += STEP

    @staticmethod
    def _share(what: tuple, lengths: tuple[int, ...], mesh: Mesh) -> float:
        kind, axes, target, before = what
        split = largest_piece(lengths[target], before, mesh.sizes) if target >= 0 else 0
        return wire_share(kind, axes, split, mesh)

    def rows(self, sources: Sequence[int]) -> np.ndarray:
        """(sources, states): seconds of the cheapest way from each source to every state."""
        new = [s for s in dict.fromkeys(sources) if s not in self._rows]
        if new:
            for s, row in zip(new, self._relaxed(new), strict=True):
                self._rows[s] = row
        return np.stack([self._rows[s] for s in sources])

    def _relaxed(self, sources: list[int]) -> np.ndarray:
        shape = self.shape
        table = np.full((len(shape.states), len(sources)), math.inf)  # sources innermost: rows are whole vectors
        table[sources, np.arange(len(sources))] = 0.0
        changed = np.zeros(len(shape.states), dtype=bool)
        changed[sources] = True
        while len(edges := np.flatnonzero(changed[shape.leaves])):
            entered = shape.enters[edges]
            starts = np.flatnonzero(np.r_[True, entered[1:] != entered[:-1]])
            states = entered[starts]
            through = np.minimum.reduceat(table[shape.leaves[edges]] + self.weights[edges, None], starts, axis=0)
            before = table[states]
            better = np.minimum(before, through)
            changed[:] = False
            changed[states] = (better < before).any(axis=1)
            table[states] = better
        return table.T

    def way(self, start: int, goal: int) -> list[tuple[int, Move]]:
        """The moves of a cheapest way, each with the number of the state it leaves.

        Raises:
            ValueError: there is none: a partial maximum cannot be made from a whole value.
        """
        row = self.rows([start])[0]
        if not math.isfinite(row[goal]):
            raise ValueError(f"no way from {self.shape.states[start]} to {self.shape.states[goal]}")
        found: list[tuple[int, Move]] = []
        while goal != start:
            low = int(np.searchsorted(self.shape.enters, goal))
            high = int(np.searchsorted(self.shape.enters, goal, side="right"))
            best = low + int((row[self.shape.leaves[low:high]] + self.weights[low:high]).argmin())
            move, goal = self.shape.edges[best]
            found.append((goal, move))
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
