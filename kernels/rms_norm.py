"""RMS norm (Zhang & Sennrich, arXiv 1910.07467) as one op forward and one backward.

    r = 1 / sqrt(mean(x²) + eps)      y = x r w      dw = Σ_rows g x r      dx = r (g w - x r² mean(g w x))

The arithmetic is float32 or wider; y has the dtype of x, rstd that of the arithmetic, its normalised dims kept as 1.
On CUDA the kernels of `norm_rows` run; rows wider than its `WIDEST` and float64 run as on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import norm_rows
from .tri import wide_of

lib = torch.library.Library("meshwright", "FRAGMENT")
lib.define(
    "rms_norm(Tensor x, int[] normalized_shape, Tensor? weight, float eps) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
lib.define(
    "rms_norm_backward(Tensor grad, Tensor x, int[] normalized_shape, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def functional(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`F.rms_norm` on `meshwright::rms_norm`."""
    shape = list(normalized_shape)
    if list(input.shape[input.dim() - len(shape) :]) != shape or (weight is not None and list(weight.shape) != shape):
        raise RuntimeError(f"normalized_shape {shape} does not fit an input of {tuple(input.shape)} or the weight")
    eps = torch.finfo(wide_of(input.dtype)).eps if eps is None else eps
    return torch.ops.meshwright.rms_norm(input, shape, weight, eps)[0]


def _normed(shape: Sequence[int]) -> list[int]:
    return list(range(-len(shape), 0))


def _forward(x, normalized_shape, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(wide_of(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(_normed(normalized_shape), keepdim=True) + eps)
    y = wide * rstd
    if weight is not None:
        y = y.mul_(weight)
    return y.to(x.dtype).contiguous(), rstd.contiguous()


def _backward(grad, x, normalized_shape, rstd, weight) -> tuple[torch.Tensor, torch.Tensor]:
    dims = _normed(normalized_shape)
    g, unit = grad.to(rstd.dtype), x.to(rstd.dtype) * rstd
    rows = (math.prod(x.shape[: x.dim() - len(dims)]), *normalized_shape)
    dw = x.new_empty(0) if weight is None else (g * unit).reshape(rows).sum(0).to(weight.dtype)
    gw = g if weight is None else g * weight
    dx = (gw - unit * (gw * unit).mean(dims, keepdim=True)).mul_(rstd)
    return dx.to(x.dtype).contiguous(), dw


def triton_forward(x, normalized_shape, weight, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`_forward` by one kernel."""
    n = math.prod(normalized_shape)
    if not norm_rows.fits(n, x, weight):
        return _forward(x, normalized_shape, weight, eps)
    y, rstd = _fake_forward(x, normalized_shape, weight, eps)
    norm_rows.run_forward(x, None, n, weight, None, eps, y, None, None, rstd)
    return y, rstd


def triton_backward(grad, x, normalized_shape, rstd, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """`_backward` by one kernel and a sum."""
    n = math.prod(normalized_shape)
    if not norm_rows.fits(n, grad, x, weight):
        return _backward(grad, x, normalized_shape, rstd, weight)
    dx, none = _fake_backward(grad, x, normalized_shape, rstd, weight)
    dw, _ = norm_rows.run_backward(grad, None, x, n, weight, None, rstd, dx, False)
    return dx, none if dw is None else dw.to(weight.dtype).reshape(weight.shape)


def _fake_forward(x, normalized_shape, weight, eps):
    lead = x.dim() - len(normalized_shape)
    rstd = x.new_empty((*x.shape[:lead], *(1 for _ in normalized_shape)), dtype=wide_of(x.dtype))
    return x.new_empty(x.shape), rstd


def _fake_backward(grad, x, normalized_shape, rstd, weight):
    return x.new_empty(x.shape), x.new_empty(0) if weight is None else weight.new_empty(weight.shape)


def _setup(ctx, inputs, output) -> None:
    x, ctx.shape, weight, _ = inputs
    ctx.save_for_backward(x, output[1], weight)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, _):
    if grad is None:
        return None, None, None, None
    x, rstd, weight = ctx.saved_tensors
    dx, dw = torch.ops.meshwright.rms_norm_backward(grad, x, ctx.shape, rstd, weight)
    return dx, None, None if weight is None else dw, None


lib.impl("rms_norm", _forward, "CompositeExplicitAutograd")
lib.impl("rms_norm", triton_forward, "CUDA")
lib.impl("rms_norm_backward", _backward, "CompositeExplicitAutograd")
lib.impl("rms_norm_backward", triton_backward, "CUDA")
torch.library.register_fake("meshwright::rms_norm", _fake_forward, lib=lib)
torch.library.register_fake("meshwright::rms_norm_backward", _fake_backward, lib=lib)
torch.library.register_autograd("meshwright::rms_norm", _autograd, setup_context=_setup, lib=lib)
