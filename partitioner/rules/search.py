"""The proof of a rule run in reverse: try each split of an op's operands and see what puts its outputs together.

Runs in a child of `sandbox`. Splits are tried on small tensors, on 2 and 3 parts and two sets of values; what was found
is then proved as rules written by hand are, on sizes near those of the call too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..compat import fake_mode
from ..layout import piece
from .found import CODES, NONE, SAME, Factor, Found
from .proof import share
from .samples import HALF, KINDS, SMALL, Sizes, ceilings, elements, sample, scaled, shrunk
from .sandbox import Attempt
from .split import Call

MANY = 1 << 20
"""Operands of more elements are not tried as they are."""
COMBINATIONS = 600
"""Ways to split the operands together that are tried, of each size."""
Combination = tuple[int | None, ...]


@dataclass(frozen=True)
class Lab:
    """An op that runs on small random tensors.

    Attributes:
        sizes: the size tried for each size of the call.
        widen: half floats are tried as float32.
        high: where integer values end.
    """

    call: Call
    sizes: Sizes
    widen: bool
    high: int
    made: dict[str, Call] = field(default_factory=dict, repr=False, compare=False)

    def real(self, kind: str = "signed") -> Call:
        """The call on small random tensors, with what it gives."""
        if kind not in self.made:
            self.made[kind] = self.sized(self.sizes, kind)
        return self.made[kind]

    def sized(self, sizes: Sizes, kind: str) -> Call:
        """The call on random tensors of other sizes, with what it gives."""
        args, kwargs = sample(self.call, sizes, kind, self.high, self.widen)
        args_given, kwargs_given = _copied((args, kwargs))
        return Call(self.call.target, args, kwargs, self.call.target(*args_given, **kwargs_given))

    @property
    def tolerance(self) -> float:
        half = any(t.dtype in HALF for t in self.call.operands)
        return 5e-2 if half and not self.widen else 1e-4


def open_lab(call: Call, attempt: Attempt) -> Lab | str:
    """Sizes and values on which the op runs; or why there are none."""
    tried: list[Sizes] = []
    halves = any(t.dtype in HALF for t in call.operands)
    own = {n: n for t in call.operands for n in t.shape}
    for sizes in (shrunk(call, 5), shrunk(call, 12, 16), scaled(call), own):
        if sizes in tried or elements(call, sizes) > MANY:
            continue
        tried.append(sizes)
        for widen, high in itertools.product([True, False] if halves else [False], ceilings(call, sizes)):
            lab = Lab(call, sizes, widen, high)
            verdict = attempt(f"whole {len(tried)} {widen} {high}", lambda lab=lab: _examined(lab))
            if verdict == "":
                return lab
            if verdict is not None:
                return verdict
    return "it does not run on random CPU tensors" if tried else "its operands are too large to try it"


def _examined(lab: Lab) -> str | None:
    """Why the op cannot be split; "" where it may be; None where it may run on other sizes or values."""
    finite = False
    for kind in KINDS[:2]:
        call = lab.real(kind)
        leaves, spec = tree_flatten(_copied((call.args, call.kwargs)))
        args, kwargs = tree_unflatten(leaves, spec)
        torch.manual_seed(7)
        again = Call(call.target, args, kwargs, call.target(*args, **kwargs))
        if not all(close(a, b, 1e-6) for a, b in zip(call.operands, again.operands, strict=True)):
            return "it writes to its operands"
        if not all(close(a, b, 1e-6) for a, b in zip(call.outputs, again.outputs, strict=True)):
            return "its values are random"
        if not _alike(call, lab):
            return None
        finite |= all(bool(o.isfinite().any()) for o in call.outputs if isinstance(o, torch.Tensor) and o.numel())
    return "" if finite else None


def _alike(call: Call, lab: Lab) -> bool:
    """The op gives what it gave when it was captured, as far as the smaller sizes let one see."""
    same = all(a == b for a, b in lab.sizes.items())
    if len(call.outputs) != len(lab.call.outputs):
        return False
    for got, want in zip(call.outputs, lab.call.outputs, strict=True):
        if isinstance(got, torch.Tensor) != isinstance(want, torch.Tensor):
            return False
        if isinstance(got, torch.Tensor) and (got.dim() != want.dim() or (same and got.shape != want.shape)):
            return False
        if isinstance(got, torch.Tensor) and not lab.widen and got.dtype != want.dtype:
            return False
    return True


def search(lab: Lab, attempt: Attempt) -> Found:
    """Factors, those of fewer operands first, and operands that may be partial sums."""
    factors: list[Factor] = []
    for combination in combinations(lab.call):
        if any(d is not None and d == f.dims[i] for f in factors for i, d in enumerate(combination)):
            continue
        outs = attempt(f"split {combination}", lambda c=combination: outcome(lab, c))
        taken = [(j, f.outs[j]) for f in factors for j in range(len(f.outs)) if f.outs[j].isdigit()]
        if outs is not None and not any((j, code) in taken for j, code in enumerate(outs)):
            factors.append(Factor(combination, tuple(outs)))
    return Found(tuple(factors), tuple(_linear(lab, attempt)))


def combinations(call: Call) -> Iterator[Combination]:
    """Per operand a dim or None, the dims of one size; few operands before many, then every operand at once."""
    for size in sorted({n for t in call.operands for n in t.shape if n > 1}):
        options = [[None, *(d for d in range(t.dim()) if t.shape[d] == size)] for t in call.operands]
        holders = [i for i, o in enumerate(options) if len(o) > 1]
        picks = (p for n in range(1, len(holders) + 1) for p in itertools.combinations(holders, n))
        each = (
            tuple(dict(zip(p, dims, strict=True)).get(i) for i in range(len(options)))
            for p in picks
            for dims in itertools.product(*(options[i][1:] for i in p))
        )
        yield from itertools.islice(each, COMBINATIONS)
        for end in (1, -1):  # where that was not all: every operand that has the size, at its first or last such dim
            yield tuple(o[end] if len(o) > 1 else None for o in options)


def parts_of(size: int, real_size: int) -> list[int]:
    """Numbers of parts to try: 2, 3, one that leaves uneven parts, and one an element where the call is so small."""
    fair = [k for k in range(2, size + 1) if piece(size, ((k, k - 1),))[1] > 0]
    uneven = [k for k in fair if size % k][:1]
    single = [size] if real_size <= SMALL else []
    return sorted({*(k for k in fair if k <= 3), *uneven, *single})


def outcome(lab: Lab, combination: Combination) -> list[str] | None:
    """What each output is when the operands are split so; None where some output is nothing of the kind."""
    size = next(t.shape[d] for t, d in zip(lab.call.operands, combination, strict=True) if d is not None)
    left: list[set[str]] | None = None
    for k in parts_of(lab.sizes[size], size):
        if not _shapes_fit(lab, combination, k):
            return None
        for kind in KINDS[:2]:
            whole = lab.real(kind)
            parts = [_run(whole, _cut(whole.operands, combination, k, i)) for i in range(k)]
            codes = [_codes(o, [p[j] for p in parts], k, lab.tolerance) for j, o in enumerate(whole.outputs)]
            left = codes if left is None else [a & b for a, b in zip(left, codes, strict=True)]
            if not all(left):
                return None
    return [NONE if NONE in s else min(s, key=CODES.index) for s in left] if left else None


def _shapes_fit(lab: Lab, combination: Combination, k: int) -> bool:
    """Without running the op: whether the shapes it gives to parts could be put together."""
    whole = lab.real()
    mode: Any = fake_mode()
    for i in range(k):
        cut = _cut(whole.operands, combination, k, i)
        with mode:
            outs = _run(whole, [mode.from_tensor(t) for t in cut])
        for a, b in zip(outs, whole.outputs, strict=True):
            if isinstance(b, torch.Tensor) and sum(m != n for m, n in zip(a.shape, b.shape, strict=True)) > 1:
                return False
    return True


def _cut(operands: tuple[torch.Tensor, ...], combination: Combination, k: int, i: int) -> list[torch.Tensor]:
    def part(t: torch.Tensor, d: int | None) -> torch.Tensor:
        cut = t if d is None else t.narrow(d, *piece(t.shape[d], ((k, i),)))
        return cut.clone(memory_format=torch.contiguous_format)

    return [part(t, d) for t, d in zip(operands, combination, strict=True)]


def _run(call: Call, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """The outputs of the op on other tensors."""
    leaves, spec = tree_flatten((call.args, call.kwargs))
    fresh = iter(tensors)
    args, kwargs = tree_unflatten([next(fresh) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
    out = call.target(*args, **kwargs)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def _copied(tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([x.clone() if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def _codes(whole: Any, parts: list[Any], k: int, tolerance: float) -> set[str]:
    """Every way in which the parts of an output make the whole."""
    if not isinstance(whole, torch.Tensor):
        return {NONE} if all(p is None for p in parts) else set()
    found = set()
    if all(p.shape == whole.shape for p in parts):
        if all(close(p, whole, tolerance) for p in parts):
            found.add(SAME)
        if whole.dtype != torch.bool:
            stacked = torch.stack(parts)
            totals = {"sum": stacked.sum(0).to(whole.dtype)}
            if not whole.dtype.is_complex:
                totals |= {"max": stacked.amax(0), "min": stacked.amin(0)}
            found |= {op for op, total in totals.items() if close(total, whole, tolerance)}
    for d in range(whole.dim()):
        lengths = [piece(whole.shape[d], ((k, i),))[1] for i in range(k)]
        wanted = [(*whole.shape[:d], n, *whole.shape[d + 1 :]) for n in lengths]
        if [tuple(p.shape) for p in parts] == wanted and close(torch.cat(parts, d), whole, tolerance):
            found.add(str(d))
    return found


def close(got: Any, want: Any, tolerance: float) -> bool:
    """Equal up to rounding, which may be that of the largest element."""
    if not isinstance(want, torch.Tensor):
        return got is None and want is None
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not want.dtype.is_floating_point and not want.dtype.is_complex:
        return torch.equal(got, want)
    return torch.allclose(got, want, tolerance, tolerance / 10 * largest(want), equal_nan=True)


def largest(x: torch.Tensor) -> float:
    """The largest finite absolute value, at least 1."""
    sizes = x.abs().nan_to_num(0.0, 0.0, 0.0)
    return max(1.0, float(sizes.max())) if x.numel() else 1.0


def _linear(lab: Lab, attempt: Attempt) -> list[tuple[int, ...]]:
    """The smallest sets of operands such that partial sums in just these give partial sums."""
    outs = [o for o in lab.call.outputs if isinstance(o, torch.Tensor)]
    able = [i for i, t in enumerate(lab.call.operands) if t.dtype.is_floating_point or t.dtype.is_complex]
    if len(able) > 6 or not all(o.dtype.is_floating_point or o.dtype.is_complex for o in outs):
        return []
    found: list[tuple[int, ...]] = []
    for n in range(1, len(able) + 1):
        for chosen in itertools.combinations(able, n):
            if any(set(f) <= set(chosen) for f in found):
                continue
            if attempt(f"partial {chosen}", lambda c=chosen: _adds_up(lab, c)):
                found.append(chosen)
    return found


def _adds_up(lab: Lab, chosen: tuple[int, ...]) -> bool:
    for k, kind in itertools.product((2, 3), KINDS):
        whole = lab.real(kind)
        parts = [
            _run(whole, [share(t, k, i, seed=j) if j in chosen else t.clone() for j, t in enumerate(whole.operands)])
            for i in range(k)
        ]
        for j, want in enumerate(whole.outputs):
            if isinstance(want, torch.Tensor):
                total = torch.stack([p[j] for p in parts]).sum(0).to(want.dtype)
                if not close(total, want, lab.tolerance):
                    return False
    return True
