"""Triton where it is installed: what kernels are written with, and the few rules of launching them.

A kernel is a Python function under `@jit`; its launcher is what a CUDA (or ROCm) tensor's op runs, and what the tests
run on CPU tensors in Triton's interpreter. Where triton is not installed the kernels are plain functions that nobody
calls: the ops then run their torch form on every device.

Every kernel upcasts to float32 right after each load, counts offsets in int64, masks every load and store, has its
batch on grid axis 0, and runs one fixed configuration: no autotuning, which runs a kernel many times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

tl: Any
jit: Callable[..., Any]
try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    jit, HAVE = triton.jit, True
except ImportError:
    tl, HAVE = None, False
    jit = lambda fn=None, **options: (lambda f: f) if fn is None else fn  # noqa: E731


if TYPE_CHECKING:
    constexpr = Any
else:
    constexpr = tl.constexpr if HAVE else Any


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are computed: float32, or float64 for its own."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pow2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def rows_of(x: torch.Tensor, last: int) -> torch.Tensor:
    """x as [rows, last], contiguous: kernels walk rows by one stride, whatever the strides of the operand."""
    return x.reshape(-1, last).contiguous() if x.numel() else x.reshape(0, last)


def launch(kernel: Any, programs: int | tuple[int, int], *args: Any, **options: Any) -> None:
    """Run `programs` instances (or the grid of them) on the device of the first tensor; none, where there is nothing
    to do.

    A grid of zero programs is an error that poisons a CUDA context. `num_warps` counts warps of 32 threads: of AMD's,
    which have 64, half as many run.
    """
    grid = programs if isinstance(programs, tuple) else (programs,)
    if 0 in grid:
        return
    if torch.version.hip is not None and "num_warps" in options:
        options["num_warps"] = max(1, options["num_warps"] // 2)
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)
