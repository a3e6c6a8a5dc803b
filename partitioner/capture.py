"""Capture: a module, its loss and its backward as one flat ATen graph on fake CPU tensors.

AOTAutograd's joint export traces forward and backward of a module whose parameters and buffers we have lifted
ourselves: each distinct tensor once, so that tied weights are one input with one gradient. Nothing is allocated:
parameters, buffers and inputs are faked (models on the meta device too). Attention, cross entropy and RMS norm are
swapped for the canonical ops of `kernels` before tracing; random ops are replaced after it by ones that draw by global
element. This file and `compat.py` alone touch private torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch._functorch._aot_autograd import descriptors as D
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode

from ..kernels import attention, cross_entropy, rms_norm
from .batch import batch_of
from .canonical import clean, place_random_ops, start_from_loss
from .compat import without_mkldnn
from .errors import CaptureError
from .graph import Graph, Role
from .outputs import TENSOR, Traced, as_trees, result_builder, unaliased
from .rules.loss import DECOMPOSITIONS

SWAPS: dict[Callable, Callable] = {
    F.scaled_dot_product_attention: attention.sdpa,
    F.cross_entropy: cross_entropy.cross_entropy,
    F.rms_norm: rms_norm.functional,
    torch.rms_norm: rms_norm.functional,
}
"""Functions replaced during capture, so that what they compute stays one op."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INTERNAL = tuple(_HERE + room for room in ("partitioner", "passes", "runtime", "kernels", "__init__"))


class Lifted(nn.Module):
    """Every distinct parameter and buffer of a program once, under flat names, faked."""

    def __init__(self, program: nn.Module, fake: Callable, traced: Traced, rebuild: Callable, finish: Callable):
        super().__init__()
        object.__setattr__(self, "program", program)
        self.traced, self.rebuild, self.finish = traced, rebuild, finish
        self.names: dict[str, str] = {}
        for i, (name, p) in enumerate(program.named_parameters()):
            q = fake(p.detach()).requires_grad_(p.requires_grad)
            self.register_parameter(f"p{i}", nn.Parameter(q, requires_grad=p.requires_grad))
            self.names[f"p{i}"] = name
        for i, (name, b) in enumerate(program.named_buffers()):
            self.register_buffer(f"b{i}", fake(b.detach()))
            self.names[f"b{i}"] = name

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tied = {name: getattr(self, flat) for flat, name in self.names.items()}
        args, kwargs, target = self.rebuild(tensors)
        program: Any = self.program
        out = torch.func.functional_call(program, tied, args, kwargs, tie_weights=True)
        out = self.finish(out, target)
        leaves, spec = pytree.tree_flatten(as_trees(out))
        leaves = unaliased(leaves, tensors)
        self.traced.spec = spec
        self.traced.leaves = tuple(TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)
        return tuple(x for x in leaves if isinstance(x, torch.Tensor))


class Recorder(TorchFunctionMode):
    """Swaps functions for canonical ones and notes the user's source line of every torch call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        line = user_line(sys._getframe(1))
        if line:
            fx_traceback.current_meta["stack_trace"] = line
        call: Any = SWAPS.get(func, func)
        return call(*args, **(kwargs or {}))


def user_line(frame: Any) -> str:
    """`file:line in function` of the nearest frame that is neither torch's nor ours."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_TORCH) and not name.startswith(_INTERNAL) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def _swapped() -> Iterator[None]:
    """`torch.nn.functional` with the canonical functions in place, for code that calls them from inside torch."""
    saved = {name: getattr(F, name) for name in ("scaled_dot_product_attention", "cross_entropy", "rms_norm")}
    try:
        for name, original in saved.items():
            setattr(F, name, SWAPS[original])
        yield
    finally:
        for name, original in saved.items():
            setattr(F, name, original)


@contextlib.contextmanager
def _module_names(program: nn.Module) -> Iterator[None]:
    """Every node gets the name of the module whose forward made it (meta "nn_module_stack")."""
    names = {m: name for name, m in program.named_modules()}
    stack: list[tuple[str, type]] = []

    def put() -> None:
        fx_traceback.current_meta["nn_module_stack"] = {n: (n, t) for n, t in stack}

    def enter(module, args):
        stack.append((names.get(module, ""), type(module)))
        put()

    def leave(module, args, out):
        if stack:
            stack.pop()
        put()

    hooks = []
    for module in program.modules():
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with fx_traceback.preserve_node_meta():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        fx_traceback.current_meta.pop("nn_module_stack", None)
        fx_traceback.current_meta.pop("stack_trace", None)


def capture(
    program: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    target: Any = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    backward: bool = True,
    seed: int = 0,
    batch_dims: dict[Any, int | None] | None = None,
) -> Graph:
    """The graph of one call of `program`.

    Args:
        program: the module; its output's tensors are the graph's outputs, unless there is a loss.
        args, kwargs: an example call (real, fake or meta tensors); only shapes and dtypes of tensors are used, every
            other value is a constant of the graph.
        target, loss: `loss(output, target)` is the graph's one output, and backward starts from it.
        backward: also record the backward pass; without a loss with one tangent per differentiable output.
        seed: of the random ops.
        batch_dims: {argument index or name: dim, or None for no batch}; see `Graph.batch`.

    Raises:
        CaptureError: the program depends on data in a way no fixed graph can hold; names the user's line.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs, target))
    where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    traced = Traced()
    with _named_faults(program):
        tensors = tuple(_fake(leaves[i].detach(), mode).requires_grad_(leaves[i].requires_grad) for i in where)

        def rebuild(given: tuple) -> tuple[tuple, dict, Any]:
            filled = list(leaves)
            for i, t in zip(where, given, strict=True):
                filled[i] = t
            return pytree.tree_unflatten(filled, spec)

        finish = loss or (lambda out, target: out)
        lifted = Lifted(program, lambda t: _fake(t, mode), traced, rebuild, finish)
        joint = _export(program, lifted, tensors, mode, backward)
    named = pytree.tree_flatten_with_path((args, kwargs, {"target": target}))[0]
    paths = [pytree.keystr(p) for p, x in named if isinstance(x, torch.Tensor)]
    graph, roles = _flat(joint, lifted)
    outputs = _roles_out(joint)
    gm = joint.graph_module
    _refuse_sparse(graph, outputs, lifted)
    constants = {n.target: getattr(gm, n.target) for n in graph.nodes if n.op == "get_attr"}
    del joint
    if loss is not None:
        roles = start_from_loss(graph, roles)
    graph, roles = place_random_ops(graph, roles, seed)
    clean(graph)
    result = result_builder(traced)
    return Graph(
        graph,
        roles,
        tuple(_rename(r, lifted) for r in outputs),
        {k: _plain(v) for k, v in constants.items()},
        result,
        tuple(map(_path_name, paths)),
        batch_of(args, {**kwargs, "target": target}, batch_dims or {}),
    )


def _export(program: nn.Module, lifted: Lifted, tensors: tuple, mode: FakeTensorMode, backward: bool) -> Any:
    grad = torch.enable_grad() if backward else torch.no_grad()
    with (
        warnings.catch_warnings(),
        grad,
        contextlib.ExitStack() as stack,
        _module_names(program),
        torch.compiler._compile_session_context(),
        mode,
        without_mkldnn(),
        _swapped(),
        Recorder(),
    ):
        warnings.simplefilter("ignore")
        return aot_export_joint_with_descriptors(stack, lifted, tensors, {}, decompositions=DECOMPOSITIONS)


def _fake(t: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if isinstance(t, FakeTensor) or t.is_meta:
        with mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
    return mode.from_tensor(t, static_shapes=True)


def _plain(t: Any) -> Any:
    return t.detach() if isinstance(t, torch.Tensor) else t


@contextlib.contextmanager
def _named_faults(program: nn.Module) -> Iterator[None]:
    """Turns what cannot be captured into a `CaptureError` with the user's line and a way out."""
    try:
        noise = logging.getLogger("torch.fx.experimental.symbolic_shapes")
        level = noise.level
        noise.setLevel(logging.CRITICAL)
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as fault:
        line = _line_of(fault)
        kind = "shape" if isinstance(fault, DynamicOutputShapeException) else "branch"
        raise CaptureError(
            f"data-dependent {kind} in forward at {line}: what {type(program).__name__} computes next depends on "
            f"the values of a tensor, and one graph cannot hold both ways. Write it with torch.where or masks, pass "
            f"the decision as a python argument, or (mixture of experts in transformers) call "
            f"model.set_experts_implementation('batched_mm'); nn.Transformer needs tgt_is_causal=True. "
            f"({str(fault).partition(chr(10))[0]})"
        ) from fault
    except RuntimeError as fault:
        if ".numpy() is not supported" not in str(fault):
            raise
        raise CaptureError(
            f".numpy() in forward at {_line_of(fault)}: numpy computes outside the graph that is captured. Use torch "
            f"functions, or do it before the call and pass the result"
        ) from fault
    finally:
        noise.setLevel(level)


def _line_of(fault: BaseException) -> str:
    tb, line = fault.__traceback__, "an unknown line"
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if not name.startswith(_TORCH) and not name.startswith(_INTERNAL) and not name.startswith("<"):
            line = f"{name}:{tb.tb_lineno}"
        tb = tb.tb_next
    return line


def _flat(joint: Any, lifted: Lifted) -> tuple[fx.Graph, tuple[Role, ...]]:
    """The joint graph with one placeholder a tensor and a flat output tuple, and its nodes' meta in our words."""
    graph: fx.Graph = joint.graph_module.graph
    graph.set_codegen(CodeGen())
    out = next(n for n in graph.nodes if n.op == "output")
    out.meta["roles"] = tuple(_role(d) for d in out.meta["desc"])
    out.args = (tuple(pytree.tree_leaves(out.args[0], is_leaf=lambda x: x is None)),)
    roles = tuple(_rename(_role(n.meta["desc"]), lifted) for n in graph.nodes if n.op == "placeholder")
    lines: dict[int, str] = {}
    modules: dict[int, str] = {}
    for n in graph.nodes:
        seq, back = n.meta.get("seq_nr"), n.meta.get("partitioner_tag") == "is_backward"
        stack = n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack") or {}
        line, module = ("" if back else n.meta.get("stack_trace") or ""), (list(stack) or [""])[-1]
        if not back and seq is not None and n.op == "call_function":
            lines[seq], modules[seq] = line, module
        val = n.meta.get("val")
        n.meta = {
            "val": val,
            "module": module or (modules.get(seq, "") if back and seq is not None else ""),
            "where": line or (lines.get(seq, "") if seq is not None else ""),
            "backward": back,
            "seq": seq,
        } | ({"roles": n.meta["roles"]} if n.op == "output" else {})
    return graph, roles


def _refuse_sparse(graph: fx.Graph, outputs: tuple[Role, ...], lifted: Lifted) -> None:
    out = next(n for n in graph.nodes if n.op == "output")
    for value, role in zip(out.args[0], outputs, strict=True):
        val = value.meta.get("val") if isinstance(value, fx.Node) else None
        if isinstance(val, torch.Tensor) and val.layout != torch.strided:
            raise CaptureError(
                f"sparse gradient of {_rename(role, lifted).name!r}: it cannot be sharded or reduced; make the "
                f"embedding with sparse=False"
            )


def _role(d: Any) -> Role:
    if d is None:
        return Role("none", 0)
    if isinstance(d, (D.ParamAOTInput, D.BufferAOTInput)):
        return Role("param" if isinstance(d, D.ParamAOTInput) else "buffer", d.target)
    if isinstance(d, D.PlainAOTInput):
        return Role("input", d.idx)
    if isinstance(d, D.TangentAOTInput):
        return Role("tangent", getattr(d.output, "idx", 0))
    if isinstance(d, D.GradAOTOutput):
        of = _role(d.grad_of)
        return Role("grad" if of.kind == "param" else "input_grad", of.name)
    if isinstance(d, D.InputMutationAOTOutput):
        of = _role(d.mutated_input)
        return Role("new_buffer" if of.kind == "buffer" else "new_input", of.name)
    if isinstance(d, D.PlainAOTOutput):
        return Role("output", d.idx)
    raise CaptureError(f"the captured graph has an input or output of an unknown kind: {d}")


def _rename(role: Role, lifted: Lifted) -> Role:
    return Role(role.kind, lifted.names[role.name]) if role.name in lifted.names else role  # type: ignore[index]


def _roles_out(joint: Any) -> tuple[Role, ...]:
    return next(n for n in joint.graph_module.graph.nodes if n.op == "output").meta["roles"]


def _path_name(path: str) -> str:
    inner = path.removeprefix("[0]").removeprefix("[1]").removeprefix("[2]")
    return inner.replace("['", ".").replace("']", "").lstrip(".") or path
