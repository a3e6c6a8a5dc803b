"""Which values of forward are not kept for backward, as the user asked; else `least_again.py` chooses.

    full          in every block (`blocks.py`) what only the block itself reads: its inputs are kept, as are all values
                  made outside of blocks
    "recompute"   the same of the modules that the pin names, each as one block; or calls by name
    "offload"     values of the modules or calls that the pin names are on the host until backward reads them
    "save"        values of the modules or calls that the pin names are kept, whatever else says

Never made again: what may have effects beside its values (ops of others, ops that write), sizes, what is read by other
blocks or leaves the program. Views of inputs and parameters hold no memory of their own.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping

import torch
import torch.fx as fx

from .blocks import blocks, regions
from .errors import PlanError
from .factors import Factored
from .graph import Graph, is_getitem, is_tensor
from .saved import base, saved_values

WORDS = ("recompute", "save", "offload")
"""The texts of pins that say what happens to the values that backward reads."""

OWN = ("aten", "prims", "meshwright")
"""Namespaces of ops that are known to do nothing beside computing their values."""


def keep_pins(pin: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What a user pinned: everything else, and {module or call: one of `WORDS`}."""
    mine = {name: text for name, text in pin.items() if text in WORDS}
    return {name: text for name, text in pin.items() if name not in mine}, mine


def can_repeat(node: fx.Node) -> bool:
    """Whether a call gives the same values again and does nothing else."""
    call: fx.Node = node.args[0] if is_getitem(node) else node  # type: ignore[assignment]
    val = call.meta.get("val")
    vals = val if isinstance(val, (tuple, list)) else (val,)
    if not all(v is None or isinstance(v, torch.Tensor) for v in vals):
        return False
    if isinstance(call.target, torch._ops.OpOverload):
        return call.target.namespace in OWN and not call.target._schema.is_mutable
    return getattr(call.target, "__module__", "").startswith(__name__.partition(".")[0])


class Families:
    """Values of forward with the views of each: one memory, kept or not as one.

    Attributes:
        of: per value that has memory of its own the nodes that look at it, itself first.
    """

    def __init__(self, graph: Graph, factored: Factored):
        self.of: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.fx.nodes:
            if node.op == "call_function" and is_tensor(node) and not node.meta.get("backward"):
                root = node if is_getitem(node) else base(node, factored)
                if root.op == "call_function":
                    self.of.setdefault(root, []).append(node)

    def inner(self, home: Mapping[fx.Node, int]) -> set[fx.Node]:
        """Values with memory that only their own block reads in forward, and that can be made again."""
        return {v for v, family in self.of.items() if v in home and can_repeat(v) and _stays(family, home)}


def _stays(family: list[fx.Node], home: Mapping[fx.Node, int]) -> bool:
    at = home[family[0]]
    readers = (u for v in family for u in v.users if not u.meta.get("backward"))
    return all(u.op == "call_function" and home.get(u) == at for u in readers)


def asked_again(graph: Graph, factored: Factored, recompute: str, pins: Mapping[str, str]) -> frozenset[str]:
    """Names of the values, and of their views, that backward makes again because the user said so.

    Raises:
        PlanError: a pin names nothing.
    """
    families = Families(graph, factored)
    chosen = families.inner(blocks(graph)) if recompute == "full" else set()
    for pattern, text in pins.items():
        named = _named(graph, pattern)
        if text == "recompute":
            home = regions(graph, lambda name, p=pattern: _first_match(name, p))
            calls = {v for v in families.of if v in named and v not in home and can_repeat(v)}
            chosen |= families.inner(home) | calls
    saved = saved_by_pins(graph, pins)
    return names_of(families, (v for v in chosen if v not in saved))


def names_of(families: Families, values: Iterable[fx.Node]) -> frozenset[str]:
    return frozenset(n.name for v in values for n in families.of[v])


def saved_by_pins(graph: Graph, pins: Mapping[str, str]) -> set[fx.Node]:
    """The nodes whose values pins keep, here or on the host."""
    return {n for pattern, text in pins.items() if text != "recompute" for n in _named(graph, pattern)}


def asked_away(graph: Graph, factored: Factored, full: bool, pins: Mapping[str, str]) -> frozenset[str]:
    """Names of the values that are on the host between forward and backward: of those that backward reads.

    Args:
        full: all that are made in blocks.

    Raises:
        PlanError: a pin names nothing.
    """
    saved, families = saved_values(graph, factored), Families(graph, factored)
    chosen = saved & blocks(graph).keys() if full else frozenset()
    for pattern, text in pins.items():
        if text == "offload":
            chosen |= saved & _named(graph, pattern)
    kept = {n for pattern, text in pins.items() if text == "save" for n in _named(graph, pattern)}
    return frozenset(v.name for v in chosen - kept if _can_leave(families.of.get(v, [])))


def _can_leave(family: list[fx.Node]) -> bool:
    """Whether a value with memory of its own is no single number, and does not leave the program."""
    return bool(family) and family[0].meta["val"].dim() > 0 and all(u.op != "output" for v in family for u in v.users)


def _named(graph: Graph, pattern: str) -> set[fx.Node]:
    """The calls of forward, and their outputs, that a pin names: by name, or by their module or one that it is in."""
    nodes = [n for n in graph.fx.nodes if n.op == "call_function" and not n.meta.get("backward")]
    by_name = {n for n in nodes if fnmatch.fnmatchcase(n.name, pattern)}
    found = by_name or {n for n in nodes if _first_match(n.meta.get("module") or "", pattern)}
    found |= {n for n in nodes if is_getitem(n) and n.args[0] in found}
    if not found:
        known = sorted({n.meta.get("module") or n.name for n in nodes})
        near = difflib.get_close_matches(pattern, known, 3, 0.3) or known[-3:]
        raise PlanError(f"the pin {pattern!r} names no module and no call of forward; there are, for example, {near}")
    return found


def _first_match(module: str, pattern: str) -> str | None:
    """The outermost module around one that a pattern names."""
    parts = module.split(".") if module else []
    prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((p for p in prefixes if fnmatch.fnmatchcase(p, pattern)), None)


