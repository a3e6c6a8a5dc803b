"""Cross entropy on one op forward and one backward.

    lse[i] = log Σ_c exp(z[i, c])         nll[i] = lse[i] - z[i, target[i]]
    dz[i, c] = g[i] (exp(z[i, c] - lse[i]) - [c = target i])

of the logits z [t, v]; the backward reads z and lse, and nothing else of that size exists: `nll_backward_` writes dz
over z. Sums are in float32 or wider, and go by chunks of rows that stay in a CPU's cache. Rows whose target is
`ignore_index` give 0. A rank that holds the classes [start, start + v) passes its `start`: over a split vocabulary
`nll_sums` is a sum over ranks, of what it finds below the greatest logit of all. A target that is no class at all is an
error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

CHUNK_BYTES, CHUNK_BYTES_CUDA = 1 << 20, 1 << 28
"""Of a chunk of logits in the wide dtype."""

lib = torch.library.Library("meshwright", "FRAGMENT")
for _line in (
    "nll(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    "nll_sums(Tensor logits, Tensor target, Tensor top, int ignore_index, int start, int classes) -> Tensor",
    "nll_backward(Tensor grad, Tensor logits, Tensor target, Tensor lse, int ignore_index, int start) -> Tensor",
):
    lib.define(_line, tags=(torch.Tag.pt2_compliant_tag,))


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over classes are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def held(target: torch.Tensor, ignore_index: int, start: int, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each target, 0 where there is none; whether there is one)."""
    there = (target != ignore_index) & (target >= start) & (target < start + v)
    return torch.where(there, target - start, 0), there


def refuse(target: torch.Tensor, ignore_index: int, v: int) -> None:
    """A target that is no class is an error: at once, or on a GPU when the kernel runs."""
    right = (target == ignore_index) | ((target >= 0) & (target < v))
    if target.device.type != "cpu":
        torch.ops.aten._assert_async.msg(right.all(), "a target is out of bounds")
    elif not bool(right.all()):
        raise IndexError(f"Target {int(target[right.logical_not()][0])} is out of bounds.")


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    """The rows of each chunk; the first alone of a tensor without values, for it shows all that is held."""
    t, v = logits.shape
    nbytes = CHUNK_BYTES if logits.device.type == "cpu" else CHUNK_BYTES_CUDA
    step = max(1, nbytes // (max(1, v) * wide(logits.dtype).itemsize))
    real = logits.untyped_storage().device.type != "meta"
    for start in range(0, t if real else min(t, step), step):
        yield slice(start, min(start + step, t))


def _nll(logits, target, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    t, v = logits.shape
    refuse(target, ignore_index, v)
    lse = logits.new_empty(t, dtype=wide(logits.dtype))
    if not logits.numel():
        return logits.new_zeros(t), lse.fill_(-torch.inf)
    for rows in _chunks(logits):
        lse[rows] = torch.logsumexp(logits[rows].to(lse.dtype), 1)
    column, there = held(target, ignore_index, 0, v)
    nll = (lse - logits.gather(1, column.unsqueeze(1)).squeeze(1)).masked_fill_(there.logical_not(), 0.0)
    return nll.to(logits.dtype), lse


def _nll_sums(logits, target, top, ignore_index: int, start: int, classes: int) -> torch.Tensor:
    """[2, t]: Σ_c exp(z - top), and the target's logit or 0, over the classes [start, start + v) of `classes`."""
    t, v = logits.shape
    refuse(target, ignore_index, classes)
    sums = logits.new_zeros(2, t, dtype=wide(logits.dtype))
    if not logits.numel():
        return sums
    total, picked = sums
    for rows in _chunks(logits):
        total[rows] = (logits[rows].to(total.dtype) - top[rows].unsqueeze(1)).exp_().sum(1)
    column, there = held(target, ignore_index, start, v)
    own = logits.gather(1, column.unsqueeze(1)).squeeze(1)
    picked.copy_(own).masked_fill_(there.logical_not(), 0.0)
    return sums


def _nll_backward(grad, logits, target, lse, ignore_index: int, start: int) -> torch.Tensor:
    return _write_dz(torch.empty_like(logits), grad, logits, target, lse, ignore_index, start)


def nll_backward_(grad, logits, target, lse, ignore_index: int, start: int) -> torch.Tensor:
    return _write_dz(logits, grad, logits, target, lse, ignore_index, start)


def _write_dz(out, grad, logits, target, lse, ignore_index: int, start: int) -> torch.Tensor:
    """Into `out`, which may be the logits; the target's own entry, expm1(z - lse) * g, is free of cancellation."""
    if not out.numel():
        return out
    column, there = held(target, ignore_index, start, logits.shape[1])
    at, row = column.unsqueeze(1), grad.to(lse.dtype).masked_fill(target == ignore_index, 0.0).unsqueeze(1)
    own = torch.expm1(logits.gather(1, at) - lse.unsqueeze(1)) * row
    for rows in _chunks(logits):
        _write_chunk(out[rows], logits[rows], lse[rows].unsqueeze(1), row[rows])
    return out.scatter_(1, at, torch.where(there.unsqueeze(1), own.to(out.dtype), out.gather(1, at)))


def _write_chunk(out: torch.Tensor, logits: torch.Tensor, lse: torch.Tensor, row: torch.Tensor) -> None:
    if out.dtype == lse.dtype:
        torch.sub(logits, lse, out=out).exp_().mul_(row)
    else:
        out.copy_((logits - lse).exp_().mul_(row))


def _fake_nll(logits, target, ignore_index):
    return logits.new_empty(target.shape), logits.new_empty(target.shape, dtype=wide(logits.dtype))


def _fake_nll_sums(logits, target, top, ignore_index, start, classes):
    return logits.new_empty((2, *target.shape), dtype=wide(logits.dtype))


def _fake_nll_backward(grad, logits, target, lse, ignore_index, start):
    return torch.empty_like(logits)


def _setup(ctx, inputs, output) -> None:
    logits, target, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, _):
    if grad is None:
        return None, None, None
    logits, target, lse = ctx.saved_tensors
    return torch.ops.meshwright.nll_backward(grad, logits, target, lse, ctx.ignore_index, 0), None, None


for _name, _impl, _fake in (
    ("nll", _nll, _fake_nll),
    ("nll_sums", _nll_sums, _fake_nll_sums),
    ("nll_backward", _nll_backward, _fake_nll_backward),
):
    lib.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"meshwright::{_name}", _fake, lib=lib)
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
    flat = target.reshape(-1).long()
    losses, weights = _rows(rows, flat, weight, ignore_index, label_smoothing)
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum().to(losses.dtype)


def _rows(rows, target, weight, ignore_index: int, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the loss, and what it counts in the mean."""
    valid = target != ignore_index
    losses, _ = torch.ops.meshwright.nll(rows, target, ignore_index)
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
