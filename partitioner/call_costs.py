"""The seconds of a group's calls, and of the reshards between them, for all its joint values at once.

    seconds(group | x) = sum_calls roofline(call | x) + sum_inner tensors reshard(state given, state needed)

The roofline is that of the busiest rank (`compute_cost.py`); `cost.call_seconds` has the same for one split.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.fx as fx

from .compute_cost import compute_seconds
from .rules.split import Leaf, Shape
from .states import Prices
from .strategies import HEAVY, is_view

if TYPE_CHECKING:
    from .joint import Joint, Wire


class Cost:
    """The seconds of a group's calls and of the reshards inside it, for all joint values at once."""

    def __init__(self, made: Joint, prices: Prices):
        self.made, self.prices, self.mesh = made, prices, prices.mesh
        self.count = len(made.joint)

    def seconds(self) -> np.ndarray:
        total = np.zeros(self.count)
        for i, m in enumerate(self.made.members):
            if not is_view(m.node):
                total += self.call(i)
        return total + self._inside()

    def call(self, i: int) -> np.ndarray:
        """Seconds of a call on the busiest rank, written out where its value asks for that."""
        m, written = self.made.members[i], self.made.written.get(i)
        local, share = self._local_lengths(i)
        moved = np.zeros(self.count)
        outs = m.node.meta["val"] if isinstance(m.node.meta["val"], (tuple, list)) else (m.node.meta["val"],)
        tensors = [(o.meta["val"], self._seen(i, k, local)) for k, o in enumerate(m.operands)]
        tensors += [(t, d) for t, d in zip(outs, m.shape.outputs, strict=False) if isinstance(t, torch.Tensor)]
        for t, dims in tensors:
            if dims is not None:
                moved += self._elements(dims, local) * float(t.element_size())
        rule = m.shape.rule
        product = None
        if rule.flops >= HEAVY and {"m", "n", "k"} <= m.shape.leaves.keys():
            product = tuple(self._factor(m.shape, f, local) for f in "mnk")
        dtype = tensors[0][0].dtype if tensors else torch.float32
        seconds = compute_seconds(rule.flops * share, moved, dtype, self.mesh.device, product)
        return seconds if written is None else np.where(np.isnan(written), seconds, written)

    def output_bytes(self, i: int, output: int) -> np.ndarray:
        """Bytes of an output of a call on the busiest rank."""
        m = self.made.members[i]
        val = m.node.meta["val"]
        tensor = val[output] if isinstance(val, (tuple, list)) else val
        local, _ = self._local_lengths(i)
        return np.zeros(self.count) + self._elements(m.shape.outputs[output], local) * float(tensor.element_size())

    def _local_lengths(self, i: int) -> tuple[dict[Leaf, np.ndarray], np.ndarray]:
        """Of each leaf that some value splits its longest piece, and the share of the iteration space that is."""
        m = self.made.members[i]
        every = dict.fromkeys(c[i] for axis in self.made.choices for c in axis)
        leaves = [leaf for leaf in every if isinstance(leaf, tuple)]
        local = {leaf: self._cut(i, leaf, m.shape.leaves[leaf[0]][leaf[1]]) for leaf in leaves}
        share = np.ones(self.count)
        for leaf, size in local.items():
            share = share * (size / max(1, m.shape.leaves[leaf[0]][leaf[1]]))
        return local, share

    def _cut(self, i: int, leaf: Leaf, length: int) -> np.ndarray:
        """Of something so long the longest piece, cut where call `i` splits a leaf."""
        size = np.full(self.count, float(length))
        for axis, (_, ranks) in enumerate(self.prices.axes):
            taken = np.array([c[i] == leaf for c in self.made.choices[axis]])[self.made.joint[:, axis]]
            size = np.where(taken, np.ceil(size / ranks), size)
        return size

    def _seen(self, i: int, operand: int, local: dict[Leaf, np.ndarray]) -> Any:
        """The dims of an operand; one that is seen through a window counts as the rows of it that its split leaves."""
        shape = self.made.members[i].shape
        dims = shape.inputs[operand]
        for (k, dim), (factor, _) in shape.rule.windows.items():
            leaf = (factor, 0)
            if k == operand and leaf in local:
                size = max(1, math.prod(n for _, n in dims[dim]))
                seen = ("window", size)
                local[seen] = self._cut(i, leaf, size)
                dims = (*dims[:dim], ((seen, size),), *dims[dim + 1 :])
        return dims

    def _elements(self, dims: Any, local: dict[Leaf, np.ndarray]) -> Any:
        fixed, out = 1.0, None
        for leaf, n in (part for dim in dims for part in dim):
            if leaf in local:
                out = local[leaf] if out is None else out * local[leaf]
            else:
                fixed *= max(n, 1)
        return fixed if out is None else out * fixed

    def _factor(self, shape: Shape, factor: str, local: dict[Leaf, np.ndarray]) -> Any:
        out: Any = 1.0
        for i, n in enumerate(shape.leaves[factor]):
            out = out * local.get((factor, i), float(n))
        return out if isinstance(out, np.ndarray) else np.full(self.count, out)

    def _inside(self) -> np.ndarray:
        """Reshards between calls of the group; readers that need the same share one."""
        total = np.zeros(self.count)
        paid: set[tuple[Wire, int]] = set()
        for i, m in enumerate(self.made.members):
            for k, wire in enumerate(m.wires):
                if wire is None:
                    continue
                have, want = self.made.gives(*wire), self.made.needs(i, k)
                if (wire, id(want)) in paid or have is want:
                    continue
                paid.add((wire, id(want)))
                operand = m.operands[k]
                table = self.prices.between(lengths_of(m.shape.inputs[k]), itemsize(operand), have, want)
                total += table[have.place, want.place]
        return total


def lengths_of(dims: Any) -> tuple[int, ...]:
    """The sizes of a tensor's factors."""
    return tuple(max(1, n) for dim in dims for _, n in dim)


def itemsize(value: fx.Node) -> int:
    return value.meta["val"].element_size()
