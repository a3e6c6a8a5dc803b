"""Matrix products: linear in each matrix, partial over the dim contracted.

Where a bias is added, one rank adds it: the others of a split contraction run with `beta=0`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .dims import additive, argument, bound, plain, rebound, whole_rule
from .localops import grouped_mm_of
from .notation import Local, Rule, rule
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}
BY_NAME: Table = {}


def flops_of(*sizes: Any) -> float:
    """2 * m * k * n ... where the sizes are known."""
    return 2.0 * math.prod(sizes) if plain(*sizes) else 0.0


@on(TABLE, aten.mm.default, aten._int_mm.default)
def mm(call: Call) -> Rule:
    """`m k, k n -> m n {k}`"""
    (m, k), n = call.operands[0].shape, call.operands[1].shape[1]
    return rule("m k, k n -> m n {k}", linear="0, 1", flops=flops_of(m, k, n))


@on(TABLE, aten.bmm.default)
def bmm(call: Call) -> Rule:
    """`b m k, b k n -> b m n {k}`"""
    (b, m, k), n = call.operands[0].shape, call.operands[1].shape[2]
    return rule("b m k, b k n -> b m n {k}", linear="0, 1", flops=flops_of(b, m, k, n))


@on(TABLE, aten.mv.default)
def mv(call: Call) -> Rule:
    """`m k, k -> m {k}`"""
    return rule("m k, k -> m {k}", linear="0, 1", flops=flops_of(*call.operands[0].shape))


@on(TABLE, aten.dot.default, aten.vdot.default)
def dot(call: Call) -> Rule:
    """`k, k -> _ {k}`"""
    return rule("k, k -> _ {k}", linear="0, 1", flops=flops_of(*call.operands[0].shape))


def _with_bias(call: Call, line: str, out: str, *sizes: Any) -> Rule:
    """A product beside a bias that broadcasts to it; `out` names the product's dims."""
    words = out.split()
    shape = call.operands[0].shape
    tail = words[len(words) - len(shape) :]
    bias = " ".join("1" if plain(n) and n == 1 else w for w, n in zip(tail, shape, strict=True)) or "_"

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return rebound(local) if local.start("k") == 0 else rebound(local, beta=0)

    sets = additive(call, {0, 1}, {0, 2})
    return rule(f"{bias}, {line} -> {out} {{k}}", ordered="k", linear=sets, localize=localize, flops=flops_of(*sizes))


@on(TABLE, aten.addmm.default)
def addmm(call: Call) -> Rule:
    """`n, m k, k n -> m n {k}`"""
    (m, k), n = call.operands[1].shape, call.operands[2].shape[1]
    return _with_bias(call, "m k, k n", "m n", m, k, n)


@on(TABLE, aten.baddbmm.default)
def baddbmm(call: Call) -> Rule:
    """`b m n, b m k, b k n -> b m n {k}`"""
    (b, m, k), n = call.operands[1].shape, call.operands[2].shape[2]
    return _with_bias(call, "b m k, b k n", "b m n", b, m, k, n)


@on(TABLE, aten.addmv.default)
def addmv(call: Call) -> Rule:
    """`m, m k, k -> m {k}`"""
    return _with_bias(call, "m k, k", "m", *call.operands[1].shape)


GROUPED = {
    (2, 3): "t! k, g! k n, g! -> t! n {k}",
    (3, 2): "g! m k, k t!, g! -> m t! {k}",
    (2, 2): "m t!, t! n, g! -> g! m n",
    (3, 3): "g m k, g k n -> g m n {k}",
}
"""The line of a grouped product by the dims of its two operands; t, the rows of all groups, is cut by offsets."""


@on(TABLE, aten._grouped_mm.default)
def grouped_mm(call: Call) -> Rule:
    """See `GROUPED`."""
    a, b = call.operands[:2]
    line = GROUPED[a.dim(), b.dim()]
    flops = flops_of(*a.shape, b.shape[-1])
    if bound(call)["bias"] is not None:
        return whole_rule(call, note="a grouped product with a bias is not split").but(flops=flops)

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        rest = [argument(local, name) for name in ("self", "mat2", "offs", "bias", "out_dtype")]
        return grouped_mm_of, (*rest, list(local.out_shape())), {}

    known = plain(*call.outputs[0].shape)
    return rule(line, linear="0, 1", flops=flops, localize=localize if known else None)


@on(BY_NAME, "transformers.grouped_mm_fallback.default")
def grouped_mm_fallback(call: Call) -> Rule:
    """`t! k, g! k n, g! -> t! n {k}`"""
    (t, k), n = call.operands[0].shape, call.operands[1].shape[2]
    return rule(GROUPED[2, 3], linear="0, 1", flops=flops_of(t, k, n))


@on(BY_NAME, "transformers.grouped_mm_fallback_backward.default")
def grouped_mm_fallback_backward(call: Call) -> Rule:
    """`t! k, g! k n, g!, t! n -> t! k {n}, g! k n`"""
    (t, k), n = call.operands[0].shape, call.operands[1].shape[2]
    return rule("t! k, g! k n, g!, t! n -> t! k {n}, g! k n", linear="3", flops=2 * flops_of(t, k, n))
