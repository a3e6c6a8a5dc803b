"""Dropout with what stands around it, drawn by element: y = residual + mask ∘ (x + bias) / (1 - p).

The mask is that of `random.dropout`: word `index % 4` of Philox counter (index // 4, op, step) with key `seed`, kept
where it is below `random.keep_below(p)`. A program makes the numbers of whole counters where the local runs are whole
counters (`philox.runs`); else each element makes its own counter. The place of an element follows from at most
`LEVELS` factors: (start, length, size) each, innermost last.
"""

from __future__ import annotations

import math

import torch

from .philox import Pieces, local_shape, merged, runs
from .tri import HAVE, constexpr, jit, launch, tl

LEVELS = 3
BLOCK = 1024
"""Elements of a program."""


@jit
def _place(i, s0, s1, l1, n1, s2, l2, n2):
    """The place in the whole tensor of the local element (or block) i: three factors, innermost last."""
    inner, rest = i % l2, i // l2
    return ((s0 + rest // l1) * n1 + s1 + rest % l1) * n2 + s2 + inner


@jit(do_not_specialize=["below", "seed", "op", "step", "s0", "s1", "s2"])
def dropout_kernel(
    x, bias, residual, y, mask, n, width, scale, below, seed, op, step, s0, s1, l1, n1, s2, l2, n2,
    BIAS: constexpr, RESIDUAL: constexpr, TOGETHER: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """TOGETHER: the factors are those of blocks of four elements."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    if TOGETHER:
        block = _place(first // 4 + tl.arange(0, BLOCK // 4), s0, s1, l1, n1, s2, l2, n2)
    else:
        place = _place(at, s0, s1, l1, n1, s2, l2, n2)
        block = place // 4
    low, high = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, high, (low * 0 + op).to(tl.uint32), (low * 0 + step).to(tl.uint32))
    if TOGETHER:
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))
    else:
        which = place % 4
        word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    keep = word.to(tl.int64) < below
    there = at < n
    v = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + at % width, mask=there, other=0.0).to(tl.float32)
    v = tl.where(keep, v * scale, v * 0.0)
    if RESIDUAL:
        v += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, v.to(y.dtype.element_ty), mask=there)
    tl.store(mask + at, keep, mask=there)


def levels(pieces: Pieces) -> tuple[bool, list[int]] | None:
    """(whether in blocks of four, start, length and size of three factors, of the first its start alone), or None
    where there are more factors."""
    blocks = runs(pieces, 4)
    flat = merged([p for dim in pieces for p in dim]) if blocks is None else blocks
    if len(flat) > LEVELS:
        return None
    padded = [(0, 1, 1)] * (LEVELS - len(flat)) + list(flat)
    return blocks is not None, [v for level in padded for v in level][:1] + [v for level in padded[1:] for v in level]


def fits(x: torch.Tensor, pieces: Pieces) -> bool:
    """Whether the kernel takes such a call."""
    narrow = x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return HAVE and narrow and levels(pieces) is not None


def triton_dropout(
    x: torch.Tensor, p: float, below: int, seed: int, op: int, step: int, pieces: Pieces,
    bias: torch.Tensor | None = None, residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(residual + mask ∘ (x + bias) / (1 - p), mask), 0 < p < 1.

    Args:
        x: any strides, of the local shape of `pieces`. bias: [last dim of x] or None. residual: like x, or None.
        below: `random.keep_below(p)`.
    """
    found = levels(pieces)
    assert found is not None, pieces
    shape = local_shape(pieces)
    together, factors = found
    y, mask = x.new_empty(shape), torch.empty(shape, dtype=torch.bool, device=x.device)
    n = math.prod(shape)
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    signed = low | high << 32
    launch(
        dropout_kernel, -(-n // BLOCK), x.contiguous(), None if bias is None else bias.contiguous(),
        None if residual is None else residual.contiguous(), y, mask, n, shape[-1] if shape else 1, 1.0 / (1.0 - p),
        below, signed - (1 << 64) if signed >> 63 else signed, op, step, *factors,
        BIAS=bias is not None, RESIDUAL=residual is not None, TOGETHER=together, BLOCK=BLOCK,
    )  # fmt: skip
    return y, mask
