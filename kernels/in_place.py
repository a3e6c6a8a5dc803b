"""Ops of ours that can write their result over an operand which nobody reads any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cross_entropy import nll_backward_

IN_PLACE: dict[Any, tuple[Callable[..., Any], int]] = {
    torch.ops.meshwright.nll_backward.default: (nll_backward_, 1),
}
"""Of each op the function that does the same in place, and the operand that it writes over: of the result's shape,
dtype and strides."""

WRITES: dict[Any, int] = dict(IN_PLACE.values())
"""Of each such function the operand."""
