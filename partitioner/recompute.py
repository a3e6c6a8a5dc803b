"""Recompute: what backward makes again in the place of keeping it, decided after layouts, and written into the graph.

    keep.py      what the user asked: "full", pins
    twins.py     the copies of calls in backward; every later stage sees them as calls like others
    again        a value that is kept, but needed in another layout, is not kept in that one too: backward reshards it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .facts import with_facts
from .graph import Graph
from .keep import asked_again
from .placement import place
from .plan import Plan
from .reshards import reshards
from .twins import with_twins
from .wishes import wishes


def with_recompute(graph: Graph, plan: Plan, recompute: str, pins: Mapping[str, str]) -> tuple[Graph, Plan]:
    """The program and the plan with what the user asked to be made again.

    Raises:
        PlanError: a pin names nothing.
    """
    assert graph.factored is not None
    names = asked_again(graph, graph.factored, recompute, pins)
    return made_again(graph, plan, names) if names else (graph, plan)


def made_again(graph: Graph, plan: Plan, names: frozenset[str]) -> tuple[Graph, Plan]:
    """The program in which backward makes these values of forward again, and the plan of that."""
    graph, twins = with_twins(graph, names)
    if not twins:
        return graph, plan
    assert graph.factored is not None and plan.facts is not None
    calls = {n.name for n in graph.calls()}
    choices = {**plan.choices, **{t: plan.choices[n] for t, n in twins.items() if t in calls}}
    modules = {**plan.modules, **{t: plan.modules[n] for t, n in twins.items() if n in plan.modules}}
    told = set(wishes(plan, plan.facts))
    notes = tuple(n for n in plan.notes if n not in told)
    ordered = {n.name: choices[n.name] for n in graph.calls()}
    made = replace(
        plan, choices=ordered, modules=modules, notes=notes, recompute=frozenset(twins.values()) & names, gap=None
    )
    made = replace(made, again=plan.again | _copies(graph, made))
    return graph, with_facts(made, graph, graph.factored, **plan.facts.asked)


def _copies(graph: Graph, plan: Plan) -> set[str]:
    """Values of forward whose copy in another layout would be kept from forward to backward."""
    assert graph.factored is not None
    placed = place(graph, graph.factored, plan)
    return {
        one.value.name
        for one in reshards(graph, placed, plan)
        if one.value.op == "call_function"
        and not one.value.meta.get("backward")
        and not one.backward
        and any(reader.meta.get("backward") for reader, _ in one.reads)
    }


