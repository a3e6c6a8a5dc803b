"""Inputs of which each data rank passes its own part: from the call of one rank to the call of all.

The captured program is always the global one. Which dims of which tensors carry the batch is read off the graph of the
local call: those whose factors are the batch's (never those that merely have its size). They grow by the number of
data ranks, and the grown call is captured.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils._pytree as pytree

from .errors import PlanError
from .factors import factor_graph
from .graph import Graph
from .mesh import Mesh
from .strategies import marked_atoms


def data_ranks(mesh: Mesh) -> int:
    """Ranks among which the batch is divided."""
    return math.prod(n for a, n in mesh.axes if mesh.role(a) == "data")


def batch_dims_of(graph: Graph) -> tuple[int | None, ...]:
    """Per tensor of the call the dim that holds the batch, as the graph shows; None where none does."""
    factored = factor_graph(graph)
    batch = marked_atoms(graph, factored).batch
    found: list[int | None] = [None] * len(graph.batch)
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if role.kind == "input":
            dims = [i for i, atoms in enumerate(factored.dims[node]) if set(atoms) & batch]
            found[int(role.name)] = dims[0] if dims else None
    return tuple(found)


def grown(call: Any, dims: tuple[int | None, ...], ranks: int, micro_batches: int = 1) -> Any:
    """The call with the batch dims of its tensors `ranks` times as long; the tensors have no values.

    With micro-batches the global batch is one after another, each made of one equal part of every rank.

    Raises:
        PlanError: a rank's part cannot be cut into so many equal parts.
    """
    leaves, spec = pytree.tree_flatten(call)
    which = iter(dims)
    for i, x in enumerate(leaves):
        if isinstance(x, torch.Tensor):
            dim = next(which)
            if dim is not None and x.shape[dim] % micro_batches:
                raise PlanError(
                    f"inputs='local': {x.shape[dim]} rows on a rank cannot be cut into micro_batches={micro_batches} "
                    f"equal parts; pass a multiple of {micro_batches}"
                )
            shape = [n * ranks if d == dim else n for d, n in enumerate(x.shape)]
            leaves[i] = torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
    return pytree.tree_unflatten(leaves, spec)
