"""Reshards: the shortest path between two layouts, priced and emitted by the same function.

Primitives on one local tensor of nbytes b over a group of k ranks, and the bytes one rank sends:

    slice            split a whole factor                      0
    zero             whole value -> partial sum                0
    all_gather       split -> whole                            b_local (k - 1)
    all_reduce       partial -> whole                          2 b (k - 1) / k
    reduce_scatter   partial -> split                          b (k - 1) / k
    all_to_all       split one factor -> split another         b_local (k - 1) / k
    permute          same pieces, other owners                 b_local
    halo             own piece -> the rows a window needs      the rows others need of it (`halo.py`)

(ring algorithms; Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005).
Where pieces are uneven, b (k - 1) / k becomes what the rank that keeps least sends: b less the smallest piece.

`path` is the shortest path over all layouts that use the axes and factors of either end (and the longest other factor),
and its edges are these primitives: what it prices is exactly what passes emit, and prices among such layouts obey the
triangle inequality.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from .halo import halo_share, ways, window_kind, windowed_dims
from .layout import Factor, Layout, Spot, piece
from .mesh import Mesh

LOCAL_KINDS = frozenset({"slice", "zero"})
"""Primitives that send nothing."""


@dataclass(frozen=True)
class Step:
    """One primitive: `kind` over the ranks of `axes`, from layout `before` to `after`.

    `source` is the factor gathered, `target` the factor split; `op` the reduction.
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    source: Spot | None = None
    target: Spot | None = None
    op: str = "sum"

    def __str__(self) -> str:
        return f"{self.kind}({'+'.join(self.axes)}) -> {self.after}"


def largest_piece(size: int, axes: Iterable[str], sizes: dict[str, int]) -> int:
    """The longest piece of a factor (the first: `torch.chunk` gives the first ranks the most)."""
    for axis in axes:
        size = -(-size // sizes[axis])
    return size


def largest_local(layout: Layout, mesh: Mesh) -> int:
    """Elements of the largest local tensor: rank 0's, unless some dim is seen through a window."""
    return math.prod(_largest(f, mesh.sizes) for d in layout.dims for f in d)


def _largest(factor: Factor, sizes: dict[str, int]) -> int:
    if factor.through is None:
        return largest_piece(factor.size, factor.axes, sizes)
    ranks = [sizes[a] for a in factor.axes]
    everywhere = itertools.product(*(range(n) for n in ranks))
    return max(factor.piece(tuple(zip(ranks, at, strict=True)))[1] for at in everywhere)


def wire_share(kind: str, axes: tuple[str, ...], split: int, mesh: Mesh) -> float:
    """Bytes that one rank sends, at most, over those of its local tensor; `split` is the length of what is cut."""
    k = mesh.group_size(axes)
    if kind in ("reduce_scatter", "all_to_all"):
        kept = piece(split, tuple((mesh.sizes[a], mesh.sizes[a] - 1) for a in axes))[1]
        return (split - kept) / split if split else 0.0
    if kind == "permute":
        return 1.0 if k > 1 else 0.0
    return {"slice": 0.0, "zero": 0.0, "all_gather": k - 1.0, "all_reduce": 2.0 * (k - 1) / k}[kind]


def wire_bytes(step: Step, mesh: Mesh, itemsize: int) -> float:
    """Bytes that one rank sends, at most."""
    return largest_local(step.before, mesh) * itemsize * _share(step, mesh)


def _share(step: Step, mesh: Mesh) -> float:
    if step.kind == "halo":
        assert step.target is not None, step
        return halo_share(step.before, step.after, step.target, mesh)
    return wire_share(step.kind, step.axes, _cut_length(step, mesh), mesh)


def _cut_length(step: Step, mesh: Mesh) -> int:
    if step.target is None:
        return 0
    factor = step.before.factor(step.target)
    return largest_piece(factor.size, factor.axes, mesh.sizes)


def rates(kind: str, axes: tuple[str, ...], split: int, mesh: Mesh) -> tuple[float, float]:
    """Seconds of a primitive: those before any byte moves (its ring steps), and those a byte of the local tensor.

    The local kinds copy what they keep: bytes of the result over memory bandwidth.
    """
    if kind in LOCAL_KINDS:
        return 0.0, 1 / mesh.device.memory_bandwidth
    k = mesh.group_size(axes)
    slowest = min((mesh.link[a] for a in axes), key=lambda link: link.bandwidth)
    starts = min(k - 1, 1) if kind == "permute" else (k - 1) * (2 if kind == "all_reduce" else 1)
    return starts * slowest.latency, wire_share(kind, axes, split, mesh) / slowest.bandwidth


def seconds(step: Step, mesh: Mesh, itemsize: int) -> float:
    """Seconds of one primitive."""
    if step.kind == "halo":
        slowest = min((mesh.link[a] for a in step.axes), key=lambda link: link.bandwidth)
        return slowest.latency + wire_bytes(step, mesh, itemsize) / slowest.bandwidth
    fixed, each = rates(step.kind, step.axes, _cut_length(step, mesh), mesh)
    return fixed + each * largest_local(step.after if step.kind in LOCAL_KINDS else step.before, mesh) * itemsize


@lru_cache(maxsize=65536)
def path(before: Layout, after: Layout, mesh: Mesh, itemsize: int) -> tuple[Step, ...]:
    """The cheapest steps from one layout to another of the same tensor.

    Raises:
        ValueError: the layouts are of different tensors, or `after` is a partial max or min that `before` is not.
    """
    if before == after:
        return ()
    if windowed_dims(after):
        every = (_steps_through(before, way, mesh, itemsize) for way in ways(before, after))
        return min(every, key=lambda steps: sum(seconds(s, mesh, itemsize) + _STEP for s in steps))
    if tuple(tuple(f.size for f in d) for d in before.dims) != tuple(tuple(f.size for f in d) for d in after.dims):
        raise ValueError(f"{before} and {after} are layouts of different tensors")
    if _unreachable(before, after):
        raise ValueError(f"no path from {before} to {after}: a partial max or min cannot be made from a whole value")
    return _search(before, after, mesh, itemsize)


def _steps_through(before: Layout, way: tuple[Layout, ...], mesh: Mesh, itemsize: int) -> tuple[Step, ...]:
    """The steps to the first layout of a way, then a window each."""
    steps = list(path(before, way[0], mesh, itemsize))
    for dim, here, there in zip(windowed_dims(way[-1]), way, way[1:], strict=False):
        kind = window_kind(here, there, dim, mesh)
        steps.append(Step(kind, there.dims[dim][0].axes, here, there, target=(dim, 0)))
    return tuple(steps)


def path_seconds(before: Layout, after: Layout, mesh: Mesh, itemsize: int) -> float:
    return sum(seconds(s, mesh, itemsize) for s in path(before, after, mesh, itemsize))


def _unreachable(before: Layout, after: Layout) -> bool:
    have = dict(before.partial)
    return any(op != "sum" and have.get(axis) != op for axis, op in after.partial)


Marks = tuple[tuple[str, ...], ...]
Partial = tuple[tuple[str, str], ...]
State = tuple[Marks, Partial]

_STEP = 1e-9
"""Seconds that a step costs beside its price, so that of equal paths the shorter wins."""


@dataclass(slots=True)
class _Move:
    """An edge; `source` and `target` are indices of factors."""

    kind: str
    axes: tuple[str, ...]
    after: State
    source: int = -1
    target: int = -1
    op: str = "sum"


def _search(before: Layout, after: Layout, mesh: Mesh, itemsize: int) -> tuple[Step, ...]:
    """A* over states: of each factor, the axes that split it, and the partial marks."""
    search = _Search(before, after, mesh, itemsize)
    start = search.start
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, _Move]] = {}
    tie = itertools.count()
    frontier = [(search.estimate(start), next(tie), start)]
    done: set[State] = set()
    while frontier:
        _, _, here = heapq.heappop(frontier)
        if here == search.goal:
            return search.steps(came)
        if here in done:
            continue
        done.add(here)
        for move in search.moves(here):
            if move.after in done:
                continue
            cost = best[here] + search.cost(here, move) + _STEP
            if cost < best.get(move.after, math.inf):
                best[move.after], came[move.after] = cost, (here, move)
                heapq.heappush(frontier, (cost + search.estimate(move.after), next(tie), move.after))
    raise ValueError(f"no path from {before} to {after} on mesh {mesh}")


class _Search:
    def __init__(self, before: Layout, after: Layout, mesh: Mesh, itemsize: int):
        self.layout, self.mesh, self.itemsize = before, mesh, itemsize
        self.spots: list[Spot] = [(i, j) for i, d in enumerate(before.dims) for j in range(len(d))]
        self.lengths = [before.factor(s).size for s in self.spots]
        self.start, self.goal = self._state(before), self._state(after)
        used = before.split_axes | before.partial_axes | after.split_axes | after.partial_axes
        self.axes = tuple(a for a in mesh.names if a in used)
        self.latency = min(mesh.link[a].latency for a in self.axes)
        self.each_byte = 1 / max(mesh.link[a].bandwidth for a in self.axes)
        self.relabelings = list(_relabelings(self.axes, mesh.sizes))
        self.goal_at = {a: i for i, axes in enumerate(self.goal[0]) for a in axes}
        self.goal_ops = dict(self.goal[1])
        self.open = _open_factors(self.start[0], self.goal[0], self.lengths)
        self.total = math.prod(self.lengths) * itemsize
        self.goal_bytes = self.total / math.prod(mesh.sizes[a] for a in self.goal_at)
        self.local: dict[Marks, int] = {}
        self.rates: dict[tuple[str, tuple[str, ...], int], tuple[float, float]] = {}

    def _state(self, layout: Layout) -> State:
        return tuple(layout.factor(s).axes for s in self.spots), layout.partial

    def nbytes(self, marks: Marks) -> int:
        """Bytes of the largest local tensor."""
        found = self.local.get(marks)
        if found is None:
            pieces = (largest_piece(n, axes, self.mesh.sizes) for n, axes in zip(self.lengths, marks, strict=True))
            found = self.local[marks] = math.prod(pieces) * self.itemsize
        return found

    def cost(self, here: State, move: _Move) -> float:
        split = 0
        if move.target >= 0:
            split = largest_piece(self.lengths[move.target], here[0][move.target], self.mesh.sizes)
        key = (move.kind, move.axes, split)
        found = self.rates.get(key)
        if found is None:
            found = self.rates[key] = rates(*key, self.mesh)
        return found[0] + found[1] * self.nbytes((move.after if move.kind in LOCAL_KINDS else here)[0])

    def estimate(self, state: State) -> float:
        """At most what is left to pay.

        Latency: ring steps of the reductions and of the moves that each axis still needs; one permute may be all moves.
        Bytes, in even pieces, with B here and G at the goal: gathers send what the tensor grows by; and if some axis is
        to be reduced or moved, (k - 1) / k of a tensor of at least min(B, G) is sent for it.
        """
        sizes = self.mesh.sizes
        reduces, moves, share, pieces = 0, 0, 0.0, 1
        for i, axes in enumerate(state[0]):
            for a in axes:
                pieces *= sizes[a]
                if self.goal_at.get(a) != i:
                    moves += sizes[a] - 1
                    share = max(share, 1 - 1 / sizes[a]) if a in self.goal_at else share
        for a, op in state[1]:
            if self.goal_ops.get(a) != op:
                reduces += sizes[a] - 1
                moves += 0 if a in self.goal_at else sizes[a] - 1
                share = max(share, 1 - 1 / sizes[a])
        steps = reduces + (min(1, moves) if self.relabelings else moves)
        have = self.total / pieces
        nbytes = share * min(have, self.goal_bytes) + max(0.0, self.goal_bytes - have)
        return self.latency * steps + self.each_byte * nbytes

    def moves(self, state: State) -> Iterator[_Move]:
        marks, partial = state
        ops = dict(partial)
        split = {a for axes in marks for a in axes}
        yield from self._reductions(marks, partial)
        for i, axes in enumerate(marks):
            for n in range(1, len(axes) + 1):
                yield from self._regroupings(marks, partial, i, n)
        for axis in self.axes:
            if axis not in ops and axis not in split:
                for j in self.open:
                    yield _Move("slice", (axis,), (_with(marks, j, (*marks[j], axis)), partial), target=j)
                if self.goal_ops.get(axis) == "sum":
                    yield _Move("zero", (axis,), (marks, tuple(sorted((*partial, (axis, "sum"))))))
        for moved, names in self.relabelings:
            if ops.keys().isdisjoint(moved) and not split.isdisjoint(moved):
                after = tuple(tuple(names.get(a, a) for a in axes) for axes in marks)
                if after != marks:
                    yield _Move("permute", moved, (after, partial))

    def _reductions(self, marks: Marks, partial: Partial) -> Iterator[_Move]:
        """All-reduce over any partial axes of one op; reduce-scatter of one onto any factor."""
        for op in {op for _, op in partial}:
            axes = [a for a, o in partial if o == op]
            for n in range(1, len(axes) + 1):
                for some in itertools.combinations(axes, n):
                    rest = tuple(p for p in partial if p[0] not in some)
                    ordered = tuple(a for a in self.axes if a in some)
                    yield _Move("all_reduce", ordered, (marks, rest), op=op)
            for axis in axes:
                rest = tuple(p for p in partial if p[0] != axis)
                for j in self.open:
                    after = _with(marks, j, (*marks[j], axis))
                    yield _Move("reduce_scatter", (axis,), (after, rest), target=j, op=op)

    def _regroupings(self, marks: Marks, partial: Partial, i: int, n: int) -> Iterator[_Move]:
        """The last n axes of factor i are gathered, or move to another factor."""
        kept, last = marks[i][:-n], marks[i][-n:]
        gathered = _with(marks, i, kept)
        yield _Move("all_gather", last, (gathered, partial), source=i)
        for j in self.open:
            if j != i:
                after = _with(gathered, j, (*gathered[j], *last))
                yield _Move("all_to_all", last, (after, partial), source=i, target=j)

    def steps(self, came: dict[State, tuple[State, _Move]]) -> tuple[Step, ...]:
        moves: list[tuple[State, _Move]] = []
        here = self.goal
        while here != self.start:
            here, move = came[here]
            moves.append((here, move))
        return tuple(self._step(state, move) for state, move in reversed(moves))

    def _step(self, state: State, move: _Move) -> Step:
        source = self.spots[move.source] if move.source >= 0 else None
        target = self.spots[move.target] if move.target >= 0 else None
        return Step(move.kind, move.axes, self._layout(state), self._layout(move.after), source, target, move.op)

    def _layout(self, state: State) -> Layout:
        marks = iter(state[0])
        dims = tuple(tuple(replace(f, axes=next(marks)) for f in d) for d in self.layout.dims)
        return Layout(dims, state[1])


def _with(marks: Marks, i: int, axes: tuple[str, ...]) -> Marks:
    return (*marks[:i], axes, *marks[i + 1 :])


def _open_factors(start: Marks, goal: Marks, lengths: list[int]) -> tuple[int, ...]:
    """The factors that may be split on the way: those that either end splits, and the longest of the others."""
    used = [i for i, both in enumerate(zip(start, goal, strict=True)) if any(both)]
    spare = sorted((i for i in range(len(start)) if i not in used), key=lambda i: -lengths[i])
    return tuple(sorted(used + spare[:1]))


def _relabelings(axes: tuple[str, ...], sizes: dict[str, int]) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Every renaming of axes among those of one size: the axes it moves, and old name -> new name."""
    for new in itertools.permutations(axes):
        names = {a: b for a, b in zip(axes, new, strict=True) if a != b}
        if names and all(sizes[a] == sizes[b] for a, b in names.items()):
            yield tuple(a for a in axes if a in names), names
