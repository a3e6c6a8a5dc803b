"""Normalisations over a tensor's last dims or over groups of channels: the normalised dims whole, the others free."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels import add_norm as _registers_the_ops  # noqa: F401
from .dims import additive, bound, names, rebound
from .lead import guarded, outputs_of, own_whole
from .notation import Dims, Local, Rule
from .split import Call
from .table import Table, on

aten = torch.ops.aten
mw = torch.ops.meshwright
TABLE: Table = {}


def _rows(call: Call, grads: int) -> tuple[Dims, Dims, Dims, frozenset[str]]:
    """(dims of x, of a statistic, of the weight, the normalised factors); x is operand number `grads`."""
    x = call.operands[grads]
    k = len(bound(call)["normalized_shape"])
    lead = names(x.shape)[: x.dim() - k]
    normed, whole = own_whole(x.shape[x.dim() - k :], "h")
    return lead + normed, lead + ((),) * k, normed, whole


def _summed(lead: Dims) -> dict[str, str]:
    return {f: "sum" for d in lead for f in d}


@on(TABLE, aten.native_layer_norm.default, mw.rms_norm.default, aten._fused_rms_norm.default)
def rows_norm(call: Call) -> Rule:
    """`a h!, h!, h! -> a h!, a 1, a 1`."""
    x, stat, weight, whole = _rows(call, 0)
    more = (weight,) * (len(call.operands) - 1)
    outs = (x, *(stat for _ in call.outputs[1:]))
    return guarded(Rule((x, *more), outs, whole=whole), call)


@on(TABLE, aten.native_layer_norm_backward.default)
def layer_norm_backward(call: Call) -> Rule:
    """`a h!, a h!, a 1, a 1, h!, h! -> a h!, h! {a}, h! {a}`."""
    x, stat, weight, whole = _rows(call, 1)
    sums = _summed(stat)
    return guarded(
        Rule(
            (x, x, stat, stat, *(weight,) * (len(call.operands) - 4)),
            outputs_of(call, x, weight, weight),
            ({}, sums, sums),
            whole=whole,
            linear=additive(call, {0}),
        ),
        call,
    )


@on(TABLE, mw.rms_norm_backward.default, aten._fused_rms_norm_backward.default)
def rms_norm_backward(call: Call) -> Rule:
    """`a h!, a h!, a 1, h! -> a h!, h! {a}`."""
    x, stat, weight, whole = _rows(call, 1)
    dweight: Dims = weight
    sums = _summed(stat)
    if isinstance(call.outputs[1], torch.Tensor) and bound(call)["weight"] is None:
        dweight, own = own_whole(call.outputs[1].shape, "e")
        whole, sums = whole | own, {}
    return guarded(
        Rule(
            (x, x, stat, *(weight,) * (len(call.operands) - 3)),
            outputs_of(call, x, dweight),
            ({}, sums),
            whole=whole,
            linear=additive(call, {0}),
        ),
        call,
    )


@on(TABLE, mw.add_rms_norm.default, mw.add_layer_norm.default)
def add_norm(call: Call) -> Rule:
    """`a h!, a h!, h!, h! -> a h!, a h!, a 1, a 1`."""
    x, stat, weight, whole = _rows(call, 0)
    more = (weight,) * (len(call.operands) - 2)
    outs = (x, x, *(stat for _ in call.outputs[2:]))
    return guarded(Rule((x, x, *more), outs, whole=whole), call)


@on(TABLE, mw.add_rms_norm_backward.default, mw.add_layer_norm_backward.default)
def add_norm_backward(call: Call) -> Rule:
    """`a h!, a h!, a h!, a 1, a 1, h!, h! -> a h!, h! {a}, h! {a}`; linear in both gradients together."""
    a = bound(call)
    grads = 1 if a["grad_sum"] is None else 2
    x, stat, weight, whole = _rows(call, grads)
    stats = 2 if "mean" in a else 1
    operands = (*(x,) * (grads + 1), *(stat,) * stats, *(weight,) * (len(call.operands) - grads - 1 - stats))
    outs, sums = [x], [{}]
    for i, name in enumerate(("weight", "bias")[: len(call.outputs) - 1]):
        own = own_whole(call.outputs[i + 1].shape, f"e{i}_")  # of no elements, where there is no such parameter
        outs.append(own[0] if a[name] is None else weight)
        sums.append({} if a[name] is None else _summed(stat))
        whole |= own[1] if a[name] is None else frozenset()
    linear = additive(call, set(range(grads)))
    return guarded(Rule(operands, tuple(outs), tuple(sums), whole=whole, linear=linear), call)


def _groups(call: Call, grads: int) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """(dims of x, of a weight, the sizes of `(g c)`, the whole factors); x is operand number `grads`."""
    x, a = call.operands[grads], bound(call)
    space, whole = own_whole(x.shape[2:], "s")
    sizes = {"g": a["group"], "c": a["C"] // a["group"]}
    return (("n",), ("g", "c"), *space), (("g", "c"),), sizes, whole | {"c"}


def _local_groups(call: Call, x: int) -> Any:
    channels = bound(call)["C"] // bound(call)["group"]

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        n, c = local.in_shape(x)[:2]
        return rebound(local, N=n, C=c, group=c // channels)

    return localize


@on(TABLE, aten.native_group_norm.default)
def group_norm(call: Call) -> Rule:
    """`n (g c!) s!, (g c!), (g c!) -> n (g c!) s!, n g, n g`."""
    x, weight, sizes, whole = _groups(call, 0)
    stat = (("n",), ("g",))
    more = (weight,) * (len(call.operands) - 1)
    rule = Rule((x, *more), (x, stat, stat), whole=whole, sizes=sizes, localize=_local_groups(call, 0))
    return guarded(rule, call)


@on(TABLE, aten.native_group_norm_backward.default)
def group_norm_backward(call: Call) -> Rule:
    """`n (g c!) s!, n (g c!) s!, n g, n g, (g c!) -> n (g c!) s!, (g c!) {n}, (g c!) {n}`."""
    x, weight, sizes, whole = _groups(call, 1)
    stat = (("n",), ("g",))
    return guarded(
        Rule(
            (x, x, stat, stat, *(weight,) * (len(call.operands) - 4)),
            outputs_of(call, x, weight, weight),
            ({}, {"n": "sum"}, {"n": "sum"}),
            whole=whole,
            linear=additive(call, {0}),
            sizes=sizes,
            localize=_local_groups(call, 1),
        ),
        call,
    )
