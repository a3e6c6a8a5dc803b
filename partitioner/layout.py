"""A layout: how one tensor lies on the mesh.

Each dim of a tensor is written as one or more *factors* (a dim of 12 that is 3 heads of 4 is `3*4`), and each factor
carries an ordered tuple of mesh axes, the first splitting first. Beside that, the tensor may be a partial sum (or
max, min) over some axes: the true value is the reduction over the ranks of those axes.

    [8:dp, 16, 3*4:tp] +cp       dim 0 of 8 split over dp; dim 2 is 3 x 4 with the 4 split over tp; partial over cp

A factor of size n over k ranks is cut as `torch.chunk` cuts: pieces of ceil(n / k), the last ones shorter or empty;
further axes cut each piece again. A rank's local tensor is the row-major product of its pieces, so splitting a minor
factor (the heads of a packed q, k, v) is as ordinary as splitting a whole dim.

    [8, 3, 17:cp~k3s2p1, 9]      dim 2 seen through a window: of its 17 rows a rank holds those that its piece of the
                                 dim which the window makes is made from (`window.py`); pieces then overlap
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from .window import Through, chunk

if TYPE_CHECKING:
    from .mesh import Mesh


@dataclass(frozen=True)
class Factor:
    """One named size of a dim, and the mesh axes that split it, outermost first.

    `through`: the axes cut another dim, and a rank holds the rows that its piece of that needs.
    """

    size: int
    axes: tuple[str, ...] = ()
    through: Through | None = None

    def __str__(self) -> str:
        return str(self.size) + (":" + "+".join(self.axes) + str(self.through or "") if self.axes else "")

    def piece(self, cuts: tuple[tuple[int, int], ...]) -> tuple[int, int]:
        """(start, length) of a rank's rows; `cuts` are (ranks, index) of the axes."""
        if self.through is None:
            return piece(self.size, cuts)
        return self.through.piece(self.size, *piece(self.through.cut, cuts))


Spot = tuple[int, int]
"""Where a factor stands in a layout: (dim, index of the factor in the dim)."""


@dataclass(frozen=True)
class Layout:
    """Per tensor dim its factors, plus `partial`: pairs of (axis, "sum" | "max" | "min"), sorted by axis."""

    dims: tuple[tuple[Factor, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        dims = ", ".join("*".join(map(str, d)) or "1" for d in self.dims)
        tail = "".join(f" +{a}" if op == "sum" else f" {op}+{a}" for a, op in self.partial)
        return f"[{dims}]{tail}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(math.prod(f.size for f in d) for d in self.dims)

    @property
    def is_whole(self) -> bool:
        """Every rank holds the whole, final value."""
        return not self.partial and not any(f.axes for d in self.dims for f in d)

    @property
    def split_axes(self) -> frozenset[str]:
        return frozenset(a for d in self.dims for f in d for a in f.axes)

    @property
    def partial_axes(self) -> frozenset[str]:
        return frozenset(a for a, _ in self.partial)

    def factor(self, spot: Spot) -> Factor:
        return self.dims[spot[0]][spot[1]]

    def spot_of(self, axis: str) -> Spot | None:
        """The factor that `axis` splits, or None."""
        for i, d in enumerate(self.dims):
            for j, f in enumerate(d):
                if axis in f.axes:
                    return (i, j)
        return None

    def with_axes(self, spot: Spot, axes: tuple[str, ...]) -> Layout:
        i, j = spot
        dim = self.dims[i][:j] + (replace(self.dims[i][j], axes=axes),) + self.dims[i][j + 1 :]
        return replace(self, dims=self.dims[:i] + (dim,) + self.dims[i + 1 :])

    def with_partial(self, axis: str, op: str | None) -> Layout:
        """The layout with `axis` partial by `op`; None removes it."""
        rest = tuple(p for p in self.partial if p[0] != axis)
        return replace(self, partial=tuple(sorted(rest + ((axis, op),))) if op else rest)

    def without(self, axis: str) -> Layout:
        """The layout with every mark of `axis` removed."""
        dims = tuple(tuple(replace(f, axes=tuple(a for a in f.axes if a != axis)) for f in d) for d in self.dims)
        return Layout(dims, tuple(p for p in self.partial if p[0] != axis))

    def unsplit(self) -> Layout:
        """The layout of the whole tensor, with the same factors."""
        return Layout(tuple(tuple(Factor(f.size) for f in d) for d in self.dims))


def whole(shape: tuple[int, ...] | torch.Size) -> Layout:
    """The layout of a whole tensor of this shape, one factor a dim."""
    return Layout(tuple((Factor(int(n)),) for n in shape))


@lru_cache(maxsize=65536)
def piece(size: int, cuts: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """(start, length) of a rank's piece of a factor; `cuts` are (ranks, index) of its axes, outermost first."""
    return chunk(size, cuts)


def local_pieces(layout: Layout, mesh: Mesh, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per dim and factor, this rank's (start, length) within the factor."""
    coord, sizes = mesh.coord(rank), mesh.sizes
    return tuple(
        tuple(f.piece(tuple((sizes[a], coord[a]) for a in f.axes)) for f in dim) for dim in layout.dims
    )


def local_shape(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The shape of this rank's local tensor."""
    return tuple(math.prod(n for _, n in dim) for dim in local_pieces(layout, mesh, rank))


def local_factor_shape(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The local tensor's shape with every dim written out as its factors."""
    return tuple(n for dim in local_pieces(layout, mesh, rank) for _, n in dim)


def factor_index(layout: Layout, spot: Spot) -> int:
    """The index of a factor in `local_factor_shape`."""
    return sum(len(d) for d in layout.dims[: spot[0]]) + spot[1]


def take_local(tensor: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """This rank's piece of a whole tensor (partial marks are ignored). A view where torch can give one."""
    pieces = [p for dim in local_pieces(layout, mesh, rank) for p in dim]
    written_out = tensor.reshape([f.size for d in layout.dims for f in d])
    for i, (start, length) in enumerate(pieces):
        if length != written_out.shape[i]:
            written_out = written_out.narrow(i, start, length)
    return written_out.reshape(local_shape(layout, mesh, rank))


def assemble(parts: list[torch.Tensor], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The whole tensor from every rank's local one: partial values reduced, pieces put in place."""
    total: torch.Tensor | None = None
    reduce = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    for values in _partial_coords(layout, mesh):
        one = _put_together(parts, layout, mesh, values)
        total = one if total is None else reduce[layout.partial[0][1]](total, one)
    assert total is not None
    return total


def _partial_coords(layout: Layout, mesh: Mesh) -> list[dict[str, int]]:
    out: list[dict[str, int]] = [{}]
    for axis, _ in layout.partial:
        out = [c | {axis: i} for c in out for i in range(mesh.sizes[axis])]
    return out


def _put_together(parts: list[torch.Tensor], layout: Layout, mesh: Mesh, at: dict[str, int]) -> torch.Tensor:
    """The whole of one partial term: the ranks at coordinates `at` of the partial axes, 0 on unused axes."""
    used = layout.split_axes | set(at)
    first = parts[0]
    out = first.new_empty([f.size for d in layout.dims for f in d])
    for rank, part in enumerate(parts):
        coord = mesh.coord(rank)
        if any(coord[a] != at.get(a, coord[a]) for a in at) or any(coord[a] for a in mesh.names if a not in used):
            continue
        target = out
        flat = [p for dim in local_pieces(layout, mesh, rank) for p in dim]
        for i, (start, length) in enumerate(flat):
            target = target.narrow(i, start, length)
        target.copy_(part.reshape([n for _, n in flat]))
    return out.reshape(layout.shape)


_DIM = re.compile(r"^[\w.]*(:[\w.+]+)?$")


def parse(text: str) -> tuple[tuple[tuple[tuple[str, ...], ...], ...], tuple[tuple[str, str], ...]]:
    """Read a layout text into (per dim, per factor, axes) and the partial marks.

    `"[b:dp, s, 3*h:tp] +cp"`; names and sizes before `:` are labels only.

    Raises:
        ValueError: the text is no layout; the message shows one that is.
    """
    match = re.fullmatch(r"\s*\[(.*)\]((?:\s+(?:max|min)?\+\w+)*)\s*", text)
    if not match:
        raise ValueError(f"{text!r} is no layout; write one like '[b:dp, s, h:tp] +cp', one entry a dim")
    dims = []
    for entry in match[1].split(",") if match[1].strip() else []:
        factors = []
        for part in entry.strip().split("*"):
            if not _DIM.match(part.strip()):
                raise ValueError(f"{entry.strip()!r} in {text!r} is no dim; write 'name', 'name:axis' or 'a*b:axis'")
            axes = part.strip().partition(":")[2]
            factors.append(tuple(axes.split("+")) if axes else ())
        dims.append(tuple(factors))
    partial = []
    for mark in match[2].split():
        op, _, axis = mark.partition("+")
        partial.append((axis, op or "sum"))
    return tuple(dims), tuple(sorted(partial))
