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

`path` is the shortest path over all layouts that split the factors of either end (and the longest other factor), read
off `transitions`, which the planner's prices come from; its edges are these primitives: what it prices is exactly what
passes emit, and prices among such layouts obey the triangle inequality.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache

from .buckets import Bucket, bucketed_seconds
from .collective_cost import collective_seconds
from .compute_cost import compute_seconds
from .halo import halo_share, ways, window_kind, windowed_dims
from .layout import Factor, Layout, Spot
from .mesh import TIME, Mesh
from .moves import LOCAL_KINDS
from .transitions import STEP, largest_piece, open_factors, packing_seconds, transitions, wire_share


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


def largest_local(layout: Layout, mesh: Mesh) -> int:
    """Elements of the largest local tensor: rank 0's, unless some dim is seen through a window."""
    return math.prod(_largest(f, mesh.sizes) for d in layout.dims for f in d)


def _largest(factor: Factor, sizes: dict[str, int]) -> int:
    if factor.through is None:
        return largest_piece(factor.size, factor.axes, sizes)
    ranks = [sizes[a] for a in factor.axes]
    everywhere = itertools.product(*(range(n) for n in ranks))
    return max(factor.piece(tuple(zip(ranks, at, strict=True)))[1] for at in everywhere)


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


def seconds(step: Step, mesh: Mesh, itemsize: int, bucket: Bucket | None = None) -> float:
    """Seconds of one primitive, alone or with others in a bucket; a local one copies what it keeps."""
    if step.kind in LOCAL_KINDS:
        return float(compute_seconds(0.0, largest_local(step.after, mesh) * itemsize, "float32", mesh.device))
    before, after = (float(largest_local(x, mesh) * itemsize) for x in (step.before, step.after))
    sent = wire_bytes(step, mesh, itemsize)
    if bucket is not None:
        return float(bucketed_seconds(step.kind, step.axes, sent, before, after, bucket, mesh))
    wire = collective_seconds(step.kind, mesh.levels(step.axes), sent)
    return float(wire + packing_seconds(step.kind, before, after, mesh))


@lru_cache(maxsize=65536)
def path(
    before: Layout, after: Layout, mesh: Mesh, itemsize: int, bucket: Bucket | None = None
) -> tuple[Step, ...]:
    """The cheapest steps from one layout to another of the same tensor, where `in_bucket` says so in a bucket.

    Raises:
        ValueError: the layouts are of different tensors, `before` is seen through a window, or `after` is a partial max
            or min that `before` is not.
    """
    if before == after:
        return ()
    if windowed_dims(before):
        raise ValueError(f"no path from {before}: a rank's rows are what a window needs, no piece of the whole")
    if windowed_dims(after):
        every = (_steps_through(before, way, mesh, itemsize) for way in ways(before, after))
        return min(every, key=lambda steps: sum(seconds(s, mesh, itemsize) + STEP for s in steps))
    if tuple(tuple(f.size for f in d) for d in before.dims) != tuple(tuple(f.size for f in d) for d in after.dims):
        raise ValueError(f"{before} and {after} are layouts of different tensors")
    if _unreachable(before, after):
        raise ValueError(f"no path from {before} to {after}: a partial max or min cannot be made from a whole value")
    return _search(before, after, mesh, itemsize, bucket)


def _steps_through(before: Layout, way: tuple[Layout, ...], mesh: Mesh, itemsize: int) -> tuple[Step, ...]:
    """The steps to the first layout of a way, then a window each."""
    return (*path(before, way[0], mesh, itemsize), *window_steps(way, mesh))


def in_bucket(steps: tuple[Step, ...], bucket: Bucket | None) -> int | None:
    """Which step of a reshard travels in a bucket, if one does: the last one, or a first one that is all of it."""
    if bucket is None or not steps or steps[-1].kind not in bucket.kinds or steps[-1].axes == (TIME,):
        return None
    return len(steps) - 1 if bucket.end == "last" or len(steps) == 1 else None


def _seconds_of(steps: tuple[Step, ...], mesh: Mesh, itemsize: int, bucket: Bucket | None) -> list[float]:
    which = in_bucket(steps, bucket)
    return [seconds(s, mesh, itemsize, bucket if i == which else None) for i, s in enumerate(steps)]


def window_steps(way: tuple[Layout, ...], mesh: Mesh) -> tuple[Step, ...]:
    """The steps of a way of `halo.ways` that add its windows."""
    steps = []
    for dim, here, there in zip(windowed_dims(way[-1]), way, way[1:], strict=False):
        kind = window_kind(here, there, dim, mesh)
        steps.append(Step(kind, there.dims[dim][0].axes, here, there, target=(dim, 0)))
    return tuple(steps)


def path_seconds(
    before: Layout, after: Layout, mesh: Mesh, itemsize: int, bucket: Bucket | None = None
) -> float:
    return sum(_seconds_of(path(before, after, mesh, itemsize, bucket), mesh, itemsize, bucket))


def _unreachable(before: Layout, after: Layout) -> bool:
    have = dict(before.partial)
    return any(op != "sum" and have.get(axis) != op for axis, op in after.partial)


def _search(
    before: Layout, after: Layout, mesh: Mesh, itemsize: int, bucket: Bucket | None
) -> tuple[Step, ...]:
    """The steps of the cheapest way in `transitions`, over the axes of the mesh that can take part."""
    spots: list[Spot] = [(i, j) for i, d in enumerate(before.dims) for j in range(len(d))]
    lengths = [before.factor(s).size for s in spots]
    ends = [[layout.factor(s).axes for s in spots] for layout in (before, after)]
    chosen = open_factors({i for end in ends for i, axes in enumerate(end) if axes}, lengths)
    rest = math.prod(n for i, n in enumerate(lengths) if i not in chosen)
    ops = tuple(sorted({"sum", *(op for end in (before, after) for _, op in end.partial)}))
    axes = _axes_between(before, after, mesh)
    table = transitions(axes, ops, tuple(lengths[i] for i in chosen), float(rest * itemsize), mesh)
    start, goal = (
        table.shape.index[tuple(end[i] for i in chosen), layout.partial]
        for end, layout in zip(ends, (before, after), strict=True)
    )
    marks_at = {i: n for n, i in enumerate(chosen)}

    def layout_of(state: int) -> Layout:
        marks, partial = table.shape.states[state]
        axes_of = {spots[i]: marks[n] for i, n in marks_at.items()}
        dims = tuple(
            tuple(replace(f, axes=axes_of.get((i, j), ())) for j, f in enumerate(d)) for i, d in enumerate(before.dims)
        )
        return Layout(dims, partial)

    def spot_of(factor: int) -> Spot | None:
        return spots[chosen[factor]] if factor >= 0 else None

    way = table.way_in_bucket(start, goal, bucket)
    states = [*(state for state, _ in way[1:]), goal]
    return tuple(
        Step(m.kind, m.axes, layout_of(at), layout_of(to), spot_of(m.source), spot_of(m.target), m.op)
        for (at, m), to in zip(way, states, strict=True)
    )


MOST_AXES = 3
"""So many axes may all take part in a reshard, used by an end or not; of more, only those that are used."""


def _axes_between(before: Layout, after: Layout, mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """The axes that may take part: a helper axis can carry a part of what a slow one would send whole."""
    used = before.split_axes | before.partial_axes | after.split_axes | after.partial_axes
    every = tuple((a, n) for a, n in mesh.axes if (n > 1 and mesh.role(a) != "pipeline") or a in used)
    return every if len(every) <= MOST_AXES else tuple((a, n) for a, n in every if a in used)
