"""Canonical form of a captured graph: random ops that draw by element, and no nodes that do nothing.

    start_from_loss    the gradient of the loss is 1
    place_random_ops   aten.native_dropout, aten.rand, ... -> kernels/random.py's functions, numbered in program order
    clean              detach, alias, lift_fresh_copy removed; t(t(x)) is x; equal views are one; dead nodes removed
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from ..kernels.random import canonical_random
from .errors import CaptureError
from .graph import Role, where

aten = torch.ops.aten

_NOTHING = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}


_COPYING_VIEWS = {aten._unsafe_view.default, aten.reshape.default, aten._to_copy.default}
"""Like views, but each may have memory of its own."""


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


def start_from_loss(graph: fx.Graph, roles: tuple[Role, ...], scaled: bool = False) -> tuple[Role, ...]:
    """Backward starts from d loss / d loss = 1: the tangent of the loss becomes a constant. `scaled`: from the scale
    of the loss, an input; the loss itself stays as it is."""
    if scaled:
        return _start_from_scale(graph, roles)
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


def _start_from_scale(graph: fx.Graph, roles: tuple[Role, ...]) -> tuple[Role, ...]:
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    for node, role in zip(nodes, roles, strict=True):
        val = node.meta["val"]
        if role.kind != "tangent" or val.dtype == torch.float32:
            continue
        with graph.inserting_before(next((n for n in graph.nodes if n in node.users), graph.output_node())):
            cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": val.dtype})
        cast.meta = dict(node.meta)
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, made=cast: user is not made)
        with val.fake_mode:
            node.meta = dict(node.meta) | {"val": val.to(torch.float32)}
    return tuple(Role("scale", 0) if r.kind == "tangent" else r for r in roles)


def clean(graph: fx.Graph) -> None:
    """Remove what computes nothing, and what computes again what is there."""
    graph.eliminate_dead_code()  # first, so that no call is merged into one that nothing reads
    merged = _Merged()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = _operand_it_is(node) or merged.earlier(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()


def _operand_it_is(node: fx.Node) -> Any:
    """The node whose value a call merely hands on, or None."""
    operand = node.args[0] if node.args else None
    if node.target in _NOTHING:
        return operand
    if node.target is aten.t.default and isinstance(operand, fx.Node) and operand.target is aten.t.default:
        return operand.args[0]
    return None


class _Merged:
    """Views, casts and items met so far, to find an equal one: the projections of q, k and v each view their input
    anew, and should read one node.

    A view costs nothing, so a view in backward may be one made in forward. A cast is memory: one made in forward would
    be kept for backward. So is a view of an input: a parameter may be gathered for forward and again for backward.
    """

    def __init__(self) -> None:
        self.first: dict[tuple, fx.Node] = {}
        self.of_input: set[fx.Node] = set()

    def earlier(self, node: fx.Node) -> fx.Node | None:
        """An equal call before this one."""
        target: Any = node.target
        view = target is operator.getitem or getattr(target, "is_view", False)
        if not view and target not in _COPYING_VIEWS:
            return None
        operand = node.args[0]
        if isinstance(operand, fx.Node) and (operand.op == "placeholder" or operand in self.of_input):
            self.of_input.add(node)
        phase = None if view and node not in self.of_input else bool(node.meta.get("backward"))
        key = (target, phase, _hashable(node.args), _hashable(node.kwargs))
        first = self.first.setdefault(key, node)
        return None if first is node else first


def _hashable(x: Any) -> Any:
    """Arguments as a dict key, in which 1, 1.0 and True differ."""
    if isinstance(x, (list, tuple)):
        return tuple([_hashable(y) for y in x])
    if isinstance(x, dict):
        return tuple([(k, _hashable(v)) for k, v in x.items()])
    return (type(x), x)
