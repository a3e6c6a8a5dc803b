"""Which values backward makes again so that the least time is lost: exactly, value by value, alike blocks together.

    per value v that only its own block reads, and a run of n alike blocks, whole numbers from 0 to n:
    has_v     in so many backward has v: n where backward itself reads it
    again_v   in so many of them it makes v again; in the others v is kept

    least   sum over calls of  seconds * again(call)              again(call): the most of its outputs
    where   has_u >= again(call)                                  for every operand u of the call
            at every moment, the first read of a value in a block's backward, what stands is at most the limit:
            kept of all * (often - 1) + kept of the runs before + kept of this one and not done with + made(moment)
            kept = sum of bytes_v * (has_v - again_v);  made(moment) = sum of bytes_v * there_v(moment)
            there_v(moment) = 1 if v is made again in a block and read by then, or what is made of it is there

An operand from outside of the block (what another block made) is kept where it was not yet, once for each block. The
conditions on values compare two numbers, so the i-th block of a run may be taken to make again what is made again in at
least i blocks, and has what is had in at least i: the conditions hold in each block alone. Blocks of a run stand one
after another; there are at most about `RUNS`. Seconds are those of a call on the busiest rank and of the reshards that
it waits for. Solved by HiGHS.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import highspy
import numpy as np
import torch.fx as fx

from .blocks import blocks
from .graph import Graph, is_getitem, tensor_operands
from .keep import Families, names_of, saved_by_pins
from .plan import Plan
from .saved import base, saved_values

RUNS, MOST = 8, 32
"""Blocks that are alike are taken together so that there are at most about so many runs of them; where there are more
than `MOST`, since neighbours differ, the programme would be too wide, and there is no choice."""

NODES, GAP = 300, 1e-3
"""HiGHS stops after so many nodes, or so near to the least: both the same on every rank, which a time would not be."""


@dataclass
class _Block:
    """One block. Values are numbered in program order; calls name the values that they make and read.

    Attributes:
        values: those that may be made again.
        nbytes, read: of each its bytes, and whether backward reads it.
        calls: seconds, the numbers of the outputs, those of the operands.
        outside: bytes of operands from elsewhere that are not kept yet, and the calls (by number) that read each.
        reads: of each value the places in backward where it is read, first and last; none: (-1, -1).
    """

    values: list[fx.Node] = field(default_factory=list)
    nbytes: list[float] = field(default_factory=list)
    read: list[bool] = field(default_factory=list)
    calls: list[tuple[float, list[int], list[int]]] = field(default_factory=list)
    outside: list[tuple[float, list[int]]] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)

    def key(self) -> str:
        return repr((self.nbytes, self.read, self.calls, self.outside))

    def moments(self) -> list[int]:
        return sorted({first for first, _ in self.reads if first >= 0})

    def makers(self) -> dict[int, list[int]]:
        """Per value the values that are made of it."""
        found: dict[int, list[int]] = defaultdict(list)
        for _, outs, operands in self.calls:
            for u in operands:
                found[u] += outs
        return found

    def last(self) -> list[int]:
        """Per value the last moment at which it may stand: its last read, or the first of what is made of it."""
        makers, found = self.makers(), [last for _, last in self.reads]
        for v in reversed(range(len(found))):
            found[v] = max([found[v], *(first if (first := self.reads[w][0]) >= 0 else found[w] for w in makers[v])])
        return found


class LeastAgain:
    """Args:
    local: bytes of a value on the busiest rank.
    often: micro-batches in flight.
    forced: names of the values that are made again in any case.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        pins: Mapping[str, str],
        local: Callable[[fx.Node], float],
        often: float,
        forced: frozenset[str] = frozenset(),
    ):
        assert graph.factored is not None
        self.graph, self.local, self.often, self.forced = graph, local, often, forced
        self.home, self.families = blocks(graph), Families(graph, graph.factored)
        pinned = saved_by_pins(graph, pins)
        self.inner = {v for v in self.families.inner(self.home) if v not in pinned}
        self.saved = saved_values(graph, graph.factored)
        self.seconds = _seconds(plan)
        self.place = {n: i for i, n in enumerate(graph.fx.nodes)}
        self.runs = self._runs()

    @property
    def kept(self) -> float:
        """Bytes of the values that may be made again, all kept."""
        return self.often * sum(map(self.local, self.inner & self.saved))

    @property
    def together(self) -> int:
        """The most blocks that are decided together."""
        return max(map(len, self.runs), default=0)

    def within(self, limit: float) -> frozenset[str] | None:
        """Names of the values to be made again, so that those kept, and what one block makes again, take at most
        `limit` bytes; None where nothing does, or there are too many runs."""
        if not 0 < len(self.runs) <= MOST:
            return None
        milp = _Milp(self.often, limit)
        for run in self.runs:
            milp.add(run[0], len(run), {i for i, v in enumerate(run[0].values) if v.name in self.forced})
        found = milp.solved()
        if found is None:
            return None
        made: set[fx.Node] = set()
        for run, (has, again) in zip(self.runs, found, strict=True):
            for i, block in enumerate(run):
                made |= {v for k, v in enumerate(block.values) if not has[k] > i >= again[k]}
        return names_of(self.families, made)

    def _runs(self) -> list[list[_Block]]:
        by_number: dict[int, list[fx.Node]] = defaultdict(list)
        for v in self.graph.fx.nodes:
            if v in self.inner:
                by_number[self.home[v]].append(v)
        made = [self._block(values) for _, values in sorted(by_number.items())]
        longest = -(-len(made) // RUNS)
        runs: list[list[_Block]] = []
        for block in made:
            if runs and len(runs[-1]) < longest and runs[-1][0].key() == block.key():
                runs[-1].append(block)
            else:
                runs.append([block])
        return runs

    def _block(self, values: list[fx.Node]) -> _Block:
        number = {v: i for i, v in enumerate(values)}
        reads = [self._reads(v) for v in values]
        block = _Block(values, [self.local(v) for v in values], [at[0] >= 0 for at in reads], reads=reads)
        makers: dict[fx.Node, list[int]] = defaultdict(list)
        for v in values:
            makers[v.args[0] if is_getitem(v) else v].append(number[v])  # type: ignore[index]
        outside: dict[fx.Node, list[int]] = defaultdict(list)
        for at, (call, outs) in enumerate(makers.items()):
            reads = {self._root(x) for x in tensor_operands(call)}
            block.calls.append((self.seconds[call.name], outs, sorted(number[x] for x in reads if x in number)))
            for x in sorted(reads - number.keys() - self.saved, key=lambda x: x.name):
                if x.op == "call_function":
                    outside[x].append(at)
        block.outside = [(self.local(x), at) for x, at in outside.items()]
        return block

    def _reads(self, value: fx.Node) -> tuple[int, int]:
        late = (u for v in self.families.of[value] for u in v.users if u.meta.get("backward"))
        at = [self.place[u] for u in late if u.op == "call_function"]
        return (min(at), max(at)) if at else (-1, -1)

    def _root(self, value: fx.Node) -> fx.Node:
        assert self.graph.factored is not None
        return value if is_getitem(value) else base(value, self.graph.factored)


def _seconds(plan: Plan) -> dict[str, float]:
    """Per call of forward its seconds, and those of the reshards of values that it waits for."""
    assert plan.facts is not None
    found = defaultdict(float, plan.facts.seconds)
    for move in plan.facts.moves:
        if not move.backward and not move.is_param:
            took = sum(t * n for t, n in zip(move.way.seconds, move.way.times, strict=True))
            for reader in move.readers[:1]:
                found[reader] += took
    return found


Row = tuple[float, dict[int, float]]
"""A lower bound, and the columns with their factors."""


class _Milp:
    """The programme; see above. Columns of a run: has and again per value, whether any of its blocks makes the value
    again, again per call, one per outer operand, and the bytes kept."""

    def __init__(self, often: float, limit: float):
        self.often, self.limit, self.unit = often, limit, max(1.0, limit)
        self.costs: list[float] = []
        self.upper: list[float] = []
        self.rows: list[Row] = []
        self.of: list[tuple[int, int]] = []
        self.kept: list[int] = []
        self.free: list[int] = []
        self.moments: list[tuple[int, dict[int, float]]] = []

    def _columns(self, n: int, upper: float, costs: Iterable[float] = ()) -> int:
        first = len(self.costs)
        self.costs += [*costs] or [0.0] * n
        self.upper += [upper] * n
        return first

    def add(self, block: _Block, blocks: int, forced: set[int]) -> None:
        n = len(block.values)
        has, again, some = self._columns(n, blocks), self._columns(n, blocks), self._columns(n, 1)
        calls = self._columns(len(block.calls), blocks, [c[0] for c in block.calls])
        outer, whole = self._columns(len(block.outside), blocks), self._columns(1, np.inf)
        kept: Row = (0.0, {whole: 1.0})
        for v, nbytes in enumerate(block.nbytes):
            if block.read[v]:
                self.rows.append((blocks, {has + v: 1.0}))
            self.rows.append((0.0, {has + v: 1.0, again + v: -1.0}))
            self.rows.append((0.0, {some + v: float(blocks), again + v: -1.0}))
            if v in forced:
                self.rows.append((0.0, {again + v: 1.0, has + v: -1.0}))
            kept[1].update({has + v: -nbytes / self.unit, again + v: nbytes / self.unit})
        for c, (_, outs, operands) in enumerate(block.calls):
            self.rows += [(0.0, {calls + c: 1.0, again + v: -1.0}) for v in outs]
            self.rows += [(0.0, {has + u: 1.0, calls + c: -1.0}) for u in operands]
        for o, (nbytes, readers) in enumerate(block.outside):
            self.rows += [(0.0, {outer + o: 1.0, calls + c: -1.0}) for c in readers]
            kept[1][outer + o] = -nbytes / self.unit
        self.rows.append(kept)
        self.kept.append(whole)
        self.of.append((has, n))
        for moment in block.moments():
            self._moment(block, moment, (has, again, some), alone=blocks == 1)

    def _moment(self, block: _Block, moment: int, columns: tuple[int, int, int], alone: bool) -> None:
        """What stands in a block of the run at a moment, beside what is kept of the runs up to it."""
        has, again, some = columns
        n, last, makers = len(block.values), block.last(), block.makers()
        there = self._columns(n, 1.0)
        self.free += range(there, there + n)
        stands: dict[int, float] = {}
        for v, nbytes in enumerate(block.nbytes):
            part = nbytes / self.unit
            if last[v] < moment:
                if alone:  # kept, but done with
                    stands.update({has + v: part, again + v: -part})
                continue
            stands[there + v] = -part
            if 0 <= block.reads[v][0] <= moment:
                self.rows.append((0.0, {there + v: 1.0, some + v: -1.0}))
            self.rows += [(-1.0, {there + v: 1.0, there + w: -1.0, some + v: -1.0}) for w in makers[v]]
        self.moments.append((len(self.of) - 1, stands))

    def _limits(self) -> list[Row]:
        """Per moment what stands."""
        others, mine = max(self.often - 1, 0.0), min(self.often, 1.0)
        rows = []
        for i, stands in self.moments:
            kept = {c: -(others + (mine if k <= i else 0.0)) for k, c in enumerate(self.kept)}
            rows.append((-self.limit / self.unit, kept | stands))
        return rows

    def solved(self) -> list[tuple[list[int], list[int]]] | None:
        """Per run has and again, by value."""
        rows = [*self.rows, *self._limits()]
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.costs), len(rows)
        lp.col_cost_, lp.col_lower_ = np.array(self.costs) / (max(self.costs) or 1.0), np.zeros(len(self.costs))
        lp.col_upper_ = np.array(self.upper)
        lp.row_lower_, lp.row_upper_ = np.array([r[0] for r in rows]), np.full(len(rows), np.inf)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate(([0], np.cumsum([len(r[1]) for r in rows])))
        lp.a_matrix_.index_ = np.array([c for r in rows for c in r[1]])
        lp.a_matrix_.value_ = np.array([x for r in rows for x in r[1].values()])
        whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        free = {*self.kept, *self.free}
        lp.integrality_ = [real if c in free else whole for c in range(len(self.costs))]
        solver = highspy.Highs()
        quiet = (("log_to_console", False), ("output_flag", False))
        for option, value in (*quiet, ("threads", 1), ("mip_max_nodes", NODES), ("mip_rel_gap", GAP)):
            solver.setOptionValue(option, value)
        solver.passModel(lp)
        solver.run()
        if solver.getInfo().primal_solution_status != 2:  # none that holds
            return None
        x = np.rint(solver.getSolution().col_value).astype(int).tolist()
        return [(x[at : at + n], x[at + n : at + 2 * n]) for at, n in self.of]
