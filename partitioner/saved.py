"""What a step keeps in memory, as the planner counts it.

    parameters   elements at rest * (item size of the weight and of its gradient + 8)     (AdamW: two fp32 moments)
    activations  every tensor that forward makes and backward reads, once, views seen through
    copies       a tensor gathered for forward and kept for backward, unless it is made again

A sum: what stands at the same time at the peak is the memory model's business, not the planner's.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.fx as fx

from .call_costs import Cost
from .factors import Factored
from .graph import Graph, is_getitem, is_tensor
from .joint import Joint, Member
from .states import Prices
from .strategies import is_view


def saved_values(graph: Graph, factored: Factored) -> frozenset[fx.Node]:
    """The tensors made in forward that backward reads, directly or through views."""
    found: set[fx.Node] = set()
    for node in graph.fx.nodes:
        if is_tensor(node) and not node.meta.get("backward") and any(u.meta.get("backward") for u in node.users):
            found.add(base(node, factored))
    return frozenset(n for n in found if n.op == "call_function")


def base(value: fx.Node, factored: Factored) -> fx.Node:
    """The tensor that a view looks at."""
    while value.op == "call_function" and is_view(value) and not _copies(value):
        value = factored.operands[value][0]
    return value


def _copies(node: fx.Node) -> bool:
    return node.target is torch.ops.aten._to_copy.default


def saved_bytes(made: Joint, members: list[Member], prices: Prices, saved: frozenset[fx.Node]) -> np.ndarray:
    """Per joint value of a group the bytes of its saved tensors on the busiest rank."""
    cost, total = Cost(made, prices), np.zeros(len(made.joint))
    for i, m in enumerate(members):
        outs = {0: m.node} if is_tensor(m.node) else {u.args[1]: u for u in m.node.users if is_getitem(u)}
        for output, value in outs.items():
            if value in saved:
                total += cost.output_bytes(i, output)  # type: ignore[arg-type]
    return total
