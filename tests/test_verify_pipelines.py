"""`verify` sees every value of programs with micro-batches and stages, and names the op that differs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.kernels.in_place import ADDING
from meshwright.partitioner.program import Program
from meshwright.runtime.values import mesh_values
from meshwright.runtime.walk import Walk
from test_saved_pipelines import compiled
from torch import fx

RUNS = [
    ("twice", {"pp": 2}, 3, "zb-v"),
    ("unet", {"dp": 1}, 3, "auto"),
    ("gpt", {"dp": 2, "pp": 2}, 2, "1f1b"),
    ("tied", {"tp": 2, "pp": 2}, 1, "auto"),
    ("encoder-decoder", {"tp": 2}, 2, "auto"),
]


@pytest.mark.parametrize("name,axes,count,schedule", RUNS, ids=str)
def test_verify_sees_every_tensor(name: str, axes: dict[str, int], count: int, schedule: str):
    made, batch = compiled(name, axes, count, micro_batches=count, schedule=schedule)
    report = made.verify(**batch)
    captured = made.program.captured.fx.nodes
    tensors = sum(n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor) for n in captured)
    assert report.compared >= tensors, f"{report}; the program has {tensors}"


def with_wrong_segment(program: Program) -> Program:
    """The last tanh is a sigmoid in micro-batch 1 of the stage that computes it."""
    at = next(i for i, s in enumerate(program.segments) if s.name == "phase 1 stage 1 F")
    right = program.segments[at]

    def wrong(rank: int) -> fx.Graph:
        graph = fx.Graph()
        graph.output(graph.graph_copy(right.graph_at(rank // 2, 2, rank % 2), copied := {}))
        for old, new in copied.items():
            new.name = old.name
        last = [n for n in graph.nodes if n.target is torch.ops.aten.tanh.default][-1]
        if rank >= program.mesh.world_size:
            last.target = torch.ops.aten.sigmoid.default
        return graph

    segments = list(program.segments)
    segments[at] = replace(right, rank_graph=wrong, adding_graph=wrong)
    return replace(program, segments=tuple(segments))


def test_verify_names_the_op_of_a_broken_segment():
    made, batch = compiled("twice", {"pp": 2}, 2, micro_batches=2)
    (runner,) = made._runners.values()
    runner.program = with_wrong_segment(runner.program)
    named = r"the first op that differs is tanh_3 = .* at .*pipeline_models.py:\d+.* on pp=1"
    with pytest.raises(mw.VerifyError, match=named):
        made.verify(**batch)


def sums_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the first micro-batch alone."""
    monkeypatch.setitem(ADDING, torch.ops.aten.mm.default, lambda total, a, b: total)


def sends_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent arrives doubled."""
    arrive = Walk._arrive

    def doubled(self: Walk, keys: Any, kept: dict[Any, Any]) -> Any:
        keys = list(keys)
        coming = {k for k in keys if type(kept.get(k)).__name__ == "_Coming"}
        yield from arrive(self, keys, kept)
        for key in coming:
            kept[key] = kept[key] * 2

    monkeypatch.setattr(Walk, "_arrive", doubled)


@pytest.mark.parametrize("breaks", [sums_forget, sends_twice])
def test_verify_names_the_op_that_a_broken_walk_shows_at(monkeypatch: pytest.MonkeyPatch, breaks: Callable):
    made, batch = compiled("twice", {"pp": 2}, 2, micro_batches=2)
    made.verify(**batch)
    breaks(monkeypatch)
    made, batch = compiled("twice", {"pp": 2}, 2, micro_batches=2)
    with pytest.raises(mw.VerifyError, match=r"first op that differs is \w+ = .* at .*pipeline_models.py:\d+.* on pp="):
        made.verify(**batch)


def test_a_parameter_is_given_where_it_lives_alone():
    """A value read on a stage that has no copy of it must not go unseen."""
    made, batch = compiled("twice", {"pp": 2}, 2, micro_batches=2)
    program = made.program
    assert program.plan.stages is not None
    params = made.gather("params")
    tensors = list(batch.values())
    inputs = [params[str(r.name)] if r.kind == "param" else tensors[int(r.name)] for r in program.captured.inputs]
    with torch.no_grad():
        found = mesh_values(program, inputs)
    by_name = dict(zip((str(r.name) for r in program.graph.inputs), program.graph.placeholders, strict=True))
    for name, homes in program.plan.stages.homes.items():
        for rank in set(range(2)) - set(homes):
            assert found[rank].get(by_name[name].name) is None
