"""The pass pipeline: from a graph and a plan to a program. Read top to bottom, it is the whole lowering.

    insert_reshards   every operand gets the layout its call needs             (layouts-agree, backward-reads-kept)
    expand_reshards   each reshard becomes its primitives                      (primitives-chain)
    chunk_loss        a large loss is made with its gradients, logits a chunk at a time
    insert_pause      outputs leave between forward and backward, if asked     (backward-after-pause)
    write_offload     what the plan keeps on the host goes down and comes up   (reload-has-offload)
    segments          with micro-batches or stages: a graph for every phase    (act_laws.py)
    start_early       collectives start early, wait late, small ones together  (one-wait)

then, a rank at a time and only when asked for, `localize.rank_graph`          (local-shapes)
and `accumulate.adding` for micro-batches after the first                      (added-once)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from ..partitioner.collection import no_collection
from ..partitioner.graph import Graph, as_key
from ..partitioner.mesh import Mesh
from ..partitioner.plan import Plan
from ..partitioner.program import Program, Segment
from . import dump, laws
from .accumulate import adding
from .act_laws import check_acts
from .chunk_loss import chunk_loss
from .draft import Draft, start
from .expand import expand_reshards
from .localize import on_device, rank_graph
from .offload import write_offload
from .overlap import start_early
from .pause import insert_pause, paused_outputs
from .reshard import insert_reshards
from .segments import Part, Segmented, segments

CPU = torch.device("cpu")
WHOLE = (insert_reshards, expand_reshards, chunk_loss, insert_pause, write_offload)
PASSES = (*WHOLE, start_early)


@no_collection()
def lower(
    graph: Graph, plan: Plan, form: str = "step", local_inputs: bool = False, device: torch.device = CPU
) -> Program:
    """Run the passes.

    Args:
        form: "step" | "forward" | "autograd"; see `Program`.
        local_inputs: each data rank is given its own part of the batch.
        device: where the ranks run; ops that make tensors make them there.

    Raises:
        LawError: a pass broke a law: a defect of the compiler.
    """
    captured = graph.copy()
    draft = start(graph, plan, form, local_inputs)
    for run in WHOLE:
        draft = run(draft)
        laws.check(draft, run.__name__)
    if not needs_segments(plan):
        laws.check(start_early(draft), start_early.__name__)
        return _program(captured, draft, Segmented(), device)
    cut = segments(draft)
    check_acts(draft, cut)
    for part in cut.parts:
        laws.check(start_early(part.draft), start_early.__name__)
    return _program(captured, draft, cut, device)


def needs_segments(plan: Plan) -> bool:
    return plan.micro_batches > 1 or plan.stages is not None


def dumps(captured: Graph, plan: Plan, form: str) -> dict[str, str]:
    """The program's text as captured and after each pass that changed it, by running them again on a copy."""
    draft = start(captured.copy(), plan, form, False)
    out = {"0_captured": dump.text(draft)}
    last = out["0_captured"]
    for i, run in enumerate(WHOLE, 1):
        draft = run(draft)
        before, last = last, dump.text(draft)
        if last != before:
            out[f"{i}_{run.__name__}"] = last
    at = len(PASSES)
    if not needs_segments(plan):
        return out | {f"{at}_start_early": dump.text(start_early(draft))}
    for part in segments(draft).parts:
        out[f"{at}_{part.name.replace(' ', '_')}"] = dump.text(start_early(part.draft))
    return out


def _program(captured: Graph, draft: Draft, cut: Segmented, device: torch.device) -> Program:
    layouts = {n.name: layout for n, layout in draft.layouts.items()}
    for part in cut.parts:
        layouts |= {n.name: layout for n, layout in part.draft.layouts.items()}
    acts, mesh = tuple(map(tuple, cut.acts)), draft.plan.mesh
    return Program(
        draft.plan,
        captured,
        draft.graph,
        draft.form,
        layouts,
        tuple(draft.layouts.get(n) for n in draft.graph.placeholders),
        tuple(draft.layouts.get(v) if v is not None else None for v in draft.graph.output_values),
        _by_rank(draft, device),
        paused_outputs(draft.graph.outputs) if draft.form == "autograd" else (),
        tuple(int(r.name) for r in draft.graph.inputs if r.kind == "tangent"),
        lambda: dumps(captured, draft.plan, draft.form),
        tuple(_segment(part, device) for part in cut.parts),
        lambda rank: acts[_stage_index(mesh, rank)],
        cut.timed,
    )


def _stage_index(mesh: Mesh, rank: int) -> int:
    """Where a rank stands on the pipeline axis."""
    return next((i for a, i in mesh.coord(rank).items() if mesh.role(a) == "pipeline"), 0)


def _segment(part: Part, device: torch.device) -> Segment:
    of_rank, sums = _by_rank(part.draft, device), tuple(c for c in part.collects if c.inside)
    further = cache(lambda rank: adding(of_rank(rank), sums))
    names = part.reads, part.gives, part.collects
    return Segment(part.name, part.draft.graph, part.timed, *names, of_rank, further, *part.where)


def _by_rank(draft: Draft, device: torch.device) -> Callable[[int], fx.Graph]:
    checked: set[Any] = set()

    @cache
    def of_rank(rank: int) -> fx.Graph:
        made = rank_graph(draft, rank)
        key = as_key(made)
        if key not in checked:  # many micro-batches have one graph
            checked.add(key)
            laws.check_local_shapes(draft, made, rank)
        return on_device(made, device)

    return of_rank
