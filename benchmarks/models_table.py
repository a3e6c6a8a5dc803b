"""Writes docs/models.md: the models of `tests/zoo.py` after one step on each mesh, and how much of each tp splits.

    python benchmarks/models_table.py

The steps are those of `tests/test_promise.py`. Flops are those of the captured training step, forward and backward, by
the rules: matrix products, convolutions and attention. A call counts as split over tp where its plan splits one of its
factors over tp; everything else is work that every rank of tp does.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import meshwright as mw  # noqa: E402
from meshwright.partitioner.factors import factor_graph  # noqa: E402
from meshwright.partitioner.strategies import HEAVY  # noqa: E402
from rich.progress import track  # noqa: E402
from test_promise import MESHES, one_step  # noqa: E402
from zoo import ZOO  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
SHARE_ON = "tp2"
TABLE_MESHES = {**MESHES, "cp2": {"cp": 2}}
HEAD = f"""# Models

Tiny models of {len(ZOO)} families, from random configurations (`tests/zoo.py`), after one step of AdamW. *equal*: loss,
every gradient, buffer and parameter are at most four times as far from a float64 run as plain eager float32 is. *split
over tp*: of the flops of matrix products, convolutions and attention in forward and backward, the share that the plan
for {SHARE_ON} splits, at these sizes. *whole* counts the heavy calls that it leaves whole; its notes follow below the
table. This page is written by `python benchmarks/models_table.py`.
"""


@dataclass
class Row:
    """One model: its result on each mesh, and what the tp plan did."""

    results: dict[str, str] = field(default_factory=dict)
    share: float = 0.0
    whole: str = ""
    notes: tuple[str, ...] = ()


def split_share(compiled: mw.Compiled) -> tuple[float, str]:
    """The share of flops that the plan splits over tp, and the heavy calls it leaves whole, counted by op."""
    program = compiled.program
    shapes = factor_graph(program.captured).shapes
    total = split = 0.0
    whole: dict[str, int] = {}
    for node in program.captured.calls():
        flops = shapes[node].rule.flops
        if flops < HEAVY:
            continue
        total += flops
        if isinstance(program.plan.choices[node.name].get("tp"), tuple):
            split += flops
        else:
            op = str(node.target).removeprefix("aten.").removesuffix(".default")
            whole[op] = whole.get(op, 0) + 1
    return split / total if total else 0.0, ", ".join(f"{n} {op}" for op, n in whole.items())


def row(name: str) -> Row:
    out = Row()
    for mesh, axes in TABLE_MESHES.items():
        try:
            compiled, misses = one_step(name, axes)
        except mw.MeshwrightError as error:
            out.results[mesh] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            continue
        out.results[mesh] = "equal" if not misses else f"differs: {misses[0]}"
        if mesh == SHARE_ON:
            (out.share, out.whole), out.notes = split_share(compiled), compiled.plan.notes
    return out


def page(rows: dict[str, Row]) -> str:
    equal = sum(r == "equal" for one in rows.values() for r in one.results.values())
    runs = len(rows) * len(TABLE_MESHES)
    columns = ["model", *TABLE_MESHES, "split over tp", "whole"]
    lines = [HEAD, f"{equal} of {runs} runs are equal.", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, one in rows.items():
        share = f"{math.floor(one.share * 1000) / 10}%"  # never 100% where something is whole
        cells = [name, *one.results.values(), share, one.whole or "none"]
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    lines += ["", f"## What the plan for {SHARE_ON} notes"]
    for name, one in rows.items():
        if one.notes:
            lines += ["", f"**{name}**", "", *(f"- {note.replace(str(ROOT) + '/', '')}" for note in one.notes)]
    quiet = [name for name, one in rows.items() if not one.notes]
    lines += ["", f"Nothing for {', '.join(quiet)}."] if quiet else []
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(page({name: row(name) for name in track(ZOO, "models")}))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
