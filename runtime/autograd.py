"""A compiled forward whose output can be backpropagated: the ranks' programs pause between the two.

Each rank's program is suspended at its pause, its saved activations on its own stack; `backward` resumes it with the
gradients of the outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from .faults import MeshwrightError
from .loss_scale import spread
from .runner import Runner


class Suspended:
    """The programs of one forward call, waiting for backward."""

    def __init__(self, runner: Runner, tensors: list[torch.Tensor], step: int, local: bool):
        self.runner, self.tensors = runner, tensors
        self.programs: list[Any] | None = runner._programs(tensors, step, local)
        with torch.no_grad():
            results = runner.comm.run_until_pause(self.programs)
            self.outputs = runner.settle(results, runner.program.paused, tensors)

    def backward(self, gradients: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Resume with the gradients of the outputs; parameters' gradients are added, the inputs' returned."""
        if self.programs is None:
            raise MeshwrightError(
                "backward runs once for each forward call: its activations are freed; call the model again"
            )
        programs, self.programs = self.programs, None
        with torch.no_grad():
            results = self.runner.comm.resume(programs, [list(gradients) for _ in programs])
        roles = self.runner.program.graph.outputs
        for_inputs: dict[int, torch.Tensor] = {}
        for i, role in enumerate(roles):
            if role.kind == "input_grad" and results[0][i] is not None:
                for_inputs[int(role.name)] = results[0][i]
        rest = tuple(i for i, r in enumerate(roles) if r.kind == "grad")
        with torch.no_grad():
            self.runner.settle([[r[i] for i in rest] for r in results], rest, self.tensors)
        if len(self.runner.comm.ranks) < self.runner.program.mesh.world_size:
            spread(self.runner.state)
        return [for_inputs.get(i) for i in range(len(self.tensors))]


class Through(torch.autograd.Function):
    """Ties the outputs of a suspended forward to autograd; `anchor` makes them require a gradient."""

    @staticmethod
    def forward(ctx: Any, suspended: Suspended, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple:
        ctx.suspended = suspended
        ctx.set_materialize_grads(True)
        wanted = set(suspended.runner.program.tangents)
        outputs = tuple(o.detach().view_as(o) for o in suspended.outputs)
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs) if i not in wanted))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        suspended: Suspended = ctx.suspended
        wanted = [gradients[i].contiguous() for i in suspended.runner.program.tangents]
        return (None, None, *suspended.backward(wanted))
