"""Decisions that the user gave: saved plans and pins, checked against the program before they are followed."""

from __future__ import annotations

import difflib
import fnmatch

from .errors import PlanError
from .factors import Factored, factor_graph
from .graph import Graph, is_tensor
from .layout import Layout, Spot, parse
from .mesh import Mesh
from .plan import Plan
from .strategies import State


def check_saved(graph: Graph, mesh: Mesh, plan: Plan) -> None:
    """Raises:
    PlanError: a saved plan holds what this program and mesh cannot do; all such lines at once.
    """
    if plan.mesh.axes != mesh.axes:
        raise PlanError(f"the plan was made for the mesh {plan.mesh}, this is {mesh}; plan again without plan=")
    factored, faults = factor_graph(graph), []
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if role.kind != "param":
            continue
        layout, whole = plan.resting.get(str(role.name)), factored.whole(node)
        if layout is None or layout.unsplit() != whole or not layout.split_axes <= set(mesh.names):
            faults.append(f"{role.name} is {whole} and would rest as {layout}")
    for node in graph.calls():
        shape = factored.shapes[node]
        for axis, choice in plan.choices[node.name].items():
            if isinstance(choice, int):
                legal = 0 <= choice < len(shape.rule.linear)
            else:
                legal = choice is None or (choice in factored.atoms[node] and choice[0] not in shape.rule.whole)
            if not legal or axis not in mesh.names:
                faults.append(f"{node.name} cannot do {choice} on {axis}")
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise PlanError(f"the plan does not fit the program: {'; '.join(faults[:3])}{more}; plan again")


def check_pins(graph: Graph, factored: Factored, pin: dict[str, str]) -> None:
    """Raises:
    PlanError: a pin matches neither a parameter nor a call, or has another number of dims.
    """
    values = {n.name: n for n in graph.calls()}
    values |= {str(r.name): n for n, r in zip(graph.placeholders, graph.inputs, strict=True) if r.kind == "param"}
    for pattern, text in pin.items():
        named = [n for name, n in values.items() if fnmatch.fnmatchcase(name, pattern)]
        if not named:
            near = difflib.get_close_matches(pattern, values, 3, 0.3) or list(values)[-3:]
            raise PlanError(f"the pin {pattern!r} names no parameter and no call; there are, for example, {near}")
        for node in named:
            if is_tensor(node) and node in factored.dims:
                pinned_state(text, "", factored.whole(node))


def pinned_state(text: str, axis: str, layout: Layout) -> State:
    """What a pin's text says about one axis: the factor it splits, "sum", or None."""
    dims, partial = parse(text)
    if len(dims) != len(layout.dims):
        raise PlanError(
            f"the pin {text!r} has {len(dims)} dims, the tensor has {len(layout.dims)}: {layout}; write one entry a dim"
        )
    if axis in dict(partial):
        return dict(partial)[axis]
    for i, dim in enumerate(dims):
        for j, axes in enumerate(dim):
            if axis in axes or axis.partition(".")[0] in axes:
                spot: Spot = (i, j if len(dim) == len(layout.dims[i]) else 0)
                return spot
    return None
