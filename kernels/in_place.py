"""Ops that can write their result over an operand which nobody reads any more, or add it to a sum as they make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import linear_cross_entropy  # noqa: F401  (its ops)
from .cross_entropy import nll_backward_

_aten = torch.ops.aten

IN_PLACE: dict[Any, tuple[Callable[..., Any], int]] = {
    torch.ops.meshwright.nll_backward.default: (nll_backward_, 1),
}
"""Of each op the function that does the same in place, and the operand that it writes over: of the result's shape,
dtype and strides."""

WRITES: dict[Any, int] = dict(IN_PLACE.values())
"""Of each such function the operand."""


def add_embedding_backward_(total, grad, ids, num_rows: int, padding_idx: int, scale_grad_by_freq: bool):
    """total [num_rows, d] += the gradient of an embedding, by its rows: the table is neither made nor read whole.

    On a GPU it is, for rows are added there in no fixed order.
    """
    if scale_grad_by_freq or total.device.type != "cpu":
        return total.add_(_aten.embedding_dense_backward(grad, ids, num_rows, padding_idx, scale_grad_by_freq))
    flat, rows = ids.reshape(-1), grad.reshape(ids.numel(), -1)
    if padding_idx >= 0:
        rows = rows.masked_fill((flat == padding_idx).unsqueeze(1), 0.0)
    return total.index_add_(0, flat, rows)


ADDING: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _aten.addmm_.default,
    _aten.bmm.default: _aten.baddbmm_.default,
    _aten.embedding_dense_backward.default: add_embedding_backward_,
}
"""Of each op the function that adds its result to a first argument and returns that; no tensor of that size is made."""

ADDING_ONE: dict[Any, tuple[int, Callable[..., Any]]] = {
    torch.ops.meshwright.linear_nll_step.default: (2, torch.ops.meshwright.linear_nll_step_.default),
}
"""The same of ops with several results: which of them is added."""
