"""What a norm does to rows, forward and backward, with a residual that is added before it: two Triton kernels.

    h = x + residual (rounded to the dtype of x)      m = mean(h), or 0      r = 1 / sqrt(mean((h - m)²) + eps)
    u = (h - m) r         y = u w + b
    dh = r (g w - mean(g w) - u mean(g w u)) + dsum      dw = Σ_rows g u      db = Σ_rows g

`CENTERED`: a layer norm; else m is 0 and so is mean(g w) (RMS norm). The arithmetic is float32; a row is one block of
one program. The backward's programs each walk some rows and sum dw and db over them in registers; those sums are added
at the end, in float32.
"""

from __future__ import annotations

import torch

from .tri import HAVE, constexpr, jit, launch, pow2, rows_of, tl

WIDEST, SUMMED = 8192, 4096
"""Elements of a row that a program takes, and takes with the weight's gradient; beyond, registers spill."""
_PROGRAMS = 512
"""Of the backward."""


@jit
def forward_kernel(
    x, residual, w, b, y, total, mean, rstd, n, eps,
    RESIDUAL: constexpr, CENTERED: constexpr, WEIGHT: constexpr, BIAS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    there = col < n
    v = tl.load(x + row * n + col, mask=there, other=0.0).to(tl.float32)
    if RESIDUAL:
        v += tl.load(residual + row * n + col, mask=there, other=0.0).to(tl.float32)
        narrow = v.to(total.dtype.element_ty)
        tl.store(total + row * n + col, narrow, mask=there)
        v = narrow.to(tl.float32)
    if CENTERED:
        m = tl.sum(v, 0) / n
        tl.store(mean + row, m)
        v = tl.where(there, v - m, 0.0)
    r = 1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / n + eps)
    tl.store(rstd + row, r)
    v *= r
    if WEIGHT:
        v *= tl.load(w + col, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(b + col, mask=there, other=0.0).to(tl.float32)
    tl.store(y + row * n + col, v.to(y.dtype.element_ty), mask=there)


@jit
def backward_kernel(
    g, dsum, h, w, mean, rstd, dh, dw, db, rows, n, per,
    DSUM: constexpr, CENTERED: constexpr, WEIGHT: constexpr, SUMS: constexpr, BIAS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Each program walks `per` rows; dw, db: [programs, n] float32, of its rows, written if `SUMS`, `BIAS`."""
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    if SUMS:
        dw_here = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        db_here = tl.zeros((BLOCK,), tl.float32)
    if WEIGHT:
        scale = tl.load(w + col, mask=col < n, other=0.0).to(tl.float32)
    for i in range(0, per):
        row = program * per + i
        there = (col < n) & (row < rows)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        unit = tl.load(h + row * n + col, mask=there, other=0.0).to(tl.float32)
        if CENTERED:
            unit = tl.where(there, unit - tl.load(mean + row, mask=row < rows, other=0.0), 0.0)
        unit *= r
        grad = tl.load(g + row * n + col, mask=there, other=0.0).to(tl.float32)
        if BIAS:
            db_here += grad
        if SUMS:
            dw_here += grad * unit
        if WEIGHT:
            grad *= scale
        v = grad - unit * (tl.sum(grad * unit, 0) / n)
        if CENTERED:
            v -= tl.sum(grad, 0) / n
        v *= r
        if DSUM:
            v += tl.load(dsum + row * n + col, mask=there, other=0.0).to(tl.float32)
        tl.store(dh + row * n + col, v.to(dh.dtype.element_ty), mask=there)
    if SUMS:
        tl.store(dw + program * n + col, dw_here, mask=col < n)
    if BIAS:
        tl.store(db + program * n + col, db_here, mask=col < n)


def warps(block: int) -> int:
    """Warps of a row of `block` elements: few elements a thread, for the registers."""
    return min(16, max(4, block // 256))


def fits(n: int, *tensors: torch.Tensor | None) -> bool:
    """Whether the kernels take rows of n elements of such tensors."""
    narrow = all(t is None or t.dtype in (torch.float32, torch.float16, torch.bfloat16) for t in tensors)
    return HAVE and narrow and 0 < n <= WIDEST


def _flat(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def run_forward(x, residual, n: int, w, b, eps: float, y, total, mean, rstd) -> None:
    """Writes y, total (with a residual), mean (of a layer norm, else None) and rstd, all contiguous."""
    rows, block = rows_of(x, n), pow2(n)
    launch(
        forward_kernel, rows.shape[0], rows, None if residual is None else rows_of(residual, n), _flat(w), _flat(b), y,
        None if residual is None else total, mean, rstd, n, eps, RESIDUAL=residual is not None,
        CENTERED=mean is not None, WEIGHT=w is not None, BIAS=b is not None, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip


def run_backward(g, dsum, h, n: int, w, mean, rstd, dh, bias: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Writes dh, contiguous; gives dw [n] where there is a weight and db [n] if `bias`, in float32."""
    rows, grads, block = rows_of(h, n), rows_of(g, n), pow2(n)
    mean, rstd = _flat(mean), rstd.contiguous()
    sums = n <= SUMMED
    per = max(1, -(-rows.shape[0] // _PROGRAMS)) if sums and (bias or w is not None) else 1
    programs = -(-rows.shape[0] // per)
    dw, db = (dh.new_empty((programs, n), dtype=torch.float32) if on and sums else None for on in (w is not None, bias))
    launch(
        backward_kernel, programs, grads, None if dsum is None else rows_of(dsum, n), rows, _flat(w), mean, rstd, dh,
        dw, db, rows.shape[0], n, per, DSUM=dsum is not None, CENTERED=mean is not None, WEIGHT=w is not None,
        SUMS=dw is not None, BIAS=db is not None, BLOCK=block, num_warps=warps(block), num_stages=1,
    )  # fmt: skip
    if sums:
        return None if dw is None else dw.sum(0), None if db is None else db.sum(0)
    unit = (rows.float() if mean is None else rows - mean.reshape(-1, 1)) * rstd.reshape(-1, 1)
    dw = None if w is None else unit.mul_(grads).sum(0)
    return dw, grads.sum(0, dtype=torch.float32) if bias else None
