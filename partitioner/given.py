"""Decisions that the user gave: saved plans and pins, checked against the program before they are followed."""

from __future__ import annotations

import difflib
import fnmatch

import torch.fx as fx

from .errors import PlanError
from .factors import Factored, factor_graph
from .graph import Graph, is_tensor, values_of, where
from .layout import Layout, Spot, parse
from .mesh import Mesh
from .plan import Plan
from .rules.split import Shape
from .strategies import Choice, State, output_state


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


Pins = dict[fx.Node, tuple[tuple[str, str], ...]]
"""Calls that a pin names: (pattern, text) of each such pin."""


def pinned_calls(graph: Graph, pin: dict[str, str]) -> Pins:
    found: Pins = {}
    for node in graph.calls() if pin else ():
        named = tuple((p, t) for p, t in pin.items() if fnmatch.fnmatchcase(node.name, p))
        if named:
            found[node] = named
    return found


def pinned_choices(
    node: fx.Node, choices: list[Choice], shape: Shape, axis: str, factored: Factored, pins: Pins
) -> list[Choice]:
    """The choices of a pinned call that give its first output the state that the pin says.

    Raises:
        PlanError: there is none.
    """
    first = next(v for v in values_of(node) if v is not None)
    for pattern, text in pins[node]:
        wanted = pinned_state(text, axis, factored.whole(first))
        choices = [c for c in choices if output_state(shape, 0, c) == wanted]
        if not choices:
            raise PlanError(
                f"the pin {pattern!r}: {text!r} cannot hold on axis {axis}: {node.name} ({node.target}) at "
                f"{where(node)} has no such split"
            )
    return choices
