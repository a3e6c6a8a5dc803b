"""Pipeline stages: which stage every call of the joint graph belongs to, from where forward is cut.

Forward is cut between any two of its calls, in program order, so values only go to later stages. Everything else
follows from the places of the cuts:

    backward   a call belongs where the call is that it is the backward of, or earlier if what it reads is from
               earlier: gradients only go to earlier stages
    free       what is made of inputs alone, cheaply (masks, positions, counts of tokens), or of parameters alone
               (casts, views, normed weights), is made on every stage that reads it, and never sent
    homes      a parameter lives on every stage that reads it; where there are several (tied weights) each has the whole
               gradient, and steps alike

The place of a call is the index of the forward call that it belongs to (its *anchor*); stages are intervals of anchors.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.fx as fx

from .factors import Factored
from .graph import Graph, is_getitem
from .strategies import HEAVY


@dataclass(frozen=True)
class Anchors:
    """Attributes:
    forward: the forward calls that are cut between, in program order.
    of: per call the index in `forward` that it belongs to; None for what is free.
    """

    forward: tuple[fx.Node, ...]
    of: Mapping[fx.Node, int | None]


@dataclass(frozen=True)
class Stages:
    """A pipeline cut.

    Attributes:
        cuts: of every stage but the first, the name of its first forward call.
        placement: per virtual stage the index on the pipeline axis that holds it.
        of: per call its stage; calls that every stage makes for itself are left out.
        parameters: per parameter the stages that read it.
        before: per parameter the indices on the pipeline axis where an earlier program of the model has placed it; it
            stays there, and gets its gradient there, though no stage there reads it.
        homes: per parameter the indices on the pipeline axis that hold it.
    """

    cuts: tuple[str, ...]
    placement: tuple[int, ...]
    of: Mapping[str, int]
    parameters: Mapping[str, tuple[int, ...]]
    before: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def homes(self) -> dict[str, tuple[int, ...]]:
        read = {name: {self.placement[s] for s in on} for name, on in self.parameters.items()}
        return {name: tuple(sorted(on.union(self.before.get(name, ())))) for name, on in read.items()}

    @property
    def count(self) -> int:
        return len(self.placement)

    def to_body(self) -> dict[str, Any]:
        """The stages as plain lists, for a saved plan; `before` is of one run alone."""
        return {
            "cuts": list(self.cuts),
            "placement": list(self.placement),
            "stages": dict(self.of),
            "stages_of_parameters": {name: list(on) for name, on in self.parameters.items()},
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Stages:
        """Read `to_body`; whether they are stages of a program is `pipeline.check_given`'s business."""
        parameters = {name: tuple(map(int, on)) for name, on in body["stages_of_parameters"].items()}
        of = {name: int(stage) for name, stage in body["stages"].items()}
        return cls(tuple(body["cuts"]), tuple(map(int, body["placement"])), of, parameters)


def anchors(graph: Graph, factored: Factored) -> Anchors:
    """Where every call belongs."""
    free = _free(graph, factored)
    calls = [n for n in graph.fx.nodes if n.op == "call_function"]
    forward = tuple(n for n in calls if n not in free and not n.meta.get("backward") and not is_getitem(n))
    place = {n: i for i, n in enumerate(forward)}
    first: dict[int, int] = {}
    for n in forward:
        if n.meta.get("seq") is not None:
            first.setdefault(n.meta["seq"], place[n])
    of: dict[fx.Node, int | None] = {}
    for n in calls:
        if n in free:
            of[n] = None
        elif is_getitem(n):
            of[n] = of[n.args[0]]  # type: ignore[index]
        elif n in place:
            of[n] = place[n]
        else:
            of[n] = _backward_place(n, of, first)
    return Anchors(forward, of)


def _backward_place(node: fx.Node, of: Mapping[fx.Node, int | None], first: Mapping[int, int]) -> int:
    late = [a for x in node.all_input_nodes if x.meta.get("backward") and (a := of.get(x)) is not None]
    early = [a for x in node.all_input_nodes if not x.meta.get("backward") and (a := of.get(x)) is not None]
    paired = first.get(node.meta.get("seq"))  # type: ignore[arg-type]
    if paired is not None:
        return min([paired, *late])
    return min(late) if late else max(early, default=0)


def _free(graph: Graph, factored: Factored) -> set[fx.Node]:
    """Calls that any stage can make for itself."""
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    made_of: dict[fx.Node, frozenset[str]] = {}
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            kind = roles[node].kind
            if kind == "tangent":  # the way back starts at the stage that made the output
                continue
            made_of[node] = frozenset({kind} & {"param", "input"})
        elif node.op == "get_attr":
            made_of[node] = frozenset()
        elif node.op == "call_function" and all(x in made_of for x in node.all_input_nodes):
            kinds = frozenset().union(*(made_of[x] for x in node.all_input_nodes))
            shape = factored.shapes.get(node)
            heavy = shape is not None and shape.rule.flops >= HEAVY
            if len(kinds) < 2 and not (heavy and "input" in kinds):
                made_of[node] = kinds
    return {n for n in made_of if n.op == "call_function"}


def stages_of(graph: Graph, found: Anchors, cuts: Sequence[int], placement: tuple[int, ...]) -> Stages:
    """The stages that start at these places (indices into `found.forward`, ascending)."""
    of = {n.name: bisect.bisect_right(cuts, a) for n, a in found.of.items() if a is not None}
    names = tuple(found.forward[c].name if c < len(found.forward) else "" for c in cuts)
    users = needed_on(graph, of, len(placement))
    parameters = {
        str(role.name): tuple(sorted(users[node] or {0}))
        for node, role in zip(graph.placeholders, graph.inputs, strict=True)
        if role.kind == "param"
    }
    return Stages(names, placement, of, parameters)


def needed_on(graph: Graph, of: Mapping[str, int], count: int) -> dict[fx.Node, frozenset[int]]:
    """Of every node the stages that make it: its own, or, of what is free or an input, those that read it.

    What is free and leaves the program is made on all.
    """
    every = frozenset(range(count))
    leaving = {v for v in graph.output_values if v is not None}
    found: dict[fx.Node, frozenset[int]] = {}
    for node in reversed(graph.fx.nodes):
        if node.name in of:
            found[node] = frozenset({of[node.name]})
        elif node in leaving and node.op == "call_function":
            found[node] = every
        else:
            found[node] = frozenset().union(*(found[u] for u in node.users if u.op != "output"))
    return found


def parameters_read(graph: Graph, found: Anchors) -> list[set[str]]:
    """Per forward call the parameters that it reads, itself or through what is made of them alone."""
    known: dict[fx.Node, set[str]] = {}
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        known[node] = {str(role.name)} if role.kind == "param" else set()
    for node in graph.fx.nodes:
        if node.op == "call_function" and found.of.get(node, 0) is None:
            known[node] = set().union(*(known.get(x, set()) for x in node.all_input_nodes))
    return [set().union(*(known.get(x, set()) for x in n.all_input_nodes)) for n in found.forward]
