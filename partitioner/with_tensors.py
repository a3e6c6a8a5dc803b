"""A module called with other tensors for its parameters and buffers; afterwards it is as it was.

`torch.func.functional_call` puts the tensors in by name. Of a module that is registered under two names it keeps the
first tensor as the original and, at the second name, the replacement, and leaves that in the module (torch 2.13). What
forward sets in its modules is taken back too: it may be a tensor of a trace. What it was is told (`Changes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

_PLAIN = (int, float, bool, str, complex, type(None))
_FILLED = (list, dict, set)


@dataclass
class Changes:
    """What a call set in the modules, beside what it wrote into their tensors.

    Attributes:
        buffers: per buffer's first name the tensor that it is bound to in the end, where that is another.
        tensors: per attribute ("block.last") that held a tensor and holds another now, the one it held.
        values: attributes that held a plain value or None, and hold something else now.
    """

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)


@contextlib.contextmanager
def unchanged(model: nn.Module, changes: Changes) -> Iterator[None]:
    """What is set in the modules stays until the end of the block (a loss may read it), and is told in `changes`."""
    kept = [_Kept(name, m) for name, m in model.named_modules()]
    try:
        yield
        for one in kept:
            one.compare(changes)
    finally:
        for one in kept:
            one.restore()


def call_with(
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    args: tuple,
    kwargs: dict[str, Any],
    changes: Changes | None = None,
) -> Any:
    """`model(*args, **kwargs)` with `tensors`, by the first name of each; what is tied to one of them is it.

    changes: is told what buffers are bound to.
    """
    found, begun = changes or Changes(), {}
    tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._buffers)]
    before = [dict(table) for table in tables]

    def begin(*_: Any) -> None:
        begun.update(bound_buffers(model))

    def end(*_: Any) -> None:
        found.buffers = {n: t for n, t in bound_buffers(model).items() if t is not begun.get(n) and t is not None}

    hooks = [model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end)]
    try:
        return torch.func.functional_call(model, tensors, args, kwargs, tie_weights=True)
    finally:
        for hook in hooks:
            hook.remove()
        for table, was in zip(tables, before, strict=True):
            table.clear()
            table.update(was)


def bound_buffers(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """What every buffer of every module is bound to, those that are one tensor too."""
    return {f"{n}.{b}".lstrip("."): t for n, m in model.named_modules() for b, t in m._buffers.items()}


class _Kept:
    """The attributes of a module, and what its lists, dicts and sets hold."""

    def __init__(self, name: str, module: nn.Module):
        self.name, self.now, self.was = name, module.__dict__, dict(module.__dict__)
        self.inside = [(x, type(x)(x)) for x in self.was.values() if type(x) in _FILLED]

    def compare(self, changes: Changes) -> None:
        for key, before in self.was.items():
            after = self.now.get(key)
            if after is before or key == "training":
                continue
            name = f"{self.name}.{key}".lstrip(".")
            if isinstance(before, torch.Tensor):
                changes.tensors[name] = before
            elif type(before) in _PLAIN and not (type(after) is type(before) and after == before):
                changes.values.append(name)

    def restore(self) -> None:
        for key in self.now.keys() - self.was.keys():
            del self.now[key]
        for key, value in self.was.items():
            if self.now.get(key) is not value:
                self.now[key] = value
        for filled, was in self.inside:
            filled.clear()
            filled.extend(was) if isinstance(filled, list) else filled.update(was)
