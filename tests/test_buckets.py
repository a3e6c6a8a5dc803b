"""What travels in a bucket is priced so: the plan's seconds are those of the messages that are sent."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.partitioner.buckets import Bucket, bucket_limit, bucketed_seconds, buckets_of
from meshwright.partitioner.capture import capture
from meshwright.partitioner.collective import path_seconds, wire_bytes
from meshwright.partitioner.collective_cost import collective_seconds
from meshwright.partitioner.memory import Model
from meshwright.partitioner.planner import Options, make_plan
from meshwright.partitioner.states import Prices
from meshwright.partitioner.traffic import traffic_of
from meshwright.partitioner.transfer import start
from meshwright.passes.lower import lower
from test_cost import ITEM, MESHES, SHAPE, STATES, joint, layout
from torch import nn

SOME = settings(max_examples=40, deadline=None)
BUCKETS = [Bucket(end, nbytes) for end in ("first", "last") for nbytes in (1e5, 1e9)]


@pytest.mark.parametrize("device", ["cpu", "h100"])
@SOME
@given(data=st.data(), axes=st.sampled_from(MESHES), bucket=st.sampled_from(BUCKETS))
def test_planner_and_passes_price_alike_in_a_bucket(device: str, data: Any, axes: dict[str, int], bucket: Bucket):
    mesh, names = mw.Mesh(device=device, **axes), tuple(axes)  # type: ignore[arg-type]
    have, want = ([data.draw(st.sampled_from(STATES)) for _ in names] for _ in range(2))
    planned = Prices(mesh).between(SHAPE, ITEM, joint(have, names), joint(want, names), bucket)[0, 0]
    ends = layout(have, names), layout(want, names)
    assert planned == pytest.approx(path_seconds(*ends, mesh, ITEM, bucket), rel=1e-6, abs=1e-8)
    assert planned <= path_seconds(*ends, mesh, ITEM) * (1 + 1e-6) + 1e-5  # copies into the bucket


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_share_grows_with_bytes_up_to_its_own_message(kind: str):
    mesh, axes = mw.Mesh(dp=8, device="h100"), ("dp",)
    sizes = np.geomspace(16, 1e9, 40)
    ends = "first" if kind == "all_gather" else "last"
    shares = bucketed_seconds(kind, axes, sizes, sizes, sizes, Bucket(ends, 1e12), mesh)
    assert (np.diff(shares) > 0).all()
    alone = collective_seconds(kind, mesh.levels(axes), sizes)
    assert shares[0] < alone[0] / 100
    large = sizes > bucket_limit(axes, mesh)
    assert 0 < large.sum() < len(sizes) and (shares[large] >= alone[large]).all()


class Deep(nn.Module):
    """Many small parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum()


@pytest.mark.parametrize("zero", [0, 1])
def test_many_small_gradients_cost_one_message(zero: int):
    """A plan used to pay a start for each of them, though one message carries them all."""
    graph = capture(Deep(), (), {"x": torch.randn(8, 16)})
    graph, plan = make_plan(graph, mw.Mesh(dp=2, device="cpu"), Options(zero=zero))
    moves, buckets = traffic_of(graph, graph.factored, plan), buckets_of(graph)
    assert len(buckets.alone) == 48
    told = sum(m.way.total for m in moves if m.is_param or m.leaves[:1] and m.leaves[0][0] == "grad")
    starts = [n for n in lower(graph, plan).graph.fx.nodes if n.target is start]
    together = [n.args[0] for n in starts if len(n.args[0]) > 1]
    sent = [sum(wire_bytes(s, plan.mesh, 4) for s in steps) for steps in together]
    paid = [collective_seconds(o[0].kind, plan.mesh.levels(("dp",)), n) for o, n in zip(together, sent, strict=True)]
    assert len(paid) == (1 if zero == 0 else 2)
    assert told == pytest.approx(sum(paid), rel=0.3)


def test_gradients_that_wait_for_their_reduction_do_not_grow_with_the_model():
    """ZeRO-3 on 8 GPUs: with four layers more a rank's peak is higher by what rests of them, 16 bytes / 8."""

    def peak(layers: int) -> int:
        with torch.device("meta"):
            wide = (m for _ in range(layers) for m in (nn.Linear(4096, 4096, bias=False), nn.Tanh()))
            net, x = nn.Sequential(*wide), torch.empty(8, 4096)
        graph = capture(net, (x,), {}, loss=lambda y, _: y.square().mean())
        return Model(lower(*make_plan(graph, mw.Mesh(dp=8, device="h100"), Options(zero=3)))).of(0).peak

    assert peak(10) - peak(6) == pytest.approx(4 * 4096**2 * 16 / 8, rel=1e-3)
