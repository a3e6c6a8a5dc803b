"""What rests between steps: each rank's shards of parameters, gradients and buffers.

One `State` holds the shards of the ranks that live in this process: all of them in process, one under torchrun. A shard
is an `nn.Parameter` of the model's own number of dims; a gradient is its `.grad` and lies as it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn

from ..partitioner.collective import path
from ..partitioner.errors import MeshwrightError
from ..partitioner.layout import Layout, local_shape, take_local
from ..partitioner.mesh import Mesh
from ..partitioner.transfer import is_first, local_slice, slice_args, transfer_of, zero_unless_first
from .comm import Comm, Start, Wait


def reshard_program(x: torch.Tensor, before: Layout, after: Layout, mesh: Mesh, rank: int) -> Iterator[Any]:
    """A rank's program that brings one tensor from a layout to another, and returns it."""
    for step in path(before, after, mesh, x.element_size()):
        if step.kind == "slice":
            x = local_slice(x, *slice_args(step, mesh, rank))
        elif step.kind == "zero":
            x = zero_unless_first(x, is_first(step, mesh, rank))
        else:
            (x,) = yield Wait((yield Start((transfer_of(step, mesh, rank),), (x,), where="gather")))
    return x


def gather(comm: Comm, mesh: Mesh, parts: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The whole tensor, on every rank, from the parts of this process's ranks; it shares no memory with them."""
    if layout.is_whole:
        return parts[0].clone()
    programs = [reshard_program(p, layout, layout.unsplit(), mesh, r) for p, r in zip(parts, comm.ranks, strict=True)]
    return comm.run(programs)[0]  # type: ignore[arg-type]


class State:
    """Shards of one model on the ranks of this process.

    Attributes:
        layouts: {parameter: resting layout}.
        params: {parameter: its shard on each held rank}; buffers likewise, whole.
        aliases: {name: first name} of parameters and buffers that are one tensor under several names.
    """

    def __init__(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, comm: Comm, device: torch.device):
        self.mesh, self.comm, self.device = mesh, comm, device
        self.layouts = dict(layouts)
        self.model = model
        self.params: dict[str, list[nn.Parameter]] = {}
        self.buffers: dict[str, list[torch.Tensor]] = {}
        self.empty: set[str] = set()
        for name, p in model.named_parameters():
            self.params[name] = [self._shard(name, p, rank) for rank in comm.ranks]
        for name, b in model.named_buffers():
            if b.is_meta:
                self.empty.add(name)
            self.buffers[name] = [self._copy(b) for _ in comm.ranks]
        self.aliases = _aliases(model)

    def _shard(self, name: str, p: nn.Parameter, rank: int) -> nn.Parameter:
        if p.is_meta:
            self.empty.add(name)
            local = torch.empty(local_shape(self.layouts[name], self.mesh, rank), dtype=p.dtype, device=self.device)
        else:
            local = take_local(p.detach(), self.layouts[name], self.mesh, rank)
            local = local.to(self.device).clone(memory_format=torch.contiguous_format)
        return nn.Parameter(local, requires_grad=p.requires_grad)

    def _copy(self, b: torch.Tensor) -> torch.Tensor:
        if b.is_meta:
            return torch.empty_like(b, device=self.device)
        return b.detach().to(self.device).clone(memory_format=torch.contiguous_format)

    def require_values(self) -> None:
        """Raises:
        MeshwrightError: the model was made on the meta device and some tensors have no values yet.
        """
        if self.empty:
            some = ", ".join(sorted(self.empty)[:3])
            raise MeshwrightError(
                f"{len(self.empty)} tensors have no values yet ({some}, ...): the model was made on the meta device. "
                f"Give compile args= and call load_state_dict(...) or initialize() before the first step"
            )

    def set_param(self, name: str, value: torch.Tensor) -> None:
        """Give a parameter a new whole value."""
        for p, rank in zip(self.params[name], self.comm.ranks, strict=True):
            with torch.no_grad():
                p.copy_(take_local(value.detach(), self.layouts[name], self.mesh, rank))
        self.empty.discard(name)

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        for b in self.buffers[name]:
            b.copy_(value.detach())
        self.empty.discard(name)

    def whole_param(self, name: str) -> torch.Tensor:
        return gather(self.comm, self.mesh, [p.detach() for p in self.params[name]], self.layouts[name])

    def whole_grad(self, name: str) -> torch.Tensor | None:
        grads = [p.grad for p in self.params[name]]
        if any(g is None for g in grads):
            return None
        return gather(self.comm, self.mesh, grads, self.layouts[name])  # type: ignore[arg-type]

    def whole_buffer(self, name: str) -> torch.Tensor:
        return self.buffers[name][0].clone()


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter or buffer, and the first."""
    out: dict[str, str] = {}
    for unique, every in (
        (model.named_parameters(), model.named_parameters(remove_duplicate=False)),
        (model.named_buffers(), model.named_buffers(remove_duplicate=False)),
    ):
        first = {id(t): name for name, t in unique}
        out |= {name: first[id(t)] for name, t in every if first[id(t)] != name}
    return out
