"""The search for a mesh: shapes of so many devices, each planned, those that a bound rules out left alone.

    free       node, gpu, and gpu cut in two: axes without roles, on which the planner may do anything
    roles      dp x tp, tp inside a node; dp_replicate x dp_shard x tp where data ranks go on in other nodes
    pipeline   pp x these, pp between nodes first

    bound of dp x tp on the sizes of a free shape   that of the free plan: roles only restrict
    bound of pp x dp x tp                           that of the plan of dp x tp on one stage's ranks, over pp

A shape whose bound is above the least seconds found is not planned. Of shapes within `CLOSE` of the fastest the first
of the simplest kind is taken: roles before free axes, no pipeline before one, few axes before many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from .errors import PlanError
from .graph import Graph
from .heads import fitted_mesh
from .mesh import Mesh
from .micro import batch_sizes
from .pipeline import Asked
from .plan import Plan
from .planner import Options
from .stage_search import plan_step, simulated
from .summary import columns
from .units import bytes_text, seconds_text

CLOSE = 0.01
"""Relative; what is so close to the fastest may be chosen for being simpler."""

MOST_STAGES = 16


@dataclass(frozen=True)
class Machine:
    """Devices in nodes. `inside`, `between`: names of links, None for the device's own."""

    devices: int
    per_node: int
    device: str | None = None
    inside: str | None = None
    between: str = "ib-ndr"

    def mesh(self, axes: Mapping[str, int]) -> Mesh:
        """A mesh of these axes, the last innermost; one that does not fit into a node has the link between nodes."""
        links, inner = {}, 1
        for name, n in reversed(list(axes.items())):
            inner *= n
            link = self.inside if inner <= self.per_node else self.between
            links |= {name: link} if link is not None else {}
        return Mesh(device=self.device, links=links, **axes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Shape:
    """A mesh that may be planned. `kind`: "roles", "free", "pipeline"."""

    kind: str
    axes: tuple[tuple[str, int], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.axes)

    @property
    def simplicity(self) -> tuple[int, int]:
        return ("roles", "free", "pipeline").index(self.kind), len(self.axes)

    def __str__(self) -> str:
        return ", ".join(f"{a}={n}" for a, n in self.axes)


@dataclass(frozen=True)
class Row:
    """What became of a shape: its plan and the seconds of a step, or why there is none."""

    shape: Shape
    mesh: Mesh
    plan: Plan | None = None
    seconds: float = 0.0
    why: str = ""


@dataclass
class Search:
    """Rows of all shapes. `bounds`: seconds that no plan of these axes goes below."""

    graph: Graph
    machine: Machine
    options: Options
    micro_batches: int | str
    schedule: str
    rows: list[Row] = field(default_factory=list)
    bounds: dict[tuple[tuple[str, int], ...], float] = field(default_factory=dict)

    def run(self) -> None:
        n, per_node = self.machine.devices, self.machine.per_node
        for shape in (*free_shapes(n, per_node), *role_shapes(n, per_node)):
            self._try(shape, self._free_bound(shape))
        found = []
        for shape in pipeline_shapes(n, per_node):
            if why := self._batch_fault(shape):
                self.rows.append(Row(shape, self.machine.mesh(dict(shape.axes)), why=why))
            else:
                found.append((self._stage_bound(shape), shape))
        for bound, shape in sorted(found, key=lambda f: f[0]):
            self._try(shape, bound)

    @property
    def fastest(self) -> float:
        return min((r.seconds for r in self.rows if r.plan is not None), default=float("inf"))

    @property
    def best(self) -> Row:
        """Raises:
        PlanError: no shape has a plan.
        """
        planned = [r for r in self.rows if r.plan is not None]
        if not planned:
            said = "\n".join(f"  {r.shape}: {r.why}" for r in self.rows)
            raise PlanError(f"no mesh of {self.machine.devices} devices can be planned:\n{said}")
        close = [r for r in planned if r.seconds <= self.fastest * (1 + CLOSE)]
        return min(close, key=lambda r: (*r.shape.simplicity, r.seconds))

    def _free_bound(self, shape: Shape) -> float:
        """Of the free shape that has the same sizes."""
        alike = [b for axes, b in self.bounds.items() if tuple(n for _, n in axes) == shape.sizes]
        return max(alike, default=0.0)

    def _stage_bound(self, shape: Shape) -> float:
        """A perfect pipeline of the plan on the ranks of one stage."""
        pp, *rest = shape.axes
        inner = tuple(rest)
        if inner not in self.bounds:
            options = replace(self.options, memory=None)
            self.bounds[inner] = 0.0
            if inner:
                made = self._planned(self.machine.mesh(dict(inner)), options, 1)[1]
                self.bounds[inner] = _bound(made)
        return self.bounds[inner] / pp[1]

    def _try(self, shape: Shape, bound: float) -> None:
        mesh = self.machine.mesh(dict(shape.axes))
        if why := self._batch_fault(shape):
            self.rows.append(Row(shape, mesh, why=why))
            return
        if bound > self.fastest * (1 + CLOSE):
            self.rows.append(Row(shape, mesh, why=f"not planned: no plan takes less than {seconds_text(bound)}"))
            return
        try:
            graph, plan = self._planned(mesh, self.options, self.micro_batches)
        except PlanError as fault:
            self.rows.append(Row(shape, mesh, why=str(fault).partition("\n")[0]))
            return
        seconds = simulated(graph, plan)[0] if plan.schedule is not None else sum(plan.seconds)
        if shape.kind != "pipeline":
            self.bounds[shape.axes] = _bound(plan)
        self.rows.append(Row(shape, mesh, plan, seconds))

    def _planned(self, mesh: Mesh, options: Options, micro_batches: int | str) -> tuple[Graph, Plan]:
        asked = Asked(self.schedule, micro_batches)
        return plan_step(self.graph, fitted_mesh(mesh, self.graph), options, micro_batches, asked)

    def _batch_fault(self, shape: Shape) -> str:
        """Data ranks without a part of the batch."""
        least, ranks = (
            min(batch_sizes(self.graph), default=0),
            math.prod(n for a, n in shape.axes if a.startswith("dp")),
        )
        return f"a batch of {least} has no part for each of {ranks} data ranks" if 0 < least < ranks else ""

    def table(self) -> tuple[str, ...]:
        """Lines: the fastest first, then what was not planned."""
        best = self.best
        head = ("mesh", "a step", "compute", "sent", "a rank sends", "at rest")
        lines: list[tuple[str, ...]] = [(*head, "")]
        for row in sorted(self.rows, key=lambda r: (r.plan is None, r.seconds)):
            lines.append((str(row.shape), *_cells(row), _verdict(row, best)))
        return tuple(columns(lines, right=(1, 2, 3, 4, 5), indent=""))


def _bound(plan: Plan) -> float:
    """Seconds that no plan is below; of one that makes values again none is known."""
    return 0.0 if plan.recompute else sum(plan.seconds) / (1 + (plan.gap or 0.0))


def _cells(row: Row) -> tuple[str, ...]:
    if row.plan is None or row.plan.facts is None:
        return ("-",) * 5
    stages = dict(row.shape.axes).get("pp", 1)
    compute, sent = (s / stages for s in row.plan.seconds)  # of a mean stage
    facts = row.plan.facts
    bytes_sent = sum(t.sent for t in facts.traffic.values())
    times = (seconds_text(s) for s in (row.seconds, compute, sent))
    return (*times, bytes_text(bytes_sent), bytes_text(sum(facts.at_rest.values())))


def _verdict(row: Row, best: Row) -> str:
    if row.plan is None:
        return row.why
    schedule = row.plan.schedule
    how = f"{schedule.name}, {schedule.micro_batches} micro-batches; " if schedule is not None else ""
    if row is best:
        return how + "chosen"
    more = row.seconds / best.seconds - 1
    return how + (f"{more:.1%} slower" if more > CLOSE else "as fast within 1 %, less simple")


# -- shapes
def _kept(kind: str, **axes: int) -> Shape:
    """Axes of one rank are left out."""
    return Shape(kind, tuple((a, n) for a, n in axes.items() if n > 1))


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def free_shapes(devices: int, per_node: int) -> Iterator[Shape]:
    """node x gpu, and gpu cut in two."""
    nodes = devices // per_node
    yield _kept("free", node=nodes, gpu=per_node)
    for k in divisors(per_node)[1:-1]:
        yield _kept("free", node=nodes, gpu_outer=per_node // k, gpu=k)


def role_shapes(devices: int, per_node: int) -> Iterator[Shape]:
    """Data ranks that fill a node and go on in others are two axes, each with its own link."""
    for t in divisors(min(devices, per_node)):
        if devices % t == 0 and (axes := _data_axes(devices // t, per_node // t)):
            yield _kept("roles", **axes, tp=t)


def pipeline_shapes(devices: int, per_node: int) -> Iterator[Shape]:
    for pp in (k for k in divisors(devices)[1:] if k <= MOST_STAGES):
        stage = devices // pp
        for shape in role_shapes(stage, per_node):
            yield _kept("pipeline", pp=pp, **dict(shape.axes))


def _data_axes(ranks: int, in_node: int) -> dict[str, int]:
    """Of so many data ranks, of which a node holds `in_node`; empty where they do not fill nodes."""
    if ranks <= in_node or in_node == 1:
        return {"dp": ranks}
    return {"dp_replicate": ranks // in_node, "dp_shard": in_node} if ranks % in_node == 0 else {}
