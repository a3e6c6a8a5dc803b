"""The values of a few variables set aside, exactly where that is soon done: branch and bound (Land & Doig, 1960).

    bound(some fixed)   the least sum where each reader of one that is not fixed has it as suits that reader
    next                the set of fixed values with the least bound; of what is free there, what its readers want most
                        differently is fixed, at each of its values

A bound is one elimination, and equal parts of them are done once. No choice costs less than the least bound of what has
not been looked into.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping

import numpy as np

from .elimination import Problem, objective

NODES = 60
"""So many eliminations are done at most."""

Bounded = Callable[[Mapping[int, int]], tuple[float, list[int]]]
"""From the values that are fixed to a bound, and the values of all variables that have it."""

Answer = tuple[float, list[int]]
"""A cost, and the values that have it."""


def branched(
    problem: Problem, hubs: list[int], bounded: Bounded, best: Answer, enough: float, nodes: int = NODES
) -> tuple[Answer, float]:
    """The best found, `best` or better, and a lower bound; they differ by `enough`, relative, if the nodes last.

    Where the least bound is, all that is free is tried at what its readers there want together, before one is fixed.
    """
    near = readers(problem, hubs)
    bound, values = bounded({})
    left: list[tuple[float, int, dict[int, int], list[int]]] = [(bound, 0, {}, values)]
    tried: set[tuple[int, ...]] = set()
    count, floor = 1, math.inf
    while left and count < nodes and best[0] - left[0][0] > enough * abs(left[0][0]):
        _, _, fixed, values = left[0]
        wanted = {h: _together(problem.unary[h], near[h], values) for h in hubs if h not in fixed}
        whole = {h: fixed.get(h, wanted.get(h, (0, 0.0))[0]) for h in hubs}
        if tuple(whole.values()) not in tried:
            tried.add(tuple(whole.values()))
            found = bounded(whole)[1]
            best, count = min(best, (objective(problem, found), found), key=lambda b: b[0]), count + 1
            continue
        heapq.heappop(left)
        h = max(wanted, key=lambda h: (wanted[h][1], h))
        for x in range(len(problem.unary[h])):
            bound, values = bounded({**fixed, h: x})
            count += 1
            if len(wanted) == 1:
                best, floor = min(best, (objective(problem, values), values), key=lambda b: b[0]), min(floor, bound)
            elif bound < best[0]:
                heapq.heappush(left, (bound, count, {**fixed, h: x}, values))
    return best, min(best[0], floor, *(b for b, *_ in left))


def readers(problem: Problem, hubs: list[int]) -> dict[int, list[tuple[int, np.ndarray]]]:
    """Of each of these variables its neighbours, and the tables between, its own values first."""
    near: dict[int, list[tuple[int, np.ndarray]]] = {h: [] for h in hubs}
    for (i, j), table in problem.pairs.items():
        if i in near:
            near[i].append((j, table))
        if j in near:
            near[j].append((i, table.T))
    return near


def _together(own: np.ndarray, near: list[tuple[int, np.ndarray]], values: list[int]) -> tuple[int, float]:
    """The best value beside the neighbours as they are, and how much more it costs than if each had its favourite."""
    columns = [t[:, values[j]] for j, t in near]
    costs = own + sum(columns)
    return int(costs.argmin()), float(costs.min() - own.min() - math.fsum(c.min() for c in columns))
