"""Writes down the order of a rank: the n-th F of a stage is of micro-batch n, and so is its n-th B."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from .action import Action


class Counting:
    """An order that grows; micro-batches number themselves.

    Attributes:
        order: the actions so far.
        waiting: the weight gradients (W) whose B has run, oldest first.
    """

    def __init__(self) -> None:
        self.order: list[Action] = []
        self.waiting: list[Action] = []
        self._next: Counter[tuple[int, str]] = Counter()

    def add(self, stage: int, kind: Literal["F", "B", "BW"]) -> None:
        """The next forward or backward of a stage; a B leaves a W waiting."""
        way = stage, kind[0]
        self.order.append(Action(stage, kind, self._next[way]))
        if kind == "B":
            self.waiting.append(Action(stage, "W", self._next[way]))
        self._next[way] += 1

    def weight(self, stage: int | None = None) -> None:
        """The W that has waited longest, of one stage or of any; nothing where none waits."""
        oldest = next((a for a in self.waiting if stage in (None, a.stage)), None)
        if oldest is not None:
            self.waiting.remove(oldest)
            self.order.append(oldest)

    def left(self, kind: Literal["F", "B"], stage: int, micro_batches: int) -> int:
        """How many of a stage are still to come."""
        return micro_batches - self._next[stage, kind]

    def first(self, micro_batches: int) -> list[Action]:
        """The order without the micro-batches that do not exist: taking nodes out of an order makes no cycle."""
        return [a for a in self.order if a.micro is not None and a.micro < micro_batches]
