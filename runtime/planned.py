"""What a compiled model tells of its program: its plan, costs, memory and text; a step recorded, or verified."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from ..partitioner.errors import MeshwrightError
from ..partitioner.explain import explain
from ..partitioner.memory import Model
from ..partitioner.memory_report import MemoryReport, memory_report
from ..partitioner.mesh import Mesh
from ..partitioner.optimizer_bytes import ADAMW, SGD, Stepper
from ..partitioner.plan import Plan
from ..partitioner.program import Program
from ..partitioner.report_page import page
from ..partitioner.stage_search import simulated_timeline
from .launch import wire_here
from .placed import Placed
from .record import Record
from .request import Settings
from .runner import Runner
from .state import aliases_of


class Planned(Placed):
    """What a compiled model tells; see `Compiled`."""

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, settings: Settings):
        super().__init__(model, mesh, device, settings)
        self._runners: dict[Any, Runner] = {}
        self._last: Program | None = None
        self._record: Record | None = None

    @property
    def program(self) -> Program:
        """The program that ran last.

        Raises:
            MeshwrightError: none has been made yet.
        """
        if self._last is None:
            raise MeshwrightError(
                "no plan yet: it is made at the first call, or by compile(args=..., kwargs={'target': ...})"
            )
        return self._last

    @property
    def plan(self) -> Plan:
        return self.program.plan

    def explain(self, name: str) -> str:
        """Why a call, a module or a parameter is as it is."""
        return explain(self.plan, aliases_of(self.model).get(name, name))

    def dump(self, folder: str | Path) -> None:
        """Write the plan (text, JSON), the program after each pass, its DOT graph and each rank's generated code."""
        from .dump import write

        write(self._runners, self.program, Path(folder))

    @contextlib.contextmanager
    def recorded(self, path: str | Path | None = None) -> Iterator[Record]:
        """Time what runs in the `with` block, per rank; every process enters it alike.

        `print(record)` after it tells how long each rank computed and waited. `path`: a trace for Perfetto or
        chrome://tracing, of all ranks (the first process writes it); the simulated step stands beside the measured one
        where the plan has a schedule.
        """
        record = self._record = Record()
        try:
            yield record
        finally:
            self._record = None
        record.close(self.comm, self.mesh, self.device)
        plan = self.plan
        if plan.schedule is not None and plan.stages is not None:
            record.simulated = simulated_timeline(self.program.captured, plan)
        if path is not None and 0 in self.comm.ranks:
            record.write(path)

    def report(self, path: str | Path) -> None:
        """Write the plan as one HTML page that needs no network: summary, schedule, traffic, layouts, reasons."""
        Path(path).write_text(page(self.plan), encoding="utf-8")

    def verify(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run a step on one device and on the mesh in this process, compare every tensor of every op.

        Raises:
            VerifyError: they differ; names the first op that does, and its source line.
        """
        from .verify import verify

        return verify(self, args, kwargs, target)

    def memory_report(self) -> MemoryReport:
        """What every stage holds over a step of the program that ran last, and what would take less; printable.

        The optimizer's state is that of AdamW, unless it is SGD, none, or all of it away on the host.

        Raises:
            MeshwrightError: no program has been made yet.
        """
        program = self.program
        room = (program.plan.facts.asked.get("memory") if program.plan.facts else None) or self.mesh.device.memory
        stepper = self.optimizer.stepper() if self.optimizer else SGD
        return memory_report(self.memory_model(program, stepper), int(room))

    def memory_model(self, program: Program, stepper: Stepper | None = None) -> Model:
        """The memory model of a program, on this device and comm. `stepper`: by default that of the optimizer, which
        is taken for AdamW until it is made, or where the user makes it."""
        stepper = stepper or (self.optimizer.stepper() if self.optimizer else ADAMW)
        return Model(program, wire_here(self.device), stepper, self.device.type == "cuda")
