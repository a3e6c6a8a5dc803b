"""Steps to a layout that is seen through windows: its own pieces first, then one window after another.

    [8, 4, 17, 9]     -> [8, 4, 17:cp~k3, 9]     slice     a whole tensor has every row: nothing is sent
    [8, 4, 17:cp, 9]  -> [8, 4, 17:cp~k3, 9]     halo      each rank is sent the rows it lacks, one message to each
                                                           neighbour that holds some; a slice where nobody lacks any

A halo sends (rows others need of this rank's piece) x (bytes of a row), and pays one latency. Which of the two ways is
taken is, as everywhere, the cheaper sum of steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from .layout import Factor, Layout, Spot
from .mesh import Mesh
from .window import Rows, Through, exchange, most_sent


def windowed_dims(layout: Layout) -> tuple[int, ...]:
    """The dims that are seen through a window."""
    return tuple(i for i, dim in enumerate(layout.dims) if any(f.through for f in dim))


def ways(before: Layout, after: Layout) -> Iterator[tuple[Layout, ...]]:
    """Layouts to go through from `before` to `after`: one without windows, then one window added at a time.

    In the first a windowed dim is cut as `before` writes it, or whole; `after` has it as one factor.
    """
    dims = windowed_dims(after)
    for cut in itertools.product((True, False), repeat=len(dims)):
        here = after
        for i, own in zip(dims, cut, strict=True):
            axes = after.dims[i][0].axes if own else ()
            sizes = [f.size for f in before.dims[i]]
            factors = tuple(Factor(n, () if j else axes) for j, n in enumerate(sizes))
            here = replace(here, dims=(*here.dims[:i], factors, *here.dims[i + 1 :]))
        out = [here]
        for i in dims:
            here = replace(here, dims=(*here.dims[:i], after.dims[i], *here.dims[i + 1 :]))
            out.append(here)
        yield tuple(out)


def table_of(before: Layout, after: Layout, dim: int, mesh: Mesh) -> tuple[tuple[Rows, ...], ...]:
    """What each member of a halo's group gives to each: see `window.exchange`."""
    through, axes = _seen(after, dim)
    sizes = [f.size for f in before.dims[dim]]
    ranks = tuple(mesh.sizes[a] for a in axes)
    return exchange((sizes[0], math.prod(sizes[1:])), math.prod(sizes), through, ranks)


def _seen(after: Layout, dim: int) -> tuple[Through, tuple[str, ...]]:
    factor = after.dims[dim][0]
    assert factor.through is not None, after
    return factor.through, factor.axes


def window_kind(before: Layout, after: Layout, dim: int, mesh: Mesh) -> str:
    """How the window of a dim is filled: "slice" where every rank has what it needs, else "halo"."""
    if not before.dims[dim][0].axes or not most_sent(table_of(before, after, dim, mesh)):
        return "slice"
    return "halo"


def halo_share(before: Layout, after: Layout, spot: Spot, mesh: Mesh) -> float:
    """Rows that the busiest rank of a halo sends, over those of the largest piece."""
    table = table_of(before, after, spot[0], mesh)
    own, *units = (f.size for f in before.dims[spot[0]])
    for axis in before.dims[spot[0]][0].axes:
        own = -(-own // mesh.sizes[axis])
    return most_sent(table) / max(1, own * math.prod(units))
