"""The proof of a rule: shard, run locally, recombine, equal to the whole.

`prove(call, rule)` tries, on one mesh axis of 2 and of 3 ranks and on a 2 x 2 mesh: every splittable factor (uneven
sizes too), every pair of factors, and every alternative of `linear`. Rules written by hand are proved by the tests,
discovered ones before they are used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..layout import assemble, take_local
from ..mesh import Mesh
from .notation import Rule
from .split import Call, Shape, Split, plain_shape


def prove(call: Call, rule: Rule, rtol: float = 1e-4, atol: float = 1e-5, ranks: tuple[int, ...] = (2, 3)) -> int:
    """How many splits of a call on real tensors were proved.

    Raises:
        AssertionError: a split gives something else than the whole; the message names it.
    """
    shape = plain_shape(rule, call)
    proved = 0
    for split, mesh in (*alone(shape, ranks), *together(shape)):
        compare(call, split, mesh, rtol, atol)
        proved += 1
    return proved


def free_factors(shape: Shape) -> list[str]:
    """The factors that may be split as they are."""
    rule = shape.rule
    return [f for f in rule.factors if f not in rule.whole and f not in rule.decompose and shape.leaves[f][0] > 1]


def alone(shape: Shape, ranks: tuple[int, ...] = (2, 3)) -> Iterator[tuple[Split, Mesh]]:
    """Every free factor and every alternative of partial operands, on one axis."""
    for k in ranks:
        mesh = Mesh(x=k, device="cpu")
        for f in free_factors(shape):
            yield Split(shape, axes={(f, 0): ("x",)}), mesh
        for i in range(len(shape.rule.linear)):
            yield Split(shape, partial={"x": i}), mesh


def together(shape: Shape) -> Iterator[tuple[Split, Mesh]]:
    """Every two factors, and every factor beside every alternative of partial operands, on two axes."""
    mesh, free = Mesh(x=2, y=2, device="cpu"), free_factors(shape)
    for f, g in itertools.combinations_with_replacement(free, 2):
        axes = {(f, 0): ("x", "y")} if f == g else {(f, 0): ("x",), (g, 0): ("y",)}
        yield Split(shape, axes=axes), mesh
    for f in free:
        for i in range(len(shape.rule.linear)):
            yield Split(shape, axes={(f, 0): ("x",)}, partial={"y": i}), mesh


def compare(call: Call, split: Split, mesh: Mesh, rtol: float, atol: float) -> None:
    """Run one split of a call on real tensors on every rank and hold the outcome against the whole.

    Raises:
        AssertionError: they differ.
    """
    outs = [_run_on(call, split, mesh, rank) for rank in range(mesh.world_size)]
    for j, want in enumerate(call.outputs):
        layout = split.output_layout(j) if j < len(split.shape.outputs) else None
        if layout is None:
            continue
        parts = [o[j] for o in outs]
        where = f"{call.target} output {j} with {dict(split.axes)} partial {dict(split.partial)} on {mesh}"
        for rank, part in enumerate(parts):
            assert part.dtype == want.dtype, f"{where}: dtype {part.dtype}, want {want.dtype} (rank {rank})"
        got = assemble(parts, layout, mesh)
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda m: f"{where}: {m}", equal_nan=True)  # noqa: B023


def _run_on(call: Call, split: Split, mesh: Mesh, rank: int) -> tuple[Any, ...]:
    operands = iter(range(len(call.operands)))

    def local(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        i = next(operands)
        layout = split.input_layout(i)
        piece = take_local(x, layout, mesh, rank).clone()
        for axis, _ in layout.partial:  # a random partition of the value into a sum
            piece = share(piece, mesh.sizes[axis], mesh.coord(rank)[axis], seed=i)
        return piece

    args, kwargs = tree_map(local, (call.args, call.kwargs))
    target, args, kwargs = split.localize(call, args, kwargs, mesh, rank)
    out = target(*args, **kwargs)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def share(x: torch.Tensor, ranks: int, index: int, seed: int) -> torch.Tensor:
    """One of `ranks` random tensors whose sum is x."""
    g = torch.Generator().manual_seed(seed)
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        terms = [torch.randint(0, 5, x.shape, generator=g).to(x.dtype) for _ in range(ranks - 1)]
        return [*terms, x - torch.stack(terms).sum(0).to(x.dtype)][index] if terms else x
    weights = torch.rand(ranks - 1, generator=g, dtype=torch.float64).tolist() if ranks > 1 else []
    weights.append(1.0 - sum(weights))
    noise = torch.randn(ranks, *x.shape, generator=g, dtype=torch.float64)
    part = x * weights[index] + (noise[index] - noise[(index + 1) % ranks]).to(x.dtype)
    # a huge value is one rank's alone: shares of both signs would overflow
    return torch.where(x.abs() < 1e30, part, x if index == 0 else 0).to(x.dtype)
