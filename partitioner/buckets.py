"""Collectives that travel together, and what each of them then costs.

A message pays its latency unless it is some times latency x bandwidth. Reductions of gradients that nothing else reads,
and gathers of parameters, can wait for their neighbours: `passes/overlap.py` sends those together whose bytes are less
than a bucket's, and closes a bucket at

    limit = BUCKET_STARTS * latency * bandwidth of the link            bytes

A tensor of f buckets (f < 1) pays its share of a full one, and a larger one its own message (T: `collective_cost.py`):

    seconds(w bytes sent) = f * T(w / f)       f = bytes / min(limit, bytes of all that could travel together)

The last bucket of a kind may be less full than that: all of them together then pay up to one start more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch.fx as fx

from .collective_cost import collective_seconds
from .compute_cost import compute_seconds
from .graph import Graph, is_tensor
from .mesh import Mesh

BUCKET_STARTS = 8.0
"""A bucket's size in starts of its link; at 8 the latency is a ninth of the message's time."""

KINDS = {"first": frozenset({"all_gather"}), "last": frozenset({"all_reduce", "reduce_scatter"})}


@dataclass(frozen=True)
class Bucket:
    """Which step of a reshard travels with others: its `first`, a parameter's gather, or its `last`, a reduction of a
    gradient. `nbytes`: of all tensors of the program that could travel together."""

    end: Literal["first", "last"]
    nbytes: float

    @property
    def kinds(self) -> frozenset[str]:
        return KINDS[self.end]


@dataclass(frozen=True)
class Buckets:
    """The buckets of a program: of its parameters, and of its gradients that nothing else reads (`alone`)."""

    params: Bucket
    grads: Bucket
    inputs: frozenset[fx.Node]
    alone: frozenset[fx.Node]

    def of(self, value: fx.Node) -> Bucket | None:
        """In which one a reshard of a tensor of the program takes part."""
        return self.params if value in self.inputs else self.grads if value in self.alone else None


def buckets_of(graph: Graph) -> Buckets:
    inputs = zip(graph.placeholders, graph.inputs, strict=True)
    params = frozenset(n for n, r in inputs if r.kind == "param")
    leaves: dict[fx.Node, set[str]] = {}
    for value, role in zip(graph.output_values, graph.outputs, strict=True):
        if value is not None and is_tensor(value):
            leaves.setdefault(value, set()).add(role.kind)
    out = graph.output_node
    alone = frozenset(
        v for v, kinds in leaves.items() if kinds == {"grad"} and v.meta.get("backward") and set(v.users) == {out}
    )
    return Buckets(Bucket("first", _bytes(params)), Bucket("last", _bytes(alone)), params, alone)


def _bytes(values: frozenset[fx.Node]) -> float:
    return float(sum(v.meta["val"].numel() * v.meta["val"].element_size() for v in values))


def bucket_limit(axes: tuple[str, ...], mesh: Mesh) -> float:
    """Bytes at which a bucket of collectives over these axes is sent; larger tensors travel alone."""
    link = mesh.link[axes[0]]
    return BUCKET_STARTS * link.latency * link.bandwidth


def bucketed_seconds(
    kind: str, axes: tuple[str, ...], sent: Any, before: Any, after: Any, bucket: Bucket, mesh: Mesh
) -> Any:
    """Seconds of a step that travels with others, copies into and out of the message included.

    Args:
        sent: bytes that one rank sends.
        before, after: bytes of the largest local tensor before and after; numbers or arrays, as `sent`.
    """
    full = min(bucket_limit(axes, mesh), bucket.nbytes)
    own = np.maximum(before, after)
    share = np.minimum(own / full, 1.0) if full > 0 else np.ones_like(own)
    wire = share * collective_seconds(kind, mesh.levels(axes), sent / np.maximum(share, 1e-12))
    packed = 2.0 * before * (share < 1.0) if kind == "all_reduce" else before + after  # alone it works in place
    return wire + compute_seconds(0.0, packed, "float32", mesh.device)
