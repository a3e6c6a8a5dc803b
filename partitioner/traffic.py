"""What a plan sends: its reshards as steps, counted, in bytes and seconds, by mesh axes and kind.

    reshards   what the plan implies          reshards.py
    steps      the primitives of each          collective.path
    sent       bytes that one rank sends       collective.wire_bytes
    seconds    of each step                    collective.seconds; of those sent together a share (`buckets.py`)

A pure function of graph, factors and plan: `passes` inserts the same reshards and writes out the same steps. Later they
start some early, which these seconds do not know.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from .buckets import Bucket
from .collective import Step, in_bucket, seconds, wire_bytes
from .factors import Factored
from .graph import Graph
from .layout import Layout
from .mesh import TIME, Mesh
from .moves import LOCAL_KINDS
from .placement import Placement, place
from .plan import Plan
from .reshards import Reshard, reshards
from .through_time import times, way


@dataclass(frozen=True)
class Way:
    """The steps of a reshard; per step the bytes that one rank sends, seconds, and how often it is done."""

    steps: tuple[Step, ...]
    sent: tuple[float, ...]
    seconds: tuple[float, ...]
    times: tuple[int, ...]

    @property
    def total(self) -> float:
        return sum(self.seconds)

    def __str__(self) -> str:
        return ", ".join(f"{s.kind} over {'+'.join(s.axes)}" for s in self.steps)


@dataclass(frozen=True)
class Moved:
    """One reshard of a plan, by names.

    Attributes:
        value: the tensor: a parameter's or an input's name, or that of a node.
        module: the module that made it; "" for an input.
        is_param: whether it is a parameter.
        before, after: from which layout to which.
        backward: whether that happens in backward.
        readers: the calls that need it.
        leaves: what it is of the program's outputs: ("grad", "0.weight"), ("output", "0"), ...
        way: its steps.
    """

    value: str
    module: str
    is_param: bool
    before: Layout
    after: Layout
    backward: bool
    readers: tuple[str, ...]
    leaves: tuple[tuple[str, str], ...]
    way: Way


@dataclass(frozen=True)
class Total:
    """How many collectives, bytes that one rank sends in them, seconds."""

    count: int = 0
    sent: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Total) -> Total:
        return Total(self.count + other.count, self.sent + other.sent, self.seconds + other.seconds)


Traffic = Mapping[tuple[tuple[str, ...], str], Total]
"""By (axes, kind of collective)."""


def traffic_of(graph: Graph, factored: Factored, plan: Plan) -> tuple[Moved, ...]:
    """The reshards of a plan, in the order of their first readers."""
    return moves_of(graph, place(graph, factored, plan), plan)


def moves_of(graph: Graph, placed: Placement, plan: Plan) -> tuple[Moved, ...]:
    """`traffic_of`, of a placement that is known."""
    names, ways = _names(graph), _Ways(plan.grid, plan.zero >= 2)
    return tuple(_moved(one, graph, names, ways) for one in reshards(graph, placed, plan))


def totals(moves: Iterable[Moved]) -> Traffic:
    """The collectives of reshards, counted; steps that send nothing are left out. Sorted by axes and kind."""
    found: dict[tuple[tuple[str, ...], str], list[float]] = {}
    for step, often, sent, took in steps_of(moves):
        if not is_local(step):
            total = found.setdefault((step.axes, step.kind), [0, 0.0, 0.0])
            total[0] += often
            total[1] += sent
            total[2] += took
    return {key: Total(int(n), sent, took) for key, (n, sent, took) in sorted(found.items())}


def steps_of(moves: Iterable[Moved]) -> Iterator[tuple[Step, int, float, float]]:
    """(step, how often, bytes that one rank sends, seconds of all times), one after another."""
    ways = (m.way for m in moves)
    return itertools.chain.from_iterable(zip(w.steps, w.times, w.sent, w.seconds, strict=True) for w in ways)


def is_local(step: Step) -> bool:
    """Whether a step sends nothing: ranks keep it to themselves, or it goes from one micro-batch to the next."""
    return step.kind in LOCAL_KINDS or step.axes == (TIME,)


def local_seconds(moves: Iterable[Moved]) -> float:
    """Seconds of the steps that send nothing: copies."""
    return sum(took for step, _, _, took in steps_of(moves) if is_local(step))


class _Ways:
    """The ways between layouts. Equal layouts are one object (`placement`), which spares hashing them."""

    def __init__(self, mesh: Mesh, early: bool):
        self.mesh, self.early = mesh, early
        self._known: dict[tuple, Way] = {}

    def of(self, before: Layout, after: Layout, itemsize: int, bucket: Bucket | None) -> Way:
        key = (id(before), id(after), itemsize, bucket)
        found = self._known.get(key)
        if found is None:
            steps = way(before, after, self.mesh, itemsize, self.early, bucket)
            which = in_bucket(steps, bucket)
            often = [times(s, self.mesh) for s in steps]
            sent = tuple(n * wire_bytes(s, self.mesh, itemsize) for n, s in zip(often, steps, strict=True))
            took = tuple(
                n * seconds(s, self.mesh, itemsize, bucket if i == which else None)
                for i, (n, s) in enumerate(zip(often, steps, strict=True))
            )
            found = self._known[key] = Way(steps, sent, took, tuple(often))
        return found


def _names(graph: Graph) -> dict[fx.Node, tuple[str, bool]]:
    """Of each placeholder its name, and whether it is a parameter."""
    found = {}
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        name = str(role.name)
        if role.kind == "input":
            name = graph.input_names[int(role.name)] if int(role.name) < len(graph.input_names) else ""
        found[node] = (name or f"{role.kind} {role.name}", role.kind == "param")
    return found


def _moved(one: Reshard, graph: Graph, names: Mapping[fx.Node, tuple[str, bool]], ways: _Ways) -> Moved:
    node: Any = one.value
    name, is_param = names.get(node, (node.name, False))
    return Moved(
        name,
        node.meta.get("module") or "",
        is_param,
        one.before,
        one.after,
        one.backward,
        tuple(dict.fromkeys(reader.name for reader, _ in one.reads)),
        tuple((graph.outputs[i].kind, str(graph.outputs[i].name)) for i in one.leaves),
        ways.of(one.before, one.after, node.meta["val"].element_size(), one.bucket),
    )
