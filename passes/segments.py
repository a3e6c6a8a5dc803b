"""Cut a program with micro-batches or stages into the segments that its ranks run, and say when they run.

Before:  one mesh-wide graph in which some nodes are of every micro-batch and some of none, each on its stage
After:   a graph for every phase (`phases.py`), stage and part (forward, input gradients, weight gradients), and what
         each index of the pipeline axis does in which order; values keep their names

In a loop the schedule says what a rank does next; between loops a segment runs when what it reads is there. A value
that another stage reads is sent once to each such stage: with the forward or the gradients of its micro-batch, or, if
it is from an earlier phase, before the first segment that reads it.

Laws: `act_laws.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch.fx as fx

from ..partitioner.graph import Graph, Role, is_getitem
from ..partitioner.parts import parts
from ..partitioner.placement import Placement
from ..partitioner.program import Act, Collect, summed_wide
from ..partitioner.schedules.action import Action
from ..partitioner.schedules.post_ahead import post_ahead
from ..partitioner.schedules.schedule import Schedule
from ..partitioner.schedules.send_recv import with_transfers
from ..partitioner.schedules.validate import validate
from ..partitioner.stages import needed_on
from .accumulate import adds_one
from .aliases import may_alias
from .draft import Draft
from .overwrite import own_inputs
from .pause import HANDED_OUT
from .phases import Phases, phases

PAUSE = (1, 0)
"""The moment at which an "autograd" program hands its outputs out."""

Slot = tuple[int, int, int, str]
"""Where a node runs: (phase, hop in the phase, stage, part); the part is "" outside loops, else "F", "B" or "W"."""


@dataclass
class Part:
    """A segment in the making: a draft of its own, and how it hangs together with the others."""

    name: str
    draft: Draft
    timed: bool
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    collects: tuple[Collect, ...]
    where: tuple[int, int | None, str]
    """Its phase, its virtual stage, if there are any, and its part."""


@dataclass
class Segmented:
    """Attributes:
    parts: the segments.
    acts: per index on the pipeline axis what it does.
    timed: names of the values that differ from micro-batch to micro-batch.
    """

    parts: list[Part] = field(default_factory=list)
    acts: list[list[Act]] = field(default_factory=list)
    timed: frozenset[str] = frozenset()


def segments(draft: Draft) -> Segmented:
    return _Cutter(draft).run()


class _Cutter:
    def __init__(self, draft: Draft):
        self.draft, self.plan = draft, draft.plan
        self.when: Phases = phases(draft)
        self.placement = self.plan.stages.placement if self.plan.stages else (0,)
        self.nodes = [n for n in draft.graph.fx.nodes if n in self.when.of]
        self.of = self._stages()
        self.on = needed_on(draft.graph, self.of, len(self.placement)) if self.plan.stages else {}
        self.hop = self._hops()
        self.part = self._parts()
        self.autograd = draft.form == "autograd"
        self.schedules: dict[int, Schedule] = {}
        self.out = Segmented(timed=frozenset(n.name for n in self.when.timed))

    # -- where nodes run
    def stages(self, node: fx.Node) -> frozenset[int]:
        """The stages that make a node."""
        return self.on.get(node, frozenset()) if self.plan.stages else frozenset({0})

    def _making(self, node: fx.Node) -> Iterable[int]:
        """The stages that make a node; of those on one rank, one alone adds up what all of them have parts of."""
        stages = self.stages(node)
        if node not in self.when.collects:
            return stages
        return {self.placement[s]: s for s in sorted(stages, reverse=True)}.values()

    def _stages(self) -> dict[str, int]:
        """Per name of a call or a step of a reshard its stage.

        A step is done where its value is made; one that backward needs of a forward value, where it is read.
        """
        if self.plan.stages is None:
            return {}
        of = dict(self.plan.stages.of)
        for node in self.nodes:
            source = next((x for x in node.all_input_nodes if x.name in of), None)
            if node.name in of or source is None:
                continue
            if source.meta.get("backward") or not node.meta.get("backward"):
                of[node.name] = of[source.name]
        return of

    def _hops(self) -> dict[fx.Node, int]:
        """Between loops: how many times what a node reads has gone from stage to stage in its phase.

        Backward waits for its readers: what it makes of forward values alone, such as those made again, would else be
        made beside forward, and stand until it is read.
        """
        out: dict[fx.Node, int] = {}
        for node in self.nodes:
            near = [x for x in node.all_input_nodes if self._between(x, node) and x not in self.when.collects]
            out[node] = max((out[x] + self._hop(x, node) for x in near), default=0)
        for node in reversed(self.nodes):
            near = [u for u in node.users if self._between(node, u) and node not in self.when.collects]
            if node.meta.get("backward") and near:
                out[node] = min(out[u] - self._hop(node, u) for u in near)
        for node in self.nodes:  # what a call gives leaves its segment one by one
            if is_getitem(node) and self.when.of[node] % 2 == 0:
                out[node] = out[node.args[0]]  # type: ignore[index]
        return out

    def _between(self, x: fx.Node, reader: fx.Node) -> bool:
        """Whether both run in one phase between loops."""
        return self.when.of.get(x) == self.when.of.get(reader) and self.when.of[reader] % 2 == 0

    def _hop(self, x: fx.Node, reader: fx.Node) -> bool:
        return not self.stages(reader) <= self.stages(x)

    def _parts(self) -> dict[tuple[fx.Node, int], str]:
        """In loops, per node and stage: forward, on the way to another stage's gradients, or neither."""
        if self.plan.stages is None:
            return {}
        phase = self.when.of
        looped = [n for n in self.nodes if phase[n] % 2]
        return parts(looped, self.of, self.stages, lambda a, b: phase.get(a) == phase.get(b))

    def slot(self, node: fx.Node, stage: int) -> Slot:
        return (self.when.of[node], self.hop[node], stage, self.part.get((node, stage), ""))

    # -- the whole
    def run(self) -> Segmented:
        slots: dict[Slot, list[fx.Node]] = {}
        for node in self.nodes:
            for stage in self._making(node):
                slots.setdefault(self.slot(node, stage), []).append(node)
        numbers: dict[Slot, int] = {}
        for slot, nodes in sorted(slots.items(), key=lambda pair: (*pair[0][:3], "FBW".find(pair[0][3]))):
            numbers[slot] = len(self.out.parts)
            self.out.parts.append(self._part(slot, nodes))
        merged = self._merged(slots, numbers)
        sends = _Sends(self, slots)
        self.out.acts = [self._acts(rank, slots, numbers, merged, sends) for rank in range(max(self.placement) + 1)]
        self._mark_own()
        return self.out

    def _mark_own(self) -> None:
        acts = [act for of_rank in self.out.acts for act in of_rank]
        running = {act.segment for act in acts if act.kind == "run"}
        leaving = [v.name for v in self.draft.graph.output_values if v is not None]
        own_inputs([self.out.parts[i] for i in sorted(running)], (v for act in acts for v in act.values), leaving)

    def _merged(self, slots: dict[Slot, list[fx.Node]], numbers: dict[Slot, int]) -> dict[Slot, int]:
        """Of the stages whose schedule makes both gradients at one go, the segments that do."""
        schedule, out = self.plan.schedule, {}
        if schedule is None or not any(a.kind == "BW" for order in schedule.orders for a in order):
            return out
        order = {n: i for i, n in enumerate(self.nodes)}
        for phase, hop, stage, part in list(slots):
            b, w = (phase, hop, stage, "B"), (phase, hop, stage, "W")
            if part == "W" and b in slots and w in slots:
                both = sorted({*slots[b], *slots[w]}, key=order.__getitem__)
                out[b] = len(self.out.parts)
                self.out.parts.append(self._part((phase, hop, stage, "BW"), both))
        return out

    def _acts(
        self, rank: int, slots: dict[Slot, list], numbers: dict[Slot, int], merged: dict[Slot, int], sends: _Sends
    ) -> list[Act]:
        acts: list[Act] = []
        for phase, hop in sorted({s[:2] for s in slots} | sends.moments() | ({PAUSE} if self.autograd else set())):
            acts += sends.before(rank, phase, hop)
            acts += [Act("pause")] if self.autograd and (phase, hop) == PAUSE else []
            mine = [s for s in numbers if s[:2] == (phase, hop) and self.placement[s[2]] == rank]
            if phase % 2 == 0:
                acts += [Act(segment=numbers[s]) for s in mine]
            elif self.autograd:
                continue
            elif self.plan.schedule is None:
                acts += [
                    Act(segment=numbers[s], micro_batch=i) for i in range(self.plan.micro_batches) for s in mine
                ]
            else:
                acts += self._scheduled(rank, phase, numbers, merged, sends)
        return acts

    def _scheduled(
        self, rank: int, phase: int, numbers: dict[Slot, int], merged: dict[Slot, int], sends: _Sends
    ) -> list[Act]:
        """One loop: the actions of the schedule that there is something to do for."""
        acts: list[Act] = []
        for action in self._schedule(phase, sends).orders[rank]:
            if action.other is not None:
                acts += sends.during(phase, action)
                continue
            b, w = (phase, 0, action.stage, "B"), (phase, 0, action.stage, "W")
            at = {"F": [(phase, 0, action.stage, "F")], "B": [b], "W": [w], "BW": [b, w]}[action.kind]
            if action.kind == "BW" and b in merged:
                acts.append(Act(segment=merged[b], micro_batch=action.micro))
            else:
                acts += [Act(segment=numbers[s], micro_batch=action.micro) for s in at if s in numbers]
        return acts

    def _schedule(self, phase: int, sends: _Sends) -> Schedule:
        """The schedule with what is sent in a loop, proved legal; receives are started ahead of what waits for them."""
        if phase not in self.schedules:
            assert self.plan.schedule is not None
            edges = sends.edges(phase)
            ordered = with_transfers(self.plan.schedule, *edges)
            validate(ordered, *edges)
            ahead = post_ahead(ordered)
            validate(ahead, *edges, mode="async")
            self.schedules[phase] = ahead
        return self.schedules[phase]

    # -- one segment
    def _part(self, slot: Slot, nodes: list[fx.Node]) -> Part:
        draft, when = self.draft, self.when
        mine = {n for n in nodes if n not in when.collects}
        collects = [n for n in nodes if n in when.collects]
        outside = dict.fromkeys(x for n in nodes if n in mine for x in n.all_input_nodes if x not in mine)
        reads = [x for x in outside if x.op != "get_attr"]
        gives = [n for n in nodes if n in mine and any(self._elsewhere(u, slot[2], mine) for u in n.users)]
        graph, new = fx.Graph(), {}
        roles = dict(zip(draft.graph.placeholders, draft.graph.inputs, strict=True))
        for x in reads:
            new[x] = graph.placeholder(x.name)
            new[x].meta, new[x].name = dict(x.meta), x.name
        for n in (*(x for x in outside if x.op == "get_attr"), *nodes):
            if n in mine or n.op == "get_attr":
                new[n] = graph.node_copy(n, new.__getitem__)
                new[n].name = n.name
        graph.output(tuple(new[n] for n in gives))
        inner = Graph(
            graph,
            tuple(roles.get(x, Role("value", x.name)) for x in reads),
            tuple(_role(draft, n) for n in gives),
            draft.graph.constants,
        )
        timed = slot[0] % 2 == 1
        joins = tuple(_collect(c, mine) for c in collects)
        made = replace(
            draft,
            graph=inner,
            placement=_of_these(draft.placement, new, mine),
            factored=replace(draft.factored, calls={new[n]: c for n, c in draft.factored.calls.items() if n in mine}),
            established=("primitives-chain",),
        )
        reads_, gives_ = tuple(x.name for x in reads), tuple(n.name for n in gives)
        where = (slot[0], None if self.plan.stages is None else slot[2], slot[3])
        return Part(self._name(slot), made, timed, reads_, gives_, joins, where)

    def _elsewhere(self, user: fx.Node, stage: int, mine: set[fx.Node]) -> bool:
        """Whether a reader runs in another segment: what is free may run in this one and in others."""
        return user not in mine or (user.name in self.of and stage not in self.stages(user))

    def _name(self, slot: Slot) -> str:
        phase, hop, stage, part = slot
        name = f"phase {phase}" + (f".{hop}" if hop else "")
        return name if self.plan.stages is None else f"{name} stage {stage}" + (f" {part}" if part else "")


def _collect(node: fx.Node, mine: set[fx.Node]) -> Collect:
    part, step = node.args
    assert isinstance(part, fx.Node)
    alone = adds_one(part) if is_getitem(part) else not may_alias(part)
    fresh = part.op == "call_function" and len(part.users) == 1 and alone
    is_sum = step.kind == "all_reduce" and step.op == "sum"  # type: ignore[union-attr]
    inside = fresh and is_sum and part in mine and not summed_wide(part.meta["val"].dtype)
    return Collect(part.name, node.name, step, fresh, inside)  # type: ignore[arg-type]


def _of_these(placed: Placement, new: dict[fx.Node, fx.Node], mine: set[fx.Node]) -> Placement:
    return Placement(
        {new[n]: s for n, s in placed.splits.items() if n in mine},
        {new[n]: s for n, s in placed.needs.items() if n in mine},
        {new[n]: layout for n, layout in placed.layouts.items() if n in new},
    )


def _role(draft: Draft, node: fx.Node) -> Role:
    """Of the program where the value leaves it."""
    at = [i for i, v in enumerate(draft.graph.output_values) if v is node]
    return draft.graph.outputs[at[0]] if at else Role("value", node.name)


class _Sends:
    """What goes from stage to stage: (value, source stage, target stage), by when it goes."""

    def __init__(self, cutter: _Cutter, slots: dict[Slot, list[fx.Node]]):
        self.cutter, self.placement = cutter, cutter.placement
        self.early: dict[tuple[int, int], dict[tuple[fx.Node, int, int], None]] = {}
        self.in_loop: dict[tuple[int, str, int, int], dict[fx.Node, None]] = {}
        sent: set[tuple[fx.Node, int]] = set()
        for slot, nodes in sorted(slots.items(), key=lambda pair: pair[0][:2]):
            for node in nodes:
                for x in node.all_input_nodes:
                    self._sent(x, slot, sent)
        last = (cutter.when.last + 1, 0)
        for value, stage, paused in self._leaving():
            self._early(PAUSE if paused else last, value, stage, sent)

    def _sent(self, x: fx.Node, slot: Slot, sent: set) -> None:
        cutter, (phase, hop, stage, _) = self.cutter, slot
        if x.op in ("placeholder", "get_attr") or stage in cutter.stages(x):
            return
        if phase % 2 == 1 and cutter.when.of[x] == phase and x not in cutter.when.collects:
            source = min(cutter.stages(x))
            if self.placement[source] == self.placement[stage] or (x, self.placement[stage]) in sent:
                return
            sent.add((x, self.placement[stage]))
            forward = cutter.part[x, source] == "F" and source < stage
            kind = "F" if forward else "B"
            self.in_loop.setdefault((phase, kind, source, stage), {})[x] = None
        else:
            self._early((phase, hop), x, stage, sent)

    def _early(self, moment: tuple[int, int], x: fx.Node, stage: int, sent: set) -> None:
        homes = self.cutter.stages(x)
        there = self.placement[stage]
        if not homes or there in {self.placement[s] for s in homes} or (x, there) in sent:
            return
        sent.add((x, there))
        self.early.setdefault(moment, {})[x, min(homes), stage] = None

    def _leaving(self) -> Iterable[tuple[fx.Node, int, bool]]:
        """What leaves the program, the stages where it must be, and whether at the pause: a gradient at home,
        everything else everywhere."""
        cutter = self.cutter
        if cutter.plan.stages is None:
            return
        for value, role in zip(cutter.draft.graph.output_values, cutter.draft.graph.outputs, strict=True):
            if value is None or value.op != "call_function":
                continue
            homes = cutter.plan.stages.homes[str(role.name)] if role.kind == "grad" else range(max(self.placement) + 1)
            for rank in homes:
                yield value, self.placement.index(rank), cutter.autograd and role.kind in HANDED_OUT

    def moments(self) -> set[tuple[int, int]]:
        return set(self.early)

    def before(self, rank: int, phase: int, hop: int) -> list[Act]:
        """Everything is sent before anything is waited for."""
        out, into = [], []
        often = range(self.cutter.plan.micro_batches)
        for x, source, target in self.early.get((phase, hop), ()):
            a, b = self.placement[source], self.placement[target]
            for i in often if x in self.cutter.when.timed else (None,):
                if rank == a:
                    out.append(Act("send", values=(x.name,), micro_batch=i, peer=b))
                if rank == b:
                    into.append(Act("receive", values=(x.name,), micro_batch=i, peer=a))
        return out + into

    def edges(self, phase: int) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """(edges of forward, those along which gradients come back) of a loop, for `with_transfers`."""
        forward = {(a, b) for p, kind, a, b in self.in_loop if p == phase and kind == "F"}
        back = {(b, a) for p, kind, a, b in self.in_loop if p == phase and kind == "B"}
        return forward | back, back

    def during(self, phase: int, action: Action) -> list[Act]:
        assert action.other is not None
        sends = action.kind.startswith("SEND")
        ends = (action.stage, action.other) if sends else (action.other, action.stage)
        values = tuple(x.name for x in self.in_loop.get((phase, action.kind[-1], *ends), ()))
        if not values:
            return []
        kind = "send" if sends else "receive"
        return [Act(kind, values=values, micro_batch=action.micro, peer=self.placement[action.other])]
