"""Convolutions: `n (g ci) s!, (g co) ci k!, (g co) -> n (g co) r {ci}`; transposed, the weight is `(g ci) co k!`.

A split of ci is a reduction, into which the bias enters on the first rank only. Groups split like any factor. Space
(r of the output, s of the input's gradient) splits with a halo, see `space.py`; a transposed one has it whole.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from .dims import additive, bound, rebound, whole_rule
from .lead import empty_call, guarded, nothing, outputs_of, own_whole
from .notation import Dims, Local, Rule
from .space import Sides, Space, apart, convolved, covered, edges, input_gradient, trims, weight_gradient
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}


def _sides(call: Call, out: torch.Tensor) -> tuple[Dims, Dims, Dims, dict[str, int], Space]:
    """(dims of the input, the weight, the output; sizes; space)."""
    a = bound(call)
    x, weight, groups = a["input"], a["weight"], a["groups"]
    space = Space.of(x.shape, out.shape, _geometry(a), 2)
    kernel, more = own_whole(weight.shape[2:], "k")
    rows, row = (("g", "ci"), ("co",)) if a["transposed"] else (("g", "co"), ("ci",))
    sizes = {"g": groups, "ci": x.shape[1] // groups, "co": out.shape[1] // groups}
    return (
        (("n",), ("g", "ci"), *space.reads),
        (rows, row, *kernel),
        (("n",), ("g", "co"), *space.makes),
        sizes,
        replace(space, whole=space.whole | more),
    )


def _geometry(a: dict[str, Any]) -> list[tuple[Any, ...]]:
    """(kernel, stride, padding, dilation) of each dim; of a transposed convolution none that splits."""
    n = a["weight"].dim() - 2
    if a["transposed"]:
        return [(None,) * 4] * n
    lists = ([*a[name], *a[name][-1:] * n][:n] for name in ("stride", "padding", "dilation"))
    return list(zip(a["weight"].shape[2:], *lists, strict=True))


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
    x, weight, out, sizes, space = _sides(call, call.output)
    biased = a["bias"] is not None

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        channels = local.out_shape() if a["transposed"] else local.in_shape(0)
        changes: dict[str, Any] = {"groups": _groups(channels, local.in_shape(1))}
        if biased and local.start("ci"):
            changes["bias"] = None
        return _windowed(*rebound(local, **changes), edges(local, 0, range(2, len(channels))))

    rule = Rule(
        (x, weight, (("g", "co"),)) if biased else (x, weight),
        (out,),
        ({"ci": "sum"},),
        whole=space.whole | space.inputs(),
        ordered=space.outputs() | (frozenset({"ci"}) if biased else frozenset()),
        linear=additive(call, {0, 2}, {1, 2}) if biased else additive(call, {0}, {1}),
        windows=space.read(0),
        sizes=sizes,
        localize=localize,
        flops=_flops(a, call.output),
    )
    return guarded(rule, call)


def _windowed(target: Any, args: tuple, kwargs: dict, sides: list) -> tuple[Any, tuple, dict]:
    """A forward call, with explicit padding where its rows are split."""
    if not any(side is not None for side in sides):
        return target, args, kwargs
    x, weight, bias, stride, padding, dilation, _, _, groups = args
    left = _unpadded(padding, sides)
    return convolved, (x, weight, bias, stride, left, dilation, groups, _plain(sides)), kwargs


def _unpadded(padding: list[int], sides: list) -> list[int]:
    """The padding that is left to the op."""
    every = [*padding, *padding[-1:] * len(sides)][: len(sides)]
    return [p if side is None else 0 for p, side in zip(every, sides, strict=True)]


def _plain(sides: list) -> Sides:
    return tuple((0, 0) if side is None else side for side in sides)


def bias_gradient(grad: torch.Tensor, shapes: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`convolution_backward` of a rank without input channels: empty gradients, and the bias's."""
    dx, dw = (grad.new_zeros(s or ()) for s in shapes)
    return dx, dw, grad.sum([i for i in range(grad.dim()) if i != 1])


@on(TABLE, aten.convolution_backward.default)
def convolution_backward(call: Call) -> Rule:
    """dx `{co}`, dw `{n o}`, db `{n o}`; over space dx splits by the input's rows, dw and db by the output's."""
    a = bound(call)
    if a["input"].dim() != a["weight"].dim():
        return whole_rule(call, note="a convolution without a batch dim")
    x, weight, out, sizes, space = _sides(call, a["grad_output"])
    dx, *others = a["output_mask"]
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
        made = rebound(local, **changes)
        return _input_rows(local, space, *made) if dx else _output_rows(local, *made)

    reads = dx or a["transposed"]
    total = {"n": "sum"} | space.sums("inputs" if reads else "outputs")
    return Rule(
        (out, x, weight),
        outputs_of(call, x, weight, (("g", "co"),)),
        ({"co": "sum"}, total, total),
        whole=space.whole | (space.outputs() if reads else space.inputs()),
        ordered=space.inputs() if reads else space.outputs(),
        linear=additive(call, {0}),
        windows=space.touch(0) if reads else space.read(1),
        decompose={f: apart for f in space.inputs()} if dx and any(others) else {},
        sizes=sizes,
        localize=localize,
        flops=_flops(a, a["grad_output"]) * sum(a["output_mask"][:2]),
    )


def _input_rows(local: Local, space: Space, target: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """The input's gradient, with its rows split."""
    spans = covered(local, 0, space)
    if not any(span is not None for span in spans):
        return target, args, kwargs
    grad, x, weight, _, stride, padding, dilation, _, _, groups, _ = args
    rows = [n if s is None else s[1] - s[0] for s, n in zip(spans, local.in_shape(1)[2:], strict=True)]
    geometry = (stride, _unpadded(padding, spans), dilation)
    return input_gradient, (grad, x, weight, geometry, groups, rows, trims(local, spans)), kwargs


def _output_rows(local: Local, target: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """The weight's gradient, with the output's rows split."""
    sides = edges(local, 1, range(2, len(local.in_shape(1))))
    if not any(side is not None for side in sides):
        return target, args, kwargs
    grad, x, weight, bias_sizes, stride, padding, dilation, _, _, groups, mask = args
    geometry = (stride, _unpadded(padding, sides), dilation)
    return weight_gradient, (grad, x, weight, bias_sizes, geometry, groups, mask, _plain(sides)), kwargs
