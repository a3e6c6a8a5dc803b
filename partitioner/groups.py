"""Contraction: calls that decide together.

Most calls have no reason to be split otherwise than a neighbour. Calls are joined in *groups*, each one variable of the
planner (`joint.py` says what a group may do), by these rules:

    follower     linear in its one tensor operand, and making nothing larger (a view, a cast down, a sum over dims):
                 does as its producer does, partial sums included; not a small sum of what others read too, nor
                 what scales a product
    gathered     a sum of tensors that all come from one group (the input gradients of q, k, v): stays there
    chain        pointwise, reductions, norms over the same dims as the tensor they read: one group, unless that tensor
                 is read elsewhere too (a residual stream starts anew at each layer)
    twins        a call and its backward calls (equal `seq`), such as the three products of one weight; not what reads
                 gradients alone and is linear in them, through which partial sums may go on
    siblings     products of one module that read the same tensor and share a dim beyond it (q, k, v; gate, up)
    raised       the cast of a parameter's gradient to the dtype in which it is reduced: with the call that makes it
    looked at    views of parameters and inputs, and casts up: do as their reader needs

What each rule loses was measured against one variable per call (`docs/planner.md`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.fx as fx

from .factors import Factored
from .graph import Graph, is_getitem, values_of
from .precision import raised
from .rules.split import Shape
from .strategies import HEAVY, is_view

_LOOKS = ("follower", "widens", "grows")
"""Kinds of calls that have no say."""


@dataclass(eq=False)
class Group:
    """Calls that decide together, in program order.

    Attributes:
        lead: per call whether it has a say: its own factors are values of the group. The others follow.
        looked: per call whether it does as its reader in the group needs.
    """

    calls: list[fx.Node] = field(default_factory=list)
    lead: list[bool] = field(default_factory=list)
    looked: list[bool] = field(default_factory=list)


@dataclass(eq=False)
class _Call:
    """What the rules ask about a call."""

    node: fx.Node
    shape: Shape
    space: frozenset[int]
    operands: list[fx.Node]
    makers: list[int]
    kind: str
    parent: str


class _Alike(NamedTuple):
    """What calls of one shape share: their kind; of a follower whether it makes a small sum, and whether it only does
    something to each element."""

    kind: str
    sums: bool
    scales: bool


class _Contraction:
    def __init__(self, graph: Graph, factored: Factored, alone: frozenset[fx.Node]):
        self.factored, self.alone = factored, alone
        self.raised = raised(graph.precision, graph.output_values, graph.outputs)
        self.number: dict[fx.Node, int] = {}
        self.maker: dict[fx.Node, int] = {}
        self.calls: list[_Call] = []
        self.parent: list[int] = []
        self.chained: list[bool] = []
        self.looked: set[int] = set()
        self.aside: set[int] = set()
        self.atoms: dict[fx.Node, frozenset[int]] = {}
        self.alike: dict[int, _Alike] = {}
        self.spaces: dict[int, frozenset[int]] = {}
        for node in graph.fx.nodes:
            if node.op == "call_function":
                if is_getitem(node):
                    self.maker[node] = self.maker[node.args[0]]
                else:
                    self._add(node)

    def _add(self, node: fx.Node) -> None:
        factored, at = self.factored, len(self.calls)
        shape, operands, atoms = factored.shapes[node], factored.operands[node], factored.atoms[node]
        makers = [self.maker.get(o, -1) for o in operands]
        space = self.spaces.get(id(atoms))
        if space is None:
            space = self.spaces[id(atoms)] = frozenset(atoms.values())
        self.number[node] = self.maker[node] = at
        module = node.meta.get("module") or ""
        one = _Call(node, shape, space, operands, makers, "", module.rpartition(".")[0])
        if node in self.alone:
            one.kind = "alone"
        else:
            alike = self.alike.get(id(shape))
            if alike is None:
                alike = self.alike[id(shape)] = self._alike(one)
            one.kind = "follower" if node in self.raised else alike.kind
            if one.kind == "follower":
                self._look_closer(one, alike, at)
        self.calls.append(one)
        self.parent.append(at)
        self.chained.append(one.kind in ("chain", *_LOOKS))

    def _look_closer(self, call: _Call, alike: _Alike, at: int) -> None:
        """Followers that decide alone: a small sum of a tensor that others read too, which it may see as they do; and
        a matrix product times a number. On the terms of a sum every rank would scale all of it; once they are reduced
        and scattered, a piece."""
        if alike.sums and len(self._base(call.operands[0]).users) > 1:
            call.kind = "other"
            self.aside.add(at)
        elif alike.scales:
            maker = self.maker.get(self._base(call.operands[0]), -1)
            if maker >= 0 and self.calls[maker].kind == "heavy":
                call.kind = "other"

    def _alike(self, call: _Call) -> _Alike:
        if not call.operands:
            return _Alike(self._kind_of(call), False, False)
        made, read = _numel(call.node), _numel(call.operands[0])
        sums = any(call.shape.rule.sums) and 8 * made <= read
        return _Alike(self._kind_of(call), sums, made == read and not is_view(call.node))

    def _kind_of(self, call: _Call) -> str:
        rule = call.shape.rule
        if self.factored.calls[call.node].depends_on_data:
            return "alone"
        if rule.flops >= HEAVY:
            return "heavy"
        if len(call.operands) == 1 and frozenset((0,)) in rule.linear:
            if _numel(call.node) == 1 < _numel(call.operands[0]):
                return "other"  # to gather a short vector may be faster than to reduce one number
            grows = _numel(call.node) > _numel(call.operands[0])
            wider = _tensors(call.node)[0].dtype.itemsize > _tensors(call.operands[0])[0].dtype.itemsize
            return "grows" if grows else "widens" if wider else "follower"
        if any(self._space(o) >= call.space for o in call.operands):
            return "chain"
        return "other"

    def _space(self, value: fx.Node) -> frozenset[int]:
        found = self.atoms.get(value)
        if found is None:
            found = self.atoms[value] = frozenset(a for d in self.factored.dims[value] for a in d)
        return found

    # union-find
    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        a, b = self.find(i), self.find(j)
        if a != b:
            self.parent[max(a, b)] = min(a, b)
            self.chained[min(a, b)] = self.chained[a] and self.chained[b]

    # rules
    def twins(self) -> None:
        first: dict[int, int] = {}
        for i, call in enumerate(self.calls):
            seq = call.node.meta.get("seq")
            if seq is None or call.kind not in ("heavy", "chain") or _accumulates(call.node):
                continue
            if seq not in first:
                if not call.node.meta.get("backward"):
                    first[seq] = i
                continue
            other = self.calls[first[seq]]
            if self._passes(call):
                continue
            if not call.node.meta.get("backward"):  # no gradient goes through it: the number is its neighbour's
                continue
            if other.kind == call.kind and (call.space <= other.space or other.space <= call.space):
                self.join(first[seq], i)

    def _passes(self, call: _Call) -> bool:
        """Whether a backward call is linear in gradients and reads nothing else that is no mask or index: partial sums
        may go on through it."""
        floats = [k for k, o in enumerate(call.operands) if o.meta["val"].is_floating_point()]
        read = [k for k in floats if call.makers[k] >= 0]
        if call.kind != "chain" or not call.node.meta.get("backward") or frozenset(read) not in call.shape.rule.linear:
            return False
        return all(self.calls[call.makers[k]].node.meta.get("backward") for k in read)

    def siblings(self) -> None:
        readers: dict[tuple[fx.Node, str], int] = {}
        for i, call in enumerate(self.calls):
            if call.kind != "heavy" or call.node.meta.get("backward"):
                continue
            for operand in call.operands:
                base = self._base(operand)
                key = (base, call.parent)
                other = readers.setdefault(key, i)
                if other != i and (call.space & self.calls[other].space) - self._space(base):
                    self.join(other, i)

    def _base(self, value: fx.Node) -> fx.Node:
        """The tensor seen through followers."""
        maker = self.maker.get(value, -1)
        while maker >= 0 and self.calls[maker].kind == "follower":
            value = self.calls[maker].operands[0]
            maker = self.calls[maker].makers[0]
        return value

    def follow(self) -> None:
        for i, call in enumerate(self.calls):
            if call.kind not in ("follower", "widens", "chain", "other"):
                continue
            makers = [m for m in call.makers if m >= 0 and (self.calls[m].kind != "alone" or call.node in self.raised)]
            chained = bool(makers) and self.chained[self.find(makers[0])]
            if makers and makers[0] in self.aside and len(call.operands[0].users) > 1:
                continue  # a small sum that several read is reduced once, before they do
            if makers and (call.kind == "follower" or (call.kind == "widens" and chained)):
                self.join(i, makers[0])
            elif call.kind in ("chain", "other"):
                self._gather(i, call, makers)

    def _gather(self, i: int, call: _Call, makers: list[int]) -> None:
        """A sum of what one group makes stays there; a chain goes on unless what it reads is read elsewhere too."""
        homes = {self.find(m) for m in makers}
        count = len(call.operands)
        every = frozenset(range(count)) in call.shape.rule.linear
        if every and len(makers) == count > 1 and not any(self.chained[h] for h in homes):
            self.chained[self.find(i)] = False  # a sum of what may be partial sums (two embeddings) decides alone
        if len(homes) == 1 and len(makers) == count > 1 and frozenset(range(count)) in call.shape.rule.linear:
            self.join(i, makers[0])
        elif call.kind == "chain":
            for operand, m in zip(call.operands, call.makers, strict=True):
                ends = m < 0 or self.calls[m].kind == "alone" or not self.chained[self.find(m)]
                goes_on = count == 1 or len(homes) == 1 or _readers(operand) == 1
                if not ends and goes_on and self._space(operand) >= call.space:
                    self.join(i, m)

    def look(self) -> None:
        """What no call of a group has a say in (views of parameters, casts up) goes to its readers' group, if one."""
        members: dict[int, list[int]] = {}
        for i in range(len(self.calls)):
            members.setdefault(self.find(i), []).append(i)
        for some in sorted(members.values(), key=lambda m: -m[-1]):
            if any(self.calls[i].kind not in _LOOKS for i in some):
                continue
            users = {u for i in some for v in values_of(self.calls[i].node) if v is not None for u in v.users}
            read = [self.number[u] for u in users if u in self.number and self.number[u] not in some]
            homes = {self.find(r) for r in read}
            if len(homes) == 1 and self.calls[read[0]].kind != "alone":
                for i in some:
                    self.join(i, read[0])
                self.looked |= set(some)

    def groups(self) -> list[Group]:
        found: dict[int, Group] = {}
        for i, call in enumerate(self.calls):
            group = found.setdefault(self.find(i), Group())
            group.calls.append(call.node)
            follows = any(m >= 0 and self.find(m) == self.find(i) for m in call.makers)
            group.lead.append(call.kind not in _LOOKS or not (follows or i in self.looked))
            group.looked.append(i in self.looked)
        for group in found.values():
            if not any(group.lead):
                group.lead = [not x for x in group.looked] if not all(group.looked) else [True] * len(group.calls)
                group.looked = [x and not y for x, y in zip(group.looked, group.lead, strict=True)]
        return list(found.values())


def contract(graph: Graph, factored: Factored, alone: frozenset[fx.Node] = frozenset()) -> list[Group]:
    """The groups of a program; the calls in `alone` decide for themselves."""
    made = _Contraction(graph, factored, alone)
    made.twins()
    made.siblings()
    made.follow()
    made.look()
    return made.groups()


def single(calls: Iterable[fx.Node]) -> list[Group]:
    """A group for every call."""
    return [Group([node], [True], [False]) for node in calls]


def _readers(value: fx.Node) -> int:
    """How many calls read a value; of one made in forward, how many in forward."""
    if value.meta.get("backward"):
        return len(value.users)
    return sum(not u.meta.get("backward") for u in value.users)


def _accumulates(node: fx.Node) -> bool:
    """Whether a call adds up gradients of one tensor: autograd numbers all of those alike."""
    return bool(node.meta.get("backward")) and node.target is torch.ops.aten.add.Tensor


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    val = node.meta["val"]
    return [t for t in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(t, torch.Tensor)]


def _numel(node: fx.Node) -> int:
    return sum(math.prod(n for n in t.shape if isinstance(n, int)) for t in _tensors(node))
