"""Scans, sorts and counts along a dim: that dim whole, the others free. Ops whose output size depends on the data."""

from __future__ import annotations

from typing import Any

import torch

from .dims import additive, bound, dim_of, names, plain, rebound, replaced, whole_rule
from .lead import own_whole
from .notation import Dims, Local, Rule
from .split import Call
from .table import RuleOf, Table, on

aten = torch.ops.aten
TABLE: Table = {}


def _along(call: Call, *linear: set[int]) -> Rule:
    """`a x! b -> a y! b` for every output; a dim that the output lacks is gone from it."""
    x, a = call.operands[0], bound(call)
    if not x.dim():
        return whole_rule(call)
    dim = dim_of(a.get("dim", -1), x.dim())
    own = replaced(names(x.shape), dim, ("x",))
    outs: list[Dims] = []
    for out in call.outputs:
        same = out.dim() == x.dim() and plain(out.shape[dim], x.shape[dim]) and out.shape[dim] == x.shape[dim]
        kept = own if same else replaced(own, dim, ("y",)) if out.dim() == x.dim() else own[:dim] + own[dim + 1 :]
        outs.append(kept)
    return Rule((own,), tuple(outs), whole=frozenset({"x", "y"}), linear=additive(call, *linear))


def _scan(*linear: set[int]) -> RuleOf:
    return lambda call: _along(call, *linear)


on(TABLE, aten.cumsum.default)(_scan({0}))
on(TABLE, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default)(_scan())
on(TABLE, aten.sort.default, aten.sort.stable, aten.topk.default)(_scan())
on(TABLE, aten.argsort.default, aten.argsort.stable)(_scan())


@on(TABLE, aten.msort.default)
def msort(call: Call) -> Rule:
    x = call.operands[0]
    dims = names(x.shape)
    return Rule((dims,), (dims,), whole=frozenset(dims[0]) if dims else frozenset())


@on(TABLE, aten.histc.default)
def histc(call: Call) -> Rule:
    """`a -> bins! {a}` where the range is given; else the range needs the whole."""
    a = bound(call)
    if a["min"] == a["max"]:
        return whole_rule(call, note="histc without a given range")
    dims = names(call.operands[0].shape)
    return Rule((dims,), ((("bins",),),), ({f: "sum" for d in dims for f in d},), whole=frozenset({"bins"}))


@on(TABLE, aten.value_selecting_reduction_backward.default)
def selected_backward(call: Call) -> Rule:
    """`a b, a b -> a x! b`: the gradient goes back to where the value came from."""
    a = bound(call)
    out = call.output
    if not out.dim():
        return whole_rule(call)
    dim = dim_of(a["dim"], out.dim())
    own = replaced(names(out.shape), dim, ("x",))
    picked = replaced(own, dim, ()) if a["keepdim"] else own[:dim] + own[dim + 1 :]

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return rebound(local, sizes=list(local.out_shape()))

    return Rule((picked, picked), (own,), whole=frozenset({"x"}), linear=additive(call, {0}), localize=localize)


@on(TABLE, aten.bucketize.Tensor)
def bucketize(call: Call) -> Rule:
    """`a, n! -> a`."""
    dims = names(call.operands[0].shape)
    return Rule((dims, (("n",),)), (dims,), whole=frozenset({"n"}))


@on(TABLE, aten.searchsorted.Tensor)
def searchsorted(call: Call) -> Rule:
    """`n!, a -> a`, or row by row `a n!, a m -> a m`."""
    edges, x = call.operands[:2]
    dims = names(x.shape)
    own, whole = own_whole(edges.shape, "e")
    rows = own if edges.dim() == 1 else dims[:-1] + own[-1:]
    more = (rows,) if len(call.operands) == 3 else ()
    return Rule((rows, dims, *more), (dims,), whole=whole & frozenset(f for d in rows for f in d))


_SIZED_BY_DATA = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten._unique.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
)


@on(TABLE, *_SIZED_BY_DATA)
def sized_by_data(call: Call) -> Rule:
    return whole_rule(call, note=f"the size of what {call.target} gives depends on the data")
