"""Trains on as many processes as there are; when one is lost or comes, goes on from the last checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1      # else torch 2.13 looks for processes of the round before
    torchrun --nnodes 3:4 --nproc-per-node 1 --max-restarts 9 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        --rdzv-conf last_call_timeout=5 examples/elastic.py --folder run/          # the same on each of 4 machines

A process that is lost ends the others with an error that names it; torchrun starts all again, of one machine less. The
mesh is that of the processes there are, the plan is made anew, and the checkpoint fits any mesh. Batch and dropout
depend on the step alone, so the losses are those of a run that nothing happened to.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import meshwright as mw
import torch
import torch.nn.functional as F
from torch import nn

BATCH = 12


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(32), nn.Linear(32, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 16, generator=generator)
    return x, (x[:, :4] + 0.3 * x[:, 4:8]).argmax(1)


def train(folder: Path, steps: int, world: int, each: Callable[[int, float], None] = lambda step, loss: None) -> None:
    """Train up to a number of steps, from the last checkpoint in the folder where there is one.

    Args:
        each: called after every step, which has been saved, with its number and loss.
    """
    compiled = mw.compile(
        model(), mw.Mesh(dp=world), loss=F.cross_entropy, timeout=20,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    )  # fmt: skip
    first = compiled.load(folder).step if any(folder.glob("step-*")) else 0
    for step in range(first, steps):
        x, y = batch(step)
        loss = compiled.step(x, target=y)
        compiled.save(folder, keep=2)
        each(step, float(loss))


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints; all machines share it")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    leader = os.environ.get("RANK", "0") == "0"

    def each(step: int, loss: float) -> None:
        if leader:
            print(f"step {step}: loss {loss:.6f} on {os.environ.get('WORLD_SIZE', '1')} processes", flush=True)

    train(given.folder, given.steps, int(os.environ.get("WORLD_SIZE", "1")), each)


if __name__ == "__main__":
    main()
