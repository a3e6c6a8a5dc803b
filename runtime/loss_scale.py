"""Dynamic loss scaling: the scale from step to step, and whether a step's gradients may be used.

    a step      its gradients are    then
    static      finite               the scale stays                       (`loss_scale` above 0)
                not                  the step is skipped
    dynamic     finite               clean + 1; at `loss_scale_window` clean steps in a row the scale is doubled, and
                                     `hysteresis` is as at first
                not                  the step is skipped, clean = 0; hysteresis - 1 while it is above 1, else the scale
                                     is halved, not below `min_loss_scale`; if it is that already: an error, as in
                                     DeepSpeed

These are the states of DeepSpeed's DynamicLossScaler; torch.amp.GradScaler's are those with a hysteresis of 1 and a
window of 2000. A step is skipped by all ranks of all axes or by none: whether it is, is one reduction over all of them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..partitioner.errors import MeshwrightError
from ..partitioner.precision import LossScale
from ..partitioner.transfer import Transfer
from .comm import Start, Wait
from .state import State


@dataclass(frozen=True)
class Scale:
    """The scale between two steps.

    Attributes:
        value: by which the loss of the next step is multiplied.
        hysteresis: overflows until the scale is halved.
        clean: steps without overflow since the last one, or since the scale was last doubled.
        skipped: steps skipped so far.
    """

    value: float
    hysteresis: int
    clean: int = 0
    skipped: int = 0


def first(options: LossScale) -> Scale:
    """The scale before the first step."""
    return Scale(float(options.loss_scale or 2**options.initial_scale_power), options.hysteresis)


def after(scale: Scale, options: LossScale, overflow: bool) -> Scale:
    """The scale after a step whose gradients were finite, or not (`overflow`)."""
    if overflow:
        scale = replace(scale, skipped=scale.skipped + 1)
        if options.loss_scale > 0:
            return scale
        if scale.hysteresis > 1:
            return replace(scale, hysteresis=scale.hysteresis - 1, clean=0)
        return replace(scale, value=max(scale.value / 2, options.min_loss_scale), clean=0)
    if options.loss_scale > 0:
        return scale
    if scale.clean + 1 == options.loss_scale_window:
        return replace(scale, value=scale.value * 2, hysteresis=options.hysteresis, clean=0)
    return replace(scale, clean=scale.clean + 1)


class Scaler:
    """The loss scale of a compiled model, which a checkpoint saves.

    Attributes:
        options: as given.
        scale: the state that the next step starts from.
        overflow: whether the last step was skipped.
    """

    def __init__(self, options: LossScale):
        self.options, self.scale, self.overflow = options, first(options), False

    def tensor(self, device: torch.device) -> torch.Tensor:
        """The scale as a program takes it: float32, 0-d."""
        return torch.tensor(self.scale.value, dtype=torch.float32, device=device)

    def update(self, overflow: bool) -> None:
        """After a step.

        Raises:
            MeshwrightError: its gradients overflowed though the scale is the least that is allowed.
        """
        at_least = self.options.loss_scale == 0 and self.scale.value <= self.options.min_loss_scale
        stuck = overflow and at_least and self.scale.hysteresis <= 1
        self.overflow, self.scale = overflow, after(self.scale, self.options, overflow)
        if stuck:
            raise MeshwrightError(
                f"gradients are not finite though the loss scale is at its minimum, {self.scale.value:g}: the step was "
                f"skipped ({self.scale.skipped} in all) and nothing was changed. The loss or the data hold inf or nan, "
                f"or training diverged: compute in 'bf16', lower the learning rate or clip_grad_norm, or allow a "
                f"smaller LossScale(min_loss_scale=...)"
            )

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers."""
        return asdict(self.scale)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state that `state_dict` gave.

        Raises:
            MeshwrightError: it is none; nothing is changed then.
        """
        kinds = {"value": float, "hysteresis": int, "clean": int, "skipped": int}
        if not isinstance(state, dict) or state.keys() != kinds.keys():
            got = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise MeshwrightError(f"this is no state of a loss scale: expected {sorted(kinds)}, got {got}")
        try:
            self.scale = Scale(**{name: kind(state[name]) for name, kind in kinds.items()})
        except (TypeError, ValueError) as fault:
            raise MeshwrightError(f"this is no state of a loss scale: {fault}") from fault


def unscale(state: State, scale: float) -> bool:
    """Divide all gradients by the scale. Returns whether some gradient of any rank is inf or nan."""
    with torch.no_grad():
        for _, p in state.shards():
            if p.grad is not None:
                p.grad.div_(scale)
        programs = [_not_finite(state, i) for i in range(len(state.comm.ranks))]
        return bool(state.comm.run(programs)[0])


def spread(state: State) -> None:
    """What is not finite in the gradients of one rank is not finite on any, so that a scaler of the user's own, which
    looks at the gradients of its own process, skips the same steps everywhere."""
    with torch.no_grad():
        flags = state.comm.run([_not_finite(state, i) for i in range(len(state.comm.ranks))])
        for index, flag in enumerate(flags):
            grad = next((p.grad for _, p in state.shards(index) if p.grad is not None and p.grad.numel()), None)
            if grad is not None:
                one = grad.flatten()[:1] if grad.is_contiguous() else grad[(slice(0, 1),) * grad.dim()]
                one.copy_(torch.where(flag > 0, torch.full_like(one, torch.nan), one))


def _not_finite(state: State, index: int) -> Generator[Any, Any, torch.Tensor]:
    """A rank's program: 1 where some gradient of any rank is not finite, else 0."""
    found = torch.zeros((), device=state.device)
    for _, p in state.shards(index):
        if p.grad is not None and p.grad.numel():
            found = torch.maximum(found, 1.0 - torch.linalg.vector_norm(p.grad, torch.inf).isfinite().float())
    axes = tuple(a for a in state.mesh.names if state.mesh.sizes[a] > 1)
    if axes:
        transfer = Transfer("all_reduce", axes, (), (), op="max")
        (found,) = yield Wait((yield Start((transfer,), (found,), where="overflow")))
    return found


__all__ = ["Scale", "Scaler", "after", "first", "spread", "unscale"]
