"""Which values of a graph may lie in the same memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.fx as fx

from ..kernels.in_place import WRITES
from ..partitioner.graph import is_getitem
from ..partitioner.transfer import start, wait


def shared_memory(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Nodes that may share memory, by the first of them; an op that may return a view of an operand joins it.

    The results of a functional op are apart from each other, for writing to one must not change another.
    """
    root: dict[fx.Node, fx.Node] = {}
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        root[node] = node
        if node.op == "call_function" and node.target not in (start, wait) and may_alias(node) and not _apart(node):
            at = WRITES.get(node.target)
            operands = node.all_input_nodes if at is None else [node.args[at]]
            roots = {root[o] for o in operands}  # type: ignore[index]
            if len(roots) == 1:
                root[node] = roots.pop()
            elif roots:  # several: all become one
                first = next(iter(roots))
                for other in roots:
                    for member in out.pop(other, []):
                        root[member] = first
                        out.setdefault(first, []).append(member)
                root[node] = first
        out.setdefault(root[node], []).append(node)
    return out


def readers(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """What reads any of the nodes; a collective reads its operands until it has been waited for."""
    for node in nodes:
        for user in node.users:
            yield user
            yield from user.users if user.target is start else ()


def may_alias(node: fx.Node) -> bool:
    """Whether a call may return memory of an operand: by its schema, or because it is a plain function."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    return any(r.alias_info for r in schema.returns) or "view" in schema.name or node.target in _MAY_RETURN_ITSELF


def _apart(node: fx.Node) -> bool:
    """One of the results of a call that makes them."""
    return is_getitem(node) and hasattr(node.args[0].target, "_schema") and not may_alias(node.args[0])  # type: ignore


_MAY_RETURN_ITSELF = {torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default}
