"""Insert a reshard wherever a tensor is needed in a layout it does not have.

Before:  `y = op(x)` with x as [8, 4:tp], needed as [8, 4]
After:   `x2 = reshard(x, [8, 4:tp] -> [8, 4]); y = op(x2)`

Which ones there are, and who shares them, says `partitioner/reshards.py`. Law `layouts-agree`: every operand has the
layout its call needs. Law `backward-reads-kept`: backward reads what the plan keeps.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from ..partitioner.graph import is_tensor
from ..partitioner.program import reshard
from ..partitioner.reshards import Reshard, reshards, views_made_again
from .draft import Draft


def insert_reshards(draft: Draft) -> Draft:
    _make_again(draft, views_made_again(draft.graph, draft.plan))
    given: dict[fx.Node, dict[int, fx.Node]] = {}
    leaving = list(draft.graph.output_values)
    for one in reshards(draft.graph, draft.placement, draft.plan):
        new = _node(draft, one)
        for reader, k in one.reads:
            given.setdefault(reader, {})[k] = new
        for i in one.leaves:
            leaving[i] = new
    for reader, operands in given.items():
        _replace(reader, operands)
    draft.graph.output_node.args = (tuple(leaving),)
    draft.established += ("layouts-agree", "backward-reads-kept")
    return draft


def _node(draft: Draft, one: Reshard) -> fx.Node:
    """Before its first reader; where none but the program's caller reads it, right after what it reshards."""
    graph = draft.graph.fx
    if one.reads:
        place = graph.inserting_before(one.reads[0][0])
    elif one.value.op == "placeholder":
        place = graph.inserting_after(draft.graph.placeholders[-1])
    else:
        place = graph.inserting_after(one.value)
    args: Any = (one.value, one.before, one.after)
    with place:
        new = graph.call_function(reshard, args)
    new.meta = dict(one.value.meta) | {"backward": one.backward}
    draft.layouts[new] = one.after
    if one.bucket is not None:
        draft.buckets[new] = one.bucket
    return new


def _replace(node: fx.Node, operands: dict[int, fx.Node]) -> None:
    """Give a call other tensor operands, by number."""
    counter = iter(range(10**6))

    def place(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(place(y) for y in x)
        if isinstance(x, dict):
            return {k: place(v) for k, v in x.items()}
        return operands.get(next(counter), x) if is_tensor(x) else x

    node.args = place(node.args)
    node.kwargs = place(dict(node.kwargs))


def _make_again(draft: Draft, views: list[fx.Node]) -> None:
    """Backward makes these views of parameters itself: kept, they would hold the gathered parameter through forward."""
    place = {n: float(i) for i, n in enumerate(draft.graph.fx.nodes)}
    for node in reversed(views):  # what is read through another view is made again after that one
        late = [u for u in node.users if u.meta.get("backward")]
        before = min(late, key=place.__getitem__)
        twin = _twin(draft, node, before)
        place[twin] = place[before] - 0.5
        for user in late:
            user.replace_input_with(node, twin)


def _twin(draft: Draft, node: fx.Node, before: fx.Node) -> fx.Node:
    with draft.graph.fx.inserting_before(before):
        twin = draft.graph.fx.node_copy(node)
    twin.meta = dict(node.meta) | {"backward": True}
    placed, factored = draft.placement, draft.factored
    placed.layouts[twin], placed.splits[twin], placed.needs[twin] = (
        placed.layouts[node], placed.splits[node], placed.needs[node],
    )  # fmt: skip
    factored.calls[twin], factored.dims[twin] = factored.calls[node], factored.dims[node]
    return twin
