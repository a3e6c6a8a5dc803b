"""Runs a case with the fault that it asks for.

    raise   a bad sample: compile or the step must stop with an error that says so
    kill    one process a rank; rank 1 is killed in its second step: the others must end with an error that names it,
            and what was saved before must load and go on as on one device
    inf     is in the batches of the case already
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
from typing import Any

import meshwright as mw
from launch import run_outcomes

from .harness import Run, differences, on_mesh, on_one_device, run_fresh, steps
from .registry import Axes, Case

LIMIT = 20.0
"""Seconds that processes wait for each other."""


def with_fault(case: Case, axes: Axes) -> list[str]:
    """What is wrong with how the case ends with its fault; nothing for a case without one."""
    kind = (case.ask.fault or {}).get("kind")
    return {None: _fine, "inf": _fine, "raise": _raises, "kill": _killed}[kind](case, axes)


def _fine(case: Case, axes: Axes) -> list[str]:
    return []


def _raises(case: Case, axes: Axes) -> list[str]:
    built = case.build()
    built[1][0][0] = -1
    try:
        on_mesh(axes)(case, built).step(*built[1], **built[2])
    except mw.MeshwrightError as error:
        return [] if _says(case) in str(error) else [f"with the fault: {error}"]
    return ["with the fault: no error"]


def _says(case: Case) -> str:
    assert case.ask.fault is not None
    return case.ask.fault["says"]


def _killed(case: Case, axes: Axes) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        world = math.prod(axes.values())
        outcomes = run_outcomes("cases.faults:dies", world, case.id, axes, folder, timeout=120, but=1)
        found = [
            f"with the fault, rank {o.rank}: {o.value or o.error}"
            for o in outcomes
            if o.rank != 1 and _says(case) not in str(o.value)
        ]
        built = case.build()
        run, trainer = Run(), on_mesh(axes)(case, built)
        trainer.load(folder)
        run.losses = [float(trainer.step(*built[1], **built[2])) for _ in range(case.ask.steps - 1)]
        want = run_fresh(steps, on_one_device, case)
        want.losses = want.losses[1:]
        return found + [f"resumed: {d}" for d in differences(want, run.gathered(trainer), case.ask.tol)]


def dies(rank: int, world: int, name: str, axes: Axes, folder: str) -> str:
    """One step, saved; rank 1 is killed when its second step first sends something."""
    from . import BY_ID

    case = BY_ID[name]
    built = case.build()
    trainer = on_mesh(axes, timeout=LIMIT)(case, built)
    trainer.step(*built[1], **built[2])
    trainer.save(folder)
    if rank == 1:
        trainer.comm.start = trainer.comm.post = trainer.comm.expect = _die
    try:
        trainer.step(*built[1], **built[2])
    except mw.MeshwrightError as error:
        return str(error)
    return "no error"


def _die(request: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
