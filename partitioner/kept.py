"""What a rank keeps between the acts of a program of segments, and after which act it lets go of it.

A value that differs from micro-batch to micro-batch is kept under (name, micro-batch), any other under (name, None);
each is let go of after the last act that reads or makes it, unless it leaves the program. The runtime walks by this,
and the memory model counts by it.
"""

from __future__ import annotations

from .program import Act, Program

Key = tuple[str, int | None]


class Kept:
    """Attributes:
    acts: what the rank does, in order.
    count: the number of micro-batches.
    results: per output of the program the name of its value.
    tangents: names of the gradients that come in at the pause.
    dropped: per act the keys that are not needed after it.
    """

    def __init__(self, program: Program, rank: int):
        self.program, self.acts = program, program.acts(rank)
        self.count = program.plan.micro_batches
        self.results = [v.name if v is not None else None for v in program.graph.output_values]
        inputs = zip(program.graph.placeholders, program.graph.inputs, strict=True)
        tangents = {int(role.name): node.name for node, role in inputs if role.kind == "tangent"}
        self.tangents = [tangents[i] for i in program.tangents]
        self.dropped = self._dropped()

    def _dropped(self) -> list[list[Key]]:
        needed: set[Key] = {(name, None) for name in self.results if name is not None}
        out: list[list[Key]] = []
        for act in reversed(self.acts):
            touched = dict.fromkeys(self._touched(act))
            out.append([key for key in touched if key not in needed])
            needed |= touched.keys()
        return out[::-1]

    def _touched(self, act: Act) -> list[Key]:
        """What an act reads or makes."""
        if act.kind == "pause":
            return [(name, None) for name in self.tangents]
        if act.kind != "run":
            return [self.key(name, act) for name in act.values]
        segment = self.program.segments[act.segment]
        names = (*segment.reads, *segment.gives, *(c.part for c in segment.collects))
        return [self.key(name, act) for name in names]

    def key(self, name: str, act: Act) -> Key:
        """Under which a value is kept; one that is read after all micro-batches is that of the last."""
        if name not in self.program.timed:
            return (name, None)
        return (name, self.count - 1 if act.micro_batch is None else act.micro_batch)
