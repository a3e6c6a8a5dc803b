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

from .collective import Step
from .graph import Graph, as_key
from .layout import Layout
from .mesh import Mesh
from .plan import Plan


def reshard(x: Any, before: Layout, after: Layout) -> Any:
    """Marks, in a mesh-wide graph, a tensor that changes its layout."""
    raise TypeError("a mesh-wide graph is not run; its rank graphs are")


def primitive(x: Any, step: Any) -> Any:
    """Marks, in a mesh-wide graph, one primitive of a reshard (a `Step`)."""
    raise TypeError("a mesh-wide graph is not run; its rank graphs are")


def summed_wide(dtype: torch.dtype) -> bool:
    """Whether a sum over micro-batches is kept in float32 until the last."""
    return dtype.is_floating_point and dtype.itemsize < 4


@dataclass(frozen=True)
class Collect:
    """Something put together over micro-batches: the value `whole` from each one's `part`, by `step`.

    Attributes:
        fresh: nothing else reads a part or shares its memory, so that further ones may be added to it in place.
        inside: the segment itself adds what micro-batches after the first give to the sum so far.
    """

    part: str
    whole: str
    step: Step
    fresh: bool = False
    inside: bool = False


@dataclass(frozen=True)
class Segment:
    """A part of a program that runs at one go: once, or once for every micro-batch.

    Attributes:
        name: for messages and dumps, such as "phase 1".
        graph: its mesh-wide graph; its placeholders are `reads`, its outputs `gives`.
        timed: whether it runs for every micro-batch.
        reads, gives: names of values, as in the whole program.
        collects: what is put together of what it gives.
        rank_graph: its graph on a rank of the grid (`Plan.grid`): at a micro-batch, where it is timed.
        adding_graph: the same at a micro-batch after the first: it reads the `sums` so far after `reads`, and gives
            each in the place of its part, which has been added to it.
        phase: a loop over micro-batches where it is odd, between two loops where it is even.
        stage, part: of a pipeline: its virtual stage, and in a loop "F", "B", "W" or "BW", else "".
    """

    name: str
    graph: Graph
    timed: bool
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    collects: tuple[Collect, ...]
    rank_graph: Callable[[int], fx.Graph]
    adding_graph: Callable[[int], fx.Graph]
    phase: int = 0
    stage: int | None = None
    part: str = ""

    @property
    def sums(self) -> tuple[Collect, ...]:
        """What it adds to itself."""
        return tuple(c for c in self.collects if c.inside)

    def graph_at(self, micro_batch: int | None, world: int, rank: int) -> fx.Graph:
        """What a rank of `world` runs for a micro-batch (None: once)."""
        graph = self.adding_graph if micro_batch and self.sums else self.rank_graph
        return graph((micro_batch or 0) * world + rank)

    def alike(self, count: int, world: int, rank: int) -> bool:
        """Whether nothing in it depends on where a micro-batch lies; the last of `count` may still be smaller."""
        return count > 1 and as_key(self.rank_graph(rank)) == as_key(self.rank_graph(world + rank))

    def word(self, micro_batch: int | None) -> str:
        """What it is called at a micro-batch: where there is a schedule, as there ("2F0")."""
        if self.part:
            return f"{self.stage}{self.part}{micro_batch}"
        return self.name if micro_batch is None else f"{self.name} micro-batch {micro_batch}"


@dataclass(frozen=True)
class Act:
    """One thing that a rank does, for a micro-batch (None: for all, once).

    Attributes:
        kind: "run" a segment, "send" values to a rank of the pipeline axis, "receive" them from one, or "pause" an
            "autograd" program between forward and backward.
        segment: its number.
        values: names of what is sent.
        peer: the index on the pipeline axis of the other end.
    """

    kind: str = "run"
    segment: int = -1
    micro_batch: int | None = None
    values: tuple[str, ...] = ()
    peer: int = -1


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
        segments: what the ranks run in the place of one graph where there are micro-batches; () where there are none.
        acts: per rank what it does, in order, where there are segments.
        timed: names of the values that differ from micro-batch to micro-batch.
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
    segments: tuple[Segment, ...] = ()
    acts: Callable[[int], tuple[Act, ...]] = field(default=lambda rank: (), repr=False)
    timed: frozenset[str] = frozenset()

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        return self.graph.constants
