"""What forward sets in its modules: a buffer bound anew is carried on; the rest is taken back, and said."""

from __future__ import annotations

import copy
import logging
from typing import Any

import meshwright as mw
import pytest
import torch
from small import close, grads_of, mesh, params_of, sgd
from torch import nn

F = nn.functional


class Average(nn.Module):
    """A running mean that is bound anew; the loss reads its new value, and the gradient goes past it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        old = self.mean
        with torch.no_grad():
            self.mean = self.mean * 0.9 + 0.1 * y.mean(0)
        return (y - self.mean) * (1 + old)


class Sized(Average):
    """The same where the first way of capture gives up: a size depends on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + torch.nonzero(x[:, 0] > 0).sum() * 0.001


AXES: list[tuple[dict[str, int], dict]] = [
    ({"dp": 2}, {}), ({"tp": 2}, {}), ({"dp": 2}, {"zero": 3}), ({"pp": 2}, {"micro_batches": 2}),
]  # fmt: skip


@pytest.mark.parametrize("kind", [Average, Sized])
@pytest.mark.parametrize("axes,options", AXES, ids=str)
def test_a_buffer_that_forward_binds_anew_is_carried_from_step_to_step(kind: type, axes: dict, options: dict):
    torch.manual_seed(0)
    model, x, y = kind(), torch.randn(8, 6), torch.randn(8, 4)
    compiled = mw.compile(copy.deepcopy(model), mesh(axes), loss=F.mse_loss, optimizer=sgd(), **options)
    optimizer = sgd()(model)
    for _ in range(3):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.testing.assert_close(compiled.step(x, target=y), loss.detach())
        close(compiled.gather("grads"), grads_of(model))
        optimizer.step()
    close(compiled.gather("buffers"), {"mean": model.mean})
    close(compiled.gather("params"), params_of(model))
    assert compiled.verify(x, target=y).compared


class Grown(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("rows", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = torch.cat([self.rows, x.detach()])
        return self.layer(self.rows).sum()


class Tied(nn.Module):
    """Two averages that begin as one tensor."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Average(), Average()
        self.one.layer, self.two.layer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.mean = self.one.mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)).square().mean()


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) + self.last
        self.last = y.detach().mean(0)
        return y.square().mean()


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.ours, self.theirs = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.theirs.weight.mul_(0.9).add_(self.ours.weight, alpha=0.1)
        return F.mse_loss(self.ours(x), self.theirs(x))


REFUSED = [
    (Grown, r"buffer rows, torch.float32 \[2, 4\], to torch.float32 \[6, 4\]"),
    (Tied, "binds buffer one.mean to another tensor, and one.mean, two.mean are one"),
    (Remembers, "reads the tensor last and binds it to another.*register_buffer"),
    (Teacher, "writes into parameter theirs.weight"),
]


@pytest.mark.parametrize("kind,says", REFUSED)
def test_what_cannot_be_carried_on_is_refused(kind: type, says: str):
    with pytest.raises(mw.CaptureError, match=says):
        mw.compile(kind(), mesh({"dp": 2}), args=(torch.randn(4, 4),))


class Logs(nn.Module):
    """Counts its calls, keeps what it made last, and appends to a list; a loss reads what it keeps."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.all = nn.Linear(4, 2), 0, []
        self.made: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.made = self.layer(x)
        self.all.append(self.made)
        return self.made.square().mean()


def test_what_else_forward_sets_is_taken_back_and_said(caplog: pytest.LogCaptureFixture):
    model, x = Logs(), torch.randn(4, 4)
    with caplog.at_level(logging.WARNING, "meshwright"):
        compiled = mw.compile(model, mesh({"dp": 2}), loss=lambda out: out + model.made.abs().sum())
        got = compiled.step(x)
    assert "forward sets calls, made:" in caplog.text
    assert (model.calls, model.made, model.all) == (0, None, [])
    torch.testing.assert_close(got, (model(x) + model.made.abs().sum()).detach())
