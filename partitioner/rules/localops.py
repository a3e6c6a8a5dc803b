"""What a rank runs in place of an op whose own local form would be wrong or fragile."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def mean_of(
    x: torch.Tensor, dims: Sequence[int], keepdim: bool, count: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """This rank's term of a mean over `count` elements of the whole tensor: `sum(x) / count`.

    Half precision is summed in float32, as `torch.mean` does.
    """
    out = dtype or x.dtype
    wide = torch.float32 if out in (torch.float16, torch.bfloat16) else out
    return (torch.sum(x, tuple(dims), keepdim, dtype=wide) / count).to(out)


def view_as_complex_of(x: torch.Tensor) -> torch.Tensor:
    """`view_as_complex` of a tensor of any strides."""
    return torch.view_as_complex(x.contiguous())


def view_dtype_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.view(dtype)` of a tensor of any strides."""
    return x.contiguous().view(dtype)


def as_strided_of(
    x: torch.Tensor, laid: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int | None
) -> torch.Tensor:
    """`as_strided` of x with the strides `laid`, those it had when the graph was captured."""
    return torch.as_strided(_laid_out(x, laid), size, stride, offset or 0)


def as_strided_scatter_of(
    x: torch.Tensor,
    src: torch.Tensor,
    laid: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None,
) -> torch.Tensor:
    """`as_strided_scatter` into x with the strides `laid`, those it had when the graph was captured."""
    return torch.as_strided_scatter(_laid_out(x, laid), src, size, stride, offset or 0)


def grouped_mm_of(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    shape: Sequence[int],
) -> torch.Tensor:
    """`_grouped_mm` of tensors of any strides and sizes, with a result of `shape`."""
    if a.numel() == 0 or b.numel() == 0:
        return a.new_zeros(tuple(shape), dtype=out_dtype)
    return torch.ops.aten._grouped_mm(_aligned(a), _aligned(b), offs, bias, out_dtype)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor with every stride but the unit one a multiple of 16 bytes, which grouped products ask for."""
    step = 16 // x.element_size()
    unit = -1 if x.stride(-1) == 1 else -2
    others = [s for i, s in enumerate(x.stride()) if i != x.dim() + unit]
    if x.stride(unit) == 1 and all(s % step == 0 and s > 0 for s in others):
        return x
    columns = x.shape[-1]
    room = x.new_empty((*x.shape[:-1], -(-columns // step) * step))
    return room.narrow(-1, 0, columns).copy_(x)


def _laid_out(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    if x.stride() == tuple(stride) and x.storage_offset() == 0:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
