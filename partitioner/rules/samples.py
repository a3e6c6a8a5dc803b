"""Real tensors to try an unknown op on: small shapes that keep what its call's sizes have in common, and values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map

from .split import Call

SMALL = 8
"""Sizes up to this are tried as they are."""
LARGE = 64
"""Sizes from this on are divided by `scaled`."""
HALF = (torch.float16, torch.bfloat16)
KINDS = ("positive", "signed", "wide")
"""Values of floats: in [0.1, 1.1]; normal; normal over five orders of magnitude."""

Sizes = dict[int, int]


def numbers_of(call: Call) -> set[int]:
    """Integers among the plain arguments, which may be sizes, blocks or places in the tensors."""
    return {abs(x) for x in tree_iter((call.args, call.kwargs)) if isinstance(x, int) and not isinstance(x, bool)}


def shrunk(call: Call, least: int, grain: int = 2) -> Sizes:
    """For every size of the operands one to try in its place, in the same order, equal only where they are equal.

    A size that is also an integer argument stands; others stay on the same side of each such number, and leave the same
    rest divided by it and by `grain`.
    """
    given = {n for n in numbers_of(call) if n > 1}
    out: Sizes = {}
    before = 0
    for size in sorted({n for t in call.operands for n in t.shape}):
        out[size] = size if size <= SMALL or size in given else _smaller(size, max(before + 1, least), given, grain)
        before = out[size]
    return out


def _smaller(size: int, start: int, given: set[int], grain: int) -> int:
    below = [n for n in given if n < size]
    grains = [math.gcd(size, grain), *below]
    for n in range(max([start, *(2 * b + 1 for b in below)]), size):
        fair = n % 6 != 0  # in 2 or in 3, the parts are uneven
        if fair and all(n % g == size % g for g in grains):
            return n
    return size


def scaled(call: Call) -> Sizes:
    """Large sizes all divided by one power of two, so that each is still the same multiple of another."""
    own = {n: n for t in call.operands for n in t.shape}
    given = {n for n in numbers_of(call) if n > 1}
    large = [n for n in own if n >= LARGE and n not in given]
    for by in (1 << i for i in range(10, 0, -1)):
        out = own | {n: n // by for n in large if n % by == 0}
        apart = len(set(out.values())) == len(out) and min(out[n] for n in large) > 3 if large else False
        if apart and all(n // by > 2 * g and n // by % g == n % g for n in large for g in given if g < n):
            return out
    return own


def elements(call: Call, sizes: Sizes) -> int:
    """How many elements the operands have at these sizes."""
    return sum(math.prod(sizes[n] for n in t.shape) for t in call.operands)


def sample(call: Call, sizes: Sizes, kind: str, high: int, widen: bool) -> tuple[tuple, dict[str, Any]]:
    """The call's arguments with random tensors in place; integers lie in [0, high), half floats may be float32."""
    g = torch.Generator().manual_seed(KINDS.index(kind) + 1)

    def make(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        dtype = torch.float32 if widen and x.dtype in HALF else x.dtype
        return values([sizes[n] for n in x.shape], dtype, kind, high, g)

    return tree_map(make, (call.args, call.kwargs))


def values(shape: Iterable[int], dtype: torch.dtype, kind: str, high: int, g: torch.Generator) -> torch.Tensor:
    """A random tensor."""
    shape = tuple(shape)
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) > 0.4
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, high, shape, generator=g).to(dtype)
    if dtype.is_complex:
        parts = [values(shape, torch.float64, kind, high, g) for _ in range(2)]
        return torch.complex(*parts).to(dtype)
    if kind == "positive":
        return (torch.rand(shape, generator=g, dtype=torch.float64) + 0.1).to(dtype)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    if kind == "wide":
        x = x * torch.exp(2.5 * torch.randn(shape, generator=g, dtype=torch.float64))
    return x.to(dtype)


def ceilings(call: Call, sizes: Sizes) -> list[int]:
    """Upper ends of integer values to try: the smallest size there is (they may be places in any dim), then 2."""
    dims = [sizes[n] for t in call.operands if t.dtype.is_floating_point for n in t.shape if n > 1]
    return sorted({max(2, min(dims, default=2)), 2}, reverse=True)
