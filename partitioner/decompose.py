"""Replace calls by simpler ops, so that a factor which the op needs whole can be split.

A rule's `decompose` names, per factor, a function of the op's own arguments that computes the same by ops whose rules
do split it: a softmax over a split dim becomes a partial maximum, a partial sum and pointwise ops between them.
`written.py` prices such a split before it is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import compat
from .graph import Graph, is_getitem
from .kinds import call_of
from .rules.every import rule_of
from .trace import Tracer


class Decomposed(NamedTuple):
    """A graph in which calls have been replaced.

    Attributes:
        graph: a graph of its own, with the same node names.
        twins: of each node of the old graph the one that it was in the copy, before calls were replaced.
        firsts: of each call of the old graph that was replaced the node that is now its first output.
    """

    graph: Graph
    twins: Mapping[fx.Node, fx.Node]
    firsts: Mapping[fx.Node, fx.Node]


def decompose_calls(graph: Graph, names: tuple[str, ...]) -> Decomposed:
    """A copy of the graph with these calls replaced, one after another; new nodes are named after the one they replace,
    and may be replaced in their turn."""
    made, twins = graph.twin()
    nodes = {n.name: n for n in made.fx.nodes}
    old, firsts = {new: node for node, new in twins.items()}, {}
    for name in names:
        if name not in nodes:
            continue  # of another program: the caller compares what is left
        node = nodes.pop(name)
        first = _replace(made, node, nodes)
        if node in old:
            firsts[old[node]] = first
            old[first] = old[node]
    made.fx.eliminate_dead_code()
    made.fx.lint()
    return Decomposed(made, twins, firsts)


def written_out(node: fx.Node, known: dict[Any, fx.Graph]) -> tuple[fx.Graph, list[fx.Node]]:
    """A call as a graph of simpler ops, and the node that each of its placeholders stands for.

    `known`: `Graph.traced` of its program. Equal calls share a graph, which must not be changed: a trace takes longer
    than all else about a call.
    """
    leaves, spec = tree_flatten((node.args, node.kwargs))
    where = [i for i, x in enumerate(leaves) if isinstance(x, fx.Node)]
    key = (node.target, spec, tuple(map(_key, leaves)))
    if key not in known:
        known[key] = _trace(node, leaves, spec, where)
    return known[key], [leaves[i] for i in where]


def _key(x: Any) -> Any:
    """What a trace depends on of an argument; 1, 1.0 and True differ."""
    val = x.meta["val"] if isinstance(x, fx.Node) else x
    if isinstance(val, torch.Tensor):
        return tuple(val.shape), val.stride(), val.dtype, val.device
    return type(val), val


def _trace(node: fx.Node, leaves: list[Any], spec: Any, where: list[int]) -> fx.Graph:
    parts = next(iter(rule_of(call_of(node)).decompose.values()))

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            filled[i] = t
        args, kwargs = tree_unflatten(filled, spec)
        return parts(*args, **kwargs)

    fakes = [leaves[i].meta["val"] for i in where]
    tracer = Tracer(fakes[0].fake_mode)
    inputs = [compat.fake_like(t, tracer.mode) for t in fakes]
    for i, t in enumerate(inputs):
        tracer.placeholder(f"operand_{i}", t)
    with tracer.recording():
        made = run(*(compat.wrapped(t, False) for t in inputs))
    tracer.graph.output(tree_map(lambda t: tracer.node_of(t) if isinstance(t, torch.Tensor) else t, made))
    tracer.graph.eliminate_dead_code()
    return tracer.graph


def _replace(program: Graph, node: fx.Node, taken: dict[str, fx.Node]) -> fx.Node:
    """Returns what stands for the call's first output. `taken`: the nodes of the graph by name."""
    graph = program.fx
    simpler, operands = written_out(node, program.traced)
    env: dict[fx.Node, Any] = {}
    inputs = iter(operands)
    outputs: Any = None
    with graph.inserting_before(node):
        for inner in simpler.nodes:
            if inner.op == "placeholder":
                env[inner] = next(inputs)
            elif inner.op == "output":
                outputs = tree_map(lambda x: env[x] if isinstance(x, fx.Node) else x, inner.args[0])
            else:
                env[inner] = _copy(graph, inner, node, env, taken)
    _rewire(graph, node, outputs)
    return next(o for o in outputs if o is not None) if isinstance(outputs, (list, tuple)) else outputs


def _copy(
    graph: fx.Graph, inner: fx.Node, outer: fx.Node, env: dict[fx.Node, Any], taken: dict[str, fx.Node]
) -> fx.Node:
    new = graph.node_copy(inner, lambda n: env[n])
    new.name = f"{outer.name}_{inner.name}"
    while new.name in taken:  # the mean of `var` beside a `var_mean`
        new.name += "_"
    taken[new.name] = new
    new.meta = dict(outer.meta) | {"val": inner.meta.get("val"), "written": outer.name}
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
