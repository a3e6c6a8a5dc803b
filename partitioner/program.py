"""The program: what passes make of a graph and a plan, and what a runtime runs.

A `Program` is one mesh-wide graph whose nodes are the local ops, the primitives between layouts and their order; and
`rank_graph(rank)` is that graph in plain numbers for one rank. Its form is "step" (forward, loss and backward at one
go), "forward" (no backward), or "autograd" (a pause between forward and backward, for a loss outside).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from .graph import Graph
from .layout import Layout
from .mesh import Mesh
from .plan import Plan


def reshard(x: Any, before: Layout, after: Layout) -> Any:
    """Marks, in a mesh-wide graph, a tensor that changes its layout."""
    raise TypeError("a mesh-wide graph is not run; its rank graphs are")


def primitive(x: Any, step: Any) -> Any:
    """Marks, in a mesh-wide graph, one primitive of a reshard (a `Step`)."""
    raise TypeError("a mesh-wide graph is not run; its rank graphs are")


@dataclass(frozen=True)
class Program:
    """A lowered program.

    Attributes:
        plan: the plan it follows.
        captured: the program as it was captured, for one device.
        graph: the mesh-wide graph and the roles of its inputs and outputs.
        layouts: of every tensor of the mesh-wide graph, by node name.
        input_layouts: per input its layout; None for what is no tensor.
        output_layouts: per output its layout; None for no gradient.
        paused: indices of the outputs handed out at the pause of an "autograd" program, in order.
        tangents: of those outputs, the indices that backward wants a gradient of, in order.
        rank_graph: the graph of one rank.
        dumps: makes the text of the program after each pass, by the pass' name.
        actions: per rank what the schedule walks; one forward and backward until there are stages.
    """

    plan: Plan
    captured: Graph
    graph: Graph
    form: str
    layouts: Mapping[str, Layout]
    input_layouts: tuple[Layout | None, ...]
    output_layouts: tuple[Layout | None, ...]
    rank_graph: Callable[[int], fx.Graph]
    paused: tuple[int, ...] = ()
    tangents: tuple[int, ...] = ()
    dumps: Callable[[], Mapping[str, str]] = field(default=dict, repr=False)
    actions: tuple[tuple[str, ...], ...] = (("F0", "B0"),)

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        return self.graph.constants
