"""The proof of a rule: shard, run locally, recombine, equal to the whole.

`check_call(target, args, kwargs)` makes the rule of a concrete call and tries, on one mesh axis of 2 and of 3 ranks and
on a 2 x 2 mesh: every splittable factor (uneven sizes too), every pair of factors, and every alternative of
`linear`. It returns how many splits it has proved, so that a test can also ask that there were some.
"""

from __future__ import annotations

import itertools

import torch
from torch.utils._pytree import tree_map

from meshwright.partitioner.layout import assemble, take_local
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.rules.every import rule_of
from meshwright.partitioner.rules.split import Call, Split, plain_shape


def check_call(target, args, kwargs=None, rtol=1e-4, atol=1e-5, ranks=(2, 3)) -> int:
    call = Call(target, args, kwargs or {}, target(*args, **(kwargs or {})))
    rule = rule_of(call)
    shape = plain_shape(rule, call)
    free = [f for f in rule.factors if f not in rule.whole and f not in rule.decompose and shape.leaves[f][0] > 1]
    proved = 0
    for k in ranks:
        mesh = Mesh(x=k, device="cpu")
        for f in free:
            _compare(call, Split(shape, axes={(f, 0): ("x",)}), mesh, rtol, atol)
            proved += 1
        for i in range(len(rule.linear)):
            _compare(call, Split(shape, partial={"x": i}), mesh, rtol, atol)
            proved += 1
    mesh = Mesh(x=2, y=2, device="cpu")
    for f, g in itertools.combinations_with_replacement(free, 2):
        axes = {(f, 0): ("x", "y")} if f == g else {(f, 0): ("x",), (g, 0): ("y",)}
        _compare(call, Split(shape, axes=axes), mesh, rtol, atol)
        proved += 1
    for f in free:
        for i in range(len(rule.linear)):
            _compare(call, Split(shape, axes={(f, 0): ("x",)}, partial={"y": i}), mesh, rtol, atol)
            proved += 1
    return proved


def _compare(call, split, mesh, rtol, atol):
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
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda m: f"{where}: {m}", equal_nan=True)


def _run_on(call, split, mesh, rank):
    operands = iter(range(len(call.operands)))

    def local(x):
        if not isinstance(x, torch.Tensor):
            return x
        i = next(operands)
        layout = split.input_layout(i)
        piece = take_local(x, layout, mesh, rank).clone()
        for axis, _ in layout.partial:  # a random partition of the value into a sum
            piece = _share(piece, mesh.sizes[axis], mesh.coord(rank)[axis], seed=i)
        return piece

    args, kwargs = tree_map(local, (call.args, call.kwargs))
    target, args, kwargs = split.localize(call, args, kwargs, mesh, rank)
    out = target(*args, **kwargs)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _share(x, ranks, index, seed):
    g = torch.Generator().manual_seed(seed)
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        terms = [torch.randint(0, 5, x.shape, generator=g).to(x.dtype) for _ in range(ranks - 1)]
        return (terms + [x - sum(terms)])[index] if terms else x
    weights = torch.rand(ranks - 1, generator=g, dtype=torch.float64).tolist() if ranks > 1 else []
    weights.append(1.0 - sum(weights))
    noise = torch.randn(ranks, *x.shape, generator=g, dtype=torch.float64)
    share = x * weights[index] + (noise[index] - noise[(index + 1) % ranks]).to(x.dtype)
    # a huge value is one rank's alone: shares of both signs would overflow
    return torch.where(x.abs() < 1e30, share, x if index == 0 else 0).to(x.dtype)
