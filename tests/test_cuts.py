"""The search for cuts against every way to cut a short chain."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.partitioner.cuts import Room, best_cuts

CHAINS = st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=4, max_size=9)
"""Per place its seconds, what is sent before it, bytes resident and bytes saved."""


def stage_costs(seconds: Sequence[float], sent: Sequence[float], cuts: Sequence[int]) -> list[float]:
    ends = [0, *cuts, len(seconds)]
    edge = [0.0, *sent[1:], 0.0]
    return [sum(seconds[a:b]) + edge[a] + edge[b] for a, b in itertools.pairwise(ends)]


def holds(cuts: Sequence[int], room: Room) -> bool:
    ends = [0, *cuts, len(room.saved)]
    return all(
        sum(room.resident[a:b]) + room.in_flight[k] * sum(room.saved[a:b]) <= room.limit
        for k, (a, b) in enumerate(itertools.pairwise(ends))
    )


@given(CHAINS, st.integers(2, 4), st.data())
def test_cuts_equal_brute_force(chain: list, count: int, data: st.DataObject):
    """Also with pinned starts, and with a limit on memory; the count of stages is that of virtual ones too."""
    seconds, sent, resident, saved = (list(map(float, column)) for column in zip(*chain, strict=True))
    pinned = data.draw(st.sets(st.integers(1, count - 1), max_size=count - 1))
    places = sorted(data.draw(st.sets(st.integers(1, len(chain) - 1), min_size=len(pinned), max_size=len(pinned))))
    fixed = dict(zip(sorted(pinned), places, strict=True))
    flying = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    limit = data.draw(st.none() | st.integers(5, 90))
    room = None if limit is None else Room(resident, saved, flying, limit)
    every = list(itertools.combinations(range(1, len(chain)), count - 1))
    every = [c for c in every if all(c[s - 1] == at for s, at in fixed.items()) and (room is None or holds(c, room))]
    found = best_cuts(seconds, sent, count, fixed, room)
    if not every:
        assert found is None
        return

    def worth(cuts: Sequence[int]) -> tuple[float, float]:
        costs = stage_costs(seconds, sent, cuts)
        return max(costs), sum(c * c for c in costs)

    assert found is not None and tuple(found) in every
    assert worth(found) == pytest.approx(min(map(worth, every)))


def test_what_costs_nothing_is_shared_evenly():
    """Not `[1, 2, 3]`, three stages of nothing before one that does the rest, where even stages cost no more."""
    assert best_cuts([1.0] * 8 + [4.0], [0.0] * 9, 3) == [4, 8]


def test_no_cut_where_what_is_sent_has_no_size():
    assert best_cuts([1.0] * 4, [float("inf")] * 4, 2) is None
