"""Seconds of a call whose split asks for simpler ops (`decompose.py`): those of the ops, at their least.

    seconds(x) = min over the choices of the simpler calls of  sum seconds + sum reshards
                 their operands given and their outputs needed as x has them

A softmax over a split vocabulary is read and written several times where the op itself reads and writes once, and
reduces twice. A small planner's problem (`tables.py`), one more variable standing for x at its ends; `ways.py` says
what the simpler calls may do under each x, and finds the least of all x at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.fx as fx

from .decompose import written_out
from .factors import Factored, factor_graph
from .graph import Graph, Role, is_tensor
from .groups import single
from .layout import Factor, Layout
from .rules.split import Shape
from .states import States
from .strategies import Choice, Marked
from .ways import Ends, Values, least

if TYPE_CHECKING:
    from .joint import Builder, Joint, Member


def asks(member: Member, choice: Choice) -> bool:
    """Whether a choice of a call is one that it must be written out for."""
    return isinstance(choice, tuple) and choice[0] in member.shape.rule.decompose


def exact(shape: Shape, choice: Choice) -> bool:
    """Whether what a call is written out in does on an axis as the call does (`ways.py`)."""
    return choice is None or (isinstance(choice, tuple) and choice[0] not in shape.rule.decompose)


class Written:
    """Prices of calls written out. `builder`: of the program that they are calls of."""

    def __init__(self, builder: Builder):
        self.builder = builder
        self._known: dict[Any, np.ndarray] = {}
        self._alive: list[Any] = []

    def seconds(self, made: Joint, i: int) -> np.ndarray | None:
        """Per joint value of a group the seconds of its call `i` written out, NaN where it stays as it is; None where
        it always does."""
        m = made.members[i]
        if not m.shape.rule.decompose:
            return None
        picks = [[c[i] for c in axis] for axis in made.choices]
        ways = [tuple(own[v] for own, v in zip(picks, row, strict=True)) for row in made.joint]
        wanted = [w for w in dict.fromkeys(ways) if any(asks(m, c) for c in w)]
        if not wanted:
            return None
        price = dict(zip(wanted, self._priced(m, wanted), strict=True))
        return np.array([price.get(w, np.nan) for w in ways])

    def _priced(self, m: Member, ways: list[tuple[Choice, ...]]) -> np.ndarray:
        """Per way of splitting a call, one choice an axis, its seconds."""
        parts = tuple(self.builder.part(a) for a in self.builder.factored.atoms[m.node].values())
        key = (id(m.shape), id(self.builder.factored.calls[m.node]), parts, tuple(ways))
        if key not in self._known:
            self._known[key] = self._solved(m, ways)
            self._alive.append((m.shape, self.builder.factored.calls[m.node]))
        return self._known[key]

    def _solved(self, m: Member, ways: list[tuple[Choice, ...]]) -> np.ndarray:
        from .joint import Builder, alone
        from .tables import Tables

        outer = self.builder
        graph, operands = _graph_of(m, outer.weights.get(m.node, ()), outer.traced)
        held = {p: outer.factored.whole(o) for p, o in zip(graph.placeholders, operands, strict=True)}
        factored = factor_graph(graph, held=held)
        around = alone(m, ways)
        given = {p: around.needs(0, k) for k, p in enumerate(graph.placeholders)}
        given = {p: _finer(s, held[p], factored.whole(p)) for p, s in given.items()}
        outs = {i: v for i, v in enumerate(graph.output_values) if v is not None}
        wanted = {v: _finer(around.gives(0, i), _outer_layout(m, i), factored.whole(v)) for i, v in outs.items()}
        inner = Builder(graph, factored, outer.prices, self._marked(graph, operands, factored), {}, {}, grouped=False)
        tables = Tables(graph, factored, outer.prices, again=False)
        for group in single(graph.calls()):
            tables.add_group(group, inner)
        at = tables.add_ends(len(ways), given, wanted)
        for node in graph.fx.nodes:
            if node.op == "get_attr" and is_tensor(node):
                tables.add_input(node)
        tables.connect()
        ends = _ends(m, ways, given | wanted, factored)
        values = [Values(v, factored) for v in tables.variables]
        rows = [[v.fitting(e) for v in values] for e in ends]
        return least(tables.problem, at, rows)

    def _marked(self, graph: Graph, operands: list[fx.Node], factored: Factored) -> Marked:
        """The parts that atoms have to play in the program, for the atoms of a call written out."""
        marked, outer = self.builder.marked, self.builder.factored
        found: dict[str, set[int]] = {"batch": set(), "sequence": set(), "experts": set()}
        for node, operand in zip(graph.placeholders, operands, strict=True):
            for own, theirs in zip(factored.dims[node], outer.dims[operand], strict=True):
                for name, atoms in found.items():
                    for atom, inside in _by_atom(theirs, outer, own, factored):
                        atoms |= set(inside) if atom in getattr(marked, name) else set()
        return replace(marked, **{name: frozenset(atoms) for name, atoms in found.items()})


def _by_atom(theirs: list[int], outer: Factored, own: list[int], factored: Factored) -> list[tuple[int, list[int]]]:
    """Of each atom of a dim the atoms that it is cut in inside."""
    found, left = [], list(own)
    for atom in theirs:
        inside, size = [], 1
        while left and size < outer.sizes.size(atom):
            inside.append(left.pop(0))
            size *= factored.sizes.size(inside[-1])
        found.append((atom, inside))
    return found


def _graph_of(m: Member, weights: tuple[int, ...], traced: dict[Any, fx.Graph]) -> tuple[Graph, list[fx.Node]]:
    """A call written out as a program of its own, which gives what is read of it; and its operands.

    Its weights are parameters, which a tensor axis must split if it can.
    """
    shared, operands = written_out(m.node, traced)
    simpler = fx.Graph()
    simpler.output(simpler.graph_copy(shared, {}))
    late = bool(m.node.meta.get("backward"))
    for inner in simpler.nodes:
        inner.meta = {"val": inner.meta.get("val"), "backward": late}
    out = next(n for n in simpler.nodes if n.op == "output")
    values: Any = out.args[0] if isinstance(out.args[0], (tuple, list)) else (out.args[0],)
    out.args = (tuple(v if dims is not None else None for v, dims in zip(values, m.shape.outputs, strict=True)),)
    simpler.eliminate_dead_code()
    inputs = tuple(Role("param" if k in weights else "buffer", str(k)) for k in range(len(operands)))
    return Graph(simpler, inputs, tuple(Role("output", i) for i in range(len(values))), {}), operands


def _ends(
    m: Member, ways: list[tuple[Choice, ...]], states: Mapping[fx.Node, States], factored: Factored
) -> list[Ends]:
    """Per way what its ends split."""
    split: list[list[set[int]]] = [[set() for _ in way] for way in ways]
    for value, some in states.items():
        atoms = [a for d in factored.dims[value] for a in d]
        for axes, place in zip(split, some.place, strict=True):
            for found, code in zip(axes, some.unique[place], strict=True):
                found |= {atoms[code - 1]} if code > 0 else set()
    return [
        Ends(tuple(map(frozenset, axes)), tuple(exact(m.shape, c) for c in way))
        for axes, way in zip(split, ways, strict=True)
    ]


def _outer_layout(m: Member, output: int) -> Layout:
    dims = m.shape.outputs[output]
    assert dims is not None
    return Layout(tuple(tuple(Factor(n) for _, n in dim) for dim in dims))


def _finer(states: States, outer: Layout, inner: Layout) -> States:
    """States of a tensor's factors as states of the factors that it is cut in inside: of each its major part."""
    if outer == inner:
        return states
    code, at = {}, 0
    first = 0
    for theirs, own in zip(outer.dims, inner.dims, strict=True):
        left = list(own)
        for f in theirs:
            first += 1
            code[first], size = at + 1, 1
            while left and size < f.size:
                size *= left.pop(0).size
                at += 1
        at += len(left)
    unique = [tuple(code.get(c, c) if c > 0 else c for c in state) for state in states.unique]
    return States(unique, states.place)
