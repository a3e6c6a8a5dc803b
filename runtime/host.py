"""Optimizer state in host memory (ZeRO-Offload): the optimizer steps host copies of a rank's shards.

    before a step    gradient -> host              the bytes of the gradients, once
    the step         on the host, by the optimizer that the user made, with its own groups and schedulers
    after it         host copy -> parameter        the bytes of the parameters, once

A parameter that somebody else wrote (a state dict loaded, first values, the user) is copied down before it is stepped:
torch counts the writes of every tensor, and a count that is not ours tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ..partitioner.offload import Offload, first_parameters, trained
from .state import State


@dataclass(frozen=True)
class OffloadReport:
    """What rests on the host, and what steps have copied; of all ranks that live in this process.

    Attributes:
        host_nbytes: of the host copies of parameters, their gradients and the optimizer's state on the host.
        device_nbytes: of parameters, their gradients and the optimizer's state on the device.
        steps: optimizer steps so far.
        down, up: (copies, bytes) from device to host, and back.
        file_nbytes: of the files that state rests in.
        read, written: bytes, from and to those files.
    """

    host_nbytes: int
    device_nbytes: int
    steps: int
    down: tuple[int, int]
    up: tuple[int, int]
    file_nbytes: int = 0
    read: int = 0
    written: int = 0


class HostShards:
    """The host copies of one rank's trained shards; {} where nothing is offloaded.

    Attributes:
        copies: {name: the host's copy}, for the optimizer.
    """

    def __init__(self, state: State, index: int, offload: Offload):
        self.state, self.index, self.offload = state, index, offload
        self.copies: dict[str, nn.Parameter] = {}
        self._seen: dict[str, int] = {}
        self.steps, self._down, self._up = 0, [0, 0], [0, 0]
        if offload.offload_optimizer == "cpu":
            for name, p in chosen(state, index, offload):
                self.copies[name] = self._copied(p)
                self._seen[name] = p._version

    def _copied(self, p: nn.Parameter) -> nn.Parameter:
        pin = self.offload.pin_memory and p.is_cuda
        copy = torch.empty(p.shape, dtype=p.dtype, device="cpu", pin_memory=pin)
        return nn.Parameter(copy.copy_(p.detach()), requires_grad=p.requires_grad)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer is made from: of each parameter the host's copy, or the shard itself."""
        for name, p in self.state.all_of(self.index):
            yield name, self.copies.get(name, p)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer that was made of these; it keeps its own state."""

    def stage(self, optimizer: torch.optim.Optimizer) -> None:
        """What of a step may fail, before anything is changed for good: nothing."""

    def undo(self) -> None:
        """Take back what `stage` did."""

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """The step."""
        self.down()
        optimizer.step()
        self.up()

    def kept(self, optimizer: torch.optim.Optimizer, name: str, p: nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of a parameter; {} before its first step."""
        return optimizer.state.get(p, {})

    def give(self, optimizer: torch.optim.Optimizer, name: str, p: nn.Parameter, kept: dict[str, Any]) -> None:
        """Replace it; {}: as before its first step."""
        if kept:
            optimizer.state[p] = kept
        elif p.numel():
            optimizer.state.pop(p, None)

    def down(self) -> None:
        """Gradients to the host, and parameters that others have written."""
        for name, p in self.state.all_of(self.index):
            copy = self.copies.get(name)
            if copy is None:
                continue
            if p._version != self._seen[name]:
                copy.data.copy_(p.detach())
                self._count(self._down, p)
            copy.grad = None
            if p.grad is not None:
                copy.grad = torch.empty_like(copy).copy_(p.grad)
                self._count(self._down, p.grad)

    def up(self) -> None:
        """The stepped parameters to the device; gradients on the host are let go."""
        for name, p in self.state.all_of(self.index):
            copy = self.copies.get(name)
            if copy is None or copy.grad is None:
                continue
            with torch.no_grad():
                p.copy_(copy)
            self._count(self._up, p)
            self._seen[name], copy.grad = p._version, None
        self.steps += 1

    @staticmethod
    def _count(where: list[int], x: torch.Tensor) -> None:
        if x.numel():
            where[0] += 1
            where[1] += x.nbytes

    def report(self, optimizer: torch.optim.Optimizer) -> OffloadReport:
        host, device = 0, 0
        for name, p in self.state.all_of(self.index):
            device += p.nbytes + (p.grad.nbytes if p.grad is not None else 0)
            copy = self.copies.get(name)
            kept = optimizer.state.get(p if copy is None else copy, {})
            nbytes = sum(x.nbytes for x in kept.values() if isinstance(x, torch.Tensor))
            if copy is None:
                device += nbytes
            else:
                host += nbytes + copy.nbytes + (p.grad.nbytes if p.grad is not None else 0)
        return OffloadReport(host, device, self.steps, (self._down[0], self._down[1]), (self._up[0], self._up[1]))


def chosen(state: State, index: int, offload: Offload) -> Iterator[tuple[str, nn.Parameter]]:
    """The shards of the first trained parameters of the model that make up `ratio` of its trained elements."""
    mine = dict(state.all_of(index))
    for name in first_parameters(trained(state.model), offload.ratio):
        yield name, mine[name]


def added(reports: list[OffloadReport]) -> OffloadReport:
    """The reports of several ranks as one."""
    down = tuple(map(sum, zip(*(r.down for r in reports), strict=True)))
    up = tuple(map(sum, zip(*(r.up for r in reports), strict=True)))
    host, device = sum(r.host_nbytes for r in reports), sum(r.device_nbytes for r in reports)
    files = (sum(r.file_nbytes for r in reports), sum(r.read for r in reports), sum(r.written for r in reports))
    return OffloadReport(host, device, reports[0].steps, down, up, *files)  # type: ignore[arg-type]
