"""`compile(collectives=...)`: steps whose collectives are messages equal one device, in one process and over gloo."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest
import torch
from launch import run_ranks
from meshwright.runtime.distributed import DistributedComm
from meshwright.runtime.hand_collectives import by_hand
from meshwright.runtime.inprocess import InProcessComm
from pipeline_models import complaints
from test_hand_collectives import ALGORITHMS, FEW, NAMES, _flat, mesh_of, program, starts

SLOW = pytest.mark.slow
STEPS: list[tuple[str, dict[str, int], int, dict[str, Any]]] = [
    ("tied", {"dp": 2, "tp": 2}, 1, {"collectives": "ring"}),
    ("tied", {"dp": 3}, 1, {"collectives": "halving", "zero": 3}),
    ("gpt", {"tp": 2}, 2, {"collectives": "bidirectional"}),
    ("gpt", {"dp_replicate": 2, "dp_shard": 2}, 1, {"collectives": "hierarchical", "zero": 3}),
    ("tied", {"dp": 2, "pp": 2}, 2, {"collectives": "tree", "schedule": "1f1b"}),
    ("twice", {"dp": 2, "pp": 2}, 4, {"collectives": "server:2", "schedule": "zb-h1"}),
    ("gpt", {"dp": 4}, 1, {"collectives": "auto", "zero": 2}),
]


@pytest.mark.parametrize("name,axes,count,options", [*STEPS[::2], *(pytest.param(*s, marks=SLOW) for s in STEPS[1::2])])
def test_a_step_equals_one_device(name: str, axes: dict[str, int], count: int, options: dict[str, Any]):
    assert not complaints(name, axes, count, **options)


def test_a_step_sends_messages_alone():
    torch.manual_seed(0)
    model, x = torch.nn.Linear(6, 4), torch.randn(4, 6)
    compiled = mw.compile(model, mesh_of({"dp": 2}), loss=lambda y: y.square().mean(), collectives="ring")
    compiled.step(x)
    assert set(compiled.comm.sent[0]) == {"send"}


def in_processes(rank: int, world: int) -> dict[str, Any]:
    mesh = mesh_of({"p": world} if world < 4 else {"p": 2, "q": 2})
    comm = DistributedComm(mesh)
    out = {}
    for name in NAMES:
        big = starts(mesh, rank, FEW[:1], (20011,)) if name in ("ring", "tree") else ()
        requests = [*starts(mesh, rank, FEW, (7,)), *big]
        out[name] = comm.run([by_hand(program(requests), name, mesh, rank)])
    axes = {2: {"pp": 2}, 3: {"dp": 3}, 4: {"dp": 2, "pp": 2}}[world]
    schedule = {"schedule": "1f1b"} if "pp" in axes else {}
    out["step"] = complaints("tied", axes, 3, collectives="ring", **schedule)
    return out


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in (3, 4))])
def test_processes_equal_the_comm_in_one(world: int):
    mesh = mesh_of({"p": world} if world < 4 else {"p": 2, "q": 2})
    got = run_ranks("test_collectives_option:in_processes", world, timeout=300, comm_timeout=100)
    small = InProcessComm(mesh).run([program(starts(mesh, r, FEW, (7,))) for r in range(world)])
    big = InProcessComm(mesh).run([program(starts(mesh, r, FEW[:1], (20011,))) for r in range(world)])
    for rank, found in enumerate(got):
        assert not found.pop("step")
        for name in NAMES:
            want = _flat(small[rank]) + (_flat(big[rank]) if name in ("ring", "tree") else [])
            assert len(_flat(found[name])) == len(want)
            assert all(torch.equal(a, b) for a, b in zip(_flat(found[name]), want, strict=True)), name


def test_names_of_the_option_are_those_of_the_programs():
    for name in (*ALGORITHMS, "server:3", "auto"):
        mw.compile(torch.nn.Linear(2, 2), mesh_of({"dp": 2}), collectives=name)
