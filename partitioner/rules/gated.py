"""An activation times a gate: element-wise, `a b, a b -> a b`; linear in what is not under the activation."""

from __future__ import annotations

import torch

from ...kernels import gated as _registers_the_ops  # noqa: F401
from .notation import Rule
from .pointwise import pointwise_rule
from .split import Call
from .table import Table, on

mw = torch.ops.meshwright
TABLE: Table = {}


@on(TABLE, mw.gated.default)
def gated(call: Call) -> Rule:
    """A sum in `up` is one in the product."""
    return pointwise_rule(call, ({1},))


@on(TABLE, mw.gated_backward.default)
def gated_backward(call: Call) -> Rule:
    """Linear in the gradient."""
    return pointwise_rule(call, ({0},))
