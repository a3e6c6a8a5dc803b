"""Ops that take ranges out of a dim or put ranges together: slice, split, cat, pad.

A range whose start, end and whole size share a divisor r leaves the dim `g x r`: g whole pieces of r, and r splits,
since every rank then takes the same pieces of its own smaller r (the q, k and v of a packed projection). Where r is 1,
or too small a part to be of use, a slice reads its dim through a window of one row (`space.py`), and so does every
pad: ranges shifted by some rows, as the tokens but the last, or those of a causal convolution. Else the dim is whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..window import Window
from .dims import (
    additive,
    argument,
    bound,
    dim_of,
    factors_in,
    local_sizes,
    names,
    plain,
    rebound,
    replaced,
    unit,
    without,
)
from .notation import Local, Rule
from .space import edges
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}

MOST_PIECES = 16
"""A dim of more than this many pieces is rather left whole: its r is a small part of it."""


@dataclass(frozen=True)
class Grain:
    """The common divisor `r` of some sizes and cuts; 0 where the dim is whole."""

    r: int

    @staticmethod
    def of(size: Any, cuts: Sequence[Any]) -> Grain:
        """The grain of a dim of `size` cut at `cuts`."""
        if not plain(size, *cuts):
            return Grain(0)
        r = math.gcd(size, *cuts)
        return Grain(r if r > 1 and size // r <= MOST_PIECES else 0)

    def dim(self, size: Any, tag: str) -> tuple[str, ...]:
        """A dim of `size` in this grain: `(tag r)`, `r`, or `tag` alone."""
        if unit(size):
            return ()
        if not self.r or not plain(size) or size == 0:
            return (tag,)
        return ("r",) if size == self.r else (tag, "r")

    def rule(self, inputs: Sequence[tuple], outputs: Sequence[tuple], **more: Any) -> Rule:
        """A rule of these dims: all factors beside `d0 d1 ...` and `r` are whole."""
        every = factors_in(*inputs, *outputs)
        whole = frozenset(f for f in every if f != "r" and not f.startswith("d"))
        sizes = {"r": self.r} if self.r else {}
        return Rule(tuple(inputs), tuple(outputs), whole=whole, sizes=sizes, **more)

    def local(self, cut: Any, local: Local) -> Any:
        """A size or cut of the whole dim as it is on a rank."""
        return cut // self.r * local.size("r") if self.r else cut


@dataclass(frozen=True)
class Range:
    """`start:end:step` of a dim of `size`: the words of the long and of the short dim, and the local start and end."""

    grain: Grain
    start: Any
    end: Any
    step: Any
    long: tuple[str, ...]
    short: tuple[str, ...]
    sizes: dict[str, int]

    @staticmethod
    def of(size: Any, length: Any, start: Any, end: Any, step: Any) -> Range:
        """`length` is the size of what is taken.

        Step 1 gives `(g! r)` and `(m! r)`; a step that divides the size, from within the first step, `(r q!)` and `r`.
        """
        if not plain(size, length, step, *(x for x in (start, end) if x is not None)):
            grain = Grain(0)
            return Range(grain, start, end, step, grain.dim(size, "g"), grain.dim(length, "m"), {})
        start, end, step = slice(start, end, step).indices(size)
        end = max(start, end)
        if step > 1 and size % step == 0 and start < step and 1 < length == size // step:
            return Range(Grain(length), start, end, step, ("r", "q"), ("r",), {"q": step})
        grain = Grain.of(size, (start, end)) if step == 1 and end > start else Grain(0)
        return Range(grain, start, end, step, grain.dim(size, "g"), grain.dim(length, "m"), {})

    def slides(self, size: Any, length: Any) -> bool:
        """Whether the short dim is no multiple of a part of the long one, but may read it through a window."""
        return not self.grain.r and plain(size, length, self.start, self.end, self.step) and size > 1 and length > 1

    def local(self, local: Local) -> dict[str, Any]:
        """The arguments start and end of a rank."""
        if not self.grain.r:
            return {"start": argument(local, "start"), "end": argument(local, "end")}
        if self.step > 1:
            return {"start": self.start, "end": local.size("r") * self.step}
        return {"start": self.grain.local(self.start, local), "end": self.grain.local(self.end, local)}

    def localize(self, local: Local) -> tuple[Any, tuple, dict]:
        """The call with its start and end made local."""
        return rebound(local, **self.local(local))

    def rule(self, inputs: Sequence[tuple], outputs: Sequence[tuple], **more: Any) -> Rule:
        """A rule of these dims."""
        rule = self.grain.rule(inputs, outputs, **more)
        return rule.but(sizes=rule.sizes | self.sizes)


@on(TABLE, aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(call: Call) -> Rule:
    """`a (g! r) -> a (m! r)`; without an r, `a g! -> a m` where m reads g through a window of one row."""
    x, y, a = call.operands[0].shape, call.outputs[0].shape, bound(call)
    at = dim_of(a["dim"], len(x))
    cut = Range.of(x[at], y[at], a["start"], a["end"], a["step"])
    dims = names(x)
    long, short = replaced(dims, at, cut.long), replaced(dims, at, cut.short)
    if cut.slides(x[at], y[at]):
        window = Window(1, cut.step, -cut.start)

        def localize(local: Local) -> tuple[Any, tuple, dict]:
            return rebound(local, start=0, end=local.in_shape(0)[at]) if local.span(0, at) else cut.localize(local)

        more: dict[str, Any] = {"linear": additive(call, {0}), "localize": localize}
        return cut.rule([long], [short], **more).but(
            whole=frozenset({"g"}), ordered=frozenset({"m"}), windows={(0, at): ("m", window)}
        )
    return cut.rule([long], [short], linear=additive(call, {0}), localize=cut.localize)


@on(TABLE, aten.slice_backward.default)
def slice_backward(call: Call) -> Rule:
    """`a (m! r) -> a (g! r)`: the gradient in its range, zeros around it; without an r, g touches m."""
    y, x, a = call.operands[0].shape, call.outputs[0].shape, bound(call)
    at = dim_of(a["dim"], len(x))
    cut = Range.of(x[at], y[at], a["start"], a["end"], a["step"])
    dims = names(x)

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        sizes = local_sizes(argument(local, "input_sizes"), local.out_shape())
        if local.span(0, at) is None:
            return rebound(local, input_sizes=sizes, **cut.local(local))
        rows = local.in_shape(0)[at]
        first = touched.rows(y[at], local.start("g"), local.size("g"))[0] * cut.step + cut.start - local.start("g")
        start, end = (first, first + (rows - 1) * cut.step + 1) if rows else (0, 0)
        return rebound(local, input_sizes=sizes, start=start, end=end)

    long, short = replaced(dims, at, cut.long), replaced(dims, at, cut.short)
    rule = cut.rule([short], [long], linear=additive(call, {0}), localize=localize)
    if not cut.slides(x[at], y[at]):
        return rule
    touched = Window(1, cut.step, -cut.start, touched=True)
    return rule.but(whole=frozenset({"m"}), ordered=frozenset({"g"}), windows={(0, at): ("g", touched)})


@on(TABLE, aten.slice_scatter.default)
def slice_scatter(call: Call) -> Rule:
    """`a (g! r), a (m! r) -> a (g! r)`"""
    (x, y), a = (t.shape for t in call.operands), bound(call)
    at = dim_of(a["dim"], len(x))
    cut = Range.of(x[at], y[at], a["start"], a["end"], a["step"])
    long, short = replaced(names(x), at, cut.long), replaced(names(x), at, cut.short)
    return cut.rule([long, short], [long], linear=additive(call, {0, 1}), localize=cut.localize)


@on(TABLE, aten.select_backward.default)
def select_backward(call: Call) -> Rule:
    """`a b -> a n! b`"""
    dims = names(call.outputs[0].shape)
    at = dim_of(bound(call)["dim"], len(dims))

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return rebound(local, input_sizes=local_sizes(argument(local, "input_sizes"), local.out_shape()))

    whole = factors_in([dims[at]])
    return Rule((without(dims, at),), (dims,), whole=whole, linear=additive(call, {0}), localize=localize)


@on(TABLE, aten.select_scatter.default)
def select_scatter(call: Call) -> Rule:
    """`a n! b, a b -> a n! b`"""
    dims = names(call.outputs[0].shape)
    at = dim_of(bound(call)["dim"], len(dims))
    return Rule((dims, without(dims, at)), (dims,), whole=factors_in([dims[at]]), linear=additive(call, {0, 1}))


@on(TABLE, aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor)
@on(TABLE, aten.unsafe_split_with_sizes.default, aten.chunk.default, aten.unsafe_chunk.default)
def split(call: Call) -> Rule:
    """`a (g! r) -> a (m0! r), a (m1! r), ...`"""
    x, at = call.operands[0].shape, dim_of(bound(call)["dim"], call.operands[0].dim())
    lengths = [t.shape[at] for t in call.outputs]
    grain, dims = Grain.of(x[at], lengths), names(x)
    outputs = [replaced(dims, at, grain.dim(n, f"m{i}")) for i, n in enumerate(lengths)]

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        local_lengths = [local.out_shape(i)[at] for i in range(len(lengths))]
        return aten.split_with_sizes.default, (local.args[0], local_lengths, at), {}

    rule = grain.rule([replaced(dims, at, grain.dim(x[at], "g"))], outputs, linear=additive(call, {0}))
    return rule.but(localize=localize) if plain(*lengths) else rule


@on(TABLE, aten.cat.default)
def cat(call: Call) -> Rule:
    """`a (m0! r), a (m1! r) -> a (g! r)`; a 1-d tensor of no elements beside others is ignored by the op."""
    y = call.outputs[0].shape
    at, dims = dim_of(bound(call)["dim"], len(y)), names(y)
    fits = [t.dim() == len(y) for t in call.operands]
    lengths = [t.shape[at] for t, fit in zip(call.operands, fits, strict=True) if fit]
    grain = Grain.of(y[at], lengths)
    inputs = [
        replaced(dims, at, grain.dim(t.shape[at], f"m{i}")) if fit else names(t.shape, f"e{i}_")
        for i, (t, fit) in enumerate(zip(call.operands, fits, strict=True))
    ]
    return grain.rule(inputs, [replaced(dims, at, grain.dim(y[at], "g"))], linear=additive(call, range(len(inputs))))


@on(TABLE, aten.stack.default)
def stack(call: Call) -> Rule:
    """`a b, a b -> a n! b`"""
    y = call.outputs[0].shape
    at, dims = dim_of(bound(call)["dim"], len(y)), names(y)
    inputs = (without(dims, at),) * len(call.operands)
    return Rule(inputs, (dims,), whole=factors_in([dims[at]]), linear=additive(call, range(len(inputs))))


@on(TABLE, aten.constant_pad_nd.default)
def constant_pad(call: Call) -> Rule:
    """`a m! -> a g`: g reads m through a window of one row, moved by what is put before; linear if it pads with 0."""
    x, y, a = call.operands[0].shape, call.outputs[0].shape, bound(call)
    pairs = {len(x) - 1 - i: tuple(a["pad"][2 * i : 2 * i + 2]) for i in range(len(a["pad"]) // 2)}
    padded = [d for d, (low, high) in pairs.items() if not (plain(low, high) and low == high == 0)]
    seen = [d for d in padded if plain(x[d], y[d], *pairs[d]) and x[d] > 1 and y[d] > 1]
    into, out = names(x), names(x)
    for d in padded:
        into, out = replaced(into, d, _word("m", d, x[d])), replaced(out, d, _word("g", d, y[d]))

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        sides = dict(pairs) | {d: side for d, side in zip(seen, edges(local, 0, seen), strict=True) if side is not None}
        return rebound(local, pad=[n for d in pairs for n in sides[d]])

    free = {f"g{d}" for d in seen}
    whole = factors_in(*(dims[d : d + 1] for d in padded for dims in (into, out))) - free
    windows = {(0, d): (f"g{d}", Window(1, 1, pairs[d][0])) for d in seen}
    rule = Rule((into,), (out,), whole=whole, ordered=frozenset(free), windows=windows, localize=localize)
    return rule.but(linear=additive(call, {0})) if not a["value"] else rule


def _word(tag: str, at: int, size: Any) -> tuple[str, ...]:
    return () if unit(size) else (f"{tag}{at}",)
