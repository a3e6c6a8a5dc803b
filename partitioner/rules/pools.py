"""Pools: `a s -> a r`, where r splits with a halo (`space.py`); the gradient `a r -> a s` splits by s.

An average is a sum over windows divided by the elements that each counts, which are known from the row's global number.
A maximum's indices count in the whole plane: a rank adds where its rows begin, and the gradient picks those that fall
on its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .dims import additive, bound, names, rebound
from .lead import guarded
from .notation import Local, Rule
from .space import Sides, Space, covered, edges, padded, trims
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}
AVERAGES = {2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
AVERAGE_GRADIENTS = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}
MAXIMA = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}
MAXIMUM_GRADIENTS = {2: aten.max_pool2d_with_indices_backward.default, 3: aten.max_pool3d_with_indices_backward.default}


def _each(given: Any, n: int) -> list[Any]:
    given = list(given)
    return given if len(given) == n else given * n


def _geometry(a: dict[str, Any], n: int) -> list[tuple[Any, ...]]:
    """(kernel, stride, padding, dilation) of each dim."""
    kernel = _each(a["kernel_size"], n)
    stride = _each(a["stride"], n) if a["stride"] else kernel
    return list(zip(kernel, stride, _each(a["padding"], n), _each(a.get("dilation", [1]), n), strict=True))


def _rule(call: Call, n: int, forward: bool, alone: bool, linear: Sequence[set[int]]) -> tuple[Rule, Space]:
    """The rule of a pool or its gradient; `alone`: a dim that no window slides over is still not one factor."""
    x, out = (call.operands[0], call.outputs[0]) if forward else (call.operands[1], call.operands[0])
    first = x.dim() - n
    space = Space.of(x.shape, out.shape, _geometry(bound(call), n), first, alone)
    lead = names(x.shape)[:first]
    wide, narrow = (*lead, *space.reads), (*lead, *space.makes)
    if forward:
        windows, inputs, outputs = space.read(0), (wide,), (narrow,) * len(call.outputs)
    else:
        windows = space.touch(0) | (space.touch(2) if len(call.operands) > 2 else {})
        inputs, outputs = (narrow, wide, narrow)[: len(call.operands)], (wide,)
    rule = Rule(
        inputs,
        outputs,
        whole=space.whole | (space.inputs() if forward else space.outputs()),
        ordered=space.outputs() if forward else space.inputs(),
        linear=additive(call, *linear),
        windows=windows,
    )
    return rule, space


# --- averages ------------------------------------------------------------------------------------------------------


def counted(like: torch.Tensor, dims: Sequence[tuple[int, ...]], include: bool) -> torch.Tensor:
    """The elements that each window counts. Per dim: (first row, rows, size of the input, kernel, stride, padding)."""
    total = like.new_ones([1] * len(dims))
    for i, (first, rows, size, kernel, stride, padding) in enumerate(dims):
        starts = [o * stride - padding for o in range(first, first + rows)]
        ends = [min(start + kernel, size + padding) for start in starts]
        if not include:
            starts, ends = [max(s, 0) for s in starts], [min(e, size) for e in ends]
        lengths = torch.tensor([e - s for s, e in zip(starts, ends, strict=True)], dtype=like.dtype, device=like.device)
        total = total * lengths.reshape([-1 if j == i else 1 for j in range(len(dims))])
    return total


def averaged(
    x: torch.Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool, sides: Sides, by: Any
) -> torch.Tensor:
    """The average pool of an input whose split dims get their own padding; `by`: `counted`'s dims, or a divisor."""
    sums = AVERAGES[len(kernel)](padded(x, sides), kernel, stride, padding, ceil, True, 1)
    return sums / (by if isinstance(by, int) else counted(sums, *by))


def average_gradient(
    grad: torch.Tensor, x: torch.Tensor, geometry: Sequence[Any], rows: Sequence[int], sides: Sides, by: Any
) -> torch.Tensor:
    """The gradient of an average pool's input of `rows`, then padded and cut to the rank's own rows."""
    if grad.numel() == 0:
        return torch.zeros_like(x)
    kernel, stride, padding, ceil = geometry
    each = grad / (by if isinstance(by, int) else counted(grad, *by))
    like = grad.new_empty(1).expand(*grad.shape[: grad.dim() - len(rows)], *rows)
    return padded(AVERAGE_GRADIENTS[len(rows)](each, like, kernel, stride, padding, ceil, True, 1), sides)


def _divisor(a: dict[str, Any], counts: list[tuple[int, ...]]) -> Any:
    return a["divisor_override"] or (counts, a["count_include_pad"])


def _average(n: int) -> None:
    @on(TABLE, AVERAGES[n])
    def average(call: Call) -> Rule:
        a, geometry = bound(call), _geometry(bound(call), n)
        rule, space = _rule(call, n, True, False, [{0}])

        def localize(local: Local) -> tuple[Any, tuple, dict]:
            sides = edges(local, 0, range(space.first, space.first + n))
            if not any(side is not None for side in sides):
                return local.target, local.args, local.kwargs
            shape, counts = local.whole_shape(0)[space.first :], []
            for j, ((k, s, p, _), size) in enumerate(zip(geometry, shape, strict=True)):
                rows = local.out_shape()[space.first + j]
                counts.append((local.start(f"r{j}"), rows, size, k, s, p))
            kernel, stride, padding, _ = map(list, zip(*geometry, strict=True))
            left = [p if side is None else 0 for p, side in zip(padding, sides, strict=True)]
            own = tuple(side or (0, 0) for side in sides)
            return averaged, (local.args[0], kernel, stride, left, a["ceil_mode"], own, _divisor(a, counts)), {}

        return guarded(rule.but(localize=localize), call)

    @on(TABLE, AVERAGE_GRADIENTS[n])
    def gradient(call: Call) -> Rule:
        a, geometry = bound(call), _geometry(bound(call), n)
        rule, space = _rule(call, n, False, False, [{0}])

        def localize(local: Local) -> tuple[Any, tuple, dict]:
            spans = covered(local, 0, space)
            if not any(span is not None for span in spans):
                return local.target, local.args, local.kwargs
            shape, counts, rows = local.whole_shape(1)[space.first :], [], []
            for j, ((k, s, p, _), size, span) in enumerate(zip(geometry, shape, spans, strict=True)):
                first = 0 if span is None else (span[0] + p) // s
                counts.append((first, local.in_shape(0)[space.first + j], size, k, s, p))
                rows.append(local.in_shape(1)[space.first + j] if span is None else span[1] - span[0])
            kernel, stride, padding, _ = map(list, zip(*geometry, strict=True))
            left = [p if span is None else 0 for p, span in zip(padding, spans, strict=True)]
            given = ((kernel, stride, left, a["ceil_mode"]), rows, trims(local, spans), _divisor(a, counts))
            return average_gradient, (local.args[0], local.args[1], *given), {}

        return guarded(rule.but(localize=localize), call)


# --- maxima --------------------------------------------------------------------------------------------------------


def _moved(index: torch.Tensor, old: Sequence[int], new: Sequence[int], by: Sequence[int]) -> list[torch.Tensor]:
    """A flat index in a box `old` as one in the box `new`, coordinates larger by `by`; and whether it lies in it."""
    inside, at, rest = torch.ones_like(index, dtype=torch.bool), torch.zeros_like(index), index
    for j, (room, shift) in enumerate(zip(new, by, strict=True)):
        minor = math.prod(old[j + 1 :])
        place = rest // minor + shift
        rest = rest % minor
        inside &= (place >= 0) & (place < room)
        at = at * room + place
    return [at, inside]


def largest(
    x: torch.Tensor,
    geometry: Sequence[Any],
    below: Sequence[int],
    rows: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The max pool of an input with `below` rows missing behind it, cut to `rows`; indices in the whole plane."""
    lowest = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    x = padded(x, tuple((0, n) for n in below), lowest)
    values, index = MAXIMA[len(rows)](x, *geometry)
    for j, n in enumerate(rows):
        dim = x.dim() - len(rows) + j
        values, index = values.narrow(dim, 0, n), index.narrow(dim, 0, n)
    at, _ = _moved(index, x.shape[-len(rows) :], sizes, starts)
    return values.contiguous(), at


def largest_gradient(
    grad: torch.Tensor, x: torch.Tensor, index: torch.Tensor, sizes: Sequence[int], starts: Sequence[int]
) -> torch.Tensor:
    """What of a max pool's gradient falls on the rank's own rows, which begin at `starts` of the whole plane."""
    n = len(sizes)
    at, inside = _moved(index, sizes, x.shape[-n:], [-s for s in starts])
    lead = x.dim() - n
    flat = torch.zeros_like(x, memory_format=torch.contiguous_format).flatten(lead)
    flat.scatter_add_(lead, torch.where(inside, at, 0).flatten(lead), torch.where(inside, grad, 0).flatten(lead))
    return flat.reshape(x.shape)


def _maximum(n: int) -> None:
    @on(TABLE, MAXIMA[n])
    def maximum(call: Call) -> Rule:
        a, geometry = bound(call), _geometry(bound(call), n)
        rule, space = _rule(call, n, True, True, [])

        def localize(local: Local) -> tuple[Any, tuple, dict]:
            dims = range(space.first, space.first + n)
            sides, spans = edges(local, 0, dims), [local.span(0, at) for at in dims]
            if not any(side is not None for side in sides):
                return local.target, local.args, local.kwargs
            kernel, stride, padding, dilation = map(list, zip(*geometry, strict=True))
            above = [p if side is None else side[0] for p, side in zip(padding, sides, strict=True)]
            below = [0 if side is None else side[1] for side in sides]
            starts = [0 if span is None else max(0, span[0]) for span in spans]
            given = (kernel, stride, above, dilation, a["ceil_mode"])
            rows, sizes = local.out_shape()[space.first :], local.whole_shape(0)[space.first :]
            return largest, (local.args[0], given, below, rows, starts, sizes), {}

        return guarded(rule.but(localize=localize), call)

    @on(TABLE, MAXIMUM_GRADIENTS[n])
    def gradient(call: Call) -> Rule:
        rule, space = _rule(call, n, False, True, [{0}])

        def localize(local: Local) -> tuple[Any, tuple, dict]:
            if all(local.span(0, space.first + j) is None for j in range(n)):
                return rebound(local)
            grad, x, *_, index = local.args
            starts = [local.start(f"s{j}") for j in range(n)]
            return largest_gradient, (grad, x, index, local.whole_shape(1)[space.first :], starts), {}

        return guarded(rule.but(localize=localize), call)


for _n in (2, 3):
    _average(_n)
    _maximum(_n)
