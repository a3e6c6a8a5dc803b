"""Seconds of a collective: the cheapest of its algorithms, by message size.

    level    T_l(w) = min over the link's lines of  base + hop * steps + w / bandwidth
    flat     T(w)   = max over the links of T_l(w), one ring over all k ranks
    levels   T(w)   = max over levels of (T_l(w_l) + starts of the other levels),  w_l = w * share of the level
    seconds  = min(flat, levels)

w: bytes that one rank sends in a ring: all_gather b (k - 1) of its own b, all_reduce 2 n (k - 1) / k of n,
reduce_scatter and all_to_all n (k - 1) / k, permute and halo what it sends. Two lines, one for small messages and one
for large, make a concave curve: one line cannot meet both ends (`docs/hardware.md` has the errors).

Steps of k ranks: ring k - 1, tree ceil(log2 k) (recursive doubling; Thakur, Rabenseifner, Gropp, "Optimization of
collective communication operations in MPICH", 2005), twice that for an all-reduce; permute and halo 1.
Share of level l with k_l ranks (k in all), outermost first:
    all_gather, all_reduce, reduce_scatter   (k_l - 1) * ranks outside / (k - 1)    gather outside first, reduce inside
    all_to_all                               (k_l - 1) * ranks inside / (k - 1)     each piece straight to its owner
They add up to 1, so levels of one link are never dearer than flat. Levels overlap: NCCL cuts a message into chunks that
are in different levels at once, so the slowest level bounds the rest.
In the switch, all-reduce: a rank sends n and what the switch returns to its memory, n (k + 1) / k; taken at k = 3, the
fewest for which it beats a ring, so that more ranks never cost less. Gathers and scatters: w, with the switch's start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import numpy as np

from .hardware import Line, Link

Levels = tuple[tuple[int, Link], ...]
"""(ranks, link) of each level of a group."""

KINDS = frozenset({"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute", "halo"})
MESSAGES = frozenset({"message", "stream", "messages", "buffer"})
"""What hand-written collectives are priced by (`hand_cost`)."""
_HANDED = frozenset({"permute", "halo"}) | MESSAGES
_IN_SWITCH = frozenset({"all_gather", "all_reduce", "reduce_scatter"})
Straight = tuple[tuple[float, float], ...]
"""Lines (seconds at 0 bytes, seconds a byte), of which the cheapest counts."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by bytes sent: the cheapest of `ways`, a way as slow as the slowest of its parts.

    Call it with bytes, a number or an array.
    """

    ways: tuple[tuple[Straight, ...], ...]

    @overload
    def __call__(self, sent: float) -> float: ...
    @overload
    def __call__(self, sent: np.ndarray) -> np.ndarray: ...
    def __call__(self, sent: float | np.ndarray) -> float | np.ndarray:
        if isinstance(sent, np.ndarray):
            return self._of_array(sent)
        best = math.inf
        for parts in self.ways:
            worst = 0.0
            for lines in parts:
                start, each = lines[0]
                part = start + each * sent
                for start, each in lines[1:]:
                    if start + each * sent < part:
                        part = start + each * sent
                if part > worst:
                    worst = part
            if worst < best:
                best = worst
        return best

    def _of_array(self, sent: np.ndarray) -> np.ndarray:
        ways = []
        for parts in self.ways:
            each = [np.minimum.reduce([start + rate * sent for start, rate in lines]) for lines in parts]
            ways.append(np.maximum.reduce(each) if each else np.zeros(sent.shape))
        return np.minimum.reduce(ways)

    @property
    def start(self) -> float:
        """Seconds at 0 bytes."""
        return self(0.0)


@overload
def collective_seconds(kind: str, ranks_per_level: Levels, sent_bytes: float) -> float: ...
@overload
def collective_seconds(kind: str, ranks_per_level: Levels, sent_bytes: np.ndarray) -> np.ndarray: ...
def collective_seconds(kind: str, ranks_per_level: Levels, sent_bytes: float | np.ndarray) -> float | np.ndarray:
    """Seconds of one collective.

    Args:
        kind: one of `KINDS`.
        ranks_per_level: (ranks, link) of each level, in any order (`Mesh.levels` of the axes).
        sent_bytes: bytes that one rank sends by the ring formula; a number or an array.

    Returns:
        Seconds: 0 for one rank alone; monotone in bytes.

    Raises:
        ValueError: no such kind.
    """
    return collective_curve(kind, ranks_per_level)(sent_bytes)


@lru_cache(maxsize=4096)
def collective_curve(kind: str, ranks_per_level: Levels) -> Curve:
    """The curve of `collective_seconds`, to keep where one group is priced at many sizes."""
    if kind not in KINDS:
        raise ValueError(f"no collective {kind!r}; there are {', '.join(sorted(KINDS))}")
    levels = [(k, link) for k, link in ranks_per_level if k > 1]
    levels.sort(key=lambda level: level[1].bandwidth)
    if not levels:
        return Curve(((),))
    ranks = math.prod(k for k, _ in levels)
    flat = tuple(_lines(kind, ranks, link) for link in dict.fromkeys(link for _, link in levels))
    if len(levels) == 1 or kind in _HANDED:
        return Curve((flat,))
    return Curve((flat, _by_level(kind, levels, ranks)))


def _by_level(kind: str, levels: list[tuple[int, Link]], ranks: int) -> tuple[Straight, ...]:
    each = [_lines(kind, k, link) for k, link in levels]
    starts = [min(start for start, _ in lines) for lines in each]
    parts, outside = [], 1
    for (k, _), lines, own in zip(levels, each, starts, strict=True):
        others = outside if kind != "all_to_all" else ranks // (outside * k)
        share, wait = (k - 1) * others / (ranks - 1), sum(starts) - own
        parts.append(tuple((start + wait, rate * share) for start, rate in lines))
        outside *= k
    return tuple(parts)


def _lines(kind: str, ranks: int, link: Link) -> Straight:
    """Of k ranks on one link: seconds at 0 bytes, and seconds a byte of the ring formula."""
    lines = [(line.base + line.hop * steps(kind, ranks, line), 1 / line.bandwidth) for line in link.lines_of(kind)]
    switch = link.switch_of(kind) if kind in _IN_SWITCH else None
    if switch is not None:
        more = 4 / 3 * ranks / (2 * (ranks - 1)) if kind == "all_reduce" else 1.0
        lines.append((switch.base, more / switch.bandwidth))
    return _useful(lines)


def _useful(lines: list[tuple[float, float]]) -> Straight:
    """Without the lines that another beats at every size."""
    kept: list[tuple[float, float]] = []
    for line in sorted(set(lines)):
        if not kept or line[1] < kept[-1][1]:
            kept.append(line)
    return tuple(kept)


def steps(kind: str, ranks: int, line: Line) -> int:
    """Messages that follow each other on a line."""
    if kind in _HANDED:
        return 1
    once = (ranks - 1).bit_length() if line.tree else ranks - 1
    return 2 * once if kind == "all_reduce" else once
