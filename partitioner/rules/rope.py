"""Rotary position embedding, `b h s d!, b 1 s d!, b 1 s d! -> b h s d!`: cos and sin may broadcast."""

from __future__ import annotations

import torch

from ...kernels import rope as _registers_the_ops  # noqa: F401
from .dims import additive, names
from .lead import guarded, own_whole
from .notation import Dims, Rule
from .split import Call
from .table import Table, on

TABLE: Table = {}


@on(TABLE, torch.ops.meshwright.rope.default)
def rope(call: Call) -> Rule:
    """Linear in x."""
    x = call.operands[0]
    last, whole = own_whole(x.shape[-1:], "h")
    lead = names(x.shape)[:-1]
    angles = [lead[x.dim() - t.dim() :] for t in call.operands[1:]]
    fitted = [
        tuple(() if n == 1 else f for f, n in zip(dims, t.shape, strict=False)) + last
        for dims, t in zip(angles, call.operands[1:], strict=True)
    ]
    every: tuple[Dims, ...] = (lead + last, *fitted)
    return guarded(Rule(every, (lead + last,), whole=whole, linear=additive(call, {0})), call)
