"""The kernels in Triton's interpreter: numbers on the CPU. Run by `test_kernel_legs.py` in a process of its own, or

KERNELS=interp python -m pytest tests/legs/interp.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest

if os.environ.get("KERNELS") != "interp":
    pytest.skip("runs with KERNELS=interp", allow_module_level=True)

from legs import interpreter

interpreter.start()

import torch  # noqa: E402
from meshwright.kernels import add_norm, dropout, gated, logit_rows, merge, philox, random, rms_norm, rope  # noqa: E402
from meshwright.kernels import linear_cross_entropy as lce  # noqa: E402

from legs.error import within  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_the_interpreter_rounds_bf16_as_torch():
    x = torch.randn(4096)
    x[:3] = torch.tensor([float("inf"), float("nan"), 3.3895e38])
    bits = torch.from_numpy(interpreter.narrow(x.numpy()).astype("int32"))
    want = x.bfloat16().view(torch.int16).int() & 0xFFFF
    assert (bits == want)[x == x].all()


def strided(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape[:-1], shape[-1] * 2).to(dtype)[..., ::2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(dtype, weighted):
    for rows, n in ((7, 1003), (1, 5), (0, 8), (3, 64), (2, 4100)):
        x, g = strided(rows, n, dtype=dtype), torch.randn(n).to(dtype).expand(rows, n)
        w = torch.randn(n).to(dtype) if weighted else None
        y, rstd = rms_norm.triton_forward(x, [n], w, 1e-6)
        dx, dw = rms_norm.triton_backward(g, x, [n], rstd, w)
        want, r64 = rms_norm._forward(x.double(), [n], None if w is None else w.double(), 1e-6)
        wdx, wdw = rms_norm._backward(g.double(), x.double(), [n], r64, None if w is None else w.double())
        within((y, want), (rstd, r64), (dx, wdx), (dw, wdw))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_norms_of_a_sum(dtype, affine):
    """Both norms with a residual: strided operands, an expanded gradient, a gradient of the sum or none; the sum has
    torch's bits, and so backward starts from equal numbers."""
    for rows, n in ((7, 1003), (1, 5), (0, 8), (2, 4100)):
        x, r = strided(rows, n, dtype=dtype), strided(rows, n, dtype=dtype)
        g, gs = torch.randn(n).to(dtype).expand(rows, n), torch.randn(rows, n).to(dtype) if n != 5 else None
        w, b = (torch.randn(n).to(dtype) if affine else None for _ in range(2))
        wide = [None if t is None else t.double() for t in (g, gs, w, b)]
        y, total, rstd = add_norm.triton_rms(x, r, [n], w, 1e-6)
        assert (total == x + r).all()
        want = rms_norm._forward(total.double(), [n], wide[2], 1e-6)
        got = add_norm.triton_rms_backward(g, gs, total, [n], rstd, w)
        exact = add_norm._rms_backward(wide[0], wide[1], total.double(), [n], want[1], wide[2])
        within((y, want[0]), *zip(got, exact, strict=True), times=1.2)
        y, total, mean, rstd = add_norm.triton_layer(x, r, [n], w, b, 1e-6)
        want = add_norm._layer(total.double(), 0 * total.double(), [n], wide[2], wide[3], 1e-6)
        got = add_norm.triton_layer_backward(g, gs, total, [n], mean, rstd, w, b)
        exact = add_norm._layer_backward(wide[0], wide[1], total.double(), [n], want[2], want[3], wide[2], wide[3])
        within((y, want[0]), *zip(got, exact, strict=True), times=1.2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_passes_over_logits(dtype):
    """Widths below, at and beyond a block, a row of -inf in front, a target that is not here, a gradient of the lse."""
    for rows, v in ((3, 1003), (2, logit_rows.BLOCK + 5), (1, 1), (0, 7), (2, 128)):
        z = (4 * torch.randn(rows, v)).to(dtype)
        z[:1, : v // 2] = -torch.inf
        column, there = torch.randint(v // 2, v, (rows,)), torch.arange(rows) % 2 == 0
        lse, picked = logit_rows.triton_statistics(z, column)
        want, wpicked = logit_rows._statistics(z.double(), column)
        within((lse, want), (picked, wpicked))
        top = lse + 1
        got, want = logit_rows.triton_sums(z, column, top), logit_rows._sums(z.double(), column, top.double())
        within(*zip(got, want, strict=True))
        every, own = torch.randn(rows), torch.randn(rows)
        exact = logit_rows._gradient(z.double(), column, there, lse.double(), every.double(), own.double())
        got = logit_rows.triton_gradient(z.clone(), column, there, lse, every, own)
        within((got, exact), times=1.2)  # in float16 some are subnormal


def test_a_sure_target_keeps_its_gradient():
    """p - 1 where p is all but 1: by a series, not by a difference of what is rounded."""
    z, one = torch.tensor([[0.0, -14.0, -18.0]]), torch.ones(1)
    lse = torch.tensor([2.0**-20])
    got = logit_rows.triton_gradient(z.clone(), torch.tensor([0]), torch.tensor([True]), lse, one, one)
    torch.testing.assert_close(got.double()[0, :1], torch.expm1(-lse.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_loss_by_kernels(dtype, monkeypatch):
    """The whole op on the kernels, in chunks that are uneven, against float64 and the torch form's own error."""
    monkeypatch.setattr(lce, "LEAST_ROWS", 1)
    monkeypatch.setattr(lce, "CHUNK_BYTES", 4 * 1003 * 4)
    x, w, b = torch.randn(7, 33).to(dtype), torch.randn(1003, 33).to(dtype), torch.randn(1003).to(dtype)
    target = torch.randint(0, 1003, (7,))
    target[2] = -100
    grad, grad_lse = torch.randn(7), torch.randn(7)
    wide = [t.double() for t in (x, w, b)]
    nll64, lse64 = lce._forward(wide[0], wide[1], wide[2], target, -100)
    exact = lce._backward(grad.double(), grad_lse.double(), wide[0], wide[1], wide[2], target, lse64, -100, 0)
    found = []
    for passes in (logit_rows.TRITON, logit_rows.TORCH):
        nll, lse = lce._forward(x, w, b, target, -100, passes)
        made = (nll, lse, *lce._backward(grad, grad_lse, x, w, b, target, lse, -100, 0, passes))
        found.append([(a.double() - e).norm() / e.norm() for a, e in zip(made, (nll64, lse64, *exact), strict=True)])
    for ours, torchs in zip(*found, strict=True):
        assert ours <= 2 * torchs + 1e-7, found
    wants = (target, grad, -100, True, True, True)
    exact = lce._step(wide[0], wide[1], wide[2], *wants)
    found = []
    for passes in (logit_rows.TRITON, logit_rows.TORCH):
        made = lce._step(x, w, b, *wants, passes)
        found.append([(a.double() - e).norm() / e.norm() for a, e in zip(made, exact, strict=True)])
    for ours, torchs in zip(*found, strict=True):
        assert ours <= 2 * torchs + 1e-7, found


PIECES = [
    philox.whole_pieces((5, 7)),  # the last block is short
    philox.whole_pieces((3, 1100)),
    (((1, 2, 4),), ((0, 2, 2), (1, 2, 3))),  # runs that start within a block
    (((2, 2, 4),), ((4, 8, 16),), ((0, 4, 4),)),  # runs of whole blocks
    (((1 << 20, 2, 1 << 21),), ((5, 3, 1 << 20),)),  # beyond 2^32 elements
    (((1 << 21, 2, 1 << 22),), ((8, 4, 1 << 20),)),
    (((0, 0, 3),), ((0, 4, 4),)),  # nothing
]


@pytest.mark.parametrize("pieces", PIECES)
def test_dropout_has_the_bits_of_torch(pieces):
    shape = philox.local_shape(pieces)
    key: dict[str, Any] = {"seed": (9 << 61) + 77, "op": 3, "step": 0xFFFFFFFE, "pieces": pieces}
    for dtype, p in ((torch.float32, 0.3), (torch.bfloat16, 0.1)):
        x = torch.randn(*shape[::-1]).to(dtype).permute(*reversed(range(len(shape))))
        y, mask = random.dropout(x, p, **key)
        got, kept = dropout.triton_dropout(x, p, random.keep_below(p), **key)
        assert (kept == mask).all() and (got == y).all()
        bias, residual = torch.randn(shape[-1]).to(dtype), torch.randn(shape).to(dtype)
        got, kept = dropout.triton_dropout(x, p, random.keep_below(p), **key, bias=bias, residual=residual)
        assert (kept == mask).all()
        within((got, residual.double() + (x.double() + bias.double()) * mask / (1 - p)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", gated.ACTS)
def test_gated(act, dtype):
    """Halves of one tensor, a strided gate, an expanded gradient, nothing."""
    for rows, n in ((3, 1003), (5, 1), (0, 8), (2, gated.BLOCK + 1)):
        both = torch.randn(rows, 2 * n) * 3
        gate, up = both.to(dtype).chunk(2, -1)
        gate = gate if rows != 3 else strided(rows, n, dtype=dtype)
        grad = torch.randn(n).to(dtype).expand(rows, n)
        made = (gated.triton_forward(gate, up, act), *gated.triton_backward(grad, gate, up, act))
        wide = gate.double(), up.double(), act
        exact = (gated._forward(*wide), *gated._backward(grad.double(), *wide))
        within(*zip(made, exact, strict=True), times=2.0 if dtype == torch.float16 else 1.3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope(dtype):
    """Heads before and behind the sequence, a size that is no power of two, angles that broadcast, other strides."""
    pairs = (((2, 3, 5, 12), (2, 1, 5, 12)), ((2, 5, 3, 6), (1, 5, 1, 6)), ((0, 4), (4,)), ((3, 160), (160,)))
    for shape, angles in pairs:
        cos, sin = torch.randn(angles).to(dtype), torch.randn(angles).to(dtype)
        whole = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
        for x in (whole[..., : shape[-1]], whole[..., ::2], whole[..., ::2].contiguous().mT.contiguous().mT):
            for transposed in (False, True):
                got = rope.triton_rope(x, cos, sin, transposed)
                within((got, rope._rope(x.double(), cos.double(), sin.double(), transposed)), times=1.2)
                assert got.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_of_attentions(dtype):
    """Differences that would overflow, -inf on either side and on both, strided outputs, no gradient of the lse."""
    for shape in ((2, 3, 5, 24), (1, 1), (0, 2, 4), (9, 160)):
        both = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
        a, b, g = both[..., ::2], both[..., 1::2], torch.randn(shape[-1]).to(dtype).expand(shape)
        la, lb, gl = (3 * torch.randn(shape[:-1]) for _ in range(3))
        for flat, values in ((la, (1e4, -1e4, -torch.inf, 0.0)), (lb, (-1e4, 1e4, -torch.inf, -torch.inf))):
            if flat.numel() > 4:
                flat.view(-1)[:4] = torch.tensor(values)
        for more in (gl, None):
            made = (*merge.triton_merge(a, la, b, lb), *merge.triton_merge_backward(g, more, a, la, b, lb))
            wide = [None if t is None else t.double() for t in (g, more, a, la, b, lb)]
            exact = (*merge._merge(*wide[2:]), *merge._merge_backward(*wide))
            for got, want in zip(made, exact, strict=True):
                assert (got.isinf() == want.isinf()).all()
                within((got.masked_fill(got.isinf(), 0), want.masked_fill(want.isinf(), 0)), times=1.5)


def test_offsets_beyond_32_bits():
    """Rows 2^30 elements apart, the third beyond 2^31: virtual memory, of which three pages are touched."""
    apart, n = (1 << 30) + 8, 16
    whole = torch.empty(2 * apart + 4 * n, dtype=torch.float16)
    x = whole.as_strided((3, 2 * n), (apart, 1))
    x.copy_(torch.randn(3, 2 * n))
    small = x.contiguous()
    gate, up = x.chunk(2, -1)
    assert (gated.triton_forward(gate, up, "silu") == gated._forward(small[:, :n], small[:, n:], "silu")).all()
    cos, sin = torch.randn(2, 3, 2 * n).half()
    exact = rope._rope(small.double(), cos.double(), sin.double())
    within((rope.triton_rope(x, cos, sin), exact), times=1.5)
