"""Batch normalisation. Channels are free. In training a split of the batch or of space needs the statistics of the
whole, so the call is first written out in means and sums (Ioffe & Szegedy, arXiv 1502.03167):

    m = mean x    v = mean (x - m)²    r = 1 / sqrt(v + eps)    x̂ = (x - m) r    y = x̂ w + b
    running = (1 - momentum) running + momentum (m, v n / (n - 1))
    dw = Σ g x̂    db = Σ g    dx = w r (g - db / n - x̂ dw / n)

In evaluation the statistics are given, and batch and space are free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .dims import additive, bound, names, whole_rule
from .lead import guarded, outputs_of, own_whole
from .notation import Dims, Rule
from .softmax import wide
from .split import Call
from .table import Table, on

aten = torch.ops.aten
TABLE: Table = {}


def _spread(x: torch.Tensor, stat: torch.Tensor) -> torch.Tensor:
    return stat.reshape([1, -1] + [1] * (x.dim() - 2))


def _others(x: torch.Tensor) -> tuple[list[int], int]:
    """The dims but the channel's, and how many elements a channel has."""
    dims = [i for i in range(x.dim()) if i != 1]
    return dims, x.numel() // max(x.shape[1], 1)


def _trained(x: torch.Tensor, weight: Any, bias: Any, eps: float) -> tuple[torch.Tensor, ...]:
    """(y, mean, 1 / standard deviation, variance) of a batch."""
    dims, _ = _others(x)
    z = wide(x)
    mean = torch.mean(z, dims)
    centred = z - _spread(x, mean)
    var = torch.mean(centred * centred, dims)
    rstd = torch.rsqrt(var + eps)
    y = centred * _spread(x, rstd)
    y = y if weight is None else y * _spread(x, weight)
    y = y if bias is None else y + _spread(x, bias)
    return y.to(x.dtype), mean, rstd, var


def functional_parts(x, weight, bias, running_mean, running_var, training, momentum, eps) -> tuple[torch.Tensor, ...]:
    """`_native_batch_norm_legit_functional` in training, written out."""
    y, mean, rstd, var = _trained(x, weight, bias, eps)
    _, n = _others(x)
    new_mean = running_mean * (1.0 - momentum) + mean * momentum
    new_var = running_var * (1.0 - momentum) + var * (momentum * n / max(n - 1, 1))
    return y, mean, rstd, new_mean.to(running_mean.dtype), new_var.to(running_var.dtype)


def no_stats_parts(x, weight, bias, training, momentum, eps) -> tuple[torch.Tensor, ...]:
    """`_native_batch_norm_legit.no_stats` in training, written out."""
    return _trained(x, weight, bias, eps)[:3]


def backward_parts(
    grad, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
) -> tuple[torch.Tensor | None, ...]:
    """`native_batch_norm_backward` in training, written out."""
    dims, n = _others(x)
    g, unit = wide(grad), (wide(x) - _spread(x, save_mean)) * _spread(x, save_invstd)
    db, dw = torch.sum(g, dims), torch.sum(g * unit, dims)
    scale = save_invstd if weight is None else save_invstd * weight
    dx = (g - _spread(x, db / n) - unit * _spread(x, dw / n)) * _spread(x, scale)
    kind = x.dtype if weight is None else weight.dtype
    outs = (dx.to(x.dtype), dw.to(kind), db.to(kind))
    return tuple(o if want else None for o, want in zip(outs, output_mask, strict=True))


def _channels(x: torch.Tensor) -> tuple[Dims, tuple[str, ...]]:
    """Dims of x with the channel as `c`, and the other factors."""
    dims = names(x.shape)
    dims = (dims[0], ("c",), *dims[2:])
    return dims, tuple(f for i, d in enumerate(dims) if i != 1 for f in d)


def _stat_dims(tensors: Any, channels: int, tag: str) -> tuple[list[Dims], frozenset[str]]:
    """Dims of per-channel tensors; an empty one (no statistics kept) has a whole factor of its own."""
    out, whole = [], frozenset()
    for i, t in enumerate(tensors):
        if tuple(t.shape) == (channels,):
            out.append((("c",),))
        else:
            dims, own = own_whole(t.shape, f"{tag}{i}_")
            out.append(dims)
            whole |= own
    return out, whole


def _forward(call: Call, training: bool, parts: Callable | None) -> Rule:
    x = call.operands[0]
    dims, others = _channels(x)
    ins, whole = _stat_dims(call.operands[1:], x.shape[1], "i")
    outs, more = _stat_dims(call.outputs[1:], x.shape[1], "o")
    whole |= more
    decompose = {f: parts for f in others} if training and parts else {}
    if training and not parts:
        whole |= set(others)
    return guarded(Rule((dims, *ins), (dims, *outs), whole=whole, decompose=decompose), call)


@on(TABLE, aten._native_batch_norm_legit_functional.default)
def functional(call: Call) -> Rule:
    return _forward(call, bound(call)["training"], functional_parts)


@on(TABLE, aten._native_batch_norm_legit.no_stats)
def no_stats(call: Call) -> Rule:
    return _forward(call, bound(call)["training"], no_stats_parts)


@on(TABLE, aten.native_batch_norm.default)
def with_hidden_write(call: Call) -> Rule:
    """Training writes the running statistics in place: only channels split then."""
    return _forward(call, bound(call)["training"], None)


@on(TABLE, aten._native_batch_norm_legit_no_training.default)
def evaluated(call: Call) -> Rule:
    return _forward(call, False, None)


@on(TABLE, aten.native_batch_norm_backward.default)
def backward(call: Call) -> Rule:
    """`n c s, n c s, c ... -> n c s, c {n s}, c {n s}`; in training n and s by parts."""
    a = bound(call)
    x = a["input"]
    if x.dim() < 2:
        return whole_rule(call)
    dims, others = _channels(x)
    ins, whole = _stat_dims(call.operands[2:], x.shape[1], "i")
    sums = {} if a["train"] else {f: "sum" for f in others}
    return guarded(
        Rule(
            (dims, dims, *ins),
            outputs_of(call, dims, (("c",),), (("c",),)),
            ({}, sums, sums),
            whole=whole,
            linear=additive(call, {0}),
            decompose={f: backward_parts for f in others} if a["train"] else {},
        ),
        call,
    )
