"""What a rank runs that holds rows [start, start + n) of an indexed dim: the indices of other rows give zeros, or write
nothing, and an index outside the whole dim is an error. Writes go to a copy with one row more, which takes what is not
held."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.bounds import in_bounds


def _rows(ids: torch.Tensor, start: int, held: int, size: int, low: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(row here, `held` where it is not here; whether it is here). Negative indices count from the whole's end."""
    in_bounds(ids, size, low)
    at = torch.where(ids < 0, ids + size, ids) - start
    there = (at >= 0) & (at < held)
    return torch.where(there, at, held), there


def _spread(there: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """`there` shaped to broadcast over x, of which it covers the dims from `dim` on."""
    return there.reshape(*there.shape, *[1] * (x.dim() - dim - there.dim()))


def take_rows(x: torch.Tensor, dim: int, ids: torch.Tensor, start: int, size: int, low: int = 0) -> torch.Tensor:
    """x[..., ids - start, ...] at `dim`, zeros where the row is not held. A 0-d `ids` removes the dim."""
    held = x.shape[dim]
    rows, there = _rows(ids, start, held, size, low)
    shape = (*x.shape[:dim], *ids.shape, *x.shape[dim + 1 :])
    if held == 0:
        return x.new_zeros(shape)
    out = x.index_select(dim, rows.clamp(max=held - 1).reshape(-1)).reshape(shape)
    return out.masked_fill_(_spread(there.logical_not(), out, dim), 0)


def gather_rows(x: torch.Tensor, dim: int, ids: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """`gather` of the rows held, zeros elsewhere."""
    in_bounds(ids, size)
    held = x.shape[dim]
    if held == 0:
        return x.new_zeros(ids.shape)
    there = (ids >= start) & (ids < start + held)
    return x.gather(dim, torch.where(there, ids - start, 0)).masked_fill_(there.logical_not(), 0)


def _room(x: torch.Tensor, dim: int, first: bool) -> torch.Tensor:
    """A copy of x (zeros, if not `first`) with one row more at `dim`."""
    shape = list(x.shape)
    shape[dim] += 1
    out = x.new_zeros(shape)
    if first:
        out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def _kept(room: torch.Tensor, dim: int) -> torch.Tensor:
    return room.narrow(dim, 0, room.shape[dim] - 1).contiguous()


def put_rows(
    x: torch.Tensor, dim: int, ids: torch.Tensor, values: torch.Tensor, start: int, size: int, add: bool, first: bool
) -> torch.Tensor:
    """`index_put` at `dim` of the rows held; `first` false: only what is added."""
    room = _room(x, dim, first)
    at = (None,) * dim + (_rows(ids, start, x.shape[dim], size, -size)[0],)
    return _kept(torch.ops.aten.index_put_(room, list(at), values, add), dim)


def add_rows(
    x: torch.Tensor, dim: int, ids: torch.Tensor, source: torch.Tensor, start: int, size: int, alpha: Any, first: bool
) -> torch.Tensor:
    """`index_add` at `dim` of the rows held; `first` false: only what is added."""
    rows = _rows(ids, start, x.shape[dim], size)[0]
    return _kept(_room(x, dim, first).index_add_(dim, rows, source, alpha=alpha), dim)


def scatter_rows(
    x: torch.Tensor, dim: int, ids: torch.Tensor, source: Any, start: int, size: int, add: bool, first: bool
) -> torch.Tensor:
    """`scatter` (or scatter_add) at `dim` into the rows held; `first` false: only what is added."""
    rows, room = _rows(ids, start, x.shape[dim], size)[0], _room(x, dim, first)
    return _kept(room.scatter_add_(dim, rows, source) if add else room.scatter_(dim, rows, source), dim)


def put_added(x: torch.Tensor, indices: list[Any], values: torch.Tensor, accumulate: bool = True) -> torch.Tensor:
    """What an accumulating `index_put` adds to x: the share of the ranks but the first, which adds it to x itself."""
    return torch.ops.aten.index_put_(torch.zeros_like(x), indices, values, accumulate)


def index_added(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1
) -> torch.Tensor:
    """What `index_add` adds to x."""
    return torch.zeros_like(x).index_add_(dim, index, source, alpha=alpha)


def scatter_added(x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """What `scatter_add` adds to x."""
    return torch.zeros_like(x).scatter_add_(dim, index, src)
