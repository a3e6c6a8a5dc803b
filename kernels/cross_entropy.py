"""Cross entropy on one op forward and one backward.

    nll[i] = -log softmax(logits[i])[target[i]]        dlogits = (softmax(logits) - onehot(target)) * grad

`nll` also returns logp = log_softmax(logits), all that the backward reads. Rows whose target is `ignore_index` give 0.
`start` is the class of column 0: a rank that holds the classes [start, start + v) passes its own, and a target outside
them has no column there. With `start` 0 in `nll` the logits are the whole row, and a target outside it is an error.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

lib = torch.library.Library("meshwright", "FRAGMENT")
lib.define(
    "nll(Tensor logits, Tensor target, int ignore_index, int start) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
lib.define(
    "nll_backward(Tensor grad, Tensor logp, Tensor target, int ignore_index, int start) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def held(target: torch.Tensor, ignore_index: int, start: int, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each target, 0 where there is none; whether there is one)."""
    there = (target != ignore_index) & (target >= start) & (target < start + v)
    return torch.where(there, target - start, 0), there


def _nll(logits, target, ignore_index: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(logits, 1)
    if not logp.numel():
        return logits.new_zeros(target.shape), logp
    column, there = held(target, ignore_index, start, logits.shape[1])
    if start == 0:
        _refuse_out_of_range(target, there, ignore_index)
    picked = logp.gather(1, column.unsqueeze(1)).squeeze(1)
    return picked.neg_().masked_fill_(there.logical_not(), 0.0), logp


def _refuse_out_of_range(target: torch.Tensor, there: torch.Tensor, ignore_index: int) -> None:
    right = there | (target == ignore_index)
    if target.device.type != "cpu":
        torch.ops.aten._assert_async.msg(right.all(), "a target is out of bounds")
    elif not bool(right.all()):
        raise IndexError(f"Target {int(target[right.logical_not()][0])} is out of bounds.")


def _nll_backward(grad, logp, target, ignore_index: int, start: int) -> torch.Tensor:
    """Two passes over [t, v]; the target's own entry, expm1(logp) * grad, is set apart, free of cancellation."""
    out = torch.exp(logp)
    if not out.numel():
        return out
    column, there = held(target, ignore_index, start, logp.shape[1])
    row = grad.masked_fill(target == ignore_index, 0.0)
    out.mul_(row.unsqueeze(1))
    at = column.unsqueeze(1)
    wide = torch.float64 if logp.dtype == torch.float64 else torch.float32
    own = torch.expm1(logp.gather(1, at).to(wide)) * row.unsqueeze(1).to(wide)
    return out.scatter_(1, at, torch.where(there.unsqueeze(1), own.to(out.dtype), out.gather(1, at)))


def _fake_nll(logits, target, ignore_index, start):
    return logits.new_empty(target.shape), logits.new_empty(logits.shape)


def _fake_nll_backward(grad, logp, target, ignore_index, start):
    return logp.new_empty(logp.shape)


def _setup(ctx, inputs, output) -> None:
    _, target, ctx.ignore_index, ctx.start = inputs
    ctx.save_for_backward(output[1], target)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, _):
    if grad is None:
        return None, None, None, None
    logp, target = ctx.saved_tensors
    dlogits = torch.ops.meshwright.nll_backward(grad, logp, target, ctx.ignore_index, ctx.start)
    return dlogits, None, None, None


lib.impl("nll", _nll, "CompositeExplicitAutograd")
lib.impl("nll_backward", _nll_backward, "CompositeExplicitAutograd")
torch.library.register_fake("meshwright::nll", _fake_nll, lib=lib)
torch.library.register_fake("meshwright::nll_backward", _fake_nll_backward, lib=lib)
torch.library.register_autograd("meshwright::nll", _autograd, setup_context=_setup, lib=lib)


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`F.cross_entropy` on `meshwright::nll`; soft targets and label smoothing by log_softmax and sums."""
    if size_average is not None or reduce is not None:
        mean = (True if size_average is None else size_average) and (True if reduce is None else reduce)
        reduction = "mean" if mean else "none" if reduce is False else "sum"
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is no reduction; give 'none', 'mean' or 'sum'")
    if torch.is_autocast_enabled(input.device.type) and input.dtype != torch.float64:
        input = input.float()
    classes = 0 if input.dim() == 1 else 1
    if target.is_floating_point():
        return _soft(input, target, weight, reduction, label_smoothing, classes)
    if tuple(input.shape[:classes] + input.shape[classes + 1 :]) != tuple(target.shape):
        raise ValueError(f"targets of shape {tuple(target.shape)} do not fit an input of {tuple(input.shape)}")
    rows = input.movedim(classes, -1).reshape(-1, input.shape[classes])
    flat = target.reshape(-1)
    losses, weights = _rows(rows, flat, weight, ignore_index, label_smoothing)
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum().to(losses.dtype)


def _rows(rows, target, weight, ignore_index: int, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the loss, and what it counts in the mean."""
    valid = target != ignore_index
    losses, logp = torch.ops.meshwright.nll(rows, target, ignore_index, 0)
    weights = valid if weight is None else weight[torch.where(valid, target, 0)] * valid
    if weight is not None:
        losses = losses * weights
    if smoothing:
        logp = torch.log_softmax(rows, 1)
        spread = (logp if weight is None else logp * weight).sum(1).neg().masked_fill(valid.logical_not(), 0.0)
        losses = losses * (1.0 - smoothing) + spread * (smoothing / rows.shape[1])
    return losses, weights


def _soft(input, target, weight, reduction: str, smoothing: float, classes: int) -> torch.Tensor:
    """Targets that are probabilities: -Σ_c w_c target_c logp_c, the mean over rows."""
    if smoothing:
        target = target * (1.0 - smoothing) + smoothing / input.shape[classes]
    logp = F.log_softmax(input, classes)
    if weight is not None:
        logp = logp * weight.reshape([-1] + [1] * (input.dim() - 1 - classes))
    losses = (logp * target).sum(classes).neg()
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / max(1, losses.numel())
