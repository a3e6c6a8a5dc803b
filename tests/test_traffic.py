"""What a plan says it sends is what the lowered program sends: the same steps, from and to the same layouts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.partitioner.buckets import buckets_of
from meshwright.partitioner.capture import capture
from meshwright.partitioner.collective import Step, seconds, wire_bytes
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.plan import Plan
from meshwright.partitioner.planner import Options, make_plan
from meshwright.partitioner.program import Program, primitive
from meshwright.partitioner.traffic import local_seconds, steps_of, totals, traffic_of
from meshwright.partitioner.transfer import start
from meshwright.passes.lower import lower
from random_plans import MODELS, mesh_of, randomly
from zoo import ZOO


def captured(model: torch.nn.Module, batch: dict[str, Any], loss: bool = True) -> Graph:
    return capture(model, (), batch, loss=(lambda out, target: out) if loss else None)


def planned(name: str, axes: dict[str, int], zero: int | str = 0) -> tuple[Graph, Plan]:
    torch.manual_seed(0)
    graph = captured(*(ZOO | MODELS)[name]())
    return make_plan(graph, mw.Mesh(**axes, device="cpu"), Options(zero=zero))  # type: ignore[arg-type]


def steps(program: Program) -> Counter[Step]:
    """Every step of a program: the started ones and the local ones."""
    found: Counter[Step] = Counter()
    for node in program.graph.fx.nodes:
        if node.target is start:
            found.update(node.args[0])
        elif node.target is primitive:
            found[node.args[1]] += 1
    return found


def told(graph: Graph, plan: Plan) -> Counter[Step]:
    return Counter(step for step, _, _, _ in steps_of(traffic_of(graph, graph.factored, plan)))


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"x": 2, "y": 3}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "convs", "llama", "mixtral", "unet"])
def test_a_plan_tells_every_step(name: str, axes: dict[str, int], zero: int):
    graph, plan = planned(name, axes, zero)
    assert told(graph, plan) == steps(lower(graph, plan))


@pytest.mark.parametrize("axes", [{"dp": 2, "cp": 2}, {"dp": 2, "ep": 2, "tp": 2}], ids=str)
def test_on_axes_of_other_roles(axes: dict[str, int]):
    graph, plan = planned("mixtral", axes, 3)
    assert told(graph, plan) == steps(lower(graph, plan))


@pytest.mark.parametrize("seed", range(8))
def test_of_plans_drawn_at_random(seed: int):
    torch.manual_seed(0)
    graph = captured(*MODELS["gqa"]())
    mesh = mesh_of(seed)
    graph, plan = make_plan(graph, mesh, Options(zero=seed % 4 if "dp" in mesh.names else 0), randomly(seed))
    assert told(graph, plan) == steps(lower(graph, plan))


def test_of_a_plan_that_makes_copies_again():
    torch.manual_seed(0)
    graph = captured(*MODELS["gpt"]())
    graph, plan = make_plan(graph, mw.Mesh(dp=2, tp=2, device="cpu"), Options(memory=32000))
    assert plan.again
    assert told(graph, plan) == steps(lower(graph, plan))


def test_of_a_program_with_a_loss_outside():
    torch.manual_seed(0)
    graph = captured(*MODELS["gpt"](), loss=False)
    graph, plan = make_plan(graph, mw.Mesh(dp=2, tp=2, device="cpu"), Options(zero=3))
    assert told(graph, plan) == steps(lower(graph, plan, "autograd"))


class Cast(torch.nn.Module):
    """Reads its weight in half precision: a cast of the parameter, and a transpose of the cast."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.weight.to(torch.bfloat16)
        h = torch.tanh(x.to(torch.bfloat16) @ half.t())
        return (h @ half).float().square().mean()


def test_at_stage_3_views_of_views_are_made_again():
    """Neither the gathered weight nor its cast is kept from forward to backward."""
    graph = captured(Cast(), {"x": torch.randn(4, 4)})
    graph, plan = make_plan(graph, mw.Mesh(dp=2, device="cpu"), Options(zero=3))
    expected = told(graph, plan)
    program = lower(graph, plan)
    assert expected == steps(program)
    (weight, *_) = program.graph.placeholders
    gathers = [n for n in program.graph.fx.nodes if n.target is start and weight in n.args]
    assert [bool(n.meta["backward"]) for n in gathers] == [False, True]
    casts = [n for n in program.graph.fx.nodes if "_to_copy" in str(n.target) and list(n.meta["val"].shape) == [6, 4]]
    for cast in (c for c in casts if not c.meta.get("backward")):
        assert not [u for u in cast.users if u.meta.get("backward")]


def test_bytes_and_seconds_are_those_of_the_steps():
    graph, plan = planned("gpt", {"dp": 2, "tp": 2}, 3)
    moves, buckets = traffic_of(graph, graph.factored, plan), buckets_of(graph)
    for move in moves:
        for step, sent, took in zip(move.way.steps, move.way.sent, move.way.seconds, strict=True):
            assert sent in {wire_bytes(step, plan.mesh, n) for n in (1, 4, 8)}
            some = (None, buckets.params, buckets.grads)
            assert took in {seconds(step, plan.mesh, n, bucket) for n in (1, 4, 8) for bucket in some}
    every = totals(moves)
    counted = Counter((s.axes, s.kind) for s in told(graph, plan).elements() if s.kind not in ("slice", "zero"))
    assert {key: total.count for key, total in every.items()} == counted
    together = sum(total.seconds for total in every.values()) + local_seconds(moves)
    assert together == pytest.approx(sum(m.way.total for m in moves))


def test_who_needs_what():
    graph, plan = planned("gpt", {"dp": 2}, 3)
    moves = traffic_of(graph, graph.factored, plan)
    weight = [m for m in moves if m.value == "blocks.0.up.weight"]
    assert [m.backward for m in weight] == [False, True]
    assert all(m.is_param and m.readers and m.before == plan.resting[m.value] for m in weight)
    (gradient,) = [m for m in moves if ("grad", "blocks.0.up.weight") in m.leaves]
    assert gradient.backward
    assert gradient.after == plan.resting["blocks.0.up.weight"]
    assert str(gradient.way) == "reduce_scatter over dp"
