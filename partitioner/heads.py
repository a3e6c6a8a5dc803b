"""Fewer key/value heads than tensor ranks: write the tensor axis as two.

Attention over h = g x r query heads (g key/value heads, each read by r query heads) can be split over n ranks as long
as one of the factors that h is made of divides by n. When none does, but n = k n' with k dividing one of them and n' a
later one, the axis is written as k x n': the outer part splits the key/value heads, the inner one the query heads that
share one; keys and values are then whole on the inner part. (Llama with 2 key/value heads and tp=4: 2 x 2.)
"""

from __future__ import annotations

import math

from .factors import factor_graph
from .graph import Graph
from .mesh import Mesh


def fitted_mesh(mesh: Mesh, graph: Graph) -> Mesh:
    """The mesh, its tensor axes written as two where the heads of some attention need it."""
    attention = [node for node in graph.calls() if "meshwright.attention.default" in str(node.target)]
    axes = [a for a in mesh.names if mesh.role(a) == "tensor" and _composite(mesh.sizes[a])]
    if not attention or not axes:
        return mesh
    shapes = factor_graph(graph).shapes
    heads = {tuple(n for f in ("g", "r") for n in shapes[node].leaves.get(f, ())) for node in attention}
    for axis in axes:
        parts = next((p for h in sorted(heads) if (p := two_parts(h, mesh.sizes[axis]))), None)
        mesh = mesh.refined(axis, parts) if parts else mesh
    return mesh


def _composite(n: int) -> bool:
    return any(n % k == 0 for k in range(2, n))


def two_parts(heads: tuple[int, ...], n: int) -> tuple[int, int] | None:
    """(k, n / k): how to write an axis of n ranks for heads made of these factors; None: one factor takes it all."""
    if any(h % n == 0 for h in heads):
        return None
    for i, h in enumerate(heads):
        k = math.gcd(h, n)
        if 1 < k < n and any(later % (n // k) == 0 for later in heads[i + 1 :]):
            return k, n // k
    return None
