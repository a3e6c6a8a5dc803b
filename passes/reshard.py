"""Insert a reshard wherever a tensor is needed in a layout it does not have.

Before:  `y = op(x)` with x as [8, 4:tp], needed as [8, 4]
After:   `x2 = reshard(x, [8, 4:tp] -> [8, 4]); y = op(x2)`

Readers of one tensor in one layout share the reshard. At ZeRO stage 3 a gathered parameter is not kept from forward to
backward: the two phases have a gather each. Law `layouts-agree`: every operand has the layout its call needs.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from ..partitioner.graph import is_tensor, tensor_operands
from ..partitioner.layout import Layout
from ..partitioner.program import reshard
from ..partitioner.strategies import is_view
from .draft import Draft


def insert_reshards(draft: Draft) -> Draft:
    _regather_views(draft)
    made: dict[Any, fx.Node] = {}
    for node in list(draft.graph.calls()):
        split = draft.splits[node]
        needs = {operand: [] for operand in tensor_operands(node)}
        for k, operand in enumerate(tensor_operands(node)):
            needs[operand].append(split.input_layout(k))
        for operand, wanted in needs.items():
            if all(w == draft.layouts[operand] for w in wanted):
                continue
            if len(set(wanted)) > 1:
                _one_by_one(draft, node, made)
                break
            new = _resharded(draft, operand, wanted[0], node, made)
            node.replace_input_with(operand, new)
    _outputs(draft, made)
    draft.established += ("layouts-agree",)
    return draft


def _one_by_one(draft: Draft, node: fx.Node, made: dict[Any, fx.Node]) -> None:
    """A call that reads one tensor twice in two layouts: each place gets its own."""
    split, counter = draft.splits[node], iter(range(10**6))

    def place(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(place(y) for y in x)
        if isinstance(x, dict):
            return {k: place(v) for k, v in x.items()}
        if not is_tensor(x):
            return x
        wanted = split.input_layout(next(counter))
        return x if draft.layouts[x] == wanted else _resharded(draft, x, wanted, node, made)

    node.args = place(node.args)
    node.kwargs = place(dict(node.kwargs))


def _resharded(draft: Draft, value: fx.Node, wanted: Layout, before: fx.Node, made: dict[Any, fx.Node]) -> fx.Node:
    key = (value, wanted, _phase(draft, value, before))
    if key not in made:
        with draft.graph.fx.inserting_before(before):
            made[key] = _node(draft, value, wanted, before)
    return made[key]


def _node(draft: Draft, value: fx.Node, wanted: Layout, near: fx.Node) -> fx.Node:
    args: Any = (value, draft.layouts[value], wanted)
    new = draft.graph.fx.call_function(reshard, args)
    new.meta = dict(value.meta) | {"backward": near.meta.get("backward", False)}
    draft.layouts[new] = wanted
    return new


def _phase(draft: Draft, value: fx.Node, reader: fx.Node) -> bool:
    """At stage 3, whether a parameter is read in backward; False otherwise: all readers share."""
    return draft.plan.zero == 3 and value.op == "placeholder" and bool(reader.meta.get("backward"))


def _regather_views(draft: Draft) -> None:
    """At stage 3, views of parameters made in forward and read in backward are made again there.

    Otherwise the view would keep the gathered parameter alive from forward to backward.
    """
    if draft.plan.zero != 3:
        return
    params = {n for n, r in zip(draft.graph.placeholders, draft.graph.inputs, strict=True) if r.kind == "param"}
    of_param = set(params)
    for node in list(draft.graph.calls()):
        operands = tensor_operands(node)
        if not (is_view(node) and len(operands) == 1 and operands[0] in of_param) or node.meta.get("backward"):
            continue
        of_param.add(node)
        late = [u for u in node.users if u.meta.get("backward")]
        if not late:
            continue
        twin = _twin(draft, node, late[0])
        for user in late:
            user.replace_input_with(node, twin)


def _twin(draft: Draft, node: fx.Node, before: fx.Node) -> fx.Node:
    with draft.graph.fx.inserting_before(before):
        twin = draft.graph.fx.node_copy(node)
    twin.meta = dict(node.meta) | {"backward": True}
    draft.layouts[twin] = draft.layouts[node]
    draft.splits[twin] = draft.splits[node]
    draft.factored.calls[twin] = draft.factored.calls[node]
    draft.factored.dims[twin] = draft.factored.dims[node]
    return twin


def _outputs(draft: Draft, made: dict[Any, fx.Node]) -> None:
    """Gradients go to where their parameter rests; everything else that leaves the program is whole."""
    out, placed = draft.graph.output_node, []
    end = next((n for n in reversed(draft.graph.fx.nodes) if n.op == "placeholder"), out)
    for value, role in zip(draft.graph.output_values, draft.graph.outputs, strict=True):
        if value is None or not is_tensor(value):
            placed.append(value)
            continue
        have = draft.layouts[value]
        wanted = draft.plan.resting[str(role.name)] if role.kind == "grad" else have.unsplit()
        if have != wanted:
            key = (value, wanted, False)
            if key not in made:
                with draft.graph.fx.inserting_after(end if value.op == "placeholder" else value):
                    made[key] = _node(draft, value, wanted, value)
            if not value.meta.get("backward"):  # shared with a backward reader, it still leaves before the pause
                made[key].meta["backward"] = False
            value = made[key]
        placed.append(value)
    out.args = (tuple(placed),)
