"""The promise as a number: how far from float64 a run may be, against how far plain eager float32 is."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_map

TIMES = 4.0  # of the one-device run's own error
ROUNDING = 16.0  # units in the last place of the largest element, allowed where eager happens to be exact
TINY = 1e-8  # values that should be zero, such as the gradient of a key bias, are rounding noise of this size


def exact_copy(model: nn.Module) -> nn.Module:
    """The same model in float64."""
    return copy.deepcopy(model).double()


def exact_inputs(inputs: dict) -> dict:
    """The same inputs, floating ones in float64."""
    return tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs)


def far(x: torch.Tensor, exact: torch.Tensor) -> float:
    return (x.double() - exact).abs().max().item() if exact.numel() else 0.0


def allowed(eager: torch.Tensor, exact: torch.Tensor) -> float:
    """How far from `exact` a run may be."""
    largest = exact.abs().max().item() if exact.numel() else 0.0
    return TIMES * far(eager, exact) + ROUNDING * torch.finfo(eager.dtype).eps * largest + TINY


def too_far(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, more: float = 0.0) -> str | None:
    """None when `got` is as good as `eager`, with `more` error allowed; otherwise its error and the error allowed."""
    if got.shape != exact.shape or got.dtype != eager.dtype:
        return f"want {eager.dtype} {list(exact.shape)}, got {got.dtype} {list(got.shape)}"
    if not got.is_floating_point():
        return None if torch.equal(got, eager) else "differs"
    error, bar = far(got, exact), allowed(eager, exact) + more
    return None if error <= bar else f"error {error:.3g}, allowed {bar:.3g} (one device: {far(eager, exact):.3g})"


Tensors = Mapping[str, torch.Tensor | None]


def all_too_far(
    kind: str, got: Tensors, eager: Tensors, exact: Tensors, more: Mapping[str, float] | None = None
) -> list[str]:
    """One line for each tensor of `eager` that `got` lacks or misses by too much."""
    found = []
    for name, want in eager.items():
        have, true = got.get(name), exact[name]
        if want is None or true is None or have is None:
            why = None if want is have else "want None, got a tensor" if want is None else "want a tensor, got None"
        else:
            why = too_far(have, want, true, (more or {}).get(name, 0.0))
        found += [f"{kind} {name}: {why}"] if why else []
    return found
