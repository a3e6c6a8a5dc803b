"""Random ops whose numbers belong to elements of the whole tensor, not to ranks.

Every function here draws from `philox` with the global index of each element, so any split of the tensor, any
recompute and any mesh gives the same bits. Common arguments:

    pieces      per dim, per factor (start, local length, whole size) of the output that this call makes
    seed        the run's seed (64 bits)
    op          which random op of the program it is (its ordinal)
    step        the training step; an int at run time, in a graph a node that gives one
    device      where the result lives (the functions that take no tensor)

Rewriting a graph: `build = canonical_random(node.target)` is None for an op that is not random (or not known), else

    fn, args, kwargs = build(node, seed=seed, op=ordinal, step=step_node)

is the call that replaces the node: same number and order of outputs, pieces of the whole tensor taken from the shape
of the fake output, `node.meta["val"]`; the node's tensors and `step` are passed through untouched. An in-place op gives
its functional form: the caller writes the result back. Logarithms, sines and cosines are taken of whole vectors
(`philox.ALIGN`), so that an element's value does not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .dropout import fits, triton_dropout
from .philox import Form, Pieces, Words, elements, put, whole_pieces, wide

aten = torch.ops.aten
Build = Callable[..., tuple[Callable, tuple, dict[str, Any]]]
_Form = Callable[[tuple, dict[str, Any], Any], tuple[Callable, tuple]]
"""From a call's args, kwargs and fake output: the function and the arguments that are its own."""


def _unit(
    pieces: Pieces, seed: int, op: int, step: int, double: bool, device: Any = None, bits: int = 24
) -> torch.Tensor:
    """Uniform on [0, 1): `bits` bits in float32, or 53 bits in float64 if `double`."""
    if double:
        return elements(pieces, seed, op, step, 2, _wide_units, torch.float64, device)

    def form(w: Words, out: torch.Tensor) -> None:
        w >>= 32 - bits
        put(out, w).mul_(2.0**-bits)

    return elements(pieces, seed, op, step, 1, form, torch.float32, device)


def _wide_units(w: Words, out: torch.Tensor) -> None:
    out.copy_(wide(w[::2] >> 5)).mul_(2.0**26).add_(wide(w[1::2] >> 6)).mul_(2.0**-53)


def keep_below(p: float) -> int:
    """The words below it are those of the elements that dropout keeps: u < 1 - p in float32, for a u of 24 bits."""
    threshold = float(torch.tensor(1.0 - p, dtype=torch.float32))
    return math.ceil(threshold * 2.0**24) << 8


def dropout(
    x: torch.Tensor, p: float, seed: int, op: int, step: int, pieces: Pieces, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x · mask / (1 - p) + residual, mask), mask = u < 1 - p."""
    if p >= 1.0 or p <= 0.0:
        mask = torch.full(x.shape, p <= 0.0, dtype=torch.bool, device=x.device)
        y = x * 1.0 if p <= 0.0 else torch.zeros_like(x)
        return y if residual is None else y.add_(residual), mask
    below = keep_below(p)
    if x.device.type == "cuda" and fits(x, pieces):
        return triton_dropout(x, p, below, seed, op, step, pieces, residual=residual)
    mask = elements(pieces, seed, op, step, 1, lambda w, out: put(out, w < below), torch.bool, x.device)
    y = mask.to(x.dtype).mul_(x).mul_(1.0 / (1.0 - p))
    return y if residual is None else y.add_(residual), mask


def uniform(
    pieces: Pieces, dtype: torch.dtype, low: float, high: float, seed: int, op: int, step: int, device: Any = None
) -> torch.Tensor:
    """low + (high - low) u; u has as many bits as the type holds, so that 1 is not reached."""
    bits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
    u = _unit(pieces, seed, op, step, dtype == torch.float64, device, bits)
    return (u if (low, high) == (0.0, 1.0) else u.mul_(high - low).add_(low)).to(dtype)


def normal(
    pieces: Pieces, dtype: torch.dtype, mean: Any, std: Any, seed: int, op: int, step: int, device: Any = None
) -> torch.Tensor:
    """mean + std z by Box and Muller: z = sqrt(-2 ln u1) cos(2π u2), and the next element's has the sine of the same
    u1, u2. `mean` and `std` may be tensors."""
    z = elements(pieces, seed, op, step, 1, _pairs, drawn(normal, dtype), device)
    if isinstance(mean, torch.Tensor) or isinstance(std, torch.Tensor):
        return (z * std + mean).to(dtype)
    z = z if std == 1.0 else z.mul_(std)
    return (z if mean == 0.0 else z.add_(mean)).to(dtype)


def _pairs(w: Words, out: torch.Tensor) -> None:
    first, second = (put(torch.empty(len(w) // 2, dtype=out.dtype, device=out.device), w[i::2]) for i in (0, 1))
    radius = first.add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = second.mul_(2.0 * math.pi * 2.0**-32)
    cosine, sine = torch.cos(angle).mul_(radius), angle.sin_().mul_(radius)
    torch.complex(cosine, sine, out=torch.view_as_complex(out.view(-1, 2)))


def exponential(
    pieces: Pieces, dtype: torch.dtype, rate: float, seed: int, op: int, step: int, device: Any = None
) -> torch.Tensor:
    """-ln(1 - u) / rate, never 0."""

    def form(w: Words, out: torch.Tensor) -> None:
        u = put(torch.empty(len(w), dtype=torch.float64, device=out.device), w)
        out.copy_(u.add_(0.5).mul_(2.0**-32).log_().mul_(-1.0 / rate))

    return elements(pieces, seed, op, step, 1, form, dtype, device)


def bernoulli(
    p: Any, pieces: Pieces, dtype: torch.dtype, seed: int, op: int, step: int, device: Any = None
) -> torch.Tensor:
    """1 where u < p, else 0. `p` is a number or a tensor of probabilities."""
    double = isinstance(p, torch.Tensor) and p.dtype == torch.float64
    return (_unit(pieces, seed, op, step, double, device) < p).to(dtype)


def randint(
    pieces: Pieces, low: int, high: int, dtype: torch.dtype, seed: int, op: int, step: int, device: Any = None
) -> torch.Tensor:
    """Integers in [low, high): low + floor(word · (high - low) / 2^32), or 62 bits modulo a wider range."""
    span = high - low
    if span <= 1 << 31:
        form: Form = lambda w, out: out.copy_((wide(w) * span >> 32).add_(low))  # noqa: E731
        return elements(pieces, seed, op, step, 1, form, dtype, device)
    form = lambda w, out: out.copy_(_wide_words(w).remainder_(span).add_(low))  # noqa: E731
    return elements(pieces, seed, op, step, 2, form, dtype, device)


def randperm(n: int, dtype: torch.dtype, seed: int, op: int, step: int, device: Any = None) -> torch.Tensor:
    """The order that sorts n draws; the whole permutation on every rank."""
    form: Form = lambda w, out: out.copy_(_wide_words(w, 1))  # noqa: E731
    return elements(whole_pieces((n,)), seed, op, step, 2, form, torch.int64, device).argsort(stable=True).to(dtype)


def _wide_words(w: Words, drop: int = 2) -> torch.Tensor:
    """Two words as one whole number: the first without its `drop` last bits, then the second."""
    return (wide(w[::2] >> drop) << 32).add_(wide(w[1::2]))


DRAWS: dict[Callable[..., Any], tuple[int, int]] = {
    dropout: (8, 1),
    uniform: (32, 0),
    normal: (48, 10),
    exponential: (56, 0),
    bernoulli: (16, 5),
    randint: (128, 0),
    randperm: (64, 24),
}
"""Of each function for the memory model: bytes a counter of a form's values, and bytes an element that stand whole
beside the result, after the draw."""


def drawn(fn: Callable[..., Any], dtype: torch.dtype) -> torch.dtype:
    """The dtype of what is drawn for a result of `dtype`, before it is cast."""
    if fn in (dropout, randperm):
        return torch.bool if fn is dropout else torch.int64
    if fn in (uniform, normal, bernoulli):
        return torch.float64 if dtype == torch.float64 else torch.float32
    return dtype


def canonical_random(target: Any) -> Build | None:
    """How a node of an aten random op becomes a call of one of the functions above; None for other ops."""
    form = _TABLE.get(target)
    return None if form is None else partial(_build, form)


def _build(
    form: _Form, node: torch.fx.Node, *, seed: int, op: int, step: Any
) -> tuple[Callable, tuple, dict[str, Any]]:
    out = node.meta["val"]
    fn, args = form(node.args, node.kwargs, out)
    more = {"pieces": whole_pieces(out[0].shape)} if fn is dropout else {"device": out.device}
    return fn, args, {"seed": seed, "op": op, "step": step, **more}


def _get(args: tuple, kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    value = args[place] if len(args) > place else kwargs.get(name, default)
    return default if value is None else value


def _dropout(args, kwargs, out):
    return dropout, (args[0], _get(args, kwargs, 1, "p", 0.5) if _get(args, kwargs, 2, "train", True) else 0.0)


def _unit_form(args, kwargs, out):
    return uniform, (whole_pieces(out.shape), out.dtype, 0.0, 1.0)


def _uniform(args, kwargs, out):
    low, high = _get(args, kwargs, 1, "from", 0.0), _get(args, kwargs, 2, "to", 1.0)
    return uniform, (whole_pieces(out.shape), out.dtype, low, high)


def _standard(args, kwargs, out):
    return normal, (whole_pieces(out.shape), out.dtype, 0.0, 1.0)


def _normal(at: int) -> _Form:
    """`at`: where mean and std stand in args."""

    def form(args, kwargs, out):
        mean, std = _get(args, kwargs, at, "mean", 0.0), _get(args, kwargs, at + 1, "std", 1.0)
        return normal, (whole_pieces(out.shape), out.dtype, mean, std)

    return form


def _bernoulli(at: int) -> _Form:
    """`at`: where the probability stands in args."""
    return lambda args, kwargs, out: (
        bernoulli,
        (_get(args, kwargs, at, "p", 0.5), whole_pieces(out.shape), out.dtype),
    )


def _randint(high: int, low: int | None = None) -> _Form:
    """Where the bounds stand in args; no `low`: from 0."""
    return lambda args, kwargs, out: (
        randint,
        (whole_pieces(out.shape), 0 if low is None else args[low], args[high], out.dtype),
    )


def _random_any(args, kwargs, out):
    """`random_()`: every integer the type holds exactly."""
    bits = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}.get(out.dtype)
    high = 2 if out.dtype == torch.bool else 2**bits + 1 if bits else torch.iinfo(out.dtype).max
    return randint, (whole_pieces(out.shape), 0, high, out.dtype)


def _exponential(args, kwargs, out):
    return exponential, (whole_pieces(out.shape), out.dtype, _get(args, kwargs, 1, "lambd", 1.0))


def _randperm(args, kwargs, out):
    return randperm, (args[0], out.dtype)


def _overloads(form: _Form, *names: str) -> dict[Any, _Form]:
    """The entries of the aten overloads that this build of torch has."""
    found = {}
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        if op is not None:
            found[op] = form
    return found


_TABLE: dict[Any, _Form] = {
    **_overloads(_dropout, "native_dropout"),
    **_overloads(_unit_form, "rand", "rand.generator", "rand_like", "rand_like.generator"),
    **_overloads(_uniform, "uniform", "uniform_"),
    **_overloads(_standard, "randn", "randn.generator", "randn_like", "randn_like.generator"),
    **_overloads(_normal(1), "normal_", "normal_functional"),
    **_overloads(_normal(0), "normal.Tensor_float", "normal.float_Tensor"),
    **_overloads(_normal(0), "normal.Tensor_Tensor", "normal.float_float"),
    **_overloads(_bernoulli(0), "bernoulli"),
    **_overloads(_bernoulli(1), "bernoulli.p", "bernoulli.Tensor", "bernoulli_.float", "bernoulli_.Tensor"),
    **_overloads(_randint(0), "randint", "randint.generator"),
    **_overloads(_randint(1, 0), "randint.low", "randint.low_generator"),
    **_overloads(_randint(1), "randint_like", "random.to", "random_.to"),
    **_overloads(_randint(2, 1), "randint_like.low_dtype", "random.from", "random_.from"),
    **_overloads(_random_any, "random", "random_"),
    **_overloads(_exponential, "exponential", "exponential_"),
    **_overloads(_randperm, "randperm", "randperm.generator"),
}
