"""What of private torch the rest needs, behind names of our own; `capture.py` holds what only tracing needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


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
