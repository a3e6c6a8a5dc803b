"""Random legal plans: any choice of every call and any resting layout, run and compared with one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from compare import exact_inputs
from meshwright.partitioner.capture import capture
from meshwright.partitioner.elimination import Problem
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.micro import make_plan_in_time
from meshwright.partitioner.plan import Plan
from meshwright.partitioner.planner import Decide, Options, make_plan
from meshwright.partitioner.schedules.generate import NAMES, generate
from meshwright.partitioner.stages import anchors, stages_of
from meshwright.passes.lower import lower
from meshwright.runtime import values as values_of
from meshwright.runtime import verify
from meshwright.runtime.autograd import Suspended
from meshwright.runtime.inprocess import InProcessComm
from meshwright.runtime.runner import Runner
from meshwright.runtime.state import State
from torch import nn
from zoo import ZOO

UNREACHABLE = 1e9
"""A table entry of at least this is a pair of states that no path joins."""


def randomly(seed: int) -> Decide:
    """A `decide` that draws every value at random, as long as every pair of states can be joined."""
    random = np.random.default_rng(seed)

    def decide(problem: Problem) -> list[int]:
        near: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.unary]
        for (i, j), table in problem.pairs.items():
            near[i].append((j, table))
            near[j].append((i, table.T))
        values = [-1] * len(near)
        for i in random.permutation(len(near)):
            costs = problem.unary[i].copy()
            for j, table in near[i]:
                costs = costs + (table[:, values[j]] if values[j] >= 0 else table.min(axis=1))
            possible = np.flatnonzero(costs < UNREACHABLE)
            assert len(possible), "no value is legal beside those drawn before"
            values[i] = int(random.choice(possible))
        return values

    return decide


# -- the models
class Attention(nn.Module):
    """Grouped-query attention with a mask that is given or causal."""

    def __init__(self, d: int, heads: int, kv: int):
        super().__init__()
        self.heads, self.kv = heads, kv
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d * kv // heads), nn.Linear(d, d * kv // heads)
        self.o = nn.Linear(d, d)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        b, s, d = x.shape
        q = self.q(x).view(b, s, self.heads, -1).transpose(1, 2)
        k, v = (f(x).view(b, s, self.kv, -1).transpose(1, 2) for f in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.kv != self.heads)
        return self.o(y.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, kv: int, drop: float):
        super().__init__()
        self.n1, self.attention, self.drop = nn.LayerNorm(d), Attention(d, heads, kv), nn.Dropout(drop)
        self.n2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.drop(self.attention(self.n1(x), mask))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """A GPT whose head is its embedding; sizes that 2 and 3 ranks divide, and a vocabulary that neither does."""

    def __init__(self, d: int = 12, heads: int = 6, kv: int = 6, vocab: int = 13, layers: int = 2, drop: float = 0.0):
        super().__init__()
        self.tokens, self.places, self.drop = nn.Embedding(vocab, d), nn.Embedding(8, d), nn.Dropout(drop)
        self.blocks = nn.ModuleList(Block(d, heads, kv, drop) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.drop(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())


class Norms(nn.Module):
    """An MLP with batch norms: buffers that change, statistics over the whole batch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 12),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Linear(12, 9),
            nn.BatchNorm1d(9),
            nn.Tanh(),
            nn.Linear(9, 5),
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y, label_smoothing=0.1)


class Convs(nn.Module):
    """Strided, grouped and transposed convolutions, pooling, group norm, a skip."""

    def __init__(self):
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.b, self.bn = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8)
        self.down, self.up, self.out = nn.Conv2d(8, 12, 2, 2), nn.ConvTranspose2d(12, 8, 2, 2), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.n(self.a(x)))
        h = h + F.relu(self.bn(self.b(h)))
        u = self.up(F.max_pool2d(self.down(h), 2).repeat_interleave(2, -1).repeat_interleave(2, -2))
        return F.cross_entropy(self.out(torch.cat([h, u], 1).mean((2, 3))), y)


class Recurrent(nn.Module):
    """An LSTM of two layers, read at its last step."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 12, num_layers=2, batch_first=True), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(x)
        return F.cross_entropy(self.out(hidden[:, -1]), y)


@torch.library.custom_op("random_plans::mirrored", mutates_args=())
def mirrored(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Not pointwise along the last dim: no rule is written for it, so one is discovered."""
    return x.flip(-1) * scale


mirrored.register_fake(lambda x, scale: torch.empty_like(x))
mirrored.register_autograd(
    lambda ctx, g: (torch.ops.random_plans.mirrored(g, ctx.scale), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[1]),
)


class Custom(nn.Module):
    """A residual MLP around an op that the planner has never heard of."""

    def __init__(self):
        super().__init__()
        self.f, self.g, self.norm, self.out = nn.Linear(6, 12), nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.g(torch.ops.random_plans.mirrored(torch.tanh(self.f(x)), 0.5)))
        return F.cross_entropy(self.out(x).flatten(0, 1), y.flatten())


Built = tuple[nn.Module, dict[str, Any]]


def gpt(**settings: Any) -> Built:
    ids = torch.randint(0, 13, (4, 6))
    return GPT(**settings), {"ids": ids, "y": torch.randint(0, 13, (4, 6))}


def gqa() -> Built:
    model, batch = gpt(kv=2, layers=1)
    mask = torch.zeros(4, 1, 6, 6).masked_fill(torch.rand(4, 1, 6, 6) < 0.3, float("-inf"))
    mask.diagonal(dim1=-2, dim2=-1).zero_()
    return model, batch | {"mask": mask}


MODELS: dict[str, Callable[[], Built]] = {
    "gpt": gpt,
    "gqa": gqa,
    "dropout": lambda: gpt(layers=1, drop=0.3),
    "norms": lambda: (Norms(), {"x": torch.randn(6, 6), "y": torch.randint(0, 5, (6,))}),
    "convs": lambda: (Convs(), {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(0, 5, (4,))}),
    "recurrent": lambda: (Recurrent(), {"x": torch.randn(6, 4, 6), "y": torch.randint(0, 5, (6,))}),
    "custom": lambda: (Custom(), {"x": torch.randn(6, 4, 6), "y": torch.randint(0, 5, (6, 4))}),
    "moe": ZOO["mixtral"],
} | {name: ZOO[name] for name in ("t5", "llama", "gpt2", "bert", "vit", "resnet", "unet")}
DRAWS = {"dropout"}
"""Models that draw random numbers: one device runs the captured program, not eager PyTorch."""

SINGLE = {"t5": 1e-4, "moe": 1e-4, "llama": 1e-4, "gpt2": 1e-4, "bert": 1e-4}
"""Models that compute in float32 whatever their dtype: how far from one device they may be."""


class Subject:
    """A model captured in float64, and what one device makes of it.

    `form`: "step", or "autograd" with its pause between forward and backward. `model`: with its batch, where it is
    none of `MODELS`.
    """

    def __init__(self, name: str, form: str = "step", model: tuple[nn.Module, dict[str, Any]] | None = None):
        torch.manual_seed(0)
        self.name, self.form, self.far = name, form, SINGLE.get(name, 1e-9)
        made, batch = model or MODELS[name]()
        self.model = made.double()
        self.batch: dict[str, Any] = exact_inputs(batch)
        self.tensors = [v for v in self.batch.values() if isinstance(v, torch.Tensor)]
        loss = (lambda out, target: out) if form == "step" else None
        self.graph: Graph = capture(self.model, (), self.batch, loss=loss)
        self.want: dict[str, torch.Tensor | None] = self._one_device()

    def _one_device(self) -> dict[str, torch.Tensor | None]:
        if self.name in DRAWS:
            return run(self, *make_plan(self.graph.copy(), Mesh(x=1, device="cpu"), Options()))
        twin = copy.deepcopy(self.model)
        loss = twin(**self.batch)
        loss.backward()
        grads = {f"grad {n}": p.grad for n, p in twin.named_parameters() if p.grad is not None}
        return {"loss": loss.detach()} | grads | {f"buffer {n}": b for n, b in twin.named_buffers()}


MESHES: list[dict[str, int]] = [{"x": 2}, {"x": 2, "y": 2}, {"x": 3}, {"dp": 2, "x": 2}, {"x": 3, "y": 2}, {"dp": 3}]
"""Free axes, where every choice is open, alone and beside data axes whose ranks shard what rests."""


def mesh_of(seed: int) -> Mesh:
    return Mesh(**MESHES[seed % len(MESHES)], device="cpu")  # type: ignore[arg-type]


def plan_of(subject: Subject, seed: int) -> tuple[Graph, Plan]:
    mesh = mesh_of(seed)
    zero = seed % 4 if "dp" in mesh.names else 0
    return make_plan(subject.graph.copy(), mesh, Options(zero=zero), randomly(seed))


IN_TIME: list[tuple[dict[str, int], int]] = [
    ({"x": 2}, 2), ({"pp": 2}, 2), ({"x": 2, "pp": 2}, 2), ({"x": 2, "y": 2}, 2), ({"pp": 3}, 2),
    ({"dp": 2, "pp": 2}, 2), ({"x": 3}, 2), ({"pp": 2}, 1), ({"x": 2}, 3), ({"pp": 2}, 3),
]  # fmt: skip
"""Meshes and micro-batches, which a batch of 4 or 6 rows allows; 3 only one of 6."""


def timed_plan_of(subject: Subject, seed: int) -> tuple[Graph, Plan]:
    """A random plan with micro-batches, its stages cut anywhere."""
    rows = next(len(t) for t in subject.tensors)
    return _in_time(subject, seed, *IN_TIME[seed % (len(IN_TIME) if rows % 3 == 0 else len(IN_TIME) - 2)])


def _in_time(subject: Subject, seed: int, axes: dict[str, int], count: int) -> tuple[Graph, Plan]:
    mesh = Mesh(**axes, device="cpu")  # type: ignore[arg-type]
    options = Options(zero=seed % 4 if "dp" in axes else 0)
    graph, plan = make_plan_in_time(subject.graph.copy(), mesh, options, count, randomly(seed))
    if "pp" not in axes:
        return graph, plan
    assert graph.factored is not None
    random, found = np.random.default_rng(seed), anchors(graph, graph.factored)
    names = [n for n in NAMES if n != "forward-only" and generate(n, axes["pp"], count).stages <= len(found.forward)]
    if not names:  # too few calls for so many stages
        return _in_time(subject, seed, {"x": 2}, 2)
    schedule = generate(str(random.choice(names)), axes["pp"], count)
    places = random.choice(np.arange(1, len(found.forward)), schedule.stages - 1, replace=False)
    stages = stages_of(graph, found, sorted(map(int, places)), schedule.placement)
    return graph, replace(plan, stages=stages, schedule=schedule if count > 1 else None)


def run(subject: Subject, graph: Graph, plan: Plan) -> dict[str, torch.Tensor | None]:
    """One step of a plan: loss, gradients and buffers, whole."""
    comm, cpu = InProcessComm(plan.mesh), torch.device("cpu")
    homes = plan.stages.homes if plan.stages is not None else None
    state = State(subject.model, plan.resting, plan.mesh, comm, cpu, homes)
    runner = Runner(lower(graph.copy(), plan, subject.form), state, comm, cpu)
    if subject.form == "step":
        (loss,) = runner.run(subject.tensors, 0)
    else:
        suspended = Suspended(runner, subject.tensors, 0, False)
        (loss,) = suspended.outputs
        suspended.backward([torch.ones_like(loss)])
    got = {"loss": loss} | {f"grad {n}": state.whole_grad(n) for n in state.params}
    return got | {f"buffer {n}": state.whole_buffer(n) for n in state.buffers}


def complaint(subject: Subject, seed: int, make: Callable[..., tuple[Graph, Plan]] = plan_of) -> str | None:
    """What is wrong with one random plan; None when it gives the numbers of one device."""
    graph, plan = make(subject, seed)
    try:
        got = run(subject, graph, plan)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{first_difference(subject, graph, plan)}"
    wrong = []
    for name, want in subject.want.items():
        if want is not None and (why := differs(want, got.get(name), subject.far)):
            wrong.append(f"{name}: {why}")
    return "; ".join(wrong[:3]) + "\n" + first_difference(subject, graph, plan) if wrong else None


def differs(want: torch.Tensor, got: torch.Tensor | None, far: float) -> str | None:
    if got is None:
        return "there is none"
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"want {want.dtype} {list(want.shape)}, got {got.dtype} {list(got.shape)}"
    error = (want.double() - got.double()).abs().max().item()
    return None if error <= far * (1e-3 + want.abs().max().item()) else f"off by {error:.2g}"


def first_difference(subject: Subject, graph: Graph, plan: Plan) -> str:
    """The microscope's word on a plan that went wrong."""
    if subject.form != "step":
        return "(the microscope looks at step programs)"
    try:
        program = lower(graph.copy(), plan)
    except Exception as error:
        return f"lowering: {error}"
    values = dict(subject.model.named_parameters()) | dict(subject.model.named_buffers())
    inputs = verify.inputs_of(program, values, subject.tensors, 0)
    with torch.no_grad():
        want = values_of.whole_values(program.captured.fx, inputs, program.constants)
        try:
            return f"no op differs: {verify.compare(program, want, values_of.mesh_values(program, inputs))}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
