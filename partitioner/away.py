"""Values of forward that are on the host until backward reads them, written into the graph after all else is decided.

Before:  `h = gelu(x); ...; dw = mm(h, dy)`
After:   `h = gelu(x); ...; h_again = clone(h); dw = mm(h_again, dy)`        and `Plan.offload` names h

The clone, in h's own layout, stands for the way to the host and back (`passes/offload.py` writes that); views of h that
backward reads are made of it again. Costs, stages and passes see a call like others; its seconds are

    2 * bytes / bandwidth of the host's link        both copies, nothing hidden behind computation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .factors import extended, factor_graph
from .facts import with_facts
from .graph import Graph
from .keep import Families, asked_away
from .layout import Layout
from .placement import place
from .plan import Plan
from .rules.split import Shape
from .strategies import Choice
from .twins import with_twins
from .wishes import wishes


def with_offload(graph: Graph, plan: Plan, full: bool, pins: Mapping[str, str]) -> tuple[Graph, Plan]:
    """The program and the plan with what the user asked to be offloaded.

    Raises:
        PlanError: a pin names nothing.
    """
    if not full and "offload" not in pins.values():
        return graph, plan
    assert graph.factored is not None
    return offloaded(graph, plan, asked_away(graph, graph.factored, full, pins))


def offloaded(graph: Graph, plan: Plan, names: frozenset[str]) -> tuple[Graph, Plan]:
    """The program in which these values are on the host between forward and backward, and the plan of that."""
    assert graph.factored is not None and plan.facts is not None
    layouts = {n.name: layout for n, layout in place(graph, graph.factored, plan).layouts.items()}
    names = frozenset(n for n in names if not layouts[n].partial)  # a sum that is not done has no copy of its own
    if not names:
        return graph, plan
    made, twins = moved_away(graph, names)
    assert made.factored is not None
    factored = extended(made.factored, made) or factor_graph(made, plan.resting)
    made = replace(made, factored=factored)
    nodes = {n.name: n for n in made.calls()}
    choices: dict[str, Mapping[str, Choice]] = dict(plan.choices)
    for twin, name in ((t, n) for t, n in twins.items() if t in nodes):
        copied = name in names
        choices[twin] = choices_of(factored.shapes[nodes[twin]], layouts[name]) if copied else plan.choices[name]
    own = {n.name: (n.meta.get("module", ""), str(n.target), n.meta.get("where", "")) for n in nodes.values()}
    told, asked = set(wishes(plan, plan.facts)), plan.facts.asked
    ordered = {n: choices[n] for n in nodes}
    notes = tuple(n for n in plan.notes if n not in told)
    plan = replace(plan, choices=ordered, modules={**own, **plan.modules}, notes=notes, offload=names, gap=None)
    return made, with_facts(plan, made, factored, **asked)


def moved_away(graph: Graph, names: frozenset[str]) -> tuple[Graph, dict[str, str]]:
    """A copy of the graph in which backward reads clones of these values, and {name of a copy: its original}."""
    factored = graph.factored or factor_graph(graph)
    families = Families(graph, factored)
    views = frozenset(n.name for v, family in families.of.items() if v.name in names for n in family)
    return with_twins(graph, views - names, names)


def choices_of(shape: Shape, layout: Layout) -> dict[str, Choice]:
    """What a clone does on each axis so that it reads and gives a layout."""
    out: dict[str, Choice] = {}
    assert shape.outputs[0] is not None
    for dims, laid in zip(shape.outputs[0], layout.dims, strict=True):
        for (leaf, _), factor in zip(dims, laid, strict=True):
            out |= dict.fromkeys(factor.axes, leaf)
    return out
