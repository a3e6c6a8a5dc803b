"""What the simulator asks about a stage: seconds and bytes of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ScheduleError
from .schedule import Edge, Schedule


@dataclass(frozen=True)
class StageCost:
    """One virtual stage, one micro-batch.

    Attributes:
        forward, backward, weight: seconds of F, B and W; BW takes those of B and W.
        resident: bytes held all the time: weights, gradients, optimizer state.
        until_backward: bytes that F saves and the end of B frees.
        until_weight: bytes that F saves and the end of W frees.
        between: bytes that B makes for W, which frees them.
        transient: bytes held only while F, B, W run; BW holds the larger of the last two.
        reduce: seconds of REDUCE, once a step.
        unshard: seconds of UNSHARD.
        unsharded: bytes that it holds until RESHARD.
        offload: seconds of OFFLOAD, and of RELOAD.
        offloaded: of the bytes that F saves, those that are away in between.
    """

    forward: float
    backward: float = 0.0
    weight: float = 0.0
    resident: int = 0
    until_backward: int = 0
    until_weight: int = 0
    between: int = 0
    transient: tuple[int, int, int] = (0, 0, 0)
    reduce: float = 0.0
    unshard: float = 0.0
    unsharded: int = 0
    offload: float = 0.0
    offloaded: int = 0


@dataclass(frozen=True)
class Costs:
    """All stages, and the hops between ranks.

    Attributes:
        stages: in order.
        hops: seconds that a value is under way from a stage to another on another rank, by (from, to); or one number
            for all. A gradient that has no entry of its own takes as long as the value that it belongs to.
    """

    stages: tuple[StageCost, ...]
    hops: float | Mapping[Edge, float] = 0.0

    def hop(self, source: int, target: int) -> float:
        """Seconds from a stage to another.

        Raises:
            ScheduleError: no entry for this way, nor for the way back.
        """
        if not isinstance(self.hops, Mapping):
            return self.hops
        seconds = self.hops.get((source, target), self.hops.get((target, source)))
        if seconds is None:
            raise ScheduleError(f"no seconds for the hop from stage {source} to {target}; hops has {sorted(self.hops)}")
        return seconds


def even_costs(
    schedule: Schedule, forward: float, backward: float, weight: float, hop: float = 0.0, saved: int = 0
) -> Costs:
    """Equal stages. Seconds and saved bytes are of one micro-batch on one rank, shared by its virtual stages."""
    virtual = schedule.stages // schedule.ranks
    stage = StageCost(forward / virtual, backward / virtual, weight / virtual, until_weight=saved // virtual)
    return Costs((stage,) * schedule.stages, hop)
