"""The captured program: one flat ATen graph of forward, loss and backward, and what its inputs and outputs are.

The graph is a plain `torch.fx.Graph` with a flat calling convention: every placeholder is one tensor (or the step
number), the output is one tuple. Each node carries in its meta `val` (a fake tensor), `module` (the fully qualified
name of the module that made it), `where` (the user's source line), `backward` (whether it belongs to the backward
pass) and `seq`: a number that a backward call shares with the forward call it is the backward of, which is the first in
the graph that has it (calls after it that no gradient goes through have it too); or None.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

if TYPE_CHECKING:
    from .precision import Precision


@dataclass(frozen=True)
class Role:
    """What one input or output of the graph is.

    Kinds of inputs: "param", "buffer", "input" (name: index among the call's tensors), "tangent" (name: index among the
    outputs), "scale" (of the loss: the 0-d float32 tensor that backward starts from), "step" (the number of the step, a
    python int). Kinds of outputs: "output" (name: index among the output's tensors), "grad" (name: the parameter),
    "input_grad", "new_buffer", "new_input" (values after the call of what the program updates in place), "none" (no
    value).
    """

    kind: str
    name: str | int

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Graph:
    """A captured program.

    Attributes:
        fx: the graph.
        inputs: per placeholder its role.
        outputs: per element of the output tuple its role; the element itself may be None (no gradient).
        constants: tensors that the program holds, by the target of their get_attr node.
        result: a function from the list of output tensors to what the model returns.
        input_names: per tensor of the call its path ("x", "batch.ids"), for messages and the plan.
        batch: per tensor of the call the dim that is its batch, or None.
        factored: the factors of its dims (`factors.Factored`), once the planner has worked them out.
        precision: what the program computes in; None for the dtypes of the model itself.
        masters: {parameter: the dtype in which it rests}, of those whose placeholder is a working copy in another.
        away: the parameters whose optimizer state rests on the host, or in files, and is stepped there (`offload.py`).
        traced: calls written out in simpler ops so far (`decompose.py`); its copies share it.
    """

    fx: fx.Graph
    inputs: tuple[Role, ...]
    outputs: tuple[Role, ...]
    constants: dict[str, torch.Tensor]
    result: Any = None
    input_names: tuple[str, ...] = ()
    batch: tuple[int | None, ...] = ()
    notes: tuple[str, ...] = field(default=())
    precision: Precision | None = None
    masters: Mapping[str, torch.dtype] = field(default_factory=dict)
    away: frozenset[str] = frozenset()
    factored: Any = field(default=None, repr=False, compare=False)
    traced: dict[Any, fx.Graph] = field(default_factory=dict, repr=False, compare=False)

    @property
    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.fx.nodes if n.op == "placeholder"]

    @property
    def output_node(self) -> fx.Node:
        return next(n for n in reversed(self.fx.nodes) if n.op == "output")

    @property
    def output_values(self) -> tuple[fx.Node | None, ...]:
        return tuple(self.output_node.args[0])  # type: ignore[arg-type]

    def copy(self) -> Graph:
        """The same program in a graph of its own, with the same node names."""
        return self.twin()[0]

    def twin(self) -> tuple[Graph, dict[fx.Node, fx.Node]]:
        """A copy, and of each node the one that is it there."""
        made, seen = fx.Graph(), {}
        made.output(made.graph_copy(self.fx, seen))
        return replace(self, fx=made, factored=None), seen

    def calls(self) -> Iterator[fx.Node]:
        """The nodes that compute; getitem only names one output of its producer and is left out."""
        return (n for n in self.fx.nodes if n.op == "call_function" and not is_getitem(n))


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def is_tensor(node: Any) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a call, in the order rules count them: args, then kwargs, lists walked."""
    found: list[fx.Node] = []
    _visit(node.args, found)
    if node.kwargs:
        _visit(node.kwargs.values(), found)
    return found


def _visit(xs: Iterable[Any], found: list[fx.Node]) -> None:
    for x in xs:
        if isinstance(x, fx.Node):
            if isinstance(x.meta.get("val"), torch.Tensor):
                found.append(x)
        elif isinstance(x, (list, tuple)):
            _visit(x, found)
        elif isinstance(x, dict):
            _visit(x.values(), found)


def values_of(node: fx.Node) -> tuple[fx.Node | None, ...]:
    """Per output of a call the node that stands for it: the node itself, or its getitems (None where unused)."""
    val = node.meta.get("val")
    if not isinstance(val, (tuple, list)):
        return (node,)
    found: list[fx.Node | None] = [None] * len(val)
    for user in node.users:
        if is_getitem(user):
            found[user.args[1]] = user  # type: ignore[index]
    return tuple(found)


def where(node: fx.Node) -> str:
    """The user's source line of a node, or its module, or its name: the best there is for a message."""
    return node.meta.get("where") or node.meta.get("module") or node.name


def as_key(graph: fx.Graph) -> Any:
    """What a per-rank graph does, in a form that can be compared and hashed."""
    return tuple([(n.name, n.target, _plain(n.args), _plain(n.kwargs)) for n in graph.nodes])


def _plain(x: Any) -> Any:
    if isinstance(x, fx.Node):
        return ("node", x.name)
    if isinstance(x, (list, tuple)):
        return tuple([_plain(y) for y in x])
    if isinstance(x, dict):
        return tuple([(k, _plain(v)) for k, v in x.items()])
    if isinstance(x, slice):
        return (slice, x.start, x.stop, x.step)
    return (type(x), x if x == x else str(x))


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Of each node, the values it is the last to use; what the output returns is never freed."""
    seen: set[fx.Node] = set()
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                if node.op != "output":
                    out.setdefault(node, []).append(used)
    return out
