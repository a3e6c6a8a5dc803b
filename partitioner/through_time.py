"""Reshards where micro-batches are an axis in time: the steps in space, and the few that go through time.

A tensor that differs from micro-batch to micro-batch is split (`[8:micro+dp, 16]`) or a partial sum (`+micro`) over
the axis `micro`, which is the outermost of its factor; one that does not is the same for all. Between the two:

    collect   +micro -> whole        all_reduce in time: the terms are added up as they come
              f:micro -> whole       all_gather in time: the parts are kept and joined; whatever else splits the factor
                                     is gathered before, for a rank's parts of all micro-batches are no piece of it
    enter     whole -> f:micro       a slice
              whole -> +micro        the value itself in the first micro-batch, zero in the others

Steps in space are those of `collective.path` on what one micro-batch holds. A partial sum is collected before it is
reduced over ranks, so gradients travel once a step; with `early` it is reduced in every micro-batch, and what waits is
sharded (ZeRO stages 2 and 3).
"""

from __future__ import annotations

from dataclasses import replace

from .buckets import Bucket
from .collective import Step, path
from .halo import ways, windowed_dims
from .layout import Layout, Spot
from .mesh import TIME, Mesh


def way(
    before: Layout, after: Layout, mesh: Mesh, itemsize: int, early: bool = False, bucket: Bucket | None = None
) -> tuple[Step, ...]:
    """The steps from one layout to another on a mesh that may have an axis in time; see `collective.path`.

    `early`: a partial sum that ends up split over ranks is split in every micro-batch, before it is added up.
    """
    if before == after:
        return ()
    if TIME not in mesh.sizes:
        return path(before, after, mesh, itemsize, bucket)
    if _mark(before) == _mark(after):
        return _in_space(before, after, mesh, itemsize, bucket)
    steps: list[Step] = []
    here = before
    if _mark(before) is not None:
        steps += _collect(before, after, mesh, itemsize, early)
        here = steps[-1].after
    if _mark(after) is None:
        return (*steps, *_in_space(here, after, mesh, itemsize, bucket))
    return (*steps, *_enter(here, after, mesh, itemsize))


def changes_in_time(layout: Layout) -> bool:
    """Whether a tensor differs from micro-batch to micro-batch."""
    return TIME in layout.split_axes or TIME in layout.partial_axes


def times(step: Step, mesh: Mesh) -> int:
    """How often a step is done: in every micro-batch, or once."""
    return mesh.sizes.get(TIME, 1) if step.axes != (TIME,) and changes_in_time(step.before) else 1


def _mark(layout: Layout) -> Spot | str | None:
    return layout.spot_of(TIME) or dict(layout.partial).get(TIME)


def _collect(before: Layout, after: Layout, mesh: Mesh, itemsize: int, early: bool) -> list[Step]:
    spot, op = before.spot_of(TIME), dict(before.partial).get(TIME)
    if spot is None:
        assert op is not None
        shared = early and not after.split_axes.isdisjoint(before.partial_axes)
        ready = after.without(TIME).with_partial(TIME, op) if shared else before
        steps = list(_in_space(before, ready, mesh, itemsize))
        return [*steps, Step("all_reduce", (TIME,), ready, ready.with_partial(TIME, None), op=op)]
    ready = before.with_axes(spot, (TIME,))
    steps = list(_in_space(before, ready, mesh, itemsize))
    return [*steps, Step("all_gather", (TIME,), ready, ready.with_axes(spot, ()), source=spot)]


def _enter(before: Layout, after: Layout, mesh: Mesh, itemsize: int) -> list[Step]:
    spot = after.spot_of(TIME)
    if spot is None:
        ready = after.with_partial(TIME, None)
        steps = list(_in_space(before, ready, mesh, itemsize))
        return [*steps, Step("zero", (TIME,), ready, after)]
    ready = after.with_axes(spot, ())
    if windowed_dims(after):  # rows are sent to neighbours in each micro-batch, after the slice
        ready = next(ways(before, ready))[0]
    steps = list(_in_space(before, ready, mesh, itemsize))
    cut = ready.with_axes(spot, (TIME,))
    return [*steps, Step("slice", (TIME,), ready, cut, target=spot), *_in_space(cut, after, mesh, itemsize)]


def _in_space(
    before: Layout, after: Layout, mesh: Mesh, itemsize: int, bucket: Bucket | None = None
) -> tuple[Step, ...]:
    """The steps between two layouts that are alike in time, found on what one micro-batch holds."""
    if before == after:
        return ()
    ranks, mark = mesh.sizes[TIME], _mark(before)
    found = path(_of_one(before, ranks), _of_one(after, ranks), mesh.space, itemsize, bucket)
    if mark is None:
        return found
    put = {id(s): (_of_all(s.before, before, mark), _of_all(s.after, before, mark)) for s in found}
    steps = [replace(s, before=put[id(s)][0], after=put[id(s)][1]) for s in found]
    return tuple(steps)


def _of_one(layout: Layout, ranks: int) -> Layout:
    """The layout of one micro-batch's part."""
    spot = layout.spot_of(TIME)
    if spot is None:
        return layout.with_partial(TIME, None)
    (i, j), f = spot, layout.factor(spot)
    if f.through is not None or f.axes[0] != TIME:
        raise ValueError(f"{layout}: micro-batches cut a dim before all else, and never through a window")
    dim = (*layout.dims[i][:j], replace(f, size=-(-f.size // ranks), axes=f.axes[1:]), *layout.dims[i][j + 1 :])
    return replace(layout, dims=(*layout.dims[:i], dim, *layout.dims[i + 1 :]))


def _of_all(part: Layout, like: Layout, mark: Spot | str) -> Layout:
    """The layout of all micro-batches from that of one's part."""
    if isinstance(mark, str):
        return part.with_partial(TIME, mark)
    (i, j), f = mark, part.factor(mark)
    dim = (*part.dims[i][:j], replace(f, size=like.factor(mark).size, axes=(TIME, *f.axes)), *part.dims[i][j + 1 :])
    return replace(part, dims=(*part.dims[:i], dim, *part.dims[i + 1 :]))
