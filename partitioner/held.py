"""One rank's step as blocks of memory: its graph played at one go, or its acts walked as `runtime/walk.py` walks them.

    run       a segment's inputs are let go of inside it where no later act needs them
    receive   the memory of what comes is made when the receive begins
    send      what is sent is held until the next send, or the end, where ranks are processes
    collect   the first part is taken as it is; a sum with the second is new memory unless nobody else has the first
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .allocations import Spec, contiguous, span
from .graph import is_tensor
from .kept import Kept
from .layout import local_shape
from .ledger import Block, Ledger, Moment
from .mesh import TIME
from .program import Act, Collect, Program, summed_wide
from .scripts import Script, Scripts
from .wires import ONE_PROCESS

Value = tuple[Any, Any]
"""The spec of a tensor (or a value that is none), and its block (None: counted elsewhere)."""


class Held:
    """Attributes:
    shards: per trained parameter that lives here and is stepped on the device, elements and dtype.
    moments: what was done so far.
    """

    def __init__(self, program: Program, rank: int, scripts: Scripts):
        self.program, self.rank, self.scripts = program, rank, scripts
        self.mesh, self.grid = program.mesh, program.plan.grid
        self.ledger = Ledger()
        self.moments: list[Moment] = []
        self.shards: list[tuple[int, torch.dtype]] = []
        self.sending: list[Value] = []
        self._alike: dict[int, bool] = {}
        placed = zip(program.graph.placeholders, program.graph.inputs, strict=True)
        self.roles = {n.name: role for n, role in placed}
        pairs = zip(program.graph.output_values, program.graph.outputs, strict=True)
        self.trained = {str(r.name) for v, r in pairs if v is not None and r.kind == "grad"}

    # -- what rests
    def resident(self) -> dict[str, int]:
        """By kind the bytes that the runtime holds through a step."""
        out: dict[str, int] = {"parameters": 0, "buffers": 0, "inputs": 0}
        for node, role in zip(self.program.graph.placeholders, self.program.graph.inputs, strict=True):
            if not is_tensor(node) or role.kind not in ("param", "buffer", "input"):
                continue
            dtype = self.program.captured.masters.get(str(role.name), node.meta["val"].dtype)
            nbytes = span(self._local(node.name, dtype))
            if role.kind != "param":
                out[role.kind + "s"] += nbytes
            elif self._lives(str(role.name)):
                out["parameters"] += nbytes
                if role.name in self.trained and role.name not in self.program.captured.away:
                    self.shards.append((nbytes // dtype.itemsize, dtype))
        return out

    def elements(self) -> int:
        """Elements of the parameters that rest here."""
        nodes = zip(self.program.graph.placeholders, self.program.graph.inputs, strict=True)
        mine = [n for n, role in nodes if role.kind == "param" and self._lives(str(role.name))]
        return sum(math.prod(self._shape(self.program.layouts[n.name], 0)) for n in mine)

    def _lives(self, name: str) -> bool:
        stages = self.program.plan.stages
        here = [i for a, i in self.mesh.coord(self.rank).items() if self.mesh.role(a) == "pipeline"]
        return stages is None or not here or here[0] in (stages.homes[name] or here)

    def _local(self, name: str, dtype: torch.dtype, micro_batch: int | None = None) -> Spec:
        """A value of this rank: of a micro-batch, or (None) of the step."""
        layout = self.program.layouts[name]
        if micro_batch is None and TIME in layout.split_axes:
            parts = [self._shape(layout, i) for i in range(self.program.plan.micro_batches)]
            at = layout.spot_of(TIME)
            assert at is not None
            rows = sum(shape[at[0]] for shape in parts)
            return contiguous((*parts[0][: at[0]], rows, *parts[0][at[0] + 1 :]), dtype)
        return contiguous(self._shape(layout, micro_batch or 0), dtype)

    def _shape(self, layout: Any, micro_batch: int) -> tuple[int, ...]:
        return local_shape(layout, self.grid, micro_batch * self.mesh.world_size + self.rank)

    # -- the step
    def run(self) -> list[Any]:
        """Walk the program; the blocks of what it leaves."""
        if self.program.segments:
            return self._walk()
        inputs = [self._given(n) for n in self.program.graph.placeholders]
        made = self.scripts.of(self.program.rank_graph(self.rank), inputs, self._tangents())
        blocks = [self._copy(n) for n in self.program.graph.placeholders]
        return made.play(blocks, self.ledger, self.moments)

    def _copy(self, node: Any) -> Block | None:
        """Of a parameter that rests in another dtype the working copy, made as the step begins."""
        role = self.roles.get(node.name)
        if role is None or role.kind != "param" or not self._lives(str(role.name)):
            return None
        copied = str(role.name) in self.program.captured.masters
        return self._block(self._given(node), "working copies") if copied else None

    def _given(self, node: Any) -> Any:
        return self._local(node.name, node.meta["val"].dtype) if is_tensor(node) else node.meta.get("val")

    def _tangents(self) -> tuple[Spec, ...]:
        graph = self.program.graph
        nodes = {r.name: n for n, r in zip(graph.placeholders, graph.inputs, strict=True) if r.kind == "tangent"}
        return tuple(self._given(nodes[i]) for i in self.program.tangents)

    def _walk(self) -> list[Any]:
        walk, kept = Kept(self.program, self.rank), {}
        for node in self.program.graph.placeholders:
            if node.name in self.program.timed:
                dtype = node.meta["val"].dtype
                parts = range(walk.count)
                kept |= {(node.name, i): (self._local(node.name, dtype, i), None) for i in parts}
            else:
                kept[node.name, None] = (self._given(node), self._copy(node))
        for act, dropped in zip(walk.acts, walk.dropped, strict=True):
            self.ledger.most = self.ledger.now
            if act.kind == "run":
                self._segment(act, dropped, walk, kept)
            elif act.kind == "pause":
                made = zip(walk.tangents, self._tangents(), strict=True)
                kept |= {(name, None): (spec, self._block(spec, "transients")) for name, spec in made}
            else:
                self._talk(act, walk, kept)
            for key in dropped:
                kept.pop(key, None)
            self.moments.append(Moment(self._name(act), self.ledger.most, self.ledger.now))
        self.sending = []
        return [None if name is None else kept.get((name, None)) for name in walk.results]

    def _name(self, act: Act) -> str:
        what = self.program.segments[act.segment].name if act.kind == "run" else act.kind
        return what if act.micro_batch is None else f"{what} of micro-batch {act.micro_batch}"

    def _block(self, spec: Any, kind: str) -> Block | None:
        return Block(self.ledger, span(spec), kind, "") if isinstance(spec, Spec) else None

    def _segment(self, act: Act, dropped: list[Any], walk: Kept, kept: dict[Any, Any]) -> None:
        segment = self.program.segments[act.segment]
        sums = segment.sums if act.micro_batch else ()
        given = [kept[walk.key(name, act)] for name in segment.reads] + [kept[c.whole, None] for c in sums]
        joined = {walk.key(c.part, act) for c in segment.collects}
        for key in dropped:
            if key not in joined:
                kept.pop(key, None)
        made = self._script(act, [spec for spec, _ in given])
        blocks = [block for _, block in given]
        del given
        results = made.play(blocks, self.ledger)
        for name, (_, spec), block in zip(segment.gives, made.gives, results, strict=True):
            kept[walk.key(name, act)] = (spec, block)
        del results
        for c in segment.collects:
            self._collect(c, act, walk, kept)

    def _script(self, act: Act, specs: list[Any]) -> Script:
        return self.scripts.of(self._graph(act), specs, ())

    def _graph(self, act: Act) -> Any:
        """The graph of a micro-batch; those that are the same in plain numbers are one (`runner.py` does so too)."""
        segment, world = self.program.segments[act.segment], self.mesh.world_size
        count = self.program.plan.micro_batches
        if act.segment not in self._alike:
            self._alike[act.segment] = segment.timed and segment.alike(count, world, self.rank)
        i = act.micro_batch or 0
        return segment.graph_at(min(i, 1) if self._alike[act.segment] and i != count - 1 else i, world, self.rank)

    def _talk(self, act: Act, walk: Kept, kept: dict[Any, Any]) -> None:
        keys = [walk.key(name, act) for name in act.values]
        if act.kind == "send":
            self.sending = [kept[key] for key in keys] if self.scripts.named.wire != ONE_PROCESS else []
            return
        for name, key in zip(act.values, keys, strict=True):
            spec = self._local(name, self._dtype(name), act.micro_batch or 0)
            kind = self.scripts.named.kinds.get(name, "transients")
            kept[key] = (spec, self._block(spec, kind))
        self.ledger.look(f"receive of {', '.join(act.values)}")

    def _dtype(self, name: str) -> torch.dtype:
        return next(n for n in self.program.graph.fx.nodes if n.name == name).meta["val"].dtype

    def _collect(self, c: Collect, act: Act, walk: Kept, kept: dict[Any, Any]) -> None:
        (spec, block), whole, i = kept[walk.key(c.part, act)], (c.whole, None), act.micro_batch
        last = i == walk.count - 1
        kind = self.scripts.named.kinds.get(c.whole, "transients")
        if c.step.kind == "all_gather":
            parts = [*kept.get(whole, ((), []))[1], block]
            kept[whole] = (spec, parts)
            if last:
                joined = self._local(c.whole, spec.dtype)
                kept[whole] = (joined, self._block(joined, kind))
                self.ledger.look(f"joined {c.whole}")
            return
        narrow = c.step.op == "sum" and summed_wide(spec.dtype)
        if i == 0 or c.inside:
            kept[whole] = (spec, block)
        elif i == 1 and (narrow or not c.fresh):
            wide = contiguous(spec.shape, torch.float32 if narrow else spec.dtype)
            beside = span(wide) if narrow else 0  # the first as float32, before the sum
            self.ledger.look(f"sum {c.whole}", span(wide) + beside)
            kept[whole] = (spec, self._block(wide, kind))
        if last and narrow and walk.count > 1:
            self.ledger.look(f"sum {c.whole}", span(spec))
            kept[whole] = (spec, self._block(spec, kind))
        if isinstance(kept[whole][1], Block):
            kept[whole][1].becomes(kind)
