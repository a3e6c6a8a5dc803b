"""Random small programs: chains of ops on dims that agree, disagree, do not divide; drawn by seed.

`draw(seed)` gives a model and its input. Every op takes one or two of the last tensors made, so that views, ranges and
reductions meet in ways that no model of the zoo has them meet in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (2, 3, 4, 4, 6, 6, 8, 8, 9, 10, 12)
MOST = 4000
"""Elements of a tensor that further ops may read."""

Pool = Sequence[Tensor]
Step = Callable[[Pool], Tensor]
Drawn = Callable[[Tensor], Tensor]
OPS: list[Callable[[random.Random, Tensor], Drawn | None]] = []
"""Ops of one tensor: each draws its arguments for a tensor, and says what it does; None where it does not fit."""


def op(draws: Callable[[random.Random, Tensor, int], Drawn | None]) -> None:
    """An op along a dim, drawn too."""
    OPS.append(lambda r, x: draws(r, x, r.randrange(x.dim())) if x.dim() else None)


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def reshaped(r: random.Random, x: Tensor) -> Drawn:
    a = r.choice(divisors(x.numel()))
    b = r.choice(divisors(x.numel() // a))
    shape = [n for n in (a, b, x.numel() // a // b) if n > 1 or r.random() < 0.1]
    return lambda t: t.reshape(shape or [1])


def merged(r: random.Random, x: Tensor) -> Drawn | None:
    if x.dim() < 2:
        return None
    j = r.randrange(x.dim() - 1)
    return lambda t: t.flatten(j, j + 1)


def lower(r: random.Random, x: Tensor) -> Drawn | None:
    k = r.choice([-1, 0, 1])
    return None if x.dim() < 2 else lambda t: t.tril(k)


def permuted(r: random.Random, x: Tensor) -> Drawn:
    order = r.sample(range(x.dim()), x.dim())
    return lambda t: t.permute(order)


def repeated(r: random.Random, x: Tensor) -> Drawn:
    times = [r.choice([1, 1, 2]) for _ in range(x.dim())]
    return lambda t: t.repeat(times) if times else t


def expanded(r: random.Random, x: Tensor) -> Drawn:
    j, n = r.randrange(x.dim() + 1), r.choice([2, 3])
    return lambda t: t.unsqueeze(j).expand(*t.shape[:j], n, *t.shape[j:])


def convolved(r: random.Random, x: Tensor) -> Drawn | None:
    c, k, stride, pad = x.shape[1] if x.dim() == 3 else 0, r.choice([1, 3]), r.choice([1, 2]), r.choice([0, 1])
    if not 0 < c <= 8 or x.shape[2] < 3:
        return None
    return lambda t: F.conv1d(t, ramp(t, c, c, k), stride=stride, padding=pad)


def ramp(like: Tensor, *shape: int) -> Tensor:
    """Values of their own for every element."""
    return torch.linspace(-1, 1, like.new_empty(shape).numel(), dtype=like.dtype).view(shape)


OPS += [reshaped, reshaped, merged, permuted, repeated, expanded, convolved]
OPS += [
    lambda r, x: lambda t: F.gelu(t),
    lambda r, x: lambda t: t.squeeze(),
    lambda r, x: lambda t: t.masked_fill(t > 0.3, 0.1),
    lower,
    lambda r, x: None if x.dim() < 2 else lambda t: t @ t.transpose(-1, -2) * 0.1,
    lambda r, x: None if x.dim() < 2 else lambda t: torch.einsum("...ab,...ac->...bc", t, t) * 0.1,
    lambda r, x: None if x.dim() < 1 else lambda t: F.layer_norm(t, t.shape[-1:]),
]


@op
def unflattened(r: random.Random, x: Tensor, j: int) -> Drawn:
    a = r.choice(divisors(x.shape[j]))
    return lambda t: t.unflatten(j, (a, x.shape[j] // a))


@op
def ranged(r: random.Random, x: Tensor, j: int) -> Drawn | None:
    if x.shape[j] < 2:
        return None
    start, step = r.randrange(x.shape[j] - 1), r.choice([1, 1, 1, 2, 3])
    end = r.randrange(start + 1, x.shape[j] + 1)
    return lambda t: t[(slice(None),) * j + (slice(start, end, step),)]


OPS.append(OPS[-1])


@op
def split(r: random.Random, x: Tensor, j: int) -> Drawn | None:
    """One part of two: the other one is read by nothing."""
    if x.shape[j] < 2:
        return None
    first, which = r.randrange(1, x.shape[j]), r.randrange(2)
    return lambda t: t.split([first, t.shape[j] - first], j)[which]


@op
def rotated(r: random.Random, x: Tensor, j: int) -> Drawn | None:
    def halves(t: Tensor) -> Tensor:
        low, high = t.chunk(2, j)
        return torch.cat([-high, low], j)

    return None if x.shape[j] % 2 else halves


@op
def shifted(r: random.Random, x: Tensor, j: int) -> Drawn | None:
    n = x.shape[j]
    return None if n < 3 else lambda t: t.narrow(j, 0, n - 1) + t.narrow(j, 1, n - 1)


@op
def picked(r: random.Random, x: Tensor, j: int) -> Drawn:
    rows = [r.randrange(x.shape[j]) for _ in range(r.randrange(1, 6))]
    return lambda t: t.index_select(j, torch.tensor(rows))


@op
def padded(r: random.Random, x: Tensor, j: int) -> Drawn:
    before, after = r.randrange(3), r.randrange(3)
    return lambda t: F.pad(t, [0, 0] * (t.dim() - 1 - j) + [before, after])


@op
def along(r: random.Random, x: Tensor, j: int) -> Drawn | None:
    keep, shift = r.random() < 0.5, r.randrange(-3, 4)
    one: list[Drawn] = [
        lambda t: t.diff(dim=j),
        lambda t: t.roll(shift, j),
        lambda t: t.flip(j),
        lambda t: t.softmax(j),
        lambda t: t.cumsum(j),
        lambda t: t.sort(j)[0],
        lambda t: t.repeat_interleave(2, j),
        lambda t: t.select(j, shift % t.shape[j]),
        lambda t: t.sum(j, keepdim=keep),
        lambda t: t.mean(j, keepdim=keep),
        lambda t: t.amax(j, keepdim=keep),
        lambda t: t.logsumexp(j, keepdim=keep),
        lambda t: t.var(j, keepdim=keep),
        lambda t: (t * 0.3 + 1).prod(j, keepdim=keep),
    ]
    return None if x.shape[j] < 2 else r.choice(one)


OPS += [OPS[-1]] * 8
BOTH: list[Callable[[Tensor, Tensor, int], Tensor]] = [
    lambda a, b, j: a * b * 0.5,
    lambda a, b, j: a + b,
    lambda a, b, j: a @ b * 0.3,
    lambda a, b, j: torch.cat([a, b], j),
    lambda a, b, j: torch.stack([a, b], j),
    lambda a, b, j: torch.where(b > 0, a, b * 2),
]


class Program(nn.Module):
    """The steps of a drawn program; its loss reads every tensor that no step reads."""

    def __init__(self, values: Sequence[Tensor]):
        super().__init__()
        self.given = nn.ParameterList([nn.Parameter(v) for v in values])
        self.steps: list[tuple[Step, tuple[int, ...]]] = []

    def forward(self, x: Tensor) -> Tensor:
        pool = [x, *self.given]
        for step, _ in self.steps:
            pool.append(step(pool))
        read = {i for _, reads in self.steps for i in reads}
        ends = [t for i, t in enumerate(pool) if i not in read]
        return sum((t * t).mean() + (t * (ramp(t, *t.shape) + 1.2)).sum() * 0.1 for t in ends)  # type: ignore[return-value]


def draw(seed: int) -> tuple[Program, Tensor]:
    """A program of 3 to 9 steps with one or two parameters, and its input."""
    r, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    dims = [r.choice(SIZES) for _ in range(r.choice([2, 3, 3, 4]))]
    while torch.Size(dims).numel() > MOST // 3:
        dims.pop()
    shapes = [r.choice([[dims[-1], r.choice(SIZES)], dims[1:], dims[-1:]]) for _ in range(r.choice([1, 2]))]
    model = Program([torch.randn(s, generator=numbers) for s in shapes])
    x = torch.randn(dims, generator=numbers)
    pool: list[Tensor] = [x, *(p.detach() for p in model.given)]
    wanted = r.choice([3, 5, 7, 9])
    for _ in range(200):
        if len(model.steps) == wanted:
            break
        if (drawn := _step(r, pool)) is not None:
            model.steps.append(drawn[:2])
            pool.append(drawn[2])
    return model, x


def _step(r: random.Random, pool: Pool) -> tuple[Step, tuple[int, ...], Tensor] | None:
    """A step that runs on these tensors, what it reads, and what it makes."""
    i = r.randrange(max(0, len(pool) - 4), len(pool))
    if r.random() < 0.25:
        both, k, j = r.choice(BOTH), r.randrange(len(pool)), r.randrange(max(1, pool[i].dim()))
        step, reads = (lambda p: both(p[i], p[k], j)), (i, k)
    else:
        one = r.choice(OPS)(r, pool[i])
        if one is None:
            return None
        step, reads = (lambda p: one(p[i])), (i,)
    try:
        made = step(pool)
    except (RuntimeError, IndexError):
        return None  # the tensors do not fit each other
    return (step, reads, made) if 0 < made.numel() <= MOST else None
