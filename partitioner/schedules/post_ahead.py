"""Starts receives earlier, for transports whose transfers run beside computations and whose directions are independent.

`with_transfers` puts a receive where the value is sent, if F = B = W: where the receiver computes just then, after that
computation, and the transfer then lies between two computations. One computation earlier the receive is posted in time,
and the transfer runs beside. Sends keep their places, receives their order. The result no longer survives transfers
that block (two ranks may each receive before they send), so `validate` it with mode="async".
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import ScheduleError
from .action import COMPUTE, RECEIVES, Action
from .schedule import Schedule


def post_ahead(schedule: Schedule, computations: int = 1) -> Schedule:
    """The schedule with each receive moved before this many of the computations that stand before it.

    Raises:
        ScheduleError: fewer than one computation.
    """
    if computations < 1:
        raise ScheduleError(f"a receive is posted at least 1 computation ahead; got {computations}")
    orders = []
    for order in schedule.orders:
        rest: list[list[Action]] = [[]]  # each computation with what follows it but receives, and those at its end
        receives: list[list[Action]] = [[]]
        for action in order:
            if action.kind in COMPUTE:
                rest.append([action])
                receives.append([])
            elif action.kind in RECEIVES:
                receives[max(0, len(receives) - 1 - computations)].append(action)
            else:
                rest[-1].append(action)
        orders.append(tuple(a for others, own in zip(rest, receives, strict=True) for a in (*others, *own)))
    return replace(schedule, orders=tuple(orders))
