"""The promise under `precision=`: as near to float64 as the same policy in eager PyTorch on one device."""

from __future__ import annotations

from typing import Any

import meshwright as mw
import pytest
from cases.oracle import Eager
from compare import exact_copy, exact_inputs
from low_precision import LOW, LowEager, adamw, compiled, state_of, too_far
from zoo import ZOO

MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    "dp2xtp2": ({"dp": 2, "tp": 2}, {}),
    "zero3": ({"dp": 2}, {"zero": 3}),
    "pp2": ({"pp": 2}, {"micro_batches": 4}),
}
CASES = [(name, kind, mesh) for name in ("gpt2", "llama") for kind in LOW for mesh in MESHES]
CASES += [(name, kind, mesh) for name in ("t5", "mixtral") for kind, mesh in (("bf16", "dp2"), ("fp16", "zero3"))]
CASES += [("resnet", "bf16", "dp2"), ("resnet", "bf16", "zero3"), ("resnet", "bf16", "pp2")]
FAST = {("llama", "bf16", "dp2"), ("gpt2", "fp16", "tp2"), ("llama", "bf16", "pp2")}


@pytest.mark.parametrize(
    ("name", "kind", "mesh"),
    [pytest.param(*c, id="-".join(c), marks=() if c in FAST else pytest.mark.slow) for c in CASES],
)
def test_one_step_is_as_near_as_one_device(name: str, kind: str, mesh: str):
    (double, inputs), (twin, same), (model, batch) = (ZOO[name]() for _ in range(3))
    exact = state_of(Eager(exact_copy(double), optimizer=adamw), exact_inputs(inputs))
    eager = state_of(LowEager(twin, LOW[kind], adamw, 2.0**8 if kind == "fp16" else 1.0), same)
    axes, options = MESHES[mesh]
    scale = mw.LossScale(initial_scale_power=8) if kind == "fp16" else "auto"
    c = compiled(model, axes, mw.Precision(kind, loss_scale=scale), optimizer=adamw, **options)
    found = too_far(state_of(c, batch), eager, exact, LOW[kind])
    assert not found and c.skipped_steps == 0, "\n".join(found)
