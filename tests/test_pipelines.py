"""Micro-batches and pipelines give the numbers of one device on the whole batch."""

import copy
import itertools
import math
from typing import Any

import meshwright as mw
import pytest
import torch
from launch import run_ranks
from pipeline_models import MESHES, MODELS, SCHEDULES, complaints
from torch import nn

RUNS = list(itertools.product(SCHEDULES, MESHES, ("p", "2p", "2p+1")))
"""Every schedule on every mesh with every number of micro-batches; the models take turns."""

QUICK = 11
"""One run in so many is quick."""


def micro_batches(mesh: str, times: str) -> int:
    p = MESHES[mesh]["pp"]
    return {"p": p, "2p": 2 * p, "2p+1": 2 * p + 1}[times]


def runs() -> list:
    names = itertools.cycle(MODELS)
    return [
        pytest.param(next(names), *run, marks=[] if i % QUICK == 0 else [pytest.mark.slow], id="-".join(run))
        for i, run in enumerate(RUNS)
    ]


@pytest.mark.parametrize("name,schedule,mesh,times", runs())
def test_a_pipeline_equals_one_device(name: str, schedule: str, mesh: str, times: str):
    found = complaints(name, MESHES[mesh], micro_batches(mesh, times), schedule=schedule)
    assert not found, "\n".join([name, *found])


ALONE = [({"dp": 1}, 3), ({"dp": 2}, 2), ({"tp": 2}, 3), ({"dp": 2, "tp": 2}, 2)]


@pytest.mark.parametrize("axes,count", ALONE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_equal_one_device(name: str, axes: dict[str, int], count: int):
    found = complaints(name, axes, count)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 2}, {"zero": 3}], ids=str)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("name", ["tied", "twice"])
def test_with_sharded_state(name: str, axes: dict[str, int], options: dict[str, Any]):
    found = complaints(name, axes, 2, **options)
    assert not found, "\n".join(found)


def in_processes(rank: int, world: int, name: str, mesh: dict[str, int], count: int, schedule: str) -> list[str]:
    """`complaints`, in each of `world` processes."""
    return complaints(name, mesh, count, schedule=schedule)


ON_GLOO = [
    ("tied", {"pp": 2}, 3, "1f1b"),
    ("twice", {"pp": 2}, 4, "zb-v"),
    ("unet", {"pp": 2}, 2, "interleaved"),
    ("encoder-decoder", {"dp": 2, "pp": 2}, 4, "zb-h1"),
    ("gpt", {"pp": 4}, 5, "dualpipe-v"),
    ("tied", {"tp": 2, "pp": 2}, 2, "gpipe"),
]


@pytest.mark.gloo
@pytest.mark.parametrize("name,mesh,count,schedule", ON_GLOO, ids=str)
def test_one_rank_a_process(name: str, mesh: dict[str, int], count: int, schedule: str):
    world = math.prod(mesh.values())
    args = (name, mesh, count, schedule)
    for found in run_ranks("test_pipelines:in_processes", world, *args, timeout=400, comm_timeout=200):
        assert not found, "\n".join(found)


@pytest.mark.parametrize("axes", [{"pp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_a_pipeline_is_called_as_the_model(axes: dict[str, int]):
    """Forward alone, and forward, a loss outside, backward; then a step on what is already placed."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(4, 6)
    compiled = mw.compile(model, mw.Mesh(**axes, device="cpu"), micro_batches=2, loss=lambda y: y.square().mean())  # type: ignore[arg-type]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    compiled(x).sum().backward()
    model(x).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(compiled.gather("grads")[name], p.grad)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    torch.testing.assert_close(compiled.step(x), loss.detach())
    for name, p in model.named_parameters():
        torch.testing.assert_close(compiled.gather("grads")[name], p.grad)


class Normed(nn.Module):
    """In training the norm is written out, and its weight is read on both sides of the cut; in eval it is one call."""

    def __init__(self):
        super().__init__()
        self.rows, self.up = nn.Embedding(11, 8), nn.Linear(8, 16)
        self.norm, self.out = nn.BatchNorm1d(16), nn.Linear(16, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(nn.functional.gelu(self.norm(self.up(self.rows(ids)).mean(1))))


def test_copies_of_a_parameter_stay_equal_where_a_later_program_reads_it_on_one_stage():
    """The first program places the norm's weight on both ranks; that of fewer rows, or of eval, reads one of them."""
    torch.manual_seed(0)
    model, x, y = Normed(), torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4,))
    loss = nn.functional.cross_entropy
    compiled = mw.compile(
        copy.deepcopy(model), mw.Mesh(pp=2, device="cpu"), loss=loss, micro_batches=2,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    )  # fmt: skip
    optimizer, fewer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0
    for rows, training in ((4, True), (3, True), (4, False), (4, True)):
        model.train(training)
        optimizer.zero_grad()
        expected = loss(model(x[:rows]), y[:rows])
        expected.backward()
        optimizer.step()
        got = compiled.train(training).step(x[:rows], target=y[:rows])
        torch.testing.assert_close(got, expected.detach())
        stages, state = compiled.plan.stages, compiled._state
        assert stages is not None and state is not None
        assert stages.homes["norm.weight"] == (0, 1)
        fewer += len(stages.parameters["norm.weight"]) == 1
        for name, p in model.named_parameters():
            for mine in state.params[name]:
                if mine is not None:
                    torch.testing.assert_close(mine.detach(), p.detach(), msg=lambda text, name=name: f"{name}: {text}")
    assert fewer == 2
