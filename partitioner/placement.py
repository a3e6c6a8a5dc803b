"""Where a plan puts every tensor: how each call is split, what it needs, and the layout that each tensor has.

Calls of one shape that make the same choices share one `Split`, and equal layouts are one object: a deep model has a
few hundred of them, and what is worked out for one layer is known for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.fx as fx

from .factors import Factored
from .graph import Graph, is_tensor, values_of
from .layout import Layout
from .mesh import Mesh
from .plan import Plan
from .rules.split import Leaf, Split
from .strategies import Choice


@dataclass
class Placement:
    """Attributes:
    splits: per call how it is split.
    needs: per call the layout it needs of each tensor operand.
    layouts: per tensor node the layout it has.
    """

    splits: dict[fx.Node, Split] = field(default_factory=dict)
    needs: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)


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


def place(graph: Graph, factored: Factored, plan: Plan) -> Placement:
    """The placement of a fresh graph: inputs whole, parameters at rest, every call as the plan says."""
    out, calls = Placement(), _Calls(factored, plan)
    for node in graph.calls():
        known = calls.of(node, plan.choices.get(node.name, {}))
        out.splits[node], out.needs[node] = known.split, known.needs
        for value, layout in zip(values_of(node), known.gives, strict=True):
            if value is not None and is_tensor(value):
                out.layouts[value] = layout if layout is not None else calls.one(factored.whole(value))
    for node in graph.fx.nodes:
        if node.op == "get_attr":
            out.layouts[node] = calls.one(factored.whole(node))
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if is_tensor(node):
            resting = plan.resting[str(role.name)] if role.kind == "param" else factored.whole(node)
            out.layouts[node] = calls.one(resting)
    return out


class _Known(NamedTuple):
    split: Split
    needs: tuple[Layout, ...]
    gives: tuple[Layout | None, ...]


class _Calls:
    """The splits and layouts of calls, by shape and choices."""

    def __init__(self, factored: Factored, plan: Plan):
        self.factored, self.mesh = factored, plan.grid
        self._known: dict[Any, _Known] = {}
        self._layouts: dict[Layout, Layout] = {}

    def one(self, layout: Layout) -> Layout:
        """The one object that stands for all equal layouts."""
        return self._layouts.setdefault(layout, layout)

    def of(self, node: fx.Node, choices: Mapping[str, Choice]) -> _Known:
        shape = self.factored.shapes[node]
        key = (id(shape), tuple([choices.get(a) for a in self.mesh.names]))
        found = self._known.get(key)
        if found is None:
            split = split_of(self.factored, self.mesh, node, choices)
            needs = tuple(self.one(split.input_layout(k)) for k in range(len(shape.inputs)))
            gives = [split.output_layout(i) for i in range(len(shape.outputs))]
            found = self._known[key] = _Known(split, needs, tuple(None if x is None else self.one(x) for x in gives))
        return found
