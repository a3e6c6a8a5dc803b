"""Seconds of a call whose split asks for simpler ops (`decompose.py`): those of the ops, at their least.

    seconds(x) = min over the choices of the simpler calls of  sum seconds + sum reshards
                 their operands given and their outputs needed as x has them

A softmax over a split vocabulary is read and written several times where the op itself reads and writes once, and
reduces twice. A small planner's problem (`tables.py`), one more variable standing for x at its ends. On each axis the
simpler calls may split what the ends split there, run on partial sums, or run whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.fx as fx

from .decompose import written_out
from .elimination import Problem, objective
from .factors import Factored, factor_graph
from .graph import Graph, Role, is_tensor
from .groups import single
from .layout import Factor, Layout
from .solve import solve
from .states import States
from .strategies import Choice, Marked

if TYPE_CHECKING:
    from .joint import Builder, Joint, Member
    from .tables import Tables, Variable


def asks(member: Member, choice: Choice) -> bool:
    """Whether a choice of a call is one that it must be written out for."""
    return isinstance(choice, tuple) and choice[0] in member.shape.rule.decompose


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
        ends = alone(m, ways)
        given = {p: ends.needs(0, k) for k, p in enumerate(graph.placeholders)}
        given = {p: _finer(s, held[p], factored.whole(p)) for p, s in given.items()}
        outs = {i: v for i, v in enumerate(graph.output_values) if v is not None}
        wanted = {v: _finer(ends.gives(0, i), _outer_layout(m, i), factored.whole(v)) for i, v in outs.items()}
        inner = Builder(graph, factored, outer.prices, self._marked(graph, operands, factored), {}, {}, grouped=False)
        tables = Tables(graph, factored, outer.prices, again=False)
        for group in single(graph.calls()):
            tables.add_group(group, inner)
        at = tables.add_ends(len(ways), given, wanted)
        for node in graph.fx.nodes:
            if node.op == "get_attr" and is_tensor(node):
                tables.add_input(node)
        tables.connect()
        splits = _atoms_split(given, factored) | _atoms_split(wanted, factored)
        return np.array([_least(tables, at, way, splits, factored) for way in range(len(ways))])

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


_Splits = set[tuple[int, int, int]]


def _atoms_split(states: Mapping[fx.Node, States], factored: Factored) -> _Splits:
    """(way, axis, atom) of what the ends split."""
    found: _Splits = set()
    for value, some in states.items():
        atoms = [a for d in factored.dims[value] for a in d]
        for way, place in enumerate(some.place):
            found |= {(way, axis, atoms[c - 1]) for axis, c in enumerate(some.unique[place]) if c > 0}
    return found


def _least(tables: Tables, at: int, way: int, splits: _Splits, factored: Factored) -> float:
    """The least sum where the ends lie one way."""
    rows = [_fitting(v, way, splits, factored) for v in tables.variables]
    rows[at] = np.array([way])
    small = Problem([u[r] for u, r in zip(tables.problem.unary, rows, strict=True)])
    small.pairs = {(i, j): t[np.ix_(rows[i], rows[j])] for (i, j), t in tables.problem.pairs.items()}
    return objective(small, solve(small).values)


def _fitting(variable: Variable, way: int, splits: _Splits, factored: Factored) -> np.ndarray:
    """The values that split on each axis what the ends split there, if anything; all where there are none."""
    made = variable.joint
    if made is not None:
        named = {m.atom[leaf]: a for m in variable.members for leaf, a in factored.atoms[m.node].items()}
        kept = np.ones(len(made.joint), dtype=bool)
        for axis, values in enumerate(made.values):
            fits = [not isinstance(v, tuple) or (way, axis, named[v[1]]) in splits for v in values]
            kept &= np.array(fits)[made.joint[:, axis]]
    else:
        assert variable.states is not None
        atoms = [a for d in variable.dims for a in d]
        every = variable.states.unique
        kept = np.array([all(c <= 0 or (way, i, atoms[c - 1]) in splits for i, c in enumerate(s)) for s in every])
    return np.flatnonzero(kept) if kept.any() else np.arange(len(kept))
