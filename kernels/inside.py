"""What our own ops run, by kind of device: for those who want to see the tensors that an op makes on its way.

A dispatch mode sees `meshwright::attention` as one call. Calling the function here instead shows it as ATen calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import add_norm, attention, cross_entropy, gated, linear_cross_entropy, merge, rms_norm, rope

ops = torch.ops.meshwright

INSIDE: dict[Any, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
    ops.attention.default: (attention._cpu_forward, attention._cuda_forward),
    ops.attention_backward.default: (attention._cpu_backward, attention._cuda_backward),
    ops.nll.default: (cross_entropy._nll, cross_entropy._nll),
    ops.nll_sums.default: (cross_entropy._nll_sums, cross_entropy._nll_sums),
    ops.nll_backward.default: (cross_entropy._nll_backward, cross_entropy._nll_backward),
    ops.rms_norm.default: (rms_norm._forward, None),
    ops.rms_norm_backward.default: (rms_norm._backward, None),
    ops.add_rms_norm.default: (add_norm._rms, None),
    ops.add_rms_norm_backward.default: (add_norm._rms_backward, None),
    ops.add_layer_norm.default: (add_norm._layer, None),
    ops.add_layer_norm_backward.default: (add_norm._layer_backward, None),
    ops.rope.default: (rope._rope, None),
    ops.merge_attention.default: (merge._merge, None),
    ops.merge_attention_backward.default: (merge._merge_backward, None),
    ops.gated.default: (gated._forward, None),
    ops.gated_backward.default: (gated._backward, None),
    ops.linear_nll.default: (linear_cross_entropy._forward, linear_cross_entropy._forward),
    ops.linear_max.default: (linear_cross_entropy._max, linear_cross_entropy._max),
    ops.linear_sums.default: (linear_cross_entropy._sums, linear_cross_entropy._sums),
    ops.linear_nll_backward.default: (linear_cross_entropy._backward, linear_cross_entropy._backward),
    ops.linear_nll_step.default: (linear_cross_entropy._step, linear_cross_entropy._step),
    ops.linear_nll_step_.default: (linear_cross_entropy._step_added, linear_cross_entropy._step_added),
}
"""Of each op what runs on a CPU, and on a GPU; None for a kernel that makes nothing but its results."""


def inside(op: Any, cuda: bool) -> Callable[..., Any] | None:
    """The function that an op of ours runs; None for a kernel, and for any other op."""
    found = INSIDE.get(op)
    return None if found is None else found[cuda]
