"""Runs one lowered program on the ranks of this process: fills its inputs, runs it, sorts its outputs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

from ..partitioner.graph import as_key
from ..partitioner.layout import take_local
from ..partitioner.program import Program, Segment
from .comm import Comm
from .execute import RankProgram, compile_rank
from .first_nan import Origin, followed
from .hand_collectives import by_hand
from .rank_log import Log
from .record import Record
from .state import State, pipeline_ranks
from .walk import Walk

RankRun = Callable[[list[Any]], Generator[Any, Any, Any]]
"""From a rank's inputs to its program."""


class Runner:
    """A program made ready for the ranks that live here.

    Attributes:
        collectives: as in `meshwright.compile`.
        record: notes what they do, where it is set.
        dtypes: per input the dtype of its tensor; a parameter that rests in another is cast, a shard at a time.
        scale: of the loss, in the next run of a program that takes one.
        origins: by held rank, notes where the first NaN of the next run came from; empty to look for none.
        compared: whether the processes have compared what they run it on.
    """

    record: Record | None = None
    compared = False

    def __init__(
        self, program: Program, state: State, comm: Comm, device: torch.device, collectives: str = "torch"
    ):
        self.collectives = collectives
        self.program, self.state, self.comm, self.device = program, state, comm, device
        self.constants = constants = {name: t.to(device) for name, t in program.constants.items()}
        make = _InSegments if program.segments else _at_one_go
        comm.prepare_pairs(_pairs(program))
        self.dtypes = [getattr(n.meta["val"], "dtype", None) for n in program.graph.placeholders]
        self.scale: torch.Tensor | None = None
        self.origins: dict[int, Origin] = {}
        self.ranks = [make(program, r, constants) for r in comm.ranks]

    def _inputs(self, index: int, rank: int, tensors: list[torch.Tensor], step: int, local: bool) -> list[Any]:
        filled: list[Any] = []
        program, state = self.program, self.state
        for role, layout, dtype in zip(program.graph.inputs, program.input_layouts, self.dtypes, strict=True):
            if role.kind == "param":
                shard = state.params[str(role.name)][index]
                filled.append(None if shard is None else shard.detach().to(dtype))
            elif role.kind == "buffer":
                filled.append(state.buffers[str(role.name)][index])
            elif role.kind == "input":
                x = tensors[int(role.name)].detach()
                if not local and layout is not None and not layout.is_whole:
                    x = take_local(x, layout, program.mesh, rank)
                filled.append(x.to(self.device))
            elif role.kind == "scale":
                filled.append(self.scale)
            else:
                filled.append(step if role.kind == "step" else None)
        return filled

    def _programs(self, tensors: list[torch.Tensor], step: int, local: bool) -> list[Any]:
        return [
            self._started(run, rank, self._inputs(i, rank, tensors, step, local))
            for i, (run, rank) in enumerate(zip(self.ranks, self.comm.ranks, strict=True))
        ]

    def _started(self, run: Any, rank: int, inputs: list[Any]) -> Generator[Any, Any, Any]:
        made = self._followed(run, rank, inputs)
        return made if self.collectives == "torch" else by_hand(made, self.collectives, self.program.mesh, rank)

    def _followed(self, run: Any, rank: int, inputs: list[Any]) -> Generator[Any, Any, Any]:
        if self.record is None:
            made = run(inputs)
        else:
            log = self.record.of(self.program.mesh, rank, self.device)
            made = log.following(run(inputs, log) if isinstance(run, _InSegments) else run(inputs))
        origin = self.origins.get(rank)
        if origin is None:
            return made
        for role, x in zip(self.program.graph.inputs, inputs, strict=True):
            origin.see((x,), f"its part of {role.kind} {role.name}", True)
        return followed(made, origin)

    def run(self, tensors: list[torch.Tensor], step: int, local: bool = False) -> list[torch.Tensor]:
        """Run to the end; gradients are added to the shards', buffers replaced. Returns the output tensors."""
        with torch.no_grad():
            results = self.comm.run(self._programs(tensors, step, local))
            return self.settle(results, tuple(range(len(self.program.graph.outputs))), tensors)

    def settle(self, results: list[Any], which: tuple[int, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Put each rank's results (the outputs `which`) where they belong; returns the first rank's "output" ones."""
        outputs: list[torch.Tensor] = []
        roles = self.program.graph.outputs
        for at, i in enumerate(which):
            role, values = roles[i], [r[at] for r in results]
            if all(v is None for v in values):
                continue
            if role.kind == "output":
                outputs.append(values[0])
            elif role.kind == "grad":
                for p, g in zip(self.state.params[str(role.name)], values, strict=True):
                    if p is not None:
                        add_grad(p, g)
            elif role.kind == "new_buffer":
                self.state.buffers[str(role.name)] = list(values)
            elif role.kind == "new_input":
                tensors[int(role.name)].copy_(values[0])
            elif role.kind == "input_grad":
                add_grad(tensors[int(role.name)], values[0])
        return outputs


def add_grad(p: torch.Tensor, grad: torch.Tensor) -> None:
    """As autograd does: the first gradient is taken, further ones are added."""
    if p.grad is None:
        grad = grad if grad.dtype == p.dtype else grad.to(p.dtype)
        p.grad = grad.reshape(p.shape).to(p.device)
    else:
        p.grad.add_(grad.to(p.grad.device))


def _pairs(program: Program) -> set[tuple[int, int]]:
    """The ranks that messages go between, sender first."""
    found = set()
    for rank in range(program.mesh.world_size) if program.segments else ():
        line = pipeline_ranks(program.mesh, rank)
        found |= {(rank, line[act.peer]) for act in program.acts(rank) if act.kind == "send"}
    return found


def _at_one_go(program: Program, rank: int, constants: dict[str, torch.Tensor]) -> RankRun:
    return compile_rank(program.rank_graph(rank), f"rank{rank}", constants)


class _InSegments:
    """One rank's program of segments; `parts`: per segment its program for each micro-batch."""

    def __init__(self, program: Program, rank: int, constants: dict[str, torch.Tensor]):
        self.walk, self.names = Walk(program, rank), [n.name for n in program.graph.placeholders]
        mine = {act.segment for act in self.walk.acts if act.kind == "run"}
        self.parts = {i: _of_micro_batches(program, program.segments[i], rank, constants) for i in sorted(mine)}

    def __call__(self, inputs: list[Any], log: Log | None = None) -> Generator[Any, Any, Any]:
        return self.walk.run(dict(zip(self.names, inputs, strict=True)), self._run, log)

    def _run(self, segment: int, micro_batch: int | None, given: list[Any]) -> Generator[Any, Any, Any]:
        return self.parts[segment][micro_batch or 0](given)


def sources(run: RankRun) -> dict[str, str]:
    """A rank's generated Python by name; of a segment one for each group of micro-batches that share it."""
    if isinstance(run, RankProgram):
        return {run.name: run.source}
    assert isinstance(run, _InSegments)
    out: dict[str, str] = {}
    for parts in run.parts.values():
        for i, part in enumerate(parts):
            if part not in parts[:i]:
                out[part.name + (f" from micro-batch {i}" if i else "")] = part.source
    return out


def _of_micro_batches(
    program: Program, segment: Segment, rank: int, constants: dict[str, torch.Tensor]
) -> list[RankProgram]:
    """The compiled segment for each micro-batch; those that are the same in plain numbers are compiled once."""
    count, world = program.plan.micro_batches if segment.timed else 1, program.mesh.world_size
    made: dict[Any, RankProgram] = {}

    def of(i: int) -> RankProgram:
        graph = segment.graph_at(i, world, rank)
        key = as_key(graph)
        if key not in made:
            made[key] = compile_rank(graph, f"rank{rank} {segment.name}", constants)
        return made[key]

    alike = segment.alike(count, world, rank)
    return [of(min(i, 1) if alike and i != count - 1 else i) for i in range(count)]
