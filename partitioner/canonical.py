"""Canonical form of a captured graph: random ops that draw by element, and no nodes that do nothing.

    start_from_loss    the gradient of the loss is 1
    place_random_ops   aten.native_dropout, aten.rand, ... -> kernels/random.py's functions, numbered in program order
    clean              detach, alias, lift_fresh_copy removed; t(t(x)) is x; dead nodes removed
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ..kernels.random import canonical_random
from .errors import CaptureError
from .graph import Role, where

aten = torch.ops.aten

_NOTHING = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default}


def place_random_ops(graph: fx.Graph, roles: tuple[Role, ...], seed: int) -> tuple[fx.Graph, tuple[Role, ...]]:
    """Replace random ops by ones keyed by (seed, ordinal of the op, step, element); adds the step as an input.

    Raises:
        CaptureError: a random op in the backward pass (it is a recomputed one, whose mask would be another).
    """
    nodes = [n for n in graph.nodes if n.op == "call_function" and canonical_random(n.target)]
    late = [n for n in nodes if n.meta.get("backward")]
    if late:
        raise CaptureError(
            f"{late[0].target} is drawn again in backward at {where(late[0])}: the model recomputes a region with "
            f"random ops itself. Remove torch.utils.checkpoint around it; recompute= does the same with equal masks"
        )
    if not nodes:
        return graph, roles
    last = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), None)
    with graph.inserting_after(last) if last else graph.inserting_before(next(iter(graph.nodes))):
        step = graph.placeholder("step")
    step.meta = {"val": 0, "module": "", "where": "", "backward": False, "seq": None}
    for ordinal, node in enumerate(nodes):
        make = canonical_random(node.target)
        assert make is not None
        target, args, kwargs = make(node, seed=seed, op=ordinal, step=step)
        node.target, node.args, node.kwargs = target, args, kwargs
    return graph, (*roles, Role("step", 0))


def start_from_loss(graph: fx.Graph, roles: tuple[Role, ...]) -> tuple[Role, ...]:
    """Backward starts from d loss / d loss = 1: the tangent of the loss becomes a constant."""
    for node, role in zip([n for n in graph.nodes if n.op == "placeholder"], roles, strict=True):
        if role.kind != "tangent":
            continue
        first = next((n for n in graph.nodes if n in node.users), next(reversed(graph.nodes)))
        val = node.meta["val"]
        with graph.inserting_before(first):
            one = graph.call_function(aten.ones.default, (list(val.shape),), {"dtype": val.dtype, "device": val.device})
        one.meta = dict(node.meta) | {"backward": True}
        node.replace_all_uses_with(one)
        graph.erase_node(node)
    return tuple(r for r in roles if r.kind != "tangent")


def clean(graph: fx.Graph) -> None:
    """Remove what computes nothing."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _NOTHING:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten.t.default and getattr(node.args[0], "target", None) is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
