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
from ..partitioner.transfer import Transfer, is_first, local_slice, slice_args, transfer_of, zero_unless_first
from .comm import Comm, Expect, Post, Start, Wait


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


Home = tuple[tuple[int, ...], torch.dtype]
"""Where a tensor lives (indices on the pipeline axis; () for everywhere), and its dtype."""


def gather(
    comm: Comm, mesh: Mesh, parts: list[torch.Tensor | None], layout: Layout, home: Home | None = None
) -> torch.Tensor:
    """The whole tensor, on every rank, from the parts of this process's ranks; it shares no memory with them."""
    everywhere = home is None or not home[0] or len(home[0]) == len(pipeline_ranks(mesh, 0))
    if layout.is_whole and everywhere:
        assert parts[0] is not None
        return parts[0].clone()
    programs = [_gather(p, layout, mesh, r, home) for p, r in zip(parts, comm.ranks, strict=True)]
    return comm.run(programs)[0]  # type: ignore[arg-type]


def _gather(part: torch.Tensor | None, layout: Layout, mesh: Mesh, rank: int, home: Home | None) -> Iterator[Any]:
    """Put together where it lives, then sent to the ranks of the other stages."""
    whole = part
    if part is not None:
        whole = yield from reshard_program(part, layout, layout.unsplit(), mesh, rank)
    if home is None or not home[0]:
        return whole
    line = pipeline_ranks(mesh, rank)
    if rank == line[home[0][0]]:
        assert whole is not None
        for i in set(range(len(line))) - set(home[0]):
            yield Post(line[i], (whole,), "gather")
    elif part is None:
        (whole,) = yield Wait((yield Expect(line[home[0][0]], ((layout.shape, home[1]),), "gather")))
    return whole


def pipeline_ranks(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` in their pipeline stage alone; itself where there are no stages."""
    axes = tuple(a for a in mesh.names if mesh.role(a) == "pipeline")
    return mesh.group(axes, rank) if axes else (rank,)


class State:
    """Shards of one model on the ranks of this process.

    Attributes:
        layouts: {parameter: resting layout}.
        homes: {parameter: the indices on the pipeline axis that hold it}; () for all.
        params: {parameter: its shard on each held rank, None where that is no home}; buffers likewise, whole.
        aliases: {name: first name} of parameters and buffers that are one tensor under several names.
        as_given: whether all values are still those that the model came with.
    """

    def __init__(
        self,
        model: nn.Module,
        layouts: Mapping[str, Layout],
        mesh: Mesh,
        comm: Comm,
        device: torch.device,
        homes: Mapping[str, tuple[int, ...]] | None = None,
    ):
        self.mesh, self.comm, self.device = mesh, comm, device
        self.layouts = dict(layouts)
        self.homes = {name: tuple((homes or {}).get(name, ())) for name in self.layouts}
        self.model = model
        self.params: dict[str, list[nn.Parameter | None]] = {}
        self.stand_ins: dict[tuple[str, int], nn.Parameter] = {}
        self.buffers: dict[str, list[torch.Tensor]] = {}
        self.empty: set[str] = set()
        for name, p in model.named_parameters():
            self.params[name] = [self._shard(name, p, r) if self.lives(name, r) else None for r in comm.ranks]
            if p.is_meta:
                self.empty.add(name)
        for name, b in model.named_buffers():
            if b.is_meta:
                self.empty.add(name)
            self.buffers[name] = [self._copy(b) for _ in comm.ranks]
        self.aliases = aliases_of(model)
        self.as_given = not self.empty

    def _shard(self, name: str, p: nn.Parameter, rank: int) -> nn.Parameter:
        if p.is_meta:
            local = torch.empty(local_shape(self.layouts[name], self.mesh, rank), dtype=p.dtype, device=self.device)
        else:
            local = take_local(p.detach(), self.layouts[name], self.mesh, rank)
            local = local.to(self.device).clone(memory_format=torch.contiguous_format)
        return nn.Parameter(local, requires_grad=p.requires_grad)

    def all_of(self, index: int) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, shard) of every parameter on the held rank of this index; one that lives elsewhere is there as a
        parameter of no elements, so that groups and schedulers are alike on all ranks."""
        for name, p in self.model.named_parameters():
            shard = self.params[name][index]
            if shard is None:
                shape = (0, *p.shape[1:]) if p.dim() else (0,)
                empty = torch.empty(shape, dtype=p.dtype, device=self.device)
                made = nn.Parameter(empty, requires_grad=p.requires_grad)
                shard = self.stand_ins.setdefault((name, index), made)
            yield name, shard

    def lives(self, name: str, rank: int) -> bool:
        """Whether a rank holds a shard of a parameter."""
        line = pipeline_ranks(self.mesh, rank)
        return not self.homes[name] or line.index(rank) in self.homes[name]

    def shards(self, index: int | None = None) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, shard) of every parameter, of the held rank of this index or of all, where they live."""
        for name, shards in self.params.items():
            for p in shards if index is None else (shards[index],):
                if p is not None:
                    yield name, p

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
        self.as_given = False
        for p, rank in zip(self.params[name], self.comm.ranks, strict=True):
            if p is None:
                continue
            with torch.no_grad():
                p.copy_(take_local(value.detach(), self.layouts[name], self.mesh, rank))
        self.empty.discard(name)

    def set_buffer(self, name: str, value: torch.Tensor) -> None:
        for b in self.buffers[name]:
            b.copy_(value.detach())
        self.empty.discard(name)

    def whole_param(self, name: str) -> torch.Tensor:
        parts = [None if p is None else p.detach() for p in self.params[name]]
        return gather(self.comm, self.mesh, parts, self.layouts[name], self._home(name))

    def whole_grad(self, name: str) -> torch.Tensor | None:
        grads = [None if p is None else p.grad for p in self.params[name]]
        if not self._anywhere(any(g is not None for g in grads)):
            return None
        return gather(self.comm, self.mesh, grads, self.layouts[name], self._home(name))

    def _home(self, name: str) -> Home:
        return self.homes[name], dict(self.model.named_parameters())[name].dtype

    def _anywhere(self, here: bool) -> bool:
        """Whether something holds on any rank: where there are stages, others may hold what this one does not."""
        axes = tuple(a for a in self.mesh.names if self.mesh.role(a) == "pipeline" and self.mesh.sizes[a] > 1)
        return bool(largest(self.comm, self.mesh, self.device, int(here), axes))

    def whole_buffer(self, name: str) -> torch.Tensor:
        return self.buffers[name][0].clone()


def largest(
    comm: Comm, mesh: Mesh, device: torch.device, number: int, axes: tuple[str, ...] | None = None
) -> int:
    """The largest of the numbers that the ranks along some axes (all, by default) come with."""
    axes = tuple(a for a in mesh.names if mesh.sizes[a] > 1) if axes is None else axes
    if not axes or len(comm.ranks) == mesh.world_size:
        return number
    return int(comm.run([_largest(torch.tensor(number, device=device), axes)])[0])  # type: ignore[list-item]


def _largest(flag: torch.Tensor, axes: tuple[str, ...]) -> Iterator[Any]:
    (found,) = yield Wait((yield Start((Transfer("all_reduce", axes, (), (), op="max"),), (flag,), where="gather")))
    return found


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter or buffer, and the first."""
    out: dict[str, str] = {}
    for unique, every in (
        (model.named_parameters(), model.named_parameters(remove_duplicate=False)),
        (model.named_buffers(), model.named_buffers(remove_duplicate=False)),
    ):
        first = {id(t): name for name, t in unique}
        out |= {name: first[id(t)] for name, t in every if first[id(t)] != name}
    return out
