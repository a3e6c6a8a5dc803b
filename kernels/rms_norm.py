"""RMS norm (Zhang & Sennrich, arXiv 1910.07467) as one op forward and one backward.

    r = 1 / sqrt(mean(x²) + eps)      y = x r w      dw = Σ_rows g x r      dx = r (g w - x r² mean(g w x))

The arithmetic is float32 or wider; y has the dtype of x, rstd that of the arithmetic, its normalised dims kept as 1.
On CUDA a row is one block of one Triton program; rows wider than `WIDEST` and float64 run as on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .tri import HAVE, constexpr, jit, launch, pow2, rows_of, tl

WIDEST, SUMMED = 8192, 4096
"""Elements of a row that a program takes, and takes with the weight's gradient; beyond, registers spill."""
_PROGRAMS = 512
"""Of the backward; each sums the weight's gradient over its rows in registers, and the sums are added at the end."""

lib = torch.library.Library("meshwright", "FRAGMENT")
lib.define(
    "rms_norm(Tensor x, int[] normalized_shape, Tensor? weight, float eps) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
lib.define(
    "rms_norm_backward(Tensor grad, Tensor x, int[] normalized_shape, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def functional(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`F.rms_norm` on `meshwright::rms_norm`."""
    shape = list(normalized_shape)
    if list(input.shape[input.dim() - len(shape) :]) != shape or (weight is not None and list(weight.shape) != shape):
        raise RuntimeError(f"normalized_shape {shape} does not fit an input of {tuple(input.shape)} or the weight")
    eps = torch.finfo(_wide(input.dtype)).eps if eps is None else eps
    return torch.ops.meshwright.rms_norm(input, shape, weight, eps)[0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _normed(shape: Sequence[int]) -> list[int]:
    return list(range(-len(shape), 0))


def _forward(x, normalized_shape, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(_wide(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(_normed(normalized_shape), keepdim=True) + eps)
    y = wide * rstd
    if weight is not None:
        y = y.mul_(weight)
    return y.to(x.dtype).contiguous(), rstd.contiguous()


def _backward(grad, x, normalized_shape, rstd, weight) -> tuple[torch.Tensor, torch.Tensor]:
    dims = _normed(normalized_shape)
    g, unit = grad.to(rstd.dtype), x.to(rstd.dtype) * rstd
    rows = (math.prod(x.shape[: x.dim() - len(dims)]), *normalized_shape)
    dw = x.new_empty(0) if weight is None else (g * unit).reshape(rows).sum(0).to(weight.dtype)
    gw = g if weight is None else g * weight
    dx = (gw - unit * (gw * unit).mean(dims, keepdim=True)).mul_(rstd)
    return dx.to(x.dtype).contiguous(), dw


@jit
def forward_kernel(x, w, y, rstd, n, eps, WEIGHT: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    there = col < n
    v = tl.load(x + row * n + col, mask=there, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / n + eps)
    tl.store(rstd + row, r)
    v *= r
    if WEIGHT:
        v *= tl.load(w + col, mask=there, other=0.0).to(tl.float32)
    tl.store(y + row * n + col, v.to(y.dtype.element_ty), mask=there)


@jit
def backward_kernel(
    g, x, w, rstd, dx, sums, rows, n, per, WEIGHT: constexpr, SUMS: constexpr, BLOCK: constexpr
):
    """Each program walks `per` rows; sums: [programs, n] float32, the weight's gradient over its rows, if `SUMS`."""
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    dw = tl.zeros((BLOCK,), tl.float32)
    if WEIGHT:
        scale = tl.load(w + col, mask=col < n, other=0.0).to(tl.float32)
    for row in range(0, per):
        at = (program * per + row) * n + col
        there = (col < n) & (program * per + row < rows)
        r = tl.load(rstd + program * per + row, mask=program * per + row < rows, other=0.0)
        unit = tl.load(x + at, mask=there, other=0.0).to(tl.float32) * r
        grad = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
        if WEIGHT:
            if SUMS:
                dw += grad * unit
            grad *= scale
        v = (grad - unit * (tl.sum(grad * unit, 0) / n)) * r
        tl.store(dx + at, v.to(dx.dtype.element_ty), mask=there)
    if SUMS:
        tl.store(sums + program * n + col, dw, mask=col < n)


def warps(block: int) -> int:
    """Warps of a row of `block` elements: few elements a thread, for the registers."""
    return min(16, max(4, block // 256))


def fits(x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None) -> bool:
    """Whether a kernel takes such a call."""
    n = math.prod(normalized_shape)
    narrow = all(t is None or t.dtype in (torch.float32, torch.float16, torch.bfloat16) for t in (x, weight))
    return HAVE and narrow and 0 < n <= WIDEST


def triton_forward(x, normalized_shape, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`_forward` by one kernel."""
    if not fits(x, normalized_shape, weight):
        return _forward(x, normalized_shape, weight, eps)
    n = math.prod(normalized_shape)
    y, rstd = _fake_forward(x, normalized_shape, weight, eps)
    w = None if weight is None else weight.contiguous()
    rows, block = rows_of(x, n), pow2(n)
    launch(
        forward_kernel, rows.shape[0], rows, w, y, rstd, n, eps, WEIGHT=w is not None, BLOCK=block,
        num_warps=warps(block),
    )  # fmt: skip
    return y, rstd


def triton_backward(grad, x, normalized_shape, rstd, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """`_backward` by one kernel and a sum."""
    if not fits(x, normalized_shape, weight):
        return _backward(grad, x, normalized_shape, rstd, weight)
    n = math.prod(normalized_shape)
    dx, dw = _fake_backward(grad, x, normalized_shape, rstd, weight)
    w = None if weight is None else weight.contiguous()
    rows, grads, block = rows_of(x, n), rows_of(grad, n), pow2(n)
    summed = w is not None and n <= SUMMED
    per = max(1, -(-rows.shape[0] // _PROGRAMS)) if summed else 1
    programs = -(-rows.shape[0] // per)
    sums = dx.new_empty((programs if summed else 0, n), dtype=torch.float32)
    launch(
        backward_kernel, programs, grads, rows, w, rstd.contiguous(), dx, sums, rows.shape[0], n, per,
        WEIGHT=w is not None, SUMS=summed, BLOCK=block, num_warps=warps(block), num_stages=1,
    )  # fmt: skip
    if w is None:
        return dx, dw
    if not summed:
        sums = grads.float() * rows * rstd.reshape(-1, 1)
    return dx, sums.sum(0).to(w.dtype).reshape(w.shape)


def _fake_forward(x, normalized_shape, weight, eps):
    lead = x.dim() - len(normalized_shape)
    rstd = x.new_empty((*x.shape[:lead], *(1 for _ in normalized_shape)), dtype=_wide(x.dtype))
    return x.new_empty(x.shape), rstd


def _fake_backward(grad, x, normalized_shape, rstd, weight):
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)


def _setup(ctx, inputs, output) -> None:
    x, ctx.shape, weight, _ = inputs
    ctx.save_for_backward(x, output[1], weight)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, _):
    if grad is None:
        return None, None, None, None
    x, rstd, weight = ctx.saved_tensors
    dx, dw = torch.ops.meshwright.rms_norm_backward(grad, x, ctx.shape, rstd, weight)
    return dx, None, None if weight is None else dw, None


lib.impl("rms_norm", _forward, "CompositeExplicitAutograd")
lib.impl("rms_norm", triton_forward, "CUDA")
lib.impl("rms_norm_backward", _backward, "CompositeExplicitAutograd")
lib.impl("rms_norm_backward", triton_backward, "CUDA")
torch.library.register_fake("meshwright::rms_norm", _fake_forward, lib=lib)
torch.library.register_fake("meshwright::rms_norm_backward", _fake_backward, lib=lib)
torch.library.register_autograd("meshwright::rms_norm", _autograd, setup_context=_setup, lib=lib)
