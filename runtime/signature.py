"""When two calls can share one captured program: the same modes, the same shapes, the same plain values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree


def signature(model: nn.Module, form: str, call: Any) -> tuple[Any, ...]:
    """A hashable key of a call of `model` with `call` (any tree of tensors and plain values)."""
    leaves, spec = pytree.tree_flatten(call)
    modes = tuple(m.training for m in model.modules())
    trained = tuple(p.requires_grad for p in model.parameters())
    return (form, modes, trained, _autocast(), str(spec), tuple(map(_key, leaves)))


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))


def _key(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return (tuple(x.shape), x.dtype, x.requires_grad)
    try:
        hash(x)
    except TypeError:
        return (type(x).__name__, repr(x))
    return (type(x).__name__, x)


def text(call: Any) -> str:
    """The shapes of a call, for messages."""
    leaves = [x for x in pytree.tree_leaves(call) if x is not None]
    return ", ".join(str(list(x.shape)) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
