"""Within the memory by recompute, where no choice of layouts fits alone: what loses the least time (`least_again.py`).

    bytes          parameters at rest, gradients and moments
                   + what backward reads, and copies that are kept for it, of the micro-batches in flight
                   of the one in backward, at its worst moment: what is not done with, and what is made again

Where no such choice holds, a ladder: level (t, k) makes again values of tier t in the first k blocks, in the others
those of tier t - 1; tier 1 is what takes little (all but contractions and attention), tier 2 all that only the block
reads. Bytes fall and seconds rise along it, so the first level that fits is found by halving. It is gone down too where
many blocks are decided together, which counts some of their bytes too high.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.fx as fx

from .blocks import blocks
from .collective import largest_local
from .graph import Graph, is_getitem, is_tensor
from .keep import Families, asked_again, names_of, saved_by_pins
from .least_again import LeastAgain
from .placement import place
from .plan import Plan
from .recompute import made_again, with_recompute
from .resting import rest_size, state_size
from .saved import base, saved_values
from .strategies import HEAVY
from .twins import is_twin

TRIES = 4
"""So often a choice is made again, for as much less as it was too much."""


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
    """The fastest found that fits, or else one that takes little; with recompute="full" all of every block again."""
    assert graph.factored is not None
    asked = asked_again(graph, graph.factored, "none", pins)

    def of(names: frozenset[str]) -> Fitted:
        made = made_again(graph, plan, names) if names else (graph, plan)
        return Fitted(*made, *_bytes(*made, held))

    if recompute == "full":
        return of(asked | _ladder(graph, pins)[-1])
    least = of(asked)
    if least.nbytes <= budget:
        return least
    choice = LeastAgain(graph, plan, pins, _local(graph, plan), held[1] * plan.micro_batches, asked)
    rest = _bytes(graph, plan, held)[0] - choice.kept
    found = [f for f in _chosen(choice, of, budget, rest) if f.nbytes <= budget]
    if not found or choice.together > 1:
        found.append(_down(of, [asked | names for names in _ladder(graph, pins)], budget))
    return min(found, key=lambda f: (f.nbytes > budget, sum(f.plan.seconds)))


def _chosen(choice: LeastAgain, of: Callable[[frozenset[str]], Fitted], budget: float, rest: float) -> list[Fitted]:
    """Choices until one fits: copies in other layouts, which come with what is made again, are not foreseen."""
    found: list[Fitted] = []
    limit = budget - rest
    for _ in range(TRIES):
        names = choice.within(limit) if limit > 0 else None
        if names is None:
            break
        found.append(of(names))
        if found[-1].nbytes <= budget:
            break
        limit -= found[-1].nbytes - budget
    return found


def _down(of: Callable[[frozenset[str]], Fitted], ladder: list[frozenset[str]], budget: float) -> Fitted:
    """The first level of the ladder that fits, or the last."""
    known: dict[int, Fitted] = {}

    def at(level: int) -> Fitted:
        if level not in known:
            known[level] = of(ladder[level])
        return known[level]

    found = bisect.bisect_left(range(len(ladder)), True, key=lambda level: at(level).nbytes <= budget)
    return at(min(found, len(ladder) - 1))


def as_asked(graph: Graph, plan: Plan, held: tuple[float, float], recompute: str, pins: Mapping[str, str]) -> Fitted:
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


def _local(graph: Graph, plan: Plan) -> Callable[..., float]:
    """Bytes of a value on the busiest rank, in a layout or its own."""
    assert graph.factored is not None
    layouts, sizes = place(graph, graph.factored, plan).layouts, {}

    def local(value: fx.Node, layout: object = None) -> float:
        layout = layout or layouts[value]
        if id(layout) not in sizes:
            sizes[id(layout)] = largest_local(layout, plan.grid)  # type: ignore[arg-type]
        return sizes[id(layout)] * value.meta["val"].element_size()

    return local


def _bytes(graph: Graph, plan: Plan, held: tuple[float, float]) -> tuple[float, float]:
    """Bytes of a rank, all and of its state; see above."""
    assert graph.factored is not None and plan.facts is not None
    local, nodes = _local(graph, plan), {n.name: n for n in graph.fx.nodes}
    roles = zip(graph.placeholders, graph.inputs, strict=True)
    params = {str(r.name): n for n, r in roles if r.kind == "param"}
    state = sum(
        n / rest_size(graph, params[name], name) * state_size(graph, params[name], name, name in plan.facts.optimizer)
        for name, n in plan.facts.at_rest.items()
    )
    copies = 0.0
    for m in plan.facts.moves:
        late = not m.backward and any(is_late(nodes[r]) for r in m.readers)
        if late and m.value in nodes and not is_late(nodes[m.value]):
            copies += local(nodes[m.value], m.after)
    often = held[1] * plan.micro_batches  # of one micro-batch
    return held[0] * state + often * copies + _stands(graph, local, often), state


def _stands(graph: Graph, local: Callable[[fx.Node], float], often: float) -> float:
    """The most bytes of what forward made and of what is made again, in the backward of a micro-batch."""
    assert graph.factored is not None
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.fx.nodes:
        if is_late(node) and node.op == "call_function":
            last |= {base(x, graph.factored): node for x in node.all_input_nodes if is_tensor(x)}
    kept = saved_values(graph, graph.factored)
    whole = sum(map(local, kept))
    gone: Counter[fx.Node] = Counter()
    for value, reader in last.items():
        if value in kept:
            gone[reader] += min(often, 1.0) * local(value)  # type: ignore[assignment]
        elif is_twin(value.name):
            gone[reader] += local(value)  # type: ignore[assignment]
    stands = most = often * whole
    for node in graph.fx.nodes:
        if is_twin(node.name) and is_tensor(node) and base(node, graph.factored) is node and node in last:
            stands += local(node)
        most = max(most, stands)
        stands -= gone[node]
    return most


def is_late(node: fx.Node) -> bool:
    return bool(node.meta.get("backward"))
