"""The compiled model, what `compile` returns: how a call or a step of it is captured once, and run."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree

from ..partitioner.errors import PlanError
from ..partitioner.mesh import Mesh
from ..partitioner.program import Program
from ..partitioner.stages import Stages
from .agree import check_agreement, check_options_alike
from .autograd import Suspended, Through
from .block_file import FileError
from .first_nan import Origin, compare_origins, has_nan
from .in_step import compare_call, compare_copies, compare_first_values
from .loss_scale import unscale
from .optimizer import Optimizers, clip_grad_norm
from .planned import Planned
from .request import Request, Settings
from .runner import Runner
from .signature import signature, text
from .state import State

log = logging.getLogger("meshwright")

PROGRAMS = 32
"""Captured programs kept: one a combination of shapes, modes and plain arguments; the oldest goes first."""


class Compiled(Planned):
    """A model compiled for a mesh. See `meshwright.compile`.

    Attributes:
        model: the model as given; its own parameters are not touched.
        optimizer: the optimizers of the ranks that live in this process, stepped together; None without one.
        grad_norm: the global gradient norm before clipping, of the last step that clipped.
        scaler: the scale of the loss and its history, with `state_dict` and `load_state_dict`; None without one.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, settings: Settings):
        super().__init__(model, mesh, device, settings)
        self._zero: int | None = None
        self._stages: Stages | None = None
        self.grad_norm: torch.Tensor | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, whole, on every rank; call `.backward()` on what follows from it.

        Raises:
            CaptureError, PlanError: the call cannot be captured or planned; the message says what would work.
        """
        with self._telling():
            return self._call(args, kwargs)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        trained = any(p.requires_grad for p in self.model.parameters())
        inputs = tensors_of((args, kwargs, None))
        wanted = torch.is_grad_enabled() and (trained or any(t.requires_grad for t in inputs))
        runner = self._runner(Request("autograd" if wanted else "forward", args, kwargs))
        self._compare(runner, inputs)
        if runner.program.form == "forward":
            return runner.program.graph.result(runner.run(inputs, self._next_step(), self.settings.local_inputs))
        suspended = Suspended(runner, inputs, self._next_step(), self.settings.local_inputs)
        outputs = Through.apply(suspended, self._anchor, *inputs)
        return runner.program.graph.result(list(outputs))

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward, loss, backward, clip, optimizer on the global batch. Returns the global loss, 0-d.

        Gradients are of this step alone: older ones are dropped. Without an optimizer they are left in `.grad` of
        `parameters()`. (To add up several batches call the model and `.backward()` on each.)

        With a loss scale, a step whose gradients overflow on any rank is skipped by all: parameters, buffers and
        optimizer state stay as they were, there are no gradients, `skipped_steps` is one more.
        """
        with self._telling():
            return self._step(args, kwargs, target)

    def _step(self, args: tuple, kwargs: dict[str, Any], target: Any) -> torch.Tensor:
        runner = self._runner(Request("step", args, kwargs, target))
        self._zero_grad()
        runner.scale = self.scaler.tensor(self.device) if self.scaler else None
        buffers = dict(self._have_state().buffers)
        inputs = tensors_of((args, kwargs, target))
        due = self._compare(runner, inputs) and not self.scaler
        runner.origins = {r: Origin() for r in self.comm.ranks} if due else {}
        (loss,) = runner.run(inputs, self._next_step(), self.settings.local_inputs)
        if due:
            self._compare_nan(runner, loss)
        if self.scaler and self._overflowed(buffers):
            return loss
        if self.settings.clip_grad_norm is not None:
            clip = self.settings.clip_grad_norm
            self.grad_norm = clip_grad_norm(self._have_state(), *(clip if isinstance(clip, tuple) else (clip,)))
        if self.optimizer:
            self._stepped(self.optimizer, buffers)
        return loss

    def _stepped(self, optimizer: Optimizers, buffers: dict[str, list[torch.Tensor]]) -> None:
        """The optimizer's step; where it is undone, so is the rest of the step but for its gradients."""
        try:
            optimizer.step()
        except FileError:
            self._have_state().buffers.update(buffers)
            self.steps -= 1
            raise

    def _compare(self, runner: Runner, inputs: list[torch.Tensor]) -> bool:
        """That the ranks are in step, where it is time to look. Whether this is a step that `check_every` names."""
        every, call, state = self.settings.check_every, self._roll_call, self._have_state()
        due = every is not None and self.steps % every == 0
        if call and (due or not runner.compared):
            compare_call(call, inputs, self.steps, self.mesh, self.settings.local_inputs)
        if call and state.as_given:
            compare_first_values(call, self.model)
        if due:
            compare_copies(call, state, self.steps)
        runner.compared, state.as_given = True, False
        return due

    def _compare_nan(self, runner: Runner, loss: torch.Tensor) -> None:
        grads = (p.grad for _, p in self._have_state().shards())
        spoilt = has_nan(loss) or any(g is not None and has_nan(g) for g in grads)
        compare_origins(self._roll_call, runner.origins, spoilt, self.steps - 1)

    def _overflowed(self, buffers: dict[str, list[torch.Tensor]]) -> bool:
        """Take the scale out of the gradients. Whether they are not finite: then nothing of the step stays."""
        assert self.scaler is not None
        overflow = unscale(self._have_state(), self.scaler.scale.value)
        if self.optimizer:
            self.optimizer.skipped = overflow
        if overflow:
            self._have_state().buffers.update(buffers)
            self._zero_grad()
            log.info("step %d overflowed at loss scale %g and is skipped", self.steps - 1, self.scaler.scale.value)
        self.scaler.update(overflow)
        return overflow

    @property
    def loss_scale(self) -> float:
        """By which the loss of the next step is multiplied before its backward; 1 without a loss scale."""
        return self.scaler.scale.value if self.scaler else 1.0

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far because gradients overflowed."""
        return self.scaler.scale.skipped if self.scaler else 0

    def _next_step(self) -> int:
        self.steps += 1
        if self._watch:
            self._watch.step = self.steps
        return self.steps - 1

    def _zero_grad(self) -> None:
        for _, p in self._have_state().shards():
            p.grad = None

    def trace(self, *args: Any, target: Any = None, **kwargs: Any) -> Program:
        """Capture, plan and lower a `step` call without running it."""
        with self._telling():
            return self._runner(Request("step", args, kwargs, target), runs=False).program

    def _runner(self, request: Request, runs: bool = True) -> Runner:
        call = (request.args, request.kwargs, request.target)
        key = signature(self.model, request.form, call)
        runner = self._runners.get(key)
        if runner is None:
            runner = self._runners[key] = self._capture(request, text(call))
        self._take_pending()
        if runs and self._state is not None:
            self._state.require_values()
        self._last, runner.record = runner.program, self._record
        return runner

    def _capture(self, request: Request, shapes: str) -> Runner:
        if self._runners:
            log.warning(
                "capturing again (%d programs so far, %d kept): %s with %s",
                len(self._runners), PROGRAMS, request.form, shapes,
            )
        if len(self._runners) >= PROGRAMS:
            self._runners.pop(next(iter(self._runners)))
        if self._state:
            request = replace(
                request, resting=self._state.layouts, mesh=self.mesh, zero=self._zero, stages=self._stages
            )
        else:
            check_options_alike(self._roll_call, self._alike())
        program = self.settings.build(request)
        if self._state is None:
            self._comm = self._comm if program.mesh == self.mesh else None
            self.mesh, self._zero, self._stages = program.mesh, program.plan.zero, program.plan.stages
            homes = program.plan.stages.homes if program.plan.stages else None
            self._state = State(self.model, program.plan.resting, self.mesh, self.comm, self.device, homes)
            if self.optimizer:
                self.optimizer.attach(self._state, away=bool(program.captured.away))
        self._check_homes(program)
        check_agreement(program, self._roll_call, shapes)
        return Runner(program, self._state, self.comm, self.device, self.settings.collectives)

    def _alike(self) -> dict[str, str]:
        """Options of running that must be the same in all processes."""
        given = self.settings
        same = {"collectives": given.collectives, "seed": given.seed, "check_every": given.check_every, "sync": "sync"}
        return {name: repr(value) for name, value in same.items()}

    def _check_homes(self, program: Program) -> None:
        """Raises:
        PlanError: the program reads parameters on stages where an earlier one has not placed them.
        """
        stages, state = program.plan.stages, self._have_state()
        away = [n for n, on in stages.homes.items() if not {*on} <= {*(state.homes[n] or on)}] if stages else []
        if away:
            raise PlanError(
                f"{len(away)} parameters, such as {away[0]}, would be read by stages where an earlier program of this "
                f"model has not placed them: make the step the first call, or pin where stages start"
            )

    def train(self, mode: bool = True) -> Compiled:
        self.model.train(mode)
        return self

    def eval(self) -> Compiled:
        return self.train(False)


def tensors_of(call: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor)]
