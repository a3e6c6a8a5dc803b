"""The planner: from a captured graph and a mesh to a `Plan`.

Mesh axes are decided one after another, slowest role first (data, then context, expert, tensor, free). On one axis the
problem is a sum of pairwise tables over the calls (what each does on the axis) and the parameters (how each rests),

    minimise  sum_call seconds(call | choice) + sum_edge reshard_seconds(state given, state needed)

which `solve` minimises exactly. A role restricts the choices (`strategies.Choices`). Data parallel axes then shard what
rests (ZeRO), by the stage asked for.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.fx as fx

from .cost import call_seconds, nbytes, reshard_seconds
from .decompose import decompose_calls
from .errors import PlanError
from .factors import Factored, factor_graph
from .given import check_pins, check_saved, pinned_state
from .graph import Graph, is_getitem, is_tensor, tensor_operands, values_of, where
from .layout import Layout
from .mesh import Mesh
from .plan import Decision, Plan
from .resting import refined, resting_layouts
from .rules.split import Leaf, Split
from .solve import Problem, solve
from .strategies import HEAVY, Choice, Choices, State, input_state, marked_atoms, never_empty, output_state

ORDER = ("data", "context", "expert", "tensor", "free")
"""The order in which axes are decided, by role."""


@dataclass(frozen=True)
class Options:
    """What the user asked of the planner; the words are those of `compile`.

    `resting` is how parameters already lie on the ranks: a further program of the same model must take them so.
    """

    zero: int | str = "auto"
    memory: int | None = None
    pin: dict[str, str] = field(default_factory=dict)
    resting: Mapping[str, Layout] | None = None


Decide = Callable[[Problem, list[list[Any]]], list[int]]
"""From a problem (and the choices behind its variables' values) to the value of each variable."""


def exactly(problem: Problem, choices: list[list[Any]]) -> list[int]:
    return solve(problem).values


@dataclass
class Draft:
    """A plan in the making."""

    graph: Graph
    factored: Factored
    mesh: Mesh
    options: Options
    taken: dict[fx.Node, dict[str, Choice]] = field(default_factory=dict)
    params: dict[str, Layout] = field(default_factory=dict)
    decisions: dict[str, dict[str, Decision]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def split(self, node: fx.Node) -> Split:
        return split_of(self.factored, self.mesh, node, self.taken.get(node, {}))


def split_of(factored: Factored, mesh: Mesh, node: fx.Node, choices: Any) -> Split:
    """The split that a call's choices per axis amount to; axes on one leaf stand in mesh order."""
    axes: dict[Leaf, tuple[str, ...]] = {}
    partial: dict[str, int] = {}
    for axis in mesh.names:
        choice = choices.get(axis)
        if isinstance(choice, int):
            partial[axis] = choice
        elif choice is not None:
            axes[choice] = (*axes.get(choice, ()), axis)
    return Split(factored.shapes[node], axes, partial)


def make_plan(graph: Graph, mesh: Mesh, options: Options, decide: Decide = exactly) -> tuple[Graph, Plan]:
    """Decide everything. Returns the graph too: calls may have been decomposed so that a factor could be split.

    Raises:
        PlanError: what was asked cannot be had; the message names the facts in conflict.
    """
    done: tuple[str, ...] = ()
    fixed: dict[str, dict[str, Choice]] = {}
    while True:
        draft = _decide_all(graph, mesh, options, decide, fixed)
        names = tuple(n.name for n in draft.taken if _needs_decomposing(draft, n))
        if not names:
            return replace(graph, factored=draft.factored), _finished(draft, done)
        keep = {n.name: by for n, by in draft.taken.items() if n.name not in names}
        graph = decompose_calls(graph, names, draft.factored)
        fixed, done = keep, done + names


def replan(graph: Graph, mesh: Mesh, plan: Plan, options: Options) -> tuple[Graph, Plan]:
    """A saved plan on a freshly captured graph, checked: every call is there and every choice is legal."""
    graph = decompose_calls(graph, plan.decomposed, factor_graph(graph)) if plan.decomposed else graph
    names = {n.name for n in graph.calls()}
    missing = sorted(names ^ set(plan.choices))
    if missing:
        some = f"{len(missing)} calls differ, such as {missing[:3]}"
        raise PlanError(f"the plan is of another program: {some}; plan again")
    check_saved(graph, mesh, plan)
    draft = _decide_all(graph, mesh, options, exactly, {k: dict(v) for k, v in plan.choices.items()})
    draft.params |= dict(plan.resting)
    made = _finished(draft, plan.decomposed)
    return replace(graph, factored=draft.factored), replace(made, resting=plan.resting, zero=plan.zero)


def _needs_decomposing(draft: Draft, node: fx.Node) -> bool:
    rule = draft.factored.shapes[node].rule
    return any(isinstance(c, tuple) and c[0] in rule.decompose for c in draft.taken[node].values())


def _decide_all(graph: Graph, mesh: Mesh, options: Options, decide: Decide, fixed: dict) -> Draft:
    factored = factor_graph(graph, options.resting)
    draft = Draft(graph, factored, mesh, options)
    draft.taken = {n: {} for n in graph.calls()}
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if role.kind == "param":
            draft.params[str(role.name)] = factored.whole(node)
    draft.notes += _batch_notes(graph, mesh)
    check_pins(graph, factored, options.pin)
    for axis in sorted(mesh.names, key=lambda a: ORDER.index(_order(mesh, a))):
        if mesh.sizes[axis] > 1 and mesh.role(axis) != "pipeline":
            _AxisProblem(draft, axis, fixed).decide(decide)
    return draft


def _order(mesh: Mesh, axis: str) -> str:
    return mesh.role(axis) if mesh.role(axis) in ORDER else "free"


def _batch_notes(graph: Graph, mesh: Mesh) -> list[str]:
    """A batch too small for its data axes: every rank computes all of it."""
    axes = [a for a in mesh.names if mesh.role(a) == "data" and mesh.sizes[a] > 1]
    notes = []
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        at = graph.batch[int(role.name)] if role.kind == "input" else None
        if at is None or not axes:
            continue
        n = node.meta["val"].shape[at]
        if isinstance(n, int) and not never_empty(n, tuple(mesh.sizes[a] for a in axes)):
            names = ", ".join(f"{a}={mesh.sizes[a]}" for a in axes)
            name = graph.input_names[int(role.name)] or "the first input"
            notes.append(
                f"batch {n} of {name} cannot be split over {names}: some data ranks do the same work. A batch of at "
                f"least {math.prod(mesh.sizes[a] for a in axes)} uses them all; batch_dims= names the batch dim"
            )
    return notes


class _AxisProblem:
    """The choices on one axis as tables over calls and parameters."""

    def __init__(self, draft: Draft, axis: str, fixed: dict[str, dict[str, Choice]]):
        self.draft, self.axis, self.mesh = draft, axis, draft.mesh
        self.problem = Problem()
        self.number: dict[fx.Node, int] = {}
        self.choices: list[list[Any]] = []
        marked = marked_atoms(draft.graph, draft.factored)
        self.legal = Choices(draft.graph, draft.factored, draft.mesh, axis, marked)
        self.cache: dict[Any, np.ndarray] = {}
        self._parameters()
        for node in draft.graph.calls():
            self._call(node, fixed)
        for node in draft.graph.calls():
            self._edges(node)
        self._outputs()

    def decide(self, decide: Decide) -> None:
        values = decide(self.problem, self.choices)
        for node, i in self.number.items():
            chosen = self.choices[i][values[i]]
            if node.op == "placeholder":
                self._rest(node, chosen)
            else:
                self.draft.taken[node][self.axis] = chosen
        self._record(values)
        self._note_unused(values)

    def _parameters(self) -> None:
        graph, factored = self.draft.graph, self.draft.factored
        free = self.legal.role in ("tensor", "free", "expert")
        for node, role in zip(graph.placeholders, graph.inputs, strict=True):
            if role.kind != "param":
                continue
            layout = self.draft.params[str(role.name)]
            states: list[State] = [None]
            for i, dim in enumerate(factored.dims[node]):
                for j, atom in enumerate(dim):
                    ranks = (*(self.mesh.sizes[a] for a in layout.dims[i][j].axes), self.mesh.sizes[self.axis])
                    expert = self.legal.role != "expert" or atom in self.legal.marked.experts
                    if free and expert and never_empty(factored.sizes.size(atom), ranks):
                        states.append((i, j))
            states = self._pinned(str(role.name), node, states)
            if self.draft.options.resting is not None:
                states = [refined(self.draft.options.resting[str(role.name)], factored.whole(node)).spot_of(self.axis)]
                states = states if self.legal.role != "data" else [None]
            # a byte at rest weighs little against time, enough to prefer the smaller of two equal plans
            held = nbytes(node.meta["val"]) / self.mesh.device.memory_bandwidth * 1e-2
            costs = [held if s is None else held / self.mesh.sizes[self.axis] for s in states]
            self._variable(node, states, costs)

    def _pinned(self, name: str, node: fx.Node, states: list[State]) -> list[State]:
        for pattern, text in self.draft.options.pin.items():
            if not fnmatch.fnmatchcase(name, pattern) or self.legal.role == "data":
                continue
            wanted = pinned_state(text, self.axis, self.draft.factored.whole(node))
            if wanted not in states:
                legal = _spots_text(states, self.draft.factored.whole(node), self.axis)
                raise PlanError(
                    f"the pin {pattern!r}: {text!r} cannot hold for {name} of shape {tuple(node.meta['val'].shape)} on "
                    f"axis {self.axis}={self.mesh.sizes[self.axis]}: legal there are {legal}"
                )
            return [wanted]
        return states

    def _call(self, node: fx.Node, fixed: dict[str, dict[str, Choice]]) -> None:
        shape = self.draft.factored.shapes[node]
        before = self.draft.taken[node]
        taken = split_of(self.draft.factored, self.mesh, node, before)
        if node.name in fixed:
            choices: list[Choice] = [fixed[node.name].get(self.axis)]
        else:
            choices = self.legal.of(node, taken.axes)
            choices = self._pinned_call(node, choices)
        operands = [o.meta["val"] for o in tensor_operands(node)]
        costs = []
        for c in choices:
            split = split_of(self.draft.factored, self.mesh, node, {**before, self.axis: c})
            costs.append(call_seconds(node, shape, split, operands, self.mesh) if len(choices) > 1 else 0.0)
        self._variable(node, choices, costs)

    def _pinned_call(self, node: fx.Node, choices: list[Choice]) -> list[Choice]:
        for pattern, text in self.draft.options.pin.items():
            if not fnmatch.fnmatchcase(node.name, pattern):
                continue
            shape = self.draft.factored.shapes[node]
            first = next(v for v in values_of(node) if v is not None)
            wanted = pinned_state(text, self.axis, self.draft.factored.whole(first))
            kept = [c for c in self.legal.of(node, {}) if output_state(shape, 0, c) == wanted]
            if not kept:
                raise PlanError(
                    f"the pin {pattern!r}: {text!r} cannot hold on axis {self.axis}: {node.name} ({node.target}) at "
                    f"{where(node)} has no such split"
                )
            return kept
        return choices

    def _variable(self, node: fx.Node, choices: list[Any], costs: list[float]) -> None:
        self.number[node] = self.problem.variable(np.array(costs, dtype=float))
        self.choices.append(choices)

    def _given(self, value: fx.Node) -> tuple[int, list[State]] | None:
        """The variable that decides a value's state, and the state for each of its choices; None: free."""
        producer, output = (value.args[0], value.args[1]) if is_getitem(value) else (value, 0)
        if producer not in self.number:
            return None
        i = self.number[producer]
        if producer.op == "placeholder":
            return i, self.choices[i]
        shape = self.draft.factored.shapes[producer]
        return i, [output_state(shape, output, c) for c in self.choices[i]]  # type: ignore[arg-type]

    def _edges(self, node: fx.Node) -> None:
        shape, i = self.draft.factored.shapes[node], self.number[node]
        for k, operand in enumerate(tensor_operands(node)):
            given = self._given(operand)
            if given is None:
                continue
            needs = [input_state(shape, k, c) for c in self.choices[i]]
            self.problem.pair(given[0], i, self._table(given[1], needs, self._size(operand)))

    def _outputs(self) -> None:
        graph = self.draft.graph
        params = {r.name: n for n, r in zip(graph.placeholders, graph.inputs, strict=True) if r.kind == "param"}
        for value, role in zip(graph.output_values, graph.outputs, strict=True):
            given = self._given(value) if value is not None and is_tensor(value) else None
            if given is None or value is None:
                continue
            if role.kind == "grad":
                j = self.number[params[role.name]]
                self.problem.pair(given[0], j, self._table(given[1], self.choices[j], self._size(value)))
            else:
                table = self._table(given[1], [None], self._size(value))
                self.problem.unary[given[0]] = self.problem.unary[given[0]] + table[:, 0]

    def _size(self, value: fx.Node) -> float:
        producer, output = (value.args[0], value.args[1]) if is_getitem(value) else (value, 0)
        shards = 1
        if producer in self.draft.taken:
            layout = self.draft.split(producer).output_layout(output)  # type: ignore[arg-type]
            for a in layout.split_axes if layout else ():
                shards *= self.mesh.sizes[a]
        return nbytes(value.meta["val"]) / shards

    def _table(self, given: list[State], needed: list[Any], size: float) -> np.ndarray:
        key = (tuple(given), tuple(needed), size)
        if key not in self.cache:
            rows = [[reshard_seconds(a, b, size, self.mesh, self.axis) for b in needed] for a in given]
            self.cache[key] = np.minimum(np.array(rows, dtype=float), 1e9)
        return self.cache[key]

    def _rest(self, node: fx.Node, state: State) -> None:
        if isinstance(state, tuple):
            roles = dict(zip(self.draft.graph.placeholders, self.draft.graph.inputs, strict=True))
            name = str(roles[node].name)
            layout = self.draft.params[name]
            axes = _in_order(self.mesh, (*layout.factor(state).axes, self.axis))
            self.draft.params[name] = layout.with_axes(state, axes)

    def _record(self, values: list[int]) -> None:
        """For every call with a choice, what each would have cost with all others as decided."""
        extra = [u.copy() for u in self.problem.unary]
        for (i, j), table in self.problem.pairs.items():
            extra[i] = extra[i] + table[:, values[j]]
            extra[j] = extra[j] + table[values[i], :]
        for node, i in self.number.items():
            if node.op != "placeholder" and len(self.choices[i]) > 1:
                costs = tuple(zip(self.choices[i], map(float, extra[i]), strict=True))
                self.draft.decisions.setdefault(node.name, {})[self.axis] = Decision(self.choices[i][values[i]], costs)

    def _note_unused(self, values: list[int]) -> None:
        used = any(isinstance(self.choices[i][values[i]], tuple) for i in self.number.values())
        if not used:
            self.draft.notes.append(
                f"axis {self.axis}={self.mesh.sizes[self.axis]} ({self.legal.role}) splits nothing: every rank of it "
                f"does the same work"
            )


def _in_order(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in mesh.names if a in axes)


def _spots_text(states: list[State], layout: Layout, axis: str) -> str:
    out = [str(layout if s is None else layout.with_axes(s, (axis,))) for s in states if not isinstance(s, str)]
    return " or ".join(out)


def _finished(draft: Draft, decomposed: tuple[str, ...]) -> Plan:
    zero, resting, notes = resting_layouts(draft.params, draft.graph, draft.mesh, draft.options)
    shapes = draft.factored.shapes
    compute = sum(
        call_seconds(n, shapes[n], draft.split(n), [o.meta["val"] for o in tensor_operands(n)], draft.mesh)
        for n in draft.taken
    )
    modules = {n.name: (n.meta.get("module", ""), str(n.target), n.meta.get("where", "")) for n in draft.taken}
    whole_notes = [*_notes_of_unsplit(draft), *_notes_of_whole(draft)]
    return Plan(
        draft.mesh,
        {n.name: dict(by) for n, by in draft.taken.items()},
        resting,
        zero=zero,
        decomposed=decomposed,
        seconds=(compute, 0.0),
        notes=(*draft.graph.notes, *draft.notes, *notes, *whole_notes),
        decisions=draft.decisions,
        modules=modules,
    )


def _notes_of_unsplit(draft: Draft) -> list[str]:
    """Per tensor axis, the contractions that it does not split: how many, their share of flops, the first."""
    notes = []
    heavy = [n for n in draft.taken if draft.factored.shapes[n].rule.flops >= HEAVY]
    total = sum(draft.factored.shapes[n].rule.flops for n in heavy)
    for axis in (a for a in draft.mesh.names if draft.mesh.role(a) == "tensor" and draft.mesh.sizes[a] > 1):
        left = [n for n in heavy if not isinstance(draft.taken[n].get(axis), tuple)]
        if left:
            share = sum(draft.factored.shapes[n].rule.flops for n in left) / total
            notes.append(
                f"axis {axis}={draft.mesh.sizes[axis]} leaves {len(left)} of {len(heavy)} contractions whole "
                f"({share:.1%} of their flops), such as {left[0].name} of {left[0].meta.get('module') or 'the model'}"
            )
    return notes


def _notes_of_whole(draft: Draft) -> list[str]:
    """One note per op without a rule of its own: the one discovered, or what it is and what running it whole costs."""
    seen: dict[str, tuple[int, float, str]] = {}
    for node in draft.taken:
        note = draft.factored.shapes[node].rule.note
        if note:
            operands = [o.meta["val"] for o in tensor_operands(node)]
            cost = call_seconds(node, draft.factored.shapes[node], draft.split(node), operands, draft.mesh)
            count, total, line = seen.get(note, (0, 0.0, where(node)))
            seen[note] = (count + 1, total + cost, line)
    late = [n for n in draft.taken if draft.factored.calls[n].depends_on_data]
    if late:
        seen["sizes that depend on data"] = (len(late), 0.0, where(late[0]))
    found = dict.fromkeys(draft.factored.shapes[n].rule.discovered for n in draft.taken)
    return [note for note in found if note] + [
        f"{note}: run whole on every rank, {count} time(s), {total * 1e6:.0f} us a step (first at {line})"
        for note, (count, total, line) in seen.items()
    ]
