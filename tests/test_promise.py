"""The promise: on any mesh, the numbers of one device. Loss, gradients, buffers and parameters after an AdamW step."""

from typing import Any

import meshwright as mw
import pytest
import torch
from cases.oracle import Eager
from compare import all_too_far, allowed, exact_copy, exact_inputs
from zoo import ZOO

MESHES: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "dp2xtp2": {"dp": 2, "tp": 2},
    "free2x2x2": {"a": 2, "b": 2, "c": 2},
}
LR, EPS = 1e-2, 1e-2
FAST = {"llama", "gpt2", "bert", "vit", "mixtral", "unet", "dit"}


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)


def state_after_a_step(trainer: Any, inputs: dict[str, Any]) -> dict[str, dict[str, torch.Tensor | None]]:
    loss = trainer.step(**inputs)
    return {"loss": {"": loss}} | {what: trainer.gather(what) for what in ("grads", "buffers", "params")}


def entries() -> list:
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(name, marks=marks[name in FAST]) for name in ZOO]


def one_step(name: str, axes: dict[str, Any], **options: Any) -> tuple[mw.Compiled, list[str]]:
    """A model of the zoo after one step on a mesh, and every tensor that is further from float64 than allowed."""
    (model, inputs), (twin, _) = ZOO[name](), ZOO[name]()
    exact = state_after_a_step(Eager(exact_copy(twin), optimizer=adamw), exact_inputs(inputs))
    eager = state_after_a_step(Eager(twin, optimizer=adamw), inputs)
    compiled = mw.compile(model, mw.Mesh(**axes), optimizer=adamw, **options)
    got = state_after_a_step(compiled, inputs)
    # AdamW's first step moves a parameter by lr * g / (|g| + eps): an error of g counts lr / eps times
    grads = {n: (g, exact["grads"][n]) for n, g in eager["grads"].items()}
    passed_on = {n: LR / EPS * allowed(g, true) for n, (g, true) in grads.items() if g is not None and true is not None}
    found = []
    for what in got:
        found += all_too_far(what, got[what], eager[what], exact[what], passed_on if what == "params" else None)
    return compiled, found


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", entries())
def test_one_step_equals_one_device(name: str, mesh: str):
    _, found = one_step(name, MESHES[mesh])
    assert not found, "\n".join(found)
