"""Splitting space: ops whose output rows are made from windows of input rows, and what a rank runs in their place.

    forward      the factor of the output rows o is split: a rank needs the input rows that its windows see
    d input      the factor of the input rows i is split: it needs the gradient's rows whose windows touch its own
    d weight     o is split, with the same input rows as forward: a partial sum

A rank's windows may reach beyond the borders; what lies there is put back as explicit padding, and the op then runs
without padding along that dim. A dim with kernel 1, stride 1 and no padding is one factor and has no window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..window import Window
from .dims import plain, unit
from .notation import Dims, Local


@dataclass(frozen=True)
class Space:
    """The spatial dims of an op: `reads` and `makes`, words of the input's and output's, and their windows by dim.

    A dim without a window is in neither `windows` nor, where it is one factor, in `whole`.
    """

    reads: Dims
    makes: Dims
    windows: dict[int, Window]
    whole: frozenset[str]
    first: int

    @staticmethod
    def of(
        x: Sequence[Any], out: Sequence[Any], geometry: Sequence[tuple[Any, ...]], first: int, alone: bool = False
    ) -> Space:
        """`x`, `out`: the shapes. `geometry`: (kernel, stride, padding, dilation) of each dim from `first` on.

        `alone`: rows keep their numbers, so that even a window of one row is one.
        """
        reads, makes, windows, whole = [], [], {}, set()
        for j, shape in enumerate(geometry):
            at = first + j
            if plain(x[at], out[at], *shape) and not unit(x[at]) and not unit(out[at]):
                if shape == (1, 1, 0, 1) and not alone:
                    reads.append((f"s{j}",))
                    makes.append((f"s{j}",))
                    continue
                windows[at] = Window(*shape)
            else:
                whole |= {f"s{j}", f"r{j}"}
            reads.append(() if unit(x[at]) else (f"s{j}",))
            makes.append(() if unit(out[at]) else (f"r{j}",))
        return Space(tuple(reads), tuple(makes), windows, frozenset(whole), first)

    def read(self, operand: int) -> dict[tuple[int, int], tuple[str, Window]]:
        """Windows of an operand that is read when output rows are split."""
        return {(operand, at): (f"r{at - self.first}", w) for at, w in self.windows.items()}

    def touch(self, operand: int) -> dict[tuple[int, int], tuple[str, Window]]:
        """Windows of an operand laid as the output, when input rows are split."""
        turned = {at: Window(w.kernel, w.stride, w.padding, w.dilation, touched=True) for at, w in self.windows.items()}
        return {(operand, at): (f"s{at - self.first}", w) for at, w in turned.items()}

    def inputs(self) -> frozenset[str]:
        """The factors of input rows that are seen through windows."""
        return frozenset(f"s{at - self.first}" for at in self.windows)

    def outputs(self) -> frozenset[str]:
        """The factors of output rows that windows make."""
        return frozenset(f"r{at - self.first}" for at in self.windows)

    def sums(self, kind: str) -> dict[str, str]:
        """All factors that a sum over the "inputs" or the "outputs" runs over."""
        dims = self.reads if kind == "inputs" else self.makes
        return {f: "sum" for d in dims for f in d if f not in self.whole}


Sides = tuple[tuple[int, int], ...]
"""Per spatial dim the rows to put before and behind."""


def edges(local: Local, operand: int, dims: Sequence[int]) -> list[tuple[int, int] | None]:
    """Per dim the rows beyond the borders that a rank's windows see; None where it is not split."""
    out: list[tuple[int, int] | None] = []
    for dim in dims:
        span = local.span(operand, dim)
        if span is None:
            out.append(None)
            continue
        beyond = span[1] - span[0] - local.in_shape(operand)[dim]
        low = min(max(0, -span[0]), beyond)
        out.append((low, beyond - low))
    return out


def covered(local: Local, operand: int, space: Space) -> list[tuple[int, int] | None]:
    """Per spatial dim the input rows [low, high) that the rank's rows of a gradient reach; None where not split."""
    out: list[tuple[int, int] | None] = []
    for j in range(len(space.reads)):
        at = space.first + j
        if local.span(operand, at) is None:
            out.append(None)
            continue
        (_, touched), window = space.touch(operand)[operand, at], space.windows[at]
        low, high = touched.rows(local.whole_shape(operand)[at], local.start(f"s{j}"), local.size(f"s{j}"))
        out.append(window.span(low, high - low))
    return out


def trims(local: Local, spans: Sequence[tuple[int, int] | None]) -> Sides:
    """Per spatial dim what is put before and behind (cut off, if negative) so that rows `spans` are the rank's own."""
    starts = [(local.start(f"s{j}"), local.size(f"s{j}")) for j in range(len(spans))]
    both = zip(spans, starts, strict=True)
    return tuple((0, 0) if span is None else (span[0] - a, a + n - span[1]) for span, (a, n) in both)


def padded(x: torch.Tensor, sides: Sides, value: float = 0.0) -> torch.Tensor:
    """The last dims padded, or cut where a side is negative."""
    flat = [n for pair in reversed(sides) for n in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


def convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    sides: Sides,
) -> torch.Tensor:
    """A convolution of an input whose split dims get their own padding."""
    zero = [0] * len(padding)
    return torch.convolution(padded(x, sides), weight, bias, stride, padding, dilation, False, zero, groups)


def input_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    geometry: Sequence[Any],
    groups: int,
    rows: Sequence[int],
    sides: Sides,
) -> tuple[torch.Tensor, None, None]:
    """The gradient of a convolution's input of `rows`, then padded and cut to the rank's own rows.

    Of the input only the shape is used.
    """
    if grad.numel() == 0 or 0 in rows:
        return torch.zeros_like(x), None, None
    stride, padding, dilation = geometry
    like = grad.new_empty(1).expand(x.shape[0], x.shape[1], *rows)
    rest = (stride, padding, dilation, False, [0] * len(rows), groups, [True, False, False])
    dx = torch.ops.aten.convolution_backward(grad, like, weight, None, *rest)[0]
    return padded(dx, sides), None, None


def weight_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    geometry: Sequence[Any],
    groups: int,
    mask: Sequence[bool],
    sides: Sides,
) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
    """A rank's term of the gradients of a convolution's weight and bias."""
    stride, padding, dilation = geometry
    zero = [0] * len(padding)
    rest = (stride, padding, dilation, False, zero, groups, list(mask))
    _, dw, db = torch.ops.aten.convolution_backward(grad, padded(x, sides), weight, bias_sizes, *rest)
    return None, dw if mask[1] else None, db if mask[2] else None


def apart(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    """`convolution_backward` as two calls, the input's gradient and the weight's: each splits space its own way."""
    *geometry, mask = rest
    op = torch.ops.aten.convolution_backward
    dx = op(grad, x, weight, None, *geometry, [True, False, False])[0]
    _, dw, db = op(grad, x, weight, bias_sizes, *geometry, [False, mask[1], mask[2]])
    return dx, dw if mask[1] else None, db if mask[2] else None
