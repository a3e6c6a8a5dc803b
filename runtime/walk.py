"""One rank's way through a program of segments: which it runs when, and the values it keeps in between.

What is kept, and until when, `partitioner/kept.py` says. What is put together over micro-batches grows as they come:

    sum, max, min    the first is taken as it is, the second makes new memory unless the first is nobody else's,
                     further ones are added in place; a sum below 32 bits is kept in float32 until the last; what a
                     segment adds itself (`Segment.sums`) is given to it
    parts of a dim   are kept, and joined after the last
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch

from ..partitioner.kept import Kept, Key
from ..partitioner.layout import local_shape
from ..partitioner.mesh import TIME
from ..partitioner.program import Act, Collect, Program, summed_wide
from ..partitioner.transfer import Transfer, transfer_of
from .comm import Expect, Pause, Post, Wait, join, seen, take
from .rank_log import Log

Run = Callable[[int, "int | None", list[Any]], Generator[Any, Any, Sequence[Any]]]
"""From (segment, micro-batch, its inputs) to a program that returns what it gives. The list may be emptied."""

_FOLD: dict[str, tuple[Any, Any]] = {
    "sum": (torch.add, torch.Tensor.add_),
    "max": (torch.maximum, lambda a, b: torch.maximum(a, b, out=a)),
    "min": (torch.minimum, lambda a, b: torch.minimum(a, b, out=a)),
}


class _Coming:
    """Values on their way from another rank: the handle to wait for, and under which keys they are kept."""

    def __init__(self, handle: Any, keys: list[Any]):
        self.handle, self.keys = handle, keys


class Walk(Kept):
    """What one rank does in a step, worked out once."""

    def __init__(self, program: Program, rank: int):
        super().__init__(program, rank)
        self.rank = rank
        grid = self.grid = program.plan.grid
        self.joins: dict[str, tuple[Transfer, ...]] = {}
        for segment in program.segments:
            for c in segment.collects:
                ranks = [i * program.mesh.world_size + rank for i in range(self.count)]
                self.joins[c.whole] = tuple(transfer_of(c.step, grid, r) for r in ranks)
        self.values = {n.name: n.meta.get("val") for n in program.graph.fx.nodes}
        pipeline = [a for a in program.mesh.names if program.mesh.role(a) == "pipeline"]
        here = program.mesh.coord(rank)
        self.peers = (
            [program.mesh.rank_of(here | {pipeline[0]: i}) for i in range(program.mesh.sizes[pipeline[0]])]
            if pipeline
            else [rank]
        )
        self.for_backward: dict[str, set[int | None]] = {}
        for s in (program.segments[act.segment] for act in self.acts if act.kind == "run"):
            for name in s.reads if s.part not in ("", "F") else ():
                self.for_backward.setdefault(name, set()).add(s.stage)

    def _begin(self, inputs: dict[str, Any]) -> dict[tuple[str, int | None], Any]:
        kept: dict[tuple[str, int | None], Any] = {}
        for name, x in inputs.items():
            parts = enumerate(self._parts(name, x)) if name in self.program.timed else ((None, x),)
            kept |= {(name, i): part for i, part in parts}
        return kept

    def run(self, inputs: dict[str, Any], run: Run, log: Log | None = None) -> Generator[Any, Any, list[Any]]:
        """The program: returns the whole program's outputs. `inputs` is emptied; `log` is told what begins."""
        kept = self._begin(inputs)
        inputs.clear()  # what was cast or cut for the step is let go of at its last use
        forward: set[tuple[int | None, int | None]] = set()
        for act, dropped in zip(self.acts, self.dropped, strict=True):
            if log is not None:
                log.act(self.word(act), self.in_flight(kept, forward))
            if act.kind != "run":
                yield from self._pause(kept) if act.kind == "pause" else self._talk(act, kept)
                for key in dropped:
                    kept.pop(key, None)
                continue
            segment = self.program.segments[act.segment]
            at = {(segment.stage, act.micro_batch)}
            forward = forward | at if segment.part == "F" else forward - at if "W" in segment.part else forward
            yield from self._arrive((self.key(name, act) for name in segment.reads), kept)
            sums = segment.sums if act.micro_batch else ()
            given = [kept[self.key(name, act)] for name in segment.reads] + [kept[c.whole, None] for c in sums]
            joined = {self.key(c.part, act) for c in segment.collects}
            for key in dropped:
                if key not in joined:
                    kept.pop(key, None)
            values = yield from run(act.segment, act.micro_batch, given)
            del given
            kept |= zip((self.key(name, act) for name in segment.gives), values, strict=True)
            del values
            yield from self._arrive((self.key(c.part, act) for c in segment.collects), kept)
            for c in segment.collects:
                self._collect(c, act, kept)
            for key in dropped:
                kept.pop(key, None)
        yield from self._arrive([(name, None) for name in self.results if name is not None], kept)
        return [None if name is None else kept.get((name, None)) for name in self.results]

    def word(self, act: Act) -> str:
        """What an act is called in a trace."""
        if act.kind == "run":
            return self.program.segments[act.segment].word(act.micro_batch)
        return f"{act.kind} {', '.join(act.values)}".rstrip()

    def in_flight(self, kept: Iterable[Key], forward: set[tuple[int | None, int | None]]) -> int:
        """Pairs of a virtual stage and a micro-batch, of those between F and W, for which something is kept."""
        pairs = {(stage, i) for name, i in kept for stage in self.for_backward.get(name, ())}
        return len(pairs & forward)

    def _parts(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        """A rank's own part of an input ("local" inputs), cut into micro-batches."""
        layout, world = self.program.layouts[name], self.program.mesh.world_size
        spot = layout.spot_of(TIME)
        assert spot is not None
        shapes = [local_shape(layout, self.grid, i * world + self.rank) for i in range(self.count)]
        sizes = [shape[spot[0]] for shape in shapes]
        return list(x.split(sizes, spot[0]))

    def _pause(self, kept: dict[Any, Any]) -> Generator[Any, Any, None]:
        """Hand the outputs out, take their gradients in."""
        names = [self.results[i] for i in self.program.paused]
        yield from self._arrive([(n, None) for n in names if n is not None], kept)
        gradients = yield Pause(tuple(None if n is None else kept[n, None] for n in names))
        kept |= zip(((n, None) for n in self.tangents), gradients, strict=True)

    def _talk(self, act: Act, kept: dict[Any, Any]) -> Generator[Any, Any, None]:
        """Send values to a rank of another stage, or begin to receive them."""
        keys, peer = [self.key(name, act) for name in act.values], self.peers[act.peer]
        at = act.micro_batch or 0
        where = f"{', '.join(act.values)}" + ("" if act.micro_batch is None else f" of micro-batch {at}")
        if act.kind == "send":
            yield from self._arrive(keys, kept)
            yield Post(peer, tuple(kept[key] for key in keys), where)
            return
        rank = at * self.program.mesh.world_size + self.rank
        kinds = tuple(
            (local_shape(self.program.layouts[n], self.grid, rank), self.values[n].dtype) for n in act.values
        )
        coming = _Coming((yield Expect(peer, kinds, where)), keys)
        kept |= dict.fromkeys(keys, coming)

    def _arrive(self, keys: Iterable[Any], kept: dict[Any, Any]) -> Generator[Any, Any, None]:
        """Wait for those of the values that are still on their way."""
        for key in keys:
            coming = kept.get(key)
            if isinstance(coming, _Coming):
                values = take((yield Wait(coming.handle)))
                kept |= zip(coming.keys, values, strict=True)

    def _collect(self, c: Collect, act: Act, kept: dict[Any, Any]) -> None:
        part, whole, i = kept[self.key(c.part, act)], (c.whole, None), act.micro_batch
        assert i is not None
        if c.step.kind == "all_gather":
            joins = self.joins[c.whole]
            parts = [*kept.get(whole, ()), seen(part, joins[i])]
            kept[whole] = join(parts, joins[0]) if len(parts) == self.count else parts
            return
        first, further = _FOLD[c.step.op]
        if i == 0 or c.inside:
            kept[whole] = part
        elif i == 1:
            narrow = c.step.op == "sum" and summed_wide(part.dtype)
            if c.fresh and not narrow:
                further(kept[whole], part)
            else:
                kept[whole] = first(kept[whole].float() if narrow else kept[whole], part)
        else:
            further(kept[whole], part)
        if i == self.count - 1:
            kept[whole] = kept[whole].to(part.dtype)
