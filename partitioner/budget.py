"""The best plan within a memory budget: a Lagrange multiplier on bytes, then repairs.

    D(price) = min over x of  seconds(x) + price * bytes(x)  -  price * M        a lower bound for every price >= 0

The price is searched along the hull of (bytes, seconds): the next one is the slope between the last plan that does not
fit and the last that does. All layers change their mind at one price, so the best plan at a single price may leave much
of the budget unused. Two repairs spend it: take the cheaper of the two neighbouring plans for the layers before some
point and the smaller one after it (and the reverse), every point tried; then keep copies instead of making them again,
the most seconds a byte first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.fx as fx

from .elimination import Problem, Store, objective
from .errors import TooLittle
from .solve import Solution, solve
from .tables import Copy, Tables

STEPS = 24
"""At most so many prices are tried."""


@dataclass
class Spent:
    """A plan within reach: its values, the copies that are made again, its seconds and bytes."""

    values: list[int]
    again: set[int]
    seconds: float
    nbytes: float


def within(tables: Tables, budget: float, saved: frozenset[fx.Node]) -> tuple[Solution, frozenset[str]]:
    """The solution whose bytes are at most the budget, and the tensors that backward makes again.

    Raises:
        TooLittle: no plan fits.
    """
    search, hubs = _Search(tables, saved), tables.hubs()
    loose = search.at(0.0, hubs)
    if loose.nbytes <= budget:
        return Solution(loose.values, loose.seconds, search.bound), search.names(loose.again)
    tight = search.at(search.dearest(), hubs)
    if tight.nbytes > budget:
        rest = sum(float(m[v]) for v, m, w in zip(tight.values, search.memory, tables.variables, strict=True) if w.name)
        mesh = tables.prices.mesh
        raise TooLittle(
            f"memory={budget:.0f} bytes a device cannot hold this model on mesh {mesh}: the smallest plan "
            f"takes {tight.nbytes:.0f}, {rest:.0f} of it parameters, gradients and optimizer state, the rest what "
            f"backward reads. Leave zero= and pins open, give dp or tp more ranks, a smaller batch, or more memory",
            tight.nbytes,
        )
    bound = search.bound - search.price * budget
    for _ in range(STEPS):
        price = (tight.seconds - loose.seconds) / max(1.0, loose.nbytes - tight.nbytes)
        found = search.at(price, hubs)
        bound = max(bound, search.bound - price * budget)
        here = found.seconds + price * found.nbytes
        if here >= tight.seconds + price * tight.nbytes - 1e-9 * abs(here):
            break
        loose, tight = (loose, found) if found.nbytes <= budget else (found, tight)
    best = min((search.mixed(a, b, budget) for a, b in ((loose, tight), (tight, loose))), key=lambda s: s.seconds)
    best = search.keep(min(best, tight, key=lambda s: s.seconds), budget)
    return Solution(best.values, best.seconds, min(bound, best.seconds)), search.names(best.again)


class _Search:
    """Solves at a price. `bound`: of the last one, the least of seconds + price * bytes."""

    def __init__(self, tables: Tables, saved: frozenset[fx.Node]):
        self.tables, self.problem, self.store = tables, tables.problem, Store()
        self.memory = tables.memory(saved)
        self.copies = tables.copies()
        self.by_pair: dict[tuple[int, int], list[Copy]] = {}
        for copy in self.copies:
            self.by_pair.setdefault((copy.giver, copy.reader), []).append(copy)
        self.bound, self.price = 0.0, 0.0
        self._priced: dict[tuple, tuple] = {}

    def dearest(self) -> float:
        """A price at which bytes are all that counts."""
        seconds = sum(float(np.ptp(np.minimum(u, 1e3))) for u in self.problem.unary)
        return 1e3 * max(seconds, 1e-6) / max(1.0, sum(float(m.min()) for m in self.memory) * 1e-3)

    def at(self, price: float, hubs: list[int]) -> Spent:
        problem = Problem([self._own(u, m, price) for u, m in zip(self.problem.unary, self.memory, strict=True)])
        problem.pairs = dict(self.problem.pairs)
        for (g, h), copies in self.by_pair.items():
            for copy in copies:
                problem.pair(g, h, self._copy(copy, price))
        solution = solve(problem, self.store, hubs)
        self.bound, self.price = solution.bound, price
        again = {i for i, c in enumerate(self.copies) if self._is_again(c, solution.values, price)}
        return self.spent(solution.values, again)

    def _own(self, seconds: np.ndarray, nbytes: np.ndarray, price: float) -> np.ndarray:
        key = (id(seconds), id(nbytes), price)
        if key not in self._priced:
            self._priced[key] = (seconds + price * nbytes, seconds, nbytes)
        return self._priced[key][0]

    def _copy(self, copy: Copy, price: float) -> np.ndarray:
        key = (id(copy.seconds), id(copy.nbytes), price)
        if key not in self._priced:
            self._priced[key] = (np.minimum(copy.seconds, price * copy.nbytes), copy.seconds, copy.nbytes)
        return self._priced[key][0]

    def _is_again(self, copy: Copy, values: list[int], price: float) -> bool:
        at = values[copy.giver], values[copy.reader]
        return bool(copy.nbytes[at] > 0 and copy.seconds[at] < price * copy.nbytes[at])

    def spent(self, values: list[int], again: set[int]) -> Spent:
        seconds = objective(self.problem, values)
        nbytes = sum(float(m[v]) for m, v in zip(self.memory, values, strict=True))
        for i, copy in enumerate(self.copies):
            at = values[copy.giver], values[copy.reader]
            if i in again:
                seconds += float(copy.seconds[at])
            else:
                nbytes += float(copy.nbytes[at])
        return Spent(list(values), again, seconds, nbytes)

    def mixed(self, first: Spent, last: Spent, budget: float) -> Spent:
        """`first` up to some layer and `last` after it: the cheapest point that fits."""
        place = self.tables.places()
        order = sorted({place[i] for i in range(len(place)) if first.values[i] != last.values[i]} | {0})
        best = first if first.nbytes <= budget else last
        for cut in order:
            pairs = zip(place, first.values, last.values, strict=True)
            values = [a if at < cut else b for at, a, b in pairs]
            again = {
                i for i, c in enumerate(self.copies) if i in (first.again if place[c.reader] < cut else last.again)
            }
            made = self.spent(values, again)
            if made.nbytes <= budget and made.seconds < best.seconds:
                best = made
        return best

    def keep(self, best: Spent, budget: float) -> Spent:
        """Spend what is left on copies that are kept."""
        left, again = budget - best.nbytes, set(best.again)

        def worth(i: int) -> tuple[float, float]:
            at = best.values[self.copies[i].giver], best.values[self.copies[i].reader]
            return float(self.copies[i].seconds[at]), float(self.copies[i].nbytes[at])

        for i in sorted(best.again, key=lambda i: -worth(i)[0] / max(1.0, worth(i)[1])):
            if worth(i)[1] <= left:
                left -= worth(i)[1]
                again.discard(i)
        return self.spent(best.values, again)

    def names(self, again: set[int]) -> frozenset[str]:
        return frozenset(self.copies[i].value for i in again)
