"""The last linear layer and its cross entropy without the logits: only a chunk of them exists at a time.

    z = x wᵀ + b            [t, v]        of a chunk of rows, then dropped
    lse[i] = log Σ_c exp(z[i, c])         picked[i] = z[i, target i]             nll = lse - picked
    dz[i, c] = g[i] (exp(z[i, c] - lse[i]) - [c = target i])                     recomputed chunk by chunk
    dx = dz w               dw = dzᵀ x    db = Σ_i dz[i]                         (arXiv 2411.09009)

x [t, h], w [v, h], b [v] or None, target [t] int64; lse has a gradient of its own (a z-loss reads it), which adds
exp(z - lse) of it to dz. The products run in the dtype of x; the sums over classes, and those of dw and db over chunks,
are in float32 or wider; what happens to a chunk of logits, in torch or by Triton kernels, is `logit_rows`. A rank that
holds the classes [start, start + v) passes its `start`: over a split vocabulary `linear_max` is a maximum over the
ranks and `linear_sums`, which computes the logits once more, a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .cross_entropy import cross_entropy, held, refuse
from .cross_entropy import wide as dtype_of_sums
from .logit_rows import TORCH, Rows, rows_for

CHUNK_BYTES, CHUNK_BYTES_CUDA, LEAST_ROWS = 1 << 24, 1 << 28, 256
"""Of a chunk of logits in the wide dtype; a chunk has so many rows at least, or its products are slow."""

lib = torch.library.Library("meshwright", "FRAGMENT")
for _line in (
    "linear_nll(Tensor x, Tensor w, Tensor? b, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    "linear_max(Tensor x, Tensor w, Tensor? b) -> Tensor",
    "linear_sums(Tensor x, Tensor w, Tensor? b, Tensor target, Tensor top, int ignore_index, int start, "
    "int classes) -> (Tensor, Tensor)",
    "linear_nll_backward(Tensor grad, Tensor? grad_lse, Tensor x, Tensor w, Tensor? b, Tensor target, Tensor lse, "
    "int ignore_index, int start) -> (Tensor, Tensor, Tensor)",
    "linear_nll_step(Tensor x, Tensor w, Tensor? b, Tensor target, Tensor grad, int ignore_index, bool want_x, "
    "bool want_w, bool want_b) -> (Tensor, Tensor, Tensor, Tensor)",
    "linear_nll_step_(Tensor(a!) total, Tensor x, Tensor w, Tensor? b, Tensor target, Tensor grad, int ignore_index, "
    "bool want_x, bool want_w, bool want_b) -> (Tensor, Tensor, Tensor(a!), Tensor)",
):
    lib.define(_line, tags=(torch.Tag.pt2_compliant_tag,))


def chunk_rows(v: int, dtype: torch.dtype, cuda: bool) -> int:
    """Rows of a chunk of logits."""
    nbytes = CHUNK_BYTES_CUDA if cuda else CHUNK_BYTES
    return max(LEAST_ROWS, nbytes // (max(1, v) * dtype_of_sums(dtype).itemsize))


def _logits(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, wide: bool = True) -> torch.Tensor:
    """[rows, v], if `wide` in the wide dtype; products of half precision are rounded to it, as a linear layer's are."""
    z = torch.mm(x, w.t()) if b is None else torch.addmm(b, x, w.t())
    return z.to(dtype_of_sums(x.dtype)) if wide else z


def _chunks(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, wide: bool = True):
    """(rows, their logits), chunk by chunk; the first alone of tensors without values: it shows all that is held."""
    step = chunk_rows(w.shape[0], x.dtype, x.device.type != "cpu")
    real = x.untyped_storage().device.type != "meta"
    for start in range(0, x.shape[0] if real else min(x.shape[0], step), step):
        rows = slice(start, min(start + step, x.shape[0]))
        yield rows, _logits(x[rows], w, b, wide)


def _forward(x, w, b, target, ignore_index: int, passes: Rows = TORCH) -> tuple[torch.Tensor, torch.Tensor]:
    """(nll, lse) of rows whose classes are all here."""
    nll, lse = _fake_forward(x, w, b, target, ignore_index)
    refuse(target, ignore_index, w.shape[0])
    column, there = held(target, ignore_index, 0, w.shape[0])
    for rows, z in _chunks(x, w, b, passes.wide):
        lse[rows], picked = passes.statistics(z, column[rows])
        nll[rows] = lse[rows] - picked
    return nll.masked_fill_(there.logical_not(), 0.0), lse


def _max(x, w, b) -> torch.Tensor:
    """The greatest logit of each row, -inf without classes."""
    out = _fake_max(x, w, b).fill_(-torch.inf)
    for rows, z in _chunks(x, w, b, False) if w.shape[0] else ():
        out[rows] = z.amax(1)
    return out


def _sums(x, w, b, target, top, ignore_index: int, start: int, classes: int, passes: Rows = TORCH):
    """(Σ_c exp(z - top), the target's logit or 0) over the classes [start, start + v) of `classes`."""
    refuse(target, ignore_index, classes)
    total, picked = _fake_sums(x, w, b, target, top, ignore_index, start, classes)
    if not w.shape[0]:
        return total.zero_(), picked.zero_()
    column, there = held(target, ignore_index, start, w.shape[0])
    for rows, z in _chunks(x, w, b, passes.wide):
        total[rows], picked[rows] = passes.sums(z, column[rows], top[rows])
    return total, picked.masked_fill_(there.logical_not(), 0.0)


def _backward(
    grad, grad_lse, x, w, b, target, lse, ignore_index: int, start: int, passes: Rows = TORCH
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dw, db); db is empty without a bias. The target's own entry is expm1(z - lse), free of cancellation."""
    dx, dw, db = _fake_backward(grad, grad_lse, x, w, b, target, lse, ignore_index, start)
    wide = dtype_of_sums(x.dtype)
    sums, bias = _room_for_sums(dw, wide, x.shape[0]), torch.zeros_like(db, dtype=wide)
    if not w.shape[0]:
        return dx.zero_(), dw, db
    column, there = held(target, ignore_index, start, w.shape[0])
    own = grad.to(wide).masked_fill(target == ignore_index, 0.0)
    every = own if grad_lse is None else own + grad_lse.to(wide)
    for rows, z in _chunks(x, w, b, passes.wide):
        dz = passes.gradient(z, column[rows], there[rows], lse[rows], every[rows], own[rows])
        if b is not None:
            bias += dz.sum(0, dtype=wide)
        dz = dz.to(x.dtype)
        torch.mm(dz, w, out=dx[rows])
        _add_product(sums, dz, x[rows], rows.start == 0)
    return dx, _as_gradient(sums, dw), db.copy_(bias)


def _step(
    x, w, b, target, grad, ignore_index: int, want_x: bool, want_w: bool, want_b: bool, passes: Rows = TORCH, total=None
) -> tuple[torch.Tensor, ...]:
    """(nll, dx, dw, db) of rows whose classes are all here, the logits made once; db is [1, v]; dw is added to `total`,
    of the dtype of sums, if there is one."""
    nll, dx, dw, db = _fake_step(x, w, b, target, grad, ignore_index, want_x, want_w and total is None, want_b)
    wide, v = nll.dtype, w.shape[0]
    refuse(target, ignore_index, v)
    sums = _room_for_sums(dw, wide, x.shape[0]) if total is None else total
    bias = torch.zeros_like(db, dtype=wide)
    column, there = held(target, ignore_index, 0, v)
    own = grad.to(wide).masked_fill(there.logical_not(), 0.0)
    for rows, z in _chunks(x, w, b, False):
        nll[rows], dz = passes.both(z, column[rows], own[rows])
        if want_b:
            bias += dz.sum(0, keepdim=True, dtype=wide)
        if want_x:
            torch.mm(dz, w, out=dx[rows])
        if want_w:
            _add_product(sums, dz, x[rows], total is None and rows.start == 0)
        del z, dz
    dw = sums if total is not None else _as_gradient(sums, dw)
    return nll.masked_fill_(there.logical_not(), 0.0), dx, dw, db.copy_(bias)


def _step_added(total, *args, passes: Rows = TORCH) -> tuple[torch.Tensor, ...]:
    """`_step` with dw added to `total`."""
    return _step(*args, passes=passes, total=total)


def _room_for_sums(dw: torch.Tensor, wide: torch.dtype, rows: int) -> torch.Tensor:
    """Where the products of chunks are summed: dw itself if it is wide. The first product is written, not added."""
    sums = dw if dw.dtype == wide else torch.empty_like(dw, dtype=wide)
    return sums if rows else sums.zero_()


def _as_gradient(sums: torch.Tensor, dw: torch.Tensor) -> torch.Tensor:
    return dw if sums is dw else dw.copy_(sums)


def _add_product(sums: torch.Tensor, dz: torch.Tensor, x: torch.Tensor, first: bool) -> None:
    """sums += dzᵀ x, or = of the first; the sum over chunks in the dtype of `sums`."""
    if sums.dtype == dz.dtype:
        sums.addmm_(dz.t(), x, beta=0 if first else 1)
    elif first:
        sums.copy_(torch.mm(dz.t(), x))
    else:
        sums += torch.mm(dz.t(), x)


def _fake_forward(x, w, b, target, ignore_index):
    return tuple(x.new_empty(target.shape, dtype=dtype_of_sums(x.dtype)) for _ in range(2))


def _fake_max(x, w, b):
    return x.new_empty(x.shape[:1], dtype=dtype_of_sums(x.dtype))


def _fake_sums(x, w, b, target, top, ignore_index, start, classes):
    return top.new_empty(top.shape), top.new_empty(top.shape)


def _fake_backward(grad, grad_lse, x, w, b, target, lse, ignore_index, start):
    return x.new_empty(x.shape), w.new_empty(w.shape), w.new_empty(0) if b is None else b.new_empty(b.shape)


def _fake_step(x, w, b, target, grad, ignore_index, want_x, want_w, want_b):
    nll = x.new_empty(target.shape, dtype=dtype_of_sums(x.dtype))
    dx, dw = (t.new_empty(t.shape if wanted else 0) for t, wanted in ((x, want_x), (w, want_w)))
    return nll, dx, dw, w.new_empty((1, w.shape[0]) if want_b else 0)


def _fake_step_added(total, x, w, b, target, grad, ignore_index, want_x, want_w, want_b):
    nll, dx, _, db = _fake_step(x, w, b, target, grad, ignore_index, want_x, False, want_b)
    return nll, dx, total, db


def _setup(ctx, inputs, output) -> None:
    x, w, b, target, ctx.ignore_index = inputs
    ctx.save_for_backward(x, w, b, target, output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, grad_lse):
    if grad is None and grad_lse is None:
        return (None,) * 5
    x, w, b, target, lse = ctx.saved_tensors
    grad = torch.zeros_like(lse) if grad is None else grad
    dx, dw, db = torch.ops.meshwright.linear_nll_backward(grad, grad_lse, x, w, b, target, lse, ctx.ignore_index, 0)
    return dx, dw, None if b is None else db, None, None


def _on_cuda(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op with the passes of x, its first operand of two dims, on its device."""

    def run(*args: Any) -> Any:
        return op(*args, passes=rows_for(next(a for a in args if isinstance(a, torch.Tensor) and a.dim() == 2)))

    return run


for _name, _op, _fake in (
    ("linear_nll", _forward, _fake_forward),
    ("linear_max", _max, _fake_max),
    ("linear_sums", _sums, _fake_sums),
    ("linear_nll_backward", _backward, _fake_backward),
    ("linear_nll_step", _step, _fake_step),
    ("linear_nll_step_", _step_added, _fake_step_added),
):
    lib.impl(_name, _op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"meshwright::{_name}", _fake, lib=lib)
for _name, _op in (
    ("linear_nll", _forward),
    ("linear_sums", _sums),
    ("linear_nll_backward", _backward),
    ("linear_nll_step", _step),
    ("linear_nll_step_", _step_added),
):
    lib.impl(_name, _on_cuda(_op), "CUDA")
torch.library.register_autograd("meshwright::linear_nll", _autograd, setup_context=_setup, lib=lib)


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: torch.Tensor | None = None,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """`F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, ...)` without the logits.

    Args:
        input: [..., h]; linear_weight: [v, h]; linear_bias: [v] or None; target: [...] class indices.
        weight: [v], of the classes, as in `F.cross_entropy`.
        z_loss: adds z_loss * lse² to each row's loss (Chowdhery et al., arXiv 2204.02311, section 5).

    Returns:
        The loss, float32 or wider; [...] with reduction="none".

    Raises:
        ValueError: a reduction that is none, or targets that do not fit. IndexError: a target that is no class.
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is no reduction; give 'none', 'mean' or 'sum'")
    if tuple(input.shape[:-1]) != tuple(target.shape):
        raise ValueError(f"targets of shape {tuple(target.shape)} do not fit an input of {tuple(input.shape)}")
    x, flat = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    losses, lse = torch.ops.meshwright.linear_nll(x, linear_weight, linear_bias, flat, ignore_index)
    valid = flat != ignore_index
    weights = valid if weight is None else weight[torch.where(valid, flat, 0)] * valid
    if weight is not None:
        losses = losses * weights
    if label_smoothing:
        spread = _spread(x, linear_weight, linear_bias, lse, weight).masked_fill(valid.logical_not(), 0.0)
        losses = losses * (1.0 - label_smoothing) + spread * (label_smoothing / linear_weight.shape[0])
    if z_loss:
        losses = losses + z_loss * lse.square().masked_fill(valid.logical_not(), 0.0)
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum().to(losses.dtype)


def _spread(x, w, b, lse, weight) -> torch.Tensor:
    """Σ_c u_c (lse - z_c) with u the class weights or 1: the sum over classes goes through the linear layer."""
    u = torch.ones_like(w[:, 0]) if weight is None else weight
    u, wide = u.to(lse.dtype), w.to(lse.dtype)
    total = torch.mv(x.to(lse.dtype), torch.mv(wide.t(), u))
    return lse * u.sum() - (total if b is None else total + torch.dot(b.to(lse.dtype), u))


def functional(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> torch.Tensor:
    """`F.linear_cross_entropy` on `meshwright::linear_nll`; probabilities and several outputs a row by their logits."""
    more = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
    more["ignore_index"] = -100 if ignore_index is None else ignore_index
    if target.is_floating_point() or linear_weight.dim() != 2:
        w = linear_weight.flatten(0, -2)
        logits = F.linear(input, w, None if linear_bias is None else linear_bias.reshape(-1))
        return cross_entropy(logits.reshape(*input.shape[:-1], *linear_weight.shape[:-1]), target, **more)
    out = input.dtype
    if torch.is_autocast_enabled(input.device.type):
        dtype, out = torch.get_autocast_dtype(input.device.type), torch.float32
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)
        linear_bias = None if linear_bias is None else linear_bias.to(dtype)
    return linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, **more).to(out)
