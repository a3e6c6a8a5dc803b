"""Give an "autograd" program its pause: outputs leave after forward, their gradients come in before backward.

Before:  placeholders (..., tangent 0); `out -> ...; return out, grad`
After:   `t = pause((out, new buffers)); ...; return grad` with `t[0]` in the place of tangent 0

Law `backward-after-pause`: no forward node follows the pause, no backward node precedes it.
"""

from __future__ import annotations

import operator

import torch.fx as fx

from ..partitioner.graph import Role
from ..partitioner.transfer import pause
from .draft import Draft

HANDED_OUT = ("output", "new_buffer", "new_input")


def insert_pause(draft: Draft) -> Draft:
    if draft.form != "autograd" or draft.plan.stages is not None:  # stages pause between segments
        return draft
    graph, roles = draft.graph.fx, draft.graph.outputs
    values = draft.graph.output_values
    out = draft.graph.output_node
    early = [i for i, r in enumerate(roles) if r.kind in HANDED_OUT]
    first = _first_backward(draft, [values[i] for i in early])
    with graph.inserting_before(first):
        hold = graph.call_function(pause, (tuple(values[i] for i in early),))
    hold.meta = {"val": None, "module": "", "where": "", "backward": True, "seq": None}
    inputs = zip(draft.graph.placeholders, draft.graph.inputs, strict=True)
    tangents = [(n, r) for n, r in inputs if r.kind == "tangent"]
    anchor = hold
    for i, (node, _) in enumerate(tangents):
        with graph.inserting_after(anchor):
            given = graph.call_function(operator.getitem, (hold, i))
        given.meta = dict(node.meta)
        draft.layouts[given] = draft.layouts[node]
        node.replace_all_uses_with(given)
        anchor = given
    out.args = (tuple(None if i in early else v for i, v in enumerate(values)),)
    draft.established += ("backward-after-pause",)
    return draft


def _first_backward(draft: Draft, needed: list[fx.Node | None]) -> fx.Node:
    """The first node of backward. Nodes of forward found after it are moved before it."""
    graph = draft.graph.fx
    backward = (n for n in graph.nodes if n.op == "call_function" and n.meta.get("backward"))
    first = next(backward, draft.graph.output_node)
    late = False
    for node in list(graph.nodes):
        late = late or node is first
        if late and node is not first and node.op == "call_function" and not node.meta.get("backward"):
            first.prepend(node)
    return first


def paused_outputs(roles: tuple[Role, ...]) -> tuple[int, ...]:
    """Indices of the outputs that an "autograd" program hands out at its pause."""
    return tuple(i for i, r in enumerate(roles) if r.kind in HANDED_OUT)
