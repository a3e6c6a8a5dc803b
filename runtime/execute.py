"""A per-rank fx graph as generated Python: one line a node, values freed after their last use.

    def rank0(inputs):
        x, w = inputs; inputs.clear()
        y = aten_mm(x, w); del x, w  # model.py:12
        h = yield Start(transfers, (y,), 'model.py:12', False); del y
        r = take((yield Wait(h))); del h
        z = r[0]; del r
        return (z,)

The graph's `start`, `wait` and `pause` nodes become yields (`comm`); everything else is a direct call with its target
bound as a global. A line that raises is found again by its number, so tracing a fault to its node costs nothing.
"""

from __future__ import annotations

import itertools
import linecache
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..partitioner import transfer
from ..partitioner.graph import last_uses
from .comm import Pause, Program, Start, Wait, take
from .faults import RankError

_serial = itertools.count()
_PLAIN = (int, float, bool, str, bytes, type(None), type(...))


@dataclass(frozen=True)
class RankProgram:
    """One rank's program: calling it with a list of inputs gives a generator of requests. The list is emptied.

    Attributes:
        source: the generated Python.
        axes: the sets of axes it communicates over.
        nodes: line number -> (node name, the user's source line).
    """

    name: str
    source: str
    function: Callable[[list[Any]], Program]
    axes: frozenset[tuple[str, ...]]
    nodes: dict[int, tuple[str, str]] = field(repr=False)

    def __call__(self, inputs: list[Any]) -> Program:
        return self.function(inputs)


def compile_rank(graph: fx.Graph, name: str = "rank0", constants: Mapping[str, Any] | None = None) -> RankProgram:
    """The graph as a generator function.

    Args:
        constants: the values of `get_attr` nodes, by target.

    Raises:
        ValueError: a node of a kind that a per-rank graph cannot hold, or a `get_attr` without its constant.
    """
    writer = _Writer(graph, constants or {})
    body, nodes = writer.lines()
    fault = writer.bind("rank_error", lambda error: _fault(name, nodes, error))
    lines = [f"def {_identifier(name)}({writer.inputs}):", "    try:", *body]
    lines += [f"    except {writer.bind('Exception', Exception)} as error:", f"        raise {fault}(error) from error"]
    lines += ["    yield  # never reached: makes a program without requests a generator too"]
    source = "\n".join(lines) + "\n"
    filename = f"<meshwright {name} #{next(_serial)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = writer.scope
    exec(compile(source, filename, "exec"), scope)
    return RankProgram(name, source, scope[_identifier(name)], frozenset(writer.axes), nodes)


def _fault(name: str, nodes: dict[int, tuple[str, str]], error: Exception) -> RankError:
    """The error with the node whose line raised: the first frame of the traceback is the program's own."""
    trace = error.__traceback__
    node, where = nodes.get(trace.tb_lineno if trace else 0, ("", ""))
    return RankError(name, error, node, where)


def _identifier(text: str) -> str:
    text = re.sub(r"\W", "_", text)
    return text if not text[:1].isdigit() else f"_{text}"


class _Writer:
    """Writes the lines of one graph and collects the globals they use in `scope`."""

    FIRST_LINE = 3

    def __init__(self, graph: fx.Graph, constants: Mapping[str, Any]):
        self.graph, self.constants = graph, constants
        self.taken = {n.name for n in graph.nodes} | {"error"}
        self.scope: dict[str, Any] = {"__builtins__": {}}
        self.names: dict[int, str] = {}
        self.axes: set[tuple[str, ...]] = set()
        self.inputs = self._fresh("inputs")
        self.last_used = last_uses(graph)

    def _fresh(self, name: str) -> str:
        name = _identifier(name)
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def bind(self, name: str, value: Any) -> str:
        """The global that holds `value`, named like `name`."""
        if id(value) not in self.names:
            self.names[id(value)] = self._fresh(name)
            self.scope[self.names[id(value)]] = value
        return self.names[id(value)]

    def lines(self) -> tuple[list[str], dict[int, tuple[str, str]]]:
        nodes: dict[int, tuple[str, str]] = {}
        body = [self._unpack()]
        for node in self.graph.nodes:
            if node.op == "placeholder":
                continue
            where = " ".join(str(node.meta.get("where", "") or node.kwargs.get("where", "")).split())
            nodes[self.FIRST_LINE + len(body)] = (node.name, where)
            body.append(self._line(node) + (f"  # {where}" if where else ""))
        return ["        " + line for line in body], nodes

    def _unpack(self) -> str:
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        if not placeholders:
            return f"{self.inputs}.clear()"
        names = ", ".join(n.name for n in placeholders)
        unused = [n.name for n in placeholders if not n.users]
        line = f"[{names}] = {self.inputs}; {self.inputs}.clear()"
        return line + (f"; del {', '.join(unused)}" if unused else "")

    def _line(self, node: fx.Node) -> str:
        if node.op == "output":
            return f"return {self._text(node.args[0])}"
        value = self._value(node)
        line = f"{node.name} = {value}" if node.users else value
        dead = self.last_used.get(node, ())
        return line + (f"; del {', '.join(n.name for n in dead)}" if dead else "")

    def _value(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            if node.target not in self.constants:
                raise ValueError(f"node {node.name} reads {node.target!r}, which is not among the constants given")
            return self.bind(str(node.target), self.constants[str(node.target)])
        if node.op != "call_function":
            raise ValueError(f"node {node.name}: a per-rank graph holds call_function nodes only, not {node.op}")
        if node.target is transfer.start:
            return self._start(node)
        if node.target is transfer.wait:
            return f"{self.bind('take', take)}((yield {self.bind('Wait', Wait)}({self._text(node.args[0])})))"
        if node.target is transfer.pause:
            return f"{self.bind('take', take)}((yield {self.bind('Pause', Pause)}({self._text(node.args[0])})))"
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        return self._call(node)

    def _start(self, node: fx.Node) -> str:
        transfers, *tensors = node.args
        where = str(node.kwargs.get("where", "") or node.meta.get("where", ""))
        consume = bool(node.kwargs.get("consume", False))
        bound = tuple(transfers)  # type: ignore[arg-type]
        self.axes |= {t.axes for t in bound}
        kept = self.bind(f"to_{node.name}", bound)
        return f"yield {self.bind('Start', Start)}({kept}, {self._text(tuple(tensors))}, {where!r}, {consume})"

    def _call(self, node: fx.Node) -> str:
        arguments = [self._text(a) for a in node.args]
        arguments += [f"{k}={self._text(v)}" for k, v in node.kwargs.items()]
        target = node.target
        assert callable(target)
        return f"{self.bind(_target_name(target), target)}({', '.join(arguments)})"

    def _text(self, value: Any) -> str:
        """An argument as source: nodes by name, plain constants inline, others bound."""
        if isinstance(value, fx.Node):
            return value.name
        if type(value) in (tuple, torch.Size):
            return "(" + "".join(self._text(v) + ", " for v in value).strip() + ")"
        if isinstance(value, list):
            return "[" + ", ".join(self._text(v) for v in value) + "]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            parts = ", ".join(self._text(v) for v in (value.start, value.stop, value.step))
            return f"{self.bind('slice', slice)}({parts})"
        if type(value) in _PLAIN and not (isinstance(value, float) and value - value != 0):
            return repr(value)
        return self.bind(_value_name(value), value)


def _target_name(target: Callable[..., Any]) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default").replace(".", "_").replace("::", "_")
    return getattr(target, "__name__", type(target).__name__)


def _value_name(value: Any) -> str:
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format, torch.device)):
        return str(value).removeprefix("torch.")
    return type(value).__name__.lower()
