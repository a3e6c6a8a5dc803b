"""Cuts that are moved: never to where more is sent, nor where a stage costs much more; ranks get no less even."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from meshwright.partitioner.cut_moves import NEAR, even_ranks, sending_less
from meshwright.partitioner.cuts import best_cuts
from test_cuts import stage_costs

CHAINS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=5, max_size=12)
"""Per place its seconds, and what is sent before it."""


def test_of_cuts_about_as_good_the_one_that_sends_less():
    """A cut one place later sends half: taken where the first stage then costs 1 percent more, not for 5."""
    sent = [0.0, 0.1, 0.1, 0.3, 0.2, 0.1]
    near, far = [33.0, 33.0, 33.0, 1.0, 1.0, 98.0], [33.0, 33.0, 33.0, 1.0, 5.0, 94.0]
    assert best_cuts(near, sent, 2) == best_cuts(far, sent, 2) == [4]
    assert sending_less(near, sent, [4]) == [5]
    assert sending_less(far, sent, [4]) == [4]
    assert sending_less(near, sent, [4], {1}) == [4], "it is pinned"


@given(CHAINS, st.integers(2, 5))
def test_no_stage_gets_much_costlier_by_sending_less(chain: list, count: int):
    seconds, sent = (list(map(float, column)) for column in zip(*chain, strict=True))
    cuts = best_cuts(seconds, sent, count)
    assert cuts is not None
    moved = sending_less(seconds, sent, cuts)
    assert all(sent[a] <= sent[b] for a, b in zip(moved, cuts, strict=True))
    assert moved == sorted(set(moved))
    before, after = stage_costs(seconds, sent, cuts), stage_costs(seconds, sent, moved)
    for i, cost in enumerate(after):
        assert cost <= (1 + NEAR) * max(before[max(0, i - 1) : i + 2]) + 1e-9


def ranks(costs: Sequence[float], placement: Sequence[int]) -> list[float]:
    return [sum(c for c, r in zip(costs, placement, strict=True) if r == rank) for rank in sorted({*placement})]


def test_ranks_are_even_where_a_head_costs_more_than_a_stage():
    """Even stages would leave a rank with 12 of 20; three stages beside the head cannot cost as much as it."""
    seconds, sent = [1.0] * 12 + [8.0], [0.0] * 13
    cuts = best_cuts(seconds, sent, 4)
    assert cuts is not None and cuts == [4, 8, 12]
    moved = even_ranks(seconds, sent, cuts, (0, 1, 0, 1))
    assert ranks(stage_costs(seconds, sent, moved), (0, 1, 0, 1)) == [10, 10]
    assert even_ranks(seconds, sent, cuts, (0, 1, 0, 1), (1, 2, 3)) == cuts, "all are pinned"
    assert even_ranks(seconds, sent, cuts, (0, 1, 1, 0))[2] == 12, "a cut within a rank changes no rank"


@given(CHAINS, st.sampled_from([(0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (0, 1, 2, 0, 1)]))
def test_ranks_get_no_less_even(chain: list, placement: tuple[int, ...]):
    seconds, sent = (list(map(float, column)) for column in zip(*chain, strict=True))
    cuts = best_cuts(seconds, sent, len(placement))
    assert cuts is not None
    moved = even_ranks(seconds, sent, cuts, placement)
    assert all(0 < a < b for a, b in itertools.pairwise(moved)) and moved[-1] < len(seconds)
    assert all(sent[a] <= sent[b] for a, b in zip(moved, cuts, strict=True))
    squares = [
        sum(r * r for r in ranks(costs, placement)) + 0.01 * sum(c * c for c in costs)
        for costs in (stage_costs(seconds, sent, c) for c in (cuts, moved))
    ]
    assert squares[1] <= squares[0] * (1 + 1e-9)
