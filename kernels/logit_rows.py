"""What a cross entropy does to a chunk of logits: two passes over [rows, v], of any width.

    statistics   lse[i] = log Σ_c exp(z[i, c])      picked[i] = z[i, column i]      one pass, a running maximum
    sums         Σ_c exp(z[i, c] - top[i]), picked[i]               top: the maximum over the classes of all ranks
    gradient     z[i, c] <- every[i] exp(z[i, c] - lse[i]); at column i, where there is one,
                           own[i] expm1(z - lse) + (every[i] - own[i]) exp(z - lse)

    both         nll[i] = lse[i] - picked[i] and the gradient with every = own    one exponential a logit

z is contiguous; the arithmetic is float32 or wider, and the running maximum and sum keep a row of any width in one
program. `gradient`, `sums` and `both` overwrite z.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .tri import HAVE, constexpr, jit, launch, pow2, tl

BLOCK = 8192
"""Logits that a program takes at once."""

Statistics = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Sums = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Gradient = Callable[..., torch.Tensor]
Both = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
CACHED = 1 << 20
"""Bytes of logits in the wide dtype that `both` takes at once on a CPU: they stay in its cache."""


@dataclass(frozen=True)
class Rows:
    """The passes of one device.

    Attributes:
        statistics: (z [n, v], column [n]) -> (lse, picked), [n] in the wide dtype.
        sums: (z, column, top [n]) -> (sum, picked), [n] in the wide dtype.
        gradient: (z, column, there [n] bool, lse, every, own, [n] in the wide dtype) -> dz in the dtype of z; z's
            memory is used.
        both: (z in any dtype, column, own) -> (nll [n] in the wide dtype, dz); z's memory is used.
        wide: whether z is to be in the wide dtype.
    """

    statistics: Statistics
    sums: Sums
    gradient: Gradient
    both: Both
    wide: bool


def _statistics(z, column):
    return torch.logsumexp(z, 1), z.gather(1, column.unsqueeze(1)).squeeze(1)


def _sums(z, column, top):
    picked = z.gather(1, column.unsqueeze(1)).squeeze(1)
    return z.sub_(top.unsqueeze(1)).exp_().sum(1), picked


def _gradient(z, column, there, lse, every, own):
    at = column.unsqueeze(1)
    z.sub_(lse.unsqueeze(1))
    far = z.gather(1, at).squeeze(1)
    picked = torch.expm1(far) * own + torch.exp(far) * (every - own)
    z.exp_().mul_(every.unsqueeze(1))
    return z.scatter_(1, at, torch.where(there.unsqueeze(1), picked.unsqueeze(1), z.gather(1, at)))


def _both(z, column, own):
    nll, step = torch.empty_like(own), max(1, CACHED // max(1, z.shape[1] * own.element_size()))
    for i in range(0, z.shape[0], step):
        rows = slice(i, i + step)
        nll[rows] = _both_of_few(z[rows], column[rows].unsqueeze(1), own[rows].unsqueeze(1)).squeeze(1)
    return nll, z


def _both_of_few(z, at, own):
    """exp(z - lse) is exp(z - top) over its sum; the target's own entry is expm1, free of cancellation."""
    p = z.to(own.dtype)
    top = p.amax(1, keepdim=True)
    far = p.gather(1, at) - top
    total = p.sub_(top).exp_().sum(1, keepdim=True)
    far -= total.log()
    p.mul_(own / total).scatter_(1, at, own * torch.expm1(far))
    if p is not z:
        z.copy_(p)
    return far.neg_()


@jit
def rows_kernel(z, column, top, out, picked, v, GIVEN: constexpr, BLOCK: constexpr):
    """out: the sum of exp(z - top) if `GIVEN`, else the log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    total = tl.zeros((), tl.float32)
    most = tl.load(top + row) if GIVEN else float("-inf")
    for start in range(0, v, BLOCK):
        x = tl.load(z + row * v + start + col, mask=start + col < v, other=float("-inf")).to(tl.float32)
        if not GIVEN:
            new = tl.maximum(most, tl.max(x, 0))
            shift = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp(most - shift) + tl.sum(tl.exp(x - shift), 0)
            most = new
        else:
            total += tl.sum(tl.exp(x - most), 0)
    if GIVEN:
        tl.store(out + row, total)
    else:
        tl.store(out + row, tl.log(total) + tl.where(most == float("-inf"), 0.0, most))
    tl.store(picked + row, tl.load(z + row * v + tl.load(column + row)).to(tl.float32))


@jit
def _expm1(x):
    """exp(x) - 1, for |x| < 1/2 by ten terms of its series: free of cancellation."""
    s = 1.0 + x / 10.0
    for i in tl.static_range(9, 1, -1):
        s = 1.0 + s * x / i
    return tl.where(tl.abs(x) < 0.5, s * x, tl.exp(x) - 1.0)


@jit
def gradient_kernel(z, column, there, lse, every, own, v, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    col = start + tl.arange(0, BLOCK)
    inside = col < v
    target = tl.load(column + row)
    mine = tl.load(there + row) != 0
    scale, alone = tl.load(every + row), tl.load(own + row)
    far = tl.load(z + row * v + col, mask=inside, other=0.0).to(tl.float32) - tl.load(lse + row)
    p = tl.exp(far)
    g = tl.where((col == target) & mine, alone * _expm1(far) + (scale - alone) * p, scale * p)
    tl.store(z + row * v + col, g.to(z.dtype.element_ty), mask=inside)


def _block(v: int) -> int:
    return min(BLOCK, max(128, pow2(v)))


def warps(block: int) -> int:
    """Of a program that takes `block` logits at once."""
    return min(16, max(4, block // 512))


def _launched(z, column, top):
    out, picked = (z.new_empty(z.shape[0], dtype=torch.float32) for _ in range(2))
    block = _block(z.shape[1])
    launch(
        rows_kernel, z.shape[0], z, column, top, out, picked, z.shape[1], GIVEN=top is not None, BLOCK=block,
        num_warps=warps(block),
    )  # fmt: skip
    return out, picked


def triton_statistics(z, column):
    """`_statistics` by one kernel."""
    return _launched(z, column, None)


def triton_sums(z, column, top):
    """`_sums` by one kernel."""
    return _launched(z, column, top)


def triton_gradient(z, column, there, lse, every, own):
    """`_gradient` by one kernel, in place."""
    block = _block(z.shape[1])
    launch(
        gradient_kernel, (z.shape[0], -(-z.shape[1] // block)), z, column, there, lse, every, own, z.shape[1],
        BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return z


def triton_both(z, column, own):
    """`_both` by two kernels."""
    lse, picked = triton_statistics(z, column)
    there = torch.ones_like(column, dtype=torch.bool)
    return lse - picked, triton_gradient(z, column, there, lse, own, own)


TORCH = Rows(_statistics, _sums, _gradient, _both, True)
TRITON = Rows(triton_statistics, triton_sums, triton_gradient, triton_both, False)


def rows_for(x: torch.Tensor) -> Rows:
    """What a tensor of logits runs on its device."""
    narrow = x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return TRITON if HAVE and narrow and x.device.type == "cuda" else TORCH
