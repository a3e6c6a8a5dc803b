"""Cross entropy, split over rows (free) and over the vocabulary; and the losses that never reach a graph whole.

`DECOMPOSITIONS` is for tracing: element-wise work and sums, whose means are then those of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels import cross_entropy as _registers_the_ops  # noqa: F401
from ..compat import decompositions
from .dims import additive, rebound
from .notation import Local, Rule, rule
from .softmax import log_softmax_parts
from .split import Call
from .table import Table, on

aten = torch.ops.aten
mw = torch.ops.meshwright
TABLE: Table = {}


def nll_parts(logits: torch.Tensor, target: torch.Tensor, ignore_index: int, start: int) -> tuple[Any, Any]:
    """`meshwright::nll` written out: log_softmax by amax, exp and sum, then a gather along the vocabulary."""
    logp = log_softmax_parts(logits, 1, False)
    ignored = target == ignore_index
    column = torch.where(ignored, start, target) - start
    picked = torch.neg(torch.squeeze(torch.gather(logp, 1, torch.unsqueeze(column, 1)), 1))
    return picked.masked_fill(ignored, 0.0), logp


@on(TABLE, mw.nll.default)
def nll(call: Call) -> Rule:
    return rule("t v, t -> t, t v", decompose={"v": nll_parts})


@on(TABLE, mw.nll_backward.default)
def nll_backward(call: Call) -> Rule:
    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return rebound(local, start=call.args[4] + local.start("v"))

    return rule("t, t v, t -> t v", ordered="v", linear=additive(call, {0}), localize=localize)


DECOMPOSITIONS: dict[Any, Any] = decompositions(
    [
        aten.nll_loss_forward,
        aten.nll_loss_backward,
        aten.nll_loss2d_forward,
        aten.nll_loss2d_backward,
        aten.mse_loss,
        aten.mse_loss_backward,
        aten.smooth_l1_loss,
        aten.smooth_l1_loss_backward,
        aten.huber_loss,
        aten.huber_loss_backward,
        aten.binary_cross_entropy,
        aten.binary_cross_entropy_backward,
        aten.binary_cross_entropy_with_logits,
        aten.soft_margin_loss,
        aten.soft_margin_loss_backward,
        aten.multi_margin_loss,
        aten.multilabel_margin_loss_forward,
    ]
)
"""Losses as element-wise ops, gathers and sums."""
