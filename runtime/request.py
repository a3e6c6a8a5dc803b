"""What `compile` was asked for: the options that the runtime acts on, and a call that is to be captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from ..partitioner.errors import PlanError
from ..partitioner.mesh import Mesh
from ..partitioner.offload import Offload
from ..partitioner.precision import Precision
from ..partitioner.program import Program
from .optimizer import RankView


@dataclass(frozen=True)
class Request:
    """What is to be captured: a call, its form, and how parameters already rest on which mesh, at which ZeRO stage."""

    form: str
    args: tuple
    kwargs: dict[str, Any]
    target: Any = None
    resting: Any = None
    mesh: Mesh | None = None
    zero: int | None = None
    stages: Any = None


@dataclass(frozen=True)
class Settings:
    """The options of `compile` that the runtime acts on."""

    loss: Callable[..., torch.Tensor] | None = None
    optimizer: Callable[[RankView], torch.optim.Optimizer] | None = None
    clip_grad_norm: float | tuple[float, float] | None = None
    local_inputs: bool = False
    seed: int = 0
    timeout: float | None = None
    check_every: int | None = None
    build: Callable[[Request], Program] = field(default=None)  # type: ignore[assignment]
    offload: Offload = Offload()
    precision: Precision | None = None
    collectives: str = "torch"


def needs_target(loss: Callable | None) -> bool:
    """Whether a loss takes (output, target)."""
    if loss is None:
        return False
    fn = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        wanted = [p for p in inspect.signature(fn).parameters.values() if p.default is p.empty]
    except (TypeError, ValueError):
        return True
    positional = [p for p in wanted if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 2


def check_loss(loss: Any) -> None:
    """Raises:
    PlanError: the loss is no callable, or holds parameters of its own.
    """
    if loss is not None and not callable(loss):
        raise PlanError(f"loss= must be a callable of (output) or (output, target); got {type(loss).__name__}")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise PlanError("the loss has parameters of its own: make it part of the model, so that they are trained")


def kind_of(output: Any) -> str:
    """What a model returns, for messages."""
    if isinstance(output, dict):
        return f"a dict of {', '.join(map(repr, output))}"
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    return "None" if output is None else f"a {type(output).__name__}"
