"""Philox 4x32-10 (Salmon et al., SC 2011), the counter-based generator, and whose words are whose.

A counter gives four words of 32 bits, those of the next elements of a tensor: where an element draws `words` of them
(1 or 2), k = 4 / words elements share a counter,

    counter = (block_lo, block_hi, op, step)        key = (seed_lo, seed_hi)
    block = index // k                              first word of an element: index % k * words

where index is the element's place in the *whole* tensor, row-major: the same bits however the tensor is split.

On a CPU the rounds run in numpy, whose products of uint64 are vector instructions (PyTorch's are not: twice the time),
in place and in chunks that stay in the cache; elsewhere in int64 tensors. A word of 32 bits stands in an int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
LOW = 0xFFFFFFFF
CHUNK, BUFFERS, ALIGN = 1 << 16, 6, 64
"""Counters of a chunk on a CPU; the buffers of its rounds; a chunk's length is rounded up, so that the functions of a
form see whole vectors and an element's value does not depend on where in a chunk it stands."""

Pieces = tuple[tuple[tuple[int, int, int], ...], ...]
"""Per dim, per factor: (start, local length, whole size)."""

Form = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""From the four words of counters, [n] int64 each, the k elements of each counter, [n] each; it may overwrite words."""


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


class _Rounds:
    """`philox4` in numpy, in place, for up to `CHUNK` counters at a time; c2 and c3 are numbers."""

    def __init__(self, counters: int, op: int, step: int, seed: int):
        self.size = -(-min(counters, CHUNK) // ALIGN) * ALIGN
        self.memory = torch.zeros(BUFFERS, self.size, dtype=torch.int64)
        self.c2, self.c3, self.key = op & LOW, step & LOW, (seed & LOW, (seed >> 32) & LOW)

    def __call__(self, blocks: torch.Tensor, big: bool) -> list[torch.Tensor]:
        """The four words of each block, [len(blocks) rounded up] int64; what is beyond len(blocks) is anything."""
        n = -(-len(blocks) // ALIGN) * ALIGN
        tensors = [row[:n] for row in self.memory]
        tensors[0][: len(blocks)] = blocks
        arrays = [t.numpy().view(np.uint64) for t in tensors]
        c0, c1 = arrays[0], 0
        if big:
            c1 = np.right_shift(c0, np.uint64(32), out=arrays[1])
            np.bitwise_and(c0, np.uint64(LOW), out=c0)
        words = self._rounds([c0, c1, self.c2, self.c3], arrays)
        place = {id(a): t for a, t in zip(arrays, tensors, strict=True)}
        return [place[id(w)] for w in words]

    def _rounds(self, c: list[Any], arrays: list[Any]) -> list[Any]:
        k0, k1 = self.key
        for _ in range(10):
            free = [a for a in arrays if not any(a is w for w in c)]
            high0, low0 = _half(c[0], M0, c[3], k1, free)
            high1, low1 = _half(c[2], M1, c[1], k0, free)
            c = [high1, low1, high0, low0]
            k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
        for low in (c[1], c[3]):
            np.bitwise_and(low, np.uint64(LOW), out=low)
        return c


def _half(word: Any, times: int, other: Any, key: int, free: list[Any]) -> tuple[Any, Any]:
    """(high word of word · times, ^ other ^ key, the product); numbers stay numbers, arrays are written in place."""
    if isinstance(word, int):
        product = word * times
        high = (product >> 32) ^ key
        if isinstance(other, int):
            return (high ^ other) & LOW, product & LOW
        mixed = np.bitwise_xor(other, np.uint64(high), out=other)
        return np.bitwise_and(mixed, np.uint64(LOW), out=mixed), product & LOW
    product = np.multiply(word, np.uint64(times), out=free.pop())
    high = np.right_shift(product, np.uint64(32), out=word)
    if isinstance(other, int):
        np.bitwise_xor(high, np.uint64(other ^ key), out=high)
    else:
        np.bitwise_xor(high, other, out=high)
        np.bitwise_xor(high, np.uint64(key), out=high)
    return np.bitwise_and(high, np.uint64(LOW), out=high), product


def local_shape(pieces: Pieces) -> tuple[int, ...]:
    """The shape of the local tensor."""
    return tuple(math.prod(length for _, length, _ in dim) for dim in pieces)


def whole_pieces(shape: tuple[int, ...]) -> Pieces:
    """The pieces of a tensor that is not split."""
    return tuple(((0, int(n), int(n)),) for n in shape)


def linear_index(pieces: Pieces, device: torch.device | str | None = None) -> torch.Tensor:
    """The place of each local element in the whole tensor, row-major; flat."""
    flat = merged([p for dim in pieces for p in dim])
    index = torch.zeros((), dtype=torch.int64, device=device)
    for start, length, size in flat:
        index = (index * size).unsqueeze(-1) + torch.arange(start, start + length, device=device)
    return index.reshape(-1)


def merged(flat: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same elements with whole factors taken together with the one before them."""
    out: list[tuple[int, int, int]] = []
    for start, length, size in flat:
        if out and length == size:
            before = out.pop()
            out.append((before[0] * size, before[1] * size, before[2] * size))
        else:
            out.append((start, length, size))
    return out


def runs(pieces: Pieces, k: int) -> list[tuple[int, int, int]] | None:
    """The local blocks of k elements as factors of the whole tensor's blocks, if the local elements, k at a time, are
    those of one counter: their innermost runs start and end with a block. The last block of all may be short."""
    flat = merged([p for dim in pieces for p in dim]) or [(0, 1, 1)]
    start, length, size = flat[-1]
    if len(flat) == 1 and length == size:
        return [(0, -(-length // k), -(-size // k))]
    return None if start % k or length % k or size % k else [*flat[:-1], (start // k, length // k, size // k)]


def elements(
    pieces: Pieces, seed: int, op: int, step: int, words: int, form: Form, dtype: torch.dtype, device: Any = None
) -> torch.Tensor:
    """The local tensor of `form`'s numbers, of which each element draws `words` words (1 or 2)."""
    k, shape = 4 // words, local_shape(pieces)
    device = torch.device("cpu" if device is None else device)
    out = torch.empty(math.prod(shape), dtype=dtype, device=device)
    if not out.numel():
        return out.reshape(shape)
    blocks = runs(pieces, k)
    index = linear_index(pieces if blocks is None else (tuple(blocks),), device)
    big = math.prod(n for dim in pieces for _, _, n in dim) > LOW * k
    here = type(out) is torch.Tensor and out.device.type == "cpu"  # a fake tensor has no memory for numpy
    draw = _Rounds(len(index), op, step, seed) if here else _elsewhere(op, step, seed)
    for start in range(0, len(index), CHUNK) if here else (0,):
        part = index[start : start + CHUNK] if here else index
        if blocks is None:
            made = form(draw(part >> k.bit_length() - 1, big))
            _chosen(out[start : start + len(part)], made, part & k - 1)
        else:
            _interleaved(out[start * k : (start + len(part)) * k], form(draw(part, big)))
    return out.reshape(shape)


def scratch(pieces: Pieces, words: int, form: int, cpu: bool) -> int:
    """Bytes that `elements` holds at most beside its result: the index, and per counter of a chunk the buffers of the
    rounds and `form` bytes of a form's values on their way."""
    k = 4 // words
    blocks = runs(pieces, k)
    flat = [p for dim in pieces for p in dim] if blocks is None else blocks
    n = math.prod(length for _, length, _ in flat)
    rounds = 8 * BUFFERS * -(-min(n, CHUNK) // ALIGN) * ALIGN if cpu else 8 * 9 * n
    return 8 * n + rounds + (form + (17 if blocks is None else 0)) * (min(n, CHUNK) if cpu else n)


def _elsewhere(op: int, step: int, seed: int) -> Callable[[torch.Tensor, bool], list[torch.Tensor]]:
    key = (seed & LOW, (seed >> 32) & LOW)
    return lambda blocks, big: list(
        philox4(blocks & LOW if big else blocks, blocks >> 32 if big else 0, op & LOW, step & LOW, *key)
    )


def _chosen(out: torch.Tensor, made: Sequence[torch.Tensor], place: torch.Tensor) -> None:
    """out[i] = made[place[i]][i]"""
    out.copy_(made[0][: len(out)])
    for i in range(1, len(made)):
        torch.where(place == i, made[i][: len(out)].to(out.dtype), out, out=out)


def _interleaved(out: torch.Tensor, made: Sequence[torch.Tensor]) -> None:
    """out[b k + i] = made[i][b]; the last block may be short."""
    k = len(made)
    whole = len(out) // k
    rows = out[: whole * k].view(whole, k)
    for i, x in enumerate(made):
        rows[:, i].copy_(x[:whole])
        if i < len(out) - whole * k:
            out[whole * k + i] = x[whole]


def element_words(
    pieces: Pieces, seed: int, op: int, step: int, words: int, device: Any = None
) -> list[torch.Tensor]:
    """The `words` words (1 or 2) of each local element, flat."""
    return [
        elements(pieces, seed, op, step, words, lambda w, i=i: w[i::words], torch.int64, device).reshape(-1)
        for i in range(words)
    ]


def element_bits(
    pieces: Pieces, seed: int, op: int, step: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """The first word of each local element, in the local tensor's shape."""
    return elements(pieces, seed, op, step, 1, lambda w: w, torch.int64, device)
