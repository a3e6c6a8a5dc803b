"""Runs one lowered program on the ranks of this process: fills its inputs, walks its actions, sorts its outputs."""

from __future__ import annotations

from typing import Any

import torch

from ..partitioner.layout import take_local
from ..partitioner.program import Program
from .comm import Comm
from .execute import RankProgram, compile_rank
from .state import State


class Runner:
    """A program made ready for the ranks that live here."""

    def __init__(self, program: Program, state: State, comm: Comm, device: torch.device):
        self.program, self.state, self.comm, self.device = program, state, comm, device
        constants = {name: t.to(device) for name, t in program.constants.items()}
        self.ranks: list[RankProgram] = [
            compile_rank(program.rank_graph(r), f"rank{r}", constants) for r in comm.ranks
        ]

    def _inputs(self, index: int, rank: int, tensors: list[torch.Tensor], step: int, local: bool) -> list[Any]:
        filled: list[Any] = []
        program, state = self.program, self.state
        for role, layout in zip(program.graph.inputs, program.input_layouts, strict=True):
            if role.kind == "param":
                filled.append(state.params[str(role.name)][index].detach())
            elif role.kind == "buffer":
                filled.append(state.buffers[str(role.name)][index])
            elif role.kind == "input":
                x = tensors[int(role.name)].detach()
                if not local and layout is not None and not layout.is_whole:
                    x = take_local(x, layout, program.mesh, rank)
                filled.append(x.to(self.device))
            else:
                filled.append(step if role.kind == "step" else None)
        return filled

    def _programs(self, tensors: list[torch.Tensor], step: int, local: bool) -> list[Any]:
        return [
            run(self._inputs(i, rank, tensors, step, local))
            for i, (run, rank) in enumerate(zip(self.ranks, self.comm.ranks, strict=True))
        ]

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
            if values[0] is None:
                continue
            if role.kind == "output":
                outputs.append(values[0])
            elif role.kind == "grad":
                for p, g in zip(self.state.params[str(role.name)], values, strict=True):
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
