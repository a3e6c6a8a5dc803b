"""The stages found against the even split of layers, simulated and measured on two processes, in turns.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/stage_search.py

Three models whose layers cost unequal amounts (`tests/stage_models.py`), the same schedule (1F1B) and number of
micro-batches for both. Each is planned for the measured machine, pinned to the even split or left free; their steps
take turns, and the medians are compared: of wall time, and of the CPU time of the busier process, which other work on
the machine disturbs less.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import meshwright as mw  # noqa: E402
import stage_models  # noqa: E402

ROWS, MICRO_BATCHES, WARM_UP = 16, 8, 2
MODES = ("even", "found")


def compiled(name: str, mode: str) -> tuple[mw.Compiled, dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = stage_models.MODELS[name](ROWS)
    starts = stage_models.even_split(name, dist.get_world_size()) if mode == "even" else {}
    pin = {module: f"stage {stage}" for module, stage in starts.items()}
    made = mw.compile(
        model, mw.Mesh(pp=dist.get_world_size()), kwargs=batch, optimizer=adamw,
        micro_batches=MICRO_BATCHES, schedule="1f1b", pin=pin,
    )  # fmt: skip
    return made, batch


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def timed(step: Any, batch: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of wall time, and of CPU time of the busier process."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step(**batch)
    busy = torch.tensor(time.process_time() - cpu)
    dist.barrier()
    wall = time.perf_counter() - wall
    dist.all_reduce(busy, dist.ReduceOp.MAX)
    return 1e3 * wall, 1e3 * float(busy)


def simulated(made: mw.Compiled) -> float:
    """Milliseconds, off the line of the schedule that was chosen."""
    (line,) = (line for line in made.plan.compared if "(chosen)" in line)
    number, unit = line.split(": ")[1].split()[:2]
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


def measured(name: str, rounds: int) -> str:
    """A row of the table."""
    made = {mode: compiled(name, mode) for mode in MODES}
    for step, batch in made.values():
        for _ in range(WARM_UP):
            step.step(**batch)
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode, (step, batch) in made.items():
            times[mode].append(timed(step.step, batch))
    wall, cpu = ({mode: statistics.median(t[i] for t in times[mode]) for mode in MODES} for i in (0, 1))
    planned = {mode: simulated(step) for mode, (step, _) in made.items()}
    cells = [f"{w['even']:.0f} | {w['found']:.0f} | {w['found'] / w['even']:.3f}" for w in (planned, wall, cpu)]
    found = made["found"][0].plan
    assert found.stages is not None
    cuts = ", ".join(found.modules[c][0] or "the model" for c in found.stages.cuts)
    return f"| {name} | {cuts} | {' | '.join(cells)} |"


def main(rounds: Annotated[int, typer.Option(help="timed steps of each")] = 9) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    heads = (f"{what}, even | found | ratio" for what in ("simulated ms", "wall ms", "busier CPU ms"))
    table = [f"| model | stage 1 starts in | {' | '.join(heads)} |", "|---" * 11 + "|"]
    for line in itertools.chain(table, (measured(name, rounds) for name in stage_models.MODELS)):
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
