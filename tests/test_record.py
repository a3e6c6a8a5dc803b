"""A step that is watched: how many micro-batches ranks hold, the trace, and who waits for whom."""

import json
import math
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
from launch import run_ranks
from meshwright.partitioner.schedules.generate import ONE_STAGE, in_flight_bound
from pipeline_models import SCHEDULES
from torch import nn


def deep(layers: int = 8) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    body = [m for _ in range(layers) for m in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*body), torch.randn(16, 8)


def compiled(mesh: dict[str, int], **options: Any) -> tuple[mw.Compiled, torch.Tensor]:
    model, x = deep()
    return mw.compile(model, mw.Mesh(**mesh, device="cpu"), loss=lambda y: y.square().mean(), **options), x  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [3, 8])
def test_ranks_hold_as_many_micro_batches_as_the_schedule_says(schedule: str, count: int):
    each = 4 if schedule in ONE_STAGE else 2
    starts = {str(each * s): f"stage {s}" for s in range(1, 16 // each)}
    made, x = compiled({"pp": 4}, micro_batches=count, schedule=schedule, pin=starts)
    with made.recorded() as record:
        made.step(x)
    bound = in_flight_bound(schedule, 4, count)
    assert record.simulated is not None
    assert record.in_flight == record.simulated.in_flight
    assert all(held <= most for held, most in zip(record.in_flight, bound, strict=True))


def test_the_measured_acts_are_those_of_the_schedule(tmp_path: Path):
    made, x = compiled({"dp": 2, "pp": 2}, micro_batches=4, schedule="zb-h1")
    want = made.step(x)
    with made.recorded(tmp_path / "step.json") as record:
        again = made.step(x)
    assert torch.equal(want, again)
    assert record.simulated is not None
    simulated = {e.name for e in record.simulated.events if e.stream == "compute"}
    for rank in range(4):
        mine = {e.name for e in record.events if e.rank == rank and e.stream == "compute"}
        assert {name for name in simulated if name[0] == str(rank % 2) and name[:2] != "0B"} <= mine
    trace = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {f"rank {r} measured" for r in range(4)} | {f"rank {r} simulated" for r in range(2)}
    assert str(record).splitlines()[-1].endswith("of the mean")


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_streams_of_a_rank_do_not_overlap(mesh: dict[str, int]):
    made, x = compiled(mesh)
    with made.recorded() as record:
        made.step(x)
        made.step(x)
    assert {e.rank for e in record.events} == set(range(math.prod(mesh.values())))
    for rank in range(len(record.in_flight)):
        for stream in {e.stream for e in record.events}:
            mine = sorted((e for e in record.events if (e.rank, e.stream) == (rank, stream)), key=lambda e: e.start)
            assert all(a.end <= b.start + 1e-9 for a, b in zip(mine, mine[1:], strict=False))
        assert record.seconds(rank) > 0


def test_a_model_that_is_called_is_recorded_too():
    made, x = compiled({"dp": 2})
    with made.recorded() as record:
        made(x).square().mean().backward()
    assert all(record.seconds(rank, "outside") == 0 for rank in range(2)), "ranks of one process take turns"
    assert all(record.seconds(rank) > 0 for rank in range(2))


def in_processes(rank: int, world: int) -> tuple[str, tuple[int, ...], set[int]]:
    made, x = compiled({"pp": 2}, micro_batches=4, schedule="1f1b")
    with made.recorded() as record:
        made.step(x)
    return str(record), record.in_flight, {e.rank for e in record.events if e.name == f"{e.rank}F3"}


@pytest.mark.gloo
def test_every_process_knows_all_ranks():
    for text, in_flight, ranks in run_ranks("test_record:in_processes", 2):
        assert in_flight == (2, 1)
        assert ranks == {0, 1}
        assert len(text.splitlines()) == 4
