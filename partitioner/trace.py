"""Tracing by one dispatch mode below autograd and functionalisation: a call of Python an op, forward and backward.

    user's forward, then torch.autograd.grad  ->  autograd  ->  functionalisation (both C++)  ->  Tracer  ->  fx nodes

Inputs are fake tensors in functional wrappers, so in-place ops and updates of buffers reach the tracer as plain ops and
new values. What an op makes is computed once for each (op, shapes, other arguments) and remembered: the layers of a
model are alike. Each node gets its final meta as it is made. What this way cannot hold (sizes that depend on data,
higher-order ops, ops that change real tensors) raises `Unquick`, and `aot.py` traces the call instead.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.fx as fx

from . import compat
from .call import Call, Joint, grad_role, update_role
from .graph import Role
from .lines import user_line
from .rules.loss import DECOMPOSITIONS

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PURE = ("aten", "prims", "meshwright")


class Unquick(Exception):
    """The call cannot be traced in this way."""


@dataclass(frozen=True)
class _Op:
    """What the tracer does with an op: `instead` of recording it, its name in the graph, whether `made` remembers."""

    name: str = ""
    instead: Callable | None = None
    remember: bool = False


class _Form:
    """The dtype, device, shape and strides of tensors: one object for all that are alike, so that keys are cheap."""


_UNKNOWN = _Form()
"""The form of a tensor whose form does not tell all about it: results from it are not remembered."""


@dataclass
class _Scope:
    """Where the program is: its module, whether in backward, and per forward call of autograd its (line, module)."""

    module: str = ""
    backward: bool = False
    places: dict[int, tuple[str, str]] = field(default_factory=dict)


class Tracer(compat.DispatchMode):
    """Records the ATen calls below it.

    Attributes:
        graph: what has been recorded.
        scope: where the program is; who walks the modules writes it.
        constants: tensors that the program holds beside its parameters and buffers.
        stopped: why the tracer gave up; "" if it did not.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: Any):
        super().__init__()
        self.graph, self.scope = fx.Graph(), _Scope()
        self.constants: dict[str, torch.Tensor] = {}
        self.stopped = ""
        self.mode = mode
        self._nodes: dict[int, tuple[fx.Node, _Form]] = {}  # by id: a node's meta keeps its tensor alive
        self._forms: dict[tuple, _Form] = {}
        self._ops: dict[Any, _Op] = {}
        self._made: dict[tuple, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is compat.device_op:
            return args[0].fake_device
        op = self._ops.get(func) or self._learn(func, args)
        kwargs = kwargs or {}
        if op.instead is not None:
            with self:
                return op.instead(*args, **kwargs)
        key: list[Any] = [func]
        operands = tuple([self._operand(x, key) for x in args])
        named = {}
        for name, x in kwargs.items():
            key.append(name)
            named[name] = self._operand(x, key)
        out = self._result(op, key, func, args, kwargs)
        if out is not None and not isinstance(out, (torch.Tensor, tuple, list)):
            if isinstance(out, _SYMBOLIC):
                self._stop(f"{func} gives a number that depends on data")
            return out  # a number that shapes alone decide is a constant of the graph
        node = self.graph.create_node("call_function", func, operands, named, op.name)
        return self._record(node, out)

    def _stop(self, why: str) -> NoReturn:
        """Gives up, also where the program catches the error."""
        self.stopped = why
        raise Unquick(why)

    def _learn(self, func: Any, args: tuple) -> _Op:
        """What to do with an op met for the first time."""
        if not isinstance(func, torch._ops.OpOverload):
            self._stop(f"{func} is a higher-order op")
        if func._schema.is_mutable:
            self._stop(f"{func} changes a tensor in place")
        packet = func._overloadpacket.__name__
        if func in DECOMPOSITIONS:
            op = _Op(instead=DECOMPOSITIONS[func])
        elif compat.is_composite(func, args):
            op = _Op(instead=func.decompose)
        else:
            op = _Op(name=self.graph._target_to_str(packet), remember=func.namespace in _PURE)
        self._ops[func] = op
        return op

    def _operand(self, x: Any, key: list[Any]) -> Any:
        """An argument as a node holds it; what decides the op's result goes into the key."""
        if isinstance(x, torch.Tensor):
            node, form = self._nodes.get(id(x)) or self._constant(x)
            key.append(form)
            return node
        kind = type(x)
        key.append(kind)  # 1, 1.0 and True are equal as dict keys
        if isinstance(x, (list, tuple)):
            key.append(len(x))
            return [self._operand(y, key) for y in x]
        if isinstance(x, _SYMBOLIC):
            self._stop("a size depends on data")
        key.append(x)
        return x

    def _constant(self, t: torch.Tensor) -> tuple[fx.Node, _Form]:
        """A tensor that no recorded call made: the program holds it."""
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = t
        node = self.graph.create_node("get_attr", name)
        node.meta = self._meta()
        node.meta["val"] = t if compat.is_fake(t) else self.mode.from_tensor(t)
        self._nodes[id(t)] = node, _UNKNOWN
        return self._nodes[id(t)]

    def _result(self, op: _Op, key: list[Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the op gives, as fresh fake tensors: remembered, or computed and remembered."""
        if not op.remember or _UNKNOWN in key:
            return self._computed(func, args, kwargs)
        known = tuple(key)
        build = self._made.get(known)
        if build is not None:
            return build()
        out = self._computed(func, args, kwargs)
        build = compat.maker(out, self.mode)
        if build is not None:
            self._made[known] = build
        return out

    def _computed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        with self.mode:
            out = func(*args, **kwargs)
            # an op may hand back its operand; a node needs a value of its own
            return out.detach() if isinstance(out, torch.Tensor) and id(out) in self._nodes else out

    def _record(self, node: fx.Node, out: Any) -> Any:
        node.meta = meta = self._meta()
        if isinstance(out, torch.Tensor):
            self._value(node, out)
        elif out is not None:
            meta["val"] = out
            for i, x in enumerate(out):
                if isinstance(x, torch.Tensor):
                    item = self.graph.create_node("call_function", operator.getitem, (node, i), {})
                    item.meta = dict(meta)
                    self._value(item, x)
        return out

    def _value(self, node: fx.Node, t: torch.Tensor) -> None:
        node.meta["val"] = t
        self._nodes[id(t)] = node, self._form(t)

    def _form(self, t: Any) -> _Form:
        if t.constant is not None or t.layout is not torch.strided:
            return _UNKNOWN
        shape = tuple(t.shape)
        for n in shape:
            if type(n) is not int:
                self._stop("a size depends on data")
        key = (t.dtype, t.fake_device, shape, t.stride(), t.storage_offset(), t.is_conj(), t.is_neg())
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _Form()
        return form

    def _meta(self) -> dict[str, Any]:
        """Meta of the next node. A backward call has the place of the forward call that it is the backward of."""
        scope = self.scope
        if scope.backward:
            seq = compat.backward_sequence()
            line, module = scope.places.get(seq, ("", "")) if seq is not None else ("", "")
        else:
            seq, module = compat.forward_sequence(), scope.module
            line = user_line(sys._getframe(1))
            scope.places.setdefault(seq, (line, module))  # the first call with a number is the one that made it
        return {"val": None, "module": module, "where": line, "backward": scope.backward, "seq": seq}

    # -- inputs and outputs
    def placeholder(self, name: str, t: torch.Tensor, backward: bool = False) -> fx.Node:
        """An input of the graph, after those there are."""
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        with self.graph.inserting_after(last) if last else contextlib.nullcontext():
            node = self.graph.create_node("placeholder", name)
        node.meta = {"val": None, "module": "", "where": "", "backward": backward, "seq": None}
        self._value(node, t)
        return node

    def node_of(self, t: torch.Tensor) -> fx.Node:
        """The node whose value a tensor of the program is."""
        t = compat.unwrapped(t)
        return (self._nodes.get(id(t)) or self._constant(t))[0]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Calls are recorded, and what happens in place is written as new values."""
        with compat.functionalised(), compat.python_kernels(), self:
            yield


def trace(call: Call, backward: bool, watching: Callable[[Callable[[str], None]], Any]) -> Joint:
    """The call as a graph, with the gradients of all inputs that want one when `backward`.

    Args:
        watching: a context in which the given function is told the name of each module that is entered or left to.

    Raises:
        Unquick: see above.
    """
    mode = compat.tracing_mode()
    tracer = Tracer(mode)
    fakes = [compat.fake_like(t, mode) for t in call.inputs]
    for i, t in enumerate(fakes):
        tracer.placeholder(f"primals_{i + 1}", t)
    inputs = [compat.wrapped(f, t.requires_grad) for f, t in zip(fakes, call.inputs, strict=True)]

    def at(module: str) -> None:
        tracer.scope.module = module

    held = len(call.held)
    with watching(at):
        with tracer.recording():
            outputs = call(inputs[:held], tuple(inputs[held:]))
        tangents, grads = _backward(call, tracer, inputs, outputs) if backward else ([], [])
    if tracer.stopped:
        raise Unquick(tracer.stopped)
    made = [*_updates(call, tracer, fakes, inputs), *((Role("output", i), t) for i, t in enumerate(outputs)), *grads]
    tracer.graph.output(tuple(None if t is None else tracer.node_of(t) for _, t in made))
    tracer.graph.output_node().meta = {"val": None, "module": "", "where": "", "backward": False, "seq": None}
    return Joint(tracer.graph, (*call.roles, *tangents), tuple(role for role, _ in made), tracer.constants)


Roled = list[tuple[Role, torch.Tensor | None]]


def _backward(call: Call, tracer: Tracer, inputs: list[torch.Tensor], outputs: tuple) -> tuple[list[Role], Roled]:
    """The roles of the tangents, one for each output that has a gradient; and per input its gradient."""
    wants = [t.requires_grad for t in call.inputs]
    if not any(wants):
        return [], []
    sources = [(i, t) for i, t in enumerate(outputs) if t.requires_grad]
    tangents = []
    for k, (_, t) in enumerate(sources):
        tangent = compat.fake_like(compat.unwrapped(t), tracer.mode)
        tracer.placeholder(f"tangents_{k + 1}", tangent, backward=True)
        tangents.append(compat.wrapped(tangent, False))
    tracer.scope.backward = True
    wanted = [t for t, wants_one in zip(inputs, wants, strict=True) if wants_one]
    with tracer.recording(), compat.without_autocast():
        made = torch.autograd.grad([t for _, t in sources], wanted, tangents, allow_unused=True) if sources else ()
    grads = iter(made or [None] * len(wanted))
    roles = zip(call.roles, wants, strict=True)
    out: Roled = [(grad_role(role), next(grads)) if wants_one else (Role("none", 0), None) for role, wants_one in roles]
    return [Role("tangent", i) for i, _ in sources], out


def _updates(call: Call, tracer: Tracer, fakes: list[torch.Tensor], inputs: list[torch.Tensor]) -> Roled:
    """The new values of the inputs that the call changes in place, and of buffers that it binds to other tensors."""
    found: Roled = []
    bound = call.changes.buffers
    for role, before, t in zip(call.roles, fakes, inputs, strict=True):
        if role.kind == "buffer" and role.name in bound:
            found.append((update_role(role), bound[str(role.name)]))
        elif compat.unwrapped(t) is not before:
            if t.grad_fn is not None or t.shape != before.shape:
                raise Unquick(f"{role} is changed in place, and the gradient goes through the change")
            found.append((update_role(role), t))
    return found
