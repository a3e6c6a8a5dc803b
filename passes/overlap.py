"""Start collectives early, wait for them late, and let small ones travel together.

Before:  `y = primitive(x, all_reduce(dp))`
After:   `h = start((all_reduce(dp),), x); ...; y = wait(h, 1)[0]`

A bucket of parameter gathers holds neighbours in the order of use. A collective starts right after what it sends is
made and is waited for right before it is read: a gradient's reduction runs under the rest of backward. Gathers of
parameters start one gather ahead of their use, so that at most two gathered parameters are in flight. Reductions of
small gradients are collected into buckets. Of those that leave a rank less than it sends (ZeRO), at most `IN_FLIGHT`
are under way: the whole gradients that wait for one do not grow with the model. An all-reduce leaves all that it sends,
so to wait for it would save nothing.

A bucket closes at so many bytes of local tensors that its message hardly feels its latency (`partitioner/buckets.py`
has the size and the price), and tensors larger than that travel alone, uncopied.

Law `one-wait`: every started collective is waited for exactly once, after its start.
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx

from ..partitioner.buckets import bucket_limit
from ..partitioner.collective import Step, largest_local
from ..partitioner.program import primitive
from ..partitioner.transfer import pause, start, wait
from .aliases import readers, shared_memory
from .draft import Draft

IN_FLIGHT = 2
"""Reduce-scatters of gradients under way at a time: one on the wire, one behind it (FSDP has one)."""

LOCAL = ("slice", "zero")
"""Primitives that talk to nobody."""


def start_early(draft: Draft) -> Draft:
    order = _Order(draft.graph.fx)
    for bucket in _buckets(draft, _gradient_reductions(draft)) + _buckets(draft, _parameter_gathers(draft)):
        _split_phase(draft, bucket, order)
    rest = [n for n in draft.graph.fx.nodes if n.target is primitive and _step(n).kind not in LOCAL]
    for node in rest:
        _split_phase(draft, [node], order)
    _prefetch(draft)
    _bound(draft)
    _let_overwrite(draft)
    draft.established += ("one-wait",)
    return draft


class _Order:
    """Places of nodes in program order, kept while nodes are put in between."""

    def __init__(self, graph: fx.Graph):
        self.place: dict[fx.Node, float] = {n: float(i) for i, n in enumerate(graph.nodes)}
        self.inputs_end = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)

    def after(self, node: fx.Node) -> fx.Node:
        """The node to insert behind so that `node` is made: itself, or the last placeholder."""
        return self.inputs_end if node.op == "placeholder" and self.inputs_end else node


def _step(node: fx.Node) -> Step:
    return node.args[1]  # type: ignore[return-value]


def _gradient_reductions(draft: Draft) -> list[fx.Node]:
    """Reductions whose result only leaves the program, as a gradient."""
    out = draft.graph.output_node
    kinds = ("all_reduce", "reduce_scatter")
    return [
        n
        for n in draft.graph.fx.nodes
        if n.target is primitive and _step(n).kind in kinds and n.meta.get("backward") and set(n.users) == {out}
    ]


def _parameter_gathers(draft: Draft) -> list[fx.Node]:
    """First gathers of parameters, in the order of their uses."""
    order = {n: i for i, n in enumerate(draft.graph.fx.nodes)}
    params = _params(draft)
    steps = [n for n in draft.graph.fx.nodes if n.target is primitive]
    found = [n for n in steps if _step(n).kind == "all_gather" and n.args[0] in params]
    return sorted(found, key=lambda n: min(order[u] for u in n.users))


def _params(draft: Draft) -> set[fx.Node]:
    return {n for n, r in zip(draft.graph.placeholders, draft.graph.inputs, strict=True) if r.kind == "param"}


def _buckets(draft: Draft, nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Collectives of one kind, group, dtype and phase, closed at the size that hides the latency."""
    open_: dict[tuple, list[fx.Node]] = {}
    done: list[list[fx.Node]] = []
    for node in nodes:
        step, val = _step(node), node.meta["val"]
        limit = bucket_limit(step.axes, draft.mesh)
        if _local_bytes(draft, node) >= limit:
            done.append([node])
            continue
        key = (step.kind, step.axes, step.op, val.dtype, bool(node.meta.get("backward")))
        bucket = open_.setdefault(key, [])
        bucket.append(node)
        if sum(_local_bytes(draft, n) for n in bucket) >= limit:
            done.append(open_.pop(key))
    return done + list(open_.values())


def _local_bytes(draft: Draft, node: fx.Node) -> int:
    """Of the largest local tensor that a primitive reads or makes."""
    step = _step(node)
    elements = max(largest_local(x, draft.mesh) for x in (step.before, step.after))
    return elements * node.meta["val"].element_size()


def _split_phase(draft: Draft, bucket: list[fx.Node], order: _Order) -> None:
    """Replace primitives by one start (after the last of their operands) and one wait (before the first reader)."""
    graph, place = draft.graph.fx, order.place
    operands = [n.args[0] for n in bucket]
    anchor = order.after(max(operands, key=place.__getitem__))  # type: ignore[arg-type]
    given: Any = (tuple(_step(n) for n in bucket), *operands)
    with graph.inserting_after(anchor):
        began = graph.call_function(start, given, {"where": bucket[0].meta.get("where", "")})
    began.meta = dict(bucket[0].meta) | {"val": None}
    place[began] = place[anchor] + 0.25
    reader = min((u for n in bucket for u in n.users), key=place.__getitem__)
    with graph.inserting_before(reader):
        ended = graph.call_function(wait, (began, len(bucket)))
        ended.meta = dict(bucket[0].meta) | {"val": [n.meta["val"] for n in bucket]}
        for i, node in enumerate(bucket):
            value = graph.call_function(operator.getitem, (ended, i))
            value.meta = dict(node.meta)
            place[value] = place[reader] - 0.25
            draft.layouts[value] = draft.layouts.pop(node)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            value.name = node.name  # other segments know it by this name
    place[ended] = place[reader] - 0.5


def _prefetch(draft: Draft) -> None:
    """Starts of parameter gathers move from the program's begin to one gather ahead of their use."""
    graph = draft.graph.fx
    params = _params(draft)
    gathers = [n for n in graph.nodes if n.target is start and n.args[1] in params]
    waits = {n.args[0]: n for n in graph.nodes if n.target is wait}
    order = {n: i for i, n in enumerate(graph.nodes)}
    gathers.sort(key=lambda n: order[waits[n]])
    for previous, later in zip(gathers, gathers[1:], strict=False):
        turn = later.meta.get("backward") and not previous.meta.get("backward")
        (_first_backward(draft) if turn else waits[previous]).prepend(later)


def _bound(draft: Draft) -> None:
    """The wait for a reduce-scatter whose results leave the program moves before the `IN_FLIGHT`-th start after it."""
    out = draft.graph.output_node
    begun = [n for n in draft.graph.fx.nodes if n.target is start and n.meta.get("backward")]
    waits = {n.args[0]: n for n in draft.graph.fx.nodes if n.target is wait}
    scatters = [n for n in begun if n.args[0][0].kind == "reduce_scatter"]  # type: ignore[index,union-attr]
    leave = [n for n in scatters if all(set(v.users) == {out} for v in waits[n].users)]
    for early, later in zip(leave, leave[IN_FLIGHT:], strict=False):
        ended = waits[early]
        later.prepend(ended)
        for value in list(ended.users):
            later.prepend(value)


def _first_backward(draft: Draft) -> fx.Node:
    """Where backward begins: what is gathered again for it must not stand gathered through the forward."""
    calls = (n for n in draft.graph.fx.nodes if n.op == "call_function")
    return next(n for n in calls if n.target is pause or (n.meta.get("backward") and n.target is not start))


def _let_overwrite(draft: Draft) -> None:
    """A start may overwrite its operands when nothing reads their memory afterwards: it then needs no copy."""
    order = {n: i for i, n in enumerate(draft.graph.fx.nodes)}
    share = shared_memory(draft.graph.fx)
    read = {root: set(readers(nodes)) for root, nodes in share.items()}
    root_of = {n: root for root, nodes in share.items() for n in nodes}
    for node in draft.graph.fx.nodes:
        if node.target is start:
            roots = [root_of.get(x) for x in node.args[1:]]
            own = all(r is not None and r.op == "call_function" and _done(read[r], node, order) for r in roots)
            if own and len(set(roots)) == len(roots):
                node.kwargs = {**node.kwargs, "consume": True}


def _done(read: set[fx.Node], begun: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether nobody but a collective reads once it has begun."""
    return all(order[u] <= order[begun] or u in begun.users for u in read)
