"""When a node of a program with micro-batches runs: in which loop over them, or between which two.

    phase 0      once, before the first loop          phase 1      in the first loop, for every micro-batch
    phase 2      once, after the first loop           phase 3      in the second loop ...

A node that differs from micro-batch to micro-batch runs in a loop. What is collected over micro-batches is known after
the loop that collects it, so each collection that another loop waits for (a count of tokens before the mean over them,
the statistics of a batch norm) makes one more loop. As many loops as must be, and every node as late as can be: forward
runs in the loop of its backward, so that few micro-batches are in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from ..kernels.offload import OFFLOAD
from ..partitioner.graph import is_getitem
from ..partitioner.mesh import TIME
from ..partitioner.program import primitive
from ..partitioner.reshards import made_again
from ..partitioner.through_time import changes_in_time
from .draft import Draft


@dataclass(frozen=True)
class Phases:
    """Attributes:
    of: per node its phase; of a collection, the loop that it collects.
    timed: nodes that have a value for every micro-batch.
    collects: nodes that put together what a loop gives.
    last: the last phase, which runs once.
    """

    of: dict[fx.Node, int]
    timed: frozenset[fx.Node]
    collects: frozenset[fx.Node]
    last: int


def phases(draft: Draft) -> Phases:
    if draft.form == "autograd":  # forward, a pause, backward
        calls = {n: 2 * bool(n.meta.get("backward")) for n in draft.graph.fx.nodes if n.op == "call_function"}
        return Phases(calls, frozenset(), frozenset(), 2)
    collects = frozenset(n for n in draft.graph.fx.nodes if _collects(n))
    timed = frozenset(_timed(draft, collects))
    nodes = [n for n in draft.graph.fx.nodes if n.op == "call_function"]
    soonest = _soonest(nodes, timed, collects)
    last = max(soonest.values(), default=0)
    last += last % 2
    return Phases(_latest(nodes, timed, collects, last), timed, collects, last)


def _collects(node: fx.Node) -> bool:
    return node.target is primitive and node.args[1].axes == (TIME,) and node.args[1].kind not in ("slice", "zero")  # type: ignore[union-attr]


def _timed(draft: Draft, collects: frozenset[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in draft.graph.fx.nodes:
        if node in collects or node.op == "output":
            continue
        if node in draft.splits:
            split = draft.splits[node]
            is_timed = TIME in split.partial or any(TIME in axes for axes in split.axes.values())
        elif is_getitem(node):
            is_timed = node.args[0] in found
        elif node in draft.layouts:
            is_timed = changes_in_time(draft.layouts[node])
        else:  # several results, each with its layout
            is_timed = node.op == "call_function" and not found.isdisjoint(node.all_input_nodes)
        if is_timed:
            found.add(node)
    again = made_again(draft.graph, draft.plan)
    for node in draft.graph.fx.nodes:  # copies of what is made again for every use
        if node.target is primitive and node.args[0] in again:
            again.add(node)
    for node in reversed(draft.graph.fx.nodes):
        if node in again and node.op == "call_function" and all(u in found for u in node.users):
            found.add(node)
    return found


def _soonest(nodes: list[fx.Node], timed: frozenset[fx.Node], collects: frozenset[fx.Node]) -> dict[fx.Node, int]:
    out: dict[fx.Node, int] = {}
    for node in nodes:
        ready = max((out.get(x, 0) + (x in collects) for x in node.all_input_nodes), default=0)
        in_loop = node in timed or node in collects
        out[node] = ready + (ready % 2 != in_loop)
    return out


def _latest(
    nodes: list[fx.Node], timed: frozenset[fx.Node], collects: frozenset[fx.Node], last: int
) -> dict[fx.Node, int]:
    out: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        in_loop = node in timed or node in collects
        due = min((out.get(u, last) - (node in collects) for u in node.users), default=last)
        out[node] = due - (due % 2 != in_loop)
    for node in nodes:  # the host takes a value in the loop that makes it
        if node.target is OFFLOAD and node.args[0] in out and node.args[0] not in collects:
            out[node] = out[node.args[0]]  # type: ignore[index]
    for node in nodes:  # what a call gives leaves its segment one by one
        if is_getitem(node):
            out[node] = out[node.args[0]]  # type: ignore[index]
    return out
