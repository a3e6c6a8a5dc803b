"""Reductions written out by sums and bounds: each equals the op itself, and splits a batch that it reduces."""

from __future__ import annotations

import itertools
import math
from typing import Any

import meshwright as mw
import pytest
import torch
from cases.oracle import Eager
from compare import all_too_far, exact_copy
from meshwright.partitioner.rules.every import rule_of
from meshwright.partitioner.rules.split import Call
from torch import Tensor, nn

torch.set_num_threads(1)
aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16)


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def written_out(op: Any, x: Tensor, *args: Any, **kwargs: Any) -> None:
    """The op's rule writes it out for every dim it reduces, to the same values and dtypes."""
    call = Call(op, (x, *args), kwargs, op(x, *args, **kwargs))
    rule = rule_of(call)
    assert rule.decompose and not rule.whole
    for fn in rule.decompose.values():
        got = fn(x, *args, **kwargs)
        for g, want in zip(got if isinstance(got, tuple) else (got,), call.outputs, strict=True):
            torch.testing.assert_close(g, want, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_variances(dtype: torch.dtype):
    x = r(4, 5, 3).to(dtype)
    ops = (aten.var, aten.std, aten.var_mean, aten.std_mean)
    for op, (dims, keepdim) in itertools.product(ops, [([1], False), ([0, -1], True), (None, False)]):
        for correction in (None, 0, 2.5):
            written_out(op.correction, x, dims, correction=correction, keepdim=keepdim)
    for op in ops[:3]:
        written_out(op.default, x, False)
        written_out(op.dim, x, [1], True, True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_logsumexp(dtype: torch.dtype):
    x = r(4, 5, 3).to(dtype)
    x[0], x[1, 2, 1] = -math.inf, math.inf
    written_out(aten.logsumexp.default, x, [1])
    written_out(aten.logsumexp.default, x, [0, -1], True)


@pytest.mark.parametrize("p", [2, 1, 0, 3, 0.5, -1, math.inf, -math.inf])
def test_norms(p: float):
    for x in (r(4, 5, 3), r(4, 5, 3).bfloat16()):
        written_out(aten.linalg_vector_norm.default, x, p, [1], True)
        written_out(aten.linalg_vector_norm.default, x, p)
        written_out(aten.norm.Scalar, x, p)
        written_out(aten.norm.ScalarOpt_dim, x, p, [0, 1])
    written_out(aten.linalg_vector_norm.default, r(4, 5).bfloat16(), p, [1], dtype=torch.float32)


def test_any_and_all():
    numbers = r(4, 5, 3)
    for x in (numbers > 1, numbers > -1, (numbers > 0).to(torch.int64), (numbers > 0).to(torch.uint8), numbers):
        for op in (aten.any, aten.all):
            written_out(op.default, x)
            written_out(op.dim, x, 1, True)
            written_out(op.dims, x, [0, 1])


def test_what_cannot_be_written_out_is_whole():
    x = torch.complex(r(4, 5), r(4, 5))
    for call in (
        Call(aten.var.correction, (x, [1]), {}, aten.var.correction(x, [1])),
        Call(aten.prod.dim_int, (r(4, 5), 1), {}, r(4, 5).prod(1)),
        Call(aten.any.dim, (torch.zeros(4, 0), 1), {}, torch.zeros(4, 0).any(1)),
    ):
        rule = rule_of(call)
        assert not rule.decompose and set(rule.whole) == {"d1"}


class Spread(nn.Module):
    """Every such reduction over the batch and over features."""

    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.f(x)
        some = torch.where((y > 1.5).any(0) | (y > -1.5).all(0), 2.0, 0.5)
        var, mean = torch.var_mean(y, 0)
        widths = y.std(1), y.var(), torch.linalg.vector_norm(y, 2, 0), torch.linalg.vector_norm(y, 1)
        return (some * var, mean, torch.logsumexp(y, 0), torch.logsumexp(y, 1), *widths)


def total(outs: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([(o * o).sum() for o in outs]).sum()


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 3}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_split_batch_is_reduced_as_on_one_device(axes: dict[str, int]):
    torch.manual_seed(0)
    model, x = Spread(), torch.randn(7, 6)
    exact, eager = Eager(exact_copy(model), loss=total), Eager(exact_copy(model).float(), loss=total)
    compiled: Any = mw.compile(model, mw.Mesh(device=None, links=None, calibration=None, **axes), loss=total)
    got, one, true = [{"": t.step(i)} | t.gather("grads") for t, i in ((compiled, x), (eager, x), (exact, x.double()))]
    assert not all_too_far("step", got, one, true)
    if "dp" in axes:
        done = " ".join(compiled.plan.decomposed)
        assert all(name in done for name in ("var_mean", "logsumexp", "linalg_vector_norm", "any", "all"))
