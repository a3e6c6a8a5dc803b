"""Philox 4x32-10 (Salmon et al., SC 2011), the counter-based generator, and whose words are whose.

A counter gives four words of 32 bits, those of the next elements of a tensor: where an element draws `words` of them
(1 or 2), k = 4 / words elements share a counter,

    counter = (block_lo, block_hi, op, step)        key = (seed_lo, seed_hi)
    block = index // k                              first word of an element: index % k * words

where index is the element's place in the *whole* tensor, row-major: the same bits however the tensor is split.

On a CPU the rounds run in numpy, whose products of uint64 are vector instructions (PyTorch's are not: twice the time),
in place and in chunks that stay in the cache, and a word is a uint32; elsewhere, and beyond 2^32 counters, they run in
int64 tensors, and a word of 32 bits stands in an int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
LOW = 0xFFFFFFFF
CHUNK, BUFFERS, ALIGN = 1 << 14, 6, 64
"""Counters of a chunk on a CPU; int64 that its rounds hold for a counter; a chunk's length is rounded up, so that the
functions of a form see whole vectors and an element's value does not depend on where in a chunk it stands."""

Pieces = tuple[tuple[tuple[int, int, int], ...], ...]
"""Per dim, per factor: (start, local length, whole size)."""

Words = Any
"""The words of counters one after another, four each, flat: a uint32 array on a CPU, an int64 tensor elsewhere."""

Form = Callable[[Words, torch.Tensor], Any]
"""Writes the elements, [n] each, k for each counter of its words, which it may overwrite."""


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
    """`philox4` in numpy for up to `CHUNK` counters at a time, in place, in four rows.

    A product of 64 bits is written over the word it was made of, and its high word taken together with the low word of
    the same product a round ago, over that: c1 and c3 are never apart from the products whose low words they are.
    High meets low without a shift: read as uint32, a product's high word stands one place behind its low word.
    """

    def __init__(self, counters: int, op: int, step: int, seed: int):
        self.size = n = _even(counters)
        self.memory = torch.empty(BUFFERS * n, dtype=torch.int64)
        self.op, self.step = op & LOW, step & LOW
        self.keys = [((seed + r * W0) & LOW, ((seed >> 32) + r * W1) & LOW) for r in range(10)]
        memory = self.memory.numpy().view(np.uint64)
        self.pairs, self.words = (memory[: 2 * n], memory[2 * n : 4 * n]), memory[4 * n :]
        self.rows = [_Row(memory[i * n : (i + 1) * n]) for i in range(4)]

    def __call__(self, blocks: torch.Tensor) -> Words:
        """The words of each block, four of each of `size`; what is beyond len(blocks) is anything."""
        c0, c2, p0, p1 = self._two_rounds(blocks.numpy().view(np.uint64))
        for r, (k0, k1) in enumerate(self.keys[2:]):
            np.multiply(c0.whole, TIMES_0, out=c0.whole)
            np.multiply(c2.whole, TIMES_1, out=c2.whole)
            np.bitwise_xor(c0.high, p0.low, out=p0.low)
            np.bitwise_xor(c2.high, p1.low, out=p1.low)
            np.bitwise_xor(p1.whole, _number(k0), out=p1.whole)
            np.bitwise_xor(p0.whole, _number(k1), out=p0.whole)
            np.bitwise_and(self.pairs[r % 2 - 1], MASK, out=self.pairs[r % 2 - 1])
            c0, c2, p0, p1 = p1, p0, c0, c2
        for word, product, out in ((c0, p1, self.words[::2]), (c2, p0, self.words[1::2])):
            np.left_shift(product.whole, HALF, out=product.whole)
            np.bitwise_or(word.whole, product.whole, out=out)
        return self.words.view(np.uint32)

    def _two_rounds(self, blocks: Any) -> list[_Row]:
        """Rounds in which one product, of the op or of a number made of it, is the same for all counters."""
        (k0, k1), (l0, l1) = self.keys[:2]
        c0, c2, p0, p1 = self.rows
        other = self.op * M1
        first = M0 * ((other >> 32) ^ k0)
        p0.whole[: len(blocks)] = blocks
        np.multiply(p0.whole, TIMES_0, out=p0.whole)
        np.right_shift(p0.whole, HALF, out=p1.whole)
        np.bitwise_xor(p1.whole, _number(self.step ^ k1), out=p1.whole)
        np.multiply(p1.whole, TIMES_1, out=p1.whole)
        np.right_shift(p1.whole, HALF, out=c0.whole)
        np.bitwise_xor(c0.whole, _number(other & LOW ^ l0), out=c0.whole)
        np.bitwise_and(p0.whole, MASK, out=c2.whole)
        np.bitwise_xor(c2.whole, _number(first >> 32 ^ l1), out=c2.whole)
        p0.whole[:] = first & LOW
        return [c0, c2, p0, p1]


def _even(counters: int) -> int:
    """The counters of each chunk: chunks are equally long."""
    chunks = -(-counters // CHUNK)
    return -(-counters // (chunks * ALIGN)) * ALIGN if chunks else 0


class _Row:
    """Numbers of 64 bits; their high words and their low words as such of 32 bits, both the whole row but for one."""

    def __init__(self, whole: Any):
        self.whole, self.high, self.low = whole, whole.view(np.uint32)[1:], whole.view(np.uint32)[:-1]


def _number(x: int) -> Any:
    return np.array(x, dtype=np.uint64)


HALF, MASK, TIMES_0, TIMES_1 = map(_number, (32, LOW, M0, M1))


def local_shape(pieces: Pieces) -> tuple[int, ...]:
    """The shape of the local tensor."""
    return tuple(math.prod(length for _, length, _ in dim) for dim in pieces)


def whole_pieces(shape: tuple[int, ...]) -> Pieces:
    """The pieces of a tensor that is not split."""
    return tuple(((0, int(n), int(n)),) for n in shape)


def linear_index(pieces: Pieces, device: torch.device | str | None = None) -> torch.Tensor:
    """The place of each local element in the whole tensor, row-major; flat."""
    return _places([p for dim in pieces for p in dim], device)(0, math.prod(local_shape(pieces)))


def _places(
    factors: list[tuple[int, int, int]], device: torch.device | str | None
) -> Callable[[int, int], torch.Tensor]:
    """From `start` and `stop`, the places of the local elements from the one to the other."""
    flat = merged(factors)
    if len(flat) == 1:
        first = flat[0][0]
        return lambda start, stop: torch.arange(first + start, first + stop, device=device)
    index = torch.zeros((), dtype=torch.int64, device=device)
    for start, length, size in flat:
        index = (index * size).unsqueeze(-1) + torch.arange(start, start + length, device=device)
    index = index.reshape(-1)
    return lambda start, stop: index[start:stop]


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
    flat = [p for dim in pieces for p in dim] if blocks is None else blocks
    n = math.prod(length for _, length, _ in flat)
    big = math.prod(size for _, _, size in flat) > LOW * (k if blocks is None else 1)
    # a fake tensor has no memory for numpy
    here = type(out) is torch.Tensor and out.device.type == "cpu" and not big
    draw = _Rounds(n, op, step, seed) if here else _elsewhere(op, step, seed, big)
    index, chunk = _places(flat, device), draw.size if isinstance(draw, _Rounds) else n
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        part = index(start, stop)
        place = out[start:stop] if blocks is None else out[start * k : stop * k]
        drawn = draw(part if blocks is not None else part >> k.bit_length() - 1)
        made = place if len(place) == len(drawn) // words else place.new_empty(len(drawn) // words)
        form(drawn, made)
        if blocks is None:
            chosen = (part & k - 1).add_(torch.arange(0, k * len(part), k, device=device))
            torch.index_select(made, 0, chosen, out=place)
        elif made is not place:
            place.copy_(made[: len(place)])
    return out.reshape(shape)


def scratch(pieces: Pieces, words: int, form: int, cpu: bool) -> int:
    """Bytes that `elements` holds at most beside its result: the index, and per counter of a chunk what the rounds hold
    and `form` bytes of a form's values on their way."""
    k = 4 // words
    blocks = runs(pieces, k)
    flat = [p for dim in pieces for p in dim] if blocks is None else blocks
    n = math.prod(length for _, length, _ in flat)
    chunk = _even(n) if cpu else n
    index = chunk if len(merged(flat)) == 1 else n
    rounds = 8 * (BUFFERS if cpu else 13) * chunk
    return 8 * index + rounds + (form + (56 if blocks is None else 0)) * chunk


def _elsewhere(op: int, step: int, seed: int, big: bool) -> Callable[[torch.Tensor], Words]:
    key = (seed & LOW, (seed >> 32) & LOW)

    def draw(blocks: torch.Tensor) -> torch.Tensor:
        low, high = (blocks & LOW, blocks >> 32) if big else (blocks, 0)
        return torch.stack(philox4(low, high, op & LOW, step & LOW, *key), -1).reshape(-1)

    return draw


def put(out: torch.Tensor, values: Any) -> torch.Tensor:
    """out = values, an array or a tensor of any dtype; returns it."""
    if isinstance(values, np.ndarray):
        np.copyto(out.numpy(), values, casting="unsafe")
        return out
    return out.copy_(values)


def wide(words: Words) -> torch.Tensor:
    """Words as int64."""
    return torch.from_numpy(words.astype(np.int64)) if isinstance(words, np.ndarray) else words


def element_words(
    pieces: Pieces, seed: int, op: int, step: int, words: int, device: Any = None
) -> list[torch.Tensor]:
    """The `words` words (1 or 2) of each local element, flat."""
    return [
        elements(
            pieces, seed, op, step, words, lambda w, out, i=i: put(out, w[i::words]), torch.int64, device
        ).reshape(-1)
        for i in range(words)
    ]


def element_bits(
    pieces: Pieces, seed: int, op: int, step: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """The first word of each local element, in the local tensor's shape."""
    return elements(pieces, seed, op, step, 1, lambda w, out: put(out, w), torch.int64, device)
