"""How many loops over micro-batches a step has, and which values start a new one.

    ready(call)    the latest of what it reads: in the loop that made it, or after that loop, if it is put together over
                   micro-batches (a count of tokens, the statistics of a batch norm)
    a new loop     starts where a call of every micro-batch reads what is ready only after a loop

`passes/phases.py` cuts the program so, reshards included; `tests/test_loops.py` holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from .graph import Graph, is_getitem
from .mesh import TIME
from .placement import Placement
from .plan import Plan
from .through_time import changes_in_time
from .traffic import Moved


def loops(graph: Graph, placed: Placement, plan: Plan, moves: Iterable[Moved]) -> tuple[tuple[str, ...], ...]:
    """Per loop the names of the values that must be whole over the batch before it; the first waits for none."""
    if plan.micro_batches == 1:
        return ()
    collected = {(m.value, reader) for m in moves if _collects(m) for reader in m.readers}
    phase: dict[fx.Node, int] = {}
    blamed: dict[fx.Node, tuple[str, ...]] = {}
    found: dict[int, dict[str, None]] = {1: {}}
    for node in graph.fx.nodes:
        if node.op != "call_function":
            continue
        came = {x: phase.get(x, 0) + ((x.name, node.name) in collected) for x in node.all_input_nodes}
        ready = max(came.values(), default=0)
        timed = _timed(node, placed)
        phase[node] = ready + (ready % 2 != timed)
        whys = ((x.name,) if came[x] > phase.get(x, 0) else blamed.get(x, ()) for x in came if came[x] == ready)
        blamed[node] = tuple(dict.fromkeys(why for one in whys for why in one))
        if timed and ready % 2 == 0:
            found.setdefault(phase[node], {}).update(dict.fromkeys(blamed[node]))
    return tuple(tuple(found.get(p, ())) for p in range(1, max(phase.values(), default=1) + 1, 2))


def _collects(move: Moved) -> bool:
    return any(s.axes == (TIME,) and s.kind not in ("slice", "zero") for s in move.way.steps)


def _timed(node: fx.Node, placed: Placement) -> bool:
    """Whether a call has a value for every micro-batch."""
    call = node.args[0] if is_getitem(node) else node
    split = placed.splits.get(call)  # type: ignore[arg-type]
    if split is not None:
        return TIME in split.partial or any(TIME in axes for axes in split.axes.values())
    return node in placed.layouts and changes_in_time(placed.layouts[node])
