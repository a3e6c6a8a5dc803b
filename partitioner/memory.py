"""The memory model: the bytes that a rank holds over a step, by walking its lowered program as the runtime does.

    held(t) = parameters + optimizer state + buffers + inputs + constants    what rests
            + what the program has made by t and has not let go of           one block a storage: views share it
            + what the call at t holds only while it runs                    allocations.py
    peak    = max over t, the optimizer's step among them

Storages are freed after the last use of any name of them, as the generated code (`scripts.py`) and the walk over
segments (`held.py`) do; collectives hold what their comm does (`wires.py`). Of the ranks of a stage the one at 0 on
every other axis is taken: pieces are cut as `torch.chunk` does, so its are the largest. Gradients are made in the step:
those of the step before are dropped when it begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from .allocations import Calls, Spec, span
from .graph import is_tensor
from .held import Held
from .ledger import Moment
from .optimizer_bytes import ADAMW, Stepper
from .program import Program
from .scripts import Named, Scripts, Step
from .wires import NCCL, ONE_PROCESS


@dataclass(frozen=True)
class MemoryTimeline:
    """What one rank holds over a step.

    Attributes:
        rank: which.
        resident: by kind, the bytes that rest through the step; gradients, which are made in it, are not among them.
        gradients: bytes of the gradients that the step leaves.
        moments: one after another: the nodes of the rank's graph, or its acts; last the optimizer's step.
        peak: the most bytes at once.
        at, module: at which call (its node), of which module.
        standing: by (kind, module) what stands at the peak; what rests has no module.
    """

    rank: int
    resident: Mapping[str, int]
    gradients: int
    moments: tuple[Moment, ...] = field(repr=False)
    peak: int
    at: str
    module: str
    standing: Mapping[tuple[str, str], int] = field(repr=False)

    @property
    def by_kind(self) -> dict[str, int]:
        """What stands at the peak, by kind."""
        out: Counter[str] = Counter()
        for (kind, _), n in self.standing.items():
            out[kind] += n
        return {kind: n for kind, n in out.items() if n}


def timeline(
    program: Program, rank: int = 0, wire: str | None = None, stepper: Stepper = ADAMW, cuda: bool | None = None
) -> MemoryTimeline:
    """What a rank holds over a step.

    Args:
        wire: the comm that runs it (`wires.py`); by default NCCL on GPUs, all ranks in one process otherwise.
        stepper: the optimizer.
        cuda: whether ranks run on GPUs; by default whether the mesh is of GPUs.
    """
    return Model(program, wire, stepper, cuda).of(rank)


def first_ranks(program: Program) -> list[int]:
    """Of each index on the pipeline axis the rank at 0 on every other axis: it holds the largest pieces."""
    mesh = program.mesh
    other = [a for a in mesh.names if mesh.role(a) != "pipeline"]
    return [r for r in range(mesh.world_size) if all(mesh.coord(r)[a] == 0 for a in other)]


class Model:
    """The memory of one program; what calls allocate is worked out once for all ranks. See `timeline`."""

    def __init__(
        self, program: Program, wire: str | None = None, stepper: Stepper = ADAMW, cuda: bool | None = None
    ):
        self.program, self.stepper = program, stepper
        self.cuda = program.mesh.device.name != "cpu" if cuda is None else cuda
        vals = [n.meta["val"] for n in program.captured.fx.nodes if is_tensor(n)]
        calls = Calls(next((v.fake_mode for v in vals if hasattr(v, "fake_mode")), None), self.cuda)
        self.wire = wire or (NCCL if self.cuda else ONE_PROCESS)
        named = Named(_kinds(program), self.wire)
        constants = {k: Spec(tuple(t.shape), tuple(t.stride()), t.dtype) for k, t in program.constants.items()}
        self.constants = sum(map(span, constants.values()))
        self.scripts = Scripts(calls, named, constants)

    def of(self, rank: int) -> MemoryTimeline:
        """One rank's timeline."""
        held = Held(self.program, rank, self.scripts)
        resident = held.resident()
        resident["constants"] = self.constants
        resident["optimizer"] = self.stepper.state(held.shards)
        ledger = held.ledger
        for kind, n in resident.items():
            ledger.change(kind, "", n)
        ledger.look("the step's begin")
        results = held.run()
        ledger.most = ledger.now
        ledger.look("optimizer step", self.stepper.inside(held.shards, self.cuda))
        moments = (*held.moments, Moment("optimizer step", ledger.most, ledger.now))
        gradients = sum(n for (kind, _), n in ledger.standing.items() if kind == "gradients")
        del results
        name, module = (ledger.at.name, ledger.at.module) if isinstance(ledger.at, Step) else (str(ledger.at), "")
        then = {what: n for what, n in ledger.then.items() if n}
        rests = {kind: n for kind, n in resident.items() if n}
        return MemoryTimeline(rank, rests, gradients, moments, ledger.peak, name, module, then)

    def elements(self, rank: int) -> int:
        """Elements of the parameters that rest on a rank."""
        return Held(self.program, rank, self.scripts).elements()

    def peak(self) -> MemoryTimeline:
        """The timeline of the rank that holds most."""
        return max(map(self.of, first_ranks(self.program)), key=lambda t: t.peak)


def _kinds(program: Program) -> dict[str, str]:
    """Of values by name the kind of their bytes: gathered parameters, gradients that leave, what backward reads."""
    graph = program.graph
    found: dict[str, str] = {}
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if role.kind == "param":
            found[node.name] = "gathered"
    for node in graph.fx.nodes:
        forward = node.op == "call_function" and not node.meta.get("backward")
        if forward and any(u.meta.get("backward") for u in node.users):
            found[node.name] = "activations"
    for value, role in zip(graph.output_values, graph.outputs, strict=True):
        if value is not None and role.kind == "grad":
            found[value.name] = "gradients"
    return found
