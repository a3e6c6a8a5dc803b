"""Triton's interpreter, with bf16 made right.

The interpreter keeps a bf16 block as uint16 bit patterns and computes on the patterns. `repair()` widens operands to
float32 first and rounds results to nearest even; it wraps five methods of the interpreter's builder. A mask of a block
and a scalar comes out as int32, which loads and stores then refuse: two methods more.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

_COMPARE = (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)


def start() -> None:
    """Turns the interpreter on. Triton reads the switch when it is imported, so this comes before.

    Raises:
        RuntimeError: triton is imported already, compiled kernels and all.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before its interpreter was turned on: set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language.standard as standard  # pyright: ignore[reportMissingImports]

    assert type(standard.sum).__name__ == "InterpretedFunction", type(standard.sum)
    repair()


def widen(u: np.ndarray) -> np.ndarray:
    """float32 of bf16 bit patterns."""
    return (u.astype(np.uint32) << 16).view(np.float32)


def narrow(f: np.ndarray) -> np.ndarray:
    """bf16 bit patterns of float32, rounded to nearest even."""
    f = np.ascontiguousarray(f, dtype=np.float32)
    b = f.view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(f), 0x7FC0, (b + 0x7FFF + ((b >> 16) & 1)) >> 16).astype(np.uint16)


def repair() -> None:
    """Makes bf16 right in this process."""
    import triton.language as tl  # pyright: ignore[reportMissingImports]
    from triton.runtime import interpreter as it  # pyright: ignore[reportMissingImports]

    builder, handle = it.InterpreterBuilder, it.TensorHandle
    cast, to_fp, binary, unary, dot = (
        getattr(builder, n) for n in ("cast_impl", "create_fp_to_fp", "binary_op", "unary_op", "create_dot")
    )

    def half(x: Any) -> bool:
        return x.dtype.scalar == tl.bfloat16

    def wide(x: Any) -> Any:
        return handle(widen(x.data), tl.float32) if half(x) else x

    def narrowed(x: Any) -> Any:
        return handle(narrow(x.data).reshape(x.data.shape), tl.bfloat16)

    def cast_impl(self: Any, src: Any, dst: Any) -> Any:
        if half(src) and dst.scalar == tl.bfloat16:
            return src
        if half(src):
            return wide(src) if dst.scalar == tl.float32 else cast(self, wide(src), dst)
        if dst.scalar == tl.bfloat16:
            return narrowed(src if src.dtype.scalar == tl.float32 else cast(self, src, tl.float32))
        return cast(self, src, dst)

    def create_fp_to_fp(self: Any, src: Any, dst: Any, rounding: Any) -> Any:
        if (half(src) or dst.scalar == tl.bfloat16) and 8 not in (
            src.dtype.scalar.primitive_bitwidth,
            dst.scalar.primitive_bitwidth,
        ):
            return cast_impl(self, src, dst)
        return to_fp(self, src, dst, rounding)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not (half(left) and half(right)):
            return binary(self, left, right, op)
        out = op(widen(left.data), widen(right.data))
        return handle(out, tl.int1) if op in _COMPARE else handle(narrow(out).reshape(out.shape), tl.bfloat16)

    def unary_op(self: Any, x: Any, op: Any) -> Any:
        return narrowed(unary(self, wide(x), op)) if half(x) else unary(self, x, op)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        return load(self, ptrs, handle(mask.data.astype(bool), tl.int1), *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, ptrs, value, handle(mask.data.astype(bool), tl.int1), *rest)

    load, store = builder.create_masked_load, builder.create_masked_store
    fixed = (cast_impl, create_fp_to_fp, binary_op, unary_op, create_dot, create_masked_load, create_masked_store)
    for method in fixed:
        setattr(builder, method.__name__, method)
