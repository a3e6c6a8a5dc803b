"""Kinds of calls: what calls of one signature share, worked out once for all of them.

    signature    target, plain arguments, shapes and dtypes of the tensors that go in and come out

Calls of one kind have one rule. Its factors are numbered in the order in which the rule names them (*slots*), so that
`factors.py` walks a call without looking at names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.utils._pytree import tree_map

from .atoms import UNKNOWN
from .rules.every import rule_of
from .rules.notation import Dims, Rule
from .rules.split import Call, Leaf, Shape

Slots = int | tuple[int, ...]
"""What a dim is made of: the slot of its one factor, or those of its several ones; () for a dim that is no factor."""


@dataclass(frozen=True, eq=False)
class Kind:
    """What calls of one signature share.

    Attributes:
        call, rule: the call on fake tensors, and its rule.
        names, sizes: per slot the name of the factor, and its size (UNKNOWN where no dim tells it).
        inputs: per operand and dim its slots.
        outputs: the same with the size of each dim; None of what is no tensor.
        loose: (which operand or output, dim) of the dims that are no factor and not of size 1; operands come first.
        settled: the shapes of its calls so far, by the pattern of their atoms.
    """

    call: Call
    rule: Rule
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    inputs: tuple[tuple[Slots, ...], ...]
    outputs: tuple[tuple[tuple[Slots, Any], ...] | None, ...]
    loose: tuple[tuple[int, int], ...]
    settled: dict[Any, tuple[Shape, dict[Leaf, int]]] = field(default_factory=dict)


class _Value(NamedTuple):
    """What a signature says of a node's value; equal ones are one object."""

    is_tensor: bool
    number: int


class Kinds:
    """The kinds of the calls of one graph."""

    def __init__(self) -> None:
        self._kinds: dict[Any, Kind] = {}
        self._seen: dict[fx.Node, _Value] = {}
        self._values: dict[Any, _Value] = {}

    def of(self, node: fx.Node) -> tuple[Kind, list[fx.Node]]:
        """The kind of a call, and its tensor operands as `tensor_operands` has them."""
        operands: list[fx.Node] = []
        signature = [node.target, self._value(node)]
        for x in node.args:
            if isinstance(x, fx.Node):  # by far the most
                found = self._seen.get(x) or self._value(x)
                if found.is_tensor:
                    operands.append(x)
                signature.append(found)
            else:
                signature.append(self._plain(x, operands))
        for k, x in node.kwargs.items():
            signature += (k, self._plain(x, operands))
        key = tuple(signature)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _kind(call_of(node))
        return kind, operands

    def _plain(self, x: Any, operands: list[fx.Node]) -> Any:
        if isinstance(x, fx.Node):
            found = self._seen.get(x) or self._value(x)
            if found.is_tensor:
                operands.append(x)
            return found
        if isinstance(x, (list, tuple)):
            return ("list", *[self._plain(y, operands) for y in x])
        if isinstance(x, dict):
            return ("dict", *[(k, self._plain(y, operands)) for k, y in x.items()])
        return (type(x), x if isinstance(x, (int, float, bool, str)) else str(x))

    def _value(self, node: fx.Node) -> _Value:
        val = node.meta.get("val")
        tensor = isinstance(val, torch.Tensor)
        if tensor:
            key = _tensor_key(val)
        else:
            key = ("several", *map(_tensor_key, val)) if isinstance(val, (tuple, list)) else _tensor_key(val)
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = _Value(tensor, len(self._values))
        self._seen[node] = found
        return found


def _tensor_key(val: Any) -> tuple:
    if not isinstance(val, torch.Tensor):
        return (type(val), str(val))
    shape: Any = val.shape
    if not all([type(n) is int for n in shape]):
        shape = tuple(map(str, shape))
    return (shape, val.dtype)


def call_of(node: fx.Node) -> Call:
    """The call of a node on fake tensors."""

    def fake(x: Any) -> Any:
        return x.meta["val"] if isinstance(x, fx.Node) else x

    return Call(node.target, tree_map(fake, node.args), tree_map(fake, dict(node.kwargs)), node.meta["val"])


def _kind(call: Call) -> Kind:
    rule = rule_of(call)
    names = rule.factors
    sizes, slot = _sizes(rule, call), {f: i for i, f in enumerate(names)}

    def slots(dims: Dims) -> tuple[Slots, ...]:
        return tuple([slot[d[0]] if len(d) == 1 else tuple([slot[f] for f in d]) for d in dims])

    outputs = []
    for dims, tensor in zip(rule.outputs, call.outputs, strict=False):
        known = dims if isinstance(tensor, torch.Tensor) else None
        outputs.append(tuple(zip(slots(known), tensor.shape, strict=True)) if known is not None else None)
    return Kind(
        call,
        rule,
        names,
        tuple([sizes.get(f, UNKNOWN) for f in names]),
        tuple(map(slots, rule.inputs)),
        tuple(outputs),
        _loose(rule, call),
    )


def _loose(rule: Rule, call: Call) -> tuple[tuple[int, int], ...]:
    sides = [*zip(rule.inputs, call.operands, strict=False), *zip(rule.outputs, call.outputs, strict=False)]
    return tuple(
        (i, j)
        for i, (dims, t) in enumerate(sides)
        if dims is not None and isinstance(t, torch.Tensor)
        for j, (names, n) in enumerate(zip(dims, t.shape, strict=True))
        if not names and not (isinstance(n, int) and n == 1)
    )


def _sizes(rule: Rule, call: Call) -> dict[str, int]:
    """Sizes of the factors that stand alone in some dim, and of composites' last unknown."""
    sizes = dict(rule.sizes)
    seen = [
        (names, n)
        for dims, t in [*zip(rule.inputs, call.operands, strict=False), *zip(rule.outputs, call.outputs, strict=False)]
        if dims is not None and isinstance(t, torch.Tensor)
        for names, n in zip(dims, t.shape, strict=True)
        if isinstance(n, int)
    ]
    sizes |= {names[0]: n for names, n in seen if len(names) == 1}
    for names, n in seen:
        unknown = [f for f in names if f not in sizes]
        if len(unknown) == 1:
            known = 1
            for f in names:
                known *= sizes.get(f, 1)
            sizes[unknown[0]] = n // max(1, known)
    return sizes
