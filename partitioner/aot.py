"""Tracing by AOTAutograd's joint export: slower than `trace.py`, and it holds what that cannot (sizes that depend on
data, higher-order ops, gradients through changes of inputs). The two give one form of graph."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree
from torch._functorch import config
from torch._functorch._aot_autograd import descriptors as D
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.fx import traceback as fx_traceback
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode

from . import compat
from .call import Call, Joint, grad_role, update_role
from .errors import CaptureError
from .graph import Role
from .lines import user_line
from .rules.loss import DECOMPOSITIONS


class Lifted(nn.Module):
    """A call as a module that holds every distinct parameter and buffer once, under flat names, faked."""

    def __init__(self, call: Call, mode: Any):
        super().__init__()
        object.__setattr__(self, "call", call)
        self.names = dict(zip((f"t{i}" for i in range(len(call.held))), call.held, strict=True))
        for i, (flat, t) in enumerate(zip(self.names, call.held.values(), strict=True)):
            fake = compat.fake_like(t, mode)
            if i < call.params:
                self.register_parameter(flat, nn.Parameter(fake, requires_grad=t.requires_grad))
            else:
                self.register_buffer(flat, fake)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call: Any = self.call
        out = call([getattr(self, flat) for flat in self.names], tensors)
        flat = {name: flat for flat, name in self.names.items()}
        with torch.no_grad():
            for name, t in call.changes.buffers.items():
                getattr(self, flat[name]).copy_(t)
        return out


class _Lines(TorchFunctionMode):
    """Notes the user's source line of every torch call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        line = user_line(sys._getframe(1))
        if line:
            fx_traceback.current_meta["stack_trace"] = line
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _notes() -> Iterator[Callable[[str], None]]:
    """Nodes keep what is noted while they are made: lines, and the module that the given function is told."""

    def at(module: str) -> None:
        fx_traceback.current_meta["nn_module_stack"] = {module: (module, nn.Module)}

    try:
        with fx_traceback.preserve_node_meta(), _Lines():
            yield at
    finally:
        fx_traceback.current_meta.pop("nn_module_stack", None)
        fx_traceback.current_meta.pop("stack_trace", None)


def export(call: Call, backward: bool, watching: Callable[[Callable[[str], None]], Any]) -> Joint:
    """The call as a graph, as `trace.trace` gives it; `backward` is whether gradients are enabled."""
    mode = compat.tracing_mode()
    tensors = tuple(compat.fake_like(t, mode).requires_grad_(t.requires_grad) for t in call.tensors)
    lifted = Lifted(call, mode)
    with contextlib.ExitStack() as stack, mode, _notes() as at, watching(at):
        stack.enter_context(config.patch(backward_pass_autocast="off"))
        joint = aot_export_joint_with_descriptors(stack, lifted, tensors, {}, decompositions=DECOMPOSITIONS)
    gm = joint.graph_module
    graph, inputs, outputs = _flat(gm.graph, lifted)
    return Joint(graph, inputs, outputs, {n.target: getattr(gm, n.target) for n in graph.nodes if n.op == "get_attr"})


def _flat(graph: fx.Graph, lifted: Lifted) -> tuple[fx.Graph, tuple[Role, ...], tuple[Role, ...]]:
    """The graph with one placeholder a tensor and a flat output tuple, its nodes' meta in our words, and the roles."""
    graph.set_codegen(CodeGen())
    out = graph.output_node()
    outputs = tuple(_role(d, lifted) for d in out.meta["desc"])
    out.args = (tuple(pytree.tree_leaves(out.args[0], is_leaf=lambda x: x is None)),)
    inputs = tuple(_role(n.meta["desc"], lifted) for n in graph.nodes if n.op == "placeholder")
    places: dict[int, tuple[str, str]] = {}
    for n in graph.nodes:
        seq, back = n.meta.get("seq_nr"), n.meta.get("partitioner_tag") == "is_backward"
        stack = n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack") or {}
        line, module = ("" if back else n.meta.get("stack_trace") or ""), (list(stack) or [""])[-1]
        if not back and seq is not None and n.op == "call_function":
            places.setdefault(seq, (line, module))  # the first call with a number is the one that made it
        of_line, of_module = places.get(seq, ("", "")) if seq is not None else ("", "")
        n.meta = {
            "val": n.meta.get("val"),
            "module": module or (of_module if back else ""),
            "where": line or of_line,
            "backward": back,
            "seq": seq,
        }
    return graph, inputs, outputs


def _role(d: Any, lifted: Lifted) -> Role:
    if d is None:
        return Role("none", 0)
    if isinstance(d, (D.ParamAOTInput, D.BufferAOTInput)):
        return Role("param" if isinstance(d, D.ParamAOTInput) else "buffer", lifted.names[d.target])
    if isinstance(d, D.PlainAOTInput):
        return Role("input", d.idx)
    if isinstance(d, D.TangentAOTInput):
        return Role("tangent", getattr(d.output, "idx", 0))
    if isinstance(d, D.GradAOTOutput):
        return grad_role(_role(d.grad_of, lifted))
    if isinstance(d, D.InputMutationAOTOutput):
        return update_role(_role(d.mutated_input, lifted))
    if isinstance(d, D.PlainAOTOutput):
        return Role("output", d.idx)
    raise CaptureError(f"the captured graph has an input or output of an unknown kind: {d}")
