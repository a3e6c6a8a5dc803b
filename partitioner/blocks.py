"""Blocks: the parts of a model that repeat, found from where its calls stand in the module tree.

    list of blocks   numbered children of one module of which two do the same, call by call; where a model has none,
                     numbered children of which two make `CALLS` calls; else what the model's own children are
    block            the calls of forward of one child, in one go: a layer that is run again is another block

No class is asked for its name. A block of a block is no block: the outermost list counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.fx as fx

from .graph import Graph, is_getitem
from .strategies import is_view

CALLS = 3
"""So many calls, views not counted, make a numbered child that is like no other a block."""

Inside = Callable[[str], "str | None"]
"""From a module's name to that of the block it is in."""


def blocks(graph: Graph) -> dict[fx.Node, int]:
    """Per node of forward that is in a block, the number of the block; blocks are numbered in program order."""
    found = block_names(graph)
    return regions(graph, lambda name: next((p for p in _prefixes(name) if p in found), None))


def regions(graph: Graph, inside: Inside) -> dict[fx.Node, int]:
    """Blocks by name, one for each time that forward goes into one."""
    out: dict[fx.Node, int] = {}
    number, last = -1, None
    for node in graph.fx.nodes:
        if node.op != "call_function" or node.meta.get("backward"):
            continue
        if is_getitem(node):
            if node.args[0] in out:
                out[node] = out[node.args[0]]
            continue
        name = inside(node.meta.get("module") or "")
        if name is not None and name != last:
            number += 1
        if name is not None:
            out[node] = number
        last = name
    return out


def block_names(graph: Graph) -> set[str]:
    """The modules that are blocks."""
    calls: dict[str, list] = {}
    for node in graph.calls():
        module = node.meta.get("module")
        if module and not node.meta.get("backward") and not is_view(node):
            for prefix in _prefixes(module):
                calls.setdefault(prefix, []).append(_does(node))
    lists: dict[str, list[str]] = {}
    for prefix in calls:
        parent, _, last = prefix.rpartition(".")
        if last.isdigit():
            lists.setdefault(parent, []).append(prefix)
    alike = {p for some in lists.values() if _alike([calls[p] for p in some]) for p in some}
    large = {p for some in lists.values() if sum(len(calls[p]) >= CALLS for p in some) > 1 for p in some}
    own = {p for p in calls if "." not in p and len(calls[p]) >= CALLS}
    return _outermost(alike | {p for p in large if not any(a.startswith(p + ".") for a in alike)}) or own


def _alike(some: list[list]) -> bool:
    """Whether two children do the same, and more than one call."""
    seen = [tuple(calls) for calls in some if len(calls) > 1]
    return len(set(seen)) < len(seen)


def _does(node: fx.Node) -> tuple:
    val = node.meta.get("val")
    vals = val if isinstance(val, (tuple, list)) else (val,)
    return node.target, tuple(tuple(map(str, getattr(v, "shape", ()))) for v in vals)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _outermost(names: Iterable[str]) -> set[str]:
    known = set(names)
    return {n for n in known if not any(p in known for p in _prefixes(n)[:-1])}
