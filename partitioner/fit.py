"""Within the memory by recompute, where no choice of layouts fits alone: the least of a ladder of levels that does.

    level (t, k)   in the first k blocks values of tier t are made again, in the others those of tier t - 1
    tier 1         what takes little: all but contractions and attention       tier 2    all that only the block reads
    bytes          parameters at rest, gradients and moments + what backward reads + copies that are kept for it
                   + the most that one block makes again

The first blocks are taken first: what the last ones keep is let go of before the first ones make theirs again. Bytes
fall and seconds rise along the ladder, so the first level that fits is found by halving.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from .blocks import blocks
from .collective import largest_local
from .graph import Graph, is_getitem, is_tensor
from .keep import Families, asked_again, names_of, saved_by_pins
from .placement import place
from .plan import Plan
from .recompute import made_again, with_recompute
from .resting import rest_size, state_size
from .saved import base, saved_values
from .strategies import HEAVY
from .twins import is_twin, original


@dataclass(frozen=True)
class Fitted:
    """A program and its plan, and the bytes it takes: of them `state` parameters, gradients and moments."""

    graph: Graph
    plan: Plan
    nbytes: float
    state: float


def fitted(
    graph: Graph, plan: Plan, budget: float, held: tuple[float, float], recompute: str, pins: Mapping[str, str]
) -> Fitted:
    """The first level that fits, or the last; with recompute="full" the last."""
    assert graph.factored is not None
    ladder = _ladder(graph, pins)[-1 if recompute == "full" else 0 :]
    asked = asked_again(graph, graph.factored, "none", pins)
    known: dict[int, Fitted] = {}

    def at(level: int) -> Fitted:
        if level not in known:
            names = asked | ladder[level]
            made = made_again(graph, plan, names) if names else (graph, plan)
            known[level] = Fitted(*made, *_bytes(*made, held))
        return known[level]

    found = bisect.bisect_left(range(len(ladder)), True, key=lambda level: at(level).nbytes <= budget)
    return at(min(found, len(ladder) - 1))


def as_asked(
    graph: Graph, plan: Plan, held: tuple[float, float], recompute: str, pins: Mapping[str, str]
) -> Fitted:
    """The plan with what the user asked to be made again, and no more."""
    made = with_recompute(graph, plan, recompute, pins)
    return Fitted(*made, *_bytes(*made, held))


def counted(graph: Graph, plan: Plan) -> float:
    """Bytes of a rank by the planner's sum; of stages, which share them, the mean."""
    stages = 1 + max(plan.stages.placement) if plan.stages is not None else 1
    return _bytes(graph, plan, (1 / stages, 1 / (stages * plan.micro_batches)))[0]


def _ladder(graph: Graph, pins: Mapping[str, str]) -> list[frozenset[str]]:
    """Per level the names of the values made again."""
    assert graph.factored is not None
    home, families, saved = blocks(graph), Families(graph, graph.factored), saved_by_pins(graph, pins)
    inner = [v for v in families.inner(home) if v not in saved]
    cheap = {v for v in inner if _takes_little(graph, v)}
    count = 1 + max((home[v] for v in inner), default=-1)
    levels = [(0, count), *((tier, k) for tier in (1, 2) for k in range(1, count + 1))]
    tiers: list[set[fx.Node]] = [set(), cheap, set(inner)]
    return [
        names_of(families, (v for v in inner if v in tiers[tier if home[v] < k else tier - 1] and tier))
        for tier, k in levels
    ]


def _takes_little(graph: Graph, value: fx.Node) -> bool:
    assert graph.factored is not None
    call: fx.Node = value.args[0] if is_getitem(value) else value  # type: ignore[assignment]
    return graph.factored.shapes[call].rule.flops < HEAVY and "attention" not in str(call.target)


def _bytes(graph: Graph, plan: Plan, held: tuple[float, float]) -> tuple[float, float]:
    """Bytes of a rank, all and of its state; see above."""
    assert graph.factored is not None and plan.facts is not None
    layouts, sizes = place(graph, graph.factored, plan).layouts, {}

    def local(value: fx.Node, layout: object = None) -> float:
        layout = layout or layouts[value]
        if id(layout) not in sizes:
            sizes[id(layout)] = largest_local(layout, plan.grid)  # type: ignore[arg-type]
        return sizes[id(layout)] * value.meta["val"].element_size()

    nodes = {n.name: n for n in graph.fx.nodes}
    roles = zip(graph.placeholders, graph.inputs, strict=True)
    params = {str(r.name): n for n, r in roles if r.kind == "param"}
    state = sum(
        n / rest_size(graph, params[name], name) * state_size(graph, params[name], name, name in plan.facts.optimizer)
        for name, n in plan.facts.at_rest.items()
    )
    kept = sum(map(local, saved_values(graph, graph.factored)))
    for m in plan.facts.moves:
        late = not m.backward and any(is_late(nodes[r]) for r in m.readers)
        if late and m.value in nodes and not is_late(nodes[m.value]):
            kept += local(nodes[m.value], m.after)
    home, again = blocks(graph), Counter()
    for n in graph.fx.nodes:
        if is_twin(n.name) and is_tensor(n) and base(n, graph.factored) is n and nodes[original(n.name)] in home:
            again[home[nodes[original(n.name)]]] += local(n)  # type: ignore[assignment]
    often = plan.micro_batches  # `kept` is of one micro-batch, `held` of the whole batch
    total = held[0] * state + held[1] * often * kept + max(again.values(), default=0)
    return total, state


def is_late(node: fx.Node) -> bool:
    return bool(node.meta.get("backward"))
