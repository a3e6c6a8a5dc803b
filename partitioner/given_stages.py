"""Stages and schedules of plans that were given, checked before they are followed.

What a saved plan says of stages follows from its cuts; it is worked out again and compared, so that a text that was
damaged or edited cannot put a call where what it reads is not.
"""

from __future__ import annotations

from collections.abc import Mapping

from .errors import PlanError
from .factors import Factored
from .graph import Graph
from .pipeline import followable, pipeline_axis, schedule_of
from .plan import Plan
from .precision import Precision
from .stages import Stages, anchors, stages_of


def check_given(graph: Graph, factored: Factored, plan: Plan) -> None:
    """Check the stages and the schedule of a plan that was given, against its program.

    Raises:
        PlanError: they are not those that its cuts make; the message names the first call or parameter that differs.
    """
    axis, stages, schedule = pipeline_axis(plan.mesh), plan.stages, plan.schedule
    if (axis is None) != (stages is None) or (axis is None or plan.micro_batches == 1) != (schedule is None):
        raise PlanError(
            f"the plan for {plan.mesh} with {plan.micro_batches} micro-batches has "
            f"{'no stages' if stages is None else f'{stages.count} stages'} and {'a' if schedule else 'no'} schedule: "
            f"a mesh with a pipeline axis needs stages, and a schedule for several micro-batches; plan again"
        )
    if axis is None or stages is None:
        return
    ranks, made = plan.mesh.sizes[axis], _stages_again(graph, factored, stages)
    if set(stages.placement) != set(range(ranks)):
        raise PlanError(f"the plan places its stages on {list(stages.placement)}, {axis} has {ranks} ranks; plan again")
    for what, mine, theirs in (("", stages.of, made.of), ("parameter ", stages.parameters, made.parameters)):
        if wrong := [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]:
            name = wrong[0]
            raise PlanError(
                f"the plan's stages do not fit its cuts: {what}{name} is on {_on(mine.get(name))}, the cuts put it on "
                f"{_on(theirs.get(name))}" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "") + "; plan again"
            )
    if schedule is not None:
        if schedule.placement != stages.placement:
            raise PlanError(
                f"the plan's schedule places stages on {list(schedule.placement)}, its stages lie on "
                f"{list(stages.placement)}; plan again"
            )
        followable(schedule, ranks, plan.micro_batches)


def _stages_again(graph: Graph, factored: Factored, stages: Stages) -> Stages:
    """The stages that the cuts of given ones make."""
    found = anchors(graph, factored)
    place = {n.name: i for i, n in enumerate(found.forward)}
    cuts = [place.get(name, -1) if name else len(found.forward) for name in stages.cuts]
    if -1 in cuts or cuts != sorted(cuts) or len(cuts) != stages.count - 1:
        raise PlanError(
            f"the plan's cuts {list(stages.cuts)} are not {stages.count - 1} forward calls of this program in their "
            f"order; plan again"
        )
    return stages_of(graph, found, cuts, stages.placement)


def _on(where_: int | tuple[int, ...] | None) -> str:
    if where_ is None:
        return "no stage"
    return f"stage {where_}" if isinstance(where_, int) else f"stages {', '.join(map(str, where_))}"


def check_layouts_beside(
    plan: Plan, zero: int | str, memory: int | None, pin: Mapping[str, str], recompute: str = "auto"
) -> None:
    """Raises:
    PlanError: options beside a given plan that it does not follow. Defaults say nothing.
    """
    if zero not in ("auto", plan.zero) and not (zero == 2 and plan.zero == 1):
        raise PlanError(
            f"zero={zero}, but the plan given by plan= has zero={plan.zero}; leave zero= out, or plan again without "
            f"plan="
        )
    said = [f"pin={dict(pin)}"] * bool(pin) + [f"memory={memory}"] * (memory is not None)
    said += [f"recompute={recompute!r}"] * (recompute != "auto")
    if said:
        raise PlanError(
            f"{' and '.join(said)} beside plan=: a given plan is followed as it is, nothing is decided again; leave "
            f"{' and '.join(one.split('=')[0] + '=' for one in said)} out, or plan again without plan="
        )


def check_beside(plan: Plan, schedule: str, micro_batches: int | str, precision: Precision | None = None) -> None:
    """Raises:
    PlanError: options beside a given plan that say otherwise than it does. Defaults say nothing, but that there is no
    precision is said: numbers change with it.
    """
    if plan.precision != (asked := str(precision or "")):
        raise PlanError(
            f"the plan given by plan= is for precision {plan.precision or None!r}, compile has {asked or None!r}: give "
            f"precision= as it was, or plan again without plan="
        )
    if micro_batches not in ("auto", plan.micro_batches):
        raise PlanError(
            f"micro_batches={micro_batches}, but the plan given by plan= has {plan.micro_batches}; leave "
            f"micro_batches= out, or plan again without plan="
        )
    if schedule == "auto":
        return
    if plan.stages is None:
        raise PlanError(f"schedule={schedule[:40]!r}, but the plan given by plan= has no pipeline; leave schedule= out")
    axis = pipeline_axis(plan.mesh)
    asked = schedule_of(schedule, plan.mesh.sizes[axis or ""], plan.micro_batches)
    alike = plan.schedule is None or asked.orders == plan.schedule.orders
    if not alike or asked.placement != plan.stages.placement:
        name = plan.schedule.name if plan.schedule is not None else f"stages on {list(plan.stages.placement)}"
        raise PlanError(
            f"schedule={schedule[:40]!r}, but the plan given by plan= has {name}; leave schedule= out, or plan again "
            f"without plan="
        )
