"""Cross entropy, split over rows (free) and over the vocabulary; and the losses that never reach a graph whole.

`DECOMPOSITIONS` is for tracing: element-wise work and sums, whose means are then those of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.cross_entropy import wide
from ..compat import decompositions
from .dims import additive, bound, rebound
from .notation import Local, Rule, rule
from .split import Call
from .table import Table, on

aten = torch.ops.aten
mw = torch.ops.meshwright
TABLE: Table = {}


def nll_parts(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> tuple[Any, Any]:
    """`meshwright::nll` as a maximum and sums over the vocabulary."""
    top = torch.amax(logits, (1,)).to(wide(logits.dtype))
    sums = mw.nll_sums(logits, target, top, ignore_index, 0, logits.shape[1])
    lse, picked = torch.log(sums[0]) + top, sums[1]
    return (lse.masked_fill(target == ignore_index, 0.0) - picked).to(logits.dtype), lse


@on(TABLE, mw.nll.default)
def nll(call: Call) -> Rule:
    return rule("t v, t -> t, t", decompose={"v": nll_parts})


def _local_start(call: Call) -> Any:
    def localize(local: Local) -> tuple[Any, tuple, dict]:
        return rebound(local, start=bound(call)["start"] + local.start("v"))

    return localize


@on(TABLE, mw.nll_sums.default)
def nll_sums(call: Call) -> Rule:
    return rule("t v, t, t -> p! t {v}", ordered="v", localize=_local_start(call))


@on(TABLE, mw.nll_backward.default)
def nll_backward(call: Call) -> Rule:
    return rule("t, t v, t, t -> t v", ordered="v", linear=additive(call, {0}), localize=_local_start(call))


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
