"""Reshards: the shortest path between two layouts, priced and emitted by the same function.

Primitives on one local tensor of nbytes b over a group of k ranks, and the bytes one rank sends:

    slice            split a whole factor                      0
    zero             whole value -> partial sum                0
    all_gather       split -> whole                            b_local (k - 1)
    all_reduce       partial -> whole                          2 b (k - 1) / k
    reduce_scatter   partial -> split                          b (k - 1) / k
    all_to_all       split one factor -> split another         b_local (k - 1) / k
    permute          same pieces, other owners                 b_local

(ring algorithms; Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005).
`path` is Dijkstra over layouts whose edges are these primitives: what it prices is exactly what passes emit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from .layout import Layout, Spot, piece
from .mesh import Mesh


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
    """Elements of the largest local tensor (rank 0's: `torch.chunk` gives the first ranks the most)."""
    sizes = mesh.sizes
    return math.prod(
        piece(f.size, tuple((sizes[a], 0) for a in f.axes))[1] if f.axes else f.size for d in layout.dims for f in d
    )


def wire_bytes(step: Step, mesh: Mesh, itemsize: int) -> float:
    """Bytes that one rank sends, at most."""
    k = mesh.group_size(step.axes)
    before = largest_local(step.before, mesh) * itemsize
    share = {
        "slice": 0.0,
        "zero": 0.0,
        "all_gather": float(k - 1),
        "all_reduce": 2.0 * (k - 1) / k,
        "reduce_scatter": (k - 1) / k,
        "all_to_all": (k - 1) / k,
        "permute": 1.0,
    }
    return before * share[step.kind]


_STARTS = {"slice": 0, "zero": 0, "all_gather": 1, "all_reduce": 2, "reduce_scatter": 1, "all_to_all": 1, "permute": 1}


def seconds(step: Step, mesh: Mesh, itemsize: int) -> float:
    """Seconds of one primitive: its ring steps' latency, its wire bytes, and the local copy it makes."""
    if step.kind in ("slice", "zero"):
        moved = min(largest_local(step.after, mesh), largest_local(step.before, mesh)) * itemsize
        return moved / mesh.device.memory_bandwidth
    k = mesh.group_size(step.axes)
    slowest = min((mesh.link[a] for a in step.axes), key=lambda link: link.bandwidth)
    starts = _STARTS[step.kind] * (k - 1) * slowest.latency
    return starts + wire_bytes(step, mesh, itemsize) / slowest.bandwidth


@lru_cache(maxsize=65536)
def path(before: Layout, after: Layout, mesh: Mesh, itemsize: int) -> tuple[Step, ...]:
    """The cheapest steps from one layout to another of the same tensor.

    Raises:
        ValueError: the layouts are of different tensors, or `after` is a partial max or min that `before` is not.
    """
    if tuple(tuple(f.size for f in d) for d in before.dims) != tuple(tuple(f.size for f in d) for d in after.dims):
        raise ValueError(f"{before} and {after} are layouts of different tensors")
    if _unreachable(before, after):
        raise ValueError(f"no path from {before} to {after}: a partial max or min cannot be made from a whole value")
    tie = itertools.count()
    frontier: list[tuple[float, int, Layout, tuple[Step, ...]]] = [(0.0, next(tie), before, ())]
    done: set[Layout] = set()
    while frontier:
        cost, _, here, steps = heapq.heappop(frontier)
        if here == after:
            return _merged(steps)
        if here in done:
            continue
        done.add(here)
        for step in _steps_from(here, after, mesh):
            if step.after not in done:
                price = cost + seconds(step, mesh, itemsize) + 1e-9
                heapq.heappush(frontier, (price, next(tie), step.after, (*steps, step)))
    raise ValueError(f"no path from {before} to {after} on mesh {mesh}")


def path_seconds(before: Layout, after: Layout, mesh: Mesh, itemsize: int) -> float:
    return sum(seconds(s, mesh, itemsize) for s in path(before, after, mesh, itemsize))


def _unreachable(before: Layout, after: Layout) -> bool:
    have = dict(before.partial)
    return any(op != "sum" and have.get(axis) != op for axis, op in after.partial)


def _steps_from(here: Layout, goal: Layout, mesh: Mesh) -> list[Step]:
    steps: list[Step] = []
    for axis in here.partial_axes | here.split_axes | goal.partial_axes | goal.split_axes:
        steps += _steps_of_axis(axis, here, goal)
    permuted = _permute(here, goal, mesh)
    return [*steps, permuted] if permuted else steps


def _steps_of_axis(axis: str, here: Layout, goal: Layout) -> list[Step]:
    target = goal.spot_of(axis)
    open_target = target if target is not None and _next_axis(here, goal, target) == axis else None
    ops = dict(here.partial)
    if axis in ops:
        op = ops[axis]
        cleared = here.with_partial(axis, None)
        steps = [Step("all_reduce", (axis,), here, cleared, op=op)]
        if open_target is not None:
            steps.append(
                Step("reduce_scatter", (axis,), here, _split(cleared, open_target, axis), target=open_target, op=op)
            )
        return steps if dict(goal.partial).get(axis) != op else []
    source = here.spot_of(axis)
    if source is None:
        if open_target is not None:
            return [Step("slice", (axis,), here, _split(here, open_target, axis), target=open_target)]
        if dict(goal.partial).get(axis) == "sum":
            return [Step("zero", (axis,), here, here.with_partial(axis, "sum"))]
        return []
    if here.factor(source).axes[-1] != axis:
        return []
    gathered = here.with_axes(source, here.factor(source).axes[:-1])
    steps = [Step("all_gather", (axis,), here, gathered, source=source)]
    if open_target is not None and open_target != source:
        after = _split(gathered, open_target, axis)
        steps.append(Step("all_to_all", (axis,), here, after, source=source, target=open_target))
    return steps


def _next_axis(here: Layout, goal: Layout, spot: Spot) -> str | None:
    """The axis to add to a factor next, so that it grows into the goal's order; None while it has a foreign one."""
    have, want = here.factor(spot).axes, goal.factor(spot).axes
    return want[len(have)] if len(have) < len(want) and want[: len(have)] == have else None


def _split(layout: Layout, spot: Spot, axis: str) -> Layout:
    return layout.with_axes(spot, (*layout.factor(spot).axes, axis))


def _permute(here: Layout, goal: Layout, mesh: Mesh) -> Step | None:
    """All pieces stay as they are and only change owner: equal cuts, other axes or another order of them."""
    if here.partial != goal.partial or here == goal:
        return None
    axes: list[str] = []
    for a, b in zip((f for d in here.dims for f in d), (f for d in goal.dims for f in d), strict=True):
        if [mesh.sizes[x] for x in a.axes] != [mesh.sizes[x] for x in b.axes]:
            return None
        if a.axes != b.axes:
            axes += [x for x in a.axes + b.axes if x not in axes]
    if here.split_axes != goal.split_axes or not axes:
        return None
    return Step("permute", tuple(x for x in mesh.names if x in axes), here, goal)


def _merged(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Consecutive all-reduces of one op become one over the product of their axes; so do gathers of one factor."""
    out: list[Step] = []
    for step in steps:
        last = out[-1] if out else None
        if last and last.kind == step.kind == "all_reduce" and last.op == step.op:
            out[-1] = Step("all_reduce", last.axes + step.axes, last.before, step.after, op=step.op)
        elif last and last.kind == step.kind == "all_gather" and last.source == step.source:
            out[-1] = Step("all_gather", step.axes + last.axes, last.before, step.after, source=step.source)
        else:
            out.append(step)
    return tuple(out)
