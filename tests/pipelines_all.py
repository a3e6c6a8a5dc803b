"""Every model of `pipeline_models` under every schedule on every mesh, with p, 2p and 2p+1 micro-batches: 540 runs.

    python tests/pipelines_all.py [first run] [last run]
    python tests/pipelines_all.py third       # each model, mesh and schedule together once: 180 runs

Prints what differs from one device, and how many runs were equal.
"""

from __future__ import annotations

import itertools
import sys

from pipeline_models import MESHES, MODELS, SCHEDULES, complaints

Run = tuple[str, str, str, int]
"""A model, a mesh, a schedule, and which of the numbers of micro-batches."""


def every() -> list[Run]:
    return list(itertools.product(MODELS, MESHES, SCHEDULES, range(3)))


def third() -> list[Run]:
    """Those whose number of micro-batches follows from the rest, each number as often."""
    names = tuple(list(x).index for x in (MODELS, MESHES, SCHEDULES))
    return [r for r in every() if sum(at(x) for at, x in zip(names, r[:3], strict=True)) % 3 == r[3]]


def main(runs: list[Run], first: int = 0) -> None:
    equal = 0
    for number, (name, mesh, schedule, times) in enumerate(runs, first):
        p = MESHES[mesh]["pp"]
        count = (p, 2 * p, 2 * p + 1)[times]
        try:
            found = complaints(name, MESHES[mesh], count, schedule=schedule)
        except Exception as error:  # a run that fails is told like one that differs
            found = [f"{type(error).__name__}: {error}"]
        equal += not found
        if found:
            what = "; ".join(found)[:300]
            print(f"run {number}: {name} on {mesh}, {schedule}, {count} micro-batches: {what}", flush=True)
    print(f"{equal} of {len(runs)} equal")


if __name__ == "__main__":
    if sys.argv[1:] == ["third"]:
        main(third())
    else:
        bounds = [int(x) for x in sys.argv[1:3]]
        first, last = bounds + [0, 10**6][len(bounds) :]
        main(every()[first:last], first)
