"""Small models and helpers of the tests of compiled models."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from random_plans import GPT
from torch import nn

MESHES: list[dict[str, int]] = [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}]
ids = [pytest.param(m, id="x".join(f"{a}{n}" for a, n in m.items())) for m in MESHES]
on_every_mesh = pytest.mark.parametrize("axes", ids)


def mesh(axes: dict[str, int]) -> mw.Mesh:
    return mw.Mesh(**axes, device="cpu")  # type: ignore[arg-type]


def tied(layers: int = 1, drop: float = 0.0) -> tuple[GPT, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    batch = torch.randint(0, 13, (2, 4, 6))
    return GPT(layers=layers, drop=drop), {"ids": batch[0], "y": batch[1]}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


X, Y = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 3, 1, 2])
CE = F.cross_entropy


def sgd(lr: float = 0.1, **more: Any) -> Any:
    return lambda m: torch.optim.SGD(m.parameters(), lr=lr, **more)


def adamw(m: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), lr=0.01)


def close(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if value is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(got[name], value.detach(), rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023


def params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: p.grad for n, p in model.named_parameters()}


def eager_steps(model: nn.Module, make: Any, steps: int, after: Any = None, groups: Any = None) -> nn.Module:
    optimizer = make(model)
    scheduler = after(optimizer) if after else None
    for _ in range(steps):
        optimizer.zero_grad()
        CE(model(X), Y).backward()
        if groups:
            groups(model)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return model
