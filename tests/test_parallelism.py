"""Each way of splitting, by what it does: heads, sequences, experts, vocabulary, and models without values."""

import copy

import meshwright as mw
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from zoo import ZOO


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, kv: int):
        super().__init__()
        self.heads, self.kv = heads, kv
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d // heads * kv), nn.Linear(d, d // heads * kv)
        self.o = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q = self.q(x).view(b, s, self.heads, -1).transpose(1, 2)
        k, v = (f(x).view(b, s, self.kv, -1).transpose(1, 2) for f in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, s, d))


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def equal_one_device(model: nn.Module, mesh: mw.Mesh, x: torch.Tensor, **options) -> mw.Compiled:
    twin = copy.deepcopy(model)
    loss = mean_square(twin(x))
    loss.backward()
    compiled = mw.compile(model, mesh, loss=mean_square, **options)
    torch.testing.assert_close(compiled.step(x), loss.detach())
    grads = compiled.gather("grads")
    for name, p in twin.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    return compiled


def choices_of(compiled: mw.Compiled, op: str) -> list[dict]:
    plan = compiled.plan
    return [dict(by) for name, by in plan.choices.items() if op in plan.modules[name][1]]


@pytest.mark.parametrize("heads,kv,tp", [(4, 4, 2), (4, 2, 2), (4, 1, 4), (4, 2, 4), (8, 2, 4), (6, 3, 2)])
def test_heads_are_split_over_tp(heads: int, kv: int, tp: int):
    torch.manual_seed(0)
    compiled = equal_one_device(Attention(48, heads, kv), mw.Mesh(tp=tp), torch.randn(2, 6, 48))
    for by in choices_of(compiled, "meshwright.attention"):
        assert all(choice is not None and choice[0] in ("g", "r") for choice in by.values()), by


def test_fewer_key_value_heads_than_ranks_writes_the_axis_as_two():
    torch.manual_seed(0)
    compiled = equal_one_device(Attention(32, 4, 2), mw.Mesh(dp=2, tp=4), torch.randn(2, 5, 32))
    assert compiled.mesh.sizes == {"dp": 2, "tp.0": 2, "tp.1": 2}
    for by in choices_of(compiled, "meshwright.attention"):
        assert {by["tp.0"][0], by["tp.1"][0]} == {"g", "r"}


def test_context_axis_splits_query_positions_and_gathers_keys():
    torch.manual_seed(0)
    compiled = equal_one_device(Attention(32, 4, 4), mw.Mesh(cp=2), torch.randn(2, 7, 32))
    assert {c["cp"][0] for c in choices_of(compiled, "meshwright.attention")} <= {"s", "g"}


def test_heads_exchanged_for_sequence_by_all_to_all():
    """Ulysses: pinned to heads, attention is reached and left by all-to-alls."""
    torch.manual_seed(0)
    pin = {"attention": "[b, h:cp, s, d]", "attention_backward": "[b, h:cp, s, d]"}
    compiled = equal_one_device(Attention(32, 4, 4), mw.Mesh(cp=2), torch.randn(2, 8, 32), pin=pin)
    assert choices_of(compiled, "meshwright.attention.default")[0]["cp"][0] == "g"
    assert compiled.comm.sent[0]["all_to_all"][0] >= 4


def test_experts_rest_split_and_only_activations_are_reduced():
    model, inputs = ZOO["mixtral"]()
    compiled = mw.compile(model, mw.Mesh(ep=2))
    compiled.step(**inputs)
    experts = {n: v for n, v in compiled.plan.resting.items() if "experts" in n}
    assert experts and all("ep" in v.split_axes for v in experts.values())
    assert set(compiled.comm.sent[0]) == {"all_reduce"}


def test_vocabulary_is_split_in_head_and_loss():
    torch.manual_seed(0)
    model, tokens = nn.Sequential(nn.Embedding(1024, 64), nn.Linear(64, 1024, bias=False)), torch.arange(256)
    want = F.cross_entropy(model(tokens), tokens)
    compiled = mw.compile(model, mw.Mesh(tp=2), loss=F.cross_entropy)
    torch.testing.assert_close(compiled.step(tokens, target=tokens), want.detach())
    assert compiled.plan.resting["1.weight"].dims[0][0].axes == ("tp",)
    assert compiled.plan.decomposed
    logits = 4 * 256 * 1024
    assert 0 < max(int(c[1]) for c in compiled.comm.sent[0].values()) < logits / 8


def test_ulysses_needs_no_pin_to_be_legal():
    torch.manual_seed(0)
    compiled = equal_one_device(Attention(32, 4, 4), mw.Mesh(dp=2, cp=2), torch.randn(2, 8, 32))
    decisions = compiled.plan.decisions
    attention = next(n for n in compiled.plan.choices if n == "attention")
    assert decisions is not None and len(decisions.of(attention)["cp"].seconds) > 1


# -- models without values
def built_on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), Odd(8, 3))


class Odd(nn.Linear):
    """Initialised by what sees the whole tensor, and by a chain of calls on its elements."""

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        nn.init.trunc_normal_(self.bias, std=0.02)


@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2}])
def test_a_model_on_meta_is_initialised_alike_on_every_mesh(axes: dict):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    one = mw.compile(built_on_meta(), mw.Mesh(dp=1), args=(x,), loss=mean_square, seed=3)
    one.initialize()
    compiled = mw.compile(built_on_meta(), mw.Mesh(**axes), args=(x,), loss=mean_square, zero=3, seed=3)
    with pytest.raises(mw.MeshwrightError, match="no values yet"):
        compiled.step(x)
    compiled.initialize()
    for name, value in one.gather("params").items():
        assert torch.equal(compiled.gather("params")[name], value)
    torch.testing.assert_close(compiled.step(x), one.step(x))


def test_first_values_are_drawn_by_element(monkeypatch):
    """No whole tensor is made of what is written element by element; the values have the spread that PyTorch's have."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm = nn.Linear(300, 200), nn.BatchNorm1d(200)
            self.cut = nn.Parameter(torch.empty(200, 50, dtype=torch.bfloat16))

        def reset_parameters(self):
            nn.init.trunc_normal_(self.cut.data, std=0.5, a=-0.5, b=0.5)

        def forward(self, x):
            return self.norm(self.up(x)) @ self.cut.float()

    with torch.device("meta"):
        model = Mixed()
    compiled = mw.compile(model, mw.Mesh(dp=2), args=(torch.randn(4, 300),), loss=mean_square, zero=3)
    monkeypatch.setattr("meshwright.runtime.initialise._values", None)
    compiled.initialize()
    found = compiled.gather("params")
    bound = 300**-0.5
    assert 0.99 * bound < found["up.weight"].abs().max() <= bound
    assert abs(float(found["up.weight"].std()) - bound / 3**0.5) < 0.01 * bound
    assert (found["norm.weight"] == 1).all() and (compiled.gather("buffers")["norm.running_var"] == 1).all()
    assert 0.45 < float(found["cut"].abs().max()) <= 0.5 and abs(float(found["cut"].float().mean())) < 0.01
    assert found["up.bias"].unique().numel() == 200 and found["cut"].unique().numel() > 512


def test_a_model_on_meta_takes_a_state_dict():
    torch.manual_seed(0)
    real = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    x = torch.randn(4, 6)
    compiled = mw.compile(built_on_meta(), mw.Mesh(dp=2, tp=2), args=(x,), loss=mean_square)
    compiled.load_state_dict(real.state_dict())
    torch.testing.assert_close(compiled.step(x), mean_square(real(x)).detach())


def test_initialize_names_what_got_no_value():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.empty(4, 4))

        def forward(self, x):
            return x @ self.w

    with torch.device("meta"):
        model = Bare()
    compiled = mw.compile(model, mw.Mesh(dp=2), args=(torch.randn(2, 4),), loss=mean_square)
    with pytest.raises(mw.MeshwrightError, match="such as w"):
        compiled.initialize()
    compiled.initialize(init=lambda m: nn.init.ones_(m.w) if isinstance(m, Bare) else None)
    assert torch.equal(compiled.gather("params")["w"], torch.ones(4, 4))


def test_sampler_gives_everything_when_the_batch_is_global():
    compiled = mw.compile(nn.Linear(2, 2), mw.Mesh(dp=2), args=(torch.randn(2, 2),), loss=mean_square)
    assert sorted(compiled.sampler(list(range(10)))) == list(range(10))
