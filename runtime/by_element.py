"""First values drawn by element: each rank makes its own part of a tensor, and no rank the whole.

Initialisers write a tensor element by element (`uniform_`, `normal_`, then perhaps `mul_`, `erfinv_`, `clamp_`), from
numbers that follow from shapes. A module's initialiser runs once on the meta device, where nothing is computed, and
what it does to each tensor is noted; each rank then does the same to its shard. Draws are Philox words of the element's
place in the whole tensor (`kernels/random.py`), keyed by the run's seed and the tensor's name:

    key = seed ^ (crc32(name) << 32)      op = number of the call on the tensor      step = 2^32 - 1, which no step is

`nn.init.trunc_normal_`, which in PyTorch draws again what lies outside, is meanwhile the inverse of the distribution:

    x = mean + std sqrt(2) erfinv(u), clamped to [a, b]      u uniform between erf((a - mean) / (std sqrt(2))) and b's
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree

from ..kernels.philox import Pieces
from ..kernels.random import normal, uniform
from ..kernels.tri import wide_of
from ..partitioner.compat import DispatchMode
from ..partitioner.layout import Layout, local_pieces
from ..partitioner.mesh import Mesh

aten = torch.ops.aten
_STEP = 0xFFFFFFFF
_SAME = {aten.detach.default, aten.alias.default}
_DRAWS = {aten.uniform_.default: (uniform, (0.0, 1.0)), aten.normal_.default: (normal, (0.0, 1.0))}
_WRITES = {*_DRAWS, aten.zero_.default, aten.fill_.Scalar}
"""What gives a tensor values whatever it held."""
_MORE = ("mul_", "add_", "sub_", "div_", "pow_", "neg_", "abs_", "exp_", "log_", "sqrt_", "rsqrt_", "sigmoid_", "tanh_")
_MORE += ("erfinv_", "clamp_", "clamp_min_", "clamp_max_", "reciprocal_", "sin_", "cos_")


@dataclass(frozen=True)
class Write:
    """One call on a tensor: the overload, and its arguments but the tensor."""

    op: Any
    args: tuple[Any, ...]


class _Notes(DispatchMode):
    """Notes the calls on some tensors. `whole`: something else was done with one of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        super().__init__()
        self.names = {id(t): name for name, t in tensors.items()}
        self.kept: list[torch.Tensor] = list(tensors.values())  # so that no id is given out twice
        self.writes: dict[str, list[Write]] = {name: [] for name in tensors}
        self.whole = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        name = self.names.get(id(args[0])) if args else None
        if name is not None and func in _SAME:
            self.names[id(out)] = name
            self.kept.append(out)
        elif name is not None and len(tensors) == 1 and self._known(func, name, kwargs or {}):
            self.writes[name].append(Write(func, args[1:]))
        elif any(id(x) in self.names for x in tensors):
            self.whole = True
        return out

    def _known(self, func: Any, name: str, kwargs: dict[str, Any]) -> bool:
        plain = all(v is None for v in kwargs.values())  # a generator of the user's own is none of ours
        packet = func._schema.name.removeprefix("aten::")
        return plain and (func in _WRITES or (packet in _MORE and bool(self.writes[name])))


def noted(module: nn.Module, make: Callable[[nn.Module], Any]) -> dict[str, list[Write]] | None:
    """What `make` does to each of the module's own tensors, which are on the meta device; None where it does anything
    but write them all element by element."""
    tensors = _own(module)
    notes = _Notes(tensors)
    try:
        with torch.no_grad(), _truncated(), notes:
            make(module)
    except Exception:
        return None  # it wants values: it runs on the CPU instead, and there its own error stands
    same = all(t is tensors.get(name) for name, t in _own(module).items())
    narrow = all(t.is_floating_point() or not any(w.op in _DRAWS for w in notes.writes[n]) for n, t in tensors.items())
    every = all(notes.writes.values())  # on meta PyTorch's own initialisers leave out what wants values
    return notes.writes if same and narrow and every and not notes.whole else None


@contextlib.contextmanager
def _truncated() -> Iterator[None]:
    """`nn.init.trunc_normal_` as calls on elements."""
    original = nn.init.trunc_normal_

    def drawn(tensor, mean=0.0, std=1.0, a=-2.0, b=2.0, generator=None):
        low, high = (math.erf((x - mean) / (std * math.sqrt(2.0))) for x in (a, b))
        return tensor.uniform_(low, high, generator=generator).erfinv_().mul_(std * 2**0.5).add_(mean).clamp_(a, b)

    nn.init.trunc_normal_ = drawn
    try:
        yield
    finally:
        nn.init.trunc_normal_ = original


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def pieces_of(layout: Layout, mesh: Mesh, rank: int) -> Pieces:
    """Of a rank's shard: per dim, per factor (start, length, whole size)."""
    local = local_pieces(layout, mesh, rank)
    return tuple(
        tuple((start, length, f.size) for (start, length), f in zip(dim, factors, strict=True))
        for dim, factors in zip(local, layout.dims, strict=True)
    )


def carry_out(writes: list[Write], shard: torch.Tensor, name: str, pieces: Pieces, seed: int) -> None:
    """Do the calls on the part of a tensor that `pieces` names; what is narrower than float32 is rounded once."""
    key = (seed ^ zlib.crc32(name.encode()) << 32) & (1 << 64) - 1
    with torch.no_grad():
        values = shard.to(wide_of(shard.dtype)) if shard.is_floating_point() else shard
        for i, write in enumerate(writes):
            if write.op not in _DRAWS:
                write.op(values, *write.args)
                continue
            draw, defaults = _DRAWS[write.op]
            first, second = (*write.args, *defaults[len(write.args) :])
            drawn = draw(pieces, values.dtype, first, second, key, i, _STEP, shard.device)
            values.copy_(drawn.reshape(shard.shape))
        if values is not shard:
            shard.copy_(values)
