"""Convolutions: `n (g ci) s!, (g co) ci k!, (g co) -> n (g co) s! {ci}`; transposed, the weight is `(g ci) co k!`.

A split of ci is a reduction, into which the bias enters on the first rank only. Groups split like any factor.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .dims import additive, bound, rebound, whole_rule
from .lead import empty_call, guarded, nothing, outputs_of, own_whole
from .notation import Dims, Local, Rule
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}


def _sides(call: Call, out: torch.Tensor) -> tuple[Dims, Dims, Dims, dict[str, int], frozenset[str]]:
    """(dims of the input, the weight, the output; sizes; whole factors)."""
    a = bound(call)
    x, weight, groups = a["input"], a["weight"], a["groups"]
    space, whole = own_whole(x.shape[2:], "s")
    kernel, more = own_whole(weight.shape[2:], "k")
    result, last = own_whole(out.shape[2:], "r")
    rows, row = (("g", "ci"), ("co",)) if a["transposed"] else (("g", "co"), ("ci",))
    sizes = {"g": groups, "ci": x.shape[1] // groups, "co": out.shape[1] // groups}
    return (
        (("n",), ("g", "ci"), *space),
        (rows, row, *kernel),
        (("n",), ("g", "co"), *result),
        sizes,
        whole | more | last,
    )


def _flops(a: dict[str, Any], out: torch.Tensor) -> float:
    """2 · elements · (input channels a group) · kernel, over what slides: the output, or the input if transposed."""
    weight = a["weight"]
    slid = a["input"] if a["transposed"] else out
    return 2.0 * slid.numel() * math.prod(weight.shape[1:])


def _groups(channels: tuple[int, ...], weight: tuple[int, ...]) -> int:
    """The groups a rank holds: channels on the side of the weight's second dim, over that dim."""
    return channels[1] // max(1, weight[1])


@on(TABLE, aten.convolution.default)
def convolution(call: Call) -> Rule:
    a = bound(call)
    if a["input"].dim() != a["weight"].dim():
        return whole_rule(call, note="a convolution without a batch dim")
    x, weight, out, sizes, whole = _sides(call, call.output)
    biased = a["bias"] is not None

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        channels = local.out_shape() if a["transposed"] else local.in_shape(0)
        changes: dict[str, Any] = {"groups": _groups(channels, local.in_shape(1))}
        if biased and local.start("ci"):
            changes["bias"] = None
        return rebound(local, **changes)

    rule = Rule(
        (x, weight, (("g", "co"),)) if biased else (x, weight),
        (out,),
        ({"ci": "sum"},),
        whole=whole,
        ordered=frozenset({"ci"}) if biased else frozenset(),
        linear=additive(call, {0, 2}, {1, 2}) if biased else additive(call, {0}, {1}),
        sizes=sizes,
        localize=localize,
        flops=_flops(a, call.output),
    )
    return guarded(rule, call)


def bias_gradient(grad: torch.Tensor, shapes: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`convolution_backward` of a rank without input channels: empty gradients, and the bias's."""
    dx, dw = (grad.new_zeros(s or ()) for s in shapes)
    return dx, dw, grad.sum([i for i in range(grad.dim()) if i != 1])


@on(TABLE, aten.convolution_backward.default)
def convolution_backward(call: Call) -> Rule:
    """dx `{co}`, dw `{n}`, db `{n}`."""
    a = bound(call)
    if a["input"].dim() != a["weight"].dim():
        return whole_rule(call, note="a convolution without a batch dim")
    x, weight, out, sizes, whole = _sides(call, a["grad_output"])
    biased = isinstance(call.outputs[2], torch.Tensor)

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        if biased and nothing(local.in_shape(1)) and not nothing(local.in_shape(0)):
            shapes = [local.out_shape(j) if isinstance(call.outputs[j], torch.Tensor) else None for j in (0, 1)]
            return bias_gradient, (local.args[0], shapes), {}
        made = empty_call(call, local)
        if made is not None:
            return made
        channels = local.in_shape(0 if a["transposed"] else 1)
        changes: dict[str, Any] = {"groups": _groups(channels, local.in_shape(2))}
        if a["bias_sizes"] is not None:
            changes["bias_sizes"] = [local.in_shape(0)[1]]
        return rebound(local, **changes)

    return Rule(
        (out, x, weight),
        outputs_of(call, x, weight, (("g", "co"),)),
        ({"co": "sum"}, {"n": "sum"}, {"n": "sum"}),
        whole=whole,
        linear=additive(call, {0}),
        sizes=sizes,
        localize=localize,
        flops=_flops(a, a["grad_output"]) * sum(a["output_mask"][:2]),
    )

