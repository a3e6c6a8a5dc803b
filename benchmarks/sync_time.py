"""Seconds an update of the SGD family in real processes with injected delays, beside the virtual clock and theory.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 benchmarks/sync_time.py --csv out.csv

Every gradient sleeps as long as the clock's does (`Delay.draws` of the same seed), so the clock says when each update
would be if messages, the servers' work and the machine's other work took nothing. The first update is not counted: it
has the start of the servers in it. `sync` has no server: a process sleeps before each lock step.
"""

from __future__ import annotations

import csv
import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import meshwright as mw
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from meshwright.partitioner.sync_clock import SYNCS, updates
from torch import nn

KS = (1, 2, 4)
SEED = 1


def variants(only: str | None, k: int | None) -> list[tuple[str, int | None]]:
    found = [(s, k) for s in SYNCS for k in (KS if s.startswith("k-") else (None,))]
    return [v for v in found if (only is None or v[0] in only.split(",")) and k in (None, v[1])]


def made(sync: Any, world: int, k: int | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return mw.compile(
        model, mw.Mesh(dp=world, device="cpu"), loss=F.cross_entropy, sync=sync, k=k, timeout=60, seed=SEED,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    )  # fmt: skip


def lock_step(rank: int, world: int, delay: mw.Delay, count: int) -> list[float]:
    """When each update was."""
    compiled, draws, found = made("sync", world), delay.draws(SEED, rank), []
    x, y = torch.randn(4 * world, 6), torch.arange(4 * world) % 3
    dist.broadcast(x, 0)
    compiled.trace(x, target=y)
    for _ in range(count):
        time.sleep(next(draws))
        compiled.step(x, target=y)
        found.append(time.monotonic())
    return found


def served(sync: str, k: int | None, rank: int, world: int, delay: mw.Delay, count: int) -> list[float]:
    compiled = made(mw.Sync(sync, k, 1, delay), world)
    x, y = torch.randn(4, 6), torch.arange(4) % 3
    while compiled.version < count:
        compiled.step(x, target=y)
    compiled.close()
    return [u.time for u in compiled.history[:count]]


def expected(sync: str, k: int | None, world: int, delay: mw.Delay) -> float:
    """Seconds an update in the long run, by 5000 updates of the clock."""
    return next(itertools.islice(updates(sync, world, k, delay, seed=9), 4999, None)).time / 5000


def main(
    csv_path: Annotated[Path, typer.Option("--csv")],
    mean: float = 0.4,
    seconds: float = 12.0,
    only: str | None = None,
    k: int | None = None,
    delay: str | None = None,
) -> None:
    """Under torchrun: each variant for about so many seconds, at this mean delay; writes and prints a row each.

    Args: only, k, delay: those variants, that K, that of the two delays.
    """
    delays = {"exponential": mw.Delay(mean=mean), "shifted": mw.Delay(mean=mean / 2, shift=mean / 2)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world, rows = dist.get_rank(), dist.get_world_size(), []
    chosen = [(name, of) for name, of in delays.items() if delay in (None, name)]
    for (name, drawn), (sync, first) in itertools.product(chosen, variants(only, k)):
        long_run = expected(sync, first, world, drawn)
        count = max(8, round(seconds / long_run))
        run = lock_step(rank, world, drawn, count) if sync == "sync" else served(sync, first, rank, world, drawn, count)
        dist.barrier()
        if rank == 0:
            clock = [u.time for u in itertools.islice(updates(sync, world, first, drawn, SEED), count)]
            took, want = ((t[-1] - t[0]) / (count - 1) for t in (run, clock))
            figures = (took, want, long_run, took / want)
            rows.append([name, sync, first or "", count, *(f"{x:.4f}" for x in figures)])
            print(*rows[-1], flush=True)
    if rank == 0:
        with csv_path.open("w", newline="") as file:
            head = ("delay", "sync", "k", "updates", "seconds", "clock", "long_run", "ratio")
            csv.writer(file, lineterminator="\n").writerows([head, *rows])
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
