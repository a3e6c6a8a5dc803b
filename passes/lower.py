"""The pass pipeline: from a graph and a plan to a program. Read top to bottom, it is the whole lowering.

    insert_reshards   every operand gets the layout its call needs             (layouts-agree)
    expand_reshards   each reshard becomes its primitives                      (primitives-chain)
    insert_pause      outputs leave between forward and backward, if asked     (backward-after-pause)
    start_early       collectives start early, wait late, small ones together  (one-wait)

then, a rank at a time and only when asked for, `localize.rank_graph`          (local-shapes)
"""

from __future__ import annotations

from functools import cache

import torch
import torch.fx as fx

from ..partitioner.collection import no_collection
from ..partitioner.graph import Graph
from ..partitioner.plan import Plan
from ..partitioner.program import Program
from . import dump, laws
from .draft import Draft, start
from .expand import expand_reshards
from .localize import on_device, rank_graph
from .overlap import start_early
from .pause import insert_pause, paused_outputs
from .reshard import insert_reshards

CPU = torch.device("cpu")
PASSES = (insert_reshards, expand_reshards, insert_pause, start_early)


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
    for run in PASSES:
        draft = run(draft)
        laws.check(draft, run.__name__)
    return _program(captured, draft, device)


def dumps(captured: Graph, plan: Plan, form: str) -> dict[str, str]:
    """The program's text as captured and after each pass, by running them again on a copy."""
    draft = start(captured.copy(), plan, form, False)
    out = {"0_captured": dump.text(draft)}
    for i, run in enumerate(PASSES, 1):
        draft = run(draft)
        out[f"{i}_{run.__name__}"] = dump.text(draft)
    return out


def _program(captured: Graph, draft: Draft, device: torch.device) -> Program:
    @cache
    def of_rank(rank: int) -> fx.Graph:
        made = rank_graph(draft, rank)
        laws.check_local_shapes(draft, made, rank)
        return on_device(made, device)

    return Program(
        draft.plan,
        captured,
        draft.graph,
        draft.form,
        {n.name: layout for n, layout in draft.layouts.items()},
        tuple(draft.layouts.get(n) for n in draft.graph.placeholders),
        tuple(draft.layouts.get(v) if v is not None else None for v in draft.graph.output_values),
        of_rank,
        paused_outputs(draft.graph.outputs) if draft.form == "autograd" else (),
        tuple(int(r.name) for r in draft.graph.inputs if r.kind == "tangent"),
        lambda: dumps(captured, draft.plan, draft.form),
    )
