"""Reductions: over a factor that sums, means or bounds give partial values, else over whole dims.

sum, mean     `a b -> a {b}`          amax   `a b -> a {b|max}`
others        `a b! -> a`             var, std, norms, logsumexp, any, all: b splits written out (`spread`)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .dims import additive, bound, dims_of, factors_in, names, plain, rebound
from .localops import mean_of
from .notation import Dims, Local, Rule
from .split import Call
from .spread import written_out
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}


def _dims(call: Call) -> tuple[Dims, Dims, tuple[int, ...], frozenset[str]]:
    """(the operand's dims, the output's, the dims reduced, their factors)"""
    a = bound(call)
    dims = names(call.operands[0].shape)
    gone = dims_of(a.get("dim"), len(dims))
    out = tuple(() if i in gone else d for i, d in enumerate(dims) if i not in gone or a.get("keepdim"))
    return dims, out, gone, factors_in([dims[i] for i in gone])


@on(TABLE, aten.sum.default, aten.sum.dim_IntList, aten.nansum.default)
def sum_(call: Call) -> Rule:
    """`a b -> a {b}`"""
    dims, out, _, factors = _dims(call)
    linear = () if call.target is aten.nansum.default else additive(call, {0})
    return Rule((dims,), (out,), (dict.fromkeys(factors, "sum"),), linear=linear)


@on(TABLE, aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count(call: Call) -> Rule:
    """`a b -> a {b}`, of integers"""
    dims, out, _, factors = _dims(call)
    return Rule((dims,), (out,), (dict.fromkeys(factors, "sum"),))


@on(TABLE, aten.mean.default, aten.mean.dim)
def mean(call: Call) -> Rule:
    """`a b -> a {b}`: a rank's term is its sum over the whole count."""
    dims, out, gone, factors = _dims(call)
    counts = [call.operands[0].shape[i] for i in gone]
    linear = additive(call, {0})
    if not plain(*counts) or 0 in counts:
        return Rule((dims,), (out,), whole=factors, linear=linear)
    whole_count = math.prod(counts)
    keepdim, dtype = bool(bound(call).get("keepdim")), bound(call)["dtype"]

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return mean_of, (local.args[0], list(gone), keepdim, whole_count, dtype), {}

    return Rule((dims,), (out,), (dict.fromkeys(factors, "sum"),), linear=linear, localize=localize)


def _lowest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _bound_rule(call: Call, op: str, neutral: Callable[[torch.dtype], Any]) -> Rule:
    dims, out, gone, factors = _dims(call)
    fill = neutral(call.outputs[0].dtype)

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        shape = local.in_shape(0)
        if any(plain(shape[i]) and shape[i] == 0 for i in gone):  # a rank with nothing to bound
            return aten.new_full.default, (local.args[0], list(local.out_shape()), fill), {}
        return rebound(local)

    return Rule((dims,), (out,), (dict.fromkeys(factors, op),), localize=localize)


@on(TABLE, aten.amax.default, aten.max.default)
def amax(call: Call) -> Rule:
    """`a b -> a {b|max}`"""
    return _bound_rule(call, "max", _lowest)


@on(TABLE, aten.amin.default, aten.min.default)
def amin(call: Call) -> Rule:
    """`a b -> a {b|min}`"""
    return _bound_rule(call, "min", _highest)


@on(TABLE, aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
@on(TABLE, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.aminmax.default)
@on(TABLE, aten.prod.default, aten.prod.dim_int, aten.logsumexp.default, aten.median.default)
@on(TABLE, aten.var.default, aten.var.dim, aten.var.correction, aten.std.default, aten.std.dim, aten.std.correction)
@on(TABLE, aten.var_mean.default, aten.var_mean.dim, aten.var_mean.correction, aten.std_mean.correction)
@on(TABLE, aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype)
def whole_reduction(call: Call) -> Rule:
    """`a b! -> a`, for each output; `a b -> a` by simpler reductions where there are such"""
    dims, out, gone, factors = _dims(call)
    outputs = (out,) * len(call.outputs)
    parts = written_out(call, gone)
    if parts is None:
        return Rule((dims,), outputs, whole=factors)
    return Rule((dims,), outputs, decompose=dict.fromkeys(sorted(factors), parts))


@on(TABLE, aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
def fft(call: Call) -> Rule:
    """`a n! -> a m!`: whole along the dims transformed, linear."""
    x, y = call.operands[0].shape, call.outputs[0].shape
    moved = dims_of(bound(call)["dim"], len(x))
    into, out = list(names(x)), list(names(y))
    for d in moved:
        into[d], out[d] = names((x[d],), f"n{d}_")[0], names((y[d],), f"m{d}_")[0]
    whole = factors_in([into[d] for d in moved], [out[d] for d in moved])
    dtype = call.outputs[0].dtype

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        shape = local.out_shape()
        if any(plain(n) and n == 0 for n in shape):  # the library takes no empty batch
            return aten.new_zeros.default, (local.args[0], list(shape)), {"dtype": dtype}
        return rebound(local)

    return Rule((tuple(into),), (tuple(out),), whole=whole, linear=additive(call, {0}), localize=localize)
