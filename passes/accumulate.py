"""Let a segment add what it makes for a micro-batch to what the micro-batches before gave.

Before:  `dw = mm(dy, x)`                 and the walk adds dw to the sum so far
After:   `dw = addmm_(so_far, dy, x)`     the sum so far is read with the inputs; dw is it

An op of `kernels/in_place.py` adds as it computes, so that a tensor of a weight's size is not made, written and read;
after any other the sum is taken at once, and what was made goes. The first micro-batch runs the graph as it was.

Law `added-once`: a part that is added is made in the segment and given by it, and nobody else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from ..kernels.in_place import ADDING, ADDING_ONE
from ..partitioner.graph import is_getitem
from ..partitioner.program import Collect
from .laws import broken


def adding(graph: fx.Graph, sums: Sequence[Collect]) -> fx.Graph:
    """A rank's graph of a segment, for a micro-batch after the first."""
    out, copied = fx.Graph(), {}
    out.output(out.graph_copy(graph, copied))
    for old, new in copied.items():
        new.name = old.name
    by_name = {new.name: new for new in copied.values()}
    check_added(out, sums)
    first = next(n for n in out.nodes if n.op != "placeholder")
    for c in sums:
        part = by_name[c.part]
        with out.inserting_before(first):
            so_far = out.placeholder(f"{c.part}_so_far")
        so_far.meta = {k: part.meta[k] for k in ("where", "module") if k in part.meta}
        if adds_one(part):
            made: Any = part.args[0]
            made.target, made.args = ADDING_ONE[made.target][1], (so_far, *made.args)
        elif part.target in ADDING:
            part.target, part.args = ADDING[part.target], (so_far, *part.args)
        else:
            _after(out, part, so_far)
    out.lint()
    return out


def adds_one(part: fx.Node) -> bool:
    """Whether a value is the result of a call that can add it to a sum."""
    call: Any = part.args[0] if is_getitem(part) else None
    return call is not None and ADDING_ONE.get(call.target, (None,))[0] == part.args[1]


def _after(out: fx.Graph, part: fx.Node, so_far: fx.Node) -> None:
    """The sum as an op of its own."""
    with out.inserting_after(part):
        total = out.call_function(torch.ops.aten.add_.Tensor, (so_far, part))
    total.name, total.meta = f"{part.name}_added", dict(part.meta)
    out.output_node().replace_input_with(part, total)


def check_added(graph: fx.Graph, sums: Sequence[Collect]) -> None:
    """The law."""
    nodes, given = {n.name: n for n in graph.nodes}, graph.output_node().args[0]
    for c in sums:
        part = nodes[c.part]
        once = sum(x is part for x in given) == 1  # type: ignore[union-attr]
        if part.op != "call_function" or list(part.users) != [graph.output_node()] or not once:
            raise broken("added-once", "accumulate", part, f"its sum {c.whole} is not all that it is for")
