"""The planner's price of a reshard is the price of the steps that passes emit for it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.partitioner.collective import path_seconds
from meshwright.partitioner.layout import Factor, Layout
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.states import Prices, layout_states, states_of

ITEM = 4
SHAPE = (24, 48, 96)
STATES = [None, "sum", (0, 0), (1, 0), (2, 0)]
MESHES = [{"x": 2}, {"x": 3}, {"x": 8}, {"x": 2, "y": 2}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}]
SOME = settings(max_examples=40, deadline=None)


def layout(states, names) -> Layout:
    """A tensor of SHAPE in a state on each axis."""
    dims = tuple(
        (Factor(n, tuple(a for a, s in zip(names, states, strict=True) if s == (i, 0))),) for i, n in enumerate(SHAPE)
    )
    return Layout(dims, tuple((a, "sum") for a, s in zip(names, states, strict=True) if s == "sum"))


def joint(states, names):
    """The states as the planner has them: one value on each axis."""
    return states_of([[s] for s in states], np.zeros((1, len(names)), dtype=np.intp), [1, 1, 1])


@pytest.mark.parametrize("device", ["cpu", "h100"])
@SOME
@given(data=st.data(), axes=st.sampled_from(MESHES))
def test_planner_and_passes_price_alike(device: str, data, axes):
    mesh, names = Mesh(device=device, **axes), tuple(axes)
    have, want = ([data.draw(st.sampled_from(STATES)) for _ in names] for _ in range(2))
    planned = Prices(mesh).between(SHAPE, ITEM, joint(have, names), joint(want, names))[0, 0]
    emitted = path_seconds(layout(have, names), layout(want, names), mesh, ITEM)
    assert planned == pytest.approx(emitted, rel=1e-6, abs=1e-8)


def test_parameters_are_priced_in_the_order_of_their_axes():
    mesh, prices = Mesh(x=2, y=2, device="h100"), Prices(Mesh(x=2, y=2, device="h100"))
    orders = [Layout(((Factor(24, axes),), (Factor(48),), (Factor(96),))) for axes in (("x", "y"), ("y", "x"))]
    want = joint((None, (0, 0)), ("x", "y"))
    table = prices.between(SHAPE, ITEM, layout_states(orders, prices.names), want)
    split = Layout(((Factor(24, ("y",)),), (Factor(48),), (Factor(96),)))
    assert [x for (x,) in table] == pytest.approx([path_seconds(o, split, mesh, ITEM) for o in orders], abs=1e-8)
    assert table[1, 0] < table[0, 0], "gathering the inner axis is one collective, the outer one is not"


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_prices_between_all_states_obey_the_triangle_inequality(axes):
    mesh, names = Mesh(device="h100", **axes), tuple(axes)
    every = list(itertools.product(STATES, repeat=len(names)))
    codes = [[every[i][a] for i in range(len(every))] for a in range(len(names))]
    place = np.stack([np.arange(len(every))] * len(names), axis=1)
    states = states_of(codes, place, [1, 1, 1])
    table = Prices(mesh).between(SHAPE, ITEM, states, states)
    through = np.min(table[:, :, None] + table[None], axis=1)
    assert (table <= through + 1e-7).all()
