"""The planner's problem with one variable for every call: nothing contracted, every reshard paid once.

    minimise  sum_i seconds_i(x_i)  +  sum over distinct (tensor, state held, state needed) of reshard(held, needed)

A *part* is what decides: a call (its columns are the joint values that its role allows), a parameter (how it rests), or
a tensor that comes whole from outside. However many calls need a tensor in one state, the reshard is paid once, as
`reshards.py` inserts it; at ZeRO stage 3 a parameter's once in forward and once in backward.

    nbytes = at rest + what backward reads of forward + copies in another state that both phases need, unless made again

`certify.py` bounds its least from below; tests enumerate it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.fx as fx

from .buckets import Bucket, buckets_of
from .call_costs import Cost, itemsize
from .factors import Factored
from .given import pinned_calls
from .graph import Graph, is_tensor, tensor_operands, values_of
from .groups import single
from .joint import Builder, Joint, Member
from .mesh import Mesh
from .plan import Plan
from .planner import Options
from .resting import Rests, stage_asked
from .saved import saved_bytes, saved_values
from .states import Prices, States, local_bytes
from .strategies import Seen, is_view, marked_atoms
from .tables import FREE

State = tuple[tuple[int, ...], tuple[tuple[str, ...], ...], tuple[tuple[int, Seen], ...]]
"""Codes by axis, the ordered axes of every factor, what is seen through a window on which axis."""


@dataclass(eq=False)
class Part:
    """What decides. Columns that hold and need the same are one, at the least seconds.

    Attributes:
        seconds, nbytes: per column.
        chosen: the plan's column.
        own: the seconds of the plan's own choice, which a column alike may undercut.
    """

    name: str
    seconds: np.ndarray
    nbytes: np.ndarray
    chosen: int = 0
    own: float = 0.0


@dataclass(eq=False)
class Read:
    """Who needs a tensor: `wants` per column of the part `reader` the number of the state; `late`: in backward."""

    reader: int
    wants: np.ndarray
    late: bool


@dataclass(eq=False)
class Tensor:
    """A value that some part needs.

    Attributes:
        giver, held: who makes it, and per column of that part the number of the state.
        price: (states held, states needed) seconds.
        kept: per state needed the bytes of a copy in it.
        reads: who needs it.
        again: paid in forward and in backward (ZeRO stage 3), whatever memory there is.
    """

    node: fx.Node
    giver: int
    held: np.ndarray
    price: np.ndarray
    kept: np.ndarray
    reads: list[Read]
    again: bool


@dataclass
class _Open:
    """A tensor whose readers are still being gathered: rows are per reader the state of each of its columns."""

    giver: int
    held: list[State]
    reads: list[tuple[int, list[State], bool]] = field(default_factory=list)


class Untied:
    """`parts` and `tensors`; built for one plan, whose choices are columns too if its groups went beyond the rules."""

    def __init__(self, graph: Graph, mesh: Mesh, options: Options, plan: Plan):
        self.graph, self.plan, self.options = graph, plan, options
        self.factored: Factored = graph.factored
        self.prices, self.buckets = Prices(mesh), buckets_of(graph)
        self.parts: list[Part] = []
        self.tensors: list[Tensor] = []
        self.beyond: list[str] = []
        self._open: dict[fx.Node, _Open] = {}
        self._resting: dict[str, tuple[int, list[State]]] = {}
        self._params: set[fx.Node] = set()
        self._whole: tuple[int, ...] = (0,) * len(self.prices.axes)
        self._priced: dict[Any, np.ndarray] = {}
        self._alive: list[States] = []
        self._views = _forward_views(graph)
        self._inputs()
        self._calls()
        self._outputs()
        self.tensors = [self._closed(v, o) for v, o in self._open.items() if o.reads]

    # parts
    def _inputs(self) -> None:
        graph, options = self.graph, self.options
        marked, stage = marked_atoms(graph, self.factored), stage_asked(graph, self.prices.mesh, options)
        rests = Rests(graph, self.factored, self.prices, options, marked, stage)
        trained = {r.name for v, r in zip(graph.output_values, graph.outputs, strict=True) if r.kind == "grad" and v}
        roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
        for node in graph.fx.nodes:
            role = roles.get(node)
            if role is not None and role.kind == "param":
                name = str(role.name)
                rest = rests.of(node, name, role.name in trained)
                at = rest.layouts.index(self.plan.resting[name])
                part = self._add(Part(name, rest.seconds, rest.nbytes, at, float(rest.seconds[at])))
                states = self._of(node, [rest.states])
                self._open[node], self._resting[name] = _Open(part, states), (part, states)
                self._params.add(node)
            elif node.op in ("placeholder", "get_attr") and is_tensor(node):
                self._open[node] = _Open(self._add(Part(node.name, np.zeros(1), np.zeros(1))), [self._unsplit(node)])

    def _add(self, part: Part) -> int:
        self.parts.append(part)
        return len(self.parts) - 1

    def _unsplit(self, node: fx.Node) -> State:
        return self._whole, ((),) * sum(map(len, self.factored.dims[node])), ()

    def _calls(self) -> None:
        graph = self.graph
        marked, pins = marked_atoms(graph, self.factored), pinned_calls(graph, self.options.pin)
        legal = Builder(graph, self.factored, self.prices, marked, {}, pins, grouped=False)
        given = Builder(graph, self.factored, self.prices, marked, self.plan.choices, {}, grouped=False)
        saved = saved_values(graph, self.factored) if self.options.memory is not None else frozenset()
        names = self.prices.names
        for group in single(graph.calls()):
            (node,) = group.calls
            made, (member,) = legal.of(group)
            every = [(made, member)]
            choice = {a: self.plan.choices[node.name].get(a) for a in names}
            at = next((i for i in range(len(made.joint)) if made.choice(0, i, names) == choice), len(made.joint))
            if at == len(made.joint):
                beyond, (member,) = given.of(group)
                every.append((beyond, member))
                self.beyond.append(node.name)
            self._call(node, every, at, saved)

    def _call(self, node: fx.Node, every: list[tuple[Joint, Member]], at: int, saved: frozenset[fx.Node]) -> None:
        """A call's columns, those that hold and need the same made one."""
        outs = {i: v for i, v in enumerate(values_of(node)) if v is not None and is_tensor(v)}
        operands = self.factored.operands[node]
        gives = [self._of(v, [j.gives(0, i) for j, _ in every]) for i, v in outs.items()]
        needs = [self._of(o, [j.needs(0, k) for j, _ in every]) for k, o in enumerate(operands)]
        seconds = np.concatenate([_seconds(j, m, self.prices) for j, m in every])
        nbytes = np.concatenate([_bytes(j, m, self.prices, saved) for j, m in every])
        first: dict[Any, int] = {}
        rows = zip(*gives, *needs, nbytes.tolist(), strict=True)
        merged = [first.setdefault(row, len(first)) for row in rows]
        kept = [merged.index(i) for i in range(len(first))]
        least = np.full(len(first), np.inf)
        np.minimum.at(least, merged, seconds)
        i = self._add(Part(node.name, least, nbytes[kept], merged[at], float(seconds[at])))
        for value, states in zip(outs.values(), gives, strict=True):
            self._open[value] = _Open(i, [states[x] for x in kept])
        late = bool(node.meta.get("backward"))
        for operand, states in zip(operands, needs, strict=True):
            for phase in {late, late or node in self._views}:
                self._read(operand, i, [states[x] for x in kept], phase)

    def _of(self, value: fx.Node, every: list[States]) -> list[State]:
        return [s for states in every for s in _states(states, self.factored, value, self.prices.names)]

    def _read(self, value: fx.Node, reader: int, states: list[State], late: bool) -> None:
        if all(s == self._unsplit(value) for s in (*states, *self._open[value].held)):
            return
        self._open[value].reads.append((reader, states, late))

    def _outputs(self) -> None:
        """Gradients go to where their parameter rests; what else leaves the program is whole."""
        out = -1
        for value, role in zip(self.graph.output_values, self.graph.outputs, strict=True):
            if value is None or not is_tensor(value):
                continue
            if role.kind == "grad":
                self._read(value, *self._resting[str(role.name)], False)
            else:
                out = out if out >= 0 else self._add(Part("output", np.zeros(1), np.zeros(1)))
                self._read(value, out, [self._unsplit(value)], False)

    # tensors
    def _closed(self, value: fx.Node, one: _Open) -> Tensor:
        held, needed = dict.fromkeys(one.held), dict.fromkeys(s for _, states, _ in one.reads for s in states)
        number = {s: i for i, s in enumerate(held)}, {s: i for i, s in enumerate(needed)}
        lengths = tuple(max(1, self.factored.sizes.size(a)) for d in self.factored.dims[value] for a in d)
        have, want = list(held), list(needed)
        bucket = self.buckets.of(value)
        key = (lengths, itemsize(value), tuple(have), tuple(want), bucket)
        if key not in self._priced:
            self._priced[key] = self._price(lengths, itemsize(value), have, want, bucket)
        kept = local_bytes(lengths, itemsize(value), _made(want), self.prices)
        reads = [Read(r, np.array([number[1][s] for s in states]), late) for r, states, late in one.reads]
        giver = np.array([number[0][s] for s in one.held])
        return Tensor(value, one.giver, giver, self._priced[key], kept, reads, self._twice(value))

    def _base(self, value: fx.Node) -> list[fx.Node]:
        """A value, what it is a view of, what that is a view of."""
        found = [value]
        while found[-1] in self._views:
            found += tensor_operands(found[-1])
        return found

    def _twice(self, value: fx.Node) -> bool:
        return self.options.zero == 3 and self._base(value)[-1] in self._params

    def _price(
        self, lengths: tuple[int, ...], size: int, have: list[State], want: list[State], bucket: Bucket | None
    ) -> np.ndarray:
        """Pair by pair as `collective.path` has it: only the factors that these two use may be split on the way."""
        out = np.zeros((len(have), len(want)))
        by_use: dict[frozenset[int], list[tuple[int, int]]] = {}
        for i, h in enumerate(have):
            for j, w in enumerate(want):
                by_use.setdefault(frozenset(c for c in (*h[0], *w[0]) if c > 0), []).append((i, j))
        for pairs in by_use.values():
            rows, columns = sorted({i for i, _ in pairs}), sorted({j for _, j in pairs})
            held, needed = _made([have[i] for i in rows]), _made([want[j] for j in columns])
            self._alive += [held, needed]  # prices are known by the identity of states
            table = self.prices.between(lengths, size, held, needed, bucket)
            for i, j in pairs:
                out[i, j] = table[rows.index(i), columns.index(j)]
        return out

    # the plan
    def cost(self) -> float:
        """Seconds of the plan."""
        return sum(p.own for p in self.parts) + sum(s for _, _, s in self.payments())

    def payments(self) -> list[tuple[Tensor, bool, float]]:
        """What the plan pays: per tensor and state needed one reshard."""
        found = []
        for t in self.tensors:
            held, again = t.held[self.parts[t.giver].chosen], t.again or self._again(t.node)
            wanted = dict.fromkeys((int(r.wants[self.parts[r.reader].chosen]), again and r.late) for r in t.reads)
            found += [(t, late, float(t.price[held, w])) for w, late in wanted if t.price[held, w] > 0]
        return found

    def _again(self, value: fx.Node) -> bool:
        return any(v.name in self.plan.again for v in self._base(value))

    def nbytes(self) -> float:
        """Bytes of the plan: at rest, saved, and copies kept from forward to backward."""
        total = sum(float(p.nbytes[p.chosen]) for p in self.parts)
        for t in self.tensors:
            held = t.held[self.parts[t.giver].chosen]
            states = [{int(r.wants[self.parts[r.reader].chosen]) for r in t.reads if r.late == late} for late in (0, 1)]
            if not t.again and not self._again(t.node):
                total += sum(float(t.kept[w]) for w in states[0] & states[1] if t.price[held, w] > FREE)
        return total


def _forward_views(graph: Graph) -> frozenset[fx.Node]:
    """Views made in forward that backward reads, maybe through another."""
    found: set[fx.Node] = set()
    for node in reversed(list(graph.calls())):
        looks = is_view(node) and not node.meta.get("backward") and len(tensor_operands(node)) == 1
        if looks and any(u.meta.get("backward") or u in found for u in node.users):
            found.add(node)
    return frozenset(found)


def _seconds(made: Joint, member: Member, prices: Prices) -> np.ndarray:
    return np.zeros(len(made.joint)) if is_view(member.node) else Cost(made, prices).call(0)


def _bytes(made: Joint, member: Member, prices: Prices, saved: frozenset[fx.Node]) -> np.ndarray:
    return saved_bytes(made, [member], prices, saved) if saved else np.zeros(len(made.joint))


def _states(states: States, factored: Factored, value: fx.Node, names: tuple[str, ...]) -> list[State]:
    """Per value of a variable its state."""
    factors = sum(map(len, factored.dims[value]))
    found: list[State] = []
    for n, codes in enumerate(states.unique):
        marks = tuple(tuple(a for a, c in zip(names, codes, strict=True) if c == f + 1) for f in range(factors))
        seen = tuple((i, states.seen[n, i]) for i in range(len(names)) if (n, i) in states.seen)
        found.append((codes, states.marks[n] if states.marks is not None else marks, seen))
    return [found[i] for i in states.place]


def _made(some: list[State]) -> States:
    seen = {(n, axis): s for n, state in enumerate(some) for axis, s in state[2]}
    return States([s[0] for s in some], np.arange(len(some)), seen, [s[1] for s in some])
