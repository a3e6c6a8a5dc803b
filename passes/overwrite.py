"""Let calls write their result over an operand that nobody reads any more (`kernels/in_place.py` says which can).

Before:  `dz = nll_backward(grad, logits, target, lse)`     logits and dz both stand
After:   `dz = nll_backward_(grad, logits, target, lse)`    dz lies where the logits lay

The operand's memory must be the program's own: made by an op of this graph, or by the one segment that gives it, for
this one alone (`own_inputs`). Views of it must not repeat elements.

Law `overwritten-is-dead`: what is written over is not read afterwards, and belongs to the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from ..kernels.in_place import IN_PLACE, WRITES
from ..partitioner.graph import is_getitem
from .aliases import may_alias, readers, shared_memory
from .laws import broken

if TYPE_CHECKING:
    from .segments import Part

OWN = "own"
"""Marks a placeholder of a segment whose value is this segment's alone."""

_aten = torch.ops.aten
_VIEWS = {_aten.view, _aten._unsafe_view, _aten.reshape, _aten.t, _aten.transpose, _aten.permute, _aten.unsqueeze}
"""Views in which no element appears twice."""


def overwrite(graph: fx.Graph) -> None:
    """Rewrite one rank's graph."""
    if not any(n.target in IN_PLACE for n in graph.nodes):
        return
    order = {n: i for i, n in enumerate(graph.nodes)}
    for nodes in shared_memory(graph).values():
        if not _ours(nodes):
            continue
        last = max(readers(nodes), key=order.__getitem__, default=None)
        made = IN_PLACE.get(last.target) if last is not None else None
        if last is not None and made and last.args[made[1]] in nodes and _reads_once(last, nodes):
            last.target = made[0]
    check_overwritten(graph)


def _reads_once(node: fx.Node, nodes: Sequence[fx.Node]) -> bool:
    return sum(x in nodes for x in node.all_input_nodes) == 1


def _ours(nodes: Sequence[fx.Node]) -> bool:
    """Whether this memory was made for the program alone, and is seen through plain views."""
    root, *views = nodes
    made = root.op == "call_function" and isinstance(root.target, torch._ops.OpOverload) and not may_alias(root)
    plain = (is_getitem(n) or getattr(n.target, "overloadpacket", None) in _VIEWS for n in views)
    return (made or bool(root.meta.get(OWN))) and all(plain)


def check_overwritten(graph: fx.Graph) -> None:
    """The law: no stale value is read."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    for nodes in shared_memory(graph).values():
        for writer in [n for n in nodes if n.target in WRITES]:
            stale = [n for n in nodes if order[n] < order[writer]]
            foreign = stale[0].op != "call_function" and not stale[0].meta.get(OWN)
            read = [u for u in readers(stale) if order[u] > order[writer]]
            if foreign or read:
                why = f"it writes over {stale[0].name}, which " + (
                    f"{read[0].name} reads later" if read else "is not the program's own"
                )
                raise broken("overwritten-is-dead", "overwrite", writer, why)


def own_inputs(parts: Sequence[Part], sent: Iterable[str], leaving: Iterable[str]) -> None:
    """Mark the inputs of segments that are theirs alone.

    Such a value is made by one segment, whose other results lie elsewhere, is read by one, is of one micro-batch, is
    neither sent (a message may still be under way) nor put together over micro-batches, and does not leave the program.
    """
    taken = {*sent, *leaving, *(name for p in parts for c in p.collects for name in (c.part, c.whole))}
    for part in parts:
        for node in part.draft.graph.placeholders:
            if node.name in taken or node.name not in part.reads or not part.timed:
                continue
            readers = [p for p in parts if node.name in p.reads]
            makers = [p for p in parts if node.name in p.gives]
            if len(readers) == len(makers) == 1 and makers[0].timed and _alone(makers[0], node.name):
                node.meta[OWN] = True


def _alone(part: Part, name: str) -> bool:
    """Whether a result of a segment has memory of its own."""
    given: Any = part.draft.graph.fx.output_node().args[0]
    for nodes in shared_memory(part.draft.graph.fx).values():
        if any(n.name == name for n in nodes):
            return _ours(nodes) and sum(n in given for n in nodes) == 1
    return False
