"""What passes hand on: a mesh-wide graph with the layout of every tensor in it.

A pass is a function from a `Draft` to a `Draft`; it may edit the graph in place and must give every tensor node it
makes a layout. `laws.check` runs after each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.fx as fx

from ..partitioner.buckets import Bucket
from ..partitioner.factors import Factored, factor_graph
from ..partitioner.graph import Graph, is_tensor
from ..partitioner.layout import Layout
from ..partitioner.mesh import Mesh
from ..partitioner.placement import Placement, place
from ..partitioner.plan import Plan
from ..partitioner.program import primitive, reshard
from ..partitioner.rules.split import Split


@dataclass
class Draft:
    """A program in the making.

    Attributes:
        placement: per call how it is split (calls that a pass adds, primitives, are not), per tensor node its layout.
        established: the laws that hold by now, by name.
        buckets: of reshards that may travel with others, in which bucket.
    """

    graph: Graph
    plan: Plan
    form: str
    factored: Factored
    placement: Placement
    established: tuple[str, ...] = ()
    buckets: dict[fx.Node, Bucket] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """With micro-batches as an axis in time; its ranks are those of every micro-batch."""
        return self.plan.grid

    @property
    def splits(self) -> dict[fx.Node, Split]:
        return self.placement.splits

    @property
    def layouts(self) -> dict[fx.Node, Layout]:
        return self.placement.layouts


def start(graph: Graph, plan: Plan, form: str, local_inputs: bool) -> Draft:
    """The draft of a fresh graph: every call split as the plan says, every tensor with the layout that follows."""
    factored = graph.factored or factor_graph(graph)
    draft = Draft(graph, plan, form, factored, place(graph, factored, plan))
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if role.kind == "input" and local_inputs and is_tensor(node):
            draft.layouts[node] = _batch_split(draft, node, graph.batch[int(role.name)])
    return draft


def _batch_split(draft: Draft, node: fx.Node, dim: int | None) -> Layout:
    """An input of which each data rank passes its own part: its batch dim is split over the data axes."""
    layout = draft.factored.whole(node)
    axes = tuple(a for a in draft.mesh.names if draft.mesh.role(a) == "data" and draft.mesh.sizes[a] > 1)
    return layout if dim is None or not layout.dims[dim] else layout.with_axes((dim, 0), axes)


def resharded(node: fx.Node) -> fx.Node:
    """What the steps that lead to a node reshard."""
    while node.target in (reshard, primitive):
        node = node.args[0]  # type: ignore[assignment]
    return node
