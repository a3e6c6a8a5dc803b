"""The rules of lookups, normalisations, convolutions, attention, losses, scans and random ops, each proved by splitting
real calls; and what a rule says to write out instead, against the op itself."""

from __future__ import annotations

import pytest
import torch
from meshwright.kernels import random as drawn
from meshwright.kernels.philox import whole_pieces
from meshwright.partitioner.rules.every import rule_of
from meshwright.partitioner.rules.loss import DECOMPOSITIONS
from meshwright.partitioner.rules.split import Call
from rulecheck import check_call

aten = torch.ops.aten
mw = torch.ops.meshwright


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def proofs(free: int, linear: int = 0) -> int:
    """How many splits `check_call` proves of a rule with so many free factors and alternatives."""
    return 2 * (free + linear) + free * (free + 1) // 2 + free * linear


def proved(n_free: int, n_linear: int, target, *args, **kwargs) -> None:
    assert check_call(target, args, kwargs) == proofs(n_free, n_linear), f"{target}"


# --- lookups and writes ------------------------------------------------------------------------------------------


def test_embedding():
    proved(4, 1, aten.embedding.default, r(7, 4), ids(7, 3, 5), -1)
    proved(3, 1, aten.embedding.default, r(7, 4), ids(7, 5), 2)
    proved(3, 1, aten.embedding.default, r(7, 4), ids(7, 5, 1), 2)


@pytest.mark.parametrize("padding", [-1, 0, 5])
def test_embedding_backward(padding):
    proved(4, 1, aten.embedding_dense_backward.default, r(3, 5, 4), ids(7, 3, 5), 7, padding, False)
    proved(2, 1, aten.embedding_dense_backward.default, r(3, 5, 4), ids(7, 3, 5), 7, padding, True)


def test_index():
    x = r(4, 6, 5)
    proved(5, 1, aten.index.Tensor, x, [None, ids(6, 3, 2) - 3])
    proved(5, 1, aten._unsafe_index.Tensor, x, [ids(4, 3, 2)])
    proved(4, 1, aten.index.Tensor, x, [None, None, torch.tensor([4, -1, 0, 2])])
    proved(2, 1, aten.index.Tensor, x, [ids(4, 3), ids(6, 3)])
    proved(3, 1, aten.index.Tensor, x, [ids(4, 3, 1), None, ids(5, 1, 2)])
    proved(3, 1, aten.index.Tensor, x, [None, torch.tensor(2)])
    proved(3, 0, aten.index.Tensor, ids(2, 4, 3).bool(), [None, ids(3, 2, 2)])
    proved(0, 0, aten.index.Tensor, x, [r(4, 6) > 0])


@pytest.mark.parametrize("add", [False, True])
def test_index_put(add):
    x = r(4, 6, 5)
    n, linear = (2, 1) if add else (0, 0)
    proved(3 + n // 2, linear, aten.index_put.default, x, [None, torch.tensor([5, -6, 2])], r(4, 3, 5), add)
    proved(3 + n // 2, linear, aten._unsafe_index_put.default, x, [torch.tensor([3, 0, 1])], r(5), add)
    where = [torch.tensor([[0, 1], [2, 3], [0, 1]]), torch.tensor([[0, 1], [2, 3], [4, 5]])]
    proved(1 + n, linear, aten.index_put.default, x, where, r(3, 2, 5), add)
    proved(3 + n // 2, linear, aten.index_put.default, x, [None, torch.tensor([1, 2])], torch.tensor(0.5), add)


def test_index_select_and_add():
    x = r(4, 6, 5)
    proved(4, 1, aten.index_select.default, x, 1, ids(6, 3))
    proved(4, 1, aten.index_add.default, x, 1, ids(6, 7), r(4, 7, 5))
    proved(4, 1, aten.index_add.default, x, -2, ids(6, 7), r(4, 7, 5), alpha=2.5)
    proved(2, 0, aten.index_copy.default, x, 1, torch.tensor([3, 0]), r(4, 2, 5))
    proved(2, 0, aten.index_fill.int_Scalar, x, 1, torch.tensor([3, 0]), 2.0)


def test_gather_and_scatter():
    x = r(4, 6, 5)
    proved(4, 1, aten.gather.default, x, 1, ids(6, 4, 3, 5))
    proved(3, 1, aten.gather.default, x, 1, ids(6, 4, 3, 2))
    proved(4, 1, aten.scatter_add.default, x, 1, ids(6, 4, 7, 5), r(4, 7, 5))
    proved(3, 1, aten.scatter_add.default, x, 1, ids(6, 4, 7, 5), r(4, 8, 5))
    rows = torch.stack([torch.randperm(6)[:3] for _ in range(20)]).reshape(4, 5, 3).transpose(1, 2)
    proved(3, 1, aten.scatter.src, x, 1, rows, r(4, 3, 5))
    proved(3, 0, aten.scatter.value, x, 1, rows, 0.5)
    proved(2, 0, aten.scatter_reduce.two, x, 1, ids(6, 4, 7, 5), r(4, 7, 5), "amax")


def test_embedding_bag():
    out = (r(7, 4), ids(7, 6), torch.tensor([0, 2, 4]), False, 1, False, None)
    assert check_call(aten._embedding_bag.default, out) == proofs(1)


# --- normalisations ----------------------------------------------------------------------------------------------


def test_layer_norm():
    x, w, b = r(3, 5, 4), r(4), r(4)
    proved(2, 0, aten.native_layer_norm.default, x, [4], w, b, 1e-5)
    proved(1, 0, aten.native_layer_norm.default, x, [5, 4], None, None, 1e-5)
    _, mean, rstd = aten.native_layer_norm(x, [4], w, b, 1e-5)
    back = aten.native_layer_norm_backward.default
    proved(2, 1, back, r(3, 5, 4), x, [4], mean, rstd, w, b, [True, True, True])
    proved(2, 1, back, r(3, 5, 4), x, [4], mean, rstd, w, None, [True, True, False])
    proved(2, 1, back, r(3, 5, 4), x, [4], mean, rstd, None, None, [True, False, False])


def test_rms_norm():
    x, w = r(3, 5, 4), r(4)
    proved(2, 0, mw.rms_norm.default, x, [4], w, 1e-5)
    _, rstd = mw.rms_norm(x, [4], w, 1e-5)
    proved(2, 1, mw.rms_norm_backward.default, r(3, 5, 4), x, [4], rstd, w)
    proved(2, 1, mw.rms_norm_backward.default, r(3, 5, 4), x, [4], rstd, None)


def test_group_norm():
    x, w, b = r(3, 6, 4, 2), r(6), r(6)
    proved(2, 0, aten.native_group_norm.default, x, w, b, 3, 6, 8, 3, 1e-5)
    proved(1, 0, aten.native_group_norm.default, x, None, None, 3, 6, 8, 1, 1e-5)
    _, mean, rstd = aten.native_group_norm(x, w, b, 3, 6, 8, 3, 1e-5)
    back = aten.native_group_norm_backward.default
    proved(2, 1, back, r(3, 6, 4, 2), x, mean, rstd, w, 3, 6, 8, 3, [True, True, True])
    proved(2, 1, back, r(3, 6, 4, 2), x, mean, rstd, None, 3, 6, 8, 3, [True, False, False])


def test_batch_norm():
    x, w, b, m, v = r(5, 6, 4), r(6), r(6), r(6), torch.rand(6)
    proved(1, 0, aten._native_batch_norm_legit_functional.default, x, w, b, m, v, True, 0.1, 1e-5)
    proved(3, 0, aten._native_batch_norm_legit_functional.default, x, w, b, m, v, False, 0.1, 1e-5)
    proved(1, 0, aten._native_batch_norm_legit.no_stats, x, None, None, True, 0.1, 1e-5)
    proved(3, 0, aten._native_batch_norm_legit_no_training.default, x, w, b, m, v, 0.1, 1e-5)
    _, sm, sr = aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)
    back = aten.native_batch_norm_backward.default
    proved(1, 1, back, r(5, 6, 4), x, w, m, v, sm, sr, True, 1e-5, [True, True, True])
    empty = torch.empty(0)
    proved(3, 1, back, r(5, 6, 4), x, w, m, v, empty, empty, False, 1e-5, [True, True, True])
    proved(3, 1, back, r(5, 6, 4), x, w, m, v, empty, empty, False, 1e-5, [True, False, False])


def _written_out(target, *args, factors: str, tol: float = 1e-6):
    call = Call(target, args, {}, target(*args))
    rule = rule_of(call)
    assert set(rule.decompose) == set(factors.split())
    got = rule.decompose[factors.split()[0]](*args)
    for g, want in zip(got if isinstance(got, tuple) else (got,), call.outputs, strict=True):
        assert (g is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(g, want, rtol=tol, atol=tol, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_softmax_written_out(dtype):
    x, g = r(3, 5, 4).to(dtype), r(3, 5, 4).to(dtype)
    tol = 1e-2 if dtype == torch.bfloat16 else 1e-12
    _written_out(aten._softmax.default, x, 1, False, factors="x", tol=tol)
    _written_out(aten._log_softmax.default, x, -1, False, factors="x", tol=tol)
    masked = x.masked_fill(torch.rand(3, 5, 1) < 0.5, -torch.inf)
    _written_out(aten._safe_softmax.default, masked, -1, factors="x", tol=tol)
    _written_out(aten._softmax.default, masked, -1, False, factors="x", tol=tol)
    _written_out(aten._softmax_backward_data.default, g, x.softmax(-1), -1, dtype, factors="x", tol=tol)
    _written_out(aten._log_softmax_backward_data.default, g, x.log_softmax(-1), -1, dtype, factors="x", tol=tol)
    proved(2, 0, aten._softmax.default, x.float(), 1, False)
    proved(2, 1, aten._log_softmax_backward_data.default, g.float(), x.float().log_softmax(-1), 2, torch.float32)


def test_batch_norm_written_out():
    x, w, b, m, v, g = (t.double() for t in (r(5, 6, 4), r(6), r(6), r(6), torch.rand(6), r(5, 6, 4)))
    functional = aten._native_batch_norm_legit_functional.default
    _written_out(functional, x, w, b, m, v, True, 0.1, 1e-5, factors="d0 d2", tol=1e-12)
    _written_out(functional, x[:, :, 0], None, None, m, v, True, 0.3, 1e-5, factors="d0", tol=1e-12)
    _written_out(aten._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, 1e-5, factors="d0 d2", tol=1e-12)
    _, sm, sr = aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)
    back = aten.native_batch_norm_backward.default
    for weight, mask in ((w, [True, True, True]), (None, [True, False, False])):
        _written_out(back, g, x, weight, m, v, sm, sr, True, 1e-5, mask, factors="d0 d2", tol=1e-12)


# --- convolutions and images -------------------------------------------------------------------------------------


def _conv(x, w, b, groups=1, transposed=False, stride=1, padding=1):
    n = x.dim() - 2
    return (x, w, b, [stride] * n, [padding] * n, [1] * n, transposed, [0] * n, groups)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(transposed):
    x = r(3, 4, 5, 6)
    w, space = r(4, 5, 3, 3) if transposed else r(5, 4, 3, 3), 0 if transposed else 2
    proved(3 + space, 2, aten.convolution.default, *_conv(x, w, r(5), transposed=transposed))
    proved(3 + space, 2, aten.convolution.default, *_conv(x, w, None, transposed=transposed, stride=2))
    w = r(4, 3, 3, 3) if transposed else r(6, 2, 3, 3)
    proved(4 + space, 2, aten.convolution.default, *_conv(x, w, r(6), 2, transposed))


def test_convolution_of_other_dims():
    proved(4, 2, aten.convolution.default, *_conv(r(3, 4, 7), r(6, 4, 3), r(6)))
    proved(3, 2, aten.convolution.default, *_conv(r(3, 4, 7), r(4, 1, 3), r(4), 4))
    proved(6, 2, aten.convolution.default, *_conv(r(3, 2, 3, 4, 3), r(2, 2, 3, 3, 3), r(2)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_backward(transposed, groups):
    x = r(3, 4, 5, 6)
    w = r(4, 6 // groups, 3, 3) if transposed else r(6, 4 // groups, 3, 3)
    args = _conv(x, w, r(6), groups, transposed)
    g = torch.randn_like(aten.convolution(*args))
    rest = args[3:]
    free, alone = 3 if groups == 1 else 4, 0 if transposed else 2  # calls for the input or the weight alone split space
    for sizes, mask, space in (
        ([6], [True, True, True], 0),
        (None, [True, True, False], 0),
        ([6], [False, True, True], alone),
        (None, [True, False, False], alone),
    ):
        proved(free + space, 1, aten.convolution_backward.default, g, x, w, sizes, *rest, mask)


def test_pools():
    x = r(3, 4, 6, 8)
    out, at = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    proved(4, 0, aten.max_pool2d_with_indices.default, x, [2, 2], [2, 2])
    back = aten.max_pool2d_with_indices_backward.default
    proved(4, 1, back, torch.randn_like(out), x, [2, 2], [2, 2], [0, 0], [1, 1], False, at)
    proved(4, 1, aten.avg_pool2d.default, x, [2, 2])
    proved(4, 1, aten.avg_pool2d_backward.default, r(3, 4, 3, 4), x, [2, 2], [2, 2], [0, 0], False, True, None)
    proved(2, 1, aten._adaptive_avg_pool2d.default, x, [3, 2])
    proved(2, 1, aten._adaptive_avg_pool2d_backward.default, r(3, 4, 3, 2), x)
    proved(2, 1, aten.avg_pool1d.default, r(3, 4, 6), [2])


def test_resize_and_pad():
    x = r(3, 4, 3, 4)
    proved(4, 1, aten.upsample_nearest2d.vec, x, None, [2.0, 2.0])
    proved(2, 1, aten.upsample_nearest2d.default, x, [6, 9])
    proved(4, 1, aten.upsample_nearest2d_backward.default, r(3, 4, 6, 8), [6, 8], [3, 4, 3, 4])
    proved(2, 1, aten.upsample_bilinear2d.default, x, [6, 8], False)
    proved(2, 1, aten.upsample_bilinear2d_backward.default, r(3, 4, 6, 8), [6, 8], [3, 4, 3, 4], False)
    proved(2, 1, aten.reflection_pad2d.default, x, [1, 1, 1, 1])
    proved(2, 1, aten.reflection_pad2d_backward.default, r(3, 4, 5, 6), x, [1, 1, 1, 1])
    proved(4, 1, aten.pixel_shuffle.default, r(3, 8, 3, 2), 2)
    proved(4, 1, aten.pixel_unshuffle.default, r(3, 2, 6, 4), 2)
    proved(4, 1, aten.native_channel_shuffle.default, r(3, 6, 2, 1), 3)
    proved(2, 1, aten.im2col.default, x, [2, 2], [1, 1], [0, 0], [1, 1])
    proved(2, 1, aten.col2im.default, r(3, 8, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1])


def test_grid_sampler():
    x, grid = r(3, 4, 3, 4), torch.rand(3, 5, 2, 2) * 2 - 1
    proved(4, 1, aten.grid_sampler_2d.default, x, grid, 0, 0, False)
    back = aten.grid_sampler_2d_backward.default
    proved(4, 1, back, r(3, 4, 5, 2), x, grid, 0, 0, False, [True, True])
    proved(4, 1, back, r(3, 4, 5, 2), x, grid, 0, 0, False, [False, True])


# --- attention and losses ----------------------------------------------------------------------------------------


def _qkv(b=2, h=4, g=2, s=5, t=6, d=4):
    return r(b, h, s, d), r(b, g, t, d), r(b, g, t, d)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("g", [4, 2, 1])
def test_attention(causal, g):
    q, k, v = _qkv(g=g)
    free = 4 if g == 2 else 3
    args = (causal, 0.5, 1)
    proved(free, 0, mw.attention.default, q, k, v, None, *args)
    out, lse = mw.attention(q, k, v, None, *args)
    proved(free, 1, mw.attention_backward.default, torch.randn_like(out), q, k, v, out, lse, None, *args, False)


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 1, 5, 6), (2, 1, 1, 6), (1, 4, 5, 1)])
def test_attention_mask(shape):
    q, k, v = _qkv()
    for mask in (torch.rand(shape) > 0.3, torch.randn(shape)):
        args = (False, 0.5, 0)
        proved(4, 0, mw.attention.default, q, k, v, mask, *args)
        out, lse = mw.attention(q, k, v, mask, *args)
        wanted = mask.is_floating_point()
        back = mw.attention_backward.default
        proved(4, 1, back, torch.randn_like(out), q, k, v, out, lse, mask, *args, wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_of_torch(causal):
    q, k, v = _qkv()
    mask = None if causal else r(5, 6)
    args, more = (q, k, v, 0.0, causal), {"attn_mask": mask}
    free = 3 if causal else 4
    proved(free, 0, aten._scaled_dot_product_flash_attention_for_cpu.default, *args, **more)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*args, **more)
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    proved(free, 1, back, torch.randn_like(out), q, k, v, out, lse, 0.0, causal, **more)


def test_cross_entropy():
    x, target = r(5, 7), torch.tensor([1, -100, 6, 0, 3])
    proved(1, 0, mw.nll.default, x, target, -100)
    _written_out(mw.nll.default, x, target, -100, factors="v")
    _written_out(mw.nll.default, x.double(), target.clamp(min=0), 3, factors="v", tol=1e-12)
    proved(2, 0, mw.nll_sums.default, x, target, x.amax(1), -100, 0, 7)
    proved(2, 1, mw.nll_backward.default, r(5), x, target, x.logsumexp(1), -100, 0)


def test_losses_decompose():
    x, y = torch.rand(4, 3), torch.rand(4, 3)
    target = torch.tensor([0, 2, -100, 1])
    cases = [
        (aten.mse_loss.default, (x, y, 1)),
        (aten.smooth_l1_loss.default, (x, y, 1, 0.5)),
        (aten.huber_loss.default, (x, y, 1, 0.5)),
        (aten.binary_cross_entropy.default, (x, y, None, 1)),
        (aten.binary_cross_entropy_with_logits.default, (x, y, None, None, 1)),
        (aten.nll_loss_forward.default, (x, target, None, 1, -100)),
        (aten.mse_loss_backward.default, (torch.tensor(2.0), x, y, 1)),
        (aten.nll_loss_backward.default, (torch.tensor(2.0), x, target, None, 1, -100, torch.tensor(3.0))),
        (aten.nll_loss2d_forward.default, (x.reshape(2, 3, 2, 1), target.reshape(2, 2, 1), None, 1, -100)),
    ]
    for op, args in cases:
        torch.testing.assert_close(DECOMPOSITIONS[op](*args), op(*args))


# --- scans and random ops ----------------------------------------------------------------------------------------


def test_scans():
    x = r(4, 6, 5)
    proved(2, 1, aten.cumsum.default, x, 1)
    proved(2, 0, aten.cumprod.default, x, -1)
    proved(2, 0, aten.sort.default, x, 0)
    proved(2, 0, aten.topk.default, x, 2, 1)
    proved(2, 0, aten.topk.default, x, 6, 1)
    proved(1, 0, aten.histc.default, x.reshape(-1), 5, -3, 3)
    proved(0, 0, aten.histc.default, x.reshape(-1), 5)
    proved(2, 1, aten.value_selecting_reduction_backward.default, r(4, 5), 1, ids(6, 4, 5), [4, 6, 5], False)
    proved(3, 0, aten.bucketize.Tensor, x, torch.tensor([-1.0, 0.0, 1.0]))
    proved(0, 0, aten.nonzero.default, x > 0)


def test_random_ops():
    shape = (5, 6)
    p = whole_pieces(shape)
    key = {"seed": 3, "op": 1, "step": 2}
    proved(2, 0, drawn.dropout, r(*shape), 0.4, pieces=p, **key)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        proved(2, 0, drawn.uniform, p, dtype, -1.0, 2.0, **key)
        proved(2, 0, drawn.normal, p, dtype, 0.5, 2.0, **key)
    proved(2, 0, drawn.bernoulli, torch.rand(6), p, torch.float32, **key)
    proved(2, 0, drawn.bernoulli, 0.3, p, torch.bool, **key)
    proved(2, 0, drawn.randint, p, -3, 9, torch.int64, **key)
    proved(2, 0, drawn.exponential, p, torch.float32, 2.0, **key)
    proved(0, 0, drawn.randperm, 7, torch.int64, **key)
