"""What one call of a rank's graph allocates, found by running it on fake tensors, with the strides it would have.

    new       storages that it returns and no operand has
    shared    outputs that lie in an operand's memory: views, and results written in place
    inside    the most bytes that stand at once while it runs, its new storages among them

Functions and ops of our own are run as the ATen calls that they are made of (`kernels/inside.py`), so what attention's
backward or a loss holds on its way counts. What an ATen op allocates inside itself does not: no mode sees it. Equal
calls (op, shapes, strides, dtypes) are run once. Random draws are counted by rule, for they are of values and go by
chunks on a CPU:

    random    what is drawn with `philox.scratch`; then the results and what stands whole beside them (`random.DRAWS`)
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..kernels import random as draws
from ..kernels.inside import inside
from ..kernels.offload import OFFLOAD
from ..kernels.philox import scratch, whole_pieces
from .compat import DispatchMode

_ASKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


@dataclass(frozen=True)
class Spec:
    """A tensor as far as memory goes."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Output:
    """One tensor that a call returns; it lies in operand `source`, or in the new storage `-1 - source`."""

    spec: Spec
    source: int


@dataclass(frozen=True)
class Effect:
    """What a call does to memory.

    Attributes:
        outputs: an `Output`, a tuple of them (and of what is no tensor), or a value that is no tensor.
        new: bytes of each new storage.
        inside: the most bytes that stand at once while it runs, beside its operands.
    """

    outputs: Any
    new: tuple[int, ...]
    inside: int


def spec_of(x: torch.Tensor) -> Spec:
    return Spec(tuple(x.shape), tuple(x.stride()), x.dtype)


def contiguous(shape: tuple[Any, ...], dtype: torch.dtype) -> Spec:
    """The spec of a tensor that lies in order."""
    stride, n = [], 1
    for size in reversed(shape):
        stride.append(n)
        n = n * max(size, 1) if isinstance(size, int) else n * size
    return Spec(tuple(shape), tuple(reversed(stride)), dtype)


def span(spec: Spec) -> int:
    """Bytes that a tensor spans in memory; sizes that depend on data count as 1."""
    pairs = [(_number(n), _number(k)) for n, k in zip(spec.shape, spec.stride, strict=True)]
    if any(n == 0 for n, _ in pairs):
        return 0
    return spec.dtype.itemsize * (1 + sum((n - 1) * k for n, k in pairs))


def _number(n: Any) -> int:
    return n if isinstance(n, int) else 1


class Storages(DispatchMode):
    """Sees storages come and go. `now`, `peak`: bytes of those that are not among `known`. What `offload` makes is on
    the host, and not among them.

    Args:
        cuda: show our own ops as what they run on a GPU.
        fake: answers "yes" where an op of ours asks a tensor for its value.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), cuda: bool = False, fake: bool = False):
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.cuda, self.fake, self._depth = cuda, fake, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        shown = inside(func, self.cuda)
        if shown is not None:
            self._depth += 1
            try:
                with self:
                    return shown(*args, **(kwargs or {}))
            finally:
                self._depth -= 1
        if self.fake and self._depth and func in _ASKS:
            return True
        out = func(*args, **(kwargs or {}))
        if func is OFFLOAD:
            self._see_host(out)
            return out
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                self.see(x)
        return out

    def _see_host(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        self.known.add(storage._cdata)
        self.to_host(storage._cdata, _bytes(storage))
        weakref.finalize(storage, self.from_host, storage._cdata)

    def to_host(self, key: int, nbytes: int) -> None:
        """A storage was made on the host."""

    def from_host(self, key: int) -> None:
        """It is let go of."""
        self.known.discard(key)

    def see(self, x: torch.Tensor) -> None:
        """A tensor that a call returned."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.known or key in self.sizes:
            return
        self.sizes[key] = _bytes(storage)
        self.came(key)
        weakref.finalize(storage, self.gone, key)

    def came(self, key: int) -> None:
        self.now += self.sizes[key]
        self.peak = max(self.peak, self.now)

    def gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)


def _bytes(storage: Any) -> int:
    n = storage.nbytes()
    return n if isinstance(n, int) else 0


class Calls:
    """The effects of calls, worked out as they are asked for.

    Args:
        mode: the fake mode of the captured program.
        cuda: whether ranks run on GPUs.
    """

    def __init__(self, mode: Any, cuda: bool):
        self.mode, self.cuda = mode, cuda
        self._known: dict[Any, Effect] = {}

    def effect(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Effect:
        """The effect of a call; tensors among its arguments stand as their `Spec`."""
        key = (target, _key(args), _key(kwargs))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._run(target, args, kwargs)
        return found

    def _run(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Effect:
        if target is OFFLOAD:  # to memory that is not the device's
            return Effect(Output(args[0], -1), (0,), 0)
        if target in draws.DRAWS:
            return self._draw(target, args, kwargs)
        with self.mode or contextlib.nullcontext(), torch.no_grad():
            args, kwargs = tree_map(self._fake, (args, kwargs), is_leaf=_is_spec)
            operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            seen = Storages(operands, self.cuda, fake=True)
            with seen:
                out = target(*args, **kwargs)
            return _effect(out, operands, seen.peak)

    def _fake(self, x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride, dtype=x.dtype) if isinstance(x, Spec) else x

    def _draw(self, target: Callable[..., Any], args: Any, kwargs: Any) -> Effect:
        """By rule: the results, the index and the words."""
        if target is draws.randperm:
            pieces, outs = whole_pieces((args[0],)), (contiguous((args[0],), args[1]),)
        else:
            pieces = kwargs.get("pieces", args[1] if target is draws.bernoulli else args[0])
            shape = tuple(math.prod(length for _, length, _ in dim) for dim in pieces)
            if target is draws.dropout:
                outs = (contiguous(shape, args[0].dtype), contiguous(shape, torch.bool))
            else:
                outs = (contiguous(shape, next(a for a in args if isinstance(a, torch.dtype))),)
        new = tuple(span(s) for s in outs)
        made = tuple(Output(s, -1 - i) for i, s in enumerate(outs))
        n, (form, whole) = math.prod(outs[0].shape), draws.DRAWS[target]
        dtype = draws.drawn(target, outs[0].dtype)
        words = 2 if target is draws.randperm or (target is not draws.normal and dtype == torch.float64) else 1
        first = n * dtype.itemsize + scratch(pieces, words, form, not self.cuda)
        inside = max(first, sum(new) + n * whole)
        return Effect(made if target is draws.dropout else made[0], new, inside)


def _is_spec(x: Any) -> bool:
    return isinstance(x, Spec)


def _effect(out: Any, operands: list[torch.Tensor], peak: int) -> Effect:
    sources = {x.untyped_storage()._cdata: i for i, x in reversed(list(enumerate(operands)))}
    new: list[int] = []

    def one(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        if storage._cdata not in sources:
            new.append(_bytes(storage))
            sources[storage._cdata] = -len(new)
        return Output(spec_of(x), sources[storage._cdata])

    outputs = tuple(one(x) for x in out) if isinstance(out, (tuple, list)) else one(out)
    return Effect(outputs, tuple(new), max(peak, sum(new)))


def _key(x: Any) -> Any:
    """What the effect of a call depends on."""
    if isinstance(x, Spec):
        return (tuple(map(str, x.shape)), tuple(map(str, x.stride)), x.dtype)
    if isinstance(x, (list, tuple)):
        return tuple(map(_key, x))
    if isinstance(x, dict):
        return tuple((k, _key(v)) for k, v in x.items())
    return (type(x), str(x))
