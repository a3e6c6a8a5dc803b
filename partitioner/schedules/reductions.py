"""Where gradients are summed over replicas: once a step, a stage's right after its last weight gradient.

A REDUCE runs beside the computations that follow, so all but the last of a rank lie under the cool-down. Replicas of a
rank have one schedule, so they meet in the same order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .action import Action
from .schedule import Schedule


def with_reductions(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """The schedule with a REDUCE for each of these stages; for all by default.

    A stage without a backward gets none.
    """
    orders = []
    for order in schedule.orders:
        last = {a.stage: i for i, a in enumerate(order) if a.kind in ("W", "BW")}
        due = {i: stage for stage, i in last.items() if stages is None or stage in stages}
        out: list[Action] = []
        for i, action in enumerate(order):
            out.append(action)
            if i in due:
                out.append(Action(due[i], "REDUCE"))
        orders.append(tuple(out))
    return replace(schedule, orders=tuple(orders))
