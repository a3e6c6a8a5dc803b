"""What a save of about 1 GB beside training costs: CPU seconds of the training thread and of the thread that writes.

    OMP_NUM_THREADS=1 python benchmarks/save_cost.py --folder /tmp

Five layers of 4096 x 4096 with AdamW. The training thread copies what it owns and goes on; its CPU seconds say what
training loses where a core is free for the other thread, whatever else the machine does.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import meshwright as mw
import torch
import typer
from torch import nn


def main(folder: Annotated[Path, typer.Option()] = Path("/tmp"), rows: int = 2048, rounds: int = 2) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(5)))
    compiled = mw.compile(
        model, mw.Mesh(dp=1, device="cpu"), loss=lambda y: y.square().mean(),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-5),
    )  # fmt: skip
    x = torch.randn(rows, 4096)
    compiled.step(x)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for _ in range(rounds):
            begin, whole = time.thread_time(), time.process_time()
            compiled.step(x)
            step, whole = time.thread_time() - begin, time.process_time() - whole
            begin, both = time.thread_time(), time.process_time()
            saving = compiled.save(name, wait=False, keep=1)
            copied = time.thread_time() - begin
            compiled.step(x)
            second, overlapped = time.thread_time() - begin, saving.done
            path = saving.wait()
            both = time.process_time() - both
            gigabytes = sum(f.stat().st_size for f in path.iterdir()) / 1e9
            print(
                f"{gigabytes:.2f} GB: a step {step:.2f} s, with a save {second:.2f} s "
                f"({100 * (second / step - 1):+.1f} %), "
                f"of which the copy {copied:.2f} s; the writing thread {both - second:.2f} s; "
                f"{'written' if overlapped else 'not yet written'} when the step ended"
            )


if __name__ == "__main__":
    typer.run(main)
