"""Seconds: of a call (roofline) and of a tensor that changes its state on one axis.

    call      max(flops / shards / peak, bytes moved / bandwidth);  a view costs nothing
    reshard   on one axis of k ranks, b bytes of the whole tensor on that axis:
        split  -> whole   all-gather       (k-1) a + b (k-1)/k / B         split -> other split   all-to-all
        sum    -> whole   all-reduce       2 (k-1) a + 2 b (k-1)/k / B     sum   -> split         reduce-scatter
        whole  -> split   slice            b/k / M                         whole -> sum           zeroing, b / M
        split  -> seen through a window    a + b (most rows a rank sends) / rows / B   (a halo; none of a whole tensor)

a: latency and B: bandwidth of the axis' link, M: memory bandwidth. The same terms as `collective.seconds`.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from .mesh import Mesh
from .rules.split import Shape, Split
from .strategies import Seen, State, is_view
from .window import exchange, most_sent


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a whole tensor; dims that depend on data count as 1."""
    return tensor.element_size() * math.prod(n if isinstance(n, int) else 1 for n in tensor.shape)


def reshard_seconds(have: State, want: State | Seen, size: float, mesh: Mesh, axis: str) -> float:
    """Seconds to bring a tensor of `size` bytes (as it is when whole on `axis`) from one state to another."""
    if isinstance(want, Seen):
        halo = _halo_seconds(want, size, mesh, axis) if have is not None else 0.0
        return reshard_seconds(have, want.spot, size, mesh, axis) + halo
    if have == want:
        return 0.0
    k, link, memory = mesh.sizes[axis], mesh.link[axis], mesh.device.memory_bandwidth
    steps, wire = (k - 1) * link.latency, size * (k - 1) / k / link.bandwidth
    if isinstance(have, str):
        return (steps + wire) if isinstance(want, tuple) else 2 * (steps + wire) + (0.0 if want is None else math.inf)
    if isinstance(want, str):
        if want != "sum":
            return math.inf
        return size / memory + (steps + wire if have is not None else 0.0)
    if have is None:
        return size / k / memory
    return steps + (wire / k if want is not None else wire)


def _halo_seconds(seen: Seen, size: float, mesh: Mesh, axis: str) -> float:
    """Seconds of the rows that neighbours send, each rank of the axis holding its own piece."""
    rows = most_sent(exchange(seen.own, seen.size, seen.through, (mesh.sizes[axis],)))
    return mesh.link[axis].latency + size * rows / max(1, seen.size) / mesh.link[axis].bandwidth if rows else 0.0


def call_seconds(node: fx.Node, shape: Shape, split: Split, operands: list[torch.Tensor], mesh: Mesh) -> float:
    """Seconds of one call on the busiest rank, run as `split`."""
    if is_view(node):
        return 0.0
    shards = _shards(split.axes.values(), mesh)
    moved = 0.0
    for i, t in enumerate(operands):
        moved += nbytes(t) / _shards((f.axes for d in split.input_layout(i).dims for f in d), mesh)
    outs = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    for j, t in enumerate(outs):
        layout = split.output_layout(j) if j < len(shape.outputs) else None
        if layout is not None and isinstance(t, torch.Tensor):
            moved += nbytes(t) / _shards((f.axes for d in layout.dims for f in d), mesh)
    return max(shape.rule.flops / shards / mesh.device.matmul_flops, moved / mesh.device.memory_bandwidth)


def _shards(axes_of, mesh: Mesh) -> int:
    return math.prod(mesh.sizes[a] for axes in axes_of for a in axes)
