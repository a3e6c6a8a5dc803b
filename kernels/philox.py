"""Philox 4x32-10 (Salmon et al., SC 2011), the counter-based generator, in int64 arithmetic.

A word of 32 bits stands in an int64. A counter gives four words, those of the next elements of a tensor: where an
element draws `words` of them (1 or 2), k = 4 / words elements share a counter,

    counter = (block_lo, block_hi, op, step)        key = (seed_lo, seed_hi)
    block = index // k                              first word of an element: index % k * words

where index is the element's place in the *whole* tensor, row-major: the same bits however the tensor is split.
"""

from __future__ import annotations

import math
from typing import Any

import torch

M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
LOW = 0xFFFFFFFF
CHUNK = 1 << 15

Pieces = tuple[tuple[tuple[int, int, int], ...], ...]
"""Per dim, per factor: (start, local length, whole size)."""


def philox4(c0: Any, c1: Any, c2: Any, c3: Any, k0: int, k1: int) -> tuple[Any, Any, Any, Any]:
    """The four words of a counter; each part an int64 tensor or an int below 2^32.

    An int64 product wraps modulo 2^64, so its bits are those of the unsigned product; the upper halves of c1 and c3
    are left standing inside the loop and masked off where they are used.
    """
    for _ in range(10):
        p0, p1 = c0 * M0, c2 * M1
        c0, c2 = _mix(p1, c1, k0), _mix(p0, c3, k1)
        c1, c3 = _low(p1), _low(p0)
        k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
    return c0, c1 & LOW, c2, c3 & LOW


def _mix(product: Any, word: Any, key: int) -> Any:
    """High word of a product ^ word ^ key."""
    if isinstance(product, int):
        return ((product >> 32) ^ key ^ word) & LOW
    high = product >> 32
    mixed = high.bitwise_xor_(word ^ key) if isinstance(word, int) else high.bitwise_xor_(word).bitwise_xor_(key)
    return mixed.bitwise_and_(LOW)


def _low(product: Any) -> Any:
    return product & LOW if isinstance(product, int) else product


def philox(counter_lo: Any, counter_hi: Any, c2: Any, c3: Any, key_lo: int, key_hi: int) -> Any:
    """The first word of a counter."""
    return philox4(counter_lo, counter_hi, c2, c3, key_lo, key_hi)[0]


def local_shape(pieces: Pieces) -> tuple[int, ...]:
    """The shape of the local tensor."""
    return tuple(math.prod(length for _, length, _ in dim) for dim in pieces)


def whole_pieces(shape: tuple[int, ...]) -> Pieces:
    """The pieces of a tensor that is not split."""
    return tuple(((0, int(n), int(n)),) for n in shape)


def linear_index(pieces: Pieces, device: torch.device | str | None = None) -> torch.Tensor:
    """The place of each local element in the whole tensor, row-major; flat."""
    flat = [p for dim in pieces for p in dim]
    index = torch.zeros((), dtype=torch.int64, device=device)
    for start, length, size in flat:
        index = (index * size).unsqueeze(-1) + torch.arange(start, start + length, device=device)
    return index.reshape(-1)


def element_words(
    pieces: Pieces, seed: int, op: int, step: int, words: int, device: torch.device | str | None = None
) -> list[torch.Tensor]:
    """The `words` words (1 or 2) of each local element, flat; drawn by chunks that stay in the cache."""
    index, k = linear_index(pieces, device), 4 // words
    together = starts_blocks(pieces, k)
    big = math.prod(n for dim in pieces for _, _, n in dim) > LOW * k
    key = (seed & LOW, (seed >> 32) & LOW)
    size = CHUNK * k if together else CHUNK
    parts = []
    for part in index.split(size) if index.device.type == "cpu" else (index,):
        block = (part[::k] if together else part) >> k.bit_length() - 1
        high = block >> 32 if big else 0
        drawn = philox4(block & LOW if big else block, high, op & LOW, step & LOW, *key)
        shared = [torch.stack(drawn[i::words], -1) for i in range(words)]  # [blocks, k]
        if together:
            parts.append([w.reshape(-1)[: len(part)] for w in shared])
        else:
            place = (part & k - 1).unsqueeze(-1)
            parts.append([w.gather(-1, place).squeeze(-1) for w in shared])
    return [torch.cat(list(same)) for same in zip(*parts, strict=True)]


def starts_blocks(pieces: Pieces, k: int) -> bool:
    """Whether the local elements, k at a time, are those of one counter: their runs start and end with a block.

    What lies behind the innermost factor that is split is whole, a run; the last block of a whole tensor may be short.
    """
    run = 1
    for start, length, size in reversed([p for dim in pieces for p in dim]):
        if length != size:
            return not any(n * run % k for n in (start, length, size))
        run *= size
    return True


def element_bits(
    pieces: Pieces, seed: int, op: int, step: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """The first word of each local element, in the local tensor's shape."""
    return element_words(pieces, seed, op, step, 1, device)[0].reshape(local_shape(pieces))
