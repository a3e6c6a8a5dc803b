"""Element-wise ops: dims line up from the last, a dim of size 1 broadcasts.

    `a b, b -> a b`      `a b, a 1 -> a b`

Each output element needs the operand elements at its place alone, so every factor splits. Which operands may be
partial sums depends on the op: `LINEAR` lists those that are linear in some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .dims import additive, bound, names, plain, unit, whole_rule
from .notation import Dims, Rule
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}

Sets = tuple[set[int], ...]


def _broadcast(shape: torch.Size, out: torch.Size, tag: str) -> Dims:
    """An operand's dims among the output's, whose names are `d0 d1 ...`; a size that depends on data has its own."""
    ahead = len(out) - len(shape)
    dims: list[tuple[str, ...]] = []
    for i, n in enumerate(shape):
        if not plain(n):
            dims.append((f"{tag}{i}",))
        else:
            dims.append(() if unit(n) else (f"d{ahead + i}",))
    return tuple(dims)


def _lines_up(shape: torch.Size, out: torch.Size) -> bool:
    """Broadcasting the shape gives `out`, as far as the sizes are known."""
    if len(shape) > len(out):
        return False
    tail = out[len(out) - len(shape) :]
    return all(not plain(n, m) or n == m or n == 1 for n, m in zip(shape, tail, strict=True))


def pointwise_rule(call: Call, linear: Sets = ()) -> Rule:
    """The rule of an element-wise op; `linear` as in `Rule`, less what the types forbid."""
    outs = [o for o in call.outputs if isinstance(o, torch.Tensor)]
    if not outs or any(o.shape != outs[0].shape for o in outs):
        return whole_rule(call, note=f"{call.target} is not element-wise here")
    shape = outs[0].shape
    if not all(_lines_up(t.shape, shape) for t in call.operands):
        return whole_rule(call, note=f"{call.target} is not element-wise here")
    inputs = tuple(_broadcast(t.shape, shape, f"i{i}_") for i, t in enumerate(call.operands))
    outputs = tuple(names(shape) if isinstance(o, torch.Tensor) else None for o in call.outputs)
    return Rule(inputs, outputs, linear=additive(call, *linear))


def _tensors(call: Call, *spots: int) -> bool:
    return all(i < len(call.args) and isinstance(call.args[i], torch.Tensor) for i in spots)


def _both_terms(call: Call) -> Sets:
    """x + y of two tensors is a partial sum when both are; x + 1 is not."""
    return ({0, 1},) if _tensors(call, 0, 1) else ()


def _either_factor(call: Call) -> Sets:
    """x * y is linear in each."""
    if _tensors(call, 0, 1):
        return ({0}, {1})
    return ({0},)


def _numerator(call: Call) -> Sets:
    """x / y is linear in x, rounding is not."""
    return ({0},) if _tensors(call, 0) and not call.kwargs.get("rounding_mode") else ()


def _first(call: Call) -> Sets:
    return ({0},) if _tensors(call, 0) else ()


def _fused_product(call: Call) -> Sets:
    """x + c * y * z: the sum of terms that share their other factor."""
    return ({0, 1}, {0, 2})


def _fused_quotient(call: Call) -> Sets:
    """x + c * y / z"""
    return ({0, 1},)


def _chosen(call: Call) -> Sets:
    """where(mask, x, y) of two tensors; beside a number only a 0 is a partial sum on every rank."""
    a = bound(call)
    if _tensors(call, 1, 2):
        return ({1, 2},)
    other = a["other"] if _tensors(call, 1) else a["self"]
    return ({1},) if len(call.operands) == 2 and other == 0 else ()


def _filled(call: Call) -> Sets:
    """masked_fill(x, mask, value): with a number, only 0."""
    if _tensors(call, 2):
        return ({0, 2},)
    return ({0},) if bound(call)["value"] == 0 else ()


def _second(call: Call) -> Sets:
    return ({1},) if _tensors(call, 1) else ()


def _weighted(call: Call) -> Sets:
    """lerp with a number: x + w * (y - x)"""
    return ({0, 1},)


def _widened(call: Call) -> Sets:
    """A cast keeps a partial sum where it keeps every value: to a float as wide or wider."""
    source, target = call.operands[-1].dtype, call.outputs[0].dtype
    if source == target:
        return ({len(call.operands) - 1},)
    floats = source.is_floating_point and target.is_floating_point
    return ({len(call.operands) - 1},) if floats and torch.promote_types(source, target) == target else ()


LINEAR: dict[Any, Callable[[Call], Sets]] = {
    aten.add.Tensor: _both_terms,
    aten.sub.Tensor: _both_terms,
    aten.rsub.Tensor: _both_terms,
    aten.complex.default: _both_terms,
    aten.mul.Tensor: _either_factor,
    aten.mul.Scalar: _first,
    aten.div.Tensor: _numerator,
    aten.div.Scalar: _numerator,
    aten.div.Tensor_mode: _numerator,
    aten.div.Scalar_mode: _numerator,
    aten.true_divide.Tensor: _numerator,
    aten.neg.default: _first,
    aten.positive.default: _first,
    aten.clone.default: _first,
    aten.conj_physical.default: _first,
    aten.deg2rad.default: _first,
    aten.rad2deg.default: _first,
    aten.addcmul.default: _fused_product,
    aten.addcdiv.default: _fused_quotient,
    aten.lerp.Scalar: _weighted,
    aten.where.self: _chosen,
    aten.where.ScalarSelf: _chosen,
    aten.where.ScalarOther: _chosen,
    aten.masked_fill.Scalar: _filled,
    aten.masked_fill.Tensor: _filled,
    aten._to_copy.default: _widened,
    torch.ops.prims.convert_element_type.default: _widened,
    aten.copy.default: _widened,
    aten.fill.Tensor: _second,
    aten.threshold_backward.default: _first,
    aten.gelu_backward.default: _first,
    aten.silu_backward.default: _first,
    aten.mish_backward.default: _first,
    aten.tanh_backward.default: _first,
    aten.sigmoid_backward.default: _first,
    aten.logit_backward.default: _first,
    aten.softplus_backward.default: _first,
    aten.log_sigmoid_backward.default: _first,
    aten.elu_backward.default: _first,
    aten.leaky_relu_backward.default: _first,
    aten.hardtanh_backward.default: _first,
    aten.hardswish_backward.default: _first,
    aten.hardsigmoid_backward.default: _first,
    aten.hardshrink_backward.default: _first,
    aten.softshrink_backward.default: _first,
}
"""Per element-wise op that is linear: which operand sets may be partial sums."""


@on(TABLE, *LINEAR)
def linear_pointwise(call: Call) -> Rule:
    """An element-wise op of `LINEAR`."""
    return pointwise_rule(call, LINEAR[call.target](call))


@on(
    TABLE,
    aten.fill.Scalar,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
    aten.hardswish.default,
    aten.log_sigmoid_forward.default,
    aten.polar.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.where.Scalar,
    aten.rsub.Scalar,
)
def untagged(call: Call) -> Rule:
    """Element-wise ops that torch does not tag as such."""
    return pointwise_rule(call)
