"""Two partial attentions of the same queries over different keys, merged by their log-sum-exps (arXiv 2307.08691, 3.1).

    lse = log(exp(lse_a) + exp(lse_b))          w_a = exp(lse_a - lse), w_b alike          out = w_a out_a + w_b out_b
    d out_a = w_a g          d lse_a = w_a (Σ_d g (out_a - out) + glse)                    b alike

Exponents are of differences that are at most 0, so nothing overflows; -inf on one side leaves the other, on both gives
out 0 and lse -inf, with gradients 0. The arithmetic is float32 or wider; out has the dtype of out_a, lse that of the
arithmetic. No plan calls it: attention is not split over keys yet (docs/kernels.md).
"""

from __future__ import annotations

import math

import torch

from .tri import HAVE, constexpr, jit, launch, pow2, rows_of, tl, wide_of

ELEMENTS = 1024
"""That a program takes, of each operand."""

lib = torch.library.Library("meshwright", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
lib.define("merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)", tags=_TAGS)
lib.define(
    "merge_attention_backward(Tensor grad, Tensor? grad_lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _weights(lse_a, lse_b) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    return torch.exp(lse_a - shift), torch.exp(lse_b - shift), lse


def _merge(out_a, lse_a, out_b, lse_b):
    wide = wide_of(out_a.dtype)
    a, b, lse = _weights(lse_a.to(wide), lse_b.to(wide))
    out = torch.addcmul(out_a * a.unsqueeze(-1), out_b.to(wide), b.unsqueeze(-1))
    return out.to(out_a.dtype).contiguous(), lse.contiguous()


def _merge_backward(grad, grad_lse, out_a, lse_a, out_b, lse_b):
    wide = wide_of(out_a.dtype)
    a, b, _ = _weights(lse_a.to(wide), lse_b.to(wide))
    g = grad.to(wide)
    dot_a, dot_b = (g * out_a).sum(-1), (g * out_b).sum(-1)
    more = 0.0 if grad_lse is None else grad_lse
    # Σ g (out_a - out) = w_b (Σ g out_a - Σ g out_b): w_a + w_b = 1
    d_lse_a, d_lse_b = a * (b * (dot_a - dot_b) + more), b * (a * (dot_b - dot_a) + more)
    made = (g * a.unsqueeze(-1)).to(out_a.dtype), d_lse_a, (g * b.unsqueeze(-1)).to(out_b.dtype), d_lse_b
    return tuple(x.to(like.dtype).contiguous() for x, like in zip(made, (out_a, lse_a, out_b, lse_b), strict=True))


@jit
def _weights_of(lse_a, lse_b):
    """w_a, w_b, lse."""
    top = tl.maximum(lse_a, lse_b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp(lse_a - shift), tl.exp(lse_b - shift)
    total = a + b
    some = tl.where(total == 0.0, 1.0, total)
    return a / some, b / some, tl.where(total == 0.0, float("-inf"), tl.log(some) + shift)


@jit
def _parts(out_a, lse_a, out_b, lse_b, rows, d, ROWS: constexpr, BLOCK: constexpr):
    """Of a program's rows: which they are, where their numbers lie and which of these there are; w_a, w_b and lse; the
    numbers of both parts."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (col < d)[None, :]
    at = row[:, None] * d + col[None, :]
    la = tl.load(lse_a + row, mask=row < rows, other=0.0).to(tl.float32)
    lb = tl.load(lse_b + row, mask=row < rows, other=0.0).to(tl.float32)
    a, b, both = _weights_of(la, lb)
    va = tl.load(out_a + at, mask=there, other=0.0).to(tl.float32)
    vb = tl.load(out_b + at, mask=there, other=0.0).to(tl.float32)
    return row, at, there, a, b, both, va, vb


@jit
def merge_kernel(out_a, lse_a, out_b, lse_b, out, lse, rows, d, ROWS: constexpr, BLOCK: constexpr):
    row, at, there, a, b, both, va, vb = _parts(out_a, lse_a, out_b, lse_b, rows, d, ROWS, BLOCK)
    tl.store(out + at, (va * a[:, None] + vb * b[:, None]).to(out.dtype.element_ty), mask=there)
    tl.store(lse + row, both, mask=row < rows)


@jit
def merge_backward_kernel(
    grad, grad_lse, out_a, lse_a, out_b, lse_b, d_out_a, d_lse_a, d_out_b, d_lse_b, rows, d,
    LSE: constexpr, ROWS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    row, at, there, a, b, _, va, vb = _parts(out_a, lse_a, out_b, lse_b, rows, d, ROWS, BLOCK)
    g = tl.load(grad + at, mask=there, other=0.0).to(tl.float32)
    apart = tl.sum(g * va, 1) - tl.sum(g * vb, 1)
    da, db = a * b * apart, -(a * b * apart)
    if LSE:
        more = tl.load(grad_lse + row, mask=row < rows, other=0.0).to(tl.float32)
        da += a * more
        db += b * more
    tl.store(d_out_a + at, (g * a[:, None]).to(d_out_a.dtype.element_ty), mask=there)
    tl.store(d_out_b + at, (g * b[:, None]).to(d_out_b.dtype.element_ty), mask=there)
    tl.store(d_lse_a + row, da.to(d_lse_a.dtype.element_ty), mask=row < rows)
    tl.store(d_lse_b + row, db.to(d_lse_b.dtype.element_ty), mask=row < rows)


def fits(*tensors: torch.Tensor | None) -> bool:
    """Whether the kernels take such a call."""
    narrow = all(t is None or t.dtype in (torch.float32, torch.float16, torch.bfloat16) for t in tensors)
    return HAVE and narrow and 0 < tensors[0].shape[-1] <= ELEMENTS  # type: ignore[union-attr]


def _grid(rows: int, d: int) -> dict[str, int]:
    block = pow2(d)
    return {"ROWS": max(1, min(ELEMENTS // block, pow2(rows))), "BLOCK": block}


def triton_merge(out_a, lse_a, out_b, lse_b):
    """`_merge` by one kernel."""
    if not fits(out_a, lse_a, out_b, lse_b):
        return _merge(out_a, lse_a, out_b, lse_b)
    d, (out, lse) = out_a.shape[-1], _fake_merge(out_a, lse_a, out_b, lse_b)
    grid = _grid(lse.numel(), d)
    launch(
        merge_kernel, -(-lse.numel() // grid["ROWS"]), rows_of(out_a, d), lse_a.contiguous(), rows_of(out_b, d),
        lse_b.contiguous(), out, lse, lse.numel(), d, **grid,
    )  # fmt: skip
    return out, lse


def triton_merge_backward(grad, grad_lse, out_a, lse_a, out_b, lse_b):
    """`_merge_backward` by one kernel."""
    if not fits(grad, grad_lse, out_a, lse_a, out_b, lse_b):
        return _merge_backward(grad, grad_lse, out_a, lse_a, out_b, lse_b)
    d, made = out_a.shape[-1], _fake_merge_backward(grad, grad_lse, out_a, lse_a, out_b, lse_b)
    grid, more = _grid(lse_a.numel(), d), None if grad_lse is None else grad_lse.contiguous()
    launch(
        merge_backward_kernel, -(-lse_a.numel() // grid["ROWS"]), rows_of(grad, d), more, rows_of(out_a, d),
        lse_a.contiguous(), rows_of(out_b, d), lse_b.contiguous(), *made, lse_a.numel(), d, LSE=more is not None,
        **grid,
    )  # fmt: skip
    return made


def _fake_merge(out_a, lse_a, out_b, lse_b):
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape, dtype=wide_of(out_a.dtype))


def _fake_merge_backward(grad, grad_lse, out_a, lse_a, out_b, lse_b):
    return tuple(t.new_empty(t.shape) for t in (out_a, lse_a, out_b, lse_b))


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, grad_lse):
    if grad is None and grad_lse is None:
        return (None,) * 4
    grad = torch.zeros_like(ctx.saved_tensors[0]) if grad is None else grad
    return torch.ops.meshwright.merge_attention_backward(grad, grad_lse, *ctx.saved_tensors)


for _name, _op, _kernel, _fake in (
    ("merge_attention", _merge, triton_merge, _fake_merge),
    ("merge_attention_backward", _merge_backward, triton_merge_backward, _fake_merge_backward),
):
    lib.impl(_name, _op, "CompositeExplicitAutograd")
    lib.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"meshwright::{_name}", _fake, lib=lib)
torch.library.register_autograd("meshwright::merge_attention", _autograd, setup_context=_setup, lib=lib)
