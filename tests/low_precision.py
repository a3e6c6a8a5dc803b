"""The policy of `precision=` in plain eager PyTorch on one device, and how far from float64 a run may be then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import meshwright as mw
import torch
from compare import TIMES, TINY, far
from torch import nn
from torch.utils._pytree import tree_map

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = 2.0
"""Units in the last place of the low dtype, of the largest element: allowed where eager happens to be exact."""


def adamw(m: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-2)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)


class LowEager:
    """A model that returns its loss: working copies of its parameters (not of batch norms') and inputs in a low dtype,
    backward from `scale`, gradients and the optimizer step in float32."""

    def __init__(self, model: nn.Module, low: torch.dtype, optimizer: Any = None, scale: float = 1.0):
        self.model, self.low, self.scale = model, low, scale
        self.optimizer = optimizer(model) if optimizer else None
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.kept = {id(p) for m in norms for p in m.parameters()}

    def step(self, **inputs: Any) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        params = self.model.named_parameters()
        copies = {n: p if id(p) in self.kept else p.to(self.low) for n, p in params}
        out = torch.func.functional_call(self.model, copies, (), cast(inputs, self.low), tie_weights=True)
        loss = out.float()
        (loss * self.scale).backward()
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.div_(self.scale)
        if self.optimizer:
            self.optimizer.step()
        return loss.detach()

    def gather(self, what: str) -> dict[str, Any]:
        if what == "buffers":
            return {n: b.detach().clone() for n, b in self.model.named_buffers()}
        found = {n: p if what == "params" else p.grad for n, p in self.model.named_parameters()}
        return {n: None if t is None else t.detach().clone() for n, t in found.items()}


State = Mapping[str, Mapping[str, Any]]


def state_of(trainer: Any, inputs: dict[str, Any]) -> State:
    """What one step leaves."""
    loss = trainer.step(**inputs)
    return {"loss": {"": loss}} | {what: trainer.gather(what) for what in ("grads", "buffers", "params")}


def too_far(got: State, eager: State, exact: State, low: torch.dtype) -> list[str]:
    """Every tensor of `got` that is further from `exact` than TIMES the distance of `eager`."""
    found = []
    for what in got:
        for name, want in eager[what].items():
            have, true = got[what].get(name), exact[what][name]
            if want is None or true is None or have is None:
                found += [] if want is have else [f"{what} {name}: want {want}, got {have}"]
            elif have.dtype != want.dtype or have.shape != want.shape:
                found.append(f"{what} {name}: {have.dtype} {list(have.shape)}")
            elif not have.is_floating_point():
                found += [] if torch.equal(have, want) else [f"{what} {name}: differs"]
            else:
                largest = true.abs().max().item() if true.numel() else 0.0
                bar = TIMES * far(want, true) + UNITS * torch.finfo(low).eps * largest + TINY
                if (error := far(have, true)) > bar:
                    one = f"one device {far(want, true):.3g}"
                    found.append(f"{what} {name}: error {error:.3g}, allowed {bar:.3g} ({one})")
    return found


def compiled(model: nn.Module, axes: dict[str, int], precision: Any, **options: Any) -> mw.Compiled:
    return mw.compile(model, mw.Mesh(**axes, device="cpu"), precision=precision, **options)  # type: ignore[arg-type]
