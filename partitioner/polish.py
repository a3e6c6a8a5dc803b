"""Better a solution a few axes at a time, where all at once was too wide to be solved exactly.

Keep what every variable does on some axes and let it choose anew on the others: a smaller problem of the same kind,
which is solved exactly more often. Round after round over all choices of axes, from two starts, while it helps.

    K values on N axes become about K^(n/N) on n axes: 216 on three, 36 on two, 6 on one
"""

from __future__ import annotations

import itertools

import numpy as np

from .solve import ENOUGH, Problem, Solution, Store, objective, solve

ROUNDS = 3


def polish(problem: Problem, codes: list[np.ndarray], found: Solution, hubs: list[int]) -> Solution:
    """The solution, or a better one. `codes`: per variable (values, axes), what each value does on each axis."""
    axes = codes[0].shape[1] if codes else 0
    if found.gap <= ENOUGH or axes < 2:
        return found
    store, best = Store(), (found.cost, found.values)
    for start in (found.values, [_plainest(c, u) for c, u in zip(codes, problem.unary, strict=True)]):
        best = min(best, _climb(problem, codes, start, hubs, store), key=lambda x: x[0])
    return Solution(best[1], best[0], found.bound)


def _plainest(codes: np.ndarray, costs: np.ndarray) -> int:
    """The value that does something on the fewest axes; of those the cheapest."""
    busy = (codes != 0).sum(axis=1)
    return int(np.lexsort((costs, busy))[0])


def _climb(
    problem: Problem, codes: list[np.ndarray], start: list[int], hubs: list[int], store: Store
) -> tuple[float, list[int]]:
    axes = codes[0].shape[1]
    best = (objective(problem, start), list(start))
    for _ in range(ROUNDS):
        before = best[0]
        for size in {1, axes - 1}:
            for free in itertools.combinations(range(axes), size):
                best = _over(problem, codes, best, free, hubs, store)
        if best[0] >= before * (1 - 1e-6):
            break
    return best


def _over(
    problem: Problem,
    codes: list[np.ndarray],
    best: tuple[float, list[int]],
    free: tuple[int, ...],
    hubs: list[int],
    store: Store,
) -> tuple[float, list[int]]:
    """Choose anew on the axes `free`."""
    held = [a for a in range(codes[0].shape[1]) if a not in free]
    kept: dict[tuple, np.ndarray] = {}
    index = []
    for c, value in zip(codes, best[1], strict=True):
        alike = np.flatnonzero((c[:, held] == c[value, held]).all(axis=1))
        index.append(kept.setdefault((len(c), alike.tobytes()), alike))
    small = Problem([_part(store, u, i) for u, i in zip(problem.unary, index, strict=True)])
    small.pairs = {(i, j): _part(store, t, index[i], index[j]) for (i, j), t in problem.pairs.items()}
    values = [int(index[i][v]) for i, v in enumerate(solve(small, Store(), hubs).values)]
    cost = objective(problem, values)
    return (cost, values) if cost < best[0] else best


def _part(store: Store, table: np.ndarray, rows: np.ndarray, columns: np.ndarray | None = None) -> np.ndarray:
    """A part of a table; the same part of the same table is one object."""
    key = ("part", id(table), rows.tobytes(), columns.tobytes() if columns is not None else None)
    if key not in store.done:
        part = table[rows] if columns is None else table[np.ix_(rows, columns)]
        store.done[key] = (part, table)
    return store.done[key][0]
