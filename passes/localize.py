"""The program of one rank: sizes, offsets and partners in plain numbers.

Before (mesh-wide):  `view(x, [8, 32])`, `start((all_gather(tp),), x)`, `primitive(x, slice(dp))`
After (rank 1):      `reshape(x, [4, 32])`, `start((Transfer(...),), x)`, `local_slice(x, ...)`

Law `local-shapes`: each local tensor has the shape its layout gives this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_map

from ..partitioner.program import primitive
from ..partitioner.transfer import is_first, local_slice, slice_args, start, transfer_of, zero_unless_first
from .draft import Draft
from .overwrite import OWN, overwrite


def rank_graph(draft: Draft, rank: int) -> fx.Graph:
    """The fx graph that one rank runs."""
    out = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in draft.graph.fx.nodes:
        env[node] = _place(draft, node, rank, out, env)
        if isinstance(env[node], fx.Node):
            env[node].meta = {k: node.meta.get(k, "") for k in ("where", "module", OWN)} | {"of": node.name}
    overwrite(out)
    out.lint()
    return out


def _place(draft: Draft, node: fx.Node, rank: int, out: fx.Graph, env: dict[fx.Node, Any]) -> Any:
    def mine(x: Any) -> Any:
        return env[x] if isinstance(x, fx.Node) else x

    if node.op != "call_function":
        return out.node_copy(node, mine)
    if node.target is primitive:
        return _local_step(draft, node, rank, out, env)
    args, kwargs = tree_map(mine, node.args), tree_map(mine, dict(node.kwargs))
    if node.target is start:
        transfers = tuple(transfer_of(s, draft.mesh, rank) for s in node.args[0])  # type: ignore[union-attr]
        given: Any = (transfers, *args[1:])
        return out.create_node("call_function", start, given, kwargs, name=node.name)
    target: Any = node.target
    if node in draft.splits:
        target, args, kwargs = draft.splits[node].localize(draft.factored.calls[node], args, kwargs, draft.mesh, rank)
    return out.create_node("call_function", target, args, kwargs, name=node.name)


def _local_step(draft: Draft, node: fx.Node, rank: int, out: fx.Graph, env: dict[fx.Node, Any]) -> fx.Node:
    step: Any = node.args[1]
    value = env[node.args[0]]  # type: ignore[index]
    if step.kind == "slice":
        args = (value, *slice_args(step, draft.mesh, rank))
        return out.create_node("call_function", local_slice, args, name=node.name)
    keeps = is_first(step, draft.mesh, rank)
    return out.create_node("call_function", zero_unless_first, (value, keeps), name=node.name)


def on_device(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """Capture is on the CPU: ops that make tensors are told the device that the rank runs on."""
    if device.type == "cpu":
        return graph
    for node in graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
    return graph
