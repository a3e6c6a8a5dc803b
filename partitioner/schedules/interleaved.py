"""Interleaved 1F1B (arXiv 2104.04473): v virtual stages a rank, stage j p + r on rank r; micro-batches in groups.

    groups            max(1, m div p), as even as can be, the larger first: of p each where p divides m
    forwards          group after group; in it, virtual stage after virtual stage, each on all of its micro-batches
    backwards         the same with the virtual stages reversed
    ahead             2 (p-r-1) + (v-1) g forwards, then F and B in turns; g is the size of the largest group
    in flight         min(m v, ahead + 1) pairs of a virtual stage and a micro-batch

Groups larger than p hold a few more micro-batches than rounding m up and leaving out what does not exist, and have no
more bubble than a multiple of p: on 4 ranks with v = 2 and 9 micro-batches 4.5 units of time instead of 7.5.
"""

from __future__ import annotations

from .action import Action
from .plain import in_turns


def interleaved(ranks: int, micro_batches: int, virtual: int, rank: int) -> list[Action]:
    """The computations of one rank."""
    forwards, backwards = [], []
    for group in _groups(ranks, micro_batches):
        for chunk in range(virtual):
            forwards += [Action(chunk * ranks + rank, "F", micro) for micro in group]
            backwards += [Action((virtual - 1 - chunk) * ranks + rank, "BW", micro) for micro in group]
    return in_turns(forwards, backwards, ahead(ranks, micro_batches, virtual, rank))


def ahead(ranks: int, micro_batches: int, virtual: int, rank: int) -> int:
    """How many forwards a rank runs before its first backward's turn."""
    return 2 * (ranks - rank - 1) + (virtual - 1) * len(_groups(ranks, micro_batches)[0])


def _groups(ranks: int, micro_batches: int) -> list[range]:
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]
