"""A residual added, and the norm of the sum: one op forward and one backward for RMS norm, and two for layer norm.

    h = x + residual        y = norm(h) w (+ b)        gradient of x and of residual: norm's of h, plus that of h itself

y and h are written in one pass over x and residual, and backward reads the gradients of y and h in one (`norm_rows.py`
has the formulas). h has the dtype and bits of the sum in plain torch; statistics are float32 or wider, the normalised
dims kept as 1. Layer norm: Ba, Kiros & Hinton, arXiv 1607.06450. Rows wider than `norm_rows.WIDEST` and float64 run as
on the CPU.
"""

from __future__ import annotations

import math

import torch

from . import norm_rows, rms_norm
from .tri import wide_of

lib = torch.library.Library("meshwright", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
lib.define(
    "add_rms_norm(Tensor x, Tensor residual, int[] normalized_shape, Tensor? weight, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
lib.define(
    "add_rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor sum, int[] normalized_shape, Tensor rstd, "
    "Tensor? weight) -> (Tensor, Tensor)",
    tags=_TAGS,
)
lib.define(
    "add_layer_norm(Tensor x, Tensor residual, int[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
lib.define(
    "add_layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor sum, int[] normalized_shape, Tensor mean, "
    "Tensor rstd, Tensor? weight, Tensor? bias) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _rms(x, residual, normalized_shape, weight, eps: float):
    total = (x + residual).contiguous()
    y, rstd = rms_norm._forward(total, normalized_shape, weight, eps)
    return y, total, rstd


def _rms_backward(grad, grad_sum, sum, normalized_shape, rstd, weight):
    dx, dw = rms_norm._backward(grad, sum.to(rstd.dtype), normalized_shape, rstd, weight)
    return _plus(dx, grad_sum, sum), dw if weight is not None else sum.new_empty(0)


def _plus(dx, grad_sum, sum):
    return (dx if grad_sum is None else dx.add_(grad_sum)).to(sum.dtype).contiguous()


def _layer(x, residual, normalized_shape, weight, bias, eps: float):
    total = (x + residual).contiguous()
    h = total.to(wide_of(x.dtype))
    dims = rms_norm._normed(normalized_shape)
    mean = h.mean(dims, keepdim=True)
    y = h - mean
    rstd = torch.rsqrt(y.square().mean(dims, keepdim=True) + eps)
    y.mul_(rstd)
    y = y if weight is None else y.mul_(weight)
    y = y if bias is None else y.add_(bias)
    return y.to(x.dtype).contiguous(), total, mean.contiguous(), rstd.contiguous()


def _layer_backward(grad, grad_sum, sum, normalized_shape, mean, rstd, weight, bias):
    dims = rms_norm._normed(normalized_shape)
    rows = (math.prod(sum.shape[: sum.dim() - len(dims)]), *normalized_shape)
    g, unit = grad.to(rstd.dtype), (sum - mean).mul_(rstd)
    dw = sum.new_empty(0) if weight is None else (g * unit).reshape(rows).sum(0).to(weight.dtype)
    db = sum.new_empty(0) if bias is None else g.reshape(rows).sum(0).to(bias.dtype)
    gw = g if weight is None else g * weight
    dx = gw - gw.mean(dims, keepdim=True) - unit * (gw * unit).mean(dims, keepdim=True)
    return _plus(dx.mul_(rstd), grad_sum, sum), dw, db


def triton_rms(x, residual, normalized_shape, weight, eps: float):
    """`_rms` by one kernel."""
    n = math.prod(normalized_shape)
    if not norm_rows.fits(n, x, residual, weight):
        return _rms(x, residual, normalized_shape, weight, eps)
    y, total, rstd = _fake_rms(x, residual, normalized_shape, weight, eps)
    norm_rows.run_forward(x, residual, n, weight, None, eps, y, total, None, rstd)
    return y, total, rstd


def triton_rms_backward(grad, grad_sum, sum, normalized_shape, rstd, weight):
    """`_rms_backward` by one kernel and a sum."""
    n = math.prod(normalized_shape)
    if not norm_rows.fits(n, grad, grad_sum, sum, weight):
        return _rms_backward(grad, grad_sum, sum, normalized_shape, rstd, weight)
    dx, none = _fake_rms_backward(grad, grad_sum, sum, normalized_shape, rstd, weight)
    dw, _ = norm_rows.run_backward(grad, grad_sum, sum, n, weight, None, rstd, dx, False)
    return dx, _like(dw, weight, none)


def triton_layer(x, residual, normalized_shape, weight, bias, eps: float):
    """`_layer` by one kernel."""
    n = math.prod(normalized_shape)
    if not norm_rows.fits(n, x, residual, weight, bias):
        return _layer(x, residual, normalized_shape, weight, bias, eps)
    y, total, mean, rstd = _fake_layer(x, residual, normalized_shape, weight, bias, eps)
    norm_rows.run_forward(x, residual, n, weight, bias, eps, y, total, mean, rstd)
    return y, total, mean, rstd


def triton_layer_backward(grad, grad_sum, sum, normalized_shape, mean, rstd, weight, bias):
    """`_layer_backward` by one kernel and two sums."""
    n = math.prod(normalized_shape)
    if not norm_rows.fits(n, grad, grad_sum, sum, weight, bias):
        return _layer_backward(grad, grad_sum, sum, normalized_shape, mean, rstd, weight, bias)
    made = _fake_layer_backward(grad, grad_sum, sum, normalized_shape, mean, rstd, weight, bias)
    dw, db = norm_rows.run_backward(grad, grad_sum, sum, n, weight, mean, rstd, made[0], bias is not None)
    return made[0], _like(dw, weight, made[1]), _like(db, bias, made[2])


def _like(found, tensor, none):
    return none if tensor is None else found.to(tensor.dtype).reshape(tensor.shape)


def _statistic(x, normalized_shape):
    lead = x.shape[: x.dim() - len(normalized_shape)]
    return x.new_empty((*lead, *(1 for _ in normalized_shape)), dtype=wide_of(x.dtype))


def _fake_rms(x, residual, normalized_shape, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape), _statistic(x, normalized_shape)


def _fake_layer(x, residual, normalized_shape, weight, bias, eps):
    return *_fake_rms(x, residual, normalized_shape, weight, eps), _statistic(x, normalized_shape)


def _fake_rms_backward(grad, grad_sum, sum, normalized_shape, rstd, weight):
    return sum.new_empty(sum.shape), sum.new_empty(0) if weight is None else weight.new_empty(weight.shape)


def _fake_layer_backward(grad, grad_sum, sum, normalized_shape, mean, rstd, weight, bias):
    made = (sum.new_empty(0) if t is None else t.new_empty(t.shape) for t in (weight, bias))
    return sum.new_empty(sum.shape), *made


for _name, _op, _kernel, _fake in (
    ("add_rms_norm", _rms, triton_rms, _fake_rms),
    ("add_rms_norm_backward", _rms_backward, triton_rms_backward, _fake_rms_backward),
    ("add_layer_norm", _layer, triton_layer, _fake_layer),
    ("add_layer_norm_backward", _layer_backward, triton_layer_backward, _fake_layer_backward),
):
    lib.impl(_name, _op, "CompositeExplicitAutograd")
    lib.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"meshwright::{_name}", _fake, lib=lib)


def _setup(ctx, inputs, output) -> None:
    _, _, ctx.shape, *affine, _ = inputs
    ctx.save_for_backward(*output[1:], *affine)
    ctx.stats = len(output) - 2
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, grad_sum, *_):
    total, *rest = ctx.saved_tensors
    affine = rest[ctx.stats :]
    none = (None,) * (2 + len(affine))
    if grad is None:
        return grad_sum, grad_sum, *none
    ops = torch.ops.meshwright
    backward = ops.add_rms_norm_backward if len(affine) == 1 else ops.add_layer_norm_backward
    dx, *more = backward(grad, grad_sum, total, ctx.shape, *rest)
    return dx, dx, None, *(None if t is None else d for d, t in zip(more, affine, strict=True)), None


for _name in ("add_rms_norm", "add_layer_norm"):
    torch.library.register_autograd(f"meshwright::{_name}", _autograd, setup_context=_setup, lib=lib)
