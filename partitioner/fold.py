"""Names of layers folded: `layers.0.up`, ..., `layers.31.up` are `layers.*.up`, or `layers.0-30.up` where 31 differs.

    *        every number that there is in that place
    0-3,7    these, the range taken over the numbers that there are
    {a,b}    these siblings

A folded name stands for exactly the names that went in.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Numbers = tuple[int, ...]

MODEL = "(model)"
"""How the name of the model itself, which is empty, is written."""

_PLAIN = re.compile(r"[^\d*{][^*{]*")


class Folder:
    """Folds subsets of `names`, all the names that there are."""

    def __init__(self, names: Iterable[str]):
        self._all: dict[str, set[Numbers]] = {}
        for name in names:
            pattern, numbers = _pattern(name)
            self._all.setdefault(pattern, set()).add(numbers)

    def fold(self, names: Iterable[str]) -> list[str]:
        """Texts that stand for these names together, in the order of their first."""
        found: dict[str, set[Numbers]] = {}
        for name in names:
            pattern, numbers = _pattern(name)
            found.setdefault(pattern, set()).add(numbers)
        out = []
        for pattern, some in found.items():
            for texts in self._ranges(some, self._all.get(pattern, some)):
                left = iter(texts)
                out.append(".".join(next(left) if p == "#" else p for p in pattern.split(".")) or MODEL)
        return out

    def rows(self, rows: Iterable[tuple[str, Key]]) -> list[tuple[str, Key]]:
        """(name, what is said of it) with the names of which the same is said folded, siblings too."""
        same: dict[tuple[str, Key], list[str]] = {}
        for name, key in rows:
            same.setdefault((_pattern(name)[0], key), []).append(name)
        folded = [(text, key) for (_, key), names in same.items() for text in self.fold(names)]
        return _braced(_braced(folded, -1), -2)

    def _ranges(self, some: set[Numbers], every: set[Numbers]) -> list[tuple[str, ...]]:
        """Texts of the numbers in each place; one tuple of texts stands for all combinations."""
        if some == {()}:
            return [()]
        rests: dict[int, set[Numbers]] = {}
        for first, *rest in sorted(some):
            rests.setdefault(first, set()).add(tuple(rest))
        alike: dict[frozenset[Numbers], list[int]] = {}
        for first, rest in rests.items():
            alike.setdefault(frozenset(rest), []).append(first)
        firsts, below = sorted({e[0] for e in every}), {e[1:] for e in every}
        return [
            (_range(mine, firsts), *tail) for rest, mine in alike.items() for tail in self._ranges(set(rest), below)
        ]


def pattern_of(name: str) -> str:
    """What names that differ only by numbers have in common."""
    return _pattern(name)[0]


@lru_cache(maxsize=65536)
def _pattern(name: str) -> tuple[str, Numbers]:
    """A name with `#` for its numbers, and the numbers."""
    parts = name.split(".")
    return ".".join("#" if p.isdigit() else p for p in parts), tuple(int(p) for p in parts if p.isdigit())


def _range(mine: Sequence[int], every: Sequence[int]) -> str:
    if len(mine) == len(every) > 1:
        return "*"
    place = {n: i for i, n in enumerate(every)}
    runs: list[list[int]] = []
    for n in mine:
        if runs and place[n] == place[runs[-1][-1]] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}{'-' if len(r) > 2 else ','}{r[-1]}" for r in runs)


def _braced(rows: list[tuple[str, Key]], at: int) -> list[tuple[str, Key]]:
    """Rows that differ in one part of their name, no number, are one."""
    same: dict[Hashable, tuple[list[str], list[str], Key]] = {}
    for i, (name, key) in enumerate(rows):
        parts = name.split(".")
        fits = len(parts) >= -at and len(parts) > 1 and _PLAIN.fullmatch(parts[at])
        group = (key, *parts[:at], None, *parts[len(parts) + at + 1 :]) if fits else i
        same.setdefault(group, (parts, [], key))[1].append(parts[at] if fits else "")
    out = []
    for parts, some, key in same.values():
        if len(some) > 1:
            parts = [*parts[:at], "{" + ",".join(some) + "}", *parts[len(parts) + at + 1 :]]
        out.append((".".join(parts), key))
    return out
