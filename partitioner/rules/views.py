"""Ops that rearrange a tensor without changing a value: reshapes, permutations, expansions.

All are linear: a partial sum viewed is a partial sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .dims import (
    additive,
    bound,
    dim_of,
    dims_of,
    factors_in,
    local_sizes,
    names,
    plain,
    rebound,
    replaced,
    unit,
    whole_rule,
    without,
)
from .localops import as_strided_of, as_strided_scatter_of, view_as_complex_of, view_dtype_of
from .notation import Dims, Local, Rule
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}


def identity(call: Call) -> Rule:
    """`a b -> a b`, for an output of the operand's own shape."""
    dims = names(call.operands[0].shape)
    return Rule((dims,), (dims,), linear=additive(call, {0}))


on(TABLE, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)(identity)
on(TABLE, aten._conj.default, aten._neg_view.default)(identity)


@dataclass
class Refinement:
    """Two shapes of as many elements, both written in one list of factors.

    The walk goes from the major dims on both sides: the greatest common divisor of the two running sizes is a factor
    of both. Where it is 1 and neither side is used up the cuts cross: the elements up to the next cut that both sides
    have form a block whose dims are whole, each side with names of its own, save for a minor factor in common.

        [6, 4] -> [24]       d0 d1 -> (d0 d1)
        [12, 8] -> [16, 6]   (d0 i0!) (i1! d1) -> (d0 o0!) (o1! d1)   of 4, 3, 4, 2 -> 4, 4, 3, 2
    """

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    sides: tuple[list[list[str]], list[list[str]]] = field(init=False)
    sizes: dict[str, int] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sides = tuple([[] for _ in shape] for shape in self.shapes)  # type: ignore[assignment]
        self._at, self._left = [-1, -1], [1, 1]
        while self._advance():
            a, b = self._left
            common = math.gcd(a, b)
            if common > 1:
                self._shared(common, self._at[0], self._at[1])
                self._left = [a // common, b // common]
            else:
                self._block()

    def _advance(self) -> bool:
        """Step each side past what it has used up; False at the end of both."""
        for side in (0, 1):
            while self._left[side] == 1 and self._at[side] + 1 < len(self.shapes[side]):
                self._at[side] += 1
                self._left[side] = self.shapes[side][self._at[side]]
        return self._left != [1, 1]

    def _shared(self, size: int, i: int, j: int) -> None:
        name = f"d{len(self.sizes)}"
        self.sizes[name] = size
        self.sides[0][i].append(name)
        self.sides[1][j].append(name)

    def _block(self) -> None:
        """Consume both sides up to the next cut they share."""
        spans: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        totals = [1, 1]
        for side in (0, 1):
            spans[side].append((self._at[side], self._left[side]))
            totals[side] = self._left[side]
        while totals[0] != totals[1]:
            side = 0 if totals[0] < totals[1] else 1
            self._at[side] += 1
            size = self.shapes[side][self._at[side]]
            spans[side].append((self._at[side], size))
            totals[side] *= size
        (i, a), (j, b) = spans[0][-1], spans[1][-1]
        minor = math.gcd(a, b)
        spans[0][-1], spans[1][-1] = (i, a // minor), (j, b // minor)
        for side, tag in enumerate("io"):
            for at, size in spans[side]:
                self._own(side, at, size, tag)
        if minor > 1:
            self._shared(minor, i, j)
        self._left = [1, 1]

    def _own(self, side: int, at: int, size: int, tag: str) -> None:
        if size > 1:
            name = f"{tag}{len(self.sizes)}"
            self.sizes[name] = size
            self.whole.add(name)
            self.sides[side][at].append(name)

    def dims(self, side: int) -> Dims:
        return tuple(map(tuple, self.sides[side]))


def _reshaped(local: Local) -> tuple[Any, tuple, dict]:
    """`reshape` to the local shape: a rank's strides need not be those that allow a view."""
    return aten.reshape.default, (local.args[0], list(local.out_shape())), {}


def _reshaped_as_given(local: Local) -> tuple[Any, tuple, dict]:
    return aten.reshape.default, (local.args[0], local.args[1]), {}


def reshape_rule(call: Call) -> Rule:
    """One shape to another, in common factors: `(a b) c -> a (b c)`."""
    shapes = tuple(call.operands[0].shape), tuple(call.outputs[0].shape)
    linear = additive(call, {0})
    if not plain(*shapes[0], *shapes[1]):
        return whole_rule(call).but(linear=linear, localize=_reshaped_as_given)
    if 0 in shapes[0] and shapes[0] != shapes[1]:
        return whole_rule(call).but(linear=linear, localize=_reshaped)
    if shapes[0] == shapes[1]:
        return identity(call).but(localize=_reshaped)
    fine = Refinement(shapes)
    whole = frozenset(fine.whole)
    return Rule((fine.dims(0),), (fine.dims(1),), whole=whole, linear=linear, localize=_reshaped, sizes=fine.sizes)


on(TABLE, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)(reshape_rule)
on(TABLE, aten._reshape_copy.default, aten.view_copy.default)(reshape_rule)


@on(TABLE, aten.view.dtype)
def view_dtype(call: Call) -> Rule:
    """`a b -> a b`; with elements of another width the last dim is whole. Bits read anew are no sum."""

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return view_dtype_of, (local.args[0], local.args[1]), {}

    x, y = call.operands[0].shape, call.outputs[0].shape
    if not x or call.operands[0].element_size() == call.outputs[0].element_size():
        return identity(call).but(linear=(), localize=localize)
    inner, last = names(x)[:-1], len(x) - 1
    dims_in, dims_out = inner + names(x, "i")[last:], inner + names(y, "o")[last:]
    return Rule((dims_in,), (dims_out,), whole=frozenset((f"i{last}", f"o{last}")), localize=localize)


@on(TABLE, aten.t.default)
def t(call: Call) -> Rule:
    """`a b -> b a`"""
    dims = names(call.operands[0].shape)
    return Rule((dims,), (dims[::-1],), linear=additive(call, {0}))


@on(TABLE, aten.transpose.int, aten.transpose_copy.int)
def transpose(call: Call) -> Rule:
    """`a b c -> a c b`"""
    dims = names(call.operands[0].shape)
    a = bound(call)
    i, j = dim_of(a["dim0"], len(dims)), dim_of(a["dim1"], len(dims))
    out = list(dims)
    if dims:
        out[i], out[j] = dims[j], dims[i]
    return Rule((dims,), (tuple(out),), linear=additive(call, {0}))


@on(TABLE, aten.permute.default, aten.permute_copy.default)
def permute(call: Call) -> Rule:
    """`a b c -> c a b`"""
    dims = names(call.operands[0].shape)
    order = [dim_of(d, len(dims)) for d in bound(call)["dims"]]
    return Rule((dims,), (tuple(dims[d] for d in order),), linear=additive(call, {0}))


def _expanded(local: Local) -> tuple[Any, tuple, dict]:
    return rebound(local, size=local_sizes(local.args[1], local.out_shape()))


@on(TABLE, aten.expand.default, aten.expand_copy.default)
def expand(call: Call) -> Rule:
    """`a 1 -> n a m`: dims that are new or grow from 1 are factors of the output alone."""
    x, y = call.operands[0].shape, call.outputs[0].shape
    out = names(y)
    tail = out[len(y) - len(x) :]
    into = tuple(() if unit(n) else dim for n, dim in zip(x, tail, strict=True))
    return Rule((into,), (out,), linear=additive(call, {0}), localize=_expanded)


@on(TABLE, aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(call: Call) -> Rule:
    """`a b -> a 1 b`"""
    dims = names(call.operands[0].shape)
    at = dim_of(bound(call)["dim"], len(dims) + 1)
    return Rule((dims,), (dims[:at] + ((),) + dims[at:],), linear=additive(call, {0}))


@on(TABLE, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(call: Call) -> Rule:
    """`a 1 b -> a b`. On a rank only dims whose *whole* size is 1 go."""
    x = call.operands[0].shape
    listed = dims_of(bound(call).get("dim"), len(x)) if call.target is not aten.squeeze.default else range(len(x))
    if call.target is aten.squeeze.dims and not bound(call)["dim"]:
        listed = range(0)
    dropped = [i for i in listed if unit(x[i])]
    dims = names(x)
    out = tuple(d for i, d in enumerate(dims) if i not in dropped)

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return aten.squeeze.dims, (local.args[0], dropped), {}

    return Rule((dims,), (out,), linear=additive(call, {0}), localize=localize)


@on(TABLE, aten.flip.default, aten.roll.default)
def reordered(call: Call) -> Rule:
    """`a b! -> a b!`: the dims that are flipped or rolled stay whole (all, when roll names none)."""
    dims = names(call.operands[0].shape)
    moved = dims_of(bound(call)["dims"], len(dims)) if bound(call)["dims"] or "roll" in str(call.target) else ()
    whole = factors_in([dims[i] for i in moved])
    return Rule((dims,), (dims,), whole=whole, linear=additive(call, {0}))


@on(TABLE, torch.ops.prims.rev.default)
def rev(call: Call) -> Rule:
    """`a b! -> a b!`"""
    dims = names(call.operands[0].shape)
    whole = factors_in([dims[i] for i in call.args[1]])
    return Rule((dims,), (dims,), whole=whole, linear=additive(call, {0}))


@on(TABLE, aten.repeat.default)
def repeat(call: Call) -> Rule:
    """`a b -> (k a) b`: k copies, themselves a factor of the output."""
    x, repeats = call.operands[0].shape, bound(call)["repeats"]
    if not plain(*x, *repeats) or 0 in repeats:
        return whole_rule(call)
    dims = names(x)
    ahead = len(repeats) - len(x)
    padded = ((),) * ahead + dims
    out = tuple((() if k == 1 else (f"k{i}",)) + dim for i, (k, dim) in enumerate(zip(repeats, padded, strict=True)))
    sizes = {f"k{i}": k for i, k in enumerate(repeats) if k != 1}
    sizes |= {dim[0]: n for dim, n in zip(dims, x, strict=True) if dim}

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return rebound(local, repeats=[local.size(f"k{i}") for i in range(len(repeats))])

    return Rule((dims,), (out,), linear=additive(call, {0}), localize=localize, sizes=sizes)


@on(TABLE, aten.tril.default, aten.triu.default)
def triangle(call: Call) -> Rule:
    """`a q k -> a q k`, q and k in one range a rank: the diagonal moves by where they start."""
    dims = names(call.operands[0].shape)
    corner = dims[-2:]
    row, column = (d[0] if d else "" for d in corner)

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        shift = local.start(row) - local.start(column)
        return rebound(local, diagonal=diagonal + shift)

    diagonal = bound(call)["diagonal"]
    return Rule((dims,), (dims,), ordered=factors_in(corner), linear=additive(call, {0}), localize=localize)


@on(TABLE, aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(call: Call) -> Rule:
    """`p! q! a -> a n!`"""
    x, y, a = call.operands[0].shape, call.outputs[0].shape, bound(call)
    dims = names(x)
    pair = {dim_of(a["dim1"], len(x)), dim_of(a["dim2"], len(x))}
    rest = tuple(d for i, d in enumerate(dims) if i not in pair)
    last = () if unit(y[-1]) else ("n",)
    whole = factors_in([dims[i] for i in pair], [last])
    return Rule((dims,), (rest + (last,),), whole=whole, linear=additive(call, {0}))


@on(TABLE, aten.view_as_complex.default)
def view_as_complex(call: Call) -> Rule:
    """`a b 2! -> a b`"""
    dims = names(call.operands[0].shape)

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return view_as_complex_of, (local.args[0],), {}

    whole = factors_in(dims[-1:])
    return Rule((dims,), (dims[:-1],), whole=whole, linear=additive(call, {0}), localize=localize)


@on(TABLE, aten.view_as_real.default)
def view_as_real(call: Call) -> Rule:
    """`a b -> a b 2!`"""
    dims = names(call.operands[0].shape)
    return Rule((dims,), (dims + (("c",),),), whole=frozenset("c"), linear=additive(call, {0}))


@on(TABLE, aten.unfold.default)
def unfold(call: Call) -> Rule:
    """`a n! -> a w! s!`: windows of one dim; the others split."""
    x, y = call.operands[0].shape, call.outputs[0].shape
    dims = names(x)
    if not x:
        return whole_rule(call)
    at = dim_of(bound(call)["dimension"], len(x))
    ends = names((y[at], y[-1]), "w")
    out = replaced(dims, at, ends[0]) + (ends[1],)
    return Rule((dims,), (out,), whole=factors_in([dims[at]], ends), linear=additive(call, {0}))


@on(TABLE, aten.select.int, aten.select_copy.int)
def select(call: Call) -> Rule:
    """`a n! b -> a b`"""
    dims = names(call.operands[0].shape)
    at = dim_of(bound(call)["dim"], len(dims))
    return Rule((dims,), (without(dims, at),), whole=factors_in([dims[at]]), linear=additive(call, {0}))


@on(TABLE, aten.unbind.int)
def unbind(call: Call) -> Rule:
    """`a n! b -> a b, a b, ...`"""
    dims = names(call.operands[0].shape)
    at = dim_of(bound(call)["dim"], len(dims))
    outputs = (without(dims, at),) * len(call.outputs)
    return Rule((dims,), outputs, whole=factors_in([dims[at]]), linear=additive(call, {0}))


@on(TABLE, aten.as_strided.default)
def as_strided(call: Call) -> Rule:
    """All whole: strides are of the whole tensor as it was captured, and it is laid out so again."""
    a, laid = bound(call), list(call.operands[0].stride())

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return as_strided_of, (local.args[0], laid, a["size"], a["stride"], a["storage_offset"]), {}

    plain_call = plain(*laid, *a["size"], *a["stride"])
    return whole_rule(call).but(linear=additive(call, {0}), localize=localize if plain_call else None)


@on(TABLE, aten.as_strided_scatter.default)
def as_strided_scatter(call: Call) -> Rule:
    """All whole, as `as_strided`."""
    a, laid = bound(call), list(call.operands[0].stride())

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return as_strided_scatter_of, (*local.args[:2], laid, a["size"], a["stride"], a["storage_offset"]), {}

    plain_call = plain(*laid, *a["size"], *a["stride"])
    return whole_rule(call).but(linear=additive(call, {0, 1}), localize=localize if plain_call else None)
