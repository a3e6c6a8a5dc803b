"""The planner's price of a reshard on one axis is the price of the steps that passes emit for it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.partitioner.collective import path_seconds
from meshwright.partitioner.cost import reshard_seconds
from meshwright.partitioner.layout import Factor, Layout
from meshwright.partitioner.mesh import Mesh

ITEM = 4
SHAPE = (24, 48, 96)
STATES = [None, "sum", (0, 0), (1, 0), (2, 0)]


def layout(state) -> Layout:
    """A tensor of SHAPE in a state on the one axis."""
    dims = tuple((Factor(n, ("x",) if state == (i, 0) else ()),) for i, n in enumerate(SHAPE))
    return Layout(dims, (("x", "sum"),) if state == "sum" else ())


@pytest.mark.parametrize("device", ["cpu", "h100"])
@given(have=st.sampled_from(STATES), want=st.sampled_from(STATES), ranks=st.sampled_from([2, 3, 4, 8]))
def test_planner_and_passes_price_alike(device: str, have, want, ranks: int):
    mesh = Mesh(x=ranks, device=device)
    planned = reshard_seconds(have, want, math.prod(SHAPE) * ITEM, mesh, "x")
    emitted = path_seconds(layout(have), layout(want), mesh, ITEM)
    assert planned == pytest.approx(emitted, rel=1e-6)
