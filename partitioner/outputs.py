"""What a program returns: containers and plain values around tensors, and back again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree


@dataclass
class Traced:
    """What a trace leaves beside the graph: the form of the model's output."""

    spec: pytree.TreeSpec | None = None
    leaves: tuple[Any, ...] = ()


TENSOR = object()
"""Stands for a tensor among the leaves of an output."""


@dataclass(frozen=True)
class _Record:
    """A dataclass output as a tree: its type and its fields."""

    type: type
    fields: dict[str, Any]


pytree.register_pytree_node(
    _Record,
    lambda r: (list(r.fields.values()), (r.type, tuple(r.fields))),
    lambda values, c: c[0](**dict(zip(c[1], values, strict=True))),
)


def as_trees(out: Any) -> Any:
    """The output with plain dataclasses (which pytree does not know) made walkable."""
    def open_up(x: Any) -> Any:
        if dataclasses.is_dataclass(x) and not isinstance(x, (type, _Record)) and not _known(x):
            return _Record(type(x), {f.name: as_trees(getattr(x, f.name)) for f in dataclasses.fields(x)})
        return x

    return pytree.tree_map(open_up, out)


def _known(x: Any) -> bool:
    return type(x) in pytree.SUPPORTED_NODES


def unaliased(leaves: list[Any], inputs: tuple[torch.Tensor, ...]) -> list[Any]:
    """Outputs that are views, inputs, or one tensor twice are copied: else AOT would tie their gradients together."""
    seen = {id(t) for t in inputs}
    out = []
    for x in leaves:
        if isinstance(x, torch.Tensor):
            x = x.clone() if id(x) in seen or x._is_view() or isinstance(x, nn.Parameter) else x
            seen.add(id(x))
        out.append(x)
    return out


def result_builder(traced: Traced) -> Callable[[list], Any]:
    """From the output's tensors to what the program returned: its containers and plain values around them."""
    spec, leaves = traced.spec, traced.leaves
    assert spec is not None

    def build(tensors: list) -> Any:
        it = iter(tensors)
        return pytree.tree_unflatten([next(it) if leaf is TENSOR else leaf for leaf in leaves], spec)

    return build
