"""Write each reshard as its primitives, the shortest path between the two layouts.

Before:  `y = reshard(x, [8:dp, 4] +tp -> [8:dp, 4:tp])`
After:   `y = primitive(x, reduce_scatter(tp))`

Law `primitives-chain`: each primitive starts from the layout its operand has.
"""

from __future__ import annotations

import torch.fx as fx

from ..partitioner.program import primitive, reshard
from ..partitioner.through_time import way
from .draft import Draft


def expand_reshards(draft: Draft) -> Draft:
    for node in list(draft.graph.fx.nodes):
        if node.target is reshard:
            _expand(draft, node)
    draft.established += ("primitives-chain",)
    return draft


def _expand(draft: Draft, node: fx.Node) -> None:
    value, before, after = node.args
    assert isinstance(value, fx.Node)
    here = value
    size, bucket, early = node.meta["val"].element_size(), draft.buckets.pop(node, None), draft.plan.zero >= 2
    for step in way(before, after, draft.mesh, size, early, bucket):  # type: ignore[arg-type]
        with draft.graph.fx.inserting_before(node):
            new = draft.graph.fx.call_function(primitive, (here, step))  # type: ignore[arg-type]
        new.meta = dict(node.meta)
        draft.layouts[new] = step.after
        here = new
    node.replace_all_uses_with(here)
    draft.layouts.pop(node)
    draft.graph.fx.erase_node(node)
