"""A rank's graph as what it does to memory, node by node: a list of steps that can be gone through many times.

Storages are freed where the generated code lets go of the last name of them (`graph.last_uses`). A slot holds the block
of one tensor, a list of blocks of a call with several outputs, or None for what is counted elsewhere (what rests) or
is no tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch.utils._pytree import tree_map

from .allocations import Calls, Output, Spec, contiguous, span
from .graph import last_uses
from .ledger import Block, Ledger, Moment
from .transfer import pause, start, wait
from .wires import Use, use

CALL, GET, START, WAIT, PAUSE = range(5)


@dataclass(frozen=True)
class Named:
    """What is known of values by name: of some what kind of bytes they are; and the comm that moves them."""

    kinds: Mapping[str, str]
    wire: str


@dataclass(frozen=True, slots=True)
class Step:
    """One node.

    Attributes:
        reads: the slots of its operands.
        new: bytes of new storages, of a wait or a pause its results.
        inside: of a call, the most bytes while it runs.
        outputs: of a call, per output the operand or, as -1 - k, the new storage; an int where it is one tensor.
        frees: the slots let go of after it.
    """

    what: int
    slot: int
    name: str
    module: str
    kind: str
    reads: tuple[int, ...] = ()
    new: tuple[int, ...] = ()
    inside: int = 0
    outputs: Any = None
    frees: tuple[int, ...] = ()
    use: Use | None = None


Head = tuple[int, str, str, str]
"""Of a step its slot, name, module and kind."""


@dataclass(frozen=True)
class Script:
    """Attributes:
    unread: slots of inputs that nothing reads.
    gives: per output its slot (None where there is none) and its spec.
    """

    steps: tuple[Step, ...]
    inputs: int
    unread: tuple[int, ...]
    gives: tuple[tuple[int | None, Any], ...]

    def play(self, blocks: list[Any], ledger: Ledger, moments: list[Moment] | None = None) -> list[Any]:
        """Go through it with the blocks of its inputs (the list is emptied); the blocks of its outputs."""
        held: dict[int, Any] = dict(enumerate(blocks))
        blocks.clear()
        for slot in self.unread:
            del held[slot]
        for step in self.steps:
            if moments is not None:
                ledger.most = ledger.now
            held[step.slot] = _DO[step.what](step, held, ledger)
            for slot in step.frees:
                del held[slot]
            if moments is not None:
                moments.append(Moment(step.name, ledger.most, ledger.now))
        return [None if slot is None else held[slot] for slot, _ in self.gives]


@dataclass(slots=True)
class _Handle:
    """A collective under way."""

    use: Use
    operands: list[Any]
    copied: Block | None
    received: Block | None
    results: list[Block]


def _call(step: Step, held: dict[int, Any], ledger: Ledger) -> Any:
    ledger.look(step, step.inside, step.module)
    made = [Block(ledger, n, step.kind, step.module) for n in step.new]

    def block(source: Any) -> Any:
        if not isinstance(source, int):
            return None
        found = made[-1 - source] if source < 0 else held[step.reads[source]]
        if isinstance(found, Block):
            found.becomes(step.kind)
        return found

    return [block(s) for s in step.outputs] if isinstance(step.outputs, tuple) else block(step.outputs)


def _get(step: Step, held: dict[int, Any], ledger: Ledger) -> Any:
    found = held[step.reads[0]]
    found = found[step.inside] if isinstance(found, list) else found
    if isinstance(found, Block):
        found.becomes(step.kind)
    return found


def _start(step: Step, held: dict[int, Any], ledger: Ledger) -> _Handle:
    assert step.use is not None
    used, module = step.use, step.module
    copied = Block(ledger, used.copied, "collectives", module) if used.copied else None
    received = Block(ledger, used.received, "collectives", module) if used.received else None
    results = [Block(ledger, n, step.kind, module) for n in step.new] if used.results == "early" else []
    ledger.look(step)
    return _Handle(used, [held[s] for s in step.reads] if used.keeps else [], copied, received, results)


def _wait(step: Step, held: dict[int, Any], ledger: Ledger) -> list[Any]:
    handle: _Handle = held[step.reads[0]]
    lie = handle.use.results
    if lie == "early":
        out: list[Any] = handle.results
    elif lie == "operand":
        out = list(handle.operands)
    elif lie == "own":
        out = [Block(ledger, n, step.kind, step.module) for n in step.new]
    else:
        out = [handle.copied if lie == "copied" else handle.received] * len(step.new)
    ledger.look(step)
    handle.operands, handle.copied, handle.received, handle.results = [], None, None, []
    return out


def _pause(step: Step, held: dict[int, Any], ledger: Ledger) -> list[Any]:
    made = [Block(ledger, n, "transients", step.module) for n in step.new]
    ledger.look(step)
    return made


_DO = {CALL: _call, GET: _get, START: _start, WAIT: _wait, PAUSE: _pause}


class Scripts:
    """Scripts of graphs, worked out once: of a graph and the specs of its inputs."""

    def __init__(self, calls: Calls, named: Named, constants: Mapping[str, Spec]):
        self.calls, self.named, self.constants = calls, named, constants
        self._known: dict[Any, tuple[Script, fx.Graph]] = {}

    def of(self, graph: fx.Graph, inputs: Sequence[Any], tangents: tuple[Spec, ...]) -> Script:
        """`inputs`: per placeholder its `Spec`, or a value that is no tensor. `tangents`: what comes in at a pause."""
        key = (id(graph), tuple(x if isinstance(x, Spec) else str(x) for x in inputs))
        if key not in self._known:
            made = _Writer(graph, self.calls, self.named, self.constants, tangents).script(inputs)
            self._known[key] = (made, graph)
        return self._known[key][0]


class _Writer:
    def __init__(
        self, graph: fx.Graph, calls: Calls, named: Named, constants: Mapping[str, Spec], tangents: tuple[Spec, ...]
    ):
        self.graph, self.calls, self.named, self.constants = graph, calls, named, constants
        self.tangents = tangents
        self.slot = {n: i for i, n in enumerate(graph.nodes)}
        self.env: dict[fx.Node, Any] = {}
        self.dead = last_uses(graph)

    def script(self, inputs: Sequence[Any]) -> Script:
        given, steps, unread = iter(inputs), [], []
        gives: tuple[tuple[int | None, Any], ...] = ()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = next(given)
                unread += [self.slot[node]] if not node.users else []
            elif node.op == "output":
                gives = tuple((None, None) if x is None else (self.slot[x], self.env[x]) for x in node.args[0])
            else:
                steps.append(self._step(node))
        return Script(tuple(steps), len(inputs), tuple(unread), gives)

    def _step(self, node: fx.Node) -> Step:
        name = str(node.meta.get("of", node.name))
        frees = tuple(self.slot[x] for x in self.dead.get(node, ())) + (() if node.users else (self.slot[node],))
        module = str(node.meta.get("module") or "")
        head: Head = (self.slot[node], name, module, self.named.kinds.get(name, "transients"))
        args = tree_map(lambda x: self.env[x] if isinstance(x, fx.Node) else x, node.args)
        if node.op == "get_attr":
            self.env[node] = self.constants[str(node.target)]
            return Step(CALL, *head, frees=frees)
        if node.target is start:
            return self._start(node, args, head, frees)
        if node.target is wait:
            self.env[node] = args[0][0]
            kind = args[0][1]
            new = tuple(span(s) for s in args[0][0])
            return Step(WAIT, *head[:3], kind, (self.slot[node.args[0]],), new, frees=frees)  # type: ignore[index]
        if node.target is pause:
            self.env[node] = self.tangents
            return Step(PAUSE, *head, new=tuple(span(s) for s in self.tangents), frees=frees)
        if node.target is operator.getitem:
            self.env[node] = args[0][args[1]]
            return Step(GET, *head, (self.slot[node.args[0]],), inside=args[1], frees=frees)  # type: ignore[index]
        return self._call(node, args, head, frees)

    def _start(self, node: fx.Node, args: Any, head: Head, frees: tuple[int, ...]) -> Step:
        transfers, *operands = args
        results = tuple(contiguous(t.out_shape, s.dtype) for t, s in zip(transfers, operands, strict=True))
        sent, got = [span(s) for s in operands], tuple(span(s) for s in results)
        used = use(self.named.wire, transfers, sent, got, bool(node.kwargs.get("consume", False)))
        gathers = all(self.named.kinds.get(x.name) == "gathered" for x in node.args[1:])  # type: ignore[union-attr]
        kind = "gathered" if gathers else "transients"
        self.env[node] = (results, kind)
        reads = tuple(self.slot[x] for x in node.args[1:])  # type: ignore[index]
        return Step(START, *head[:3], kind, reads, got, frees=frees, use=used)

    def _call(self, node: fx.Node, args: Any, head: Head, frees: tuple[int, ...]) -> Step:
        kwargs = tree_map(lambda x: self.env[x] if isinstance(x, fx.Node) else x, dict(node.kwargs))
        effect = self.calls.effect(node.target, args, kwargs)  # type: ignore[arg-type]
        self.env[node] = tree_map(_spec, effect.outputs, is_leaf=lambda x: isinstance(x, Output))
        operands: list[fx.Node] = []
        fx.map_arg((node.args, dict(node.kwargs)), operands.append)
        reads = tuple(self.slot[x] for x in operands if isinstance(self.env[x], Spec))
        outs = effect.outputs
        sources = tuple(map(_source, outs)) if isinstance(outs, tuple) else _source(outs)
        return Step(CALL, *head, reads, effect.new, effect.inside, sources, frees)


def _spec(x: Any) -> Any:
    return x.spec if isinstance(x, Output) else x


def _source(x: Any) -> int | None:
    return x.source if isinstance(x, Output) else None
