"""The planner: from a captured graph and a mesh to a `Plan`.

    factors      which dims are the same size for the same reason        factors.py
    groups       calls that decide together                              groups.py
    joint        what a group may do on all axes at once, and its cost   joint.py
    resting      how a parameter may rest                                resting.py
    tables       the costs of two neighbours' choices                    tables.py
    solve        the least sum, exactly                                  solve.py

All mesh axes are decided together. A role restricts the choices on an axis (`strategies.Choices`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch.fx as fx

from .as_before import Taken, values_as_before
from .away import moved_away
from .budget import within
from .collection import no_collection
from .cost import call_seconds
from .decompose import decompose_calls
from .elimination import Problem
from .errors import PlanError
from .factors import Factored, extended, factor_graph
from .facts import with_facts
from .given import Pins, check_pins, check_saved, pinned_calls
from .given_stages import check_given
from .graph import Graph, is_getitem, is_tensor, tensor_operands, where
from .groups import contract, single
from .joint import Builder
from .layout import Layout
from .mesh import Mesh
from .placement import split_of
from .plan import Plan
from .reasons import Reasons
from .resting import Rests, small_notes, stage_asked, stage_of
from .rules.split import Split
from .saved import saved_values
from .solve import Known, Solution, solve
from .states import Prices
from .strategies import HEAVY, Choice, marked_atoms, never_empty
from .tables import Tables
from .twins import with_twins


@dataclass(frozen=True)
class Options:
    """What the user asked of the planner; the words are those of `compile`.

    `resting` is how parameters already lie on the ranks: a further program of the same model must take them so. `held`:
    of the bytes of parameters, and of those that backward reads, how much a rank holds at once, for `memory`: in a
    pipeline a rank holds one stage, and few micro-batches are in flight. `keep`: pins of what backward reads, see
    `keep.py`; `offload`: what blocks save is on the host.
    """

    zero: int | str = "auto"
    memory: int | None = None
    pin: dict[str, str] = field(default_factory=dict)
    resting: Mapping[str, Layout] | None = None
    micro_batches: int = 1
    held: tuple[float, float] = (1.0, 1.0)
    recompute: str = "auto"
    keep: Mapping[str, str] = field(default_factory=dict)
    offload: bool = False


@dataclass(frozen=True)
class Case:
    """A program to plan.

    Attributes:
        pins: the calls that pins name.
        written: the calls written out so far.
        writes: whether a free axis may ask for more of them.
        shares: whether groups that read one parameter may share a reshard of it.
    """

    graph: Graph
    factored: Factored
    pins: Pins
    written: tuple[str, ...] = ()
    writes: bool = True
    shares: bool = True

    def with_written(self, names: tuple[str, ...], resting: Mapping[str, Layout] | None) -> Case:
        """The same program with these calls written out; a pin of one holds for what its first output is now."""
        made = decompose_calls(self.graph, names)
        factored = extended(self.factored.moved(made.twins), made.graph) or factor_graph(made.graph, resting)
        firsts = {n: made.firsts.get(n, made.twins[n]) for n in self.pins}
        pins = {f.args[0] if is_getitem(f) else f: self.pins[n] for n, f in firsts.items()}
        return replace(self, graph=made.graph, factored=factored, pins=pins, written=(*self.written, *names))


KEPT = 1e-4
"""By so much, relative, a plan may cost more than what its calls written out were chosen for."""

PROMISED = 1e-3
"""By so much, relative, a plan's price may be above what was minimised."""

Decide = Callable[[Problem], list[int]]
"""From a problem to the value of each variable: for plans that are not the best one."""


@dataclass
class Draft:
    """A plan in the making: what every call does, and how parameters rest. `given`: the saved plan that it follows."""

    case: Case
    mesh: Mesh
    options: Options
    taken: dict[fx.Node, dict[str, Choice]] = field(default_factory=dict)
    params: dict[str, Layout] = field(default_factory=dict)
    zero: int = 0
    again: frozenset[str] = frozenset()
    solution: Solution | None = None
    reasons: Reasons | None = None
    shares: bool = False
    notes: list[str] = field(default_factory=list)
    given: Plan | None = None

    @property
    def graph(self) -> Graph:
        return self.case.graph

    @property
    def factored(self) -> Factored:
        return self.case.factored

    def split(self, node: fx.Node) -> Split:
        return split_of(self.factored, self.mesh, node, self.taken.get(node, {}))


@no_collection()
def make_plan(graph: Graph, mesh: Mesh, options: Options, decide: Decide | None = None) -> tuple[Graph, Plan]:
    """Decide everything. Returns a graph too: calls may have been written out so that a factor could be split.

    A split that asks for that is priced as the ops that it takes (`written.py`). Then the calls are written out and all
    is decided again; should that cost more than was promised, the plan without such splits is made too, and the cheaper
    of the two is returned. So it is with parameters that several groups read: a reshard that they share is followed by
    others of their own, where what is emitted has each of them start from the parameter.

    `decide`: takes the place of `solve`, one variable for every call.

    Raises:
        PlanError: what was asked cannot be had; the message names the facts in conflict.
    """
    factored = graph.factored or factor_graph(graph, options.resting)
    check_pins(graph, factored, options.pin, mesh)
    case = Case(graph, factored, pinned_calls(graph, options.pin))
    first = decided(case, mesh, options, decide)
    if decide is not None:
        return _made(_written(first, decide), math.inf)
    assert first.solution is not None
    bound, made = first.solution.bound, _best(first, first.solution.bound)
    if first.shares and _price(made) > first.solution.cost * (1 + PROMISED):
        alone = decided(replace(case, shares=False), mesh, options)
        made = min(made, _best(alone, bound), key=_price)
    return made


def _price(made: tuple[Graph, Plan]) -> float:
    return sum(made[1].seconds)


def _best(first: Draft, bound: float) -> tuple[Graph, Plan]:
    """The plan of a first draft, its calls written out as it asks, or of one that asks for none."""
    assert first.solution is not None
    try:
        last = _written(first)
    except PlanError:  # what it keeps when written out is too much for the memory
        last = None
    if last is not None and last.solution is not None and last.solution.cost <= first.solution.cost * (1 + KEPT):
        return _made(last, bound)
    try:
        whole = _written(decided(replace(first.case, writes=False), first.mesh, first.options))
    except PlanError:
        if last is None:
            raise
        return _made(last, bound)
    return min((_made(d, bound) for d in (last, whole) if d is not None), key=_price)


def _written(draft: Draft, decide: Decide | None = None) -> Draft:
    """The draft, or, where it asks for calls to be written out, one that has been decided with them so."""
    while names := tuple(n.name for n in draft.taken if _needs_decomposing(draft, n)):
        case = draft.case.with_written(names, draft.options.resting)
        draft = decided(case, draft.mesh, draft.options, decide, draft)
    return draft


def _made(draft: Draft, bound: float) -> tuple[Graph, Plan]:
    """The plan of a draft, no plan costing less than `bound` seconds."""
    plan, solution = _finished(draft), draft.solution
    if solution is not None:
        price = sum(plan.seconds)
        cost = price if price > solution.cost * (1 + PROMISED) else solution.cost
        plan = replace(plan, gap=max(solution.gap, (cost - bound) / bound if bound > 0 else 0.0))
    return replace(draft.graph, factored=draft.factored), plan


def replan(graph: Graph, mesh: Mesh, plan: Plan, options: Options) -> tuple[Graph, Plan]:
    """A saved plan on a freshly captured graph, checked: every call is there and every choice is legal."""
    graph = decompose_calls(graph, plan.decomposed).graph if plan.decomposed else graph
    graph = with_twins(graph, plan.recompute)[0] if plan.recompute else graph
    graph = moved_away(graph, plan.offload)[0] if plan.offload else graph
    names = {n.name for n in graph.calls()}
    missing = sorted(names ^ set(plan.choices))
    if missing:
        some = f"{len(missing)} calls differ, such as {missing[:3]}"
        raise PlanError(f"the plan is of another program: {some}; plan again")
    check_saved(graph, mesh, plan)
    factored = factor_graph(graph, plan.resting)
    check_given(graph, factored, plan)
    draft = Draft(Case(graph, factored, {}, plan.decomposed), mesh, options, given=plan)
    draft.taken = {n: dict(plan.choices[n.name]) for n in graph.calls()}
    draft.params, draft.zero, draft.again = dict(plan.resting), plan.zero, plan.again
    draft.notes += _batch_notes(graph, mesh, plan.micro_batches)
    return _made(draft, math.inf)


def _needs_decomposing(draft: Draft, node: fx.Node) -> bool:
    rule = draft.factored.shapes[node].rule
    taken = draft.taken[node].values() if rule.decompose else ()
    return any(isinstance(c, tuple) and c[0] in rule.decompose for c in taken)


def decided(
    case: Case, mesh: Mesh, options: Options, decide: Decide | None = None, before: Draft | None = None
) -> Draft:
    """A draft of a program as it stands: calls whose choice asks for simpler ops are not yet written out.

    `before`: the draft of the program before some calls of it were.
    """
    draft = Draft(case, mesh, options)
    draft.notes += _batch_notes(case.graph, mesh, options.micro_batches)
    stage = stage_asked(case.graph, mesh, options)
    tables = _tables(draft, decide is not None, stage)
    if decide is None:
        draft.solution, draft.again = _solution(draft, tables, before)
        values = draft.solution.values
    else:
        values = decide(tables.problem)
    _take(draft, tables, values)
    draft.shares = tables.shares_parameters
    memory = tables.memory(saved_values(case.graph, case.factored)) if options.memory is not None else ()
    draft.reasons = Reasons(tables, values, memory)
    draft.zero = stage if isinstance(stage, int) else stage_of(draft.params, case.graph, mesh, draft.again)
    draft.notes += small_notes(draft.params, case.graph, mesh, stage)
    return draft


def _tables(draft: Draft, every: bool, stage: int | str) -> Tables:
    """The problem: one variable per group, or (`every`) per call, and one per parameter."""
    graph, factored, options, pins = draft.graph, draft.factored, draft.options, draft.case.pins
    prices = Prices(draft.mesh)
    marked = marked_atoms(graph, factored, options.micro_batches)
    tables = Tables(graph, factored, prices, again=stage == 3, shares=draft.case.shares, held=options.held)
    builder = Builder(graph, factored, prices, marked, {}, pins, grouped=not every, writes=draft.case.writes)
    alone = frozenset(pins) | {n for n in graph.calls() if n.meta.get("written")}
    for group in single(graph.calls()) if every else contract(graph, factored, alone):
        tables.add_group(group, builder)
    trained = {r.name for v, r in zip(graph.output_values, graph.outputs, strict=True) if r.kind == "grad" and v}
    rests = Rests(graph, factored, prices, options, marked, stage)
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if role.kind == "param":
            tables.add_parameter(node, str(role.name), rests.of(node, str(role.name), role.name in trained))
    for node in graph.fx.nodes:
        if node.op in ("placeholder", "get_attr") and is_tensor(node) and node not in tables._param:
            tables.add_input(node)
    tables.connect()
    return tables


def _solution(draft: Draft, tables: Tables, before: Draft | None) -> tuple[Solution, frozenset[str]]:
    """The best values, within the memory where there is a limit, and what backward makes again."""
    if draft.options.memory is None:
        known = None
        if before is not None and before.solution is not None:
            taken = Taken.of(before.taken, before.params, before.factored)
            known = Known(values_as_before(tables, taken), before.solution.bound)
        return solve(tables.problem, hubs=tables.hubs(), known=known), frozenset()
    return within(tables, draft.options.memory, saved_values(draft.graph, draft.factored))


def _take(draft: Draft, tables: Tables, values: list[int]) -> None:
    """Write down what the values of the variables mean."""
    names = tables.prices.names
    for variable, value in zip(tables.variables, values, strict=True):
        if variable.joint is None:
            if variable.resting is None:
                continue
            draft.params[variable.name] = variable.resting.layouts[value]
            continue
        for i, member in enumerate(variable.members):
            draft.taken[member.node] = variable.joint.choice(i, value, names)
    draft.notes += _notes_of_unused(draft, names)


def _batch_notes(graph: Graph, mesh: Mesh, micro_batches: int) -> list[str]:
    """A batch too small for its data axes: every rank computes all of it."""
    axes = [a for a in mesh.names if mesh.role(a) == "data" and mesh.sizes[a] > 1]
    notes = []
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        at = graph.batch[int(role.name)] if role.kind == "input" else None
        if at is None or not axes:
            continue
        n = node.meta["val"].shape[at]
        if isinstance(n, int) and not never_empty(n, (micro_batches, *(mesh.sizes[a] for a in axes))):
            names = ", ".join(f"{a}={mesh.sizes[a]}" for a in axes)
            names += f", each of micro_batches={micro_batches}" if micro_batches > 1 else ""
            name = graph.input_names[int(role.name)] or "the first input"
            need = micro_batches * math.prod(mesh.sizes[a] for a in axes)
            notes.append(
                f"batch {n} of {name} cannot be split over {names}: every data rank computes all of it. A batch of at "
                f"least {need} uses them all; batch_dims= names the batch dim"
            )
    return notes


def _finished(draft: Draft) -> Plan:
    calls = list(draft.graph.calls())  # in program order, whichever way they were decided in
    modules = {n.name: (n.meta.get("module", ""), str(n.target), n.meta.get("where", "")) for n in calls}
    whole_notes = [*_notes_of_unsplit(draft), *_notes_of_whole(draft)]
    plan = Plan(
        draft.mesh,
        {n.name: draft.taken[n] for n in calls},
        draft.params,
        zero=draft.zero,
        again=draft.again,
        decomposed=draft.case.written,
        precision=str(draft.graph.precision or ""),
        notes=(*draft.graph.notes, *draft.notes, *whole_notes),
        decisions=draft.reasons,
        modules=modules,
    )
    if (given := draft.given) is not None:
        plan = replace(plan, micro_batches=given.micro_batches, stages=given.stages, schedule=given.schedule)
        plan = replace(plan, recompute=given.recompute, offload=given.offload)
    asked = {"zero": draft.options.zero, "memory": draft.options.memory, "pin": draft.options.pin}
    asked["pinned"] = {n.name: pins for n, pins in draft.case.pins.items()}
    return with_facts(plan, draft.graph, draft.factored, **asked)


def _seconds(draft: Draft, node: fx.Node) -> float:
    operands = [o.meta["val"] for o in tensor_operands(node)]
    return call_seconds(node, draft.factored.shapes[node], draft.split(node), operands, draft.mesh)


def _notes_of_unused(draft: Draft, names: tuple[str, ...]) -> list[str]:
    """Axes that split no call."""
    used = {a for by in draft.taken.values() for a, c in by.items() if isinstance(c, tuple)}
    return [
        f"axis {a}={draft.mesh.sizes[a]} ({draft.mesh.role(a)}) splits nothing: every rank of it does the same work"
        for a in names
        if a not in used
    ]


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
            count, total, line = seen.get(note, (0, 0.0, where(node)))
            seen[note] = (count + 1, total + _seconds(draft, node), line)
    late = [n for n in draft.taken if draft.factored.calls[n].depends_on_data]
    if late:
        seen["sizes that depend on data"] = (len(late), 0.0, where(late[0]))
    found = dict.fromkeys(draft.factored.shapes[n].rule.discovered for n in draft.taken)
    return [note for note in found if note] + [
        f"{note}: run whole on every rank, {count} time(s), {total * 1e6:.0f} us a step (first at {line})"
        for note, (count, total, line) in seen.items()
    ]
