"""`auto_mesh`: the shape of the mesh searched too, with a bound that leaves shapes alone only where it may."""

from __future__ import annotations

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from meshwright.partitioner.capture import capture
from meshwright.partitioner.mesh_search import CLOSE, Machine, Search, Shape, free_shapes, pipeline_shapes, role_shapes
from meshwright.partitioner.planner import Options
from torch import nn


class Mlp(nn.Module):
    def __init__(self, d: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU(), nn.Linear(4 * d, d)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


def meta(d: int, rows: int, layers: int = 2) -> tuple[Mlp, torch.Tensor]:
    with torch.device("meta"):
        return Mlp(d, layers), torch.empty(rows, d)


def test_shapes_multiply_to_the_devices_and_keep_tp_inside_a_node():
    shapes = [*free_shapes(32, 8), *role_shapes(32, 8), *pipeline_shapes(32, 8)]
    assert len({s.axes for s in shapes}) == len(shapes)
    for shape in shapes:
        sizes = dict(shape.axes)
        assert torch.tensor(shape.sizes).prod() == 32 and min(shape.sizes) > 1
        assert sizes.get("tp", 1) <= 8
    assert Shape("roles", (("dp", 4), ("tp", 8))) in shapes
    assert Shape("roles", (("dp_replicate", 4), ("dp_shard", 2), ("tp", 4))) in shapes
    assert Shape("free", (("node", 4), ("gpu", 8))) in shapes
    assert Shape("pipeline", (("pp", 4), ("dp", 2), ("tp", 4))) in shapes


def test_an_axis_that_leaves_a_node_has_the_link_between_nodes():
    machine = Machine(32, 8, "h100", between="eth-100")
    links = machine.mesh({"pp": 2, "dp": 4, "tp": 4}).link
    assert [links[a].name for a in ("pp", "dp", "tp")] == ["eth-100", "eth-100", "nvlink4"]
    assert machine.mesh({"dp": 4, "tp": 8}).link["tp"].name == "nvlink4"


def test_what_is_not_planned_would_not_have_been_chosen():
    """Every shape planned, and its seconds against the bound that would have left it alone."""
    model, x = meta(1024, 64, layers=3)
    graph = capture(model, (x,), {}, loss=lambda out, target: out)
    search = Search(graph, Machine(8, 4, "h100"), Options(memory=80 * 10**9), "auto", "auto")
    search.run()
    fastest = search.fastest
    for row in search.rows:
        if row.plan is None and "not planned" in row.why:
            graph_, plan = search._planned(row.mesh, search.options, "auto")
            assert sum(plan.seconds) / dict(row.shape.axes).get("pp", 1) > fastest
    assert any(row.plan is None and "not planned" in row.why for row in search.rows)
    assert search.best.seconds <= fastest * (1 + CLOSE)


def test_the_mesh_comes_with_a_table():
    model, x = meta(4096, 4096)
    mesh = mw.auto_mesh(model, 16, device="h100", args=(x,))
    assert mesh.world_size == 16
    head, *lines = mesh.compared
    assert head.split()[:3] == ["mesh", "a", "step"]
    assert len(lines) == len({line.split("  ")[0] for line in lines}) > 10
    assert sum("chosen" in line for line in lines) == 1
    (chosen,) = (line for line in lines if "chosen" in line)
    assert chosen.startswith(str(mesh))
    links = {a: link.name for a, link in mesh.link.items()}
    assert mesh == mw.Mesh(**mesh.sizes, device="h100", links=links)  # type: ignore[arg-type]


def test_few_rows_and_large_weights_are_not_split_by_rows():
    model, x = meta(8192, 8)
    mesh = mw.auto_mesh(model, 64, device="h100", per_node=8, args=(x,))
    assert any("a batch of 8 has no part for each of 64 data ranks" in line for line in mesh.compared)


def test_a_model_that_fits_nowhere_is_named_with_every_shape():
    model, x = meta(1024, 64)
    with pytest.raises(mw.PlanError, match="no mesh of 4 devices can be planned") as fault:
        mw.auto_mesh(model, 4, device="h100", args=(x,), memory=10_000_000)
    assert "dp=2, tp=2: memory=" in str(fault.value)
