"""The planner's problem as tables: a variable per group and per parameter, seconds on each and between two.

    minimise  sum_g seconds_g(x_g) + sum_p seconds_p(x_p) + sum_(g,h) T_gh(x_g, x_h)

    T_gh = sum over distinct (tensor, state needed) of reshard(state given by g, state needed by h)

A parameter's variable is how it rests; its tables hold the gathers to what its readers need and the reduction of its
gradient. Where forward and backward need the same state of a tensor, the copy is kept, or made again if memory is dear:

    T = T_forward + min(T_backward, price * bytes kept)        price: seconds a byte of memory (`budget.py`)

Tables of equal parts are one object, by which `solve` knows equal layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.fx as fx

from .buckets import Bucket, buckets_of
from .call_costs import itemsize
from .elimination import Problem
from .factors import Factored
from .graph import Graph, is_getitem, is_tensor
from .groups import Group
from .joint import Builder, Joint, Member
from .resting import Resting
from .saved import saved_bytes
from .states import Prices, States, local_bytes

FREE = 2e-9
"""Seconds at or below which a reshard moves nothing."""


@dataclass(eq=False)
class Variable:
    """A group (`members`, `joint`), a parameter (`name`, `resting`), or the state in which several groups see a tensor
    (`name`, `states`, and `dims`, its atoms; an input's is whole)."""

    joint: Joint | None = None
    members: list[Member] = field(default_factory=list)
    name: str = ""
    resting: Resting | None = None
    states: States | None = None
    dims: list[list[int]] = field(default_factory=list)


@dataclass(eq=False)
class Copy:
    """A tensor needed in one state in both phases: the seconds of making it again, and the bytes of keeping it."""

    value: str
    giver: int
    reader: int
    seconds: np.ndarray
    nbytes: np.ndarray


Given = tuple[int, Any, States]
"""The variable that decides a tensor's state, what the state is known by, and the states."""


@dataclass
class _Reads:
    """The states that one group needs of one tensor, by phase."""

    forward: dict[int, States] = field(default_factory=dict)
    backward: dict[int, States] = field(default_factory=dict)


class Tables:
    """Builds the `Problem`. `again`: parameters are gathered again for backward whatever memory costs (ZeRO-3).
    `shares`: groups that read one parameter may share a reshard of it. `held`: of the bytes of parameters, and of what
    backward reads, how much a rank holds at once (`Options.held`)."""

    def __init__(
        self,
        graph: Graph,
        factored: Factored,
        prices: Prices,
        again: bool,
        shares: bool = True,
        held: tuple[float, float] = (1.0, 1.0),
    ):
        self.held = held
        self.graph, self.factored, self.prices, self.again = graph, factored, prices, again
        self.buckets = buckets_of(graph)
        self.shares = shares
        self.problem = Problem()
        self.variables: list[Variable] = []
        self._kept: list[tuple[fx.Node, int, int, States, list[States]]] = []
        self._group_of: dict[fx.Node, tuple[int, int]] = {}
        self._param: dict[fx.Node, int] = {}
        self._input: dict[fx.Node, int] = {}
        self._ends: tuple[int, Mapping[fx.Node, States], Mapping[fx.Node, States]] = (-1, {}, {})
        self._whole = States([(0,) * len(prices.axes)], np.zeros(1, dtype=np.intp))
        self._tables: dict[Any, np.ndarray] = {}
        self._copies: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        self._alive: list[Any] = []
        self.copied: dict[fx.Node, tuple[int, Any, States]] = {}
        self._copied_from: list[tuple[int, int]] = []
        self._states: dict[Any, tuple] = {}

    def add_group(self, group: Group, builder: Builder) -> None:
        joint, members = builder.of(group)
        i = self.problem.variable(joint.seconds)
        self.variables.append(Variable(joint, members))
        for k, m in enumerate(members):
            self._group_of[m.node] = (i, k)

    def add_parameter(self, node: fx.Node, name: str, resting: Resting) -> None:
        self._param[node] = self.problem.variable(resting.seconds)
        self.variables.append(Variable(name=name, resting=resting))

    def add_input(self, node: fx.Node) -> None:
        """A tensor that comes whole: to take a part of it is a copy."""
        self._input[node] = self.problem.variable(np.zeros(1))
        self.variables.append(Variable(name=node.name, states=self._whole))

    def add_ends(self, values: int, given: Mapping[fx.Node, States], wanted: Mapping[fx.Node, States]) -> int:
        """What stands around a part of a program: a variable whose values lay its inputs, and need its outputs."""
        self._ends = (self.problem.variable(np.zeros(values)), given, wanted)
        self.variables.append(Variable(name="ends", states=self._whole))
        return self._ends[0]

    def memory(self, saved: frozenset[fx.Node]) -> list[np.ndarray]:
        """Per variable and value the bytes that it keeps; see `saved.py`."""
        known: dict[Any, np.ndarray] = {}
        found = []
        for variable in self.variables:
            if variable.joint is not None:
                flags = tuple(m.node in saved or any(u in saved for u in m.node.users) for m in variable.members)
                key = (id(variable.joint), flags)
                if key not in known:
                    known[key] = self.held[1] * saved_bytes(variable.joint, variable.members, self.prices, saved)
            elif variable.resting is None:
                found.append(np.zeros(len(self.problem.unary[len(found)])))
                continue
            else:
                key = (id(variable.resting), ())
                if key not in known:
                    known[key] = self.held[0] * variable.resting.nbytes
            found.append(known[key])
        return found

    def connect(self) -> None:
        """All pair tables."""
        found = [self._reads(v) if v.joint is not None else {} for v in self.variables]
        readers: dict[fx.Node, list[_Reads]] = {}
        for reads in found:
            for value, one in reads.items():
                readers.setdefault(value, []).append(one)
        for value in dict.fromkeys(v for v in self.graph.output_values if v is not None and v in readers):
            want = self._ends[2].get(value, self._whole)
            readers[value].append(_Reads({id(want): want}))
        for h, reads in enumerate(found):
            for value, one in reads.items():
                given = self._giver(value)
                if given is not None:
                    given = self._copied(value, given, readers[value]) if len(readers[value]) > 1 else given
                    self._edge(value, given, h, one)
        self._outputs()

    def _copied(self, value: fx.Node, given: Given, readers: list[_Reads]) -> Given:
        """A tensor that several groups read is resharded once for all: a variable of its own, its state as seen."""
        if value in self.copied:
            return self.copied[value]
        if value in self._param and not self.shares:
            return given
        g, known, have = given
        wants = {i: s for r in readers for i, s in {**r.forward, **r.backward}.items()}
        both = any(r.forward for r in readers) and any(r.backward for r in readers)
        twice = both and self.again and value in self._param
        key = ("copied", known, tuple(sorted(wants)), itemsize(value), twice)
        if key not in self._states:
            made = self.prices.union((have, *wants.values()), sum(map(len, self.factored.dims[value])))
            table = self._spread(value, have, made, self._bucket(value, g)) * (2 if twice else 1)
            self._states[key] = (made, np.zeros(len(made.unique)), table, wants)
        made, zeros, table, _ = self._states[key]
        c = self.problem.variable(zeros)
        name = self.variables[g].name if value in self._param else value.name
        self.variables.append(Variable(name=name, states=made, dims=self.factored.dims[value]))
        self._copied_from.append((g, c))
        self.problem.pair(g, c, table)
        if both and not twice:
            self._kept.append((value, g, c, have, [made]))
        self.copied[value] = (c, ("copy", id(made)), made)
        return self.copied[value]

    @property
    def shares_parameters(self) -> bool:
        """Whether some parameter is read by several groups that share its reshards."""
        return any(self.variables[g].resting is not None for g, _ in self._copied_from)

    def hubs(self) -> list[int]:
        """Groups that depend on no parameter and are read by groups that do: masks, positions, read by every layer."""
        moved: set[int] = {i for i in self._param.values()}
        for i, variable in enumerate(self.variables):
            for m in variable.members:
                if any((g := self._giver(o)) and g[0] in moved for o in m.operands):
                    moved.add(i)
        moved |= {c for g, c in self._copied_from if g in moved}
        ends = [p for p in self.problem.pairs if (p[0] in moved) != (p[1] in moved)]
        return sorted({i for p in ends for i in p if i not in moved})

    def _giver(self, value: fx.Node) -> tuple[int, Any, States] | None:
        """The variable that decides a tensor's state, what the state is known by, and it; None: whole, and free."""
        producer, output = (value.args[0], value.args[1]) if is_getitem(value) else (value, 0)
        if producer in self._group_of:
            i, call = self._group_of[producer]
            joint = self.variables[i].joint
            assert joint is not None
            return i, (id(joint), call, output), joint.gives(call, output)  # type: ignore[arg-type]
        if producer in self._param:
            i = self._param[producer]  # type: ignore[index]
            resting = self.variables[i].resting
            assert resting is not None
            return i, id(resting), resting.states
        if value in self._ends[1]:
            return self._ends[0], ("ends", value), self._ends[1][value]
        if producer in self._input:
            return self._input[producer], ("input", tuple(map(len, self.factored.dims[value]))), self._whole
        return None

    def _reads(self, reader: Variable) -> dict[fx.Node, _Reads]:
        found: dict[fx.Node, _Reads] = {}
        for call, m in enumerate(reader.members):
            late = bool(m.node.meta.get("backward"))
            looks = not late and m.looked and any(u.meta.get("backward") for u in m.node.users)
            for k, (operand, wire) in enumerate(zip(m.operands, m.wires, strict=True)):
                if wire is None:
                    assert reader.joint is not None
                    need = reader.joint.needs(call, k)
                    reads = found.setdefault(operand, _Reads())
                    (reads.backward if late else reads.forward)[id(need)] = need
                    if looks and operand in self._param:  # backward makes such a view again, from a gather of its own
                        reads.backward[id(need)] = need
        return found

    def _edge(self, value: fx.Node, given: tuple[int, Any, States], h: int, reads: _Reads) -> None:
        g, known, have = given
        again = self.again and value in self._param
        both = reads.forward.keys() & reads.backward.keys()
        needs = {**reads.forward, **reads.backward}
        key = (known, tuple(sorted(needs)), tuple(sorted(both)) if again else (), itemsize(value))
        table = self._tables.get(key)
        if table is None:
            table = 0.0
            for i, want in needs.items():
                one = self._spread(value, have, want, self._bucket(value, g))
                table = table + (2 * one if again and i in both else one)
            self._tables[key] = table = np.asarray(table)
            self._alive.append(needs)
        self.problem.pair(g, h, table)
        if both and not again:
            self._kept.append((value, g, h, have, [needs[i] for i in sorted(both)]))

    def copies(self) -> list[Copy]:
        """The tensors that are needed in one state in both phases."""
        found: list[Copy] = []
        for value, g, h, have, wants in self._kept:
            for want in wants:
                rests = value.op == "placeholder"
                key = ("copy", rests, id(have), id(want), itemsize(value), tuple(map(tuple, self.factored.dims[value])))
                if key not in self._copies:
                    seconds = self._spread(value, have, want, self._bucket(value, g))
                    held = local_bytes(self._lengths(value), itemsize(value), want, self.prices)[want.place]
                    nbytes = np.where(seconds > FREE, self.held[not rests] * held[None, :], 0.0)
                    self._copies[key] = (seconds, nbytes)
                seconds, nbytes = self._copies[key]
                if nbytes.any():
                    found.append(Copy(value.name, g, h, seconds, nbytes))
        return found

    def places(self) -> list[int]:
        """Of each variable where in the program it stands: a parameter where it is first read."""
        place = list(range(len(self.variables)))
        first: dict[int, int] = {}
        for a, b in self.problem.pairs:
            for p, g in ((a, b), (b, a)):
                if self.variables[p].joint is None:
                    first[p] = min(first.get(p, g), g)
        return [first.get(i, n) for i, n in enumerate(place)]

    def _lengths(self, value: fx.Node) -> tuple[int, ...]:
        return tuple(max(1, self.factored.sizes.size(a)) for d in self.factored.dims[value] for a in d)

    def _bucket(self, value: fx.Node, giver: int) -> Bucket | None:
        """A parameter is gathered with others, from where it rests; a gradient reduced with others, to there."""
        variable = self.variables[giver]
        return self.buckets.of(value) if variable.resting is not None or value in self.buckets.alone else None

    def _spread(self, value: fx.Node, have: States, want: States, bucket: Bucket | None = None) -> np.ndarray:
        table = self.prices.between(self._lengths(value), itemsize(value), have, want, bucket)
        return table[have.place][:, want.place]

    def _outputs(self) -> None:
        """Gradients go to where their parameter rests; what else leaves the program is whole."""
        inputs = zip(self.graph.placeholders, self.graph.inputs, strict=True)
        params = {r.name: n for n, r in inputs if r.kind == "param"}
        seen: set[fx.Node] = set()
        for value, role in zip(self.graph.output_values, self.graph.outputs, strict=True):
            given = self._giver(value) if value is not None and is_tensor(value) else None
            if given is None or value is None:
                continue
            g, _, have = given = self.copied.get(value, given)
            if role.kind == "grad":
                p = self._param[params[role.name]]
                resting = self.variables[p].resting
                assert resting is not None
                self.problem.pair(g, p, self._gradient(value, given, resting.states))
            elif value in self._ends[2]:
                self.problem.pair(g, self._ends[0], self._spread(value, have, self._ends[2][value]))
            elif value not in seen:
                seen.add(value)
                lengths = tuple(map(len, self.factored.dims[value]))
                table = self._known(("out", given[1], lengths), value, have, self._whole)
                self.problem.add(g, table[:, 0])

    def _gradient(self, value: fx.Node, given: Given, resting: States) -> np.ndarray:
        bucket = self._bucket(value, given[0])
        return self._known(("grad", given[1], id(resting), bucket), value, given[2], resting, bucket)

    def _known(self, key: Any, value: fx.Node, have: States, want: States, bucket: Bucket | None = None) -> np.ndarray:
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = self._spread(value, have, want, bucket)
        return found
