"""Seconds of one call, split, on the busiest rank: a roofline (`compute_cost.py`). A view costs nothing.

`joint.Cost` has the same for all values of a group at once.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from .compute_cost import compute_seconds
from .layout import Layout
from .mesh import Mesh
from .rules.split import Shape, Split
from .strategies import HEAVY, is_view
from .transitions import largest_piece


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a whole tensor; dims that depend on data count as 1."""
    return tensor.element_size() * math.prod(n if isinstance(n, int) else 1 for n in tensor.shape)


def call_seconds(node: fx.Node, shape: Shape, split: Split, operands: list[torch.Tensor], mesh: Mesh) -> float:
    """Seconds of one call, run as `split`."""
    if is_view(node):
        return 0.0
    moved = sum(t.element_size() * _elements(split.input_layout(i), mesh) for i, t in enumerate(operands))
    outs = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    for j, t in enumerate(outs):
        layout = split.output_layout(j) if j < len(shape.outputs) else None
        if layout is not None and isinstance(t, torch.Tensor):
            moved += t.element_size() * _elements(layout, mesh)
    local = {
        (f, i): largest_piece(n, split.axes.get((f, i), ()), mesh.sizes)
        for f, sizes in shape.leaves.items()
        for i, n in enumerate(sizes)
    }
    share = math.prod(n / shape.leaves[f][i] for (f, i), n in local.items() if shape.leaves[f][i])
    product = None
    if shape.rule.flops >= HEAVY and {"m", "n", "k"} <= shape.leaves.keys():
        m, n, k = (math.prod(local[f, i] for i in range(len(shape.leaves[f]))) for f in "mnk")
        product = (m, n, k)
    dtype = operands[0].dtype if operands else torch.float32
    return compute_seconds(shape.rule.flops * share, float(moved), dtype, mesh.device, product)


def _elements(layout: Layout, mesh: Mesh) -> int:
    """Of the largest local tensor; what a window sees of a dim counts as the split dim."""
    return math.prod(max(1, largest_piece(f.size, f.axes, mesh.sizes)) for d in layout.dims for f in d)
