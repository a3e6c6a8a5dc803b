"""One call, split: the layouts of its operands and outputs, and its local form on a rank.

A factor of a rule may stand for several factors of the tensors' layouts (a hidden size that elsewhere is heads x
head size); those are its *leaves*, named (factor, index). A `Split` gives each leaf an ordered tuple of mesh axes, and
each remaining axis either nothing (the call runs whole on it) or an alternative of `rule.linear` (it runs on partial
sums).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from ..layout import Factor, Layout, local_shape, piece
from ..mesh import Mesh
from ..window import Through
from .notation import Dims, Local, Rule

Leaf = tuple[str, int]
"""A leaf of a factor: (factor, index)."""

LeafDims = tuple[tuple[tuple[Leaf | None, int], ...], ...]
"""Per tensor dim, per layout factor: (the leaf it is, or None where this call must have it whole, size)."""


@dataclass(frozen=True)
class Call:
    """A call of an op on tensors (fake or real): what a rule is made from."""

    target: Any
    args: tuple
    kwargs: dict[str, Any]
    output: Any

    @cached_property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The tensors among args, then kwargs, in order; lists of tensors are walked."""
        return tuple(x for x in tree_iter((self.args, self.kwargs)) if isinstance(x, torch.Tensor))

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        """The outputs; one tensor is a tuple of one. What is no tensor stands as it is."""
        return tuple(self.output) if isinstance(self.output, (tuple, list)) else (self.output,)

    @cached_property
    def depends_on_data(self) -> bool:
        """Whether some size of an operand or output is known only at run time: the call is run whole, as it stands."""
        tensors = (*self.operands, *(o for o in self.outputs if isinstance(o, torch.Tensor)))
        return any(not isinstance(n, int) for t in tensors for n in t.shape) or any(
            isinstance(x, torch.SymInt) for x in tree_iter((self.args, self.kwargs, self.output))
        )


@dataclass(frozen=True)
class Shape:
    """A rule laid on a call: which leaf each dim of each operand and output is made of."""

    rule: Rule
    leaves: dict[str, tuple[int, ...]]
    inputs: tuple[LeafDims, ...]
    outputs: tuple[LeafDims | None, ...]

    def through(self, operand: int, dim: int) -> Through | None:
        """What an operand's dim is seen through when the factor of its window is split; None: it has no window."""
        factor, window = self.rule.windows.get((operand, dim), ("", None))
        if window is None or factor not in self.leaves:
            return None
        cut, *units = self.leaves[factor]
        return Through(window, cut, math.prod(units))


@dataclass(frozen=True)
class Split:
    """How a call is split: `axes` per leaf, `partial` {axis: index into `rule.linear`}."""

    shape: Shape
    axes: dict[Leaf, tuple[str, ...]] = field(default_factory=dict)
    partial: dict[str, int] = field(default_factory=dict)

    def _dims(self, dims: LeafDims) -> tuple[tuple[Factor, ...], ...]:
        return tuple(tuple(Factor(n, self.axes.get(leaf, ()) if leaf else ()) for leaf, n in d) for d in dims)

    def input_layout(self, operand: int) -> Layout:
        """The layout this call needs of an operand."""
        marks = [(a, "sum") for a, which in self.partial.items() if operand in self.shape.rule.linear[which]]
        dims = list(self._dims(self.shape.inputs[operand]))
        for (k, dim), (factor, _) in self.shape.rule.windows.items():
            if k == operand and (axes := self.axes.get((factor, 0))):
                size = math.prod(f.size for f in dims[dim])
                dims[dim] = (Factor(size, axes, self.shape.through(operand, dim)),)
        return Layout(tuple(dims), tuple(sorted(marks)))

    def output_layout(self, output: int = 0) -> Layout | None:
        """The layout this call gives an output; None where it is no tensor."""
        dims = self.shape.outputs[output]
        if dims is None:
            return None
        rule = self.shape.rule
        sums = rule.sums[output] if output < len(rule.sums) else {}
        marks = [(a, "sum") for a in self.partial]
        for (name, _), axes in self.axes.items():
            if name in sums:
                marks += [(a, sums[name]) for a in axes]
        return Layout(self._dims(dims), tuple(sorted(marks)))

    def localize(self, call: Call, args: tuple, kwargs: dict, mesh: Mesh, rank: int) -> tuple[Any, tuple, dict]:
        """The call as this rank makes it: (target, args, kwargs), with `args`, `kwargs` holding local tensors."""
        fn: Callable | None = self.shape.rule.localize
        if fn is None or call.depends_on_data:
            return call.target, args, kwargs
        return fn(RankLocal(self, call, args, kwargs, mesh, rank))


class RankLocal(Local):
    """`Local` of a split call on a rank of a mesh."""

    def __init__(self, split: Split, call: Call, args: tuple, kwargs: dict, mesh: Mesh, rank: int):
        self.target, self.args, self.kwargs = call.target, args, kwargs
        self._split, self._call, self._mesh, self._rank = split, call, mesh, rank

    def _piece(self, leaf: Leaf | None, size: int) -> tuple[int, int]:
        coord, sizes = self._mesh.coord(self._rank), self._mesh.sizes
        axes = self._split.axes.get(leaf, ()) if leaf else ()
        if not axes:
            return 0, size
        return piece(size, tuple((sizes[a], coord[a]) for a in axes))

    def _shape(self, dims: LeafDims) -> tuple[int, ...]:
        return tuple(math.prod(self._piece(leaf, n)[1] for leaf, n in d) for d in dims)

    def in_shape(self, operand: int) -> tuple[int, ...]:
        return local_shape(self._split.input_layout(operand), self._mesh, self._rank)

    def span(self, operand: int, dim: int) -> tuple[int, int] | None:
        shape = self._split.shape
        factor, window = shape.rule.windows.get((operand, dim), ("", None))
        if window is None or not self._split.axes.get((factor, 0)):
            return None
        return window.span(self.start(factor), self.size(factor))

    def out_shape(self, output: int = 0) -> tuple[int, ...]:
        return self._shape(self._out_dims(output))

    def whole_shape(self, operand: int) -> tuple[int, ...]:
        return tuple(self._call.operands[operand].shape)

    def start(self, factor: str) -> int:
        sizes = self._split.shape.leaves.get(factor, ())
        return self._piece((factor, 0), sizes[0])[0] * math.prod(sizes[1:]) if sizes else 0

    def size(self, factor: str) -> int:
        leaves = self._split.shape.leaves.get(factor)
        if leaves is None:  # no dim shows it, so every rank has it whole; a dim of size 1 has no factor
            return factor_sizes(self._split.shape.rule, self._call).get(factor, 1)
        return math.prod(self._piece((factor, i), n)[1] for i, n in enumerate(leaves))

    def out_pieces(self, output: int = 0) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        return tuple(tuple((*self._piece(leaf, n), n) for leaf, n in d) for d in self._out_dims(output))

    def _out_dims(self, output: int) -> LeafDims:
        """The leaves of an output; of one that nothing reads, which has no layout, those of its rule's factors."""
        shape = self._split.shape
        known, dims = shape.outputs[output], shape.rule.outputs[output]
        if known is not None:
            return known
        assert dims is not None, f"output {output} of {self.target} is no tensor"
        sizes = self._call.outputs[output].shape
        return tuple(
            tuple(((f, i), size) for f in names for i, size in enumerate(shape.leaves[f]))
            if names and all(f in shape.leaves for f in names)
            else ((None, n),)
            for names, n in zip(dims, sizes, strict=True)
        )


def factor_sizes(rule: Rule, call: Call) -> dict[str, int]:
    """The whole size of every factor of a rule, read off the dims that show it alone.

    Raises:
        ValueError: the rule does not fit the call; the message names the op, the operand and the sizes.
    """
    sizes: dict[str, int] = dict(rule.sizes)
    seen = [(d, t) for d, t in zip(rule.inputs, call.operands, strict=False)]
    seen += [(d, t) for d, t in zip(rule.outputs, call.outputs, strict=False) if d is not None]
    for dims, tensor in seen:
        if len(dims) != tensor.dim():
            raise ValueError(f"the rule of {call.target} gives {len(dims)} dims to a tensor of {tuple(tensor.shape)}")
        for dim, n in zip(dims, tensor.shape, strict=True):
            if len(dim) == 1 and sizes.setdefault(dim[0], n) != n:
                raise ValueError(f"the rule of {call.target} has factor {dim[0]!r} as {sizes[dim[0]]} and as {n}")
    for dims, tensor in seen:
        for dim, n in zip(dims, tensor.shape, strict=True):
            _check_composite(dim, n, sizes, call)
    return sizes


def _check_composite(dim: tuple[str, ...], n: Any, sizes: dict[str, int], call: Call) -> None:
    unknown = [f for f in dim if f not in sizes]
    if len(unknown) == 1:
        sizes[unknown[0]] = n // max(1, math.prod(sizes[f] for f in dim if f in sizes))
    elif unknown:
        raise ValueError(f"the rule of {call.target} leaves the sizes of {unknown} open; give them in `sizes`")
    if dim and math.prod(sizes[f] for f in dim) != n:
        raise ValueError(f"the rule of {call.target}: {'*'.join(f'{f}={sizes[f]}' for f in dim)} is not {n}")


def plain_shape(rule: Rule, call: Call) -> Shape:
    """The shape of a call on its own: every factor is its one leaf."""
    sizes = factor_sizes(rule, call)

    def dims_of(dims: Dims) -> LeafDims:
        return tuple(tuple(((f, 0), sizes[f]) for f in dim) for dim in dims)

    return Shape(
        rule,
        {f: (n,) for f, n in sizes.items()},
        tuple(map(dims_of, rule.inputs)),
        tuple(None if o is None else dims_of(o) for o in rule.outputs),
    )
