"""The least of a sum of unary and pairwise tables: exactly where elimination is narrow enough, else as near as can be.

Where that is too wide, what can be decided beforehand is taken out first (`presolve.py`); what is left may be narrow
enough. Where a joint table would still pass `LIMIT` entries, variables are set aside, such as one that all layers read:

    bound    each reader of one that is set aside may have it as suits it
    start    those set aside take what suits the values of that bound, and the rest is solved exactly, again and again
    branched the values of those set aside one after another, each with a bound of its own (`branch.py`)
    raised   the bound is found anew with as few set aside as time allows
    in turn  others are set aside, at the values that they have, those first that were so least often

The answer says how far from the least it can be.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from . import elimination
from .branch import NODES, branched, readers
from .elimination import Elimination, Problem, Store, objective
from .presolve import Presolved

WIDE = 50_000_000
"""Entries of the largest joint table that is gone through to spare hubs,"""

WORTH = 300_000_000
"""and of all of them together: about half a second."""

BRANCHED = 2 * WORTH
"""Entries of all eliminations that branch on what is set aside."""

NONE: Mapping[int, int] = {}

MANY = 12
"""Neighbours that make a variable a hub."""

ENOUGH = 1e-3
"""A relative gap below which the search ends."""

FREED = 16
"""So many of the largest variables set aside are tried to be freed for a better bound."""

IDLE = 3
"""The search ends when so many cuts have not helped, one after another."""


@dataclass(frozen=True)
class Solution:
    """`values`: the choice of each variable; `cost`: its objective; `bound`: no choice costs less."""

    values: list[int]
    cost: float
    bound: float

    @property
    def exact(self) -> bool:
        """Whether no choice can cost less."""
        return self.cost <= self.bound + 1e-9 * abs(self.bound)

    @property
    def gap(self) -> float:
        """How far above the least the cost can be, relative."""
        return (self.cost - self.bound) / self.bound if self.bound > 0 else 0.0


@dataclass(frozen=True)
class Known:
    """What another problem says of this one: of some variables the values that are worth a look, and a cost that no
    choice is expected to undercut."""

    values: Mapping[int, np.ndarray]
    bound: float


def solve(
    problem: Problem, store: Store | None = None, hubs: Iterable[int] = (), known: Known | None = None
) -> Solution:
    """The values with the least sum.

    Args:
        hubs: variables that are likely better set aside than eliminated.
        known: where elimination of all is too wide, the answer is sought among these values first.
    """
    store = store or Store()
    if _narrow(problem, ()):
        return _eliminated(problem, store, WIDE)
    if known is not None and (beside := _beside(problem, store, known)) is not None:
        return beside
    small, hubs = Presolved(problem, store), set(hubs)
    likely = {n for n, i in enumerate(small.numbers) if i in hubs}
    if _narrow(small.problem, ()):
        found = _eliminated(small.problem, store, WIDE)
    else:
        found = _with_aside(small.problem, store, likely, turns=False)
    values = small.values(found.values)
    cost = objective(problem, values)
    found = Solution(values, cost, cost if found.exact else min(cost, small.constant + found.bound))
    if found.gap > ENOUGH:  # what is left may lead the search to worse places
        likely = {h for h in hubs if len(problem.unary[h]) > 1}
        whole = _with_aside(problem, store, likely, known=found.bound)
        best = min(found, whole, key=lambda s: s.cost)
        found = replace(best, bound=min(best.cost, max(found.bound, whole.bound)))
    return found


def _beside(problem: Problem, store: Store, known: Known) -> Solution | None:
    """The least of what is known to be left, if that is as good as is expected."""
    rows = known.values
    small = Problem([_part(store, u, (rows.get(i),)) for i, u in enumerate(problem.unary)])
    small.pairs = {(i, j): _part(store, t, (rows.get(i), rows.get(j))) for (i, j), t in problem.pairs.items()}
    if _cut(small, (), WIDE, math.inf, first=True)[0]:  # entries do not tell: most parts are equal, and done once
        return None
    left, _ = Elimination(small, {}, store, WIDE).run()
    values = [int(rows[i][x]) if i in rows else x for i, x in enumerate(left)]
    cost = objective(problem, values)
    found = Solution(values, cost, min(cost, known.bound))
    return found if found.gap <= ENOUGH else None


def _part(store: Store, table: np.ndarray, rows: tuple[np.ndarray | None, ...]) -> np.ndarray:
    """These rows along each axis; None are all."""
    if all(r is None for r in rows):
        return table
    key = ("part", id(table), *(None if r is None else r.tobytes() for r in rows))
    if key not in store.done:
        part = table
        for axis, r in enumerate(rows):
            part = part if r is None else part.take(r, axis=axis)
        store.done[key] = (part, table)
    return store.done[key][0]


def _with_aside(
    problem: Problem, store: Store, likely: set[int], turns: bool = True, known: float | None = None
) -> Solution:
    chosen, limit = _set_aside(problem, likely)
    if not chosen:
        return _eliminated(problem, store)
    return _with_hubs(problem, chosen, store, likely, limit, turns, known)


def _eliminated(problem: Problem, store: Store, limit: int = 0) -> Solution:
    values, complete = Elimination(problem, {}, store, limit).run()
    cost = objective(problem, values)
    return Solution(values, cost, cost if complete else relaxed(problem, set(), store)[0])


def _narrow(problem: Problem, aside: Iterable[int]) -> bool:
    """Whether elimination of all but `aside` is worth its time."""
    cut, entries = _cut(problem, aside, WIDE, math.inf, first=True)
    return not cut and entries <= WORTH


def _set_aside(problem: Problem, likely: set[int]) -> tuple[list[int], int]:
    """As few as can be, and the least limit for which that holds: those that must be, or those and the likely ones,
    which may spare others. A lower limit is faster, and may leave fewer: what is joined early is joined for good."""
    found = []
    for limit in (elimination.LIMIT // 10, elimination.LIMIT):
        found.append((_cut(problem, (), limit)[0], limit))
        found.append(([*likely, *_cut(problem, likely, limit)[0]], limit))
    return min(found, key=lambda f: len(f[0]))


def _cut(
    problem: Problem,
    aside: Iterable[int],
    limit: int,
    many: float = MANY,
    times: Mapping[int, int] | None = None,
    first: bool = False,
) -> tuple[list[int], int]:
    """Variables to set aside beside `aside`, and the entries of all joint tables of the elimination without them.

    Those with more than `many` neighbours; and where elimination, played through without tables, would still pass
    `limit`, the one with most neighbours there. `times`: how often each was set aside before; the rarest are taken.
    `first`: end with the first of them.
    """
    times, aside = times or {}, set(aside)
    sizes = {i: len(u) for i, u in enumerate(problem.unary) if len(u) > 1 and i not in aside}
    near: dict[int, set[int]] = {i: set() for i in sizes}
    for i, j in problem.pairs:
        if i in near and j in near:
            near[i].add(j)
            near[j].add(i)
    cut, entries = [i for i, n in near.items() if len(n) > many and not times.get(i)], 0
    for h in cut:
        _remove(near, h)
    weights = {i: _joint_size(near, sizes, i) for i in near}
    heap = [(weight, i) for i, weight in weights.items()]
    heapq.heapify(heap)
    while near:
        weight, v = heapq.heappop(heap)
        if v not in near or weight != weights[v]:
            continue  # since pushed, a neighbour has gone; it was pushed again
        if weight > limit:
            heapq.heappush(heap, (weight, v))
            v = max(near, key=lambda w: (-times.get(w, 0), len(near[w]), -sizes[w]))
            cut.append(v)
            if first:
                break
            touched = _remove(near, v)
        else:
            entries += weight
            touched = _remove(near, v)
            for w in touched:
                near[w] |= touched
                near[w].discard(w)
        for w in touched:
            weights[w] = _joint_size(near, sizes, w)
            heapq.heappush(heap, (weights[w], w))
    return cut, entries


def _remove(near: dict[int, set[int]], v: int) -> set[int]:
    touched = near.pop(v)
    for w in touched:
        near[w].discard(v)
    return touched


def _joint_size(near: dict[int, set[int]], sizes: dict[int, int], v: int) -> int:
    size = sizes[v]
    for w in near[v]:
        size *= sizes[w]
    return size


def relaxed(
    problem: Problem, hubs: set[int], store: Store, limit: int = 0, fixed: Mapping[int, int] = NONE
) -> tuple[float, list[int]]:
    """A lower bound, and the values that have it: each reader of a hub may take the hub's value that suits it. `fixed`:
    the values that other variables must have."""
    loose = Problem(list(problem.unary), {}, problem.sums)
    for i in hubs:
        loose.unary[i] = np.array([float(problem.unary[i].min())])
    for (i, j), table in problem.pairs.items():
        if i in hubs and j in hubs:
            continue
        if i in hubs or j in hubs:
            other = j if i in hubs else i
            loose.add(other, _least(store, table, 0 if i in hubs else 1))
        else:
            loose.pairs[i, j] = table
    values, complete = Elimination(loose, dict(fixed), store, limit).run()
    return objective(loose, values) if complete else sum(float(u.min()) for u in problem.unary), values


def _least(store: Store, table: np.ndarray, axis: int) -> np.ndarray:
    key = ("least", id(table), axis)
    if key not in store.done:
        store.done[key] = (table.min(axis=axis), table)
    return store.done[key][0]


def _with_hubs(
    problem: Problem,
    hubs: list[int],
    store: Store,
    likely: set[int],
    limit: int,
    turns: bool = True,
    known: float | None = None,
) -> Solution:
    """Fix the hubs, solve the rest, better the hubs; first as suits the values that each had with hubs of its own.

    `turns`: whether others are set aside in turn. `known`: a bound, which is not raised then.
    """
    bound, values = relaxed(problem, set(hubs), store, limit)
    near = readers(problem, hubs)
    best = (math.inf, values)
    seen: set[tuple] = set()
    fixed = _bettered(problem, near, values)
    while tuple(fixed.values()) not in seen:
        seen.add(tuple(fixed.values()))
        values, _ = Elimination(problem, fixed, store, limit).run()
        fixed = _bettered(problem, near, values)
        best = min(best, (objective(problem, values), list(values)), key=lambda b: b[0])
    if known is None and best[0] - bound > ENOUGH * abs(bound):
        best, raised = _branched(problem, hubs, best, store, limit)
        bound = max(bound, raised)
    bound = _raised(problem, likely, best[0], bound, store, limit) if known is None else max(bound, known)
    if turns:
        best = _in_turn(problem, hubs, best, bound, store, limit)
    return Solution(best[1], best[0], min(bound, best[0]))


def _branched(
    problem: Problem, hubs: list[int], best: tuple[float, list[int]], store: Store, limit: int
) -> tuple[tuple[float, list[int]], float]:
    """Values of the hubs in turn, where time allows for as many as there are."""
    nodes = min(NODES, BRANCHED // max(_cut(problem, hubs, limit)[1], 1))
    if sum(len(problem.unary[h]) for h in hubs) > nodes:
        return best, -math.inf

    def bounded(fixed: Mapping[int, int]) -> tuple[float, list[int]]:
        return relaxed(problem, set(hubs) - fixed.keys(), store, limit, fixed)

    return branched(problem, hubs, bounded, best, ENOUGH, nodes)


def _in_turn(
    problem: Problem, hubs: list[int], best: tuple[float, list[int]], bound: float, store: Store, limit: int
) -> tuple[float, list[int]]:
    """Set others aside as they are and solve the rest anew, while the gap is open and that helps."""
    times, idle = Counter(hubs), 0
    while idle < IDLE and best[0] - bound > ENOUGH * abs(bound):
        cut, _ = _cut(problem, (), limit, times=times)
        times.update(cut)
        values, _ = Elimination(problem, {h: best[1][h] for h in cut}, store, limit).run()
        cost, idle = objective(problem, values), idle + 1
        if cost < best[0] - 1e-12 * abs(best[0]):
            best, idle = (cost, values), 0
    return best


def _raised(problem: Problem, likely: set[int], cost: float, bound: float, store: Store, limit: int) -> float:
    """While the gap is open, the bound that has as few set aside as time allows: of all, and of all but the likely."""
    for aside in ((), likely):
        if cost - bound > ENOUGH * abs(bound):
            hubs = {*aside, *_cut(problem, aside, limit)[0]}
            for h in sorted(hubs, key=lambda h: (-len(problem.unary[h]), h))[:FREED]:
                if _narrow(problem, hubs - {h}):
                    hubs.discard(h)
            bound = max(bound, relaxed(problem, hubs, store, WIDE)[0])
    return bound


def _bettered(problem: Problem, near: dict, values: list[int]) -> dict[int, int]:
    """Each hub at its best beside all other values."""
    for h, tables in near.items():
        values[h] = int(np.argmin(problem.unary[h] + sum(t[:, values[j]] for j, t in tables)))
    return {h: values[h] for h in near}
