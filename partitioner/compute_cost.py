"""Seconds of one call on one device: a roofline, with matrix products rounded up to tiles.

    seconds = max(flops * tiles / (efficiency * peak of the dtype), bytes / (memory_share * memory_bandwidth))
    tiles   = product over m, n, k of  ceil(size / tile) * tile / size

(roofline: Williams, Waterman, Patterson, 2009; tiles: NVIDIA, "Matrix Multiplication Background User's Guide", where a
product off the tile grid pays for the whole tile). A dim shorter than a tile is computed in a smaller one, down to an
eighth: libraries carry kernels for both.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np
import torch

from .hardware import Device

Dtype = torch.dtype | str
Sizes = tuple[Any, Any, Any]
"""m, n, k of a matrix product, integers or arrays of them."""


@overload
def compute_seconds(
    flops: float, nbytes: float, dtype: Dtype, device: Device, matmul_shape: tuple[int, int, int] | None = None
) -> float: ...
@overload
def compute_seconds(
    flops: Any, nbytes: Any, dtype: Dtype, device: Device, matmul_shape: Sizes | None = None
) -> Any: ...
def compute_seconds(flops: Any, nbytes: Any, dtype: Dtype, device: Device, matmul_shape: Sizes | None = None) -> Any:
    """Seconds of a call.

    Args:
        flops: of the local call; a number or an array.
        nbytes: that it reads and writes; a number or an array.
        dtype: of the product; "tf32" where torch may round float32.
        matmul_shape: local (m, n, k), numbers or arrays, where the call is one matrix product (or a batch of them).
    """
    if matmul_shape is not None:
        for size, tile in zip(matmul_shape, device.tile, strict=True):
            flops = flops * (_rounding_of_each(size, tile) if isinstance(size, np.ndarray) else _rounding(size, tile))
    busy = flops / (device.peak(dtype) * device.efficiency)
    moved = nbytes / (device.memory_bandwidth * device.memory_share)
    if isinstance(busy, np.ndarray) or isinstance(moved, np.ndarray):
        return np.maximum(busy, moved)
    return busy if busy > moved else moved


def _rounding(size: int, tile: int) -> float:
    """ceil(size / tile) * tile / size, with a half, quarter or eighth of the tile where the size fits into it."""
    if size % tile == 0 or size <= 0:
        return 1.0
    if size < tile:
        size_of = max(1, tile // 8)
        while size_of < size:
            size_of *= 2
        return size_of / size
    return -(-size // tile) * tile / size


def _rounding_of_each(sizes: np.ndarray, tile: int) -> np.ndarray:
    """`_rounding` of an array."""
    sizes = np.maximum(sizes, 1)
    least = max(1, tile // 8)
    small = least * np.exp2(np.ceil(np.log2(np.maximum(sizes / least, 1))))
    return np.where(sizes < tile, small, np.ceil(sizes / tile) * tile) / sizes
