"""Tensors made from nothing: every rank makes its own part.

Of `new_*` and `*_like` the operand gives type and device alone; its values are not read.
"""

from __future__ import annotations

from typing import Any

import torch

from .dims import additive, argument, local_sizes, names, plain, rebound, whole_rule
from .notation import Local, Rule
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}


def _sized(local: Local) -> tuple[Any, tuple, dict]:
    return rebound(local, size=local_sizes(argument(local, "size"), local.out_shape()))


@on(TABLE, aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format)
@on(TABLE, aten.empty_permuted.default)
def filled(call: Call) -> Rule:
    """`-> a b`"""
    return Rule((), (names(call.outputs[0].shape),), localize=_sized)


@on(TABLE, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def new_filled(call: Call) -> Rule:
    """`a b -> a b` for the operand's own shape, else `x y -> a b`: its dims split for themselves."""
    x, y = call.operands[0].shape, call.outputs[0].shape
    tied = plain(*x, *y) and x == y
    operand = names(x, "d" if tied else "x")
    linear = additive(call, {0}) if call.target is aten.new_zeros.default else ()
    return Rule((operand,), (names(y),), linear=linear, localize=_sized)


@on(TABLE, aten.new_empty_strided.default)
def new_empty_strided(call: Call) -> Rule:
    """As `new_empty`: a rank's part has strides of its own."""

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        size = local_sizes(argument(local, "size"), local.out_shape())
        return aten.new_empty.default, (local.args[0], size), dict(local.kwargs)

    return new_filled(call).but(localize=localize)


@on(TABLE, aten.empty_strided.default)
def empty_strided(call: Call) -> Rule:
    """As `empty`: a rank's part has strides of its own."""

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        size = local_sizes(argument(local, "size"), local.out_shape())
        return aten.empty.memory_format, (size,), dict(local.kwargs)

    return filled(call).but(localize=localize)


@on(TABLE, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)
def like(call: Call) -> Rule:
    """`a b -> a b`"""
    dims = names(call.operands[0].shape)
    linear = additive(call, {0}) if call.target is aten.zeros_like.default else ()
    return Rule((dims,), (dims,), linear=linear)


def _counted(start: Any, step: Any) -> Any:
    """The localizer of `start + step * i`, from the rank's first i."""

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        first = start + local.start("d0") * step
        last = first + local.out_shape()[0] * step
        return aten.arange.start_step, (first, last, step), dict(local.kwargs)

    return localize


@on(TABLE, aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(call: Call) -> Rule:
    """`-> a`, a range a rank. With fractions the count itself is rounded: whole."""
    a = call.args
    start, step = (0 if len(a) == 1 else a[0]), (a[2] if len(a) == 3 else 1)
    if not plain(*a, *call.outputs[0].shape):
        return whole_rule(call)
    return Rule((), (names(call.outputs[0].shape),), ordered=frozenset(("d0",)), localize=_counted(start, step))


@on(TABLE, torch.ops.prims.iota.default)
def iota(call: Call) -> Rule:
    """`-> a`, a range a rank"""
    start, step = call.kwargs["start"], call.kwargs["step"]
    if not plain(start, step, *call.outputs[0].shape):
        return whole_rule(call)

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return rebound(local, length=local.out_shape()[0], start=start + local.start("d0") * step)

    return Rule((), (names(call.outputs[0].shape),), ordered=frozenset(("d0",)), localize=localize)


@on(TABLE, aten.eye.default, aten.eye.m, aten.tril_indices.default, aten.triu_indices.default)
@on(TABLE, aten.linspace.default, aten.logspace.default, aten.scalar_tensor.default)
def constant(call: Call) -> Rule:
    """Small constants: every rank makes the whole."""
    return whole_rule(call)
