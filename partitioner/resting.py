"""How parameters rest between uses: the ZeRO stages as layouts.

    stage 0   whole on every data rank
    stage 1,2 split over the data ranks; gathered once a step, at the first use, and kept until the last
    stage 3   split over the data ranks; gathered for forward and again for backward (Rajbhandari et al., "ZeRO", 2020)

Gradients and optimizer state rest as the parameter does. In all stages a gradient is reduced straight to where it
rests: an all-reduce at stage 0, a reduce-scatter otherwise. With `dp_replicate` and `dp_shard` axes only the second
splits (HSDP). A parameter with no factor large enough rests whole.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from .cost import nbytes
from .errors import PlanError
from .graph import Graph
from .layout import Factor, Layout, Spot, local_shape, parse
from .mesh import Mesh
from .strategies import never_empty

if TYPE_CHECKING:
    from .planner import Options

OPTIMIZER_BYTES = 16
"""Bytes a parameter of fp32 training with Adam: 4 weight, 4 gradient, 8 state (ZeRO, section 3.1)."""


def resting_layouts(
    working: dict[str, Layout], graph: Graph, mesh: Mesh, options: Options
) -> tuple[int, dict[str, Layout], list[str]]:
    """(ZeRO stage, {parameter: layout}, notes) from the working layouts that the planner chose.

    Raises:
        PlanError: the stage is none of 0, 1, 2, 3, "auto", or a pin on a data axis cannot hold.
    """
    if options.zero not in (0, 1, 2, 3, "auto"):
        raise PlanError(f"zero={options.zero!r}: the ZeRO stage is 0, 1, 2, 3 or 'auto'")
    if options.resting is not None:
        stage = options.zero if isinstance(options.zero, int) else 0
        return stage, {n: refined(options.resting[n], layout.unsplit()) for n, layout in working.items()}, []
    axes = shard_axes(mesh)
    stage = options.zero if isinstance(options.zero, int) else _fitting_stage(working, mesh, options)
    if not axes:
        _require_fit(working, graph, mesh, options)
        asked = stage and options.zero != "auto"
        return 0, dict(working), [f"zero={stage} has no data axis to shard over"] if asked else []
    out, kept = {}, []
    for name, layout in working.items():
        pinned = next((t for p, t in options.pin.items() if fnmatch.fnmatchcase(name, p)), None)
        out[name] = _pin(name, layout, pinned, axes, mesh) if pinned else layout
        if stage and not out[name].split_axes & set(axes):
            out[name] = _sharded(layout, axes, mesh)
            if out[name] == layout:
                kept.append(name)
    notes = []
    if kept and stage:
        inputs = zip(graph.placeholders, graph.inputs, strict=True)
        total = sum(nbytes(n.meta["val"]) for n, r in inputs if r.name in kept)
        small = f"{len(kept)} parameters too small to shard rest whole ({total} bytes), such as {kept[0]}"
        notes.append(f"zero={stage}: {small}")
    _require_fit(out, graph, mesh, options)
    return stage, out, notes


def _require_fit(resting: dict[str, Layout], graph: Graph, mesh: Mesh, options: Options) -> None:
    """Raises:
    PlanError: what rests is more than the memory asked for, before any activation.
    """
    inputs = zip(graph.placeholders, graph.inputs, strict=True)
    size = {str(r.name): n.meta["val"].element_size() for n, r in inputs if r.kind == "param"}
    need = sum(2 * size[n] * _product(local_shape(layout, mesh, 0)) for n, layout in resting.items())
    if options.memory is not None and need > options.memory:
        more = "" if options.zero in ("auto", 3) or not shard_axes(mesh) else "zero=3, "
        raise PlanError(
            f"memory={options.memory} bytes a device cannot hold this model on mesh {mesh}: parameters and gradients "
            f"at rest take {need} bytes. Give {more}more ranks to dp or tp, or more memory"
        )


def shard_axes(mesh: Mesh) -> tuple[str, ...]:
    """The data axes that ZeRO shards over."""
    data = [a for a in mesh.names if mesh.role(a) == "data" and mesh.sizes[a] > 1]
    return tuple(a for a in data if a != "dp_replicate" or len(data) == 1 and mesh.names == ("dp_replicate",))


def _sharded(layout: Layout, axes: tuple[str, ...], mesh: Mesh) -> Layout:
    """The layout also split over the data axes, on the first factor that divides evenly, else the largest."""
    sizes = tuple(mesh.sizes[a] for a in axes)
    ranks = 1
    for n in sizes:
        ranks *= n
    spots: list[tuple[bool, int, Spot]] = []
    for i, dim in enumerate(layout.dims):
        for j, f in enumerate(dim):
            before = tuple(mesh.sizes[a] for a in f.axes)
            if never_empty(f.size, (*before, *sizes)):
                even = f.size % (ranks * max(1, _product(before))) == 0
                spots.append((even, f.size, (i, j)))
    if not spots:
        return layout
    evens = [s for s in spots if s[0]]
    spot = evens[0][2] if evens else max(spots, key=lambda s: s[1])[2]
    return layout.with_axes(spot, (*layout.factor(spot).axes, *axes))


def _product(numbers: tuple[int, ...]) -> int:
    out = 1
    for n in numbers:
        out *= n
    return out


def _pin(name: str, layout: Layout, text: str, axes: tuple[str, ...], mesh: Mesh) -> Layout:
    """The data axes of a parameter's pin."""
    dims, _ = parse(text)
    for i, dim in enumerate(dims):
        for j, marks in enumerate(dim):
            for a in (m for m in marks if m in axes):
                spot = (i, j if len(dim) == len(layout.dims[i]) else 0)
                wanted = (*layout.factor(spot).axes, a)
                if not never_empty(layout.factor(spot).size, tuple(mesh.sizes[x] for x in wanted)):
                    raise PlanError(
                        f"the pin {text!r} cannot hold for {name}: {layout.factor(spot)} over {a}={mesh.sizes[a]} "
                        f"leaves a rank empty"
                    )
                layout = layout.with_axes(spot, wanted)
    return layout


def _fitting_stage(working: dict[str, Layout], mesh: Mesh, options: Options) -> int:
    """The least stage whose parameters, gradients and optimizer state leave half of the memory for activations."""
    if options.memory is None:
        return 0
    elements = sum(_product(local_shape(layout, mesh, 0)) for layout in working.values())
    if elements * OPTIMIZER_BYTES <= options.memory / 2:
        return 0
    shards = _product(tuple(mesh.sizes[a] for a in shard_axes(mesh)))
    return 1 if elements * (4 + 12 / shards) <= options.memory / 2 else 3


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
