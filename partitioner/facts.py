"""What follows from a plan's decisions and its program, worked out once for reading: costs, traffic, names of dims.

    compute         seconds of every call, of an AdamW step on what rests, and of copies between layouts, and to and
                    from the host
    communication   seconds of every collective, one after another: nothing hidden behind computation

A plan that was read from its text has none of this until it is planned again on its program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .collective import largest_local
from .cost import call_seconds
from .dim_names import names_of_calls
from .factors import Factored
from .graph import Graph, tensor_operands
from .loops import loops
from .mesh import TIME
from .placement import Placement, place
from .plan import Plan
from .resting import rest_size, step_seconds
from .rules.split import Leaf
from .traffic import Moved, Traffic, local_seconds, moves_of, totals
from .twins import is_away
from .units import bytes_text


@dataclass(frozen=True)
class Peak:
    """The most bytes that a rank holds over a step (`memory.py`): which rank, at which call, of which module."""

    nbytes: int
    rank: int
    at: str
    module: str

    def __str__(self) -> str:
        where = f"{self.at} of {self.module}" if self.module else self.at
        return f"{bytes_text(self.nbytes)}, on rank {self.rank} at {where}"


@dataclass(frozen=True)
class Facts:
    """Attributes:
    seconds: per call its compute, on the busiest rank; a view's is 0.
    dims: per call the names of the dims that it may split, where they have one.
    moves: the reshards.
    traffic: the collectives, counted by (axes, kind).
    at_rest: per parameter the bytes that a rank holds of it between uses.
    whole: per parameter its bytes on one device.
    optimizer: per parameter the seconds of its optimizer step.
    loops: per loop over micro-batches the values that must be whole over the batch before it.
    asked: what the user asked for: "zero", "memory", "pin"; "pinned": per call that pins name, by any name, those pins.
    peak: what a rank holds at most; None where no `memory=` was asked for, then `memory_report()` tells.
    """

    seconds: Mapping[str, float]
    dims: Mapping[str, Mapping[Leaf, str]]
    moves: tuple[Moved, ...]
    traffic: Traffic
    at_rest: Mapping[str, float]
    whole: Mapping[str, float]
    optimizer: Mapping[str, float]
    loops: tuple[tuple[str, ...], ...] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    peak: Peak | None = None


def with_facts(plan: Plan, graph: Graph, factored: Factored, **asked: Any) -> Plan:
    """The plan with its facts, its seconds, and notes of what is gathered or repeated against the likely wish."""
    from .wishes import wishes

    placed = place(graph, factored, plan)
    moves = moves_of(graph, placed, plan)
    calls = _compute(graph, factored, placed, plan)
    at_rest, whole, optimizer = _parameters(graph, factored, plan)
    facts = Facts(
        calls, names_of_calls(graph, factored), moves, totals(moves), at_rest, whole, optimizer,
        loops(graph, placed, plan, moves), asked,
    )
    compute = sum(calls.values()) + sum(optimizer.values()) + local_seconds(moves)
    communication = sum(t.seconds for t in facts.traffic.values())
    made = replace(plan, seconds=(compute, communication), facts=facts)
    return replace(made, notes=(*plan.notes, *wishes(made, facts)))


def _compute(graph: Graph, factored: Factored, placed: Placement, plan: Plan) -> dict[str, float]:
    """Seconds of every call; calls of one kind that are split alike are worked out once."""
    known: dict[tuple[int, int], float] = {}
    found = {}
    for node in graph.calls():
        split = placed.splits[node]
        key = (id(factored.calls[node]), id(split))
        if key not in known:
            operands = [o.meta["val"] for o in tensor_operands(node)]
            known[key] = _seconds(node, factored, split, operands, plan)
        found[node.name] = known[key]
        if is_away(node.name, plan.offload):
            layout = placed.layouts[node]
            often = plan.micro_batches if TIME in layout.split_axes else 1
            nbytes = often * largest_local(layout, plan.grid) * node.meta["val"].element_size()
            found[node.name] = 2 * nbytes / plan.mesh.device.host_bandwidth
    return found


def _seconds(node: Any, factored: Factored, split: Any, operands: list, plan: Plan) -> float:
    """Of a whole step: a call that is split over micro-batches is made in each."""
    often = plan.micro_batches if plan.choices[node.name].get(TIME) is not None else 1
    return often * call_seconds(node, factored.shapes[node], split, operands, plan.grid)


def _parameters(graph: Graph, factored: Factored, plan: Plan) -> tuple[dict, dict, dict]:
    """Per parameter: bytes at rest, bytes whole, seconds of the optimizer step (none where there is no gradient)."""
    trained = {r.name for v, r in zip(graph.output_values, graph.outputs, strict=True) if r.kind == "grad" and v}
    at_rest, whole, optimizer = {}, {}, {}
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if role.kind != "param":
            continue
        name, layout = str(role.name), plan.resting[str(role.name)]
        elements, itemsize = largest_local(layout, plan.mesh), rest_size(graph, node, name)
        at_rest[name], whole[name] = elements * itemsize, itemsize * node.meta["val"].numel()
        if role.name in trained:
            optimizer[name] = float(step_seconds(graph, name, elements, itemsize, plan.mesh.device))
    return at_rest, whole, optimizer
