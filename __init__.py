"""Meshwright: a compiler that turns a plain PyTorch training program into one graph per rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from .partitioner.calibration import Calibration
from .partitioner.capture import capture
from .partitioner.errors import CalibrationError, CaptureError, LawError, MeshwrightError, PlanError, TooLittle
from .partitioner.fuse import wanted
from .partitioner.given_stages import check_beside, check_layouts_beside
from .partitioner.graph import Graph
from .partitioner.heads import fitted_mesh
from .partitioner.keep import keep_pins
from .partitioner.local_inputs import batch_dims_of, data_ranks, grown
from .partitioner.mesh import Mesh
from .partitioner.mesh_search import Machine, Search
from .partitioner.offload import Offload, away, chosen_away, offload_of
from .partitioner.peak_fit import PeakFit
from .partitioner.pipeline import Asked, stage_pins
from .partitioner.plan import Plan
from .partitioner.planner import Options, replan
from .partitioner.precision import LossScale, Precision, precision_of
from .partitioner.program import Program
from .partitioner.stage_search import plan_step
from .partitioner.sync_clock import Delay
from .partitioner.sync_rules import Sync, sync_of
from .passes.laws import check_peak
from .passes.lower import lower
from .runtime.calibrate import calibrate
from .runtime.checkpoint_files import CheckpointError
from .runtime.checks import check_call, check_options, check_search, check_target, check_written, under_first_names
from .runtime.compiled import Compiled
from .runtime.launch import check_by_hand, check_world, device_here, launched, mesh_here
from .runtime.optimizer import clip_grad_norm as _clip
from .runtime.request import Request, Settings, check_loss, kind_of, needs_target
from .runtime.sync import ParameterServer
from .runtime.verify import VerifyError
from .runtime.worker import Worker, check_sync

__all__ = [
    "Calibration", "CalibrationError", "CaptureError", "CheckpointError", "Compiled", "Delay", "LawError", "LossScale",
    "Mesh", "MeshwrightError", "Offload", "ParameterServer", "Plan", "PlanError", "Precision", "Sync", "VerifyError",
    "Worker", "auto_mesh", "calibrate", "clip_grad_norm_", "compile",
]  # fmt: skip
__version__ = "0.1.0"
log = logging.getLogger("meshwright")


def compile(
    model: nn.Module,
    mesh: Any,
    *,
    args: tuple | list = (),
    kwargs: dict[str, Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    zero: int | str = "auto",
    micro_batches: int | str = "auto",
    schedule: str = "auto",
    offload: str | Offload = "auto",
    recompute: str = "auto",
    fuse: str = "auto",
    precision: str | Precision | None = None,
    clip_grad_norm: float | tuple[float, float] | None = None,
    memory: int | None = None,
    pin: dict[str, str] | None = None,
    plan: str | Plan | None = None,
    batch_dims: dict[Any, int | None] | None = None,
    inputs: str = "global",
    timeout: float | None = None,
    check_every: int | None = None,
    collectives: str = "torch",
    sync: str | Sync = "sync",
    k: int | None = None,
    seed: int = 0,
) -> Compiled:
    """Compile a model for a mesh of devices.

    Args:
        model: any module; its own parameters are read once and not touched.
        mesh: a `Mesh`, or a `torch.distributed.DeviceMesh` with named dims.
        args, kwargs: an example call, to plan now; otherwise the first call is it. `kwargs["target"]` is the loss's.
        loss: `callable(output)` or `callable(output, target)`; None when the model returns its own 0-d loss or an
            output with `.loss`.
        optimizer: from an object with `named_parameters()` and `parameters()` (a rank's shards) to a `torch.optim`
            optimizer.
        zero: ZeRO stage 0, 1, 2, 3, or "auto": the least that fits `memory`.
        micro_batches: parts of the batch that a step goes through one after another; the numbers stay those of the
            whole batch. "auto": 1 without a pipeline or with inputs="local", else the best of some.
        schedule: of the pipeline: "auto" (the fastest in the simulator that fits `memory`), "gpipe", "1f1b",
            "interleaved", "zb-h1", "zb-v", "dualpipe-v", or the text of a schedule of your own.
        offload: "none"; "full": the optimizer's state rests in host memory and the optimizer steps there; "auto": that
            where nothing else fits `memory`; or an `Offload` that says how much of it, and whether what blocks save for
            backward waits there too. A saved plan does not say it.
        recompute: what backward makes again in the place of keeping it: "none"; "full": of every block all but its
            inputs; "auto": what `memory` needs, nothing without it.
        fuse: which chains of ops become one op (an activation times a gate, dropout with its residual, norms that a
            model writes out): "all", "none", or "auto": all on a GPU, none on a CPU, where they have no kernels.
        precision: None (the model's own dtypes), "bf16", "fp16" (with a dynamic loss scale), or a `Precision`: the
            parameters stay float32 and the program computes in working copies of them.
        clip_grad_norm: max norm, or (max norm, norm type), of all gradients together.
        memory: bytes a device may use.
        pin: {parameter name, call name or glob: layout text}, such as {"*.mlp.up.weight": "[o:tp, i]"}; and
            {module or call: "stage 2"}, the virtual stage of the pipeline that starts with it; and {module or call:
            "recompute" | "save" | "offload"}: whether backward makes again what it reads of it, finds it kept, or gets
            it back from the host, such as {"layers.*": "recompute"}.
        plan: a saved plan (its text) or a `Plan` to follow instead of planning.
        batch_dims: {argument index or name: dim, or None}; by default dim 0 of the first tensor is the batch, and which
            other tensors carry it follows from the graph.
        inputs: "global" (every process passes the whole batch and reads its part) or "local" (each data rank passes
            its own part).
        timeout: seconds that a process waits for others in a collective or a message, before it ends with an error that
            names who is missing and what that one was at; by default torch.distributed's own, 30 minutes.
        check_every: steps from one check to the next that all ranks are in step: the same batch, equal copies of
            parameters and buffers, no NaN that some ranks alone have made; None: batch and first values, once.
        collectives: who carries out all-reduces, reduce-scatters and all-gathers: "torch", or messages between two
            ranks by "ring", "bidirectional", "hierarchical", "halving", "tree", "server" or "server:4" (as many
            shards); "auto" is the cheapest of these at each size.
        sync: of data-parallel processes: "sync" is lock step; "ps-sync", "k-sync", "k-batch-sync", "async", "k-async",
            "k-batch-async" are workers of a parameter server, each with the whole model and its own mini-batches; or
            a `Sync`, which has more to say. See docs/sync.md.
        k: gradients an update, of those that start with "k-".
        seed: of dropout and every other random op; the numbers are the same on every mesh.

    Returns:
        A `Compiled`: call it as the model, or `step` it. (With another `sync` than "sync" a `Worker`, which is one.)

    Raises:
        PlanError: the options contradict each other or the mesh; the message names the facts.
        CaptureError: the program cannot be captured.
    """
    mesh = mesh_here(mesh)
    check_loss(loss)
    check_options(
        model, mesh, args=args, loss=loss, optimizer=optimizer, zero=zero, micro_batches=micro_batches,
        schedule=schedule, offload=offload, recompute=recompute, fuse=fuse, precision=precision,
        clip_grad_norm=clip_grad_norm, memory=memory, pin=pin, plan=plan, batch_dims=batch_dims, timeout=timeout,
        check_every=check_every, collectives=collectives, seed=seed,
    )  # fmt: skip
    check_world(mesh, inputs)
    device = device_here()
    check_by_hand(collectives, device)
    kept = sync_of(sync, k)
    if kept.name == "sync":
        kept.check(mesh.world_size)
    else:
        given = {"optimizer": optimizer, "clip_grad_norm": clip_grad_norm, "zero": zero, "check_every": check_every}
        check_sync(kept, mesh, launched(), given)
        mesh, inputs = Mesh(dp=1, device=mesh.device.name), "global"
    pin = under_first_names(model, pin or {})
    rest, keep = keep_pins(pin)
    layouts, starts = stage_pins(rest)
    low, asked_away = precision_of(precision), offload_of(offload)

    def captured(request: Request) -> Graph:
        check_call(model, request.args, request.kwargs, request.target, loss)
        graph = capture(
            model, request.args, request.kwargs, target=request.target, loss=_loss(loss, request), seed=seed,
            backward=request.form != "forward", batch_dims=batch_dims, precision=low,
            fused=wanted(fuse, mesh.device.name),
        )  # fmt: skip
        check_written(graph)
        now = compiled.optimizer.offload if compiled.optimizer else asked_away  # "auto" may have been decided
        return replace(graph, away=away(model, now))

    def lowered(request: Request, graph: Graph, made: Plan) -> Program:
        return lower(graph, made, request.form, local_inputs=inputs == "local", device=device)

    def build(request: Request) -> Program:
        """The whole story: capture, plan, lower; with `memory=` until the peak fits."""
        graph = captured(request)
        mesh_now = request.mesh or fitted_mesh(mesh, graph)
        chosen = Plan.from_text(plan, mesh_now) if isinstance(plan, str) else plan
        if chosen:
            check_beside(chosen, schedule, micro_batches, low)
            check_layouts_beside(chosen, zero, memory, pin, recompute)
        often = chosen.micro_batches if chosen else micro_batches
        parts = often if request.form == "step" else 1
        if inputs == "local":
            parts = 1 if parts == "auto" else int(parts)  # how rows are dealt to ranks depends on it
            dims = batch_dims_of(graph)
            call = (request.args, request.kwargs, request.target)
            args, kwargs, target = grown(call, dims, data_ranks(mesh), parts)
            graph = replace(captured(replace(request, args=args, kwargs=kwargs, target=target)), batch=dims)
        resting = request.resting or (chosen and chosen.resting)
        stage = zero if request.zero is None else request.zero
        options = Options(zero=stage, pin=layouts, resting=resting, recompute=recompute, keep=keep)
        options = replace(options, offload=asked_away.offload_activations == "cpu")
        if chosen and request.form == "step":
            graph, made = replan(graph, mesh_now, chosen, options)
            return lowered(request, graph, made)
        asked = Asked(schedule, often, request.stages or (chosen and chosen.stages), starts)

        def planned(graph: Graph, limit: float | None) -> tuple[Graph, Plan]:
            return plan_step(graph.copy(), mesh_now, replace(options, memory=limit), parts, asked)

        if memory is None:
            return lowered(request, *planned(graph, None))

        def within(graph: Graph, most: float = memory) -> Program:
            return PeakFit(partial(planned, graph), partial(lowered, request), compiled.memory_model).within(most)

        try:
            program = within(graph)
        except TooLittle:
            if offload != "auto" or optimizer is None or kept.name != "sync" or request.resting is not None:
                raise
            program = within(chosen_away(graph, model, mesh_now.device))
        check_peak(program.plan)
        return program

    settings = Settings(
        loss=loss,
        optimizer=optimizer,
        clip_grad_norm=clip_grad_norm,
        local_inputs=inputs == "local",
        seed=seed,
        timeout=timeout,
        check_every=check_every,
        offload=asked_away,
        precision=low,
        collectives=collectives,
        build=build,
    )
    compiled = (
        Compiled(model, mesh, device, settings)
        if kept.name == "sync"
        else Worker(model, mesh, device, settings, kept)
    )
    given = dict(kwargs or {})
    target = given.pop("target", None)
    if (args or given) and needs_target(loss) and target is None:
        log.warning("not planned before the first step: the loss takes a target, and kwargs={'target': ...} has none")
    elif args or given:
        compiled.trace(*args, target=target, **given)
    return compiled


def auto_mesh(
    model: nn.Module,
    devices: int,
    *,
    device: str | None = None,
    per_node: int | None = None,
    links: dict[str, str] | None = None,
    args: tuple | list = (),
    kwargs: dict[str, Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    zero: int | str = "auto",
    micro_batches: int | str = "auto",
    schedule: str = "auto",
    recompute: str = "auto",
    memory: int | None = None,
    batch_dims: dict[Any, int | None] | None = None,
    seed: int = 0,
) -> Mesh:
    """The mesh of so many devices on which a step of this model is predicted to be fastest.

    The program is captured once and planned on shapes with roles (`dp`, `tp`, `pp`) and with free axes; shapes that a
    lower bound rules out are not planned. Nothing is allocated: the model may be on the meta device.

    Args:
        devices: how many ranks.
        device: a preset name; detected from the machine when None.
        per_node: devices of a node; None: at most 8 on GPUs, all of them on a CPU.
        links: `{"gpu": link inside a node, "node": link between nodes}`; by default the device's own, and `"ib-ndr"`.
        args, kwargs: an example call of the global batch; `kwargs["target"]` is the loss's.
        memory: bytes a device may use; None: what the preset has.
        loss, zero, micro_batches, schedule, recompute, batch_dims, seed: as for `compile`.

    Returns:
        The mesh; `print("\n".join(mesh.compared))` shows what was compared, what each took, and why it lost.

    Raises:
        PlanError: an option is wrong, or no mesh of so many devices can be planned; the message says why of each.
        CaptureError: the program cannot be captured.
    """
    check_loss(loss)
    check_search(devices, per_node, links, args, kwargs)
    check_options(
        model, Mesh(dp=devices, device=device), args=args, loss=loss, optimizer=None, zero=zero,
        micro_batches=micro_batches, schedule=schedule, offload="none", recompute=recompute, fuse="auto",
        clip_grad_norm=None, memory=memory, pin=None, plan=None, batch_dims=batch_dims, timeout=None, precision=None,
        check_every=None, collectives="torch", seed=seed,
    )  # fmt: skip
    given, named = dict(kwargs or {}), links or {}
    request = Request("step", tuple(args), given, given.pop("target", None))
    preset = Mesh(dp=devices, device=device).device
    graph = capture(
        model, request.args, given, target=request.target, loss=_loss(loss, request), seed=seed, batch_dims=batch_dims,
        fused=wanted("auto", preset.name),
    )  # fmt: skip
    nodes_of = per_node or (devices if preset.name == "cpu" else next(k for k in range(8, 0, -1) if devices % k == 0))
    machine = Machine(devices, nodes_of, preset.name, named.get("gpu"), named.get("node", "ib-ndr"))
    room = int(preset.memory) if memory is None else memory
    asked = Options(zero=zero, memory=room, recompute=recompute)
    search = Search(graph, machine, asked, micro_batches, schedule)
    search.run()
    return search.best.mesh.beside(search.table())


def _called(loss: Callable, output: Any, target: Any) -> Any:
    try:
        return loss(output, target) if target is not None else loss(output)
    except (TypeError, AttributeError) as fault:
        if isinstance(output, torch.Tensor):
            raise
        raise PlanError(
            f"the loss failed on what the model returns, {kind_of(output)}: {fault}. Give a loss= that takes it apart, "
            f"as lambda output, target: F.cross_entropy(output['logits'], target)"
        ) from fault


def _loss(loss: Callable | None, request: Request) -> Callable[[Any, Any], torch.Tensor] | None:
    """The function of (output, target) that a "step" program ends in."""
    if request.form != "step":
        return None

    def finish(output: Any, target: Any) -> torch.Tensor:
        check_target(loss, target)
        if loss is not None:
            value = _called(loss, output, target)
        else:
            value = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            whose = "" if loss is not None else f" from a model that returns {kind_of(output)}"
            raise PlanError(
                f"step needs a 0-d loss; got {got}{whose}. Pass loss=callable(output) or callable(output, "
                f"target); in a loop of your own call the compiled model, and leave out args= of compile"
            )
        if not value.requires_grad:
            raise PlanError(
                "the loss does not depend on any parameter or input that requires a gradient: is the model frozen, or "
                "the output detached? Call the compiled model itself where nothing is trained"
            )
        return value

    return finish


def clip_grad_norm_(compiled: Compiled, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before, as torch does."""
    if not isinstance(compiled, Compiled):
        raise PlanError(f"clip_grad_norm_ takes the compiled model, whose norm it is, not {type(compiled).__name__}")
    return _clip(compiled._have_state(), max_norm, norm_type)
