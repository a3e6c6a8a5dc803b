"""Interleaved 1F1B (arXiv 2104.04473): v virtual stages a rank, stage j p + r on rank r; micro-batches in groups of p.

    forwards          the n-th is virtual stage (n mod p v) div p of micro-batch (n div p v) p + n mod p
    backwards         the same with the virtual stages reversed
    ahead             2 (p-r-1) + (v-1) p forwards, then F and B in turns
    in flight         min(m v, ahead + 1) pairs of a virtual stage and a micro-batch

A number of micro-batches that p does not divide is rounded up for the order, and what does not exist is left out: with
nodes taken out of an order without cycles, none appears.
"""

from __future__ import annotations

from ..action import Action
from .plain import in_turns


def interleaved(ranks: int, micro_batches: int, virtual: int, rank: int) -> list[Action]:
    """The computations of one rank."""
    rounded = -(-micro_batches // ranks) * ranks
    forwards, backwards = [], []
    for n in range(rounded * virtual):
        group, place = divmod(n, ranks * virtual)
        chunk, micro = place // ranks, group * ranks + place % ranks
        forwards.append(Action(chunk * ranks + rank, "F", micro))
        backwards.append(Action((virtual - 1 - chunk) * ranks + rank, "BW", micro))
    order = in_turns(forwards, backwards, ahead(ranks, virtual, rank))
    return [a for a in order if a.micro is not None and a.micro < micro_batches]


def ahead(ranks: int, virtual: int, rank: int) -> int:
    """How many forwards a rank runs before its first backward's turn."""
    return 2 * (ranks - rank - 1) + (virtual - 1) * ranks
