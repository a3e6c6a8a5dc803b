"""Decisions that the user gave: saved plans and pins, checked against the program before they are followed."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable

import torch.fx as fx

from .errors import PlanError
from .factors import Factored, factor_graph
from .graph import Graph, is_getitem, is_tensor, values_of, where
from .layout import Layout, Spot, parse
from .mesh import ROLES, Mesh
from .plan import Plan
from .rules.split import Shape
from .strategies import Choice, State, is_view, never_empty, output_state


def check_saved(graph: Graph, mesh: Mesh, plan: Plan) -> None:
    """Raises:
    PlanError: a saved plan holds what this program and mesh cannot do; all such lines at once.
    """
    mesh = plan.grid if plan.mesh.axes == mesh.axes else mesh
    if plan.grid.axes != mesh.axes:
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


def check_pins(graph: Graph, factored: Factored, pin: dict[str, str], mesh: Mesh) -> None:
    """Raises:
    PlanError: a pin names nothing, has another number of dims than all that it names, or cuts a dim too small.
    """
    params = {str(r.name): n for n, r in zip(graph.placeholders, graph.inputs, strict=True) if r.kind == "param"}
    taken: dict[fx.Node, list[Pin]] = {}
    for pattern, text in pin.items():
        mine = [n for name, n in params.items() if fnmatch.fnmatchcase(name, pattern)]
        calls = named_calls(graph, pattern)
        if not mine and not calls:
            known = [*params, *(n.name for n in graph.calls()), *_modules(graph)]
            near = difflib.get_close_matches(pattern, known, 3, 0.3) or known[-3:]
            raise PlanError(f"the pin {pattern!r} names no parameter and no call; there are, for example, {near}")
        for node in mine:
            pinned_state(text, "", factored.whole(node))
            for p, t in taken.setdefault(node, []):
                if _at_odds(t, text, factored.whole(node)):
                    raise PlanError(
                        f"{cannot(((p, t), (pattern, text)))}: a parameter rests in one way; drop one of them"
                    )
            taken[node].append((pattern, text))
        fitting = [n for n in calls if _fits(text, n)]
        if calls and not mine and not fitting:
            pinned_state(text, "", factored.whole(_first(calls[0])))
        for node in fitting:
            _check_cut(pattern, text, factored.whole(_first(node)), node, mesh)


def _check_cut(pattern: str, text: str, layout: Layout, node: fx.Node, mesh: Mesh) -> None:
    """Raises:
    PlanError: two axes that cut one factor would leave a rank of them empty.
    """
    by_spot: dict[Spot, list[str]] = {}
    for axis in mesh.names:
        spot = pinned_state(text, axis, layout)
        if isinstance(spot, tuple):
            by_spot.setdefault(spot, []).append(axis)
    for spot, axes in by_spot.items():
        size, ranks = layout.factor(spot).size, tuple(mesh.sizes[a] for a in axes)
        if len(axes) > 1 and not never_empty(size, ranks):
            raise PlanError(
                f"{cannot(((pattern, text),))}: {size} rows of {node.name}, which is {layout}, over {'+'.join(axes)} "
                f"leave some of {math.prod(ranks)} ranks empty; name fewer axes there"
            )


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


Pin = tuple[str, str]
"""A name or glob, and the layout text."""

Pins = dict[fx.Node, tuple[Pin, ...]]
"""Calls that pins name: each such pin."""


def pinned_calls(graph: Graph, pin: dict[str, str]) -> Pins:
    """The calls that pins speak of: those named, of as many dims as the text."""
    found: Pins = {}
    for pattern, text in pin.items():
        for node in named_calls(graph, pattern):
            if _fits(text, node):
                found[node] = (*found.get(node, ()), (pattern, text))
    return found


def named_calls(graph: Graph, pattern: str) -> list[fx.Node]:
    """The calls that a pin's name means; a name may be a glob.

    "op:mm", "op:*attention*"   calls of forward by their op; of backward, if forward has none
    "add_3"                     calls by name
    "layers.*.mlp"              what a module hands to others, where that is the name of no parameter and no call
    """
    calls = list(graph.calls())
    if pattern.startswith("op:"):
        mine = [n for n in calls if any(fnmatch.fnmatchcase(o, pattern[3:]) for o in _op_names(n))]
        return [n for n in mine if not n.meta.get("backward")] or mine
    mine = [n for n in calls if fnmatch.fnmatchcase(n.name, pattern)]
    params = [str(r.name) for r in graph.inputs if r.kind == "param"]
    if mine or any(fnmatch.fnmatchcase(p, pattern) for p in params):
        return mine
    return [n for name, own in _modules(graph).items() if fnmatch.fnmatchcase(name, pattern) for n in _handed_on(own)]


def _op_names(node: fx.Node) -> tuple[str, ...]:
    """`aten.mm.default` is also `aten.mm`, `mm.default` and `mm`."""
    whole = str(node.target)
    short = whole.partition(".")[2]
    return whole, whole.rpartition(".")[0], short, short.rpartition(".")[0]


def _modules(graph: Graph) -> dict[str, list[fx.Node]]:
    """Per module its own calls of forward."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.calls():
        if node.meta.get("module") and not node.meta.get("backward"):
            found.setdefault(node.meta["module"], []).append(node)
    return found


def _handed_on(calls: list[fx.Node]) -> list[fx.Node]:
    """Of a module's calls those that others read, but for mere views of what others made (its inputs, its weights)."""
    made: set[fx.Node] = set()
    for node in calls:
        if not is_view(node) or any(_producer(o) in made for o in node.all_input_nodes):
            made.add(node)
    own = set(calls)

    def read_elsewhere(node: fx.Node) -> bool:
        users = {u for v in values_of(node) if v is not None for u in v.users if not is_getitem(u)}
        return any(u not in own and not u.meta.get("backward") for u in users)

    return [n for n in calls if n in made and read_elsewhere(n)] or [n for n in calls if n in made]


def _producer(value: fx.Node) -> fx.Node:
    return value.args[0] if is_getitem(value) else value  # type: ignore[return-value]


def _first(node: fx.Node) -> fx.Node:
    """The output of a call that a pin speaks of."""
    return next(v for v in values_of(node) if v is not None)


def _fits(text: str, node: fx.Node) -> bool:
    value = _first(node)
    return is_tensor(value) and len(parse(text)[0]) == value.meta["val"].dim()


def pinned_choices(
    node: fx.Node, choices: list[Choice], shape: Shape, axis: str, factored: Factored, pins: Pins
) -> list[Choice]:
    """The choices of a pinned call that give its first output the state that the pins say.

    A data axis that a text leaves out splits what it may, as for parameters.

    Raises:
        PlanError: there is none; the message names the smallest set of pins in conflict.
    """
    whole = factored.whole(_first(node))

    def left(some: tuple[Pin, ...]) -> list[Choice]:
        wanted = [pinned_state(text, axis, whole) for _, text in some]
        wanted = [w for w in wanted if not (w is None and _is_data(axis))]
        return [c for c in choices if all(output_state(shape, 0, c) == w for w in wanted)]

    found = left(pins[node])
    if found:
        return found
    few = smallest(pins[node], lambda some: not left(some))
    said = f"{cannot(few)} on axis {axis}: {node.name} ({node.target}) at {where(node)}"
    if len(few) > 1:
        raise PlanError(f"{said} lies in one way; drop one of them")
    can = dict.fromkeys(str(_in_state(whole, output_state(shape, 0, c), axis)) for c in choices)
    raise PlanError(f"{said} has no such split; over {axis} it may lie as {', '.join(can)}")


def _in_state(whole: Layout, state: State, axis: str) -> Layout:
    if state is None:
        return whole
    return whole.with_partial(axis, state) if isinstance(state, str) else whole.with_axes(state, (axis,))


def cannot(pins: tuple[Pin, ...]) -> str:
    """The start of a message about pins that do not hold."""
    said = " and ".join(f"{pattern!r}: {text!r}" for pattern, text in pins)
    return f"the pin {said} cannot hold" if len(pins) == 1 else f"the pins {said} cannot hold together"


def _is_data(axis: str) -> bool:
    return ROLES.get(axis.partition(".")[0]) == "data"


def _at_odds(one: str, other: str, layout: Layout) -> bool:
    """Whether two texts say different things of an axis; a data axis left out says nothing."""
    axes = {a for t in (one, other) for dim in parse(t)[0] for some in dim for a in some}
    said = [(pinned_state(one, a, layout), pinned_state(other, a, layout), _is_data(a)) for a in axes]
    return any(a != b and not (data and None in (a, b)) for a, b, data in said)


def smallest(pins: tuple[Pin, ...], clash: Callable[[tuple[Pin, ...]], bool]) -> tuple[Pin, ...]:
    """Of pins that clash a set that still does, and none of which can be left out."""
    kept = pins
    for one in pins:
        rest = tuple(p for p in kept if p is not one)
        if rest and clash(rest):
            kept = rest
    return kept
