"""When two calls can share one captured program: the same modes, the same shapes, the same plain values.

Plain values are those of the call and the public attributes of modules (a temperature, the weight of a loss): a graph
holds them as constants. An attribute that capture itself changes, as a forward that counts its calls does, is not one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree


def signature(model: nn.Module, form: str, call: Any, moving: frozenset[tuple[int, str]] = frozenset()) -> tuple:
    """A hashable key of a call of `model` with `call` (any tree of tensors and plain values).

    moving: attributes that do not count, as (place of the module, name).
    """
    leaves, spec = pytree.tree_flatten(call)
    modes = tuple((m.training, *map(tuple, _hooks(m))) for m in model.modules())
    trained = tuple(p.requires_grad for p in model.parameters())
    held = tuple(item for item in attributes(model).items() if item[0] not in moving)
    return (form, modes, trained, held, _autocast(), str(spec), tuple(map(_key, leaves)))


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """Its hooks, by number: another one is another program."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def attributes(model: nn.Module) -> dict[tuple[int, str], Any]:
    """The plain values that modules hold in attributes of a public name, by (place of the module, name)."""
    return {
        (i, name): value
        for i, module in enumerate(model.modules())
        for name, value in vars(module).items()
        if type(value) in _PLAIN and not name.startswith("_") and name != "training"
    }


def changed(before: dict[tuple[int, str], Any], after: dict[tuple[int, str], Any]) -> frozenset[tuple[int, str]]:
    """The attributes that differ."""
    return frozenset(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))


_PLAIN = (int, float, bool, str, complex)


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
