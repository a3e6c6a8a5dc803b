"""Bytes that stand, by what they are and whose; the most so far, and what stood then."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

RESIDENT = ("parameters", "gradients", "optimizer", "buffers", "inputs", "constants")
PASSING = ("activations", "gathered", "collectives", "transients")
"""Kinds of bytes: what rests through a step; what forward saves for backward, parameters gathered from other ranks,
what collectives hold, and all else."""


@dataclass(frozen=True)
class Moment:
    """Something that a rank does.

    Attributes:
        name: the node's name, or what the act does.
        most: the most bytes that stand while it runs.
        after: the bytes that stand after it.
    """

    name: str
    most: int
    after: int


class Block:
    """A storage. Its bytes stand until nothing holds it any more."""

    __slots__ = ("kind", "ledger", "module", "nbytes")

    def __init__(self, ledger: Ledger, nbytes: int, kind: str, module: str):
        self.ledger, self.nbytes, self.kind, self.module = ledger, nbytes, kind, module
        ledger.change(kind, module, nbytes)

    def __del__(self) -> None:
        self.ledger.change(self.kind, self.module, -self.nbytes)

    def becomes(self, kind: str) -> None:
        """What was taken for a passing value turns out to be kept."""
        if self.kind == "transients" and kind != self.kind:
            self.ledger.change(self.kind, self.module, -self.nbytes)
            self.kind = kind
            self.ledger.change(kind, self.module, self.nbytes)


class Ledger:
    """Attributes:
    now, peak: bytes.
    at: what ran at the peak.
    then: by (kind, module) the bytes that stood at the peak.
    """

    def __init__(self) -> None:
        self.standing: Counter[tuple[str, str]] = Counter()
        self.now = self.peak = self.most = 0
        self.at: Any = None
        self.then: Counter[tuple[str, str]] = Counter()

    def change(self, kind: str, module: str, nbytes: int) -> None:
        self.standing[kind, module] += nbytes
        self.now += nbytes

    def look(self, at: Any, beside: int = 0, module: str = "") -> None:
        """The bytes now, and `beside` that stand only while `at` runs."""
        total = self.now + beside
        self.most = max(self.most, total)
        if total > self.peak:
            self.peak, self.at = total, at
            self.then = Counter(self.standing)
            self.then["transients", module] += beside
