"""Micro-batches: one more mesh axis, in time, over which the batch is split like over any data axis.

    in time    what every call does, as on a mesh of one data axis: its batch split, a partial sum, or whole (once)
    in space   what every call does, as if there were no micro-batches
    the plan   both: `[8:micro+dp, 16]` is a tensor of which a rank holds one part in each micro-batch

Nothing is normalised again: the program is that of the global batch, its means divide by the global counts, and what
must be known of all micro-batches before others go on (a count of tokens, the statistics of a batch norm) is a
reduction in time like any other.
"""

from __future__ import annotations

from dataclasses import replace

from .away import with_offload
from .errors import PlanError, TooLittle
from .factors import factor_graph
from .facts import with_facts
from .fit import Fitted, as_asked, fitted
from .graph import Graph
from .mesh import TIME, Mesh
from .plan import Plan
from .planner import Decide, Options, make_plan
from .recompute import with_recompute
from .strategies import never_empty
from .wishes import wishes

SHARES = (0.5, 0.02)
"""Shares of what backward reads that layouts are chosen for, where all of it is too much: the rest is made again."""

TIGHTER = 3
"""So often layouts are chosen again, for what was too much before."""


def make_plan_in_time(
    graph: Graph, mesh: Mesh, options: Options, micro_batches: int, decide: Decide | None = None
) -> tuple[Graph, Plan]:
    """`make_plan`, for a step that is run in so many micro-batches, and what backward makes again
    or finds on the host.

    Raises:
        PlanError: the batch has too few rows for so many micro-batches on this mesh.
    """
    if options.memory is not None and options.recompute != "none" and decide is None:
        made = _within(graph, mesh, options, micro_batches)
    else:
        made = with_recompute(
            *_laid_out(graph, mesh, options, micro_batches, decide), options.recompute, options.keep
        )
    return with_offload(*made, options.offload, options.keep)


def _within(graph: Graph, mesh: Mesh, options: Options, micro_batches: int) -> tuple[Graph, Plan]:
    """The fastest of the plans found that fit the memory: layouts alone, or with as much made again as must be.

    Layouts that hold little may cost more than layouts for a share of what backward reads and the rest made again, so
    those are looked at even where layouts alone fit.
    """
    assert options.memory is not None
    free = _laid_out(graph, mesh, replace(options, memory=None), micro_batches, None)
    found = [fitted(*free, options.memory, options.held, options.recompute, options.keep)]
    if options.recompute == "auto" and not found[0].plan.recompute and found[0].nbytes <= options.memory:
        return _as_the_memory(found[0], options.memory)  # nothing is faster
    alone = fault = None
    try:
        alone = as_asked(
            *_laid_out(graph, mesh, options, micro_batches, None), options.held, options.recompute, options.keep
        )
        found.append(alone)
    except PlanError as failed:
        fault = failed
    for share in SHARES:
        found += _tightened(graph, mesh, options, micro_batches, share)
    fitting = [f for f in found if f.nbytes <= options.memory or f is alone]
    if not fitting:
        assert fault is not None
        least = min(found, key=lambda f: f.nbytes)
        if not least.plan.recompute:  # there is nothing to make again
            raise fault
        raise TooLittle(
            f"{fault}. With recompute of every block the least found takes {least.nbytes:.0f} bytes, "
            f"{least.state:.0f} of it parameters, gradients and optimizer state",
            min(least.nbytes, fault.least) if isinstance(fault, TooLittle) else least.nbytes,
        ) from fault
    return _as_the_memory(min(fitting, key=lambda f: sum(f.plan.seconds)), options.memory)


def _as_the_memory(found: Fitted, memory: int) -> tuple[Graph, Plan]:
    assert found.plan.facts is not None
    facts = replace(found.plan.facts, asked={**found.plan.facts.asked, "memory": memory})
    return found.graph, replace(found.plan, facts=facts)


def _tightened(graph: Graph, mesh: Mesh, options: Options, micro_batches: int, share: float) -> list[Fitted]:
    """Plans whose layouts fit with a share of what backward reads; where it is too much, of what that leaves
    for parameters."""
    assert options.memory is not None
    found, budget = [], float(options.memory)
    held = (options.held[0], options.held[1] * share)
    for _ in range(TIGHTER):
        try:
            made = _laid_out(graph, mesh, replace(options, memory=budget, held=held), micro_batches, None)  # type: ignore[arg-type]
        except PlanError:  # or it is not the memory that is short
            break
        found.append(fitted(*made, options.memory, options.held, options.recompute, options.keep))
        budget = options.memory - (found[-1].nbytes - options.held[0] * found[-1].state)
        if found[-1].nbytes <= options.memory or budget <= 0:
            break
    return found


def _laid_out(
    graph: Graph, mesh: Mesh, options: Options, micro_batches: int, decide: Decide | None
) -> tuple[Graph, Plan]:
    if micro_batches == 1:
        return make_plan(graph, mesh, options, decide)
    _check_sizes(graph, micro_batches)
    graph = replace(graph, factored=factor_graph(graph, options.resting))
    line, done = mesh.timeline(micro_batches), ()
    graph, in_time = make_plan(graph, line, Options(zero=0), decide)
    graph, plan = make_plan(graph, mesh, replace(options, micro_batches=micro_batches), decide)
    done += (*in_time.decomposed, *plan.decomposed)
    if plan.decomposed:  # the new calls have no choice in time yet; those of the others stay as they were
        graph, in_time = make_plan(graph, line, Options(zero=0), decide)
        if in_time.decomposed:
            raise PlanError(f"calls {in_time.decomposed} were written out for micro-batches after all else was decided")
    choices = {name: {TIME: in_time.choices[name].get(TIME), **by} for name, by in plan.choices.items()}
    return graph, retimed(graph, replace(plan, choices=choices, decomposed=done), micro_batches)


def retimed(graph: Graph, plan: Plan, micro_batches: int) -> Plan:
    """The same decisions for so many micro-batches, with the facts of those."""
    assert graph.factored is not None and plan.facts is not None
    told = set(wishes(plan, plan.facts))
    notes = tuple(n for n in plan.notes if n not in told)
    timed = replace(plan, micro_batches=micro_batches, notes=notes)
    return with_facts(timed, graph, graph.factored, **plan.facts.asked)


def can_be_cut(graph: Graph, mesh: Mesh, micro_batches: int) -> bool:
    """Whether no rank of a data axis is without rows in any micro-batch."""
    ranks = tuple(n for a, n in mesh.axes if n > 1 and mesh.role(a) == "data")
    return all(never_empty(rows, (micro_batches, *ranks)) for rows in batch_sizes(graph))


def batch_sizes(graph: Graph) -> list[int]:
    """Rows of the batch, of each input that has them."""
    pairs = zip(graph.placeholders, graph.inputs, strict=True)
    at = [(n, graph.batch[int(r.name)]) for n, r in pairs if r.kind == "input"]
    return [int(n.meta["val"].shape[dim]) for n, dim in at if dim is not None]


def _check_sizes(graph: Graph, micro_batches: int) -> None:
    """Raises:
    PlanError: the batch has fewer rows than micro-batches, or some would be empty.
    """
    for n in batch_sizes(graph):
        if never_empty(n, (micro_batches,)):
            continue
        fits = max(m for m in range(1, micro_batches) if never_empty(n, (m,)))
        raise PlanError(
            f"a batch of {n} cannot be cut into micro_batches={micro_batches}, all of one size but the last: some "
            f"would be empty. A batch of {micro_batches} fits, or micro_batches={fits}"
        )
