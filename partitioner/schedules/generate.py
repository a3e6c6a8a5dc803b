"""All schedules by name: `generate("1f1b", ranks=4, micro_batches=8)`, and how much each keeps in flight."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ScheduleError
from .action import Action
from .dualpipe_v import dualpipe_v
from .interleaved import ahead, interleaved
from .plain import forward_only, gpipe, one_f_one_b
from .schedule import Schedule
from .zb_v import zb_v
from .zero_bubble import zb_h1

ONE_STAGE: dict[str, Callable[[int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "forward-only": forward_only,
}
"""(ranks, micro-batches, rank) -> order; one stage a rank."""

IN_A_V: dict[str, Callable[[int, int, int], list[Action]]] = {"zb-v": zb_v, "dualpipe-v": dualpipe_v}
"""The same with two virtual stages a rank: down the ranks and back up."""

NAMES = (*ONE_STAGE, "interleaved", *IN_A_V)


def generate(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> Schedule:
    """The computations of a schedule; `with_transfers` adds what is sent.

    Args:
        name: one of `NAMES`.
        ranks: of the pipeline, 1 or more.
        micro_batches: 1 or more; any number is legal for any number of ranks.
        virtual: virtual stages a rank. Only "interleaved" has a choice, 2 by default.

    Raises:
        ScheduleError: an unknown name, a number below 1, virtual stages that the schedule has not.
    """
    virtual = _virtual(name, ranks, micro_batches, virtual)
    if name == "interleaved":
        placement = tuple(range(ranks)) * virtual
        orders = [interleaved(ranks, micro_batches, virtual, r) for r in range(ranks)]
    elif name in IN_A_V:
        placement = (*range(ranks), *reversed(range(ranks)))
        orders = [IN_A_V[name](ranks, micro_batches, r) for r in range(ranks)]
    else:
        placement = tuple(range(ranks))
        orders = [ONE_STAGE[name](ranks, micro_batches, r) for r in range(ranks)]
    return Schedule(name, placement, micro_batches, tuple(map(tuple, orders)))


def in_flight_bound(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> tuple[int, ...]:
    """Per rank, at most how many pairs of a virtual stage and a micro-batch are between F and W (or BW).

    Raises:
        ScheduleError: as `generate`.
    """
    virtual = _virtual(name, ranks, micro_batches, virtual)
    most = {
        "gpipe": lambda r: micro_batches,
        "1f1b": lambda r: ranks - r,
        "zb-h1": lambda r: ranks,
        "forward-only": lambda r: 0,
        "interleaved": lambda r: ahead(ranks, micro_batches, virtual, r) + 1,
        "zb-v": lambda r: 2 * ranks,
        "dualpipe-v": lambda r: 2 * ranks + 1,
    }[name]
    return tuple(min(most(r), micro_batches * virtual) for r in range(ranks))


def _virtual(name: str, ranks: int, micro_batches: int, virtual: int | None) -> int:
    """How many virtual stages a rank has; refuses what cannot be made."""
    if name not in NAMES:
        raise ScheduleError(f"no schedule {name!r}; there are {', '.join(NAMES)}, and from_text reads your own")
    has = 2 if name in IN_A_V or name == "interleaved" else 1
    chosen = has if virtual is None else virtual
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("virtual", chosen)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ScheduleError(f"{what} is a whole number of at least 1; got {number!r}")
    if chosen != has and name != "interleaved":
        raise ScheduleError(
            f"{name} has {has} virtual stage{'s' * (has > 1)} a rank, not {chosen}; "
            "schedule='interleaved' takes any number"
        )
    return chosen
