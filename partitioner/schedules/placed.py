"""Asked of a schedule before all else: every action names a stage of its rank, and a micro-batch that exists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .action import KINDS, WHOLE_STAGE, Action
from .schedule import Schedule

PLACED = "actions that cannot be where they are"
SHOWN = 20
"""Faults of one kind that an error spells out."""


def faults_text(schedule: Schedule, law: str, faults: Sequence[str]) -> str:
    """The text of an error: the law that does not hold, and a line a fault."""
    more = [f"... and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    return "\n  ".join([f"schedule {schedule.name}: {law}:", *faults[:SHOWN], *more])


def unplaced(schedule: Schedule) -> Iterator[str]:
    """What is wrong with where actions and stages are; nothing else can be asked before that is right."""
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            yield f"stage {stage} lies on rank {rank}, but the ranks are 0 to {schedule.ranks - 1}"
    for rank, order in enumerate(schedule.orders):
        for action in order:
            fault = _misnamed(action, rank, schedule)
            if fault:
                yield f"rank {rank}, {action}: {fault}"


def _misnamed(action: Action, rank: int, schedule: Schedule) -> str | None:
    if action.kind not in KINDS:
        return f"there is no kind {action.kind!r}; there are {', '.join(sorted(KINDS))}"
    if not 0 <= action.stage < schedule.stages:
        return f"there is no stage {action.stage}; the stages are 0 to {schedule.stages - 1}"
    if schedule.placement[action.stage] != rank:
        return f"stage {action.stage} lies on rank {schedule.placement[action.stage]}"
    if (action.micro is None) != (action.kind in WHOLE_STAGE):
        return f"{action.kind} has {'no' if action.kind in WHOLE_STAGE else 'a'} micro-batch"
    if action.micro is not None and not 0 <= action.micro < schedule.micro_batches:
        return f"there is no micro-batch {action.micro}; they are 0 to {schedule.micro_batches - 1}"
    return None
