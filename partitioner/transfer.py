"""A collective as one rank sees it: what it sends, to whom, and the shape of what it gets.

`transfer_of(step, mesh, rank)` turns a `Step` between layouts (which knows the mesh) into plain numbers, the form in
which it stands in a per-rank graph. The local tensor is viewed as `view` (every dim written out as its factors); the
collective works along dims of that view; the result is reshaped to `out_shape`. The local kinds, `slice` and `zero`,
have plain functions instead: `local_slice` and `zero_unless_first`.

In a per-rank graph a collective is two nodes, `start` and `wait`; `pause` hands values out and takes values in. These
three are markers: `runtime.execute` writes them as yields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .collective import LOCAL_KINDS, Step
from .halo import table_of
from .layout import Layout, Spot, factor_index, local_factor_shape, local_pieces, local_shape, piece
from .mesh import Mesh


@dataclass(frozen=True)
class Transfer:
    """One collective over the ranks of `axes`.

    Attributes:
        kind: "all_gather" | "all_reduce" | "reduce_scatter" | "all_to_all" | "permute" | "halo".
        axes: mesh axes of the group; members are ordered as `Mesh.group(axes, rank)`.
        view: the shape in which the local tensor is seen.
        out_shape: the shape of the result.
        op: "sum" | "max" | "min", for the reducing kinds.
        gather_dim, gather_sizes: dim of `view` along which pieces are joined, and each member's size along it.
        split_dim, split_sizes: dim of `view` along which this tensor is cut, and each member's size along it.
        peers: for "permute", (index in the group this rank sends to, index it receives from).
        gives, gets: for "halo", of each member the (start, length) along `gather_dim` that it gets of this tensor, and
            the length that comes from it; a rank's own entries are what it keeps.
    """

    kind: str
    axes: tuple[str, ...]
    view: tuple[int, ...]
    out_shape: tuple[int, ...]
    op: str = "sum"
    gather_dim: int = -1
    gather_sizes: tuple[int, ...] = ()
    split_dim: int = -1
    split_sizes: tuple[int, ...] = ()
    peers: tuple[int, int] = (-1, -1)
    gives: tuple[tuple[int, int], ...] = ()
    gets: tuple[int, ...] = ()

    @property
    def has_split(self) -> bool:
        """Each member gets another part of this rank's tensor."""
        return self.split_dim >= 0

    @property
    def has_gather(self) -> bool:
        """The result is put together from a part of each member."""
        return self.gather_dim >= 0


@lru_cache(maxsize=65536)
def transfer_of(step: Step, mesh: Mesh, rank: int) -> Transfer:
    """The step as `rank` sees it.

    Raises:
        ValueError: the step is local (`slice`, `zero`).
    """
    if step.kind in LOCAL_KINDS:
        raise ValueError(f"{step} sends nothing: use slice_args or is_first of transfer.py")
    if step.kind == "halo":
        return _halo(step, mesh, rank)
    gather_dim, gather_sizes = -1, ()
    split_dim, split_sizes = -1, ()
    if step.source is not None:
        gather_dim = factor_index(step.before, step.source)
        gather_sizes = _member_sizes(step.before, step.source, step.axes, mesh, rank)
    if step.target is not None:
        split_dim = factor_index(step.after, step.target)
        split_sizes = _member_sizes(step.after, step.target, step.axes, mesh, rank)
    return Transfer(
        kind=step.kind,
        axes=step.axes,
        view=local_factor_shape(step.before, mesh, rank),
        out_shape=local_shape(step.after, mesh, rank),
        op=step.op,
        gather_dim=gather_dim,
        gather_sizes=gather_sizes,
        split_dim=split_dim,
        split_sizes=split_sizes,
        peers=_peers(step, mesh, rank) if step.kind == "permute" else (-1, -1),
    )


def _halo(step: Step, mesh: Mesh, rank: int) -> Transfer:
    """Each member sends each the rows of its piece that the other's windows see."""
    assert step.target is not None, step
    dim = step.target[0]
    table = table_of(step.before, step.after, dim, mesh)
    index = mesh.group(step.axes, rank).index(rank)
    first = _dim_piece(step.before, dim, mesh, rank)[0]
    return Transfer(
        "halo",
        step.axes,
        view=local_shape(step.before, mesh, rank),
        out_shape=local_shape(step.after, mesh, rank),
        gather_dim=dim,
        gives=tuple((a - first if b > a else 0, b - a) for a, b in table[index]),
        gets=tuple(row[index][1] - row[index][0] for row in table),
    )


def _dim_piece(layout: Layout, dim: int, mesh: Mesh, rank: int) -> tuple[int, int]:
    """(start, length) of a rank's rows of a dim split along its first factor at most."""
    (start, length), *rest = local_pieces(layout, mesh, rank)[dim]
    unit = math.prod(n for _, n in rest)
    return start * unit, length * unit


def _member_sizes(layout: Layout, spot: Spot, axes: tuple[str, ...], mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Of each member of the group, the length of its piece of the factor."""
    factor, sizes = layout.factor(spot), mesh.sizes
    coords = (mesh.coord(member) for member in mesh.group(axes, rank))
    return tuple(piece(factor.size, tuple((sizes[a], c[a]) for a in factor.axes))[1] for c in coords)


def _peers(step: Step, mesh: Mesh, rank: int) -> tuple[int, int]:
    """Axes are renamed, x to y: the piece of the rank at c[x] goes to the rank where c[y] is the same."""
    here = mesh.coord(rank)
    to, source = dict(here), dict(here)
    for x, y in _renaming(step, mesh).items():
        to[y], source[x] = here[x], here[y]
    group = mesh.group(step.axes, rank)
    return group.index(mesh.rank_of(to)), group.index(mesh.rank_of(source))


def _renaming(step: Step, mesh: Mesh) -> dict[str, str]:
    """Old axis -> new axis of a permute: as the factors show, and the axes that split none fill the places left."""
    pairs = zip((f for d in step.before.dims for f in d), (f for d in step.after.dims for f in d), strict=True)
    names = {x: y for before, after in pairs for x, y in zip(before.axes, after.axes, strict=True)}
    free = [a for a in step.axes if a not in names.values()]
    for axis in step.axes:
        if axis not in names:
            names[axis] = next(a for a in free if mesh.sizes[a] == mesh.sizes[axis])
            free.remove(names[axis])
    return names


def sent_bytes(transfer: Transfer, index: int, ranks: int, itemsize: int) -> int:
    """Payload bytes that member `index` of a group of `ranks` sends: as `collective` has them, exact for uneven pieces.

    all_gather b (k - 1); all_reduce 2 b (k - 1) / k; reduce_scatter and all_to_all b less the own part; permute b;
    halo the rows that others get.
    """
    nbytes = math.prod(transfer.view) * itemsize
    if transfer.kind == "all_gather":
        return nbytes * (ranks - 1)
    if transfer.kind == "all_reduce":
        return 2 * nbytes * (ranks - 1) // ranks
    if transfer.kind == "permute":
        return nbytes if transfer.peers[0] != index else 0
    if transfer.kind == "halo":
        rows = sum(n for member, (_, n) in enumerate(transfer.gives) if member != index)
        return nbytes // max(1, transfer.view[transfer.gather_dim]) * rows
    size = transfer.view[transfer.split_dim]
    return nbytes // size * (size - transfer.split_sizes[index]) if size else 0


class SliceArgs(NamedTuple):
    """The arguments of `local_slice` after the tensor."""

    view: tuple[int, ...]
    dim: int
    start: int
    length: int
    out_shape: tuple[int, ...]


def slice_args(step: Step, mesh: Mesh, rank: int) -> SliceArgs:
    """A `slice` step as `rank` does it."""
    assert step.kind == "slice" and step.target is not None, step
    dim, factor = step.target
    if step.after.factor(step.target).through:
        had, has = _dim_piece(step.before, dim, mesh, rank), local_pieces(step.after, mesh, rank)[dim][0]
        shape = local_shape(step.before, mesh, rank)
        return SliceArgs(shape, dim, has[0] - had[0] if has[1] else 0, has[1], local_shape(step.after, mesh, rank))
    had = local_pieces(step.before, mesh, rank)[dim][factor]
    has = local_pieces(step.after, mesh, rank)[dim][factor]
    view = local_factor_shape(step.before, mesh, rank)
    at = factor_index(step.before, step.target)
    return SliceArgs(view, at, has[0] - had[0], has[1], local_shape(step.after, mesh, rank))


def local_slice(
    x: torch.Tensor, view: tuple[int, ...], dim: int, start: int, length: int, out_shape: tuple[int, ...]
) -> torch.Tensor:
    """A part of `x`, in memory of its own (the rest of `x` can be freed); `x` itself where nothing is cut off."""
    if length == view[dim]:
        return x.reshape(out_shape)
    part = x.reshape(view).narrow(dim, start, length)
    return part.clone(memory_format=torch.contiguous_format).reshape(out_shape)


def is_first(step: Step, mesh: Mesh, rank: int) -> bool:
    """Whether `rank` is the first of its group: the one that keeps the value in a `zero` step."""
    return mesh.group(step.axes, rank)[0] == rank


def zero_unless_first(x: torch.Tensor, is_first: bool) -> torch.Tensor:
    """One term of the sum x + 0 + ... + 0, in memory of its own."""
    if is_first:
        return x.clone(memory_format=torch.contiguous_format)
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def start(transfers: tuple[Transfer, ...], *tensors: torch.Tensor, where: str = "", consume: bool = False) -> Any:
    """Marker: begin collectives of one kind, axes and op as one message; the node's value is a handle.

    `consume` says that the tensors are not used again and may be overwritten.
    """
    raise RuntimeError("start is a marker in a per-rank graph; runtime.execute.compile_rank makes it a request")


def wait(handle: Any, count: int) -> tuple[torch.Tensor, ...]:
    """Marker: the tuple of `count` results of a `start`."""
    raise RuntimeError("wait is a marker in a per-rank graph; runtime.execute.compile_rank makes it a request")


def pause(values: tuple[Any, ...]) -> Any:
    """Marker: stop here with `values`; the node's value is what the caller sends in when it resumes."""
    raise RuntimeError("pause is a marker in a per-rank graph; runtime.execute.compile_rank makes it a request")
