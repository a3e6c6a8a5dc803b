"""One rank a process, joined by gloo: the numbers of one device, local inputs, faults, and the example."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from compare import all_too_far, allowed, exact_copy, exact_inputs
from launch import Outcome, run_outcomes, run_ranks
from torch import nn

pytestmark = pytest.mark.gloo
ROOT = Path(__file__).parents[1]
SLOW = ("gpt2", "llama", "t5", "vit")
ON_FOUR = ["small", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    from small import tied
    from zoo import ZOO

    return tied() if name == "small" else ZOO[name]()


def zoo_step(rank: int, world: int, name: str) -> dict[str, dict[str, Any]]:
    """One AdamW step of a zoo model on dp=2, tp=2; what rank 0 has, and that all ranks have the same."""
    from test_promise import adamw, state_after_a_step

    model, inputs = built(name)
    compiled = mw.compile(model, mw.Mesh(dp=2, tp=2, device="cpu"), optimizer=adamw)
    assert compiled.comm.ranks == (rank,)
    state = state_after_a_step(compiled, inputs)
    return state if rank == 0 else {"loss": state["loss"]}


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_processes_equal_one_device(name: str):
    from cases.oracle import Eager
    from test_promise import EPS, LR, adamw, state_after_a_step

    got, *others = run_ranks("test_processes:zoo_step", 4, name, timeout=400, comm_timeout=300)
    assert all(torch.equal(o["loss"][""], got["loss"][""]) for o in others)
    (twin, inputs), (double, _) = built(name), built(name)
    exact = state_after_a_step(Eager(exact_copy(double), optimizer=adamw), exact_inputs(inputs))
    eager = state_after_a_step(Eager(twin, optimizer=adamw), inputs)
    grads = {n: (g, exact["grads"][n]) for n, g in eager["grads"].items()}
    passed_on = {n: LR / EPS * allowed(g, true) for n, (g, true) in grads.items() if g is not None and true is not None}
    found = []
    for what in got:
        found += all_too_far(what, got[what], eager[what], exact[what], passed_on if what == "params" else None)
    assert not found, "\n".join(found)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


X, Y = torch.linspace(-1, 1, 48).view(8, 6).sin(), torch.arange(8) % 4


def local_step(rank: int, world: int, count: int) -> Any:
    with pytest.raises(mw.PlanError, match="4 ranks, but 2 processes run; launch torchrun --nproc-per-node 4"):
        mw.compile(small(), mw.Mesh(dp=4, device="cpu"))
    part = slice(rank * 4, rank * 4 + 4)
    options = {"loss": F.cross_entropy, "inputs": "local", "clip_grad_norm": 0.5, "micro_batches": count}
    compiled = mw.compile(small(), mw.Mesh(dp=2, device="cpu"), **options)  # type: ignore[arg-type]
    if count > 1:
        with pytest.raises(mw.MeshwrightError, match="3 rows on a rank cannot be cut"):
            compiled.step(X[:3], target=Y[:3])
    loss = compiled.step(X[part], target=Y[part])
    return loss, compiled.grad_norm, compiled.gather("grads"), compiled.gather("buffers")


@pytest.mark.parametrize("count", [1, 2])
def test_local_inputs_are_the_parts_of_one_batch(count: int):
    model = small()
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for got_loss, got_norm, grads, buffers in run_ranks("test_processes:local_step", 2, count, timeout=200):
        torch.testing.assert_close(got_loss, loss.detach())
        torch.testing.assert_close(got_norm, norm)
        for n, p in model.named_parameters():
            torch.testing.assert_close(grads[n], p.grad, rtol=1e-4, atol=1e-5)
        for n, b in model.named_buffers():
            torch.testing.assert_close(buffers[n], b, rtol=1e-4, atol=1e-5)


def a_word_out_of_range(rank: int, world: int) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    words = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 99]])  # the second data rank alone reads the 99
    compiled = mw.compile(model, mw.Mesh(dp=2, device="cpu"), loss=lambda o: o.square().mean())
    return float(compiled.step(words))


def test_a_rank_that_raises_ends_all_ranks_and_is_named():
    begun = time.monotonic()
    outcomes: list[Outcome] = run_outcomes("test_processes:a_word_out_of_range", 2, timeout=240, comm_timeout=120)
    assert time.monotonic() - begun < 200
    assert not any(o.ok for o in outcomes)
    assert "RankError: rank 1, node embedding" in outcomes[1].error
    assert "index out of range" in outcomes[1].error
    assert "test_processes.py:" in outcomes[1].error
    assert re.search(r"rank 1|peer", outcomes[0].error), outcomes[0].error


@pytest.mark.slow
def test_the_example_trains_under_torchrun(tmp_path: Path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", str(port)]
    command += [str(ROOT / "examples" / "train_gpt.py"), "--mesh", "dp=2,tp=2", "--steps", "3", "--layers", "1"]
    command += ["--width", "32", "--heads", "4", "--seq", "16", "--batch", "4", "--plot", str(tmp_path / "loss.png")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"agrees with one device: largest relative difference of the loss \d\.\d+e-\d+", done.stdout)
    assert (tmp_path / "loss.png").stat().st_size > 0
