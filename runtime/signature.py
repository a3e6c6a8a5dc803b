"""When two calls can share one captured program: the same modes, the same shapes, the same plain values.

Plain values are those of the call and the public attributes of modules (a temperature, the weight of a loss): a graph
holds them as constants. What forward itself sets is taken back after capture (`with_tensors.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree


def signature(model: nn.Module, form: str, call: Any) -> tuple:
    """A hashable key of a call of `model` with `call` (any tree of tensors and plain values)."""
    leaves, spec = pytree.tree_flatten(call)
    modes = tuple((m.training, *map(tuple, _hooks(m))) for m in model.modules())
    trained = tuple(p.requires_grad for p in model.parameters())
    return (form, modes, trained, _attributes(model), _autocast(), str(spec), tuple(map(_key, leaves)))


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """Its hooks, by number: another one is another program."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _attributes(model: nn.Module) -> tuple[tuple[int, str, Any], ...]:
    """The plain values that modules hold in attributes of a public name, as (place of the module, name, value)."""
    return tuple(
        (i, name, value)
        for i, module in enumerate(model.modules())
        for name, value in vars(module).items()
        if type(value) in _PLAIN and not name.startswith("_") and name != "training"
    )


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
    return ", ".join(_word(x) for x in pytree.tree_leaves(call) if x is not None)


def _word(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return str(list(x.shape))
    word = repr(x)
    return word if len(word) <= 40 else f"a {type(x).__name__}"
