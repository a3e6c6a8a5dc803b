"""Backward makes forward values again: the calls that it needs for that, copied into it.

Before:  `h = gelu(x); ...; g = mm_backward(h, dy)`                    h is kept from forward to backward
After:   `h = gelu(x); ...; h_again = gelu(x); g = mm_backward(h_again, dy)`      x is kept

A copy stands right before its first reader, so that what one block makes again is gone when the next one starts. It
does what its call does on every axis, and draws the same random numbers, which belong to elements. What a call changes
(running statistics) leaves the program from forward alone. Costs, stages, the simulator and `verify` see the copies as
the calls that they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
import torch.fx as fx

from .factors import Factored
from .graph import Graph, is_getitem, tensor_operands

SUFFIX = "_again"


def is_twin(name: str) -> bool:
    return name.endswith(SUFFIX)


def is_away(name: str, offload: Collection[str]) -> bool:
    """Whether a call is the clone that stands for a value on the host."""
    return is_twin(name) and original(name) in offload


def original(name: str) -> str:
    """The call that a copy is of."""
    return name.removesuffix(SUFFIX)


def with_twins(graph: Graph, again: Collection[str], away: Collection[str] = ()) -> tuple[Graph, dict[str, str]]:
    """A copy of the graph whose backward reads none of these values of forward, and {name of a copy: its original}.

    The factors, where they are known, are known of the copies too. Of values that are `away` the copy is a clone of the
    value itself, in whose place the passes put its way to the host and back; its factors are not known yet.
    """
    made, seen = graph.twin()
    twins: dict[fx.Node, fx.Node] = {}
    for node in [n for n in made.fx.nodes if n.op == "call_function" and not n.meta.get("backward")][::-1]:
        late = [u for u in node.users if u.meta.get("backward")]
        whole = isinstance(node.meta.get("val"), (tuple, list)) and all(u in twins for u in late)
        if late and (node.name in again or node.name in away or whole):
            twins[_twin(made.fx, node, late, node.name in away)] = node
    if graph.factored is not None:
        made = replace(made, factored=_factored(graph.factored.moved(seen), twins, away))
    made.fx.lint()
    return made, {twin.name: node.name for twin, node in twins.items()}


def _twin(graph: fx.Graph, node: fx.Node, late: Iterable[fx.Node], away: bool) -> fx.Node:
    """The copy, which late readers read from now on."""
    with graph.inserting_before(min(late)):
        twin = graph.call_function(torch.ops.aten.clone.default, (node,)) if away else graph.node_copy(node)
    twin.name = node.name + SUFFIX
    twin.meta = dict(node.meta) | {"backward": True}
    for user in late:
        user.replace_input_with(node, twin)
    return twin


def _factored(known: Factored, twins: Mapping[fx.Node, fx.Node], away: Collection[str]) -> Factored:
    for twin, node in twins.items():
        if node in known.dims:
            known.dims[twin] = known.dims[node]
        if not is_getitem(node) and node.name not in away:
            known.shapes[twin], known.calls[twin], known.atoms[twin] = (
                known.shapes[node], known.calls[node], known.atoms[node],
            )  # fmt: skip
    for node in known.operands:
        known.operands[node] = tensor_operands(node)
    for twin, node in twins.items():
        if not is_getitem(twin) and node.name not in away:
            known.operands[twin] = tensor_operands(twin)
    return known
