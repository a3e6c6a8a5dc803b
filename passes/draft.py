"""What passes hand on: a mesh-wide graph with the layout of every tensor in it.

A pass is a function from a `Draft` to a `Draft`; it may edit the graph in place and must give every tensor node it
makes a layout. `laws.check` runs after each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.fx as fx

from ..partitioner.factors import Factored, factor_graph
from ..partitioner.graph import Graph, is_tensor, values_of
from ..partitioner.layout import Layout
from ..partitioner.mesh import Mesh
from ..partitioner.plan import Plan
from ..partitioner.planner import split_of
from ..partitioner.rules.split import Split


@dataclass
class Draft:
    """A program in the making.

    Attributes:
        splits: per call how it is split; calls that a pass adds (primitives) have none.
        layouts: per tensor node the layout it has.
        established: the laws that hold by now, by name.
    """

    graph: Graph
    plan: Plan
    form: str
    factored: Factored
    splits: dict[fx.Node, Split] = field(default_factory=dict)
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    established: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh


def start(graph: Graph, plan: Plan, form: str, local_inputs: bool) -> Draft:
    """The draft of a fresh graph: every call split as the plan says, every tensor with the layout that follows."""
    factored = graph.factored or factor_graph(graph)
    draft = Draft(graph, plan, form, factored)
    for node in graph.calls():
        split = split_of(factored, plan.mesh, node, plan.choices.get(node.name, {}))
        draft.splits[node] = split
        for i, value in enumerate(values_of(node)):
            if value is not None and is_tensor(value):
                layout = split.output_layout(i)
                draft.layouts[value] = layout if layout is not None else factored.whole(value)
    for node in graph.fx.nodes:
        if node.op == "get_attr":
            draft.layouts[node] = factored.whole(node)
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if not is_tensor(node):
            continue
        if role.kind == "param":
            draft.layouts[node] = plan.resting[str(role.name)]
        elif role.kind == "input" and local_inputs:
            draft.layouts[node] = _batch_split(draft, node, graph.batch[int(role.name)])
        else:
            draft.layouts[node] = factored.whole(node)
    return draft


def _batch_split(draft: Draft, node: fx.Node, dim: int | None) -> Layout:
    """An input of which each data rank passes its own part: its batch dim is split over the data axes."""
    layout = draft.factored.whole(node)
    axes = tuple(a for a in draft.mesh.names if draft.mesh.role(a) == "data" and draft.mesh.sizes[a] > 1)
    return layout if dim is None or not layout.dims[dim] else layout.with_axes((dim, 0), axes)
