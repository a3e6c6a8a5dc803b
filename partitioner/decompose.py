"""Replace calls by simpler ops, so that a factor which the op needs whole can be split.

A rule's `decompose` names, per factor, a function of the op's own arguments that computes the same by ops whose rules
do split it: a softmax over a split dim becomes a partial maximum, a partial sum and pointwise ops between them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .factors import Factored
from .graph import Graph, is_getitem


def decompose_calls(graph: Graph, names: tuple[str, ...], factored: Factored) -> Graph:
    """The graph with these calls replaced; new nodes are named after the one they replace."""
    for node in list(graph.fx.nodes):
        if node.name in names:
            _replace(graph.fx, node, next(iter(factored.shapes[node].rule.decompose.values())))
    graph.fx.eliminate_dead_code()
    graph.fx.lint()
    return graph


def _replace(graph: fx.Graph, node: fx.Node, fn: Any) -> None:
    leaves, spec = tree_flatten((node.args, node.kwargs))
    where = [i for i, x in enumerate(leaves) if isinstance(x, fx.Node)]
    fakes = [leaves[i].meta["val"] for i in where]

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            filled[i] = t
        args, kwargs = tree_unflatten(filled, spec)
        return fn(*args, **kwargs)

    with fakes[0].fake_mode:
        traced = make_fx(run)(*fakes)
    env: dict[fx.Node, Any] = {}
    taken = {n.name for n in graph.nodes}
    inputs = iter([leaves[i] for i in where])
    outputs: Any = None
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(inputs)
            elif inner.op == "output":
                outputs = tree_map(lambda x: env[x] if isinstance(x, fx.Node) else x, inner.args[0])
            else:
                env[inner] = _copy(graph, inner, node, env, taken)
    _rewire(graph, node, outputs)


def _copy(graph: fx.Graph, inner: fx.Node, outer: fx.Node, env: dict[fx.Node, Any], taken: set[str]) -> fx.Node:
    new = graph.node_copy(inner, lambda n: env[n])
    new.name = f"{outer.name}_{inner.name}"
    while new.name in taken:  # the mean of `var` beside a `var_mean`
        new.name += "_"
    taken.add(new.name)
    new.meta = dict(outer.meta) | {"val": inner.meta.get("val")}
    return new


def _rewire(graph: fx.Graph, node: fx.Node, outputs: Any) -> None:
    if not isinstance(outputs, (list, tuple)):
        node.replace_all_uses_with(outputs)
    else:
        for user in list(node.users):
            assert is_getitem(user)
            replacement = outputs[int(user.args[1])]  # type: ignore[arg-type]
            if replacement is not None:
                user.replace_all_uses_with(replacement)
            graph.erase_node(user)
    graph.erase_node(node)
