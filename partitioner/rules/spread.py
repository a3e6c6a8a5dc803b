"""Reductions that are no plain sum or bound, written out by ones that are, so that a dim they reduce may be split.

    var       Σ (x - mean)² / (n - correction)       std    its square root
    logsumexp m + log Σ exp(x - m), m = max x        norm   (Σ |x|^p)^(1/p), max |x|, min |x|, the count of x ≠ 0
    any, all  the maximum, the minimum of x ≠ 0 as whole numbers
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .dims import bound, plain
from .softmax import wide
from .split import Call

aten = torch.ops.aten
Dims = tuple[int, ...]
Parts = Callable[..., Any]


def var_mean_of(x: torch.Tensor, dims: Dims, keepdim: bool, correction: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`var_mean` written out, in float32 at least."""
    z = wide(x)
    count = math.prod(x.shape[d] for d in dims)
    apart = z - torch.mean(z, dims, True)
    squares = torch.sum(apart * apart, dims, keepdim)
    return squares / max(count - correction, 0), torch.mean(z, dims, keepdim)


def logsumexp_of(x: torch.Tensor, dims: Dims, keepdim: bool) -> torch.Tensor:
    """`logsumexp` written out; a row of -inf alone gives -inf, one with an inf gives inf."""
    z = wide(x)
    top = torch.amax(z, dims, True)
    top = top.masked_fill(torch.abs(top) == math.inf, 0.0)
    total = torch.log(torch.sum(torch.exp(z - top), dims, keepdim))
    return (total + (top if keepdim else torch.squeeze(top, dims))).to(x.dtype)


def norm_of(x: torch.Tensor, p: float, dims: Dims, keepdim: bool, dtype: torch.dtype) -> torch.Tensor:
    """A vector norm written out, in float32 at least."""
    z = torch.abs(wide(x))
    if p == math.inf:
        return torch.amax(z, dims, keepdim).to(dtype)
    if p == -math.inf:
        return torch.amin(z, dims, keepdim).to(dtype)
    if p == 0:
        return torch.sum((z != 0).to(z.dtype), dims, keepdim).to(dtype)
    if p == 1:
        return torch.sum(z, dims, keepdim).to(dtype)
    if p == 2:
        return torch.sqrt(torch.sum(z * z, dims, keepdim)).to(dtype)
    return torch.pow(torch.sum(torch.pow(z, p), dims, keepdim), 1.0 / p).to(dtype)


def some_of(x: torch.Tensor, dims: Dims, keepdim: bool, dtype: torch.dtype, every: bool) -> torch.Tensor:
    """`any`, or `all`, written out."""
    ones = (x != 0).to(torch.int32)
    return ((torch.amin if every else torch.amax)(ones, dims, keepdim) != 0).to(dtype)


def _var(call: Call, dims: Dims) -> Parts:
    a = bound(call)
    keepdim = bool(a.get("keepdim"))
    correction = a["correction"] if "correction" in a else int(a["unbiased"])
    free = 1 if correction is None else correction
    name, dtype = call.target._schema.name, call.operands[0].dtype

    def parts(x: torch.Tensor, *_: Any, **__: Any) -> Any:
        var, mean = var_mean_of(x, dims, keepdim, free)
        first = (torch.sqrt(var) if "std" in name else var).to(dtype)
        return (first, mean.to(dtype)) if "mean" in name else first

    return parts


def _logsumexp(call: Call, dims: Dims) -> Parts:
    keepdim = bool(bound(call)["keepdim"])
    return lambda x, *_, **__: logsumexp_of(x, dims, keepdim)


def _norm(call: Call, dims: Dims) -> Parts | None:
    a = bound(call)
    p = a["ord"] if "ord" in a else 2 if a["p"] is None else a["p"]
    keepdim, given, dtype = bool(a.get("keepdim")), a.get("dtype"), call.outputs[0].dtype
    return lambda x, *_, **__: norm_of(x if given is None else x.to(given), float(p), dims, keepdim, dtype)


def _some(call: Call, dims: Dims) -> Parts:
    keepdim, dtype = bool(bound(call).get("keepdim")), call.outputs[0].dtype
    every = call.target._schema.name.endswith("all")
    return lambda x, *_, **__: some_of(x, dims, keepdim, dtype, every)


WRITTEN = {
    aten.var: _var,
    aten.var_mean: _var,
    aten.std: _var,
    aten.std_mean: _var,
    aten.logsumexp: _logsumexp,
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten.any: _some,
    aten.all: _some,
}


def written_out(call: Call, dims: Dims) -> Parts | None:
    """A function of the call's arguments that reduces `dims` by sums and bounds; None where there is none."""
    make = WRITTEN.get(call.target.overloadpacket)
    x = call.operands[0]
    counts = [x.shape[d] for d in dims]
    if make is None or not dims or not plain(*counts) or 0 in counts:
        return None
    if make is not _some and not x.dtype.is_floating_point:
        return None
    return make(call, dims)
