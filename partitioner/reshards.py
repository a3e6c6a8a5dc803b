"""The reshards that a plan implies: which tensor, from which layout to which, for whom.

A call that needs an operand in a layout that the tensor does not have makes a reshard. Readers of one tensor in one
layout share it. What leaves the program makes one too: a gradient goes to where its parameter rests, everything else
is whole.

What a plan makes again (`Plan.again`, and at ZeRO stage 3 every parameter) is not kept from forward to backward, and
neither is a view of it: the two phases have a reshard each, and backward makes the views it reads again.

`passes/reshard.py` inserts these, `traffic.py` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from .buckets import Bucket, buckets_of
from .graph import Graph, is_tensor, tensor_operands
from .layout import Layout
from .placement import Placement
from .plan import Plan
from .strategies import is_view


@dataclass(eq=False)
class Reshard:
    """A tensor that changes its layout.

    Attributes:
        value: the tensor.
        before, after: its layout, and the one it is needed in.
        backward: whether that happens in backward.
        reads: who needs it, first the first: a call, and which of its tensor operands it is.
        leaves: indices of the program's outputs that it is.
        bucket: in which one it may travel with others.
    """

    value: fx.Node
    before: Layout
    after: Layout
    backward: bool
    bucket: Bucket | None = None
    reads: list[tuple[fx.Node, int]] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)


def reshards(graph: Graph, placed: Placement, plan: Plan) -> list[Reshard]:
    """All of them, in the order of their first readers; those of outputs alone last."""
    made: dict[Any, Reshard] = {}
    twice, again = _by_phase(graph, plan)
    buckets = buckets_of(graph)
    for node, k, operand, late in _reads(graph, again):
        have, want = placed.layouts[operand], placed.needs[node][k]
        if have is want or have == want:
            continue
        key = (operand, want, late and operand in twice)
        if key not in made:
            made[key] = Reshard(operand, have, want, late, buckets.of(operand))
        made[key].reads.append((node, k))
    for i, value, want in _leaving(graph, placed, plan.resting):
        have, late = placed.layouts[value], bool(value.meta.get("backward"))
        if have == want:
            continue
        one = made.setdefault((value, want, False), Reshard(value, have, want, late, buckets.of(value)))
        one.backward = one.backward and late  # shared with a backward reader, it still leaves before the pause
        one.leaves.append(i)
    return list(made.values())


def _reads(graph: Graph, again: list[fx.Node]) -> Iterator[tuple[fx.Node, int, fx.Node, bool]]:
    """(call, number of the operand, the operand, whether in backward); of views made again, once more in backward."""
    for node in graph.calls():
        late = bool(node.meta.get("backward"))
        for k, operand in enumerate(tensor_operands(node)):
            yield node, k, operand, late
    for node in again:
        yield node, 0, tensor_operands(node)[0], True


def _leaving(graph: Graph, placed: Placement, resting: Mapping[str, Layout]) -> Iterator[tuple[int, fx.Node, Layout]]:
    """(index, value, layout wanted) of the tensors that leave the program."""
    for i, (value, role) in enumerate(zip(graph.output_values, graph.outputs, strict=True)):
        if value is not None and is_tensor(value):
            yield i, value, resting[str(role.name)] if role.kind == "grad" else placed.layouts[value].unsplit()


def views_made_again(graph: Graph, plan: Plan) -> list[fx.Node]:
    """Views made in forward, of what is made again, that backward reads, maybe through another; in program order."""
    return _by_phase(graph, plan)[1]


def made_again(graph: Graph, plan: Plan) -> set[fx.Node]:
    """What is not kept in another layout but made again for every use, with its views made in forward."""
    return set(_by_phase(graph, plan)[0])


def _by_phase(graph: Graph, plan: Plan) -> tuple[set[fx.Node], list[fx.Node]]:
    """What is made again, with its views made in forward; and of the views those that backward reads."""
    params = {n for n, r in zip(graph.placeholders, graph.inputs, strict=True) if r.kind == "param" and plan.zero == 3}
    params |= {n for n in graph.fx.nodes if n.name in plan.again}
    if not params:
        return set(), []
    views: dict[fx.Node, None] = {}
    for node in graph.calls():
        if is_view(node) and not node.meta.get("backward"):
            operands = tensor_operands(node)
            if len(operands) == 1 and (operands[0] in params or operands[0] in views):
                views[node] = None
    again: set[fx.Node] = set()
    for node in reversed(views):
        if any(u.meta.get("backward") or u in again for u in node.users):
            again.add(node)
    return params | views.keys(), [n for n in views if n in again]
