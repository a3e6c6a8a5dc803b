"""The memory model against what ranks really hold: the predicted peak beside the tracked one, families by options.

    python benchmarks/memory.py [FAMILY ...] [--write]

All ranks run in this process and every storage is seen come and go (`runtime/tracked.py`), in the second step, when the
optimizer has its state. Of every rank predicted / tracked is taken, the worst of either side is what a cell shows.
`--write` puts the table into docs/memory.md.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import meshwright as mw
import torch
from memory_models import FAMILIES, ROOT
from meshwright.partitioner.memory import Model
from meshwright.runtime.tracked import WatchedComm, track

OPTIONS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {"zero": 0}),
    "dp2 zero 1": ({"dp": 2}, {"zero": 1}),
    "dp4 zero 3": ({"dp": 4}, {"zero": 3}),
    "dp2 zero 2, 4 micro-batches": ({"dp": 2}, {"zero": 2, "micro_batches": 4}),
    "tp2": ({"tp": 2}, {}),
    "pp2 1f1b, 4 micro-batches": ({"pp": 2}, {"micro_batches": 4, "schedule": "1f1b"}),
    "dp2 x tp2 zero 1": ({"dp": 2, "tp": 2}, {"zero": 1}),
}
PAGE = ROOT / "docs" / "memory.md"
BEGIN, END = "<!-- table -->\n", "<!-- end -->\n"


def adamw(m: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), lr=1e-3)


def ratios(family: str, options: str, detail: bool = False) -> list[float]:
    """Per rank predicted / tracked peak."""
    torch.manual_seed(0)
    axes, asked = OPTIONS[options]
    model, batch = FAMILIES[family]()
    compiled = mw.compile(model, mw.Mesh(**axes, device="cpu"), optimizer=adamw, **asked)  # type: ignore[arg-type]
    compiled._comm = WatchedComm(compiled.mesh)
    compiled.step(**batch)
    tracked, predicted = track(compiled, **batch), Model(compiled.program)
    found = []
    for rank, held in enumerate(tracked):
        made = predicted.of(rank)
        found.append(made.peak / held.peak)
        if detail:
            print(f"  rank {rank}: predicted {made.peak} at {made.at}, tracked {held.peak} at {held.at}")
    return found


def cell(found: list[float]) -> str:
    low, high = 100 * (min(found) - 1), 100 * (max(found) - 1)
    return f"{low:+.1f} %" if abs(low) > abs(high) else f"{high:+.1f} %"


def main(args: list[str]) -> None:
    names = [a for a in args if a in FAMILIES] or list(FAMILIES)
    rows = []
    for name in names:
        began, cells = time.process_time(), []
        for options in OPTIONS:
            found = ratios(name, options, "--detail" in args)
            cells.append(cell(found))
            print(f"{name}, {options}: {', '.join(f'{100 * (r - 1):+.2f}' for r in found)}", flush=True)
        rows.append((name, *cells))
        print(f"{name}: {time.process_time() - began:.0f} CPU-seconds", flush=True)
    lines = ["| | " + " | ".join(OPTIONS) + " |", "|---" * (len(OPTIONS) + 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    print("\n".join(lines))
    if "--write" in args:
        text = PAGE.read_text()
        before, rest = text.split(BEGIN)
        PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main(sys.argv[1:])
