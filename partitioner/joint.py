"""What a group may do on all mesh axes together, and what that costs.

On one axis a group has *values*: an atom that some leading call may split, None (whole), or an int k (run on partial
sums). A value says what every call of the group does: a leading call splits its own leaf of that atom; any other does
as its operands in the group are (a split dim stays split, a partial sum stays one if the call is linear in it), or, if
it is looked at, as its reader needs. A joint value is one value for each axis, all combinations that leave no rank
empty.

    seconds(group | x) = sum_calls roofline(call | x) + sum_inner tensors reshard(state given, state needed)

Groups of one signature (equal calls, wired alike, on atoms of equal size and part) share one `Joint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch.fx as fx

from .call_costs import Cost
from .factors import Factored
from .given import Pins, pinned_choices
from .graph import Graph, is_getitem
from .groups import Group
from .joint_atoms import atoms_seen, closed_atoms
from .rules.split import Leaf, Shape
from .states import Prices, States, states_of
from .strategies import (
    HEAVY,
    Choice,
    Choices,
    Marked,
    Seen,
    input_state,
    never_empty,
    output_state,
    weights_read,
)
from .written import Written, asks

Value = Any
"""Of a group on one axis: ("atom", number in the group, which of a call's leaves of it), an int (partial), or None."""


class Wire(NamedTuple):
    """An operand that a call of the same group makes: which call, and which output of it."""

    call: int
    output: int


@dataclass(eq=False)
class Member:
    """A call of a group."""

    node: fx.Node
    shape: Shape
    atom: dict[Leaf, int]
    operands: list[fx.Node]
    wires: tuple[Wire | None, ...]
    lead: bool
    looked: bool


@dataclass(eq=False)
class Joint:
    """The joint values of a group.

    Attributes:
        values: per axis its values.
        choices: per axis and value, the choice of each call.
        joint: (joint values, axes): the index of the value on each axis.
        seconds: of each joint value, the group's own.
        written: per call that some value writes out the seconds of that, NaN under the values that do not.
    """

    members: list[Member]
    values: list[list[Value]]
    choices: list[list[list[Choice]]]
    joint: np.ndarray
    seconds: np.ndarray
    written: dict[int, np.ndarray] = field(default_factory=dict)
    given: dict[tuple[int, int], States] = field(default_factory=dict)
    needed: dict[tuple[int, int], States] = field(default_factory=dict)
    known: dict[Any, States] = field(default_factory=dict)

    def gives(self, call: int, output: int) -> States:
        """The state in which a call gives an output, per joint value."""
        found = self.given.get((call, output))
        if found is None:
            shape = self.members[call].shape
            per_axis = [tuple([output_state(shape, output, c[call]) for c in axis]) for axis in self.choices]
            found = self.given[call, output] = self._states(per_axis, shape.outputs[output])
        return found

    def needs(self, call: int, operand: int) -> States:
        """The state in which a call needs an operand, per joint value; equal needs are one object."""
        found = self.needed.get((call, operand))
        if found is None:
            shape = self.members[call].shape
            per_axis = [tuple([input_state(shape, operand, c[call]) for c in axis]) for axis in self.choices]
            found = self.needed[call, operand] = self._states(per_axis, shape.inputs[operand])
        return found

    def _states(self, per_axis: list, dims: Any) -> States:
        factors = tuple([len(d) for d in dims])
        key = (tuple(per_axis), factors)
        if key not in self.known:
            self.known[key] = states_of(per_axis, self.joint, factors)
        return self.known[key]

    def choice(self, call: int, value: int, names: tuple[str, ...]) -> dict[str, Choice]:
        """What a call does under a joint value, by axis."""
        return {a: self.choices[i][self.joint[value, i]][call] for i, a in enumerate(names)}


class Builder:
    """Makes the `Joint` of groups, one per signature.

    `decided`: calls whose choices are given, {name: {axis: choice}}. `writes`: whether a call may be written out
    where its axis leaves it another choice.
    """

    def __init__(
        self,
        graph: Graph,
        factored: Factored,
        prices: Prices,
        marked: Marked,
        decided: Mapping[str, Mapping[str, Choice]],
        pins: Pins,
        grouped: bool = True,
        writes: bool = True,
    ):
        self.factored, self.prices, self.marked, self.decided, self.pins = factored, prices, marked, decided, pins
        mesh, weights = prices.mesh, weights_read(graph, factored)
        self.weights = weights
        self.traced = graph.traced
        self.kinds = [(mesh.role(a), n) for a, n in prices.axes]
        self.legal = {
            k: Choices(factored, mesh, a, marked, weights) for k, (a, _) in zip(self.kinds, prices.axes, strict=True)
        }
        self.seen = atoms_seen(factored)
        self.closed = closed_atoms(factored) if grouped else frozenset()
        self.writes, self.written = writes, Written(self)
        self._made: dict[Any, Joint] = {}
        self._parts: dict[int, int] = {}

    def of(self, group: Group) -> tuple[Joint, list[Member]]:
        """The group's joint values (shared with its like), and its calls."""
        members, key = self._members(group)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(members)
        return made, members

    def _members(self, group: Group) -> tuple[list[Member], Any]:
        factored, seen, part_of = self.factored, self.seen, self._parts
        number = {n: i for i, n in enumerate(group.calls)}
        atoms: dict[int, int] = {}
        parts: dict[int, int] = {}
        members, key = [], []
        for node, lead, looked in zip(group.calls, group.lead, group.looked, strict=True):
            shape, own, operands = factored.shapes[node], factored.atoms[node], factored.operands[node]
            wires = []
            for operand in operands:
                producer, output = (operand.args[0], operand.args[1]) if is_getitem(operand) else (operand, 0)
                wires.append(Wire(number[producer], output) if producer in number else None)  # type: ignore[index,arg-type]
            atom = {}
            for leaf, a in own.items():
                atom[leaf] = atoms.setdefault(seen.get(a, a), len(atoms))
                if a not in parts:
                    parts[a] = part_of[a] if a in part_of else part_of.setdefault(a, self.part(a))
            wired = tuple(wires)
            members.append(Member(node, shape, atom, operands, wired, lead, looked))
            decided = self.decided.get(node.name) if self.decided else None
            said = tuple(sorted(decided.items(), key=str)) if decided is not None else None
            fixed = (said, self.pins.get(node))
            key.append((id(shape), tuple(atom.values()), wired, lead, looked, self.weights.get(node), fixed))
        return members, (tuple(key), tuple(parts.values()))

    def part(self, atom: int) -> int:
        """The parts that an atom has to play, as a number."""
        m = self.marked
        part = (atom in m.batch) + 2 * (atom in m.sequence) + 4 * (atom in m.experts)
        return part + 8 * (atom in self.closed)

    def _make(self, members: list[Member]) -> Joint:
        by_kind: dict[tuple, tuple] = {}
        values, choices, spare = [], [], []
        for (axis, _), kind in zip(self.prices.axes, self.kinds, strict=True):
            some = self._decided(members, axis)
            if some is None and members[0].node in self.pins:
                some = self._axis(members, self.legal[kind], axis)
            if some is None:
                if kind not in by_kind:
                    by_kind[kind] = self._axis(members, self.legal[kind])
                some = by_kind[kind]
            values.append(some[0])
            choices.append(some[1])
            spare.append(some[2])
        joint = self._combined(members, values, spare)
        made = Joint(members, values, choices, joint, np.zeros(len(joint)))
        every = ((i, self.written.seconds(made, i)) for i in range(len(members)))
        made.written = {i: seconds for i, seconds in every if seconds is not None}
        made.seconds = Cost(made, self.prices).seconds()
        return made

    def _decided(self, members: list[Member], axis: str) -> tuple | None:
        if any(m.node.name not in self.decided for m in members):
            return None
        given = [self.decided[m.node.name].get(axis) for m in members]
        return [("given", -1, 0)], [given], [False]

    def _axis(self, members: list[Member], legal: Choices, pinned_on: str = "") -> tuple[list, list, list[bool]]:
        """The values on an axis, what each call does under each, and which only stand in where no other can be."""
        own = [self._own(m, legal) if m.lead else [] for m in members]
        if pinned_on:
            own[0] = pinned_choices(members[0].node, own[0], members[0].shape, pinned_on, self.factored, self.pins)
        shut = legal.role == "free" and not pinned_on and self._has_open(members, own)
        sums = all(frozenset(range(len(m.operands))) in m.shape.rule.linear for m in members) or _passes(members)
        found: dict[Value, None] = {}
        for m, options in zip(members, own, strict=True):
            for c in options:
                if isinstance(c, int):
                    found.setdefault(c) if sums or len(members) == 1 else None
                elif c is None:
                    found.setdefault(None)
                elif not (shut and self.factored.atoms[m.node][c] in self.closed):
                    found.setdefault(("atom", m.atom[c], _alike(m, m.atom[c], options).index(c)))
        must = any(None not in options for options in own if options)
        values = sorted(found, key=lambda v: (v is not None and not isinstance(v, int), not isinstance(v, int)))
        values = [v for v in values if not (must and v is None)]
        if must:
            values.append(None)
        respond = _Response(members, own, legal, self.writes)
        return values, [respond.to(v) for v in values], [must and v is None for v in values]

    def _own(self, m: Member, legal: Choices) -> list[Choice]:
        every = legal.of(m.node)
        stays = [c for c in every if not asks(m, c)]
        return every if self.writes or not stays or m.node in self.pins else stays

    def _has_open(self, members: list[Member], own: list[list[Choice]]) -> bool:
        """Whether a group has other dims to split than those that a contraction elsewhere must have whole (a head dim).

        Then a free axis leaves those alone. Positions of keys before every query have no others.
        """
        every = ((m, c) for m, options in zip(members, own, strict=True) for c in options if isinstance(c, tuple))
        return any(m.shape.rule.flops >= HEAVY for m in members) or any(
            self.factored.atoms[m.node][c] not in self.closed for m, c in every
        )

    def _combined(self, members: list[Member], values: list[list[Value]], spare: list[list[bool]]) -> np.ndarray:
        """All combinations under which no rank is empty, with as few stand-ins as can be."""
        counts = [len(v) for v in values]
        if not counts:
            return np.zeros((1, 0), dtype=np.intp)
        every = np.stack([i.reshape(-1) for i in np.meshgrid(*(np.arange(n) for n in counts), indexing="ij")], axis=1)
        legal = np.ones(len(every), dtype=bool)
        sizes = {
            (number, self.marked.least(m.shape.leaves[leaf[0]][leaf[1]], self.factored.atoms[m.node][leaf]))
            for m in members
            for leaf, number in m.atom.items()
        }
        ranks = [n for _, n in self.prices.axes]
        for atom, size in sorted(sizes):
            taken = np.zeros(len(every), dtype=np.intp)
            for axis, own in enumerate(values):
                is_it = np.array([isinstance(v, tuple) and v[1] == atom for v in own])
                taken |= is_it[every[:, axis]].astype(np.intp) << axis
            for mask in set(taken[taken & (taken - 1) > 0].tolist()):
                if not never_empty(size, tuple(n for i, n in enumerate(ranks) if mask >> i & 1)):
                    legal &= taken != mask
        used = sum(np.array(s)[every[:, i]].astype(np.intp) for i, s in enumerate(spare))
        kept = every[legal]
        least = used[legal] if isinstance(used, np.ndarray) else np.zeros(len(kept))
        return kept[least == least.min()]


class _Response:
    """What every call of a group does under a value."""

    def __init__(self, members: list[Member], own: list[list[Choice]], legal: Choices, writes: bool):
        self.members, self.own, self.legal = members, own, legal
        self.allowed = [
            frozenset(x for x in m.atom if self._may(m, x) and (writes or x in some or not asks(m, x)))
            for m, some in zip(members, own, strict=True)
        ]
        self.readers: list[list[tuple[int, int, int]]] = [[] for _ in members]
        for i, m in enumerate(members):
            for k, wire in enumerate(m.wires):
                if wire is not None:
                    self.readers[wire.call].append((i, k, wire.output))
        self.reduced = {
            wire
            for m in members
            for k, wire in enumerate(m.wires)
            if wire is not None and not any(k in operands for operands in m.shape.rule.linear)
        }

    def _may(self, m: Member, leaf: Leaf) -> bool:
        return self.legal.may_split(m.shape, leaf, self.legal.factored.atoms[m.node][leaf])

    def to(self, value: Value) -> list[Choice]:
        done: list[Choice] = [None] * len(self.members)
        if value is None:
            return done
        for i, m in enumerate(self.members):
            if not m.looked:
                done[i] = self._own(i, value) if m.lead else None
                if done[i] is None:
                    done[i] = self._as_operands(i, done)
        for i in reversed(range(len(self.members))):
            if self.members[i].looked:
                done[i] = self._as_read(i, done)
        for i, m in enumerate(self.members):  # a call that reads what is looked at, and follows it
            if not m.looked and done[i] is None and any(w and self.members[w.call].looked for w in m.wires):
                done[i] = self._as_operands(i, done)
        return done

    def _own(self, i: int, value: Value) -> Choice:
        options = self.own[i]
        if isinstance(value, int):
            source = not any(self.members[i].wires)
            return value if source and value in options else None
        leaves = _alike(self.members[i], value[1], options)
        return leaves[min(value[2], len(leaves) - 1)] if leaves else None

    def _as_operands(self, i: int, done: list[Choice]) -> Choice:
        m = self.members[i]
        if self.legal.factored.calls[m.node].depends_on_data:
            return None
        sums, others = set(), False
        for k, wire in enumerate(m.wires):
            if wire is None:
                continue
            state = output_state(self.members[wire.call].shape, wire.output, done[wire.call])
            if isinstance(state, tuple):
                leaf = _leaf_at(m.shape.inputs[k], state)
                if leaf in self.allowed[i]:
                    return leaf
                others = True
            elif state == "sum" and wire not in self.reduced:  # else it is reduced for another reader, and so for all
                sums.add(k)
        if sums and not others:
            for alternative, operands in enumerate(m.shape.rule.linear):
                if operands == sums:
                    return alternative
        return None

    def _as_read(self, i: int, done: list[Choice]) -> Choice:
        m = self.members[i]
        for reader, k, output in self.readers[i]:
            state = input_state(self.members[reader].shape, k, done[reader])
            dims = m.shape.outputs[output]
            if isinstance(state, tuple) and not isinstance(state, Seen) and dims is not None:
                leaf = _leaf_at(dims, state)
                if leaf in self.allowed[i]:
                    return leaf
            if state == "sum" and m.shape.rule.linear:
                return 0
        return None


def _alike(m: Member, atom: int, options: list[Choice]) -> list[Leaf]:
    """The options that split one atom, in the order of what they make: a convolution's rows in and rows out may be one,
    and so may the rows and the columns of a table of positions."""
    alike = [c for c in options if isinstance(c, tuple) and m.atom[c] == atom]
    return sorted(alike, key=lambda c: str(output_state(m.shape, 0, c)))


def _passes(members: list[Member]) -> bool:
    """Whether partial sums go through a part of backward: every call is linear in what the group makes of it."""
    wired = [frozenset(k for k, w in enumerate(m.wires) if w is not None) for m in members]
    linear = all(w in m.shape.rule.linear if w else m.shape.rule.linear for m, w in zip(members, wired, strict=True))
    return linear and all(m.node.meta.get("backward") and m.shape.rule.flops < HEAVY for m in members)


def _leaf_at(dims: Any, spot: Any) -> Leaf | None:
    return dims[spot[0]][spot[1]][0]


def alone(member: Member, ways: list[tuple[Choice, ...]]) -> Joint:
    """A call by itself whose values are these ways of splitting it, one choice an axis; without costs."""
    options = [list(dict.fromkeys(axis)) for axis in zip(*ways, strict=True)]
    joint = np.array([[some.index(c) for some, c in zip(options, way, strict=True)] for way in ways])
    return Joint([member], options, [[[c] for c in some] for some in options], joint, np.zeros(len(ways)))
