"""Attention as one op forward and one backward: softmax(q kᵀ · scale + mask) v with its log-sum-exp.

`attention` returns (out, lse) with lse[i] = log Σ_j exp(q_i·k_j · scale + mask_ij) (natural logarithm), which is what a
split over the keys needs to merge parts (Dao et al., arXiv 2307.08691). The backward recomputes P = exp(S - lse):

    dv = Pᵀ g      dS = P ∘ (g vᵀ - rowsum(g ∘ out))      dq = dS k · scale      dk = dSᵀ q · scale

Grouped heads: q has h heads, k and v have g of them, head i reads i // (h / g). `causal` lets query i, which stands at
`q_start + i`, see the keys j <= q_start + i. A row that sees no key gives out 0 and lse -inf. Outputs and gradients
lie in memory as [batch, sequence, heads, size]: what the projections around attention read and write.

ATen's fused kernels do the work where they apply; else `math_forward`, `math_backward`, in float32 or wider.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .tri import wide_of

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)

lib = torch.library.Library("meshwright", "FRAGMENT")
lib.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, SymInt q_start) "
    "-> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
lib.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? mask, bool causal, "
    "float scale, SymInt q_start, bool mask_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` on `meshwright::attention`; with dropout, the formula in plain ops."""
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: attn_mask must be None when is_causal is True")
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) if x.is_floating_point() else x for x in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v, mask, lead = _four_dims(query, key, value, attn_mask, enable_gqa)
    if dropout_p > 0.0:
        out = _with_dropout(q, k, v, mask, is_causal, scale, dropout_p)
    else:
        out = torch.ops.meshwright.attention(q, k, v, mask, is_causal, scale, 0)[0]
    return out if len(lead) == 2 else out.reshape(*lead, *out.shape[2:])


def _four_dims(q, k, v, mask, grouped: bool):
    """q, k, v, mask with exactly 4 dims, and the leading dims of the output."""
    if grouped and q.dim() < 3:
        raise RuntimeError("scaled_dot_product_attention: enable_gqa needs a dim of heads before the last two")
    heads = 1 if grouped else 0
    masks = [] if mask is None else [mask.shape[: max(0, mask.dim() - 2 - heads)]]
    cut = -2 - heads
    batch = torch.broadcast_shapes(q.shape[:cut], k.shape[:cut], v.shape[:cut], *masks)
    if grouped:
        if q.shape[-3] % k.shape[-3] or q.shape[-3] % v.shape[-3]:
            raise RuntimeError(f"enable_gqa: {q.shape[-3]} query heads are no multiple of {k.shape[-3]}, {v.shape[-3]}")
        lead = (*batch, q.shape[-3])
        q, k, v = (_lead(x, (*batch, x.shape[-3])) for x in (q, k, v))
    else:
        lead = batch
        q, k, v = (_lead(x, batch) for x in (q, k, v))
    if mask is not None:
        mask = mask.reshape((1,) * (len(lead) + 2 - mask.dim()) + tuple(mask.shape))
    q, k, v = (_fold(x, len(lead), grouped) for x in (q, k, v))
    if mask is not None:
        if any(n != 1 for n in mask.shape[: max(0, len(lead) - 1)]):
            mask = mask.expand(*lead[:-1], *mask.shape[-3:])
        mask = _fold(mask, len(lead), grouped)
    if k.shape[1] != v.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return q, k, v, mask, lead


def _fold(x: torch.Tensor, lead: int, grouped: bool) -> torch.Tensor:
    """x with its `lead` leading dims made two; where there is no dim of heads, one head each."""
    if lead >= 2:
        return x if lead == 2 else x.flatten(0, lead - 2)
    return x.unsqueeze(0) if grouped else x.reshape(-1, 1, *x.shape[-2:])


def _lead(x: torch.Tensor, lead: tuple[int, ...]) -> torch.Tensor:
    return x if tuple(x.shape[:-2]) == tuple(lead) else x.expand(*lead, *x.shape[-2:])


def _with_dropout(q, k, v, mask, causal: bool, scale: float, p: float) -> torch.Tensor:
    times = q.shape[1] // k.shape[1]
    if times != 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(seen.logical_not(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(F.dropout(torch.softmax(scores, -1), p), v)


def seen_keys(s: int, t: int, q_start: int, device: torch.device) -> torch.Tensor:
    """[s, t] bool: key j is seen by query i, that is j <= q_start + i."""
    return torch.ones(s, t, dtype=torch.bool, device=device).tril(q_start)


def _empty(x: torch.Tensor, b: int, h: int, s: int, d: int) -> torch.Tensor:
    """A tensor [b, h, s, d] that lies in memory as [b, s, h, d]."""
    return x.new_empty(b, s, h, d).transpose(1, 2)


def _laid(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _scores(q, k, mask, causal: bool, scale: float, q_start: int) -> torch.Tensor:
    """[b, g, r, s, t] scores in the wide dtype, -inf where unseen."""
    b, h, s, d = q.shape
    g, t = k.shape[1], k.shape[2]
    wide = wide_of(q.dtype)
    q, k = q.to(wide).reshape(b, g, h // g, s, d), k.to(wide).unsqueeze(2)
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
    if mask is not None:
        m = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (g, h // g))
        scores = scores.masked_fill_(m.logical_not(), -math.inf) if m.dtype == torch.bool else scores.add_(m.to(wide))
    if causal:
        scores.masked_fill_(seen_keys(s, t, q_start, q.device).logical_not(), -math.inf)
    return scores


def math_forward(q, k, v, mask, causal: bool, scale: float, q_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula as it stands, in float32 or wider."""
    b, h, s, _ = q.shape
    if _nothing(q, k, v):
        out, lse = _fake_forward(q, k, v, mask, causal, scale, q_start)
        return out.zero_(), lse.fill_(-math.inf)
    scores = _scores(q, k, mask, causal, scale, q_start)
    lse = torch.logsumexp(scores, -1)
    p = scores.sub_(_finite(lse).unsqueeze(-1)).exp_()
    out = torch.matmul(p, v.to(p.dtype).unsqueeze(2)).reshape(b, h, s, v.shape[3])
    return _laid(out.to(q.dtype)), lse.reshape(b, h, s)


def math_backward(grad, q, k, v, out, lse, mask, causal: bool, scale: float, q_start: int, mask_grad: bool):
    """dq, dk, dv, dmask by the formula above, in float32 or wider."""
    if _nothing(q, k, v):
        made = _fake_backward(grad, q, k, v, out, lse, mask, causal, scale, q_start, mask_grad)
        return tuple(x.zero_() for x in made)
    (b, h, s, d), (g, t), e = q.shape, k.shape[1:3], v.shape[3]
    wide, r = wide_of(q.dtype), h // g
    p = _scores(q, k, mask, causal, scale, q_start).sub_(_finite(lse).reshape(b, g, r, s, 1)).exp_()
    gw = grad.to(wide).reshape(b, g, r, s, e)
    dv = torch.matmul(p.transpose(-1, -2), gw).sum(2)
    delta = (gw * out.to(wide).reshape(b, g, r, s, e)).sum(-1, keepdim=True)
    ds = torch.matmul(gw, v.to(wide).unsqueeze(2).transpose(-1, -2)).sub_(delta).mul_(p)
    dq = torch.matmul(ds, k.to(wide).unsqueeze(2)).mul_(scale).reshape(b, h, s, d)
    dk = torch.matmul(ds.transpose(-1, -2), q.to(wide).reshape(b, g, r, s, d)).sum(2).mul_(scale)
    dmask = ds.reshape(b, h, s, t).sum_to_size(mask.shape).to(mask.dtype) if mask_grad else q.new_empty(0)
    return _laid(dq.to(q.dtype)), _laid(dk.to(k.dtype)), _laid(dv.to(v.dtype)), dmask


def _nothing(*tensors: torch.Tensor) -> bool:
    """One of them is empty."""
    return any(x.numel() == 0 for x in tensors)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """lse with 0 for -inf, so that exp(S - lse) is 0 in a row without keys."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _fused(q, k, v, mask: torch.Tensor | None = None) -> bool:
    """The fused kernels' common terms: one dtype, one head size, nothing empty."""
    masks = (None, torch.bool, q.dtype, *((torch.float32,) if q.dtype in _HALF else ()))
    fits = q.dtype == k.dtype == v.dtype and getattr(mask, "dtype", None) in masks
    return not _nothing(q, k, v) and fits and q.shape[3] == v.shape[3] and q.is_floating_point()


def _cpu_mask(q, mask, causal: bool, q_start: int, t: int) -> tuple[torch.Tensor | None, bool]:
    """The additive mask and causal flag for the fused CPU kernel, whose causal rule starts at 0."""
    if mask is not None and mask.dtype == torch.bool:
        mask = q.new_zeros(mask.shape).masked_fill_(mask.logical_not(), -math.inf)
    if not causal or (mask is None and q_start == 0):
        return mask, causal
    unseen = seen_keys(q.shape[2], t, q_start, q.device).logical_not()
    base = q.new_zeros(1, 1, q.shape[2], t) if mask is None else mask
    return base.masked_fill(unseen, -math.inf), False


def _reach(q, k, v, mask, causal: bool, q_start: int):
    """k, v, mask without the keys that no query of a causal call sees."""
    t = k.shape[2]
    n = max(1, min(t, q_start + q.shape[2])) if causal else t
    if n == t:
        return k, v, mask
    short = None if mask is None else mask[..., :n] if mask.shape[3] != 1 else mask
    return k[:, :, :n], v[:, :, :n], short


def _cpu_forward(q, k, v, mask, causal: bool, scale: float, q_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not _fused(q, k, v, mask):
        return math_forward(q, k, v, mask, causal, scale, q_start)
    k, v, mask = _reach(q, k, v, mask, causal, q_start)
    added, flag = _cpu_mask(q, mask, causal, q_start, k.shape[2])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, flag, attn_mask=added, scale=scale)
    lse = lse.contiguous()
    if added is not None:  # the kernel gives a row without keys the log-sum-exp 0
        lse = lse.masked_fill((added == -math.inf).all(-1), -math.inf)
    return _laid(out), lse


def _cpu_backward(grad, q, k, v, out, lse, mask, causal: bool, scale: float, q_start: int, mask_grad: bool):
    if mask_grad or grad.dtype != q.dtype or not _fused(q, k, v, mask):
        return math_backward(grad, q, k, v, out, lse, mask, causal, scale, q_start, mask_grad)
    t = k.shape[2]
    k, v, mask = _reach(q, k, v, mask, causal, q_start)
    added, flag = _cpu_mask(q, mask, causal, q_start, k.shape[2])
    lse = (lse if added is None else _finite(lse)).transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, flag, attn_mask=added, scale=scale
    )
    dk, dv = _pad_keys(dk, t), _pad_keys(dv, t)
    return _laid(dq), _laid(dk), _laid(dv), q.new_empty(0)


def _pad_keys(x: torch.Tensor, t: int) -> torch.Tensor:
    return x if x.shape[2] == t else F.pad(x, (0, 0, 0, t - x.shape[2]))


def _flash_fits(q, k, v, mask) -> bool:
    return mask is None and q.dtype in _HALF and _fused(q, k, v) and q.shape[3] % 8 == 0 and q.shape[3] <= 256


def _cuda_forward(q, k, v, mask, causal: bool, scale: float, q_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v, mask = _reach(q, k, v, mask, causal, q_start)
    # the flash kernel aligns the last query with the last key: right once keys beyond the last query are cut
    if not _flash_fits(q, k, v, mask) or (causal and k.shape[2] != q_start + q.shape[2]):
        return math_forward(q, k, v, mask, causal, scale, q_start)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return _laid(out), lse.contiguous()


def _cuda_backward(grad, q, k, v, out, lse, mask, causal: bool, scale: float, q_start: int, mask_grad: bool):
    t = k.shape[2]
    short, v_short, _ = _reach(q, k, v, None, causal, q_start)
    fits = not mask_grad and _flash_fits(q, short, v_short, mask) and grad.dtype == q.dtype
    if not fits or (causal and short.shape[2] != q_start + q.shape[2]):
        return math_backward(grad, q, k, v, out, lse, mask, causal, scale, q_start, mask_grad)
    empty = torch.empty(0, dtype=torch.uint64, device=q.device)
    sizes = (q.shape[2], short.shape[2])
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, short, v_short, out, lse, None, None, *sizes, 0.0, causal, empty, empty, scale=scale
    )
    return _laid(dq), _laid(_pad_keys(dk, t)), _laid(_pad_keys(dv, t)), q.new_empty(0)


def _fake_forward(q, k, v, mask, causal, scale, q_start):
    b, h, s, _ = q.shape
    return _empty(q, b, h, s, v.shape[3]), q.new_empty(b, h, s, dtype=wide_of(q.dtype))


def _fake_backward(grad, q, k, v, out, lse, mask, causal, scale, q_start, mask_grad):
    dmask = mask.new_empty(mask.shape) if mask_grad else q.new_empty(0)
    return _empty(q, *q.shape), _empty(k, *k.shape), _empty(v, *v.shape), dmask


def _setup(ctx, inputs, output) -> None:
    q, k, v, mask, ctx.causal, ctx.scale, ctx.q_start = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad, _):
    if grad is None:
        return (None,) * 7
    q, k, v, mask, out, lse = ctx.saved_tensors
    wanted = ctx.needs_input_grad[3]
    dq, dk, dv, dmask = torch.ops.meshwright.attention_backward(
        grad, q, k, v, out, lse, mask, ctx.causal, ctx.scale, ctx.q_start, wanted
    )
    return dq, dk, dv, dmask if wanted else None, None, None, None


lib.impl("attention", _cpu_forward, "CPU")
lib.impl("attention", _cuda_forward, "CUDA")
lib.impl("attention_backward", _cpu_backward, "CPU")
lib.impl("attention_backward", _cuda_backward, "CUDA")
torch.library.register_fake("meshwright::attention", _fake_forward, lib=lib)
torch.library.register_fake("meshwright::attention_backward", _fake_backward, lib=lib)
torch.library.register_autograd("meshwright::attention", _autograd, setup_context=_setup, lib=lib)
