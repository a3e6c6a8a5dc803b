"""Linear layer and cross entropy in one: against float64 and PyTorch's own error, its rules, and on meshes."""

from __future__ import annotations

import itertools
from typing import Any

import meshwright as mwt
import pytest
import torch
import torch.nn.functional as F
from meshwright.kernels import linear_cross_entropy as lce
from rulecheck import check_call

mw = torch.ops.meshwright


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(lce, "LEAST_ROWS", 1)
    monkeypatch.setattr(lce, "CHUNK_BYTES", 3 * 11 * 4)  # three rows of 11 classes: 7 rows make uneven chunks


def eager(x, w, t, b, **kw):
    return F.cross_entropy(F.linear(x, w, b), t, **kw)


def grads(loss, tensors):
    g = torch.linspace(0.5, 2, max(1, loss.numel()), dtype=loss.dtype).reshape(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, tensors, g.expand(loss.shape))]


def far(got, want):
    return float((got.double() - want).norm()) / max(float(want.norm()), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_error_is_below_twice_pytorchs(dtype, bias):
    """Forward and every gradient, over reductions, ignored rows, class weights, smoothing and odd strides."""
    target = torch.tensor([1, 10, -100, 0, 3, 3, 7])
    for reduction, smooth, weighted in itertools.product(("mean", "sum", "none"), (0.0, 0.1), (False, True)):
        x = torch.randn(7, 10)[:, ::2].to(dtype).requires_grad_()
        w = torch.randn(5, 11).to(dtype).t().requires_grad_()
        b = torch.randn(11).to(dtype).requires_grad_() if bias else None
        cw = torch.rand(11).to(dtype) if weighted else None
        kw: dict[str, Any] = {"reduction": reduction, "label_smoothing": smooth}
        leaves = [t for t in (x, w, b) if t is not None]
        wide = [t.detach().double().requires_grad_() for t in leaves]
        wb, wc = wide[2] if bias else None, None if cw is None else cw.double()
        want = grads(eager(wide[0], wide[1], target, wb, weight=wc, **kw), wide)
        ours = grads(lce.linear_cross_entropy(x, w, target, linear_bias=b, weight=cw, **kw), leaves)
        theirs = grads(eager(x, w, target, b, weight=cw, **kw), leaves)
        for o, t, e in zip(ours, theirs, want, strict=True):
            assert o.shape == t.shape
            lucky = torch.finfo(dtype).eps * (16 if dtype != torch.bfloat16 else 0.5)  # one number may be exact by luck
            assert far(o, e) <= max(2 * far(t, e), lucky), (reduction, smooth, weighted)


def test_z_loss_adds_the_square_of_the_log_sum_exp():
    target = torch.tensor([1, 10, -100, 0])
    x, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 5), (11, 5)))
    ours = grads(lce.linear_cross_entropy(x, w, target, reduction="none", z_loss=0.3), (x, w))
    extra = 0.3 * F.linear(x, w).logsumexp(1).square().masked_fill(target == -100, 0.0)
    theirs = grads(eager(x, w, target, None, reduction="none") + extra, (x, w))
    for o, t in zip(ours, theirs, strict=True):
        torch.testing.assert_close(o, t)


def test_all_ignored_none_and_wrong():
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    ignored = torch.full((3,), -100)
    for o in grads(lce.linear_cross_entropy(x, w, ignored, reduction="sum"), (x, w)):
        assert not o.any()
    assert lce.linear_cross_entropy(x, w, ignored).isnan() and F.cross_entropy(x, ignored).isnan()
    none = lce.linear_cross_entropy(x[:0], w, ignored[:0], reduction="none")
    assert none.shape == (0,) and not torch.autograd.grad(none.sum(), w)[0].any()
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        lce.linear_cross_entropy(x, w, torch.tensor([0, 11, 1]))
    with pytest.raises(ValueError, match="do not fit"):
        lce.linear_cross_entropy(x, w, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="no reduction"):
        lce.linear_cross_entropy(x, w, ignored, reduction="avg")


def test_functional_equals_torch():
    x, w, b = torch.randn(4, 5), torch.randn(11, 5), torch.randn(11)
    calls: list[tuple] = [
        (x, w, torch.tensor([1, 2, -100, 10]), b),
        (x[0], w, torch.tensor(3), None),
        (x, w, torch.randn(4, 11).softmax(1), b),
        (x, torch.randn(11, 3, 5), torch.randint(0, 11, (4, 3)), None),
    ]
    for a, m, t, bias in calls:
        got, want = lce.functional(a, m, t, linear_bias=bias), F.linear_cross_entropy(a, m, t, linear_bias=bias)
        torch.testing.assert_close(got, want)
    half = lce.functional(x.bfloat16(), w.bfloat16(), calls[0][2])
    assert half.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lce.functional(x, w, calls[0][2]).dtype == F.linear_cross_entropy(x, w, calls[0][2]).dtype


def test_peak_is_a_chunk_of_logits(monkeypatch):
    """256 rows of 4096 classes: no tensor as large as the logits, 4 MiB, is made."""
    monkeypatch.setattr(lce, "LEAST_ROWS", 1)
    monkeypatch.setattr(lce, "CHUNK_BYTES", 16 * 4096 * 4)
    x, w, t = torch.randn(256, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True), torch.arange(256)
    with torch.profiler.profile(profile_memory=True) as seen:
        lce.linear_cross_entropy(x, w, t).backward()
    largest = max(e.cpu_memory_usage for e in seen.events() or ())
    assert largest < 256 * 4096 * 4 // 4


@pytest.mark.parametrize("bias", [True, False])
def test_rules(bias):
    x, w, b = torch.randn(7, 5), torch.randn(11, 5), torch.randn(11) if bias else None
    target = torch.tensor([1, 10, -100, 0, 3, 3, 7])
    nll, lse = mw.linear_nll(x, w, b, target, -100)
    top = mw.linear_max(x, w, b)
    assert check_call(mw.linear_nll.default, (x, w, b, target, -100))
    assert check_call(mw.linear_max.default, (x, w, b))
    assert check_call(mw.linear_sums.default, (x, w, b, target, top, -100, 0, 11))
    with pytest.raises(IndexError, match="Target 11 is out of bounds"):
        mw.linear_sums(x, w[:4], None, target + 1, top, -100, 0, 11)
    for g in (None, torch.randn(7)):
        assert check_call(mw.linear_nll_backward.default, (torch.randn(7), g, x, w, b, target, lse, -100, 0))
    torch.library.opcheck(mw.linear_nll.default, (x.requires_grad_(), w.requires_grad_(), b, target, -100))


class Model(torch.nn.Module):
    """A model that gives its own loss by the fused function; 13 classes, so that no mesh cuts them evenly."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.embed, self.mid = torch.nn.Embedding(13, 8), torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 13, bias=bias)

    def forward(self, ids, target):
        h = torch.tanh(self.mid(self.embed(ids))).reshape(-1, 8)
        smooth = 0.1 if self.head.bias is not None else 0.0
        return F.linear_cross_entropy(
            h, self.head.weight, target.reshape(-1), linear_bias=self.head.bias, label_smoothing=smooth
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 3}, {"x": 4}, {"pp": 2}], ids=str)
def test_equal_on_every_mesh(axes, bias):
    ids = torch.randint(0, 13, (8, 3))
    target = torch.where(torch.rand(8, 3) > 0.4, ids, -100)
    model = Model(bias)
    model(ids, target).backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    more: dict[str, Any] = {"micro_batches": 4} if "pp" in axes else {}
    if "tp" in axes:
        more["pin"] = {"head.weight": "[v:tp, h]"}
    compiled = mwt.compile(model, mwt.Mesh(**axes, device="cpu"), **more)
    loss = compiled.step(ids, target)
    torch.testing.assert_close(loss, model(ids, target).detach())
    got = compiled.gather("grads")
    for n, g in want.items():
        torch.testing.assert_close(got[n], g, rtol=1e-4, atol=1e-6)
    assert any("linear_sums" in op for _, op, _ in compiled.plan.modules.values()) == ("tp" in axes)
