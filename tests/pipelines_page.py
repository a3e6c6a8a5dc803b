"""Writes docs/pipelines.md: the schedules, their grids, and simulated bubbles beside published ones.

python tests/pipelines_page.py
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshwright.partitioner.schedules.generate import generate, in_flight_bound
from meshwright.partitioner.schedules.grid import grid
from meshwright.partitioner.schedules.post_ahead import post_ahead
from meshwright.partitioner.schedules.schedule import Schedule
from meshwright.partitioner.schedules.send_recv import with_transfers
from meshwright.partitioner.schedules.simulate import simulate
from meshwright.partitioner.schedules.stage_cost import even_costs
from meshwright.partitioner.schedules.timeline import Timeline

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "pipelines.md"
ABOUT = {
    "gpipe": "All forwards, then all backwards.",
    "1f1b": "Rank r runs p-r-1 forwards ahead, then one forward and one backward in turns.",
    "interleaved": "1F1B over v virtual stages a rank (2 here), in groups of p: 1/v of the bubble, v times the hops.",
    "zb-h1": "1F1B with the gradients of inputs (B) and of weights (W) apart; W fills what would be idle.",
    "zb-v": "Two virtual stages a rank, down the ranks and back up. For F = B = W no rank waits once it has begun.",
    "dualpipe-v": "The same V; forwards of one virtual stage stand beside backwards of the other, not overlapped here.",
    "forward-only": "For inference: nothing is saved.",
}
HEAD = """# Pipelines

What a pipeline does with a model says [parallelism.md](parallelism.md). Its schedule is data: per rank a list of
actions, each with a one-word text (`partitioner/schedules/action.py`), simulated, proved and walked as it stands.

    2F0 2B0 2W0 2BW0            stage 2, micro-batch 0: forward; gradient of inputs, of weights, of both at one go
    0SEND_F0>3 3RECV_F0<0       what forward of stage 0 hands to stage 3, as its two ends see it
    3SEND_B0>0 0RECV_B0<3       its gradient on the way back
    2REDUCE 2UNSHARD 2RESHARD   gradients of stage 2 are summed over its replicas; its weights are gathered, let go
    2OFFLOAD0 2RELOAD0          what stage 2 saved of micro-batch 0 goes to the host, and comes back

```python
computed = generate("1f1b", ranks=4, micro_batches=8)       # or from_text(a text of your own)
schedule = with_transfers(computed, edges, gradients)       # pairs (source stage, target stage); a chain by default
schedule = with_reductions(schedule)                        # gradients of replicas, summed under the cool-down
validate(schedule, edges, gradients, bound=in_flight_bound("1f1b", 4, 8))
schedule = post_ahead(schedule)                             # for transfers that run beside computations
timeline = simulate(schedule, Costs(stages, hops))          # seconds, bubble, idle, peak bytes, in flight
write_trace("step.json", {"simulated": timeline.events})    # opens in Perfetto; a measured run beside it
```

Any number of ranks and of micro-batches is legal. `validate` proves that each F, B and W stands once, after what it
needs; that sends pair with receives, in one order on both sides; that no rank holds more than the bound; and that
nothing deadlocks, even if every transfer blocks both of its ranks. A deadlock is reported with its cycle:

    rank 0 at 0SEND_F1>1 waits for 1RECV_F1<0 of rank 1; rank 1 at 1SEND_B0>0 waits for 0RECV_B0<1 of rank 0

`tests/test_schedule_laws.py` corrupts schedules in 31 ways, `tests/test_act_laws.py` what lowered programs do in 14,
and a circle of waits: all are refused, with the action, the missing partner or the circle named. A deadlock forced at
run time is named in process by what every rank waits for (`tests/test_comm.py`); over gloo the rank that waits for what
nobody sends ends within its time limit, with its own number and what it waits for (`tests/test_distributed.py`).

A transfer runs from when both ranks have come to it. `with_transfers` puts a receive after the computation under which
the value is sent; where transfers block no rank, `post_ahead` puts it before, so that they run side by side: simulated,
that is worth up to 3 % of a step where a hop takes 2 % of F + B + W, and up to 19 % (GPipe) where it takes a sixth.

## Schedules

Four ranks, eight micro-batches; a column is a unit of time, F = B = W = 1 and BW = 2. *In flight*: pairs of a virtual
stage and a micro-batch between F and W, per rank. *Bubble*: the share of time that ranks do not compute.
"""

SEARCH = """
## Loops

A step goes through its micro-batches once, unless a value must be whole over the batch before others can start; then it
goes through them once more for it. `plan.summary()` says how often, and why (`partitioner/loops.py`; whole summaries in
`tests/golden/*_pp2_summary.txt`):

    a step goes through 2 micro-batches in 2 loops
      loop 2 needs whole over the batch: sum_2 of (model)

That is the count of tokens over which the loss is a mean: the first loop counts, and costs next to nothing. A batch
norm needs the mean of the batch, then its variance, and the sums of its gradients on the way back: three loops more a
norm, each with the work since the one before.

## A step that ran, beside the simulated one

```python
with compiled.recorded("step.json") as record:      # every process alike; the first writes the trace
    loss = compiled.step(tokens, target=labels)
print(record)                                       # a line a rank: how long it computed and waited, what it held
```

The trace opens in Perfetto or chrome://tracing: per rank what it computed, what it waited for, and what was on its way;
where the plan has a schedule, the simulated rank stands beside the measured one, with the same words for the same acts
(`2F0`). It works on every mesh; without micro-batches a computation is named by the wait before which it stands. The
optimizer is not in it. Of ranks in one process, which take turns, the trace shows what they would do side by side on
links that take no time. A line says which rank the others wait for:

    rank    compute       wait  in flight
    0        105 ms    1.20 ms          4
    1       88.3 ms    17.9 ms          3
    rank 0 computes longest, 1.09 of the mean

`record.in_flight` counts, as values are kept and let go of, what the schedules above promise; `tests/test_record.py`
holds it equal to the simulated count and within the bound, for all six.

`python tests/pipelines_all.py` runs all six schedules on six meshes with p, 2p and 2p+1 micro-batches and five models:
540 of 540 equalled one device (2026-11-30, 19 CPU minutes), before cuts were moved (`cut_moves.py`) and gradients of a
cross entropy were written over its logits. `python tests/pipelines_all.py third` runs each model, mesh and schedule
together once (180 runs). Since then 29 of 29 of those, drawn at random, equalled one device (2026-11-30); the rest have
not been run.

## Stages found

`benchmarks/stage_search.py`: the cut found against the even split of layers, 1F1B, 8 micro-batches, planned for a CPU
and run on two gloo processes in turns, medians of 5 in milliseconds (`--rounds 5`, 2026-11-30), on two cores under a
load of 13 to 19. Wall time tells little there (8 to 13 times the CPU time of the busier process, so most of it is
waiting for a core); that CPU time is what a free machine would wait for. By it the cut that is found takes 5 to 14 %
less; of the wall ratios all are below 1, that of the first row by no more than such a load moves them.

| model | stage 1 in | simulated, even | found | ratio | wall, even | found | ratio | busier CPU, even | found | ratio |
|---|---|---|---|---|---|---|---|---|---|---|
| head of 4 layers | blocks.6.n1 | 283 | 238 | 0.841 | 4955 | 4898 | 0.989 | 626 | 556 | 0.888 |
| encoder-decoder | encoder.3.n1 | 291 | 252 | 0.866 | 5883 | 4845 | 0.824 | 616 | 583 | 0.946 |
| every third of experts | blocks.4.n1 | 301 | 280 | 0.930 | 9369 | 8408 | 0.897 | 767 | 663 | 0.865 |

Two earlier runs, before cuts were moved: medians of 6 under a load of 5.6 had wall ratios of 1.061, 0.970 and 0.951
(busier CPU 0.883, 0.934, 0.889), medians of 7 had 0.947, 0.962 and 1.119. On a machine with nothing else to do it has
not been run.

`OMP_NUM_THREADS=1 python benchmarks/plan_time.py --pipeline`: Llama-3-70B shapes, pp8 x dp8 x tp8 of h100, batch 1024
x 8192, `schedule="auto"`, CPU seconds, 2026-11-30 under a load of 11 to 13. The choice is DualPipe-V with 64
micro-batches, 18.3 s a step simulated (1F1B: 19.9; ZB-V 18.2, for 3.4 GB more); without a limit on memory it needs
92.6 GB a rank.

| micro_batches | capture | plan | capture + plan | lower |
|---|---|---|---|---|
| 64 | 5.7 | 14.9 | 20.6 | 8.7 |
| auto | 5.2 | 31.8 | 37.0 | 12.6 |

Before cuts moved and ranks were made even, "auto" took 30.7 and 4.7; after that, under a load of 20, 64 micro-batches
took 25.1 and 14.6: lowering varies most with the load.
"""


@dataclass(frozen=True)
class Row:
    """A published row: seconds of one micro-batch on one rank, and rates by schedule."""

    model: str
    ranks: int
    micro_batches: int
    seconds: tuple[float, float, float]
    hop: float
    virtual: int
    rates: tuple[tuple[str, float], ...]


def rows() -> list[Row]:
    with (ROOT / "benchmarks" / "data" / "pipeline_bubbles.csv").open() as file:
        return [
            Row(
                model=line["model"],
                ranks=int(line["ranks"]),
                micro_batches=int(line["micro_batches"]),
                seconds=(float(line["forward_ms"]), float(line["backward_ms"]), float(line["weight_ms"])),
                hop=float(line["hop_ms"]),
                virtual=int(line["virtual"]),
                rates=tuple((n, float(line[n.replace("-", "_")])) for n in ("1f1b", "zb-h1", "interleaved")),
            )
            for line in csv.DictReader(file)
        ]


@cache
def transferred(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> Schedule:
    return post_ahead(with_transfers(generate(name, ranks, micro_batches, virtual)))


def timed(schedule: Schedule, seconds: tuple[float, float, float], hop: float = 0.0) -> Timeline:
    return simulate(schedule, even_costs(schedule, *seconds, hop=hop))


@cache
def rate(name: str, row: Row) -> float:
    """The simulated bubble of a published row."""
    virtual = row.virtual if name == "interleaved" else None
    return timed(transferred(name, row.ranks, row.micro_batches, virtual), row.seconds, row.hop).bubble


def page() -> str:
    text = HEAD
    for name, about in ABOUT.items():
        schedule = generate(name, 4, 8)
        bubble = timed(with_transfers(schedule), (1.0, 1.0, 1.0)).bubble
        held = " ".join(map(str, in_flight_bound(name, 4, 8)))
        text += f"\n**{name}.** {about} In flight {held}; bubble {bubble:.3f}.\n\n"
        text += "".join(f"    {line}\n" for line in grid(schedule).splitlines())
    return text + _bubbles() + SEARCH


def _bubbles() -> str:
    text = """
## Simulated against published

Zero Bubble paper (arXiv 2401.10241, tables 5 and 9): p ranks, m micro-batches, measured seconds of F, B, W and of a hop
(`benchmarks/data/pipeline_bubbles.csv`). Each cell is simulated / published. `python tests/pipelines_page.py` writes
this page, `pytest tests/test_simulate.py` holds 1F1B and ZB-H1 to 4 digits and interleaved to 0.4 points. ZB-V and
DualPipe-V, which have no published rate here, are simulated with the same times.

| model | p | m | v | 1f1b | zb-h1 | interleaved | zb-v | dualpipe-v |
|---|---|---|---|---|---|---|---|---|
"""
    for row in rows():
        both = [f"{rate(name, row):.4f} / {published:.4f}" for name, published in row.rates]
        cells = [row.model, row.ranks, row.micro_batches, row.virtual, *both]
        cells += [f"{rate(name, row):.4f}" for name in ("zb-v", "dualpipe-v")]
        text += f"| {' | '.join(map(str, cells))} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
