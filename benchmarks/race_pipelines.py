"""The pipelines of the race: torch.distributed.pipelining, and Meshwright with the same schedules and micro-batches.

Peers are cut between layers so that the costliest stage is cheapest, the head counted with the last. `m` micro-batches
are twice the stages (ranks along the pipeline), at most one row each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshwright as mw
import torch
import torch.distributed as dist
from race_model import GPT, Config, build, lm_loss
from race_modes import Idle, Job, Ours, Peer, fused_adamw, tensor_parallel_model
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel


class Stage(nn.Module):
    """Blocks `low` to `high` of a GPT, the embeddings with the first and the head with the last."""

    def __init__(self, full: GPT, low: int, high: int, first: bool, last: bool):
        super().__init__()
        self.blocks = nn.ModuleList(list(full.blocks)[low:high])
        if first:
            self.tokens, self.positions = full.tokens, full.positions
        if last:
            self.norm, self.head = full.norm, full.head
        self.first, self.last = first, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]).unsqueeze(0))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def ranges(config: Config, stages: int) -> list[tuple[int, int]]:
    """Layers of each stage: the costliest stage as cheap as can be."""
    c = config
    layer, head = 24 * c.d**2 + 4 * c.seq * c.d, 2 * c.d * c.vocab  # flops a token, forward
    best: tuple[float, list[int]] = (float("inf"), [])

    def search(cuts: list[int], worst: float) -> None:
        nonlocal best
        low, left = cuts[-1], stages - len(cuts)
        if worst >= best[0]:
            return
        if left == 0:
            worst = max(worst, (c.layers - low) * layer + head)
            best = min(best, (worst, [*cuts, c.layers]))
            return
        for high in range(low + (len(cuts) > 1), c.layers + 1):
            search([*cuts, high], max(worst, (high - low) * layer))

    search([0], 0.0)
    return list(zip(best[1], best[1][1:], strict=False))


def micro_batches(config: Config, stages: int, replicas: int = 1) -> int:
    return min(config.batch // replicas, 2 * stages)


class Pipelined(Job):
    """A schedule of torch.distributed.pipelining on this rank's part of the batch."""

    def __init__(self, schedule: Any, parameters: list[nn.Parameter], first: bool, last: bool, part: tuple[int, int]):
        self.schedule, self.first, self.last, self.part = schedule, first, last, part
        self.optimizer = fused_adamw(parameters)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        x, y = (t.chunk(self.part[1])[self.part[0]] for t in (x, y))
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        more = {"target": y, "losses": losses} if self.last else {}
        self.schedule.step(*((x,) if self.first else ()), **more)
        self.optimizer.step()
        return float(torch.stack([one.detach() for one in losses]).mean()) if self.last else None


def theirs(name: str, virtual: int = 1, in_a_v: bool = False, replicas: int = 1) -> Callable[[Config], Job]:
    def make(config: Config) -> Job:
        ranks = dist.get_world_size() // replicas
        mesh = init_device_mesh("cpu", (ranks, replicas), mesh_dim_names=("pp", "dp"))
        rank, replica, count = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), ranks * virtual
        cut, full = ranges(config, count), build(config)
        mine = [rank, count - 1 - rank] if in_a_v else [rank + ranks * v for v in range(virtual)]
        stages, parameters = [], []
        for s in mine:
            module: nn.Module = Stage(full, *cut[s], s == 0, s == count - 1)
            if replicas > 1:
                module = nn.parallel.DistributedDataParallel(
                    module, process_group=mesh["dp"].get_group(), find_unused_parameters=True
                )
            parameters += list(module.parameters())
            stages.append(
                pipelining.PipelineStage(module, s, count, torch.device("cpu"), group=mesh["pp"].get_group())
            )
        made = getattr(pipelining, name)(
            stages[0] if virtual == 1 else stages, micro_batches(config, ranks, replicas), loss_fn=lm_loss
        )
        return Pipelined(made, parameters, 0 in mine, count - 1 in mine, (replica, replicas))

    return make


def ours(schedule: str, **axes: int) -> Callable[[Config], Job]:
    """On a pipeline over all processes that `axes` leave."""

    def make(config: Config) -> Job:
        replicas = axes.get("dp", 1)
        ranks = dist.get_world_size() // replicas
        parts = micro_batches(config, ranks, replicas)
        return Ours(config, mw.Mesh(pp=ranks, **axes), micro_batches=parts, schedule=schedule, zero=0)  # type: ignore[arg-type]

    return make


def tp_dp(config: Config) -> Job:
    """Tensor parallel over 2 ranks, fully_shard over the rest."""
    if dist.get_world_size() < 4:
        return Idle()
    over = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel_model(config, over["tp"], sequence_sharded_norms=False)
    for block in model.blocks:
        fully_shard(block, mesh=over["dp"])
    fully_shard(model, mesh=over["dp"])
    return Peer(model, split=True, around=loss_parallel, part=(over["dp"].get_local_rank(), over["dp"].size()))


PIPELINES: dict[str, Callable[[Config], Job]] = {
    "pp_gpipe": theirs("ScheduleGPipe"),
    "mw_pp_gpipe": ours("gpipe"),
    "pp_1f1b": theirs("Schedule1F1B"),
    "mw_pp_1f1b": ours("1f1b"),
    "pp_i1f1b": theirs("ScheduleInterleaved1F1B", 2),
    "mw_pp_i1f1b": ours("interleaved"),
    "pp_zbv": theirs("ScheduleZBVZeroBubble", 2, True),
    "mw_pp_zbv": ours("zb-v"),
    "mw_pp_auto": ours("auto"),
}
ON_FOUR: dict[str, Callable[[Config], Job]] = {
    "pp_dp": theirs("Schedule1F1B", replicas=2),
    "mw_pp_dp": ours("1f1b", dp=2),
    "tp_dp": tp_dp,
    "mw_tp_dp": lambda config: Ours(config, mw.Mesh(dp=dist.get_world_size() // 2, tp=2), zero=3),
}
