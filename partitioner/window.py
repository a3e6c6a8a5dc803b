"""Windows: which rows of one dim a piece of another needs, and what neighbours must send so that each rank has them.

A convolution or pool of kernel k, stride s, padding p and dilation d makes output row o from the input rows

    o s - p + d j,   j = 0 ... k - 1

so output rows [a, b) read the rows [a s - p, (b - 1) s - p + d (k - 1) + 1), less those beyond the borders. In the
other direction, input rows [a, b) are touched by the windows of the output rows

    [ceil((a + p - d (k - 1)) / s), floor((b - 1 + p) / s) + 1)

A pad or a slice is a window of one row: k = 1, p the rows put before (negative: cut off). `Through` says of a factor of
a layout that a rank holds what a piece of the other dim needs, rather than a piece of its own; `exchange` is who has to
send what to whom when each rank holds its own piece. Pieces may be shorter than a window: ranks further away send too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

Rows = tuple[int, int]
"""A range [start, stop)."""


@dataclass(frozen=True)
class Window:
    """A sliding window. `touched`: the dim seen is the one the windows make, the other is the one they read."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    touched: bool = False

    @property
    def reach(self) -> int:
        """Rows from a window's first to its last."""
        return self.dilation * (self.kernel - 1)

    def span(self, start: int, length: int) -> Rows:
        """The rows needed for `length` rows of the other dim from `start`; they may lie beyond the borders."""
        if length <= 0:
            return 0, 0
        first, last = start, start + length - 1
        if self.touched:
            low = -(-(first + self.padding - self.reach) // self.stride)
            return low, max(low, (last + self.padding) // self.stride + 1)
        return first * self.stride - self.padding, last * self.stride - self.padding + self.reach + 1

    def rows(self, size: int, start: int, length: int) -> Rows:
        """`span`, less what lies beyond a dim of `size`."""
        low, high = self.span(start, length)
        low = min(max(low, 0), size)
        return low, max(low, min(high, size))

    def __str__(self) -> str:
        words = (("k", self.kernel, 0), ("s", self.stride, 1), ("p", self.padding, 0), ("d", self.dilation, 1))
        return ("^" if self.touched else "~") + "".join(f"{w}{n}" for w, n, usual in words if n != usual)


@dataclass(frozen=True)
class Through:
    """A factor seen through a window: its axes cut the other dim, in `cut` parts of `unit` rows each."""

    window: Window
    cut: int
    unit: int = 1

    def piece(self, size: int, start: int, length: int) -> Rows:
        """(start, length) of what parts [start, start + length) of the other dim need of a factor of `size`."""
        low, high = self.window.rows(size, start * self.unit, length * self.unit)
        return low, high - low

    def __str__(self) -> str:
        return str(self.window)


def chunk(size: int, cuts: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """(start, length) of a rank's piece, as `torch.chunk` cuts; `cuts` are (ranks, index), outermost first."""
    start, length = 0, size
    for ranks, index in cuts:
        each = -(-length // ranks)
        low = min(index * each, length)
        start, length = start + low, min(low + each, length) - low
    return start, length


@lru_cache(maxsize=4096)
def exchange(own: tuple[int, int], size: int, through: Through, ranks: tuple[int, ...]) -> tuple[tuple[Rows, ...], ...]:
    """Of each member of a group (over axes of `ranks`, the last fastest), the rows it gives to each member.

    `own`: the dim is held in (parts, rows of a part), the parts cut over the axes. Ranges are empty where nothing is
    given, and the diagonal is what a rank keeps.
    """
    members = [tuple(zip(ranks, at, strict=True)) for at in itertools.product(*(range(n) for n in ranks))]
    held = [tuple(own[1] * x for x in chunk(own[0], cuts)) for cuts in members]
    needed = [through.piece(size, *chunk(through.cut, cuts)) for cuts in members]

    def common(a: tuple[int, int], b: tuple[int, int]) -> Rows:
        low = max(a[0], b[0])
        return low, max(low, min(a[0] + a[1], b[0] + b[1]))

    return tuple(tuple(common(h, n) for n in needed) for h in held)  # type: ignore[arg-type]


def most_sent(table: tuple[tuple[Rows, ...], ...]) -> int:
    """Rows that the busiest member sends to others."""
    return max(sum(b - a for j, (a, b) in enumerate(row) if j != i) for i, row in enumerate(table))
