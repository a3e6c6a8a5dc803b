"""Which dim of each tensor of a call is its batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from .errors import CaptureError


def batch_of(args: tuple, kwargs: dict, given: dict[Any, int | None]) -> tuple[int | None, ...]:
    """Per tensor of the call its batch dim: as given, else dim 0 of the first tensor that is not spoken of."""
    _check_batch(args, kwargs, given)
    out: list[int | None] = []
    open_seat = all(d is None for d in given.values())
    for key, value in [*enumerate(args), *kwargs.items()]:
        for t in pytree.tree_leaves(value):
            if not isinstance(t, torch.Tensor):
                continue
            first = open_seat and key not in given and t.dim() > 0
            open_seat = open_seat and not first
            out.append(given.get(key, 0 if first else None))
    return tuple(out)


def _check_batch(args: tuple, kwargs: dict, given: dict[Any, int | None]) -> None:
    """Raises:
    CaptureError: batch_dims names a dim that a tensor has not.
    """
    call = {**dict(enumerate(args)), **kwargs}
    for key, dim in given.items():
        for t in pytree.tree_leaves(call.get(key)):
            if isinstance(t, torch.Tensor) and dim is not None and not (isinstance(dim, int) and 0 <= dim < t.dim()):
                raise CaptureError(
                    f"batch_dims={{{key!r}: {dim!r}}}, but that tensor is {list(t.shape)}: give a dim of 0 to "
                    f"{t.dim() - 1}, or None where it has no batch"
                )
