"""Random programs, random plans: each gives the numbers of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import meshwright as mw
import pytest
import torch
from random_plans import Subject, complaint, plan_of, timed_plan_of
from random_programs import draw
from small import close, grads_of, mesh
from torch import nn

EACH = 2
"""Plans a program."""

SEEDS = [range(8), *(pytest.param(range(k, k + 12), marks=pytest.mark.slow) for k in (8, 20))]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("make", [plan_of, timed_plan_of], ids=["in_space", "in_time"])
def test_a_random_plan_of_a_random_program_equals_one_device(make: Callable, seeds: range):
    found = []
    for seed in seeds:
        model, x = draw(seed)
        subject = Subject("drawn", model=(model, {"x": x}))
        plans = range(seed * EACH, (seed + 1) * EACH) if make is plan_of or len(x) % 2 == 0 else ()
        found += [f"{seed}, plan {p}: {why}" for p in plans if (why := complaint(subject, p, make))]
    assert not found, "\n".join(found)


class Regrouped(nn.Module):
    """30 as 15 x 2 where a range is taken, 28 as 4 x 7 where its result is read: no dim shows the factor of the range.

    Transformers' Funnel has its relative shift so.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        b, n, q, r = made.shape
        return made.reshape(b, n, r, q)[:, :, 2:, :].reshape(b, n, q, r - 2).square().mean()


class Unread(nn.Module):
    """One part of two is read by nothing."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).split([2, 6], 0)[1].square().mean()


class Centred(nn.Module):
    """Every layer reads the mean of the batch, which is cheap enough to be made on each stage."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0, keepdim=True)
        for layer in self.layers:
            x = x + torch.tanh(layer(x) - mean)
        return x.square().mean()


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_what_two_stages_of_a_rank_make_of_the_batch_is_added_up_once(schedule: str):
    check(Centred(), torch.randn(8, 6), {"pp": 2}, micro_batches=4, schedule=schedule)


@pytest.mark.parametrize("model,shape", [(Regrouped, (4, 4, 8, 6)), (Unread, (8, 6))])
@pytest.mark.parametrize("axis", ["dp", "tp", "x"])
def test_ranges_whose_factor_no_dim_shows(model: type[nn.Module], shape: tuple[int, ...], axis: str):
    torch.manual_seed(0)
    check(model(), torch.randn(shape), {axis: 2})


def check(model: nn.Module, x: torch.Tensor, axes: dict[str, int], **options: Any) -> None:
    """Loss and gradients are those of one device."""
    alone = copy.deepcopy(model)
    loss = alone(x)
    loss.backward()
    compiled = mw.compile(model, mesh(axes), **options)
    torch.testing.assert_close(compiled.step(x), loss.detach(), rtol=1e-5, atol=1e-6)
    close(compiled.gather("grads"), grads_of(alone))
