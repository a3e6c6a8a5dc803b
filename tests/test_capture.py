"""Capture: what the tracer records equals eager, the two ways of tracing give one graph, and equal views are one."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from meshwright.partitioner import capture as capturing
from meshwright.partitioner.aot import export
from meshwright.partitioner.call import Call
from meshwright.partitioner.canonical import clean
from meshwright.partitioner.capture import capture
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.trace import trace
from meshwright.runtime.values import whole_values
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import ZOO

aten = torch.ops.aten
Forward = Callable[..., Any]


class Does(nn.Module):
    """A linear layer `f`, other modules and buffers, and a forward given as a function of the module and inputs."""

    def __init__(self, forward: Forward, **held: Any):
        super().__init__()
        self.f, self.does = nn.Linear(6, 6), forward
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.does(self, *args)


def x(rows: int = 4) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, rows * 6).view(rows, 6).sin()


def total(out: Any, _: Any = None) -> torch.Tensor:
    return out.square().sum()


def calls(graph: Graph, *targets: Any) -> list[fx.Node]:
    return [n for n in graph.fx.nodes if n.target in targets]


# -- what programs do, and what eager makes of it
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: float) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x * times

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        return 7.0 * grad * ctx.saved_tensors[0], None  # no derivative at all: what counts is that this is run


def moving_average(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.f(x)
    with torch.no_grad():
        m.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        m.seen += 1
    return y - m.mean


def clamped_weight(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.f.weight.clamp_(-0.1, 0.1)
    return m.f(x)


def in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.f(x).clone()
    y.view(2, 2, 6)[0].mul_(2)
    y[:, 1:3] = x[:, :2]
    y.t()[0].add_(1)
    y[x > 0.5] = 3.0
    y[torch.tensor([0, 2])] += 1.0
    z = torch.zeros(4, 6)
    z[1:3, ::2] = y[1:3, ::2]
    return y.sigmoid_() + z


def set_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.f(x)
    y.data = y.data * 2
    return y


def hooked(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.f(x)
    y.register_hook(lambda g: g.clamp(-0.1, 0.1) * 2)
    return y.sin()


def complex_turn(m: Any, x: torch.Tensor) -> torch.Tensor:
    c = torch.view_as_complex(m.f(x).reshape(4, 3, 2))
    return torch.view_as_real(c * torch.polar(torch.ones(3), torch.arange(3.0)) * c.conj()).flatten(1)


def constants(m: Any, x: torch.Tensor) -> torch.Tensor:
    t = torch.tensor([0.5])
    t.add_(x.sum())
    return m.f(x) * torch.tensor([1.0, 2, 3, 4, 5, 6]) + torch.arange(6)[torch.tensor([5, 4, 3, 2, 1, 0])] + t


def gradient_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(m.f(x).sin().sum(), x, create_graph=True)
    return g


def checkpointed(reentrant: bool) -> Forward:
    return lambda m, x: checkpoint(lambda t: m.f(t).sin(), m.f(x), use_reentrant=reentrant)


def weight_normed() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Does(lambda m, x: m.b(m.f(x)), b=nn.BatchNorm1d(6)),
    "moving average": lambda: Does(moving_average, mean=torch.zeros(6), seen=torch.zeros((), dtype=torch.int64)),
    "clamped weight": lambda: Does(clamped_weight),
    "in place": lambda: Does(in_place),
    "set data": lambda: Does(set_data),
    "custom function": lambda: Does(lambda m, x: Square.apply(m.f(x), 2.0)),
    "hook": lambda: Does(hooked),
    "complex": lambda: Does(complex_turn),
    "constants": lambda: Does(constants),
    "gradient inside": lambda: Does(gradient_inside),
    "checkpoint": lambda: Does(checkpointed(False)),
    "reentrant checkpoint": lambda: Does(checkpointed(True)),
    "weight norm": lambda: Does(lambda m, x: m.w(m.f(x)), w=weight_normed()),
    "unused": lambda: Does(lambda m, x: m.f(x), never=nn.Linear(2, 2)),
    "frozen": lambda: Does(lambda m, x: m.g(m.f(x)), g=nn.Linear(6, 3).requires_grad_(False)),
    "vmap": lambda: Does(lambda m, x: torch.vmap(lambda row: m.f(row).sin())(x)),
    "functional gradient": lambda: Does(lambda m, x: torch.func.grad(lambda t: m.f(t).sin().sum())(x)),
    "lstm": lambda: Does(lambda m, x: m.r(m.f(x)[None])[0], r=nn.LSTM(6, 5, 2)),
    "item, caught": lambda: Does(lambda m, x: m.f(x) if x.sum().dim() else m.f(x) * 2),
}


def eager(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Loss, gradients and state after one call."""
    loss = total(model(x()))
    loss.backward()
    return {"loss": loss, **{f"grad {n}": p.grad for n, p in model.named_parameters()}, **model.state_dict()}


def captured(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The same of the captured graph, run on real tensors."""
    graph = capture(model, (x(),), {}, loss=total)
    held = {k: v.detach().clone() for k, v in model.state_dict(keep_vars=True).items()}
    inputs = [held[str(r.name)].clone() if r.kind in ("param", "buffer") else x() for r in graph.inputs]
    with torch.no_grad():
        values = whole_values(graph.fx, inputs, graph.constants)
    out: dict[str, torch.Tensor | None] = dict(held)
    for node, role in zip(graph.output_values, graph.outputs, strict=True):
        name = {"output": "loss", "grad": f"grad {role.name}"}.get(role.kind, str(role.name))
        if role.kind != "none":
            out[name] = None if node is None else values[node.name]
    return {**{f"grad {n}": None for n, _ in model.named_parameters()}, **out}  # the frozen ones have no output


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_graph_computes_what_eager_does(name: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "meshwright")
    runs = []
    for run in (captured, eager):
        torch.manual_seed(0)
        runs.append(run(PROGRAMS[name]()))
    got, want = runs
    assert got.keys() == want.keys()
    for key, value in want.items():
        found = got[key]
        assert (found is None) == (value is None), key
        if found is not None:
            torch.testing.assert_close(found, value, msg=lambda m, key=key: f"{key}: {m}")
    assert "AOTAutograd" not in caplog.text


# -- the two ways of tracing
def skeleton(joint: Any) -> tuple:
    """What both ways must agree on: calls, their operands, shapes, phases, modules, pairs of backward and forward."""
    clean(joint.graph)
    place = {n: i for i, n in enumerate(joint.graph.nodes)}
    first: dict[Any, int] = {}
    for n in joint.graph.nodes:
        if n.op == "call_function" and not n.meta["backward"]:
            first.setdefault(n.meta["seq"], place[n])
    rows = []
    for n in joint.graph.nodes:
        val = n.meta["val"]
        shape = (val.dtype, val.shape, val.stride()) if isinstance(val, torch.Tensor) else None
        operands = fx.map_arg((n.args, n.kwargs), lambda m: place[m])  # type: ignore[arg-type]
        adds_up = n.target is aten.add.Tensor and n.meta["backward"]  # of two calls' gradients: to neither it belongs
        pair = first.get(n.meta["seq"]) if n.meta["backward"] and not adds_up and n.op == "call_function" else None
        row = (n.op, n.target if n.op == "call_function" else "", str(operands), shape, n.meta["backward"], pair)
        rows.append((*row, "" if adds_up or n.op == "output" else n.meta["module"]))
    return tuple(rows), joint.inputs, joint.outputs


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "resnet", "mamba2", "swin"])
def test_both_ways_give_one_graph(name: str):
    model, batch = ZOO[name]()
    joints = []
    for way in (trace, export):
        call = Call(model, (), batch, None, None)
        joints.append(skeleton(way(call, True, lambda at: capturing._watching(model, at))))
    quick, thorough = joints
    assert quick[1:] == thorough[1:]
    assert [q for q, t in zip(quick[0], thorough[0], strict=True) if q != t] == []


def selected(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.f(x)[x > 0].sum()


def selected_if_possible(m: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return selected(m, x)
    except Exception:
        return m.f(x)


@pytest.mark.parametrize("forward", [selected, selected_if_possible])
def test_sizes_that_depend_on_data_are_traced_the_other_way(forward: Forward, caplog: pytest.LogCaptureFixture):
    """Also where the program catches the error that ends the quick way: what it then does is not the program."""
    caplog.set_level(logging.INFO, "meshwright")
    graph = capture(Does(forward), (x(),), {}, loss=total)
    assert "depends on data" in caplog.text
    assert calls(graph, aten.index.Tensor)


def test_a_gradient_through_a_changed_input():
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return m.f(x)

    graph = capture(Does(forward), (x().requires_grad_(),), {}, loss=total)
    assert {str(r) for r in graph.outputs} >= {"new_input 0", "input_grad 0"}


def test_backward_is_outside_of_autocast():
    """A program that keeps a region in float32 has its gradients there in float32."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return m.f(x)

    for backward_under in (nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with backward_under:
            graph = capture(Does(forward), (x(),), {}, loss=total)
        assert {n.meta["val"].dtype for n in calls(graph, aten.mm.default, aten.addmm.default)} == {torch.float32}


def test_results_are_remembered_by_type_too():
    """1, 1.0 and True are equal as keys and give other dtypes."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        n = torch.arange(6)
        return m.f(x) * (n + 1) * (n + 1.0) * (n + True) * (n.bool() + True) * (n.bool() + 1)

    graph = capture(Does(forward), (x(),), {}, loss=total, backward=False)
    kinds = [n.meta["val"].dtype for n in calls(graph, aten.add.Tensor)]
    assert kinds == [torch.int64, torch.float32, torch.int64, torch.bool, torch.int64]


def test_capture_leaves_no_traces():
    """Modes, patches, hooks and the garbage collector are as they were, after an error too."""

    def state() -> tuple:
        patched = (F.cross_entropy, F.rms_norm, F.scaled_dot_product_attention, *vars(checkpoints).values())
        flags = (gc.isenabled(), torch.is_autocast_cache_enabled(), torch.is_grad_enabled())
        return flags, [id(p) for p in patched], len(model._forward_hooks), type(torch.ones(2) + 1)

    for right in (True, False):
        model = Does(lambda m, x, right=right: m.f(x) if right else m.f(x) @ x)
        before = state()
        with nullcontext() if right else pytest.raises(RuntimeError):
            capture(model, (x(),), {}, loss=total)
        assert state() == before


# -- one node for equal views
def test_projections_of_one_input_read_one_view():
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.view(2, 2, 6).exp()
        return m.q(x) + m.k(x) * m.v(x)

    linear = {name: nn.Linear(6, 6, bias=False) for name in "qkv"}
    graph = capture(Does(forward, **linear), (x(),), {}, loss=total)
    forward_mm = [n for n in calls(graph, aten.mm.default) if not n.meta["backward"]]
    assert len({str(n.args[0]) for n in forward_mm}) == 1
    assert forward_mm[0].args[0].meta["module"] == "q"  # type: ignore[union-attr]
    weight_grads = [n for n in calls(graph, aten.mm.default) if n.meta["backward"] and forward_mm[0].args[0] in n.args]
    assert len(weight_grads) == 3


def rows(*made: tuple[Any, tuple, bool]) -> fx.Graph:
    """A graph of calls on "x", which is computed, or where that is None on an input."""
    graph = fx.Graph()
    nodes = [graph.placeholder("p")]
    nodes.append(graph.call_function(aten.exp.default, (nodes[0],)))
    for target, args, backward in made:
        node = graph.call_function(target, args if args[0] is not None else (nodes[0], *args[1:]))
        node.args = tuple(nodes[1] if a == "x" else a for a in node.args)
        node.meta = {"backward": backward, "module": "", "where": "", "seq": None, "val": None}
        nodes.append(node)
    graph.output(tuple(nodes[2:]))
    return graph


@pytest.mark.parametrize(
    "one,other,same",
    [
        ((aten.view.default, ("x", [6, 4]), False), (aten.view.default, ("x", [6, 4]), False), True),
        ((aten.view.default, ("x", [6, 4]), False), (aten.view.default, ("x", [6, 4]), True), True),
        ((aten.view.default, ("x", [6, 4]), False), (aten.view.default, ("x", [4, 6]), False), False),
        ((aten.view.default, (None, [6, 4]), False), (aten.view.default, (None, [6, 4]), True), False),
        ((aten.view.default, (None, [6, 4]), True), (aten.view.default, (None, [6, 4]), True), True),
        ((aten._to_copy.default, ("x",), False), (aten._to_copy.default, ("x",), True), False),
        ((aten._to_copy.default, ("x",), True), (aten._to_copy.default, ("x",), True), True),
        ((aten.exp.default, ("x",), False), (aten.exp.default, ("x",), False), False),
        ((aten.sum.dim_IntList, ("x", [0], 1), False), (aten.sum.dim_IntList, ("x", [0], True), False), False),
    ],
)
def test_which_calls_are_one(one: tuple, other: tuple, same: bool):
    """Views of what is computed, always; casts, and views of inputs, within forward or within backward."""
    graph = rows(one, other)
    clean(graph)
    a, b = graph.output_node().args[0]  # type: ignore[misc]
    assert (a is b) == same


class Twice(nn.Module):
    """One module under two names, called by both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.again, self.norm_again = self.head, self.norm
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm_again(self.again(self.norm(self.head(x))))).tanh().sum()


def test_a_module_under_two_names_keeps_its_tensors():
    model, x = Twice(), torch.linspace(-1, 1, 16).reshape(4, 4)
    eager, held = copy.deepcopy(model), [*model.parameters(), *model.buffers()]
    eager(x).backward()
    compiled = mw.compile(model, mw.Mesh(dp=2, device="cpu"))
    compiled.step(x)
    assert all(a is b for a, b in zip(held, [*model.parameters(), *model.buffers()], strict=True))
    for name, grad in compiled.gather("grads").items():
        torch.testing.assert_close(grad, eager.get_parameter(name).grad, rtol=1e-3, atol=1e-4)


def _tripled(module: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
    return 3 * out


def test_a_hook_that_comes_later_is_another_program():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    compiled = mw.compile(model, mw.Mesh(dp=2, device="cpu"), loss=lambda y: y.sum())
    before = compiled.step(x)
    hook = model[0].register_forward_hook(_tripled)
    torch.testing.assert_close(compiled.step(x), 3 * before)
    hook.remove()
    torch.testing.assert_close(compiled.step(x), before)
