"""Every model of `pipeline_models` under every schedule on every mesh, with p, 2p and 2p+1 micro-batches: 540 runs.

    python tests/pipelines_all.py [first run] [last run]

Prints what differs from one device, and how many runs were equal.
"""

from __future__ import annotations

import itertools
import sys

from pipeline_models import MESHES, MODELS, SCHEDULES, complaints


def main(first: int, last: int) -> None:
    equal = 0
    runs = list(itertools.product(MODELS, MESHES, SCHEDULES, range(3)))[first:last]
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
    bounds = [int(x) for x in sys.argv[1:3]]
    main(*(bounds + [0, 10**6][len(bounds) :]))
