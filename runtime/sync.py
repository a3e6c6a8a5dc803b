"""A parameter server and its workers in one process: time is simulated, training is real.

    weights <- optimizer(weights, mean over the K gradients of  scale * gradient),   scale = 1, or 1 / max(1, staleness)

`sync_clock.updates` says which gradients make which update; each is computed at the weights that its worker pulled.
Weights that some worker still computes at are kept, the others freed: at most one copy a worker, and the newest. The
same arguments give the same bits: delays and the random ops of a gradient depend on seed, worker and mini-batch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ..partitioner.errors import MeshwrightError, PlanError
from ..partitioner.sync_clock import Delay, Gradient, Update, threshold, updates
from ..partitioner.with_tensors import Changes, call_with, unchanged

Batches = Callable[[int, int], tuple[tuple, Any]]
"""From (worker, number) to that worker's mini-batch: (arguments of the model, target)."""

SCALES = (None, "inverse")


@dataclass(frozen=True, slots=True)
class Step:
    """What one update did.

    Attributes:
        number: updates so far, this one included.
        time: virtual seconds since the start.
        loss: mean of the losses of its gradients, each at its worker's weights.
        workers, staleness: of each of its gradients, whose it is and how many updates it came late.
        cancelled: gradients begun and given up, which were never computed here.
    """

    number: int
    time: float
    loss: float
    workers: tuple[int, ...]
    staleness: tuple[int, ...]
    cancelled: int


class ParameterServer:
    """Trains a model by workers that each have all of it, and a server that has the weights.

    Args:
        model: trained in place; its parameters are the server's.
        batches: `(worker, number) -> (args, target)`: a worker's mini-batches, numbered from 0 as it begins them.
        workers: P.
        sync: "sync", "ps-sync" (the same updates), "k-sync", "k-batch-sync", "async", "k-async", "k-batch-async".
        k: gradients an update, of those that start with "k-".
        loss: `callable(output, target)`, a mean over the mini-batch.
        optimizer: from the model to a `torch.optim` optimizer.
        scheduler: from the optimizer to a learning-rate scheduler, stepped once an update.
        delay: how long a gradient takes.
        staleness: "inverse" divides a gradient that is s updates late by max(1, s); None leaves it.
        seed: of delays and random ops.

    Raises:
        PlanError: the options contradict each other; the message names the facts.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        *,
        workers: int,
        sync: str = "sync",
        k: int | None = None,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        delay: Delay | None = None,
        staleness: str | None = None,
        seed: int = 0,
    ):
        threshold(sync, workers, k)
        if staleness not in SCALES:
            raise PlanError(f"staleness={staleness!r}: say 'inverse', which divides by it, or None")
        if not isinstance(model, nn.Module):
            raise PlanError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        self.model, self.batches, self.loss = model, batches, loss
        self.scale, self.seed = staleness, seed
        self.optimizer = optimizer(model)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.time, self.steps = 0.0, 0
        self._updates = updates(sync, workers, k, delay or Delay(), seed)
        self._weights: dict[int, dict[str, torch.Tensor]] = {0: self._copy()}

    def run(self, count: int | None = None, seconds: float = float("inf")) -> Iterator[Step]:
        """Do updates, `count` of them, or until virtual time passes `seconds`; yields each as it is done.

        Raises:
            PlanError: neither is given.
            MeshwrightError: a forward pass changed a buffer: workers have no buffers of their own.
        """
        if count is None and seconds == float("inf"):
            raise PlanError("say when to stop: run(count=updates), run(seconds=virtual seconds), or both")
        last = self.steps + count if count is not None else None
        while (last is None or self.steps < last) and self.time <= seconds:
            yield self._update(next(self._updates))

    def _update(self, update: Update) -> Step:
        losses, total = [], {n: torch.zeros_like(p) for n, p in self.model.named_parameters() if p.requires_grad}
        for gradient, late in zip(update.gradients, update.staleness, strict=True):
            loss, found = self._gradient(gradient)
            losses.append(loss)
            scale = 1 / max(1, late) if self.scale == "inverse" else 1.0
            for name, g in found.items():
                if g is not None:
                    total[name].add_(g, alpha=scale / len(update.gradients))
        for name, p in self.model.named_parameters():
            p.grad = total.get(name)
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.steps, self.time = update.version + 1, update.time
        self._weights[self.steps] = self._copy()
        self._weights = {v: w for v, w in self._weights.items() if v in update.held or v == self.steps}
        who = tuple(g.worker for g in update.gradients)
        return Step(self.steps, update.time, sum(losses) / len(losses), who, update.staleness, update.cancelled)

    def _copy(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def _gradient(self, gradient: Gradient) -> tuple[float, dict[str, torch.Tensor | None]]:
        """Loss and gradients of one mini-batch at the weights that its worker had."""
        frozen = {n for n, p in self.model.named_parameters() if not p.requires_grad}
        held = self._weights[gradient.version].items()
        weights = {n: w.detach().requires_grad_(n not in frozen) for n, w in held}
        args, target = self.batches(gradient.worker, gradient.draw)
        buffers, changes = {n: b.clone() for n, b in self.model.named_buffers()}, Changes()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(hash((self.seed, gradient.worker, gradient.draw)) & (2**63 - 1))
            with unchanged(self.model, changes):
                out = call_with(self.model, {**weights, **buffers}, args, {}, changes)
                loss = self.loss(out, target)
            wanted = [n for n in weights if n not in frozen]
            grads = torch.autograd.grad(loss, [weights[n] for n in wanted], allow_unused=True)
        changed = [n for n, b in self.model.named_buffers() if n in changes.buffers or not torch.equal(b, buffers[n])]
        if changed:
            raise MeshwrightError(
                f"forward changed the buffer {changed[0]}: every worker would have one of its own. Use layers without "
                f"running statistics, such as GroupNorm in place of BatchNorm, or model.eval()"
            )
        return float(loss.detach()), dict(zip(wanted, grads, strict=True))
