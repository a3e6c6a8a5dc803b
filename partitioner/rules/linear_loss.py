"""The last linear layer with its cross entropy: rows are free, and so is the vocabulary.

    linear_nll            t h!, v h!, v, t -> t, t            v by a maximum, then sums (`linear_nll_parts`)
    linear_max            t h!, v h!, v -> t {v|max}
    linear_sums           t h!, v h!, v, t, t -> t {v}, t {v}
    linear_nll_backward   t, t, t h!, v h!, v, t, t -> t h! {v}, v h! {t}, v {t}

The bias v and the gradient of the log-sum-exp, the second t, need not be there.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels import linear_cross_entropy as _registers_the_ops  # noqa: F401
from .contraction import flops_of
from .dims import additive, bound, rebound
from .lead import guarded, own_whole
from .notation import Dims, Local, Rule
from .split import Call
from .table import Table, on

mw = torch.ops.meshwright
TABLE: Table = {}

_DIMS: dict[str, Dims] = {
    "grad": (("t",),),
    "grad_lse": (("t",),),
    "x": (("t",), ("h",)),
    "w": (("v",), ("h",)),
    "b": (("v",),),
    "target": (("t",),),
    "top": (("t",),),
    "lse": (("t",),),
}


def linear_nll_parts(x: Any, w: Any, b: Any, target: torch.Tensor, ignore_index: int) -> tuple[Any, Any]:
    """`meshwright::linear_nll` as a maximum and sums over the vocabulary."""
    top = mw.linear_max(x, w, b)
    total, picked = mw.linear_sums(x, w, b, target, top, ignore_index, 0, w.shape[0])
    lse = torch.log(total) + top
    return (lse - picked).masked_fill(target == ignore_index, 0.0), lse


def _rule(call: Call, outputs: tuple[Dims, ...], sums: tuple[dict[str, str], ...], times: float, **more: Any) -> Rule:
    """Operands as they are named in the schema, those that are there."""
    a = bound(call)
    inputs = tuple(dims for name, dims in _DIMS.items() if isinstance(a.get(name), torch.Tensor))
    return guarded(
        Rule(
            inputs,
            outputs,
            sums,
            whole=frozenset({"h"}) | more.pop("whole", frozenset()),
            ordered=frozenset({"v"}),
            flops=times * flops_of(*a["x"].shape, a["w"].shape[0]),
            **more,
        ),
        call,
    )


def _local_start(call: Call) -> Any:
    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return rebound(local, start=bound(call)["start"] + local.start("v"))

    return localize


@on(TABLE, mw.linear_nll.default)
def linear_nll(call: Call) -> Rule:
    return _rule(call, ((("t",),), (("t",),)), (), 1.0, decompose={"v": linear_nll_parts})


@on(TABLE, mw.linear_max.default)
def linear_max(call: Call) -> Rule:
    return _rule(call, ((("t",),),), ({"v": "max"},), 1.0)


@on(TABLE, mw.linear_sums.default)
def linear_sums(call: Call) -> Rule:
    return _rule(call, ((("t",),), (("t",),)), ({"v": "sum"}, {"v": "sum"}), 1.0, localize=_local_start(call))


@on(TABLE, mw.linear_nll_backward.default)
def linear_nll_backward(call: Call) -> Rule:
    a = bound(call)
    db: Dims = (("v",),)
    sums, whole = {"t": "sum"}, frozenset()
    if a["b"] is None:
        db, whole = own_whole(call.outputs[2].shape, "e")
        sums = {}
    outputs = ((("t",), ("h",)), (("v",), ("h",)), db)
    linear = additive(call, {0} if a["grad_lse"] is None else {0, 1})
    return _rule(
        call, outputs, ({"v": "sum"}, {"t": "sum"}, sums), 3.0, whole=whole, linear=linear, localize=_local_start(call)
    )
