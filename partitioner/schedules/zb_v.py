"""ZB-V (arXiv 2401.10241, section 6): two virtual stages a rank in a V, stage r and stage 2p-1-r on rank r.

The order of torch.distributed.pipelining's ScheduleZBVZeroBubble: made for T_F = T_B = T_W, where no rank waits between
its first and its last action. It is written for 2p-1 micro-batches at least; with fewer, those that do not exist are
left out. At most 2p pairs of a virtual stage and a micro-batch are in flight, as in 1F1B.
"""

from __future__ import annotations

from .action import Action
from .counter import Counting


def zb_v(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """The computations of one rank."""
    down, up = rank, 2 * ranks - 1 - rank
    total = max(2 * ranks - 1, micro_batches)
    out = Counting()
    for _ in range(2 * (ranks - rank) - 1):
        out.add(down, "F")
    for _ in range(rank):
        out.add(up, "F")
        out.add(down, "F")
    for _ in range(ranks - rank):
        _forward_and_back(out, up)
    while out.left("F", up, total):
        if out.left("F", down, total):
            out.add(down, "F")
        out.add(down, "B")
        out.weight()
        _forward_and_back(out, up)
    for _ in range(rank):
        out.add(down, "B")
        out.add(up, "B")
    for _ in range(ranks - rank):
        out.add(down, "B")
        out.weight(down)
    _rest(out, up, down)
    return out.first(micro_batches)


def _forward_and_back(out: Counting, stage: int) -> None:
    out.add(stage, "F")
    out.add(stage, "B")
    out.weight()


def _rest(out: Counting, *stages: int) -> None:
    """The weight gradients that are left, stage after stage."""
    for stage in stages:
        while any(a.stage == stage for a in out.waiting):
            out.weight(stage)
