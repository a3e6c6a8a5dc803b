"""The compiled model: what `compile` returns."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree

from ..partitioner.errors import MeshwrightError, PlanError
from ..partitioner.explain import explain
from ..partitioner.memory import Model
from ..partitioner.memory_report import MemoryReport, memory_report
from ..partitioner.mesh import Mesh
from ..partitioner.offload import Offload
from ..partitioner.optimizer_bytes import SGD
from ..partitioner.plan import Plan
from ..partitioner.precision import Precision
from ..partitioner.program import Program
from ..partitioner.report_page import page
from ..partitioner.stage_search import simulated_timeline
from ..partitioner.stages import Stages
from ..partitioner.wires import GLOO, NCCL, ONE_PROCESS
from .agree import check_agreement
from .autograd import Suspended, Through
from .block_file import FileError
from .checkpoint import Restored, Saving, fits, restore
from .checkpoint_files import Checkpoint, CheckpointError, latest
from .comm import Comm
from .first_nan import Origin, compare_origins, has_nan
from .host import OffloadReport
from .in_step import compare_call, compare_copies, compare_first_values
from .initialise import initialise
from .launch import comm_for, watch_here
from .loss_scale import Scaler, unscale
from .optimizer import Optimizers, RankView, Schedulers, clip_grad_norm
from .plain import from_plain
from .record import Record
from .roll_call import RollCall
from .runner import Runner
from .signature import signature, text
from .state import State
from .watch import Watch

log = logging.getLogger("meshwright")

PROGRAMS = 32
"""Captured programs kept: one a combination of shapes, modes and plain arguments; the oldest goes first."""


@dataclass(frozen=True)
class Request:
    """What is to be captured: a call, its form, and how parameters already rest on which mesh, at which ZeRO stage."""

    form: str
    args: tuple
    kwargs: dict[str, Any]
    target: Any = None
    resting: Any = None
    mesh: Mesh | None = None
    zero: int | None = None
    stages: Any = None


@dataclass(frozen=True)
class Settings:
    """The options of `compile` that the runtime acts on."""

    loss: Callable[..., torch.Tensor] | None = None
    optimizer: Callable[[RankView], torch.optim.Optimizer] | None = None
    clip_grad_norm: float | tuple[float, float] | None = None
    local_inputs: bool = False
    seed: int = 0
    timeout: float | None = None
    check_every: int | None = None
    build: Callable[[Request], Program] = field(default=None)  # type: ignore[assignment]
    offload: Offload = Offload()
    precision: Precision | None = None
    collectives: str = "torch"


class Compiled:
    """A model compiled for a mesh. See `meshwright.compile`.

    Attributes:
        model: the model as given; its own parameters are not touched.
        optimizer: the optimizers of the ranks that live in this process, stepped together; None without one.
        grad_norm: the global gradient norm before clipping, of the last step that clipped.
        scaler: the scale of the loss and its history, with `state_dict` and `load_state_dict`; None without one.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, settings: Settings):
        self.model, self.mesh, self.device, self.settings = model, mesh, device, settings
        self._comm: Comm | None = None
        self._zero: int | None = None
        self._stages: Stages | None = None
        self.optimizer = Optimizers(settings.optimizer, settings.offload) if settings.optimizer else None
        self.grad_norm: torch.Tensor | None = None
        scaling = settings.precision.scaling if settings.precision else None
        self.scaler = Scaler(scaling) if scaling else None
        self.steps = 0
        self._state: State | None = None
        self._runners: dict[Any, Runner] = {}
        self._pending: tuple[Checkpoint, bool] | None = None
        self._saving: Saving | None = None
        self._last: Program | None = None
        self._record: Record | None = None
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def comm(self) -> Comm:
        """What runs the ranks that live in this process."""
        if self._comm is None:
            self._comm = comm_for(self.mesh, self.settings.timeout, self._watch)
        return self._comm

    @cached_property
    def _watch(self) -> Watch | None:
        return watch_here(self.settings.timeout)

    @cached_property
    def _roll_call(self) -> RollCall | None:
        return RollCall(self._watch, self.settings.timeout) if self._watch else None

    def _telling(self) -> AbstractContextManager[None]:
        """An error in the block is written down for the other processes, which wait for this one."""
        return self._watch.telling() if self._watch else nullcontext()

    # -- running
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, whole, on every rank; call `.backward()` on what follows from it.

        Raises:
            CaptureError, PlanError: the call cannot be captured or planned; the message says what would work.
        """
        with self._telling():
            return self._call(args, kwargs)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        trained = any(p.requires_grad for p in self.model.parameters())
        inputs = _tensors((args, kwargs, None))
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
        inputs = _tensors((args, kwargs, target))
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
            runner = self._capture(request, text(call))
            self._runners[key] = runner
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
        program = self.settings.build(request)
        if self._state is None:
            self._comm = self._comm if program.mesh == self.mesh else None
            self.mesh, self._zero, self._stages = program.mesh, program.plan.zero, program.plan.stages
            homes = program.plan.stages.homes if program.plan.stages else None
            self._state = State(self.model, program.plan.resting, self.mesh, self.comm, self.device, homes)
            if self.optimizer:
                self.optimizer.attach(self._state)
        self._check_homes(program)
        collectives = self.settings.collectives
        options = f"collectives={collectives!r}, seed={self.settings.seed}, check_every={self.settings.check_every}"
        check_agreement(program, self._roll_call, options, shapes)
        return Runner(program, self._state, self.comm, self.device, collectives)

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

    def _have_state(self) -> State:
        if self._state is None:
            raise MeshwrightError(
                "nothing is placed yet: call the compiled model or step() once, or pass args= to compile"
            )
        return self._state

    # -- state
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards of the ranks of this process, under the model's names (a name comes once a rank)."""
        state = self._have_state()
        for i in range(len(self.comm.ranks)):
            yield from RankView(state, i).named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, p in self.named_parameters():
            yield p

    def gather(self, what: str) -> dict[str, Any]:
        """Whole tensors by fully qualified name: "params", "grads" (None where there is none) or "buffers".

        Raises:
            ValueError: another word.
        """
        state = self._initial_state() if self._state is None else self._state
        if what == "params":
            return {n: state.whole_param(n) for n in state.params}
        if what == "grads":
            return {n: state.whole_grad(n) for n in state.params}
        if what == "buffers":
            return {n: state.whole_buffer(n) for n in state.buffers}
        raise ValueError(f"gather({what!r}): say 'params', 'grads' or 'buffers'")

    def _initial_state(self) -> State:
        from ..partitioner.layout import whole

        resting = {n: whole(p.shape) for n, p in self.model.named_parameters()}
        state = State(self.model, resting, self.mesh, self.comm, self.device)
        if self._pending is not None:
            restore(self._pending[0], self, state, model_only=True)
        return state

    def _placed_or_initial(self) -> State:
        return self._initial_state() if self._state is None else self._state

    def save(self, path: str | Path, *, data: Any = None, keep: int | None = None, wait: bool = True) -> Saving:
        """Write a checkpoint into a folder: parameters, buffers, optimizer, schedulers, the step, and `data`.

        Each process writes what its ranks own, into a folder that all share; the older checkpoints there are whole
        until this one is. See docs/checkpoints.md.

        Args:
            data: where the data stands, or what else is to come back from `load`: numbers, texts, lists, dicts.
            keep: how many checkpoints stay in `path`, this one included; None for all.
            wait: False to write beside training, from a copy; call `.wait()` on what comes back.

        Raises:
            CheckpointError: it cannot be written, or the save before this one could not.
            MeshwrightError: something of it cannot be written without pickling.
        """
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise CheckpointError(f"keep={keep!r}: give the number of checkpoints that stay, at least 1, or None")
        if self._pending is not None:
            raise CheckpointError("a loaded checkpoint waits for the first call: make that before save()")
        if self._saving is not None:
            before, self._saving = self._saving, None
            before.wait()
        saving = Saving(self, Path(path).absolute(), data, keep)
        if wait:
            saving.wait()
        else:
            self._saving = saving
        return saving

    def load(self, path: str | Path, *, model_only: bool = False) -> Restored:
        """Take a checkpoint of any mesh and options: the one at `path`, or the last saved in that folder.

        Before the first call it is checked at once and taken when the parameters are placed.

        Args:
            model_only: parameters and buffers alone, without optimizer, schedulers and step.

        Raises:
            CheckpointError: it is damaged, partial, foreign or does not fit; names files and tensors, and nothing has
                changed.
        """
        checkpoint = Checkpoint(latest(Path(path).absolute()))
        if self._state is None:
            fits(checkpoint, self, model_only)
            checkpoint.read(list(checkpoint.tensors), lambda name, value: None)
            self._pending = (checkpoint, model_only)
        else:
            restore(checkpoint, self, self._state, model_only)
        found = checkpoint.manifest
        return Restored(found["step"], from_plain(found["data"]), checkpoint.folder)

    def _take_pending(self) -> None:
        """A checkpoint loaded before the first call, now that there is where to put it."""
        if self._pending is not None and self._state is not None:
            restore(self._pending[0], self, self._state, self._pending[1])
            self._pending = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Whole tensors under the keys of the model's own `state_dict`."""
        state = self._have_state()
        found = {n: state.whole_param(n) for n in state.params} | {n: state.whole_buffer(n) for n in state.buffers}
        return {key: found[state.aliases.get(key, key)] for key in self.model.state_dict() if _known(key, found, state)}

    def load_state_dict(self, values: dict[str, torch.Tensor], strict: bool = True) -> None:
        """Take whole tensors, each rank its part. Buffers that the model does not save may be given too.

        Raises:
            MeshwrightError: missing or unknown keys (with `strict`), or a shape that differs; nothing is changed then.
        """
        state = self._have_state()
        own = {**{n: p for n, p in self.model.named_parameters()}, **dict(self.model.named_buffers())}
        kept = {k for k in self.model.state_dict() if state.aliases.get(k, k) in own}
        problems = [f"missing {k}" for k in sorted(kept - values.keys())] if strict else []
        kept |= {k for k in values if k in state.buffers}
        problems += [f"unknown {k}" for k in sorted(values.keys() - kept)] if strict else []
        for key in sorted(kept & values.keys()):
            want, got = own[state.aliases.get(key, key)].shape, getattr(values[key], "shape", None)
            if got != want:
                is_ = tuple(got) if got is not None else f"a {type(values[key]).__name__}"
                problems.append(f"{key} is {is_}, should be {tuple(want)}")
        if problems:
            raise MeshwrightError(f"the state dict does not fit: {'; '.join(problems[:8])}")
        for key in kept & values.keys():
            name = state.aliases.get(key, key)
            state.set_param(name, values[key]) if name in state.params else state.set_buffer(name, values[key])

    def initialize(self, init: Callable[[nn.Module], Any] | None = None) -> None:
        """Give the tensors of a model made on the meta device their first values, equal on every mesh.

        Args:
            init: called with each module that holds such tensors; by default its `reset_parameters()`.

        Raises:
            MeshwrightError: some tensors got no value; names them.
        """
        initialise(self._have_state(), self.settings.seed, init)

    def sampler(self, dataset: Any, shuffle: bool = True) -> torch.utils.data.DistributedSampler:
        """The sampler for a DataLoader of this process: its data rank's part with inputs="local", else everything."""
        data = [a for a in self.mesh.names if self.mesh.role(a) == "data"] if self.settings.local_inputs else []
        rank = self.comm.ranks[0]
        index = self.mesh.group(tuple(data), rank).index(rank) if data else 0
        return torch.utils.data.DistributedSampler(
            dataset, self.mesh.group_size(tuple(data)), rank=index, shuffle=shuffle, seed=self.settings.seed
        )

    def scheduler(self, make: Callable[[torch.optim.Optimizer], Any]) -> Schedulers:
        """A learning-rate scheduler for each rank's optimizer, from a function of one optimizer.

        Raises:
            MeshwrightError: compile was given no optimizer.
        """
        if self.optimizer is None:
            raise MeshwrightError("a scheduler needs an optimizer: pass optimizer=lambda m: ... to compile")
        return Schedulers(make, self.optimizer)

    def train(self, mode: bool = True) -> Compiled:
        self.model.train(mode)
        return self

    def eval(self) -> Compiled:
        return self.train(False)

    @property
    def offload_report(self) -> OffloadReport:
        """Bytes on the host and on the device, and what steps have copied between them.

        Raises:
            MeshwrightError: there is no optimizer, or nothing is placed yet.
        """
        self._have_state()
        if self.optimizer is None:
            raise MeshwrightError("offload_report is of the optimizer's state: pass optimizer=lambda m: ... to compile")
        return self.optimizer.report()

    def memory_report(self) -> MemoryReport:
        """What every stage holds over a step of the program that ran last, and what would take less; printable.

        The optimizer's state is that of AdamW, unless it is SGD, none, or all of it away on the host.

        Raises:
            MeshwrightError: no program has been made yet.
        """
        wire = ONE_PROCESS if len(self.comm.ranks) == self.mesh.world_size else None
        if wire is None:
            wire = NCCL if self.device.type == "cuda" else GLOO
        program = self.program
        room = (program.plan.facts.asked.get("memory") if program.plan.facts else None) or self.mesh.device.memory
        stepper = self.optimizer.stepper() if self.optimizer else SGD
        return memory_report(Model(program, wire, stepper, self.device.type == "cuda"), int(room))

    # -- the plan
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
        return explain(self.plan, name)

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


def _tensors(call: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor)]


def _known(key: str, found: dict[str, Any], state: State) -> bool:
    return state.aliases.get(key, key) in found


def needs_target(loss: Callable | None) -> bool:
    """Whether a loss takes (output, target)."""
    if loss is None:
        return False
    fn = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        wanted = [p for p in inspect.signature(fn).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        return True
    positional = [p for p in wanted if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 2


def check_loss(loss: Any) -> None:
    """Raises:
    PlanError: the loss is no callable, or holds parameters of its own.
    """
    if loss is not None and not callable(loss):
        raise PlanError(f"loss= must be a callable of (output) or (output, target); got {type(loss).__name__}")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise PlanError("the loss has parameters of its own: make it part of the model, so that they are trained")
