"""Freedom from deadlock: every transfer as a meeting of two ranks.

A rank's transfers form batches, and a batch starts when the one before it has ended. "blocking": each transfer is a
batch, so a rank waits in each until its partner is there too. "batched": transfers next to each other are one batch. A
computation stands between batches and waits for receives of earlier ones only, so the batches decide: a transfer
happens when the current batches of both of its ranks hold it, and if at the end some rank's current batch has not
ended, each such rank waits for another, which closes a cycle. "async": no transfer waits for another (`walk`).
"""

from __future__ import annotations

from typing import Literal

from .action import SENDS, TRANSFERS, Action
from .schedule import Schedule
from .waits import Wait, cycle_text
from .walk import stuck

Mode = Literal["blocking", "batched", "async"]
Batch = dict[Action, int]
"""Transfers, each as its send, and the rank at the other end."""


def meeting(action: Action, placement: tuple[int, ...]) -> tuple[Action, int]:
    """A transfer as its send, whichever end it is, and the rank at the other end."""
    assert action.other is not None, f"{action} is no transfer"
    return (action if action.kind in SENDS else action.partner), placement[action.other]


def deadlock(schedule: Schedule, mode: Mode) -> str | None:
    """The cycle of ranks that wait for each other, or None. Every transfer has its partner."""
    if mode == "async":
        return stuck(schedule)
    ahead = [_batches(order, schedule.placement, mode) for order in schedule.orders]
    current = [rank.pop() if rank else {} for rank in ahead]
    moved = list(range(schedule.ranks))
    while moved:
        rank = moved.pop()
        batch = current[rank]
        for send, other in tuple(batch.items()):
            if send in current[other]:
                del batch[send], current[other][send]
                if not current[other] and ahead[other]:
                    current[other] = ahead[other].pop()
                    moved.append(other)
        if not batch and ahead[rank]:
            current[rank] = ahead[rank].pop()
            moved.append(rank)
    waits = {rank: _wait(rank, batch, schedule) for rank, batch in enumerate(current) if batch}
    return cycle_text(waits) if waits else None


def _wait(rank: int, batch: Batch, schedule: Schedule) -> Wait:
    send, other = next(iter(batch.items()))
    at, needs = (send, send.partner) if schedule.placement[send.stage] == rank else (send.partner, send)
    return Wait(at, needs, other)


def _batches(order: tuple[Action, ...], placement: tuple[int, ...], mode: Mode) -> list[Batch]:
    """The last first, so that the next is popped."""
    batches: list[Batch] = []
    joins = False
    for action in order:
        if action.kind not in TRANSFERS:
            joins = False
            continue
        send, other = meeting(action, placement)
        if joins:
            batches[-1][send] = other
        else:
            batches.append({send: other})
            joins = mode == "batched"
    return batches[::-1]
