"""Races Meshwright against what ships with PyTorch: one launch, one model, the same batches, modes timed in turns.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/race.py --size tiny
    torchrun --standalone --nproc-per-node 2 benchmarks/race.py --modes single,ddp,mw_dp --csv race.csv
    torchrun --standalone --nproc-per-node 2 benchmarks/race.py --modes single,pp_1f1b,mw_pp_1f1b

Every mode starts from the same weights, sees the same global batches and steps a fused AdamW. The modes take turns, a
few steps each, round after round, so that a ratio compares the same minutes of one machine. Read ratios, not times; CPU
time is steadier than wall time, and blind to waiting. `peak MB`: what tensors hold between steps, gradients not among
them, and the most that a step adds by torch's own count of its allocator; what C++ alone holds between steps (DDP's
buckets, a gradient's size each) is not seen. `loss` is the global loss after 5 updates: all modes must agree.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import gc
import itertools
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from race_model import SIZES, Config
from race_modes import MODES as PLAIN
from race_modes import Job
from race_pipelines import ON_FOUR, PIPELINES
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

MODES = PLAIN | PIPELINES | ON_FOUR
WARM_UP, COUNTED = 6, 1  # steps before timing: 5 updates and the loss that follows, then one whose bytes are counted


@dataclass
class Row:
    mode: str
    size: str
    ranks: int
    loss: float | None = None  # after 5 updates
    wall_ms: float = 0.0  # median, barrier to barrier; 0 where the mode did not run
    wall_best_ms: float = 0.0
    cpu_ms: float = 0.0  # median, summed over the ranks
    sent_mb: float | None = None  # written by the busiest rank in one step
    peak_mb: float | None = None  # most live bytes of tensors in one step, of the rank that has most
    error: str = ""


@dataclass
class Times:
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def from_all(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def written() -> int:
    """Bytes this process has written so far; gloo writes its sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def batch(config: Config, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Global batch number `index`; token frequencies are skewed, so that the loss falls within a few steps."""
    generator = torch.Generator().manual_seed(1234 + index % 32)
    skewed = torch.rand((config.batch, config.seq + 1), generator=generator) ** 4
    tokens = (skewed * config.vocab).long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def prepare(name: str, config: Config) -> tuple[Job | None, str]:
    """Build a mode and warm it up; a failure on any rank drops it on all."""
    job, error = None, ""
    try:
        job = MODES[name](config)
        losses = [job.step(*batch(config, i)) for i in range(WARM_UP)]
        job.loss = losses[-1]
    except Exception as failure:  # a peer that cannot run here is reported in its row
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"[:160]
    errors = [e for e in from_all(error) if e]
    return (None, errors[0]) if errors else (job, "")


def count_bytes(job: Job, config: Config) -> float:
    dist.barrier()
    before = written()
    job.step(*batch(config, WARM_UP))
    sent = written() - before
    return max(from_all(sent)) / 1e6


def live() -> dict[int, torch.Tensor]:
    """A tensor of every storage that Python holds, by its address."""
    gc.collect()
    found: dict[int, torch.Tensor] = {}
    for x in gc.get_objects():
        if issubclass(type(x), torch.Tensor) and not issubclass(type(x), FakeTensor):
            local = x.to_local() if isinstance(x, DTensor) else x
            with contextlib.suppress(NotImplementedError):  # a tensor without memory
                found[local.untyped_storage()._cdata] = local
    return found


def peak_bytes(job: Job, config: Config, others: set[int]) -> float:
    """What a rank holds in a step beside what others hold: between steps, and most of what the step makes."""
    for x in gc.get_objects():
        if issubclass(type(x), torch.nn.Parameter):
            x.grad = None  # which the step would begin with: what the profiler did not see come it does not see go
    rest = sum(x.untyped_storage().nbytes() for at, x in live().items() if at not in others)
    x, y = batch(config, WARM_UP)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        job.step(x, y)
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [e for e in events if e.name() == "[memory]"]
    changes.sort(key=lambda e: e.start_ns())
    return max(from_all(rest + max(itertools.accumulate(e.nbytes() for e in changes), default=0))) / 1e6


def timed_step(job: Job, config: Config, index: int, times: Times) -> None:
    x, y = batch(config, index)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    job.step(x, y)
    times.cpu.append(time.process_time() - cpu)
    dist.barrier()
    times.wall.append(time.perf_counter() - wall)


def race(names: list[str], size: str, rounds: int, steps: int) -> list[Row]:
    config = SIZES[size]
    rows = {n: Row(n, size, dist.get_world_size()) for n in names}
    jobs: dict[str, Job] = {}
    for name, row in rows.items():
        others = set(live())
        job, row.error = prepare(name, config)
        if job:
            jobs[name], row.sent_mb = job, count_bytes(job, config)
            row.peak_mb = peak_bytes(job, config, others)
            known = [x for x in from_all(job.loss) if x is not None]
            row.loss = sum(known) / len(known)
    times = {n: Times() for n in jobs}
    for round_ in range(rounds):
        for name, job in jobs.items():
            for i in range(steps):
                timed_step(job, config, WARM_UP + COUNTED + round_ * steps + i, times[name])
    for name, t in times.items():
        row, cpu = rows[name], sum(from_all(statistics.median(t.cpu)))
        row.wall_ms, row.wall_best_ms = statistics.median(t.wall) * 1e3, min(t.wall) * 1e3
        row.cpu_ms = cpu * 1e3
    return list(rows.values())


def table(rows: list[Row]) -> Table:
    """Times as ratios to the first two modes that ran."""
    shown = Table(title=f"{rows[0].size}, {rows[0].ranks} processes")
    bases = [r for r in rows if r.wall_ms][:2]
    ratios = [f"{what} x {b.mode}" for b in bases for what in ("wall", "best", "CPU")]
    for heading in ("mode", "loss", "wall ms", "CPU ms", "MB sent", "peak MB", *ratios):
        shown.add_column(heading, justify="left" if heading == "mode" else "right")
    for r in rows:
        if not r.wall_ms:
            shown.add_row(r.mode, r.error)
            continue
        pairs = [(r.wall_ms, b.wall_ms, r.wall_best_ms, b.wall_best_ms, r.cpu_ms, b.cpu_ms) for b in bases]
        cells = [f"{p[i] / p[i + 1]:.3f}" for p in pairs for i in (0, 2, 4)]
        plain = [f"{r.loss:.6f}", *(f"{x:.1f}" for x in (r.wall_ms, r.cpu_ms)), f"{r.sent_mb:.2f}", f"{r.peak_mb:.1f}"]
        shown.add_row(r.mode, *plain, *cells)
    return shown


def append(rows: list[Row], path: Path) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        if new:
            writer.writeheader()
        writer.writerows(asdict(r) for r in rows)


def main(
    size: Annotated[str, typer.Option(help=" or ".join(SIZES))] = "tiny",
    modes: Annotated[str, typer.Option(help="any of " + ", ".join(MODES))] = ",".join(PLAIN),
    rounds: int = 4,
    steps: Annotated[int, typer.Option(help="timed steps of a mode in one round")] = 3,
    csv_to: Annotated[Path | None, typer.Option("--csv", help="file to add the rows to")] = None,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=240))
    rows = race(modes.split(","), size, rounds, steps)
    if dist.get_rank() == 0:
        Console(width=160).print(table(rows))
        if csv_to:
            append(rows, csv_to)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
