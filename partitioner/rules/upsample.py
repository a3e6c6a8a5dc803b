"""Nearest-neighbour resizing by whole numbers: output row o is input row o // q, so rows r of the output split.

Output rows [a, b) need the input rows [a // q, (b - 1) // q + 1), which are those that windows of kernel and stride q
over the output touch; the gradient's rows [a, b) are sums over the windows of q rows. Other ratios have space whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..window import Window
from .dims import additive, bound, names, plain, rebound, unit
from .lead import guarded
from .notation import Local, Rule
from .split import Call
from .table import RuleOf

aten = torch.ops.aten


def _ratios(call: Call, small: torch.Tensor, big: torch.Tensor) -> list[int]:
    """Per dim how often a row is repeated; empty where some dim is not resized by a whole number."""
    sizes = list(zip(small.shape[2:], big.shape[2:], strict=True))
    if any(not plain(m, n) or m < 1 or n % m for m, n in sizes):
        return []
    ratios = [n // m for m, n in sizes]
    asked = [x for name, value in bound(call).items() if "scale" in name for x in _floats(value)]
    return ratios if asked in ([], [float(q) for q in ratios]) else []


def _floats(value: Any) -> list[float]:
    return [x for x in (value if isinstance(value, (list, tuple)) else [value]) if x is not None]


def spread(x: torch.Tensor, sizes: Sequence[int], cuts: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Resized to `sizes`, then per dim cut to (start, length)."""
    y = getattr(aten, f"upsample_nearest{len(sizes)}d").default(x, list(sizes))
    for j, (start, length) in enumerate(cuts):
        y = y.narrow(x.dim() - len(sizes) + j, start, length)
    return y.contiguous()


def gathered(grad: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The gradient of an input of `shape` that was resized to the gradient's size."""
    op = getattr(aten, f"upsample_nearest{len(shape) - 2}d_backward").default
    return op(grad, list(grad.shape[2:]), list(shape))


def nearest(n: int, otherwise: RuleOf) -> RuleOf:
    """The rule of `upsample_nearest` of n dims, and of its gradient; `otherwise` where a ratio is no whole number."""

    def made(call: Call) -> Rule:
        forward = "backward" not in str(call.target)
        small, big = (call.operands[0], call.output) if forward else (call.output, call.operands[0])
        ratios = _ratios(call, small, big) if small.dim() == n + 2 else []
        return guarded(_rule(call, small, big, ratios, forward), call) if ratios else otherwise(call)

    return made


def _rule(call: Call, small: torch.Tensor, big: torch.Tensor, ratios: list[int], forward: bool) -> Rule:
    """A dim that keeps its size is one factor; one of size 1 that grows is whole."""
    lead = names(small.shape)[:2]
    low = tuple(() if unit(m) else (f"s{j}",) for j, m in enumerate(small.shape[2:]))
    sizes = enumerate(zip(big.shape[2:], ratios, strict=True))
    high = tuple(() if unit(m) else (f"s{j}" if q == 1 else f"r{j}",) for j, (m, q) in sizes)
    tag, dims = ("r", (low, high)) if forward else ("s", (high, low))
    seen = {j: q for j, q in enumerate(ratios) if q > 1 and low[j]}
    free = {f"{tag}{j}" for j in seen} | {f"s{j}" for j, q in enumerate(ratios) if q == 1}

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        if tuple(local.out_shape()[2:]) == tuple(call.output.shape[2:]):
            return _leading(local, call, forward)
        if not forward:
            return gathered, (local.args[0], local.out_shape()), {}
        rows = local.in_shape(0)[2:]
        spans = [local.span(0, 2 + j) or (0, 0) for j in range(len(ratios))]
        starts = [local.start(f"r{j}") - span[0] * ratios[j] if j in seen else 0 for j, span in enumerate(spans)]
        cuts = list(zip(starts, local.out_shape()[2:], strict=True))
        return spread, (local.args[0], [n * q for n, q in zip(rows, ratios, strict=True)], cuts), {}

    return Rule(
        ((*lead, *dims[0]),),
        ((*lead, *dims[1]),),
        whole=frozenset(f for side in (low, high) for d in side for f in d if f not in free),
        ordered=frozenset(f"{tag}{j}" for j in seen),
        linear=additive(call, {0}),
        windows={(0, 2 + j): (f"{tag}{j}", Window(q, q, touched=forward)) for j, q in seen.items()},
        localize=localize,
    )


def _leading(local: Local, call: Call, forward: bool) -> tuple[Any, tuple, dict]:
    """The call where only leading dims are split."""
    return (local.target, local.args, local.kwargs) if forward else rebound(local, input_size=list(local.out_shape()))
