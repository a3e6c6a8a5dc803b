"""What a save of about 1 GB beside training costs a step.

    OMP_NUM_THREADS=1 python benchmarks/save_cost.py --folder /tmp
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/save_cost.py --folder /tmp

Five layers of 4096 x 4096 with AdamW (1.01 GB of parameters and state) on `dp` with zero=1: each process writes its
part. Steps with a save and steps without take turns. A step with a save is `save(..., wait=False)`, the step after it,
and, should that be over before the file is, the wait for it. The cost is

    (a step with a save - a step without) / a step without,  and a k-th of it where every k-th step saves

in seconds of the wall, in CPU seconds of the training thread (what training loses where a core is free for the other
thread), and in CPU seconds of the whole process (what it loses where none is).
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import meshwright as mw
import torch
import typer
from torch import nn

CLOCKS = {"wall": time.perf_counter, "training thread": time.thread_time, "process": time.process_time}


def taken(do: Callable[[], object]) -> list[float]:
    """What something takes, by each clock."""
    begun = [clock() for clock in CLOCKS.values()]
    do()
    return [clock() - t for clock, t in zip(CLOCKS.values(), begun, strict=True)]


def main(folder: Annotated[Path, typer.Option()] = Path("/tmp"), rows: int = 2048, rounds: int = 5) -> None:
    """Args: rows: of each process."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    compiled = mw.compile(
        nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(5))), mw.Mesh(dp=world, device="cpu"),
        zero=min(world - 1, 1), loss=lambda y: y.square().mean(),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-5),
    )  # fmt: skip
    x = torch.randn(rows * world, 4096)
    compiled.step(x)
    path = folder / f"save_cost-{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"
    plain, copies, saving, begun = [], [], [], []
    for _ in range(rounds + 1):
        plain.append(taken(lambda: compiled.step(x)))
        copies.append(taken(lambda: begun.append(compiled.save(path, wait=False, keep=1))))
        stepped = taken(lambda: compiled.step(x))
        rest = taken(begun[-1].wait)
        saving.append([sum(t) for t in zip(copies[-1], stepped, rest, strict=True)])
        if rank == 0:
            size = sum(f.stat().st_size for f in begun[-1].path.iterdir()) / 1e9
            tell(f"{size:.2f} GB, round {len(plain)}", plain[-1:], copies[-1:], saving[-1:])
    if rank == 0:
        tell(f"medians of rounds 2 to {rounds + 1}", plain[1:], copies[1:], saving[1:])
        shutil.rmtree(path)


def tell(of: str, plain: list[list[float]], copies: list[list[float]], saving: list[list[float]]) -> None:
    print(of)
    for i, clock in enumerate(CLOCKS):
        step, copy, both = (statistics.median(t[i] for t in found) for found in (plain, copies, saving))
        cost = 100 * (both / step - 1)
        print(
            f"    {clock}: a step {step:.2f} s, with a save {both:.2f} s ({cost:+.1f} %; of every tenth step "
            f"{cost / 10:+.2f} %), of which the copy {copy:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
