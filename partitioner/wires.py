"""What a comm holds of a collective between its start and its wait.

    one process   results, in memory of their own, from when the last rank comes: then operands are let go of. Ranks run
                  in turn, so that is taken as the start; one that comes early holds its operands a little longer
    gloo, nccl    packed copies of operands (of one that is cut or joined along its leading dim: itself) until the wait,
                  what is received from the start; results look at that, or are put together of it at the wait

`wire.py` and `inprocess.py` of the runtime are what this describes; `docs/memory.md` has what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .transfer import Transfer

ONE_PROCESS, GLOO, NCCL = "one process", "gloo", "nccl"


@dataclass(frozen=True)
class Use:
    """Attributes:
    copied: bytes of packed copies, from the start to the wait.
    keeps: whether the operands' own memory is held until then.
    received: bytes of what is received, from the start.
    results: where results lie: in memory of their "own" made at the wait, "early" made at the start, or in what was
        "copied", "received" or in the "operand".
    """

    copied: int = 0
    keeps: bool = True
    received: int = 0
    results: Literal["own", "early", "copied", "received", "operand"] = "own"


def use(wire: str, transfers: Sequence[Transfer], sent: Sequence[int], got: Sequence[int], consume: bool) -> Use:
    """What a request holds. `sent`, `got`: bytes of each operand and of each result."""
    first, many = transfers[0], len(transfers) > 1
    kind, total, whole = first.kind, sum(sent), sum(got)
    if wire == ONE_PROCESS:
        return Use(keeps=False, results="early")
    if kind == "all_reduce":
        return Use(results="operand") if consume and not many else Use(total, False, 0, "copied")
    even = all(len(set(t.gather_sizes)) <= 1 and len(set(t.split_sizes)) <= 1 for t in transfers)
    leads = not many and _leads(first, first.gather_dim if first.has_gather else first.split_dim)
    if kind == "all_gather":
        if not even:
            return Use(total * len(first.gather_sizes), False, whole, "received" if leads else "own")
        return Use(total if many else 0, not many, whole, "received" if leads else "own")
    if kind == "halo":
        return Use(received=max(0, whole - total))
    packed = total if many or (first.has_split and not _leads(first, first.split_dim)) else 0
    if kind == "reduce_scatter" and not (wire == NCCL and even):
        return Use(packed, not packed, total)
    joined = first.has_gather and not leads
    return Use(packed, not packed, whole, "own" if joined and kind == "all_to_all" else "received")


def _leads(transfer: Transfer, dim: int) -> bool:
    return all(n == 1 for n in transfer.view[:dim])
