"""Four processes; in each phase one is killed, stopped, slow or has its numbers damaged: a named end in time.

One interpreter imports everything and forks the processes of one run after another: a run costs a second or two.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import nn

WORLD, BAD, LIMIT = 4, 2, 6.0
FAULTS, PHASES = ("kill", "stop", "slow", "corrupt"), ("compile", "warm-up", "forward", "collective", "save")
RUNS = list(itertools.product(FAULTS, PHASES))
SAYS = {"kill": "rank 2 is gone or silent", "stop": "rank 2 is gone or silent", "corrupt": "rank 2", "slow": "fine"}
DAMAGED = "rank-00002.safetensors"
"""The file that is corrupt after ("corrupt", "save"), which whoever loads is told."""
X = torch.linspace(-1, 1, 48).view(8, 6).sin()


class Net(nn.Module):
    """`then` is called where forward is captured."""

    def __init__(self, then: Callable[[], None]):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.then = nn.Linear(6, 6), nn.Linear(6, 2), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.then()
        return self.b(torch.tanh(self.a(x)))


def trains(rank: int, fault: str, phase: str, folder: Path) -> str:
    """Compile, three steps, a save after the second; the fault is that of rank 2. What it ended with."""
    model = Net(lambda: None)

    def happen(compiled: mw.Compiled | None = None) -> None:
        if rank != BAD:
            return
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "slow":
            time.sleep(LIMIT / 3)
        else:
            first = next(compiled.parameters()) if compiled else model.a.weight
            first.data.view(-1)[3] *= -2

    def before(owner: Any, name: str, compiled: mw.Compiled) -> None:
        """Have the fault before the next call of a method."""
        call = getattr(owner, name)

        def once(*args: Any, **kwargs: Any) -> Any:
            setattr(owner, name, call)
            happen(compiled)
            return call(*args, **kwargs)

        setattr(owner, name, once)

    if phase == "compile" and fault == "corrupt":
        happen()
    elif phase == "compile":
        model.then = happen
    try:
        compiled = mw.compile(
            model, mw.Mesh(dp=2, tp=2, device="cpu"), loss=lambda out: out.square().mean(),
            timeout=LIMIT if fault in ("kill", "stop") else 8 * LIMIT,  # what must be fine may run beside much else
            zero=int((fault, phase) == ("corrupt", "save")),  # rank 2 then has something to write
            optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), args=(X,), check_every=1,
        )  # fmt: skip
        if phase == "warm-up":
            happen(compiled)
        compiled.step(X)
        if phase == "forward":
            before(compiled, "_next_step", compiled)
        elif phase == "collective":
            before(compiled.comm, "start", compiled)
        compiled.step(X)
        if phase == "save" and fault != "corrupt":
            before(sys.modules["meshwright.runtime.checkpoint"], "write_part", compiled)
        saved = compiled.save(folder).path
        if phase == "save" and fault == "corrupt":
            damage(saved / DAMAGED, rank)
            compiled.load(folder)
        compiled.step(X)
    except mw.MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def damage(file: Path, rank: int) -> None:
    """One bit of what rank 2 wrote, before anybody reads it."""
    if rank == BAD:
        data = bytearray(file.read_bytes())
        data[-3] ^= 0x10
        file.write_bytes(data)
    dist.barrier()


class Run:
    """Four processes with one fault."""

    def __init__(self, fault: str, phase: str):
        self.folder, self.begin = tempfile.TemporaryDirectory(), time.monotonic()
        self.children = []
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                _child(rank, fault, phase, Path(self.folder.name))
            self.children.append(child)
        self.waited = [c for r, c in enumerate(self.children) if r != BAD or fault in ("slow", "corrupt")]

    def end(self) -> tuple[list[str], float]:
        """What each process ended with, and seconds until the last of those that can has."""
        while time.monotonic() - self.begin < 100 and any(not _over(c) for c in self.waited):
            time.sleep(0.05)
        took = time.monotonic() - self.begin
        for child in self.children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        with self.folder as name:
            ends = [Path(name, f"end{r}") for r in range(WORLD)]
            return [e.read_text() if e.exists() else "nothing" for e in ends], took


def _over(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True


def _child(rank: int, fault: str, phase: str, folder: Path) -> None:
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank)}
        wait = timedelta(seconds=60)
        dist.init_process_group("gloo", f"file://{folder}/store", timeout=wait, rank=rank, world_size=WORLD)
        text = trains(rank, fault, phase, folder / "run")
    except BaseException:
        text = traceback.format_exc()
    part = folder / f"part{rank}"
    part.write_text(text)
    part.rename(folder / f"end{rank}")
    end = time.monotonic() + 30
    all_ = WORLD if fault in ("slow", "corrupt") else WORLD - 1
    while rank == 0 and time.monotonic() < end and len([*folder.glob("end*")]) < all_:
        time.sleep(0.1)  # it serves the notes of all
    os._exit(0)


def all_runs(rank: int, world: int, runs: list[tuple[str, str]]) -> list[tuple[list[str], float]]:
    """Two runs at a time: they mostly wait."""
    found = []
    for at in range(0, len(runs), 2):
        pair = [Run(*run) for run in runs[at : at + 2]]
        found += [run.end() for run in pair]
    return found


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(900)
def test_every_fault_in_every_phase_has_a_named_end():
    (found,) = run_ranks(all_runs, 1, RUNS, timeout=800, join=False)
    wrong = []
    for run, (ends, took) in zip(RUNS, found, strict=True):
        others = [e for r, e in enumerate(ends) if r != BAD]
        print(run, f"{took:.1f} s", others[0][:300])
        says = DAMAGED if run == ("corrupt", "save") else SAYS[run[0]]
        if any(says not in e for e in others) or took > LIMIT + 60:
            wrong.append((run, took, ends))
    assert not wrong, "\n".join(map(str, wrong))
