"""What the stages of a plan cost: seconds and bytes of one micro-batch, from its calls, its reshards and its tensors.

    seconds    of a call in a loop, of one micro-batch: its roofline, at least `DISPATCH`; a reshard likewise
    once       what a step does once: the optimizer, reductions of gradients, calls that are not in a loop
    resident   weights, gradients and moments at rest; copies gathered for the whole step; gradients that are added up;
               what is the same for all micro-batches
    saved      tensors that backward reads, on every stage where it does, until B or until W; views seen through
    between    tensors that B makes for W
    hop        bytes that go from a stage to another, in the layout that their reader needs

What stands only while one call runs is not counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from .collective import largest_local
from .collective_cost import collective_seconds
from .factors import Factored
from .graph import Graph, is_getitem, is_tensor, tensor_operands
from .layout import Layout
from .mesh import TIME
from .parts import parts
from .placement import place
from .plan import Plan
from .resting import rest_size, state_size
from .schedules.schedule import Edge
from .schedules.stage_cost import Costs, StageCost
from .stages import Anchors, Stages, needed_on, parameters_read
from .strategies import is_view
from .traffic import Moved

DISPATCH = 4e-6
"""Seconds that a call takes at least: PyTorch hands out about 250,000 small calls a second, on CPU and on GPU."""


@dataclass(frozen=True)
class Stagewise:
    """Attributes:
    costs: of the stages and hops, for the simulator.
    once: per stage the seconds that a step takes there beside the micro-batches.
    edges, gradients: the pairs of stages that values go between, and those along which gradients come back.
    """

    costs: Costs
    once: tuple[float, ...]
    edges: frozenset[Edge]
    gradients: frozenset[Edge]


class Work:
    """A plan's work before it is cut: what every call takes, and what every tensor holds.

    Attributes:
        seconds: per call that is in a loop, of one micro-batch, with the reshards that it waits for.
        once: per call the seconds beside the loops.
    """

    def __init__(self, graph: Graph, factored: Factored, plan: Plan, found: Anchors, axis: str):
        assert plan.facts is not None
        self.graph, self.plan, self.found, self.facts = graph, plan, found, plan.facts
        self.placed = place(graph, factored, plan)
        self.levels = plan.mesh.levels((axis,))
        self.nodes = [n for n in graph.fx.nodes if n.op == "call_function"]
        self.by_name = {n.name: n for n in graph.fx.nodes}
        self.looped = {n for n in self.nodes if self._in_loop(n)}
        self.params = {
            n: str(r.name) for n, r in zip(graph.placeholders, graph.inputs, strict=True) if r.kind == "param"
        }
        self.named = {name: n for n, name in self.params.items()}
        self._bytes: dict[tuple[int, int], int] = {}
        self.base = self._bases(factored)
        self.seconds: dict[fx.Node, float] = defaultdict(float)
        self.once: dict[fx.Node, float] = defaultdict(float)
        self._calls()
        self.held: dict[tuple[fx.Node, str], int] = Counter()
        for move in plan.facts.moves:
            self._move(move)

    def _in_loop(self, node: fx.Node) -> bool:
        call = node.args[0] if is_getitem(node) else node
        choices = self.plan.choices.get(call.name, {})  # type: ignore[union-attr]
        return self.plan.micro_batches == 1 or choices.get(TIME) is not None

    def _bases(self, factored: Factored) -> dict[fx.Node, fx.Node]:
        """Of every view the tensor that it looks at; of all else itself."""
        base: dict[fx.Node, fx.Node] = {}
        for node in self.graph.fx.nodes:
            looks = node.op == "call_function" and not is_getitem(node) and is_view(node)
            looks = looks and node.target is not torch.ops.aten._to_copy.default
            base[node] = base[factored.operands[node][0]] if looks else node
        return base

    def _calls(self) -> None:
        m = self.plan.micro_batches
        for name, took in self.facts.seconds.items():
            node = self.by_name[name]
            if node in self.looped:
                self.seconds[node] += max(took / m, DISPATCH) if took else 0.0
            else:
                self.once[node] += took

    def _move(self, move: Moved) -> None:
        """A reshard costs the call that waits for it; where nobody does, the one that made the value."""
        at = next((self.by_name[r] for r in move.readers if self.found.of.get(self.by_name[r]) is not None), None)
        at = self.by_name.get(move.value) if at is None else at
        if at is None:
            return
        m = self.plan.micro_batches
        for step, took, often in zip(move.way.steps, move.way.seconds, move.way.times, strict=True):
            (self.seconds if often == m else self.once)[at] += took / m if often == m else took
            if step.axes == (TIME,) and step.kind == "all_reduce" and any(kind == "grad" for kind, _ in move.leaves):
                name = next(name for kind, name in move.leaves if kind == "grad")
                extra = (self._local(step.after, 1) - self._elements(name)) * rest_size(self.graph, *self._param(name))
                self.held[at, name] = max(self.held[at, name], int(extra))
        if move.is_param and move.way.times and move.way.times[-1] < m:
            node, _ = self._param(move.value)
            extra = (self._local(move.after, 1) - self._elements(move.value)) * node.meta["val"].element_size()
            self.held[at, move.value] += max(0, int(extra))

    def _param(self, name: str) -> tuple[fx.Node, str]:
        return self.named[name], name

    def _elements(self, name: str) -> float:
        """Of a parameter on a rank, at rest."""
        return self.facts.at_rest[name] / rest_size(self.graph, *self._param(name))

    def _local(self, layout: Layout, itemsize: int) -> int:
        key = (id(layout), itemsize)
        if key not in self._bytes:
            self._bytes[key] = largest_local(layout, self.plan.grid) * itemsize
        return self._bytes[key]

    def nbytes(self, value: fx.Node, layout: Layout | None = None) -> int:
        """Bytes of a tensor on a rank, of one micro-batch."""
        if not is_tensor(value):
            return 0
        return self._local(layout or self.placed.layouts[value], value.meta["val"].element_size())

    def state(self, name: str) -> int:
        """Bytes of a parameter at rest, its gradient and its moments."""
        return int(self._elements(name) * state_size(self.graph, *self._param(name), name in self.facts.optimizer))

    # -- per place of forward, for the search
    def per_place(self, what: Mapping[fx.Node, float]) -> list[float]:
        """A number of calls, added up per forward call that they belong to."""
        out = [0.0] * len(self.found.forward)
        for node, number in what.items():
            at = self.found.of.get(node)
            if at is not None and out:  # a program may have no forward call of its own
                out[at] += number
        return out

    def resident_at(self) -> list[float]:
        """Per forward call the bytes held all the time, of the parameters that it is the first to read."""
        out = self._at_first_reader(self.state)
        for (node, _), extra in self.held.items():
            at = self.found.of.get(node)
            if at is not None and out:
                out[at] += extra
        return out

    def optimizer_at(self) -> list[float]:
        """Per forward call the optimizer's seconds on the parameters that it is the first to read."""
        return self._at_first_reader(lambda name: self.facts.optimizer.get(name, 0.0))

    def _at_first_reader(self, of: Callable[[str], float]) -> list[float]:
        out, seen = [0.0] * len(self.found.forward), set()
        for at, names in enumerate(parameters_read(self.graph, self.found)):
            out[at] += sum(of(name) for name in sorted(names - seen))
            seen |= names
        return out

    def saved_at(self) -> list[float]:
        """Per forward call the bytes that it makes for backward, of one micro-batch."""
        late = {self.base[x] for n in self.looped if n.meta.get("backward") for x in n.all_input_nodes}
        late = {x for x in late if x in self.looped and not x.meta.get("backward")}
        return self.per_place({x: float(self.nbytes(x)) for x in late})

    # -- once it is cut
    def staged(self, stages: Stages) -> Stagewise:
        """What each stage costs."""
        return _Staged(self, stages).all()


class _Staged:
    def __init__(self, work: Work, stages: Stages):
        self.work, self.stages = work, stages
        self.on = needed_on(work.graph, stages.of, stages.count)
        looped = [n for n in work.nodes if n in work.looped]
        self.part = parts(looped, stages.of, self.on.__getitem__, lambda a, b: b in work.looped)

    def all(self) -> Stagewise:
        count, of, work = self.stages.count, self.stages.of, self.work
        seconds: Counter[tuple[int, str]] = Counter()
        for node, took in work.seconds.items():
            if node.name in of:
                seconds[of[node.name], self.part[node, of[node.name]]] += took  # type: ignore[assignment]
        once = [0.0] * count
        for node, took in work.once.items():
            if node.name in of:
                once[of[node.name]] += took
        for name, took in work.facts.optimizer.items():
            for rank in self.stages.homes[name]:
                once[self._first(name, rank)] += took
        hops, edges, gradients = self._hops()
        resident, saved, between = self._resident(), *self._saved()
        costs = [
            StageCost(
                float(seconds[s, "F"]), float(seconds[s, "B"]), float(seconds[s, "W"]), resident[s],
                saved[s, "B"], saved[s, "W"], between[s],
            )
            for s in range(count)
        ]  # fmt: skip
        return Stagewise(Costs(tuple(costs), hops), tuple(once), edges, gradients)

    def _first(self, name: str, rank: int) -> int:
        """Of the stages that read a parameter the first on a rank, or the rank's first: it is there once."""
        placement = self.stages.placement
        return next((s for s in self.stages.parameters[name] if placement[s] == rank), placement.index(rank))

    def _resident(self) -> list[int]:
        out, work = [0] * self.stages.count, self.work
        for name, homes in self.stages.homes.items():
            for rank in homes:
                out[self._first(name, rank)] += work.state(name)
        for (node, _), extra in work.held.items():
            if node.name in self.stages.of:
                out[self.stages.of[node.name]] += extra
        for node in work.nodes:
            whole = node not in work.looped and work.base[node] is node and is_tensor(node)
            if whole and any(u in work.looped for u in node.users):
                for stage in self.on[node]:
                    out[stage] += work.nbytes(node)
        return out

    def _reads(self) -> Iterator[tuple[fx.Node, int, str]]:
        """(tensor, stage, part) of every read in a loop of what is in it."""
        for node in self.work.nodes:
            if node in self.work.looped:
                for stage in self.on[node]:
                    for x in node.all_input_nodes:
                        base = self.work.base[x]
                        if base in self.work.looped:
                            yield base, stage, self.part[node, stage]

    def _saved(self) -> tuple[Counter, Counter]:
        """Bytes that F saves, by (stage, part that lets go of them); bytes that B makes for W, by stage."""
        last: dict[tuple[fx.Node, int], str] = {}
        for base, stage, part in self._reads():
            last[base, stage] = max(last.get((base, stage), "F"), part, key="FBW".index)
        saved: Counter[tuple[int, str]] = Counter()
        between: Counter[int] = Counter()
        for (base, stage), part in last.items():
            made = self._made(base, stage)
            if made == "F" and part != "F":
                saved[stage, part] += self.work.nbytes(base)
            elif made == "B" and part == "W":
                between[stage] += self.work.nbytes(base)
        return saved, between

    def _made(self, base: fx.Node, stage: int) -> str:
        """The part that has a tensor first on a stage: that which makes it, or which it is received for."""
        own = self.part.get((base, stage))
        return own or ("B" if base.meta.get("backward") else "F")

    def _hops(self) -> tuple[dict[Edge, float], frozenset[Edge], frozenset[Edge]]:
        """Seconds by (from, to), gradients' ways among them; the edges of forward, and those of gradients."""
        of, placement, work = self.stages.of, self.stages.placement, self.work
        nbytes: Counter[Edge] = Counter()
        edges, gradients, sent = set(), set(), set()
        for node in work.nodes:
            here = of.get(node.name)
            if here is None or node not in work.looped:
                continue
            tensors = tensor_operands(node)
            for x in node.all_input_nodes:
                there = of.get(x.name)
                if there is None or x not in work.looped or placement[there] == placement[here]:
                    continue
                layout = work.placed.needs[node][tensors.index(x)] if x in tensors and not is_getitem(node) else None
                key = (x, placement[here], layout and id(layout))
                if key in sent:  # the rank has it, of another of its stages
                    continue
                sent.add(key)
                nbytes[there, here] += work.nbytes(x, layout)
                forward = there < here and self.part[x, there] == "F"
                edges.add((there, here) if there < here else (here, there))
                if not forward:
                    gradients.add((here, there) if there > here else (there, here))
        hops = {e: float(collective_seconds("permute", work.levels, float(n))) for e, n in nbytes.items()}
        return hops, frozenset(edges), frozenset(gradients)
