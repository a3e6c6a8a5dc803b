"""DualPipe-V: two virtual stages a rank in a V, stage r and stage 2p-1-r on rank r, forward and backward in pairs.

The order of DeepSeek's DualPipeV (github.com/deepseek-ai/DualPipe; DeepSeek-V3, arXiv 2412.19437) as in
torch.distributed.pipelining. Where it pairs a forward of one virtual stage with a backward of the other, so that the
transfers of one (of experts, above all) run under the computation of the other, the two stand next to each other here.
It is written for 2p micro-batches at least; with fewer, those that do not exist are left out. At
most 2p+1 pairs of a virtual stage and a micro-batch are in flight.
"""

from __future__ import annotations

from typing import Literal

from .action import Action
from .counter import Counting


def dualpipe_v(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """The computations of one rank."""
    down, up = rank, 2 * ranks - 1 - rank
    total = max(2 * ranks, micro_batches)
    after = ranks - rank - 1
    out = Counting()
    for _ in range(2 * after):
        out.add(down, "F")
    for _ in range(rank + 1):
        out.add(down, "F")
        out.add(up, "F")
    for _ in range(after):
        out.add(up, "B")
        out.weight()
        out.add(up, "F")
    for _ in range(total - 2 * ranks + rank + 1):
        out.add(down, "F")
        out.add(up, "BW")
        out.add(up, "F")
        out.add(down, "BW")
    for _ in range(after):
        out.add(up, "BW")
        out.add(up, "F")
        out.add(down, "BW")
    _drain(out, down, up, rank, after)
    return out.first(micro_batches)


def _drain(out: Counting, down: int, up: int, rank: int, after: int) -> None:
    """The last backwards; in their second half weight gradients wait, to fill what would be idle."""
    kind: Literal["B", "BW"] = "BW"
    for i in range(rank + 1):
        half = i == (rank + 1) // 2
        if half and rank % 2 == 1:
            kind = "B"
        out.add(up, kind)
        if half and rank % 2 == 0:
            kind = "B"
        out.add(down, kind)
    for _ in range(after):
        out.weight()
        out.add(down, kind)
    while out.waiting:
        out.weight()
