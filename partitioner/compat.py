"""What else of private torch is touched: modes that are active around us, and the Python behind a custom op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


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
