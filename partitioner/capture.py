"""Capture: a module, its loss and its backward as one flat ATen graph on fake CPU tensors.

`trace.py` records the call; what it cannot hold, `aot.py` traces by AOTAutograd. Parameters and buffers are inputs,
each distinct tensor once, so that tied weights are one input with one gradient. Nothing is allocated: parameters,
buffers and inputs are faked (models on the meta device too). Attention, cross entropy and RMS norm are swapped for the
canonical ops of `kernels` before tracing; random ops are replaced after it by ones that draw by global element.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from ..kernels import attention, cross_entropy, linear_cross_entropy, rms_norm
from . import compat
from .aot import export
from .batch import batch_of
from .call import Call, Joint
from .canonical import clean, place_random_ops, start_from_loss
from .collection import no_collection
from .errors import CaptureError, MeshwrightError
from .fuse import fuse, notes_of
from .graph import Graph
from .known import known_modules
from .known_rope import known_rope
from .lines import line_of
from .outputs import result_builder
from .precision import Precision, raise_gradients
from .trace import trace

SWAPS: dict[Callable, Callable] = {
    F.scaled_dot_product_attention: attention.sdpa,
    F.cross_entropy: cross_entropy.cross_entropy,
    F.linear_cross_entropy: linear_cross_entropy.functional,
    F.rms_norm: rms_norm.functional,
    torch.rms_norm: rms_norm.functional,
}
"""Functions replaced during capture, so that what they compute stays one op."""

_NAMES = ("scaled_dot_product_attention", "cross_entropy", "linear_cross_entropy", "rms_norm")

_OF_ONE_DTYPE = {
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default, torch.ops.aten.convolution.default,
}  # fmt: skip

_READERS = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr, torch.Tensor.__dlpack__)

log = logging.getLogger("meshwright")


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
    precision: Precision | None = None,
    fused: bool = False,
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
        precision: what the program computes in; see `precision.py`.
        fused: chains of ops become one op where there is one; see `fuse.py`, `known.py`.

    Raises:
        CaptureError: the program depends on data in a way no fixed graph can hold; names the user's line.
    """
    call = Call(program, args, kwargs, target, loss, precision)
    found: Counter[str] = Counter()
    turned: Counter[str] = Counter()
    with _named_faults(program), no_collection(), contextlib.ExitStack() as known:
        if fused:
            known.enter_context(known_modules(program, found))
            known.enter_context(known_rope(program, turned))
        joint = _traced(call, backward, turned)
        found += turned
        graph, roles = joint.graph, joint.inputs
        _refuse_sparse(joint)
        _check_dtypes(graph)
        _tell_changes(call, joint)
        if loss is not None:
            roles = start_from_loss(graph, roles, scaled=precision is not None and precision.scaling is not None)
        raise_gradients(graph, joint.outputs, precision, call.masters)
        graph, roles = place_random_ops(graph, roles, seed)
        clean(graph)
        if fused:
            found += fuse(graph)
    named = pytree.tree_flatten_with_path((args, kwargs, {"target": target}))[0]
    paths = [pytree.keystr(p) for p, x in named if isinstance(x, torch.Tensor)]
    return Graph(
        graph,
        roles,
        joint.outputs,
        {k: v.detach() for k, v in joint.constants.items()},
        result_builder(call.traced),
        tuple(map(_path_name, paths)),
        batch_of(args, {**kwargs, "target": target}, batch_dims or {}),
        notes=notes_of(found),
        precision=precision,
        masters=call.masters,
    )


def _traced(call: Call, backward: bool, turned: Counter[str]) -> Joint:
    """The quick way, and where it stops for whatever reason, the thorough one: its result or its error stands.
    `turned` counts calls that were swapped: those of the way that stands."""

    def watching(at: Callable[[str], None]) -> Any:
        return _watching(call.program, at)

    with torch.set_grad_enabled(backward):
        try:
            return trace(call, backward, watching)
        except Exception as fault:
            why = f"{type(fault).__name__}: {fault}".partition("\n")[0]
        turned.clear()
        log.info("%s is captured by AOTAutograd, which takes longer: %s", type(call.program).__name__, why)
        return export(call, backward, watching)


class _Swaps(TorchFunctionMode):
    """Calls of functions of torch become those of canonical ones, and nothing reads the memory of fake tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _READERS:
            compat.forbid_reading(args)
        call: Any = SWAPS.get(func, func)
        out = call(*args, **(kwargs or {}))
        compat.forbid_reading(out)
        return out


@contextlib.contextmanager
def _swapped() -> Iterator[None]:
    """`torch.nn.functional` with the canonical functions in place, for code that calls them from inside torch."""
    saved = {name: getattr(F, name) for name in _NAMES}
    try:
        for name, original in saved.items():
            setattr(F, name, SWAPS[original])
        yield
    finally:
        for name, original in saved.items():
            setattr(F, name, original)


@contextlib.contextmanager
def _modules(program: nn.Module, at: Callable[[str], None]) -> Iterator[None]:
    """`at` is told the name of each module that the program enters or comes back to."""
    names = {m: name for name, m in program.named_modules()}
    stack: list[str] = [""]

    def enter(module, args):
        stack.append(names.get(module, ""))
        at(stack[-1])

    def leave(module, args, out):
        if len(stack) > 1:
            stack.pop()
        at(stack[-1])

    hooks = []
    for module in names:
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _watching(program: nn.Module, at: Callable[[str], None]) -> Iterator[None]:
    """What holds while a program is traced."""
    cache = torch.is_autocast_cache_enabled()
    with (
        warnings.catch_warnings(),
        _modules(program, at),
        compat.compiling(),
        compat.without_mkldnn(),
        compat.no_checkpoints(),
        _swapped(),
        _Swaps(),
    ):
        warnings.simplefilter("ignore")
        torch.set_autocast_cache_enabled(False)  # a cached cast would outlive the trace that made it
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cache)


_NOISE = ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")
_AT = "raised at {} while the call was captured; does the model take these inputs on one device?"


@contextlib.contextmanager
def _named_faults(program: nn.Module) -> Iterator[None]:
    """Turns what cannot be captured into a `CaptureError` with the user's line and a way out."""
    noise = [logging.getLogger(f"torch.{name}") for name in _NOISE]
    levels = [logger.level for logger in noise]
    for logger in noise:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    except MeshwrightError:
        raise
    except compat.DATA_DEPENDENT as fault:
        kind = "shape" if compat.shapes_depend_on_data(fault) else "branch"
        raise CaptureError(
            f"data-dependent {kind} in forward at {line_of(fault)}: what {type(program).__name__} computes next "
            f"depends on the values of a tensor, and one graph cannot hold both ways. Write it with torch.where or "
            f"masks, leave a number that is read (.item(), float()) a tensor, pass the decision as a python argument, "
            f"or (mixture of experts in transformers) call "
            f"model.set_experts_implementation('batched_mm'); nn.Transformer needs tgt_is_causal=True. "
            f"({str(fault).partition(chr(10))[0]})"
        ) from fault
    except RuntimeError as fault:
        if ".numpy() is not supported" not in str(fault):
            fault.add_note(_AT.format(line_of(fault)))
            raise
        raise CaptureError(
            f".numpy() in forward at {line_of(fault)}: numpy computes outside the graph that is captured. Use torch "
            f"functions, or do it before the call and pass the result"
        ) from fault
    except (TypeError, ValueError, IndexError) as fault:
        fault.add_note(_AT.format(line_of(fault)))
        raise
    finally:
        for logger, level in zip(noise, levels, strict=True):
            logger.setLevel(level)


def _refuse_sparse(joint: Joint) -> None:
    for value, role in zip(joint.graph.output_node().args[0], joint.outputs, strict=True):  # type: ignore[arg-type]
        val = None if value is None else value.meta.get("val")  # type: ignore[union-attr]
        if isinstance(val, torch.Tensor) and val.layout != torch.strided:
            raise CaptureError(
                f"sparse gradient of {role.name!r}: it cannot be sharded or reduced; make the embedding with "
                f"sparse=False"
            )


def _check_dtypes(graph: fx.Graph) -> None:
    """Fake tensors are multiplied whatever their dtypes; real ones are not."""
    for node in graph.nodes:
        if node.target in _OF_ONE_DTYPE:
            dtypes = dict.fromkeys(x.meta["val"].dtype for x in node.all_input_nodes)
            if len(dtypes) > 1:
                said = " and ".join(map(str, dtypes))
                raise CaptureError(
                    f"{node.target} at {node.meta.get('where') or 'an unknown line'} gets operands of {said}, and "
                    f"takes one dtype: cast the input (x.to(dtype)) or the model (model.to(dtype)), or use autocast"
                )


def _tell_changes(call: Call, joint: Joint) -> None:
    """What forward sets in its modules is not there in the next step: an error where a tensor of the graph is replaced,
    else a warning."""
    held = {compat.memory(t) for t in joint.constants.values()}
    for name, t in call.changes.tensors.items():
        if compat.memory(t) in held:
            raise CaptureError(
                f"forward reads the tensor {name} and binds it to another: a graph holds the first one for good. "
                f"Register it (register_buffer): buffers are carried from step to step"
            )
    if call.changes.values:
        log.warning(
            "forward sets %s: each step of the compiled program begins with what was there when it was captured. What "
            "is to be carried from step to step belongs in a buffer",
            ", ".join(call.changes.values),
        )


def _path_name(path: str) -> str:
    inner = path.removeprefix("[0]").removeprefix("[1]").removeprefix("[2]")
    return inner.replace("['", ".").replace("']", "").lstrip(".") or path
