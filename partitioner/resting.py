"""How parameters rest between uses: the ZeRO stages as layouts, one variable of the planner for each parameter.

    stage 0   whole on every data rank
    stage 1,2 split over the data ranks; gathered once a step, at the first use, and kept until the last
    stage 3   split over the data ranks; gathered for forward and again for backward (Rajbhandari et al., "ZeRO", 2020)

Gradients and optimizer state rest as the parameter does. In all stages a gradient is reduced straight to where it
rests: an all-reduce at stage 0, a reduce-scatter otherwise. With `dp_replicate` and `dp_shard` axes only the second
splits (HSDP). A parameter with no factor large enough rests whole.

    bytes(layout) = weight + gradient (4 + 4 in float32) + 8 of moments an element, + 2 of a working copy in 16 bits

    seconds(layout) = 28 bytes a local element / memory bandwidth    (AdamW in fp32 reads p, g, m, v, writes p, m, v)
                      of the host where the state is away, + gradient down and parameter up / bandwidth of its link
"""

from __future__ import annotations

import fnmatch
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.fx as fx

from .collective import largest_local
from .compute_cost import compute_seconds
from .cost import nbytes
from .errors import PlanError
from .factors import Factored
from .given import pinned_state
from .graph import Graph
from .hardware import DEVICES, Device, host_bandwidth
from .layout import Factor, Layout, Spot, parse
from .mesh import Mesh
from .states import Prices, States, layout_states
from .strategies import Marked, never_empty

if TYPE_CHECKING:
    from .planner import Options

STEP_BYTES = 28
"""Bytes a parameter that an fp32 AdamW step moves."""

MOMENTS = 8
"""Bytes of optimizer state an element: the two fp32 moments of Adam (ZeRO, section 3.1)."""

ORDERED_AXES = 3
"""Meshes of at most so many axes try every order of the axes on one factor; larger ones the mesh's, data axes last."""


@dataclass(eq=False)
class Resting:
    """The ways a parameter may rest. `seconds`: of the optimizer step; `nbytes`: of it, its gradient, its moments."""

    layouts: list[Layout]
    states: States
    seconds: np.ndarray
    nbytes: np.ndarray


def rest_size(graph: Graph, node: fx.Node, name: str) -> int:
    """Bytes an element of a parameter at rest."""
    return graph.masters.get(name, node.meta["val"].dtype).itemsize


def state_size(graph: Graph, node: fx.Node, name: str, trained: bool) -> int:
    """Bytes an element at rest of a parameter, its gradient, its moments, and of its working copy in another dtype."""
    rests, works = rest_size(graph, node, name), node.meta["val"].element_size()
    moments = 0 if name in graph.away else MOMENTS
    return (works if rests != works else 0) + (2 * rests + moments if trained else rests)


def step_seconds(graph: Graph, name: str, elements: Any, itemsize: int, device: Device) -> Any:
    """Seconds of the optimizer's step on so many elements of a trained parameter, which rest in `itemsize` bytes."""
    if name not in graph.away:
        return compute_seconds(0.0, STEP_BYTES * elements, "float32", device)
    copied = 2 * itemsize * elements / host_bandwidth(device)
    return copied + compute_seconds(0.0, STEP_BYTES * elements, "float32", DEVICES["cpu"])


class Rests:
    """Makes the `Resting` of parameters; equal ones share it."""

    def __init__(
        self,
        graph: Graph,
        factored: Factored,
        prices: Prices,
        options: Options,
        marked: Marked,
        stage: int | str,
    ):
        self.graph, self.factored, self.prices, self.options, self.marked = graph, factored, prices, options, marked
        self.given = dict(options.resting or {})
        self.mesh, self.stage = prices.mesh, stage
        self.shard = shard_axes(self.mesh) if stage != 0 else ()
        self._made: dict[Any, Resting] = {}

    def of(self, node: fx.Node, name: str, trained: bool) -> Resting:
        whole = self.factored.whole(node)
        pins = tuple((p, t) for p, t in self.options.pin.items() if fnmatch.fnmatchcase(name, p))
        given = self.given.get(name)
        experts = tuple(a in self.marked.experts for d in self.factored.dims[node] for a in d)
        rests, works = rest_size(self.graph, node, name), node.meta["val"].element_size()
        key = (whole, rests, works, experts, pins, given, trained, name in self.graph.away)
        if key not in self._made:
            if given is not None:
                layouts = [refined(given, whole)]
            else:
                layouts = self._pinned(name, whole, self._stage(self._layouts(whole, experts)), pins)
            elements = np.array([largest_local(x, self.mesh) for x in layouts], dtype=float)
            # bytes at rest weigh little against time, enough to prefer the smaller of two equal plans
            if trained:
                seconds = step_seconds(self.graph, name, elements, rests, self.mesh.device)
            else:
                moved: np.ndarray = elements * (1e-2 * works)
                seconds = compute_seconds(0.0, moved, "float32", self.mesh.device)
            nbytes = elements * state_size(self.graph, node, name, trained)
            self._made[key] = Resting(layouts, layout_states(layouts, self.prices.names), seconds, nbytes)
        return self._made[key]

    def _layouts(self, whole: Layout, experts: tuple[bool, ...]) -> list[Layout]:
        """Every way that leaves no rank empty."""
        spots: list[Spot] = [(i, j) for i, d in enumerate(whole.dims) for j in range(len(d))]
        options = [self._spots(axis, spots, experts) for axis in self.prices.names]
        found: dict[Layout, None] = {}
        for where in itertools.product(*options):
            by_spot: dict[Spot, list[str]] = {}
            for axis, spot in zip(self.prices.names, where, strict=True):
                if spot is not None:
                    by_spot.setdefault(spot, []).append(axis)
            for orders in itertools.product(*(self._orders(axes) for axes in by_spot.values())):
                layout = whole
                for spot, axes in zip(by_spot, orders, strict=True):
                    if not never_empty(whole.factor(spot).size, tuple(self.mesh.sizes[a] for a in axes)):
                        break
                    layout = layout.with_axes(spot, axes)
                else:
                    found[layout] = None
        return list(found)

    def _spots(self, axis: str, spots: list[Spot], experts: tuple[bool, ...]) -> list[Spot | None]:
        role = self.mesh.role(axis)
        if role == "expert":
            spots = [s for s, expert in zip(spots, experts, strict=True) if expert]
        elif role == "context" or (role == "data" and axis not in self.shard):
            spots = []
        return [None, *spots]

    def _orders(self, axes: list[str]) -> list[tuple[str, ...]]:
        if len(self.prices.names) <= ORDERED_AXES:
            return list(itertools.permutations(axes))
        return [tuple(sorted(axes, key=lambda a: self.mesh.role(a) == "data"))]

    def _stage(self, layouts: list[Layout]) -> list[Layout]:
        """At a stage asked for, the layouts that use most of the data axes."""
        if self.stage == "auto" or not self.shard:
            return layouts
        used = [len(x.split_axes & set(self.shard)) for x in layouts]
        return [x for x, n in zip(layouts, used, strict=True) if n == max(used)]

    def _pinned(self, name: str, whole: Layout, layouts: list[Layout], pins: tuple) -> list[Layout]:
        for pattern, text in pins:
            kept = [x for x in layouts if self._agrees(x, text, whole)]
            if not kept:
                legal = " or ".join(map(str, layouts[:6]))
                raise PlanError(
                    f"the pin {pattern!r}: {text!r} cannot hold for {name} of shape {whole.shape} on mesh {self.mesh}: "
                    f"legal there are {legal}"
                )
            layouts = kept
        return layouts

    def _agrees(self, layout: Layout, text: str, whole: Layout) -> bool:
        named = {a for dim in parse(text)[0] for marks in dim for a in marks}
        for axis in self.prices.names:
            if self.mesh.role(axis) == "data" and not {axis, axis.partition(".")[0]} & named:
                continue
            if layout.spot_of(axis) != pinned_state(text, axis, whole):
                return False
        return True


def stage_asked(graph: Graph, mesh: Mesh, options: Options) -> int | str:
    """The ZeRO stage as asked.

    Raises:
        PlanError: the stage is none of 0, 1, 2, 3, "auto".
    """
    if options.zero not in (0, 1, 2, 3, "auto"):
        raise PlanError(f"zero={options.zero!r}: the ZeRO stage is 0, 1, 2, 3 or 'auto'")
    return options.zero


def stage_of(resting: dict[str, Layout], graph: Graph, mesh: Mesh, again: frozenset[str]) -> int:
    """The ZeRO stage that layouts amount to; 3 where every sharded parameter is gathered again for backward."""
    axes = set(shard_axes(mesh))
    inputs = zip(graph.placeholders, graph.inputs, strict=True)
    sharded = [n.name for n, r in inputs if r.kind == "param" and resting[str(r.name)].split_axes & axes]
    return 0 if not sharded else 3 if again.issuperset(sharded) else 1


def small_notes(resting: dict[str, Layout], graph: Graph, mesh: Mesh, stage: int | str) -> list[str]:
    """What a stage asked for could not do."""
    axes = set(shard_axes(mesh))
    if stage in (0, "auto"):
        return []
    if not axes:
        return [f"zero={stage} has no data axis to shard over"]
    kept = {n for n, x in resting.items() if not x.split_axes & axes}
    if not kept:
        return []
    inputs = zip(graph.placeholders, graph.inputs, strict=True)
    total = sum(nbytes(n.meta["val"]) for n, r in inputs if r.kind == "param" and r.name in kept)
    first = next(n for n in resting if n in kept)
    return [f"zero={stage}: {len(kept)} parameters too small to shard rest whole ({total} bytes), such as {first}"]


def shard_axes(mesh: Mesh) -> tuple[str, ...]:
    """The data axes that ZeRO shards over."""
    data = [a for a in mesh.names if mesh.role(a) == "data" and mesh.sizes[a] > 1]
    return tuple(a for a in data if a != "dp_replicate" or len(data) == 1 and mesh.names == ("dp_replicate",))


def refined(layout: Layout, finer: Layout) -> Layout:
    """`layout` written with the factors of `finer`, a whole layout of the same tensor cut at least as finely.

    A factor's axes go to its major part, which must divide evenly for the pieces to be the same.

    Raises:
        PlanError: they cannot be the same.
    """
    dims = []
    for dim, parts in zip(layout.dims, finer.dims, strict=True):
        left, out = list(parts), []
        for f in dim:
            size, mine = 1, []
            while size < f.size and left:
                mine.append(left.pop(0))
                size *= mine[-1].size
            if size != f.size or (f.axes and not mine):
                raise PlanError(f"a parameter rests as {layout}, which cannot be written with the factors of {finer}")
            out += [Factor(mine[0].size, f.axes), *mine[1:]] if mine else []
        dims.append((*out, *left))
    return Layout(tuple(dims))
