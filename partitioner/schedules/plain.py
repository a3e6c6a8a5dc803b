"""GPipe, 1F1B and forward-only: one stage a rank. p ranks, m micro-batches, rank r (0 first).

    gpipe         all F, then all B                                        in flight m
    1f1b          min(m, p-r-1) F, then F and B in turns, then the B left  in flight min(m, p-r)
    forward-only  all F                                                    in flight nothing

GPipe: arXiv 1811.06965. 1F1B: PipeDream-flush, arXiv 2006.09503.
"""

from __future__ import annotations

from collections.abc import Sequence

from .action import Action


def gpipe(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """The computations of one rank."""
    forwards, backwards = _in_turn(rank, micro_batches)
    return [*forwards, *backwards]


def one_f_one_b(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """The computations of one rank."""
    return in_turns(*_in_turn(rank, micro_batches), ahead=ranks - rank - 1)


def forward_only(ranks: int, micro_batches: int, rank: int) -> list[Action]:
    """The computations of one rank."""
    return _in_turn(rank, micro_batches)[0]


def in_turns(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one forward and one backward in turns, then the backwards left."""
    ahead = min(ahead, len(forwards))
    turns = [a for pair in zip(forwards[ahead:], backwards, strict=False) for a in pair]
    return [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]


def _in_turn(stage: int, micro_batches: int) -> tuple[list[Action], list[Action]]:
    micro = range(micro_batches)
    return [Action(stage, "F", m) for m in micro], [Action(stage, "BW", m) for m in micro]
