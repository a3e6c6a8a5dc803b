"""The last linear layer and its loss with their gradients, a chunk of logits at a time."""

from __future__ import annotations

import copy

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from compare import all_too_far, exact_copy
from meshwright.kernels import linear_cross_entropy as lce
from meshwright.partitioner.memory import Model
from meshwright.passes import chunk_loss
from meshwright.runtime.tracked import WatchedComm, track
from small import adamw
from torch import nn

STEP = torch.ops.meshwright.linear_nll_step.default
V, H = 11, 6


class Head(nn.Module):
    """Embedding, a block and a head: tied or with a bias, cast to float32 or not, frozen or not."""

    def __init__(self, tied: bool = False, bias: bool = False, cast: bool = False, frozen: bool = False):
        super().__init__()
        self.embed, self.cast = nn.Embedding(V, H), cast
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H), nn.GELU()) for _ in range(2)])
        self.head = nn.Linear(H, V, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        self.head.requires_grad_(not frozen)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        z = self.head(x)
        return z.float() if self.cast else z


def lm_loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z.view(-1, V), y.reshape(-1))


def focal(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Its gradient depends on its value."""
    return F.cross_entropy(z.view(-1, V), y.reshape(-1), reduction="none").square().mean()


def also_reads(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return lm_loss(z, y) + 1e-2 * z.square().mean()


def weighed(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    nll = F.cross_entropy(z.view(-1, V), y.reshape(-1), reduction="none")
    return (nll * torch.linspace(0.5, 2, nll.numel())).sum() / 7


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_loss, "LEAST_BYTES", 1)
    monkeypatch.setattr(lce, "LEAST_ROWS", 1)
    monkeypatch.setattr(lce, "CHUNK_BYTES", 3 * V * 4)  # three rows


IDS, Y = torch.arange(32).reshape(4, 8) % V, (torch.arange(32).reshape(4, 8) * 7) % V
Y[0, :5] = Y[2, 1] = -100  # ranks and micro-batches have unequal counts


def fused(program) -> list[bool]:
    """Of the losses in what ranks run, whether the logits go by chunks."""
    ranks = range(program.mesh.world_size)
    runs = {(act.segment, r) for r in ranks for act in program.acts(r) if act.kind == "run"} if program.segments else ()
    graphs = [program.segments[s].rank_graph(r) for s, r in runs] or [program.rank_graph(r) for r in ranks]
    losses = ("nll", "nll_", "nll_backward", "nll_backward_", "nll_sums", "linear_nll_step")
    found = [n for g in graphs for n in g.nodes if str(n.target).split(".")[-2:-1] and _name(n) in losses]
    return [n.target is STEP for n in found]


def _name(node) -> str:
    return getattr(node.target, "__name__", str(node.target)).removesuffix(".default").split("::")[-1]


def check(model: nn.Module, mesh: dict[str, int], loss=lm_loss, **options) -> list[bool]:
    eager, exact = copy.deepcopy(model), exact_copy(model)
    wants = {}
    for m in (eager, exact):
        wants[m] = {"loss": loss(m(IDS), Y)}
        wants[m]["loss"].backward()
        wants[m] |= {n: p.grad for n, p in m.named_parameters()}
    compiled = mw.compile(model, mw.Mesh(**mesh, device="cpu"), loss=loss, **options)  # type: ignore[arg-type]
    got = {"loss": compiled.step(IDS, target=Y), **compiled.gather("grads")}
    assert not all_too_far("value", got, wants[eager], wants[exact])
    assert compiled.verify(IDS, target=Y).compared > 10
    return fused(compiled.trace(IDS, target=Y))


@pytest.mark.parametrize("kind", [{}, {"tied": True}, {"bias": True}, {"frozen": True, "bias": True}, {"cast": True}])
def test_every_head(kind):
    assert all(made := check(Head(**kind), {"dp": 2})) and made


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2}, {"zero": 3}),
        ({"dp": 2}, {"micro_batches": 2}),
        ({"dp": 2}, {"zero": 3, "recompute": "full", "micro_batches": 2}),
        ({"pp": 2}, {"micro_batches": 4, "schedule": "1f1b"}),
        ({"dp": 2, "pp": 2}, {"micro_batches": 4, "schedule": "zb-h1"}),
        ({"cp": 2}, {}),
    ],
    ids=lambda x: "-".join(map(str, x.values())) or "plain",
)
def test_every_mesh(mesh, options):
    assert all(made := check(Head(bias=True), mesh, **options)) and made


@pytest.mark.parametrize("loss", [focal, also_reads, weighed])
def test_only_where_the_gradient_is_known_and_nobody_else_reads_the_logits(loss):
    made = check(Head(), {"dp": 2}, loss)
    assert made and all(m == (loss is weighed) for m in made)


class Loss(nn.Module):
    """Loss and model in one: what is made of one loss or of two."""

    def __init__(self, kind: str):
        super().__init__()
        self.body, self.kind = Head(bias=True), kind
        self.second = self.body.head if kind == "shared" else nn.Linear(H, V)
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one = lm_loss(self.body(ids), y)
        if self.kind == "learned":
            return one * torch.exp(-self.log_scale) + self.log_scale
        if self.kind == "penalty":
            return one + one.detach() * self.body.head.weight.square().mean()
        if self.kind == "valid":
            return one * y.numel() / (y != -100).sum()
        return one + 0.3 * lm_loss(self.second(self.body.embed(ids)), y) + self.log_scale


@pytest.mark.parametrize("options", [{}, {"recompute": "full", "micro_batches": 2}, {"zero": 3}], ids=str)
@pytest.mark.parametrize("kind", ["two heads", "shared", "learned", "penalty", "valid"])
def test_what_is_made_of_losses(kind, options):
    model = Loss(kind)
    eager, exact = copy.deepcopy(model), exact_copy(model)
    wants = {}
    for m in (eager, exact):
        wants[m] = {"loss": m(IDS, Y)}
        wants[m]["loss"].backward()
        wants[m] |= {n: p.grad for n, p in m.named_parameters()}
    compiled = mw.compile(model, mw.Mesh(dp=2, device="cpu"), **options)
    got = {"loss": compiled.step(IDS, Y), **compiled.gather("grads")}
    assert not all_too_far("value", got, wants[eager], wants[exact])
    assert any(fused(compiled.trace(IDS, Y)))


@pytest.mark.parametrize("kind", ["two heads", "shared", "learned", "penalty"])
def test_what_is_made_of_losses_on_stages(kind):
    model = Loss(kind)
    eager = copy.deepcopy(model)
    eager(IDS, Y).backward()
    compiled = mw.compile(model, mw.Mesh(pp=2, device="cpu"), micro_batches=4, schedule="interleaved")
    compiled.step(IDS, Y)
    for name, grad in compiled.gather("grads").items():
        torch.testing.assert_close(grad, eager.get_parameter(name).grad)


def test_a_split_vocabulary_keeps_its_logits():
    assert not any(check(Head(), {"tp": 2}, pin={"head.weight": "[o:tp, i]"}))


def test_a_cut_between_the_layer_and_its_loss():
    options = {"micro_batches": 2, "schedule": "gpipe", "pin": {"nll": "stage 1"}}
    assert not any(check(Head(), {"pp": 2}, **options))


def test_small_logits_are_made_at_once(monkeypatch):
    monkeypatch.setattr(chunk_loss, "LEAST_BYTES", 17 * V * 4)
    assert not any(check(Head(), {"dp": 2}))


def test_the_memory_model_knows_what_a_chunk_holds():
    compiled = mw.compile(Head(bias=True), mw.Mesh(dp=2, device="cpu"), loss=lm_loss, optimizer=adamw)
    compiled._comm = WatchedComm(compiled.mesh)
    compiled.step(IDS, target=Y)
    tracked, model = track(compiled, IDS, target=Y), Model(compiled.program)
    for rank, held in enumerate(tracked):
        assert 0.97 <= model.of(rank).peak / held.peak <= 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_is_as_right_as_three(dtype):
    torch.manual_seed(0)
    x, w, b = torch.randn(10, H).to(dtype), torch.randn(V, H).to(dtype), torch.randn(V).to(dtype)
    y, g = torch.arange(10) % V, torch.linspace(-1, 1, 10)
    y[4] = -100

    def by_autograd(kind):
        leaves = [t.clone().to(kind).requires_grad_() for t in (x, w, b)]
        nll = F.cross_entropy(F.linear(*leaves), y, reduction="none")
        (nll * g.to(kind)).sum().backward()
        return {"nll": nll} | {name: t.grad for name, t in zip("xwb", leaves, strict=True)}

    nll, dx, dw, db = STEP(x, w, b, y, g.to(dtype), -100, True, True, True)
    got = {"nll": nll.to(dtype), "x": dx, "w": dw, "b": db[0]}
    assert not all_too_far("value", got, by_autograd(dtype), by_autograd(torch.float64))
    few = STEP(x, w, None, y, g, -100, False, True, False)
    assert [t.numel() for t in few] == [10, 0, V * H, 0]
    assert not STEP(x[:0], w, b, y[:0], g[:0], -100, True, True, True)[2].any()
    with pytest.raises(IndexError, match="out of bounds"):
        STEP(x, w, b, y + V, g, -100, True, True, True)
