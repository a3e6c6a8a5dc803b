"""Who waits for whom: the text of a deadlock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .action import Action


@dataclass(frozen=True)
class Wait:
    """What a rank that cannot go on is at.

    Attributes:
        at: the action that it cannot start or end.
        needs: what has to happen first.
        rank: where that is to happen; None where it stands nowhere.
    """

    at: Action
    needs: Action
    rank: int | None


def cycle_text(waits: Mapping[int, Wait]) -> str:
    """The cycle among ranks that wait, or the chain that ends at what never happens."""
    seen: list[int] = []
    rank: int | None = min(waits)
    while rank is not None and rank in waits and rank not in seen:
        seen.append(rank)
        rank = waits[rank].rank
    if rank in seen:
        seen = seen[seen.index(rank) :]
    return "; ".join(_line(rank, waits[rank]) for rank in seen)


def _line(rank: int, wait: Wait) -> str:
    where = "which stands nowhere" if wait.rank is None else f"of rank {wait.rank}"
    return f"rank {rank} at {wait.at} waits for {wait.needs} {where}"
