"""ZB-H1 (arXiv 2401.10241, section 2): 1F1B with the gradients of inputs and of weights apart.

After each B a rank runs one W if more than r weight gradients wait; the rest of the W come last. So a rank holds
p-r micro-batches that wait for B and r that wait for W: p in all, as much as rank 0 of 1F1B.

    bubble where transfers cost nothing    (p-1) (T_F + T_B - T_W)
"""

from __future__ import annotations

from .action import Action
from .plain import in_turns


def zb_h1(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """The computations of one rank."""
    forwards = [Action(rank, "F", m) for m in range(micro_batches)]
    backwards = [Action(rank, "B", m) for m in range(micro_batches)]
    order: list[Action] = []
    waiting: list[int] = []
    done = 0
    for action in in_turns(forwards, backwards, ahead=ranks - rank - 1):
        order.append(action)
        if action.kind == "B" and action.micro is not None:
            waiting.append(action.micro)
            if len(waiting) - done > rank:
                order.append(Action(rank, "W", waiting[done]))
                done += 1
    return [*order, *(Action(rank, "W", m) for m in waiting[done:])]
