"""The primitive moves between the states of one tensor: what `collective.path` searches and `transitions` tabulates.

A state is (marks, partial): of each factor the axes that split it, outermost first, and the partial marks. A move is
one collective (or a local slice or zeroing) over some axes:

    all_reduce       partial -> whole                  any partial axes of one op at once
    reduce_scatter   partial -> split                  one axis onto any open factor
    all_gather       split -> whole                    the last axes of a factor
    all_to_all       split -> split elsewhere          the last axes of a factor onto another
    permute          same pieces, other owners         a renaming of axes of equal size
    slice, zero      whole -> split, whole -> sum      nothing is sent
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

Marks = tuple[tuple[str, ...], ...]
Partial = tuple[tuple[str, str], ...]
State = tuple[Marks, Partial]

LOCAL_KINDS = frozenset({"slice", "zero"})
"""Primitives that send nothing."""


@dataclass(slots=True)
class Move:
    """An edge; `source` (gathered) and `target` (split) are indices of factors, -1 where there is none."""

    kind: str
    axes: tuple[str, ...]
    after: State
    source: int = -1
    target: int = -1
    op: str = "sum"


Relabelings = list[tuple[tuple[str, ...], dict[str, str]]]


def moves(
    state: State, axes: tuple[str, ...], open_factors: Iterable[int], zeroed: Iterable[str], renamed: Relabelings
) -> Iterator[Move]:
    """Every move from a state.

    Args:
        axes: the axes that take part, in mesh order.
        open_factors: the factors that may be split on the way.
        zeroed: the axes on which a whole value may become a partial sum.
        renamed: what `relabelings` gives for these axes.
    """
    marks, partial = state
    ops, zeroed = dict(partial), set(zeroed)
    split = {a for some in marks for a in some}
    yield from _reductions(marks, partial, axes, open_factors)
    for i, some in enumerate(marks):
        for n in range(1, len(some) + 1):
            yield from _regroupings(marks, partial, i, n, open_factors)
    for axis in axes:
        if axis not in ops and axis not in split:
            for j in open_factors:
                yield Move("slice", (axis,), (with_mark(marks, j, (*marks[j], axis)), partial), target=j)
            if axis in zeroed:
                yield Move("zero", (axis,), (marks, tuple(sorted((*partial, (axis, "sum"))))))
    for moved, names in renamed:
        if ops.keys().isdisjoint(moved) and not split.isdisjoint(moved):
            after = tuple(tuple(names.get(a, a) for a in some) for some in marks)
            if after != marks:
                yield Move("permute", moved, (after, partial))


def _reductions(marks: Marks, partial: Partial, axes: tuple[str, ...], open_factors: Iterable[int]) -> Iterator[Move]:
    for op in sorted({op for _, op in partial}):
        mine = [a for a, o in partial if o == op]
        for n in range(1, len(mine) + 1):
            for some in itertools.combinations(mine, n):
                rest = tuple(p for p in partial if p[0] not in some)
                yield Move("all_reduce", tuple(a for a in axes if a in some), (marks, rest), op=op)
        for axis in mine:
            rest = tuple(p for p in partial if p[0] != axis)
            for j in open_factors:
                after = with_mark(marks, j, (*marks[j], axis))
                yield Move("reduce_scatter", (axis,), (after, rest), target=j, op=op)


def _regroupings(marks: Marks, partial: Partial, i: int, n: int, open_factors: Iterable[int]) -> Iterator[Move]:
    kept, last = marks[i][:-n], marks[i][-n:]
    gathered = with_mark(marks, i, kept)
    yield Move("all_gather", last, (gathered, partial), source=i)
    for j in open_factors:
        if j != i:
            after = with_mark(gathered, j, (*gathered[j], *last))
            yield Move("all_to_all", last, (after, partial), source=i, target=j)


def with_mark(marks: Marks, i: int, axes: tuple[str, ...]) -> Marks:
    return (*marks[:i], axes, *marks[i + 1 :])


def relabelings(axes: tuple[str, ...], sizes: Mapping[str, int]) -> Relabelings:
    """Every renaming of axes among those of one size: the axes it moves, and old name -> new name."""
    found: Relabelings = []
    for new in itertools.permutations(axes):
        names = {a: b for a, b in zip(axes, new, strict=True) if a != b}
        if names and all(sizes[a] == sizes[b] for a, b in names.items()):
            found.append((tuple(a for a in axes if a in names), names))
    return found
