"""Softmax along a dim. The dim may be split after the call has been written out, by amax, exp and sum:

    m = max x      e = exp(x - m)      softmax = e / Σ e      log_softmax = x - m - log Σ e
    backward: dx = y (g - Σ g y)       of the logarithm: dx = g - exp(y) Σ g
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .dims import additive, bound, dim_of, names, replaced
from .notation import Rule
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}
HALF = (torch.float16, torch.bfloat16)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32 if it is of half precision: ATen's kernels compute so inside."""
    return x.float() if x.dtype in HALF else x


def softmax_parts(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """`_softmax` written out."""
    z = wide(x)
    e = torch.exp(z - torch.amax(z, (dim,), True))
    y = e / torch.sum(e, (dim,), True)
    return y if half_to_float else y.to(x.dtype)


def safe_softmax_parts(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`_safe_softmax` written out: a row of -inf alone gives zeros."""
    z = wide(x if dtype is None else x.to(dtype))
    m = torch.amax(z, (dim,), True)
    none = m == -math.inf
    e = torch.exp(z - m.masked_fill(none, 0.0))
    y = e / torch.sum(e, (dim,), True).masked_fill(none, 1.0)
    return y.to(dtype or x.dtype)


def log_softmax_parts(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """`_log_softmax` written out."""
    z = wide(x)
    z = z - torch.amax(z, (dim,), True)
    y = z - torch.log(torch.sum(torch.exp(z), (dim,), True))
    return y if half_to_float else y.to(x.dtype)


def softmax_backward_parts(
    grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """`_softmax_backward_data` written out."""
    g, y = wide(grad), wide(output)
    return (y * (g - torch.sum(g * y, (dim,), True))).to(input_dtype)


def log_softmax_backward_parts(
    grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    """`_log_softmax_backward_data` written out."""
    g, y = wide(grad), wide(output)
    return (g - torch.exp(y) * torch.sum(g, (dim,), True)).to(input_dtype)


def _along(call: Call, parts: Callable, *linear: set[int]) -> Rule:
    """`a x b -> a x b` for every operand, x by `parts`."""
    x = call.operands[0]
    dims = names(x.shape)
    if x.dim():
        dims = replaced(dims, dim_of(bound(call)["dim"], x.dim()), ("x",))
    return Rule(
        (dims,) * len(call.operands),
        (dims,),
        linear=additive(call, *linear),
        decompose={"x": parts} if x.dim() else {},
    )


@on(TABLE, aten._softmax.default)
def softmax(call: Call) -> Rule:
    return _along(call, softmax_parts)


@on(TABLE, aten._safe_softmax.default)
def safe_softmax(call: Call) -> Rule:
    return _along(call, safe_softmax_parts)


@on(TABLE, aten._log_softmax.default)
def log_softmax(call: Call) -> Rule:
    return _along(call, log_softmax_parts)


@on(TABLE, aten._softmax_backward_data.default)
def softmax_backward(call: Call) -> Rule:
    return _along(call, softmax_backward_parts, {0})


@on(TABLE, aten._log_softmax_backward_data.default)
def log_softmax_backward(call: Call) -> Rule:
    return _along(call, log_softmax_backward_parts, {0})
