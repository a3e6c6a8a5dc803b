"""The promise: on any mesh, the numbers of one device. Loss, gradients, buffers and parameters after an AdamW step."""

from typing import Any

import meshwright as mw
import pytest
import torch
from cases.oracle import Eager
from compare import TINY, all_too_far, exact_copy, exact_inputs
from zoo import ZOO

MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "dp2xtp2": {"dp": 2, "tp": 2}}
# Adam's first step is lr * g / (|g| + eps): noise of size TINY in a gradient that should be 0 moves a parameter by this
LR, EPS = 1e-2, 1e-4
NOISE = {"params": TINY * LR / EPS}
FAST = {"llama", "gpt2", "bert", "vit", "mixtral", "unet", "dit"}


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)


def state_after_a_step(trainer: Any, inputs: dict[str, Any]) -> dict[str, dict[str, torch.Tensor | None]]:
    loss = trainer.step(**inputs)
    return {"loss": {"": loss}} | {what: trainer.gather(what) for what in ("grads", "buffers", "params")}


def entries() -> list:
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(name, marks=marks[name in FAST]) for name in ZOO]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", entries())
def test_one_step_equals_one_device(name: str, mesh: str):
    (model, inputs), (twin, _) = ZOO[name](), ZOO[name]()
    exact = state_after_a_step(Eager(exact_copy(twin), optimizer=adamw), exact_inputs(inputs))
    eager = state_after_a_step(Eager(twin, optimizer=adamw), inputs)
    compiled = mw.compile(model, mw.Mesh(**MESHES[mesh]), optimizer=adamw)
    got = state_after_a_step(compiled, inputs)
    found = []
    for what in got:
        found += all_too_far(what, got[what], eager[what], exact[what], NOISE.get(what, TINY))
    assert not found, "\n".join(found)
