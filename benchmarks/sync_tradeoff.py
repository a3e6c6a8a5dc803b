"""Error against virtual time for the SGD family: drawn digits told apart by eight workers, one learning rate for all.

    OMP_NUM_THREADS=1 python benchmarks/sync_tradeoff.py --png docs/sync_tradeoff.png

    error = F(weights) - least F,   F = mean cross entropy of a softmax regression over 1000 digits + decay / 2 |w|^2

F is strongly convex, so its least is known (L-BFGS) and theory speaks of it: at a constant rate the error falls to a
floor that the noise of mini-batches and stale gradients hold up (arXiv 1803.01113). Digits are seven-segment shapes of
8 x 8 pixels, shifted and under noise, so that no data set is needed and the least is above 0. Times are exponential.
Every variant sees mini-batches of 8 a worker.
"""

from __future__ import annotations

import statistics
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import meshwright as mw
import torch
import torch.nn.functional as F
import typer
from torch import nn

SEGMENTS = ("012456", "25", "02346", "02356", "1235", "01356", "013456", "025", "0123456", "012356")
"""Of each digit its lit segments: top, upper left, upper right, middle, lower left, lower right, bottom."""
STROKES = ((0, 1, 1, 5), (0, 1, 4, 2), (0, 4, 4, 5), (3, 1, 4, 5), (3, 1, 7, 2), (3, 4, 7, 5), (6, 1, 7, 5))
"""Of each segment the first row and column, and the ends of both."""
VARIANTS = (("sync", None), ("k-sync", 4), ("k-batch-sync", 4), ("k-async", 4), ("k-batch-async", 4), ("async", None))
BATCH, NOISE, ROWS, DECAY = 8, 0.5, 1000, 0.01
FLOOR = 0.3
"""The last part of the time, over which the floor is averaged."""


def digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(count, 64) pixels, and which digit each is."""
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.zeros(10, 8, 8)
    for digit, lit in enumerate(SEGMENTS):
        for top, left, bottom, right in (STROKES[int(s)] for s in lit):
            shapes[digit, top:bottom, left:right] = 1.0
    y = torch.randint(0, 10, (count,), generator=generator)
    moves = torch.randint(0, 2, (count,), generator=generator)
    x = torch.where(moves[:, None, None] > 0, shapes[y].roll(1, 2), shapes[y])
    return (x + NOISE * torch.randn(count, 8, 8, generator=generator)).flatten(1), y


def regression() -> nn.Linear:
    model = nn.Linear(64, 10)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return model


def objective(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """F: what plain SGD with this weight decay descends."""
    return F.cross_entropy(model(x), y) + DECAY / 2 * sum(p.square().sum() for p in model.parameters())


@lru_cache(maxsize=1)
def task() -> tuple[torch.Tensor, torch.Tensor, float]:
    """Pixels, digits, and the least F, in float64."""
    x, y = digits(ROWS, 1)
    model, wide = regression().double(), x.double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = objective(model, wide, y)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return x, y, float(objective(model, wide, y).detach())


def curve(
    sync: str, k: int | None, seconds: float, rate: float, seed: int, points: int = 100
) -> list[tuple[float, float]]:
    """(virtual time, error), about `points` of them."""
    model = regression()
    x, y, best = task()

    def batch(worker: int, number: int) -> tuple[tuple, Any]:
        generator = torch.Generator().manual_seed((seed * 64 + worker) * 1_000_003 + number)
        rows = torch.randint(0, ROWS, (BATCH,), generator=generator)
        return (x[rows],), y[rows]

    server = mw.ParameterServer(
        model, batch, workers=8, sync=sync, k=k, loss=F.cross_entropy, seed=seed,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=rate, weight_decay=DECAY),
    )  # fmt: skip
    found, due = [], 0.0
    for step in server.run(seconds=seconds):
        if step.time >= due:
            with torch.no_grad():
                found.append((step.time, float(objective(model, x, y)) - best))
            due = step.time + seconds / points
    return found


def floors(runs: list[list[tuple[float, float]]], seconds: float) -> list[float]:
    """Of each run, the mean error over the last part of its time."""
    late = [[error for time, error in run if time >= (1 - FLOOR) * seconds] for run in runs]
    return [sum(errors) / len(errors) for errors in late]


def main(
    png: Annotated[Path, typer.Option()] = Path("docs/sync_tradeoff.png"),
    seconds: float = 800.0,
    rate: float = 0.3,
    seeds: int = 2,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.5))
    print(f"variant         K   error after 15, 50 and 150 s, and the last {100 * FLOOR:.0f} % of {seconds:.0f} s")
    for sync, k in VARIANTS:
        runs = [curve(sync, k, seconds, rate, seed) for seed in range(seeds)]
        length = min(len(r) for r in runs)
        times = [statistics.mean(r[i][0] for r in runs) for i in range(length)]
        errors = [statistics.mean(r[i][1] for r in runs) for i in range(length)]
        axis.plot(times, errors, label=sync if k is None else f"{sync}, K={k}")
        early = [next(v for t, v in zip(times, errors, strict=True) if t >= due) for due in (15, 50, 150)]
        floor = floors(runs, seconds)
        spread = f"{min(floor):.4f} to {max(floor):.4f}"
        said = " ".join(f"{v:.4f}" for v in (*early, statistics.mean(floor)))
        print(f"{sync:15} {k or '-'!s:3} {said} ({spread} over {seeds} seeds)", flush=True)
    label = f"F - least F, mean of {seeds} seeds"
    axis.set(xlabel="virtual seconds (a gradient takes 1 on average)", ylabel=label, yscale="log")
    axis.legend()
    figure.tight_layout()
    figure.savefig(png, dpi=90)


if __name__ == "__main__":
    typer.run(main)
