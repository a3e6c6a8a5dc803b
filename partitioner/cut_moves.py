"""Cuts moved one at a time, from those that make the costliest stage cheapest (`cuts.py`).

    sending_less    a cut goes where least is sent, of the places where the costlier of its two stages gets at most
                    `NEAR` costlier: seconds are not known better, and what is sent takes memory and CPU time too
    even_ranks      of several stages a rank: a cut goes, where no more is sent, to where the sum of squares of ranks'
                    costs, and a little of stages', is least. A head that costs more than a stage leaves stages uneven,
                    but ranks may be even; costs go from rank to rank by the cuts between them, step by step

Costs of stages are as in `cuts.py`: seconds, and what is sent at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from .cuts import candidates

NEAR = 0.02
"""Relative."""

STAGES = 0.01
"""How much even stages weigh beside even ranks."""

SWEEPS = 50
"""Over all cuts, at most."""

EQUAL = 1e-9
"""Relative; sums of the same numbers in another order."""

Pair = tuple[np.ndarray, np.ndarray]
"""Costs of the stage before a cut and of the one after it, for each place of the cut."""


class _Chain:
    """A chain cut into stages; `ends` are their starts, and the end of the last."""

    def __init__(self, seconds: Sequence[float], sent: Sequence[float], cuts: Sequence[int], fixed: Collection[int]):
        self.places = np.array(sorted({*candidates(sent, len(cuts) + 1), *cuts}))
        self.total = np.concatenate([[0.0], np.cumsum(seconds)])
        self.edge = np.array([0.0, *sent[1:], 0.0])
        self.ends, self.fixed = [0, *cuts, len(seconds)], fixed

    @property
    def costs(self) -> np.ndarray:
        return np.diff(self.total[self.ends]) + self.edge[self.ends[:-1]] + self.edge[self.ends[1:]]

    def pair(self, stage: int, at: np.ndarray) -> Pair:
        low, high = self.ends[stage - 1], self.ends[stage + 1]
        first = self.total[at] - self.total[low] + self.edge[low] + self.edge[at]
        return first, self.total[high] - self.total[at] + self.edge[at] + self.edge[high]

    def sweep(self, best: Callable[[int, np.ndarray], int]) -> list[int]:
        """Move cut after cut to the best of its places, given by index, until none moves; they are at least its own."""
        for _ in range(SWEEPS):
            before = list(self.ends)
            for stage in set(range(1, len(self.ends) - 1)) - set(self.fixed):
                low, now, high = self.ends[stage - 1 : stage + 2]
                free = (self.places > low) & (self.places < high)
                free &= self.edge[self.places] <= self.edge[now] * (1 + EQUAL)
                at = self.places[free & (self.places != now)]
                at = np.array([now, *at])  # where it is comes first: equals do not move it
                self.ends[stage] = int(at[best(stage, at)])
            if self.ends == before:
                break
        return self.ends[1:-1]


def sending_less(
    seconds: Sequence[float], sent: Sequence[float], cuts: Sequence[int], fixed: Collection[int] = ()
) -> list[int]:
    """The cuts, moved to where less is sent.

    Args:
        seconds, sent: as in `best_cuts`.
        cuts: the starts of stages 1 and further.
        fixed: stages that start where they do.
    """
    chain = _Chain(seconds, sent, cuts, fixed)
    given = chain.costs

    def best(stage: int, at: np.ndarray) -> int:
        costlier = np.maximum(*chain.pair(stage, at))
        may = costlier <= (1 + NEAR) * max(given[stage - 1], given[stage])
        less = may & (chain.edge[at] < chain.edge[at[0]] * (1 - EQUAL))
        if not less.any():
            return 0
        least = less & (chain.edge[at] <= chain.edge[at][less].min() * (1 + EQUAL))
        return int(np.where(least, costlier, np.inf).argmin())

    return chain.sweep(best)


def even_ranks(
    seconds: Sequence[float],
    sent: Sequence[float],
    cuts: Sequence[int],
    placement: Sequence[int],
    fixed: Collection[int] = (),
) -> list[int]:
    """The cuts, moved until no move makes the ranks more even.

    Args:
        seconds, sent, cuts, fixed: as above.
        placement: per stage its rank.
    """
    chain = _Chain(seconds, sent, cuts, fixed)

    def best(stage: int, at: np.ndarray) -> int:
        costs, (first, second) = chain.costs, chain.pair(stage, at)
        ranks = np.bincount(placement, weights=costs)
        a, b = placement[stage - 1], placement[stage]
        worth = STAGES * (first**2 + second**2)
        if a == b:
            worth += (ranks[a] - costs[stage - 1] - costs[stage] + first + second) ** 2
        else:
            worth += (ranks[a] - costs[stage - 1] + first) ** 2 + (ranks[b] - costs[stage] + second) ** 2
        found = int(worth.argmin())
        return found if worth[found] < worth[0] * (1 - EQUAL) else 0

    return chain.sweep(best)
