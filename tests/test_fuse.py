"""Chains that become one op: how many in each model, equal numbers with and without, and what must stay as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from compare import all_too_far, exact_copy, exact_inputs, too_far
from meshwright.kernels import gated
from meshwright.partitioner.capture import capture
from meshwright.partitioner.known import known_modules
from rulecheck import check_call
from torch import nn
from zoo import ZOO

ops = torch.ops.meshwright
MODELS = ("llama", "qwen3", "gemma", "gpt2", "bert", "t5", "vit")


def fused(model: nn.Module, batch: dict[str, Any], all_of_it: bool = True):
    return capture(model, (), batch, fused=all_of_it)


def encoder() -> tuple[nn.Module, dict[str, Any]]:
    """PyTorch's own blocks, one that norms after and one that norms before."""
    after, before = (
        nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True, norm_first=first) for first in (False, True)
    )

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.after, self.before = after, before

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.before(self.after(x)).sum()

    return Both(), {"x": torch.randn(2, 4, 8)}


def test_what_is_fused_in_each_model(golden):
    lines = []
    for name, build in [*((n, ZOO[n]) for n in MODELS), ("torch.nn", encoder)]:
        torch.manual_seed(0)
        model, batch = build()
        plain, graph = fused(model, batch, False), fused(model, batch)
        lines.append(f"{name}: {len(plain.fx.nodes)} nodes, {len(graph.fx.nodes)} fused; {'; '.join(graph.notes)}")
        assert not any("forward" in vars(m) for m in model.modules())
    assert golden("fused.txt", "\n".join(lines) + "\n")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name, axes",
    [
        ("llama", {"tp": 2}),
        pytest.param("llama", {"dp": 2, "tp": 2}, marks=SLOW),
        pytest.param("gemma", {"tp": 2}, marks=SLOW),
        pytest.param("t5", {"dp": 2}, marks=SLOW),
        pytest.param("qwen3", {"dp": 2, "pp": 2}, marks=SLOW),
        pytest.param("gpt2", {"dp": 2, "tp": 2}, marks=SLOW),
        pytest.param("bert", {"tp": 2}, marks=SLOW),
        pytest.param("vit", {"dp": 2}, marks=SLOW),
    ],
    ids=str,
)
def test_equal_to_eager(name, axes):
    torch.manual_seed(0)
    model, batch = ZOO[name]()
    exact = exact_copy(model)
    want, true = model(**batch), exact(**exact_inputs(batch))
    want.backward()
    true.backward()
    compiled = mw.compile(model, mw.Mesh(**axes, device="cpu"), fuse="all")
    loss = compiled.step(**batch)
    assert too_far(loss, want.detach(), true.detach()) is None
    eager, true_grads = ({n: p.grad for n, p in m.named_parameters()} for m in (model, exact))
    assert all_too_far("gradient", compiled.gather("grads"), eager, true_grads) == []
    assert any(note.startswith("fused: ") for note in compiled.plan.notes)


class Block(nn.Module):
    """Each of the chains once: a merged gate, dropout before a residual, a sum that is read twice."""

    def __init__(self, act: Any):
        super().__init__()
        self.act = act
        self.both, self.down = nn.Linear(6, 16), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return x + F.dropout(self.down(self.act(gate) * up), 0.4)


ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=SLOW)], ids=str)
def test_on_and_off_are_equal(axes):
    """The same masks, and gradients of one precision, whatever is fused."""
    x, found = torch.randn(8, 5, 6), []
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(a) for a in ACTS.values()))
    for option in ("none", "all"):
        more: dict[str, Any] = {"micro_batches": 2} if "pp" in axes else {}
        compiled = mw.compile(model, mw.Mesh(**axes, device="cpu"), fuse=option, loss=torch.mean, seed=3, **more)
        loss = compiled.step(x)
        found.append({"loss": loss, **compiled.gather("grads")})
        assert any("fused: 3 x dropout + residual, 2 x geglu, 1 x swiglu" in n for n in compiled.plan.notes) == (
            option == "all"
        ), compiled.plan.notes
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=2e-5, atol=1e-6)


class Sums(nn.Module):
    """A norm of a sum within one module, and a sum that ends a block before the norm that begins the next."""

    def __init__(self, norm: Any, whole: bool = True):
        super().__init__()
        self.norm, self.norm2, self.up, self.whole = norm(6), norm(6), nn.Linear(6, 6), whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        h = x + self.up(y)
        return self.norm2(h) * h + h


NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "plain": lambda n: nn.LayerNorm(n, elementwise_affine=False)}


@pytest.mark.parametrize("axes", [{"tp": 2}, pytest.param({"dp": 2, "pp": 2}, marks=SLOW)], ids=str)
def test_norms_of_sums_are_equal_on_and_off(axes):
    torch.manual_seed(0)
    model, x, found = nn.Sequential(*(Sums(n) for n in NORMS.values())), torch.randn(8, 5, 6), []
    for option in ("none", "all"):
        more: dict[str, Any] = {"micro_batches": 2} if "pp" in axes else {}
        compiled = mw.compile(model, mw.Mesh(**axes, device="cpu"), fuse=option, loss=torch.mean, **more)
        loss = compiled.step(x)
        found.append({"loss": loss, **compiled.gather("grads")})
    notes = " ".join(compiled.plan.notes)
    assert "2 x residual + layer norm, 1 x residual + rms norm" in notes, notes
    assert "1 x residual + layer norm not fused: the sum is another module's" in notes, notes
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=2e-5, atol=1e-6)


def test_rope_rule_and_gradients():
    x = torch.randn(2, 6, 4, 8)
    for angles in ((2, 1, 4, 8), (4, 8)):
        cos, sin = torch.randn(angles), torch.randn(angles)
        assert check_call(ops.rope.default, (x, cos, sin, True))
    wide = [torch.randn(s, dtype=torch.float64) for s in ((1, 2, 3, 4), (3, 4), (3, 4))]
    assert torch.autograd.gradcheck(lambda t: ops.rope(t, *wide[1:]), wide[0].requires_grad_())
    torch.library.opcheck(ops.rope.default, (x.transpose(1, 2).requires_grad_(), torch.randn(6, 8), torch.randn(6, 8)))


def half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + half(q) * sin, k * cos + half(k) * sin * SCALE


SCALE = 1.0


@pytest.mark.parametrize("scale, learned", [(1.0, False), (1.1, False), (1.0, True)])
def test_only_a_rotary_embedding_is_known(scale, learned, monkeypatch):
    """Another formula, and angles that are trained, stay as they are; the name is given back."""
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.angles = nn.Parameter(torch.randn(2, 1, 4, 8), requires_grad=learned)

        def forward(self, x):
            q, k = apply_rotary_pos_emb(x, x[:, :1], self.angles[0], self.angles[1])
            return (q * k).sum()

    monkeypatch.setitem(globals(), "SCALE", scale)
    original = apply_rotary_pos_emb
    graph = capture(Turned(), (torch.randn(2, 3, 4, 8, requires_grad=True),), {}, fused=True)
    assert sum(n.target is ops.rope.default for n in graph.fx.nodes) == (4 if scale == 1.0 and not learned else 0)
    assert apply_rotary_pos_emb is original


def test_rules_of_norms_of_sums():
    x, r, g, w, b = torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 6), torch.randn(6), torch.randn(6)
    for weight, bias, gs in ((w, b, g), (None, None, None)):
        _, total, mean, rstd = ops.add_layer_norm(x, r, [6], weight, bias, 1e-5)
        assert check_call(ops.add_rms_norm_backward.default, (g, gs, total, [6], rstd, weight))
        assert check_call(ops.add_layer_norm_backward.default, (g, gs, total, [6], mean, rstd, weight, bias))
    assert check_call(ops.add_rms_norm.default, (x, r, [6], None, 1e-5))
    assert check_call(ops.add_layer_norm.default, (x, r, [6], w, b, 1e-5))
    wide = [t[:2].double().requires_grad_() for t in (x, r)] + [t.double().requires_grad_() for t in (w, b)]
    assert torch.autograd.gradcheck(lambda x, r, w, b: ops.add_layer_norm(x, r, [6], w, b, 1e-5)[:2], wide)
    assert torch.autograd.gradcheck(lambda x, r, w: ops.add_rms_norm(x, r, [6], w, 1e-5)[:2], wide[:3])
    torch.library.opcheck(ops.add_layer_norm.default, (x.requires_grad_(), r, [6], w, None, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_sums_are_as_near_as_torch(dtype):
    """The parts in torch, each rounded, against one op: the sum's bits are equal, the rest is nearer to float64."""
    for rows, n in ((5, 33), (1, 1), (0, 3)):
        x, r, g, gs = (torch.randn(rows, 2 * n).to(dtype)[:, ::2] for _ in range(4))
        w, b = (torch.randn(n).to(dtype) for _ in range(2))
        total = x + r
        leaves = [t.double().requires_grad_() for t in (total, w, b)]
        eager = [t.detach().clone().requires_grad_() for t in (total, w, b)]
        y64, ye = F.layer_norm(leaves[0], (n,), leaves[1], leaves[2]), F.layer_norm(eager[0], (n,), eager[1], eager[2])
        exact = [y64, *torch.autograd.grad((y64 * g + leaves[0] * gs).sum(), leaves)]
        theirs = [ye, *torch.autograd.grad((ye * g + eager[0] * gs).sum(), eager)]
        y, h, mean, rstd = ops.add_layer_norm(x, r, [n], w, b, 1e-5)
        ours = [y, *ops.add_layer_norm_backward(g, gs, h, [n], mean, rstd, w, b)]
        assert (h == total).all()
        for a, t, e in zip(ours, theirs, exact, strict=True):
            assert (a.double() - e).norm() <= 2 * (t.double() - e).norm() + 1e-6, (n, a, t, e)


def test_what_is_read_elsewhere_stays():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            s, d = F.silu(self.a(x)), F.dropout(self.b(x), 0.5)
            return (s * self.b(x) + s + (d + x) * d + F.silu(x) * x[:1]).sum()

    graph = capture(Odd(), (torch.randn(4, 6),), {}, fused=True)
    assert not any(n.target in (ops.gated.default, ops.gated_backward.default) for n in graph.fx.nodes)
    assert any(n.startswith("1 x dropout + residual not fused") for n in graph.notes), graph.notes
    assert any("swiglu not fused" in n for n in graph.notes), graph.notes


class Norm(nn.Module):
    """x w / sqrt(mean(x²) + eps), but for what `twist` does to it."""

    def __init__(self, twist: str = "", n: int = 6):
        super().__init__()
        self.scale, self.eps, self.twist = nn.Parameter(torch.rand(n) + 0.5), 1e-3, twist

    def forward(self, x):
        eps = 0.0 if self.twist == "no eps" else self.eps
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        if self.twist == "clamped":
            root = root.clamp(max=3.0)
        y = x * root * self.scale
        return y.float() if self.twist == "wide" else y + 1e-3 if self.twist == "shifted" else y


@pytest.mark.parametrize("twist", ["", "no eps", "clamped", "shifted", "wide"])
def test_only_the_formula_is_known(twist):
    found: Counter[str] = Counter()
    model = Norm(twist).bfloat16() if twist == "wide" else Norm(twist)
    with known_modules(nn.Sequential(model), found):
        pass
    assert found["rms norm"] == (twist == "")


def test_under_autocast_and_beside_other_dtypes_a_norm_stays():
    model = nn.Sequential(Norm(), nn.Linear(6, 6)).double()
    double, single = torch.randn(2, 6).double(), torch.randn(2, 6)
    for x, cast in ((double, False), (single, False), (double, True)):
        own = model if x.dtype == torch.float64 else nn.Sequential(model[0])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            graph = capture(own, (x,), {}, backward=False, fused=True)
        one = any(n.target is ops.rms_norm.default for n in graph.fx.nodes)
        assert one == (x.dtype == torch.float64 and not cast)


def test_gated_rules_and_gradients():
    g, u, grad = (torch.randn(4, 6) for _ in range(3))
    for act in gated.ACTS:
        assert check_call(ops.gated.default, (g, u, act))
        assert check_call(ops.gated_backward.default, (grad, g, u, act))
        wide = [t[:2].double().requires_grad_() for t in (g, u)]
        assert torch.autograd.gradcheck(lambda a, b, act=act: ops.gated(a, b, act), wide)
    torch.library.opcheck(ops.gated.default, (g.requires_grad_(), u.requires_grad_(), "silu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_is_as_near_as_torch(dtype):
    for act, plain in ACTS.items():
        for shape in ((5, 7), (1, 1), (0, 3)):
            both = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
            g, u = both.chunk(2, -1)
            grad = torch.randn(shape[-1]).to(dtype).expand(shape)
            exact = [t.double().requires_grad_() for t in (g, u)]
            eager = [t.detach().clone().requires_grad_() for t in (g, u)]
            true, want = (plain(a) * b for a, b in (exact, eager))
            trues = torch.autograd.grad(true, exact, grad.double())
            wants = torch.autograd.grad(want, eager, grad)
            got = (ops.gated(g, u, act), *ops.gated_backward(grad, g, u, act))
            for ours, theirs, e in zip(got, (want, *wants), (true, *trues), strict=True):
                assert (ours.double() - e).norm() <= 2 * (theirs.double() - e).norm() + 1e-7
