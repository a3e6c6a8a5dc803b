"""Rules of ops that work on their last dims and repeat over the leading ones; and what a rank with nothing runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .dims import additive, names
from .notation import Dims, Local, Rule
from .split import Call


def zeros_of(like: torch.Tensor, shapes: Sequence[Any], dtypes: Sequence[Any]) -> Any:
    """Zeros in place of the outputs of a call on an empty operand; None where there is no output."""
    out = tuple(
        None if s is None else torch.zeros(s, dtype=d, device=like.device) for s, d in zip(shapes, dtypes, strict=True)
    )
    return out[0] if len(shapes) == 1 else out


def nothing(shape: Iterable[Any]) -> bool:
    """A tensor of this shape is known to be empty."""
    return any(isinstance(n, int) and n == 0 for n in shape)


def empty_call(call: Call, local: Local) -> tuple[Any, tuple, dict] | None:
    """The call of `zeros_of` for a rank one of whose operands is empty, though the whole one is not; else None."""
    if not any(_starved(local, i) and not nothing(t.shape) for i, t in enumerate(call.operands)):
        return None
    tensors = [isinstance(x, torch.Tensor) for x in tree_leaves((call.args, call.kwargs))]
    like = tree_leaves((local.args, local.kwargs))[tensors.index(True)]
    shapes = [local.out_shape(j) if isinstance(o, torch.Tensor) else None for j, o in enumerate(call.outputs)]
    return zeros_of, (like, shapes, [getattr(o, "dtype", None) for o in call.outputs]), {}


def _starved(local: Local, operand: int) -> bool:
    """An operand is empty, and not only because all that this rank's windows see of it lies beyond its borders."""
    spans = ((n, local.span(operand, d)) for d, n in enumerate(local.in_shape(operand)))
    return any(isinstance(n, int) and n == 0 and not (span and span[1] > span[0]) for n, span in spans)


def guarded(rule: Rule, call: Call) -> Rule:
    """The rule, with zeros made directly by a rank that has an empty operand: many ATen kernels refuse one."""
    inner = rule.localize

    def localize(local: Local) -> tuple[Any, tuple, dict]:
        made = empty_call(call, local)
        if made is not None:
            return made
        return inner(local) if inner else (local.target, local.args, local.kwargs)

    return rule.but(localize=localize)


def outputs_of(call: Call, *dims: Dims | None) -> tuple[Dims | None, ...]:
    """The outputs' dims, None where the call gives no tensor (an output masked off)."""
    return tuple(d if isinstance(o, torch.Tensor) else None for d, o in zip(dims, call.outputs, strict=True))


def own_whole(shape: Iterable[Any], tag: str) -> tuple[Dims, frozenset[str]]:
    """Dims of factors found nowhere else, and these factors, which are whole."""
    dims = names(shape, tag)
    return dims, frozenset(f for d in dims for f in d)


def lead_rule(call: Call, last: int, *linear: Iterable[int]) -> Rule:
    """Every operand and output has the same leading dims, which are free; the `last` dims of each are whole."""
    lead = names(call.operands[0].shape)[: call.operands[0].dim() - last]
    whole: frozenset[str] = frozenset()
    sides: tuple[list[Dims], list[Dims]] = ([], [])
    for side, tensors, tag in zip(sides, (call.operands, call.outputs), "io", strict=True):
        for i, t in enumerate(tensors):
            end, own = own_whole(t.shape[t.dim() - last :], f"{tag}{i}_")
            side.append(lead + end)
            whole |= own
    return guarded(Rule(tuple(sides[0]), tuple(sides[1]), whole=whole, linear=additive(call, *linear)), call)
