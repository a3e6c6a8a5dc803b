"""The modes of the race: one process, what ships with PyTorch, and Meshwright on the same meshes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import meshwright as mw
import torch
import torch.distributed as dist
from race_model import Config, build, lm_loss
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Job:
    """One whole optimizer step on a global batch; returns this rank's share of the loss, or None."""

    loss: float | None = None

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        raise NotImplementedError


class Idle(Job):
    """A rank that has nothing to do."""

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        return None


class Peer(Job):
    """Forward, loss, backward and AdamW as a user of PyTorch writes them, on this rank's part of the batch."""

    def __init__(
        self,
        model: nn.Module,
        split: bool,
        around: Callable[[], Any] = contextlib.nullcontext,
        part: tuple[int, int] | None = None,
    ):
        self.model, self.around = model, around
        self.part, self.parts = part or ((dist.get_rank(), dist.get_world_size()) if split else (0, 1))
        self.optimizer = fused_adamw(model.parameters())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        x, y = (t.chunk(self.parts)[self.part] for t in (x, y))
        self.optimizer.zero_grad(set_to_none=True)
        with self.around():
            loss = lm_loss(self.model(x), y)
            loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


class Ours(Job):
    def __init__(self, config: Config, mesh: mw.Mesh, **options: Any):
        x = torch.zeros(config.batch, config.seq, dtype=torch.long)
        adamw = lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True)  # noqa: E731
        example = {"args": (x,), "kwargs": {"target": x}}
        self.compiled = mw.compile(build(config), mesh, **example, loss=lm_loss, optimizer=adamw, **options)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        loss = float(self.compiled.step(x, target=y))
        if self.compiled.steps == 1:
            self.compiled.model.to("meta")  # its values were read; peers train the model itself
        return loss


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A group for plain tensors and one for DTensors: the fused kernel takes no mix."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(isinstance(p, DTensor), []).append(p)
    return torch.optim.AdamW([{"params": g} for g in groups.values()], lr=1e-3, fused=True)


def mesh(axis: str) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))


def single(config: Config) -> Job:
    """One process on the whole batch, the others wait."""
    return Idle() if dist.get_rank() else Peer(build(config), split=False)


def ddp(config: Config) -> Job:
    return Peer(nn.parallel.DistributedDataParallel(build(config)), split=True)


def zero1(config: Config) -> Job:
    """DDP, each rank steps its part of the parameters: ZeRO-1."""
    job = ddp(config)
    assert isinstance(job, Peer)
    job.optimizer = ZeroRedundancyOptimizer(job.model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    return job


def fsdp2(config: Config, again: bool = True) -> Job:
    """fully_shard on each block and the root: ZeRO-3; like ZeRO-2 where it does not gather again for backward."""
    model, over = build(config), mesh("dp")
    for block in model.blocks:
        fully_shard(block, mesh=over, reshard_after_forward=again)
    fully_shard(model, mesh=over, reshard_after_forward=again)
    return Peer(model, split=True)


def tensor_parallel(config: Config, sequence_sharded_norms: bool) -> Job:
    model = tensor_parallel_model(config, mesh("tp"), sequence_sharded_norms)
    return Peer(model, split=False, around=loss_parallel)


def tensor_parallel_model(config: Config, over: DeviceMesh, sequence_sharded_norms: bool) -> Any:
    """DTensor column and row split, with vocabulary-parallel embedding, head and loss."""
    model = build(config)
    between = Shard(1) if sequence_sharded_norms else Replicate()
    row = RowwiseParallel(output_layouts=between)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    head = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    outer = {"tokens": embedding, "positions": embedding, "head": head}
    inner: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    inner |= {"attention.o": row, "mlp.up": ColwiseParallel(), "mlp.down": row}
    if sequence_sharded_norms:
        whole = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        outer["norm"] = SequenceParallel()
        inner |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": whole, "mlp": whole}
    parallelize_module(model, over, outer)
    for block in model.blocks:
        parallelize_module(block, over, inner)
    return model


MODES: dict[str, Callable[[Config], Job]] = {
    "single": single,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "tp": lambda config: tensor_parallel(config, sequence_sharded_norms=False),
    "tp_sp": lambda config: tensor_parallel(config, sequence_sharded_norms=True),
    "mw_dp": lambda config: Ours(config, mw.Mesh(dp=dist.get_world_size()), zero=0),
    "mw_dp_auto": lambda config: Ours(config, mw.Mesh(dp=dist.get_world_size())),
    "mw_fsdp": lambda config: Ours(config, mw.Mesh(dp=dist.get_world_size()), zero=3),
    "mw_tp": lambda config: Ours(config, mw.Mesh(tp=dist.get_world_size())),
    "zero1": zero1,
    "mw_zero1": lambda config: Ours(config, mw.Mesh(dp=dist.get_world_size()), zero=1),
    "fsdp2_zero2": lambda config: fsdp2(config, again=False),
    "mw_zero2": lambda config: Ours(config, mw.Mesh(dp=dist.get_world_size()), zero=2),
    "mw_free": lambda config: Ours(config, mw.Mesh(ranks=dist.get_world_size())),
}
