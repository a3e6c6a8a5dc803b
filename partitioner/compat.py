"""What of private torch the rest needs, behind names of our own; `aot.py` alone has more of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, autograd_would_have_decomposed

_torch: Any = torch  # for its private functions, which type checkers do not see
DispatchMode = TorchDispatchMode
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
"""What torch raises where a program depends on values of fake tensors."""

device_op = torch.ops.prim.device.default
"""By which C++ asks a fake tensor for its device."""


def decompositions(ops: Sequence[Any]) -> dict[Any, Callable]:
    """PyTorch's own definitions of these ops by simpler ones, a key for each overload."""
    return dict(get_decompositions(ops))


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """oneDNN off, and nothing else: `torch.backends.mkldnn.flags` sets TF32 and the precision too, and warns."""
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast off for every kind of device."""
    with torch._C._DisableAutocast():
        yield


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """No fake tensors, tracing, function modes, autocast or autograd: calls run as they stand."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),
    ):
        yield


def fake_mode() -> Any:
    """A fresh mode in which tensors have shapes and no values."""
    return FakeTensorMode()


def python_of(op: OpOverload) -> list[Callable[..., Any]] | None:
    """The Python functions that a `torch.library.custom_op` runs; None for an op made in another way."""
    definition = OPDEFS.get(op.name())
    if definition is None:
        return None
    found = [definition._init_fn]
    for wrapped in definition._backend_fns.values():
        cells = zip(wrapped.__code__.co_freevars, wrapped.__closure__ or (), strict=True)
        found += [cell.cell_contents for name, cell in cells if name == "fn"]
    return found


def shapes_depend_on_data(fault: BaseException) -> bool:
    """Whether it is the shape of something that data decide, rather than a branch."""
    return isinstance(fault, DynamicOutputShapeException)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` holds: libraries then leave out checks that look at values."""
    with torch.compiler._compile_session_context():
        yield


class _NoCheckpoint:
    @staticmethod
    def apply(function: Callable, preserve: bool, *args: Any) -> Any:
        return function(*args)


@contextlib.contextmanager
def no_checkpoints() -> Iterator[None]:
    """`torch.utils.checkpoint` runs its function and no more: what is recomputed is decided here, not in the model."""

    def passing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    names: dict[str, Any] = {
        "CheckpointFunction": _NoCheckpoint,
        "_checkpoint_without_reentrant_generator": passing,
    }
    saved = {name: getattr(checkpoints, name) for name in names}
    try:
        for name, new in names.items():
            setattr(checkpoints, name, new)
        yield
    finally:
        for name, old in saved.items():
            setattr(checkpoints, name, old)


# -- fake tensors
def tracing_mode() -> Any:
    """A fresh mode of fake tensors that lets a program's own real tensors in, as fake ones."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True)


def is_fake(t: torch.Tensor) -> bool:
    return isinstance(t, FakeTensor)


def fake_like(t: torch.Tensor, mode: Any) -> torch.Tensor:
    """A fake tensor of a mode, as `t`; on the CPU for meta tensors and those of other modes."""
    t = t.detach()
    if isinstance(t, FakeTensor) or t.is_meta:
        with mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
    return mode.from_tensor(t, static_shapes=True)


def maker(out: Any, mode: Any) -> Callable[[], Any] | None:
    """A function that gives fresh fake tensors like `out`, a call's result; None where a form does not tell all."""
    if isinstance(out, torch.Tensor):
        return _maker_of_one(out, mode)
    if not isinstance(out, (tuple, list)):
        return None
    parts = [_maker_of_one(x, mode) if isinstance(x, torch.Tensor) else (lambda: None) for x in out]
    if any(x is not None and not isinstance(x, torch.Tensor) for x in out) or None in parts:
        return None
    return lambda: tuple([make() for make in parts])  # type: ignore[misc]


def _maker_of_one(t: Any, mode: Any) -> Callable[[], torch.Tensor] | None:
    if not isinstance(t, FakeTensor) or t.constant is not None or t.layout is not torch.strided:
        return None
    shape, stride, offset = tuple(t.shape), t.stride(), t.storage_offset()
    if t.is_conj() or t.is_neg() or not all(type(n) is int for n in (*shape, *stride, offset)):
        return None
    dtype, device = t.dtype, t.fake_device

    def plain() -> torch.Tensor:
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

    def shifted() -> torch.Tensor:
        room = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else offset
        base = torch.empty(room, dtype=dtype, device="meta")
        return FakeTensor(mode, base.as_strided(shape, stride, offset), device)

    return shifted if offset else plain


# -- functionalisation, and where autograd is
@contextlib.contextmanager
def functionalised() -> Iterator[None]:
    """In-place calls on `wrapped` tensors reach the modes as calls that make new values."""
    _torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        _torch._disable_functionalization()


def wrapped(t: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A tensor that autograd and in-place calls may work on; `unwrapped` gives the value it has by then."""
    out = _torch._to_functional_tensor(t).requires_grad_(requires_grad)
    forbid_reading(out)
    return out


def forbid_reading(out: Any) -> None:
    """Reading the memory of what a call returned, of which there is none, is an error: not what lies at address 0."""
    if isinstance(out, torch.Tensor):
        if _torch._is_functional_tensor(out):
            torch._C._set_throw_on_mutable_data_ptr(out)
    elif isinstance(out, (tuple, list)):
        for x in out:
            forbid_reading(x)


def memory(t: torch.Tensor) -> Any:
    """A key of the memory that a tensor lies in; the tensor itself where there is none that can be read."""
    if is_fake(t) or t.is_meta or t.layout is not torch.strided:
        return id(t)
    return t.untyped_storage()._cdata


def unwrapped(t: torch.Tensor) -> torch.Tensor:
    if not _torch._is_functional_tensor(t):
        return t
    _torch._sync(t)
    return _torch._from_functional_tensor(t)


@contextlib.contextmanager
def python_kernels() -> Iterator[None]:
    """Composite ops by their Python definitions, which keep dropout and batch norm whole; backward without threads."""
    with enable_python_dispatcher(), torch.autograd.set_multithreading_enabled(False):
        yield


def is_composite(func: OpOverload, args: tuple) -> bool:
    """Whether eager PyTorch would run the op as others, on tensors like these."""
    return func._can_decompose() and autograd_would_have_decomposed(func, args)


def forward_sequence() -> int:
    """The number of the autograd node that the call now recorded has made, if it made one."""
    return _torch.autograd._get_sequence_nr() - 1


def backward_sequence() -> int | None:
    """The number of the autograd node whose backward runs."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()
