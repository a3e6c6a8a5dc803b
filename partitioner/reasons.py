"""Why a call or a parameter is as it is: what every other choice would have cost, all else unchanged.

    cost(x_g) = seconds_g(x_g) + sum over neighbours h of T_gh(x_g, chosen h)

per axis, over the group's joint values that differ from the chosen one on that axis alone. Its terms are the compute of
the group's calls, the reshards between them, and those between the group and each neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch.fx as fx

from .call_costs import Cost
from .fold import MODEL
from .graph import is_getitem
from .joint import Joint
from .layout import Layout
from .plan import Decision
from .states import UNREACHABLE
from .strategies import Choice, is_view

if TYPE_CHECKING:
    from .tables import Tables, Variable


@dataclass(frozen=True)
class Term:
    """A part of a cost: under the chosen value and under the next best.

    Attributes:
        what: `compute`, `reshards inside`, `outputs whole`, `optimizer`, or "" for a neighbour.
        values: the tensors between here and a neighbour.
        to: a module of the neighbour, or the parameter that it is.
    """

    what: str
    chosen: float
    other: float
    values: tuple[str, ...] = ()
    to: str = ""


@dataclass(frozen=True)
class Next:
    """The next best: a choice or a layout, how much dearer it is, the terms, and how many bytes more it keeps."""

    what: Choice | Layout
    dearer: float
    terms: tuple[Term, ...]
    nbytes: float = 0.0


class Reasons:
    """The decisions of a solved problem, worked out when asked for.

    `memory`: per variable and value the bytes that it keeps; empty where memory did not count.
    """

    def __init__(self, tables: Tables, values: list[int], memory: Sequence[np.ndarray] = ()):
        self._tables, self._values, self._memory = tables, values, memory
        self._where = {m.node.name: (i, k) for i, v in enumerate(tables.variables) for k, m in enumerate(v.members)}
        self._params = {v.name: i for i, v in enumerate(tables.variables) if v.resting is not None}

    def of(self, call: str) -> dict[str, Decision]:
        """Per axis the decision on a call, where it had a choice."""
        return self._of(call)

    def next_best(self, call: str, axis: str) -> Next | None:
        """The next best choice of a call on an axis; None where no other fits its neighbours as they are."""
        return self._next_best(call, axis)

    def together(self, call: str) -> list[str]:
        """The calls that decide with a call, it included, in program order."""
        return [m.node.name for m in self._tables.variables[self._where[call][0]].members]

    def has_say(self, call: str) -> bool:
        """Whether a call's own dims are choices of its group; others do as their operands, or as their reader."""
        i, k = self._where[call]
        return self._tables.variables[i].members[k].lead

    def layouts(self, name: str) -> int:
        """In how many ways a parameter may rest."""
        variable = self._tables.variables[self._params[name]]
        return len(variable.resting.layouts) if variable.resting is not None else 0

    def next_layout(self, name: str) -> Next | None:
        """The next best way for a parameter to rest."""
        i = self._params[name]
        resting, chosen, costs = self._tables.variables[i].resting, self._values[i], self._costs(i)
        assert resting is not None
        others = [v for v in range(len(costs)) if v != chosen and costs[v] < UNREACHABLE]
        if not others:
            return None
        best = min(others, key=lambda v: (costs[v], v))
        terms = [Term("optimizer", *_two(resting.seconds, chosen, best)), *self._near_terms(i, chosen, best)]
        return Next(resting.layouts[best], float(costs[best] - costs[chosen]), tuple(terms), self._more(i, best))

    def _joint(self, i: int) -> Joint:
        joint = self._tables.variables[i].joint
        assert joint is not None
        return joint

    def _of(self, call: str) -> dict[str, Decision]:
        i, member = self._where[call]
        joint = self._joint(i)
        found: dict[str, Decision] = {}
        for axis, name in enumerate(self._tables.prices.names):
            best = self._alternatives(i, member, axis)
            if len(best) > 1:
                chosen = joint.choices[axis][joint.joint[self._values[i], axis]][member]
                found[name] = Decision(chosen, tuple((choice, cost) for choice, (cost, _) in best.items()))
        return found

    def _alternatives(self, i: int, member: int, axis: int) -> dict[Choice, tuple[float, int]]:
        """Per choice of a call on an axis the least cost, and the value of the group that has it."""
        joint, costs, at = self._joint(i), self._costs(i), self._values[i]
        others = np.delete(joint.joint, axis, axis=1)
        best: dict[Choice, tuple[float, int]] = {}
        for value in np.flatnonzero((others == others[at]).all(axis=1)):
            choice = joint.choices[axis][joint.joint[value, axis]][member]
            best[choice] = min(best.get(choice, (np.inf, 0)), (float(costs[value]), int(value)))
        best[joint.choices[axis][joint.joint[at, axis]][member]] = (float(costs[at]), at)
        return best

    def _next_best(self, call: str, axis: str) -> Next | None:
        i, member = self._where[call]
        best = self._alternatives(i, member, self._tables.prices.names.index(axis))
        others = [(cost, v, c) for c, (cost, v) in best.items() if v != self._values[i] and cost < UNREACHABLE]
        if not others:
            return None
        cost, other, choice = min(others, key=lambda o: o[:2])
        chosen, joint = self._values[i], self._joint(i)
        compute = self._compute(joint)
        alone = self._tables.problem.unary[i] - joint.seconds
        terms = [
            Term("compute", *_two(compute, chosen, other)),
            Term("reshards inside", *_two(joint.seconds - compute, chosen, other)),
            Term("outputs whole", *_two(alone, chosen, other)),
            *self._near_terms(i, chosen, other),
        ]
        return Next(choice, cost - float(self._costs(i)[chosen]), tuple(terms), self._more(i, other))

    def _more(self, i: int, other: int) -> float:
        """Bytes that another value keeps beyond what the chosen one does."""
        return float(self._memory[i][other] - self._memory[i][self._values[i]]) if self._memory else 0.0

    def _compute(self, joint: Joint) -> np.ndarray:
        cost = Cost(joint, self._tables.prices)
        zero = np.zeros(len(joint.joint))
        return sum((cost.call(k) for k, m in enumerate(joint.members) if not is_view(m.node)), zero)

    @cached_property
    def _near(self) -> dict[int, list[tuple[int, np.ndarray]]]:
        """Per variable its neighbours, and the tables between."""
        near: dict[int, list[tuple[int, np.ndarray]]] = {}
        for (a, b), table in self._tables.problem.pairs.items():
            near.setdefault(a, []).append((b, table))
            near.setdefault(b, []).append((a, table.T))
        return near

    def _costs(self, i: int) -> np.ndarray:
        unary = self._tables.problem.unary[i]
        return unary + sum((t[:, self._values[j]] for j, t in self._near.get(i, [])), np.zeros(len(unary)))

    def _near_terms(self, i: int, chosen: int, other: int) -> Iterator[Term]:
        for j, table in self._near.get(i, []):
            column = table[:, self._values[j]]
            values, neighbour = self._between(i, j), self._tables.variables[j]
            yield Term("", *_two(column, chosen, other), tuple(values), _name(neighbour))

    def _between(self, i: int, j: int) -> Iterable[str]:
        """The tensors that one of two variables makes and the other reads."""
        a, b = self._tables.variables[i], self._tables.variables[j]
        for group, param in ((a, b), (b, a)):
            if param.resting is not None:
                yield from self._of_parameter(group, param) if group.members else (param.name,)
                return
            if not param.members:
                yield param.name
                return
        made: dict[fx.Node, None] = {}
        for reader, giver in ((a, b), (b, a)):
            calls = {m.node for m in giver.members}
            made |= {o: None for m in reader.members for o in m.operands if _producer(o) in calls}
        yield from (value.name for value in made)

    def _of_parameter(self, group: Variable, param: Variable) -> Iterator[str]:
        graph = self._tables.graph
        nodes = {n for n, r in zip(graph.placeholders, graph.inputs, strict=True) if r.name == param.name}
        if any(o in nodes for m in group.members for o in m.operands):
            yield param.name
        calls = {m.node for m in group.members}
        for value, role in zip(graph.output_values, graph.outputs, strict=True):
            if value is not None and role.kind == "grad" and role.name == param.name and _producer(value) in calls:
                yield f"gradient of {param.name}"


def _two(costs: np.ndarray, chosen: int, other: int) -> tuple[float, float]:
    return float(costs[chosen]), float(costs[other])


def _producer(value: fx.Node) -> fx.Node:
    return value.args[0] if is_getitem(value) else value  # type: ignore[return-value]


def _name(variable: Variable) -> str:
    if not variable.members:
        return variable.name
    heavy = max(variable.members, key=lambda m: m.shape.rule.flops)
    return heavy.node.meta.get("module") or MODEL
