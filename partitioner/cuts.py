"""The best places to cut a chain into stages, exactly: a table over stages and places.

    cost of a stage [i, j)    seconds of its places + what is sent where it starts + what is sent where it ends
    best[k, j]                min over i of  max(best[k-1, i], cost[i, j])          stages 0 to k lie before place j
    of those                  the least sum of squares with no stage above that: even where it costs nothing

With a limit on memory a stage is also one that fits: resident + in flight at its rank * saved bytes <= limit.
Of a long chain the places where little is sent are looked at: those with no less right before and after.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

EVERY = 400
"""Chains of at most so many places are cut anywhere."""

MOST = 2000
"""Of a long chain whose low places are too few, about so many."""


@dataclass(frozen=True)
class Room:
    """What a stage may hold.

    Attributes:
        resident, saved: per place, bytes held all the time, and from F to B of one micro-batch.
        in_flight: per stage, micro-batches between F and B at most.
        limit: bytes of a device.
    """

    resident: Sequence[float]
    saved: Sequence[float]
    in_flight: Sequence[int]
    limit: float


def best_cuts(
    seconds: Sequence[float],
    sent: Sequence[float],
    count: int,
    fixed: Mapping[int, int] | None = None,
    room: Room | None = None,
) -> list[int] | None:
    """The starts of stages 1 to `count` - 1 that make the costliest stage cheapest, no stage empty; None: none fit.

    Args:
        seconds: of each place, at least `count` of them.
        sent: seconds to send what crosses a cut before each place; infinite where there can be none.
        fixed: {stage: place} of starts that are given.
        room: what a stage may hold.
    """
    n, fixed = len(seconds), dict(fixed or {})
    at = np.array(sorted({0, n, *candidates(sent, count), *fixed.values()}))
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    ends = np.array([*sent, 0.0])[at]
    ends[0] = 0.0
    cost = total[at][None, :] - total[at][:, None] + ends[None, :] + ends[:, None]
    cost[np.tril_indices(len(at))] = np.inf
    costs = [np.where(_fits(at, k, room), cost, np.inf) if room else cost for k in range(count)]
    may_end = [_may_end(at, k, count, fixed) for k in range(count)]
    least, _ = _table(costs, may_end, np.maximum)
    if not np.isfinite(least):
        return None
    squares = [np.where(c <= least * (1 + 1e-9), c * c, np.inf) for c in costs]
    _, ends_at = _table(squares, may_end, np.add)
    return [int(at[j]) for j in ends_at]


def _may_end(at: np.ndarray, stage: int, count: int, fixed: Mapping[int, int]) -> np.ndarray:
    if stage == count - 1:
        return at == at[-1]
    return at == fixed[stage + 1] if stage + 1 in fixed else at < at[-1]


def _fits(at: np.ndarray, stage: int, room: Room) -> np.ndarray:
    held = np.array(room.resident) + room.in_flight[stage] * np.array(room.saved)
    total = np.concatenate([[0.0], np.cumsum(held)])[at]
    return total[None, :] - total[:, None] <= room.limit


def _table(costs: Sequence[np.ndarray], may_end: Sequence[np.ndarray], join: np.ufunc) -> tuple[float, list[int]]:
    """The least joined cost, and the indices where all stages but the last end."""
    best = np.where(may_end[0], costs[0][0], np.inf)
    back: list[np.ndarray] = []
    for cost, allowed in zip(costs[1:], may_end[1:], strict=True):
        joined = join(best[:, None], cost)
        back.append(joined.argmin(axis=0))
        best = np.where(allowed, joined.min(axis=0), np.inf)
    j, out = len(best) - 1, []
    for before in reversed(back):
        j = int(before[j])
        out.append(j)
    return float(best[-1]), out[::-1]


def candidates(sent: Sequence[float], count: int) -> list[int]:
    n = len(sent)
    if n <= EVERY:
        return list(range(1, n))
    runs = [(s, list(g)) for s, g in itertools.groupby(range(n), key=sent.__getitem__)]
    levels = [sent[g[0]] for _, g in runs]
    around = [(levels[max(0, k - 1)], levels[min(k + 1, len(runs) - 1)]) for k in range(len(runs))]
    low = [g[0] for (s, g), near in zip(runs, around, strict=True) if s <= min(near) and g[0] > 0]
    return low if len(low) >= 4 * count else sorted({*low, *range(1, n, 1 + n // MOST)})
