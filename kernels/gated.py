"""An activation times a gate, as one op forward and one backward: SwiGLU and GeGLU (Shazeer, arXiv 2002.05202).

    y = a(gate) ∘ up         dgate = g ∘ up ∘ a'(gate)         dup = g ∘ a(gate)

    silu        a = x σ(x)                                 a' = σ (1 + x (1 - σ))
    gelu        a = x Φ(x)                                 a' = Φ + x φ(x)
    gelu_tanh   a = x (1 + t) / 2, t = tanh(c (x + k x³))  a' = (1 + t) / 2 + x (1 - t²) c (1 + 3 k x²) / 2
                                                           c = sqrt(2/π), k = 0.044715

Backward makes a(gate) again, so that it is not kept. The arithmetic is float32 or wider; y has the dtype of gate. gate
and up may be columns of one wider tensor.
"""

from __future__ import annotations

import torch

from .tri import HAVE, constexpr, jit, launch, pow2, tl, wide_of

aten = torch.ops.aten
ACTS = ("silu", "gelu", "gelu_tanh")
BLOCK = 1024

lib = torch.library.Library("meshwright", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.pointwise)
lib.define("gated(Tensor gate, Tensor up, str act) -> Tensor", tags=_TAGS)
lib.define("gated_backward(Tensor grad, Tensor gate, Tensor up, str act) -> (Tensor, Tensor)", tags=_TAGS)


def _act(x: torch.Tensor, act: str) -> torch.Tensor:
    return aten.silu(x) if act == "silu" else aten.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


def _act_backward(g: torch.Tensor, x: torch.Tensor, act: str) -> torch.Tensor:
    if act == "silu":
        return aten.silu_backward(g, x)
    return aten.gelu_backward(g, x, approximate="tanh" if act == "gelu_tanh" else "none")


def _forward(gate, up, act: str) -> torch.Tensor:
    return _act(gate.to(wide_of(gate.dtype)), act).mul_(up).to(gate.dtype).contiguous()


def _backward(grad, gate, up, act: str) -> tuple[torch.Tensor, torch.Tensor]:
    g, x = grad.to(wide_of(grad.dtype)), gate.to(wide_of(gate.dtype))
    dgate = _act_backward(g * up, x, act)
    dup = _act(x, act).mul_(g)
    return dgate.to(gate.dtype).contiguous(), dup.to(up.dtype).contiguous()


@jit
def _value_and_slope(x, ACT: constexpr):
    """a(x), a'(x)."""
    if ACT == "silu":
        s = 1.0 / (1.0 + tl.exp(tl.minimum(-x, 80.0)))
        a, d = x * s, s * (1.0 + x * (1.0 - s))
    elif ACT == "gelu":
        p = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        a, d = x * p, p + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        t = 1.0 - 2.0 / (tl.exp(tl.minimum(1.5957691216057308 * (x + 0.044715 * x * x * x), 80.0)) + 1.0)
        a = 0.5 * x * (1.0 + t)
        d = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return a, d


@jit
def forward_kernel(gate, up, y, n, gate_row, up_row, ACT: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + row * gate_row + col, mask=col < n, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + col, mask=col < n, other=0.0).to(tl.float32)
    a, _ = _value_and_slope(x, ACT)
    tl.store(y + row * n + col, (a * u).to(y.dtype.element_ty), mask=col < n)


@jit
def backward_kernel(grad, gate, up, dgate, dup, n, grad_row, gate_row, up_row, ACT: constexpr, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad + row * grad_row + col, mask=col < n, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_row + col, mask=col < n, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + col, mask=col < n, other=0.0).to(tl.float32)
    a, d = _value_and_slope(x, ACT)
    tl.store(dgate + row * n + col, (g * u * d).to(dgate.dtype.element_ty), mask=col < n)
    tl.store(dup + row * n + col, (g * a).to(dup.dtype.element_ty), mask=col < n)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, n] whose rows lie in order, perhaps with a gap between them; copied where it does not."""
    n = x.shape[-1] if x.dim() else 1
    flat = x.reshape(-1, n) if x.numel() else x.reshape(0, n)
    return flat if n == 1 or flat.stride(1) == 1 else flat.contiguous()


def fits(*tensors: torch.Tensor) -> bool:
    """Whether a kernel takes such a call."""
    return HAVE and all(t.dtype in (torch.float32, torch.float16, torch.bfloat16) for t in tensors)


def _grid(x: torch.Tensor) -> tuple[tuple[int, int], int]:
    block = min(BLOCK, max(64, pow2(x.shape[1])))
    return (x.shape[0], -(-x.shape[1] // block)), block


def triton_forward(gate, up, act: str) -> torch.Tensor:
    """`_forward` by one kernel."""
    if not fits(gate, up):
        return _forward(gate, up, act)
    y, a, b = gate.new_empty(gate.shape), _rows(gate), _rows(up)
    grid, block = _grid(a)
    launch(forward_kernel, grid, a, b, y, a.shape[1], a.stride(0), b.stride(0), ACT=act, BLOCK=block)
    return y


def triton_backward(grad, gate, up, act: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`_backward` by one kernel."""
    if not fits(grad, gate, up):
        return _backward(grad, gate, up, act)
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    g, a, b = _rows(grad), _rows(gate), _rows(up)
    grid, block = _grid(a)
    launch(
        backward_kernel, grid, g, a, b, dgate, dup, a.shape[1], g.stride(0), a.stride(0), b.stride(0),
        ACT=act, BLOCK=block,
    )  # fmt: skip
    return dgate, dup


def _fake_forward(gate, up, act):
    return gate.new_empty(gate.shape)


def _fake_backward(grad, gate, up, act):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup(ctx, inputs, output) -> None:
    gate, up, ctx.act = inputs
    ctx.save_for_backward(gate, up)
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad):
    if grad is None:
        return None, None, None
    return *torch.ops.meshwright.gated_backward(grad, *ctx.saved_tensors, ctx.act), None


for _name, _op, _kernel, _fake in (
    ("gated", _forward, triton_forward, _fake_forward),
    ("gated_backward", _backward, triton_backward, _fake_backward),
):
    lib.impl(_name, _op, "CompositeExplicitAutograd")
    lib.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"meshwright::{_name}", _fake, lib=lib)
torch.library.register_autograd("meshwright::gated", _autograd, setup_context=_setup, lib=lib)
