"""The one-device reference: plain eager PyTorch behind the methods of a compiled model, so one program drives both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Loss = Callable[..., torch.Tensor]


def loss_of(output: Any, loss: Loss | None, target: Any = None) -> torch.Tensor:
    """The 0-d loss of a model's output, as `compile` finds it."""
    if loss is not None:
        return loss(output) if target is None else loss(output, target)
    return output if isinstance(output, torch.Tensor) else output.loss


class Eager:
    """A model, its loss and its optimizer on one device."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        clip_grad_norm: tuple[float, float] | None = None,
        scale: float | None = None,
    ):
        self.model, self.loss, self.clip_grad_norm = model, loss, clip_grad_norm
        self.optimizer = optimizer(model) if optimizer else None
        self.grad_norm: torch.Tensor | None = None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        self.model.zero_grad(set_to_none=True)
        loss = loss_of(self.model(*args, **kwargs), self.loss, target)
        self.scaler.scale(loss).backward()
        if self.optimizer:
            self.scaler.unscale_(self.optimizer)
        if self.clip_grad_norm:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), *self.clip_grad_norm)
        if self.optimizer:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def scheduler(self, make: Callable[[Any], Any]) -> Any:
        return make(self.optimizer)

    def gather(self, what: str) -> dict[str, torch.Tensor | None]:
        if what == "buffers":
            return {n: b.detach().clone() for n, b in self.model.named_buffers()}
        tensors = {n: p if what == "params" else p.grad for n, p in self.model.named_parameters()}
        return {n: None if t is None else t.detach().clone() for n, t in tensors.items()}

    def train(self, mode: bool = True) -> Eager:
        self.model.train(mode)
        return self

    def eval(self) -> Eager:
        return self.train(False)
