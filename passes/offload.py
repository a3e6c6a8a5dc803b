"""Write what the plan keeps on the host as copies down and up.

Before:  `h = gelu(x); y = mm(h, w); ...; h_again = clone(h); dw = mm(h_again, dy)`      h_again stands in backward
After:   `h = gelu(x); y = mm(h, w); h_away = offload(h); ...; h_back = reload(h_away); h_again = reloaded(h_back); ...`

The copy down starts after the value's last use in forward. The copy up of one value starts where the one before it is
waited for, so at most two stand reloaded ahead of their readers.

Law `reload-has-offload`: every value that the plan offloads goes down once, in forward, comes up once, in backward, and
backward reads it in no other way.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ..kernels.offload import OFFLOAD, RELOAD, reloaded
from ..partitioner.twins import SUFFIX
from .draft import Draft

CPU = torch.device("cpu")


def write_offload(draft: Draft) -> Draft:
    graph = draft.graph.fx
    order = {n: i for i, n in enumerate(graph.nodes)}
    nodes = {n.name: n for n in graph.nodes}
    back = [nodes[name + SUFFIX] for name in draft.plan.offload if name + SUFFIX in nodes]
    before: fx.Node | None = None
    for node in sorted(back, key=order.__getitem__):
        value = node.args[0]
        assert isinstance(value, fx.Node)
        used = [u for u in value.users if u.op == "call_function" and not u.meta.get("backward")]
        away = _call(draft, max([value, *used], key=lambda n: order.get(n, -1)), OFFLOAD, value, value, "away")
        up = _call(draft, node.prev if before is None else before.prev, RELOAD, away, node, "back")
        up.kwargs = {"device": CPU}
        node.target, node.args, node.kwargs = reloaded, (up,), {}
        for known in (draft.placement.splits, draft.placement.needs):
            known.pop(node, None)  # type: ignore[arg-type]
        before = node
    draft.established += ("reload-has-offload",)
    return draft


def _call(draft: Draft, after: fx.Node, target: object, operand: fx.Node, like: fx.Node, word: str) -> fx.Node:
    """A call of one operand behind a node, laid out and of the same part of the program as another."""
    graph = draft.graph.fx
    with graph.inserting_after(after):
        made = graph.call_function(target, (operand,))  # type: ignore[arg-type]
    made.name = f"{operand.name.removesuffix('_away')}_{word}"
    made.meta = dict(like.meta)
    draft.layouts[made] = draft.layouts[like]
    return made
