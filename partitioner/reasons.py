"""Why a call does what it does: what every other choice would have cost, all else unchanged.

    cost(x_g) = seconds_g(x_g) + sum over neighbours h of T_gh(x_g, chosen h)

per axis, over the group's joint values that differ from the chosen one on that axis alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .plan import Decision
from .strategies import Choice

if TYPE_CHECKING:
    from .tables import Tables


class Reasons:
    """The decisions of a solved problem, worked out when asked for."""

    def __init__(self, tables: Tables, values: list[int]):
        self._tables, self._values = tables, values
        self._where = {m.node.name: (i, k) for i, v in enumerate(tables.variables) for k, m in enumerate(v.members)}
        self._near: dict[int, list[tuple[int, np.ndarray]]] | None = None
        self._earlier: Reasons | None = None

    def after(self, earlier: Reasons | None) -> Reasons:
        """These, for the calls that `earlier` does not know: calls that replaced others were decided later."""
        self._earlier = earlier
        return self

    def of(self, call: str) -> dict[str, Decision]:
        """Per axis the decision on a call, where it had a choice."""
        if call not in self._where:
            return {}
        i, member = self._where[call]
        joint = self._tables.variables[i].joint
        assert joint is not None
        costs, chosen = self._costs(i), joint.joint[self._values[i]]
        found: dict[str, Decision] = {}
        for axis, name in enumerate(self._tables.prices.names):
            others = np.delete(joint.joint, axis, axis=1)
            alike = np.flatnonzero((others == np.delete(chosen, axis)).all(axis=1))
            best: dict[Choice, float] = {}
            for value in alike:
                choice = joint.choices[axis][joint.joint[value, axis]][member]
                best[choice] = min(best.get(choice, np.inf), float(costs[value]))
            if len(best) > 1:
                found[name] = Decision(joint.choices[axis][chosen[axis]][member], tuple(best.items()))
        return found

    def _costs(self, i: int) -> np.ndarray:
        problem = self._tables.problem
        if self._near is None:
            self._near = {}
            for (a, b), table in problem.pairs.items():
                self._near.setdefault(a, []).append((b, table))
                self._near.setdefault(b, []).append((a, table.T))
        near = self._near.get(i, [])
        return problem.unary[i] + sum((t[:, self._values[j]] for j, t in near), np.zeros(len(problem.unary[i])))
