"""Error against virtual time for the SGD family: a two-layer net on drawn digits, eight workers, one learning rate.

    OMP_NUM_THREADS=1 python benchmarks/sync_tradeoff.py --png docs/sync_tradeoff.png

Digits are seven-segment shapes of 8 x 8 pixels, shifted and under noise, so that no data set is needed and the best
error is above 0. Times are exponential. Every variant sees mini-batches of 8 a worker; the rate is the same for all.
"""

from __future__ import annotations

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
BATCH, NOISE = 8, 0.5


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


def curve(sync: str, k: int | None, seconds: float, rate: float, seed: int) -> list[tuple[float, float]]:
    """(virtual time, loss on unseen digits), about 60 points."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    x, y = digits(60000, 1)
    unseen = digits(2000, 2)

    def batch(worker: int, number: int) -> tuple[tuple, Any]:
        generator = torch.Generator().manual_seed((seed * 64 + worker) * 1_000_003 + number)
        rows = torch.randint(0, len(x), (BATCH,), generator=generator)
        return (x[rows],), y[rows]

    server = mw.ParameterServer(
        model, batch, workers=8, sync=sync, k=k, loss=F.cross_entropy, seed=seed,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=rate),
    )  # fmt: skip
    found, due = [], 0.0
    for step in server.run(seconds=seconds):
        if step.time >= due:
            with torch.no_grad():
                found.append((step.time, float(F.cross_entropy(model(unseen[0]), unseen[1]))))
            due = step.time + seconds / 60
    return found


def main(
    png: Annotated[Path, typer.Option()] = Path("docs/sync_tradeoff.png"),
    seconds: float = 500.0,
    rate: float = 0.3,
    seeds: int = 1,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.5))
    print("variant           loss at 3 %, 10 %, and mean of the last 30 % of the time")
    for sync, k in VARIANTS:
        runs = [curve(sync, k, seconds, rate, seed) for seed in range(seeds)]
        length = min(len(r) for r in runs)
        times = [sum(r[i][0] for r in runs) / seeds for i in range(length)]
        losses = [sum(r[i][1] for r in runs) / seeds for i in range(length)]
        axis.plot(times, losses, label=sync if k is None else f"{sync}, K={k}")
        early = [next(v for t, v in zip(times, losses, strict=True) if t >= f * seconds) for f in (0.03, 0.1)]
        late = [v for t, v in zip(times, losses, strict=True) if t >= 0.7 * seconds]
        print(f"{sync:15} {k or '-'!s:3} {early[0]:.4f} {early[1]:.4f} {sum(late) / len(late):.4f}", flush=True)
    axis.set(xlabel="virtual seconds (a gradient takes 1 on average)", ylabel="loss on unseen digits", yscale="log")
    axis.legend()
    figure.tight_layout()
    figure.savefig(png, dpi=90)


if __name__ == "__main__":
    typer.run(main)
