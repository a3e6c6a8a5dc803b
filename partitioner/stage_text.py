"""What a plan says of its micro-batches and stages: the modules, seconds and parameters of each, and the schedule."""

from __future__ import annotations

from collections.abc import Iterator

from .doing import module_of
from .fold import MODEL, Folder
from .plan import Plan
from .schedules.grid import grid
from .units import bytes_text, seconds_text

WIDE, RANKS = 110, 8
"""So many columns and rows of a schedule's grid are shown."""

LOOPS = 3
"""So many loops, and values that one waits for, are told of."""


def stage_lines(plan: Plan) -> Iterator[str]:
    """Lines of a summary: the stages, then the first lines of the schedule's grid."""
    if plan.micro_batches > 1:
        yield from _loops(plan)
    if plan.stages is None:
        return
    yield "stages"
    yield from (f"  {_stage(plan, s)}" for s in range(plan.stages.count))
    if plan.schedule is not None:
        yield f"schedule {plan.schedule.name}"
        rows = grid(plan.schedule).splitlines()
        yield from ("  " + (row if len(row) <= WIDE else row[:WIDE] + " ...") for row in rows[:RANKS])
        if len(rows) > RANKS:
            yield f"  and {len(rows) - RANKS} more ranks"


def _loops(plan: Plan) -> Iterator[str]:
    """How often a step goes through its micro-batches, and what each time waits for."""
    waits = plan.facts.loops if plan.facts is not None else ()
    often = f" in {len(waits)} loop{'s' if len(waits) > 1 else ''}" if waits else ""
    yield f"a step goes through {plan.micro_batches} micro-batches{often}"
    for i, values in list(enumerate(waits, 1))[1 : 1 + LOOPS]:
        said = [f"{v} of {module_of(plan, v) or MODEL}" for v in values[:LOOPS]]
        said += [f"{len(values) - LOOPS} more"] if len(values) > LOOPS else []
        yield f"  loop {i} needs whole over the batch: {', '.join(said)}"
    if len(waits) > 1 + LOOPS:
        yield f"  and {len(waits) - 1 - LOOPS} more"


def _stage(plan: Plan, stage: int) -> str:
    assert plan.stages is not None
    calls = [c for c, s in plan.stages.of.items() if s == stage]
    params = [p for p, on in plan.stages.parameters.items() if stage in on]
    modules = Folder(module_of(plan, c) for c in plan.choices).fold(
        dict.fromkeys(module_of(plan, c) or MODEL for c in calls if c in plan.choices)
    )
    said = [f"{stage} on pipeline rank {plan.stages.placement[stage]}: {', '.join(modules) or 'nothing'}"]
    if plan.facts is not None:
        took = sum(plan.facts.seconds.get(c, 0.0) for c in calls)
        said.append(f"{seconds_text(took)} of compute")
        said.append(f"{len(params)} parameters, {bytes_text(sum(plan.facts.at_rest[p] for p in params))}")
    return "; ".join(said)


def stage_of_call(plan: Plan, call: str) -> Iterator[str]:
    """Where a call runs in a pipeline, and why."""
    if plan.stages is None:
        return
    stage = plan.stages.of.get(call)
    if stage is None:
        yield "  on every stage that reads it: made of inputs or of parameters alone, it is never sent"
        return
    first = f", which starts with {plan.stages.cuts[stage - 1] or 'nothing'}" if stage else ", the first"
    cut = "; it is that call" if stage and plan.stages.cuts[stage - 1] == call else ""
    yield f"  stage {stage} on pipeline rank {plan.stages.placement[stage]}{first}{cut}"
