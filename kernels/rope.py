"""Rotary position embedding (Su et al., arXiv 2104.09864), in halves, as one op forward and backward.

    y1 = x1 c1 - x2 s1        y2 = x2 c2 + x1 s2           x = [x1, x2], the halves of the last dim; c, s alike
    transposed (backward):    y1 = x1 c1 + x2 s2           y2 = x2 c2 - x1 s1

cos and sin broadcast against x over all dims but the last, and have no gradient. The arithmetic is float32 or wider;
y has the dtype and strides of x, so that heads stay where the projections around attention want them.
"""

from __future__ import annotations

import math

import torch

from .tri import HAVE, constexpr, jit, launch, pow2, tl, wide_of

ELEMENTS = 512
"""Of a half, that a program takes."""

lib = torch.library.Library("meshwright", "FRAGMENT")
lib.define(
    "rope(Tensor x, Tensor cos, Tensor sin, bool transposed=False) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)


def _rope(x, cos, sin, transposed: bool = False) -> torch.Tensor:
    wide = wide_of(x.dtype)
    (x1, x2), (c1, c2), (s1, s2) = (t.to(wide).chunk(2, -1) for t in (x, cos, sin))
    if transposed:
        s1, s2 = -s2, -s1
    y, half = torch.empty_like(x), x.shape[-1] // 2
    y[..., :half] = x1 * c1 - x2 * s1
    y[..., half:] = x2 * c2 + x1 * s2
    return y


@jit
def rope_kernel(
    x, cos, sin, y, rows, n1, n2, half, x0, x1, x2, c0, c1, c2, y0, y1, y2,
    TRANSPOSED: constexpr, ROWS: constexpr, HALF: constexpr,
):  # fmt: skip
    """Rows [n0, n1, n2] of x, cos and sin, y, each with its strides; a stride of 0 broadcasts."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i0, i1, i2 = row // n2 // n1, row // n2 % n1, row % n2
    col = tl.arange(0, HALF)
    there = (row < rows)[:, None] & (col < half)[None, :]
    at_x = (i0 * x0 + i1 * x1 + i2 * x2)[:, None] + col[None, :]
    at_c = (i0 * c0 + i1 * c1 + i2 * c2)[:, None] + col[None, :]
    at_y = (i0 * y0 + i1 * y1 + i2 * y2)[:, None] + col[None, :]
    a = tl.load(x + at_x, mask=there, other=0.0).to(tl.float32)
    b = tl.load(x + at_x + half, mask=there, other=0.0).to(tl.float32)
    ca = tl.load(cos + at_c, mask=there, other=0.0).to(tl.float32)
    cb = tl.load(cos + at_c + half, mask=there, other=0.0).to(tl.float32)
    sa = tl.load(sin + at_c, mask=there, other=0.0).to(tl.float32)
    sb = tl.load(sin + at_c + half, mask=there, other=0.0).to(tl.float32)
    if TRANSPOSED:
        ya, yb = a * ca + b * sb, b * cb - a * sa
    else:
        ya, yb = a * ca - b * sa, b * cb + a * sb
    tl.store(y + at_y, ya.to(y.dtype.element_ty), mask=there)
    tl.store(y + at_y + half, yb.to(y.dtype.element_ty), mask=there)


def fits(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel takes such a call."""
    narrow = all(t.dtype in (torch.float32, torch.float16, torch.bfloat16) for t in (x, cos, sin))
    return HAVE and narrow and 1 <= x.dim() <= 4 and 0 < x.shape[-1] // 2 <= ELEMENTS


def triton_rope(x, cos, sin, transposed: bool = False) -> torch.Tensor:
    """`_rope` by one kernel."""
    if not fits(x, cos, sin):
        return _rope(x, cos, sin, transposed)
    y, half = torch.empty_like(x), x.shape[-1] // 2
    ends = [t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin)]
    (a, c, s), out = (_four(t, x.shape) for t in ends), _four(y, x.shape)
    if out.stride(3) != 1 or c.stride() != s.stride():
        return _rope(x, cos, sin, transposed)
    rows, width = math.prod(out.shape[:3]), pow2(half)
    per = max(1, min(ELEMENTS // width, pow2(rows)))
    launch(
        rope_kernel, -(-rows // per), a, c, s, out, rows, *out.shape[1:3], half, *a.stride()[:3], *c.stride()[:3],
        *out.stride()[:3], TRANSPOSED=transposed, ROWS=per, HALF=width,
    )  # fmt: skip
    return y


def _four(t: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A view of t, broadcast to `shape`, with 4 dims."""
    t = t.expand(shape)
    return t[(None,) * (4 - t.dim())]


def _fake(x, cos, sin, transposed: bool = False):
    return torch.empty_like(x)


def _setup(ctx, inputs, output) -> None:
    _, cos, sin, ctx.transposed = inputs
    ctx.save_for_backward(cos, sin)
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad):
    if grad is None:
        return None, None, None, None
    return torch.ops.meshwright.rope(grad, *ctx.saved_tensors, not ctx.transposed), None, None, None


lib.impl("rope", _rope, "CompositeExplicitAutograd")
lib.impl("rope", triton_rope, "CUDA")
torch.library.register_fake("meshwright::rope", _fake, lib=lib)
torch.library.register_autograd("meshwright::rope", _autograd, setup_context=_setup, lib=lib)
