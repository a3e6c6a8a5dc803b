"""`precision=`: what is cast when, in which dtype gradients are reduced, and what a loss scale does at an overflow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from launch import run_ranks
from low_precision import LOW, compiled
from meshwright.partitioner.capture import capture
from meshwright.partitioner.graph import as_key
from meshwright.partitioner.transfer import start
from small import CE, X, Y, adamw, mlp, sgd
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
GENTLE = mw.LossScale(initial_scale_power=8, hysteresis=1)
MESHES = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2}]


def with_inf(at: int = 0) -> torch.Tensor:
    x = X.clone()
    x[at] = torch.inf
    return x


def state(c: mw.Compiled) -> dict[str, torch.Tensor]:
    return {**c.gather("params"), **c.gather("buffers")}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# -- what is cast
class Casts(TorchDispatchMode):
    """Counts casts from float32 to a low dtype, by shape."""

    def __init__(self):
        super().__init__()
        self.found: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        low = (kwargs or {}).get("dtype") in LOW.values()
        if func is aten._to_copy.default and low and args[0].dtype == torch.float32:
            self.found[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_parameter_is_cast_once_a_step_and_on_its_shard(micro_batches: int):
    c = compiled(mlp(), {"dp": 2}, "bf16", loss=CE, zero=3, micro_batches=micro_batches)
    c.step(X, target=Y)
    with Casts() as casts:
        c.step(X, target=Y)
    shards = Counter(tuple(p.shape) for p in c.parameters())  # of both ranks
    assert {shape: n for shape, n in casts.found.items() if shape in shards} == shards


def sent(c: mw.Compiled, kind: str) -> set[torch.dtype]:
    """The dtypes of the tensors that collectives of a kind move."""
    found = set()
    for node in c.program.graph.fx.nodes:
        if node.target is start:
            pairs = zip(node.args[0], node.args[1:], strict=True)
            found |= {x.meta["val"].dtype for t, x in pairs if t.kind == kind and x.meta["val"].dim()}
    return found


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_gathers_move_two_bytes_and_reductions_what_was_asked(reduce: str):
    c = compiled(mlp(), {"dp": 2}, mw.Precision("bf16", reduce=reduce), loss=CE, optimizer=adamw, zero=3)
    c.step(X, target=Y)
    assert sent(c, "all_gather") == {torch.bfloat16}
    assert sent(c, "reduce_scatter") == {torch.float32 if reduce == "fp32" else torch.bfloat16}
    assert {p.dtype for p in c.parameters()} == {p.grad.dtype for p in c.parameters()} == {torch.float32}  # type: ignore[union-attr]
    every = {t.dtype for o in c.optimizer.each for s in o.state.values() for t in s.values()}  # type: ignore[union-attr]
    assert every == {torch.float32}


def test_a_pinned_call_reduces_its_gradient_in_float32_too():
    pin = {"mm_1": "[o, i] +dp", "mm_2": "[o, i] +dp"}  # products of the two weights' gradients
    c = compiled(mlp(), {"dp": 2}, "bf16", loss=CE, optimizer=adamw, pin=pin, zero=3)
    c.step(X, target=Y)
    assert sent(c, "reduce_scatter") == {torch.float32}


def test_without_precision_the_graph_is_as_it_was():
    plain = capture(mlp(), (X,), {}, target=Y, loss=CE)
    given = capture(mlp(), (X,), {}, target=Y, loss=CE, precision=None)
    assert as_key(plain.fx) == as_key(given.fx) and not plain.masters
    assert not any(n.target is aten._to_copy.default and "float16" in str(n.kwargs) for n in plain.fx.nodes)


def test_a_model_of_bfloat16_and_autocast_are_as_they_were():
    torch.manual_seed(0)
    c = compiled(mlp().bfloat16(), {"dp": 2}, None, loss=lambda o, t: CE(o.float(), t))
    c.step(X.bfloat16(), target=Y)
    assert {g.dtype for g in c.gather("grads").values()} == {torch.bfloat16}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(mlp(), {"dp": 2}, None)(X).dtype == torch.bfloat16


class Islands(nn.Module):
    """A batch norm, a table in float32, a kept layer, a mask in float32 on attention, and a loss inside."""

    def __init__(self):
        super().__init__()
        self.bn, self.f, self.kept = nn.BatchNorm1d(6), nn.Linear(6, 8), nn.Linear(8, 8)
        self.ln, self.g, self.count = nn.LayerNorm(8), nn.Linear(8, 4), nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self.f.weight.dtype
        h = self.f(self.bn(x)) + self.table
        h = self.ln(self.kept(h)) * self.count
        q = h.reshape(1, 4, 8)
        h = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4))[0]
        return F.cross_entropy(self.g(h), y)


@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_kept_parameters_buffers_and_losses_stay_in_float32(kind: str, axes: dict[str, int]):
    torch.manual_seed(0)
    model = Islands()
    scale = GENTLE if kind == "fp16" else "auto"
    c = compiled(model, axes, mw.Precision(kind, keep=("kept.*", "count"), loss_scale=scale))
    loss = c.step(X, y=Y)
    graph = c.program.captured
    dtypes = dict(zip([str(r.name) for r in graph.inputs if r.kind == "param"], graph.placeholders, strict=False))
    stay = {n for n, node in dtypes.items() if node.meta["val"].dtype == torch.float32}
    assert stay == {"bn.weight", "bn.bias", "kept.weight", "kept.bias", "count"}
    nll = next(n for n in graph.fx.nodes if "nll.default" in str(n.target))
    assert nll.args[0].meta["val"].dtype == torch.float32  # type: ignore[union-attr]
    assert loss.dtype == torch.float32
    assert {g.dtype for g in c.gather("grads").values()} == {torch.float32}
    torch.manual_seed(0)
    exact = Islands().double()
    want = F.cross_entropy(_forward(exact), Y)
    assert abs(float(loss) - float(want.detach())) < 0.02
    c.verify(X, y=Y)


def _forward(m: Islands) -> torch.Tensor:
    h = m.ln(m.kept(m.f(m.bn(X.double())) + m.table)) * m.count
    q = h.reshape(1, 4, 8)
    return m.g(F.scaled_dot_product_attention(q, q, q)[0])


def test_outputs_are_float32_and_inputs_get_their_gradients():
    c = compiled(mlp(), {"dp": 2}, "bf16")
    x = X.clone().requires_grad_()
    out = c(x)
    assert out.dtype == torch.float32
    out.square().mean().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert {g.dtype for g in c.gather("grads").values()} == {torch.float32}


def test_the_plan_says_it_and_is_followed_with_it_alone():
    c = compiled(mlp(), {"dp": 2}, "bf16", loss=CE, args=(X,), kwargs={"target": Y})
    assert "computes in bf16 of float32 weights, gradients reduced in fp32" in c.plan.summary()
    text = c.plan.to_text()
    again = mw.Plan.from_text(text, c.mesh)
    assert again.precision == c.plan.precision and again.to_text() == text
    followed = compiled(mlp(), {"dp": 2}, "bf16", loss=CE, plan=text)
    assert torch.equal(followed.step(X, target=Y), c.step(X, target=Y))
    with pytest.raises(mw.PlanError, match="plan given by plan= is for precision 'bf16.*compile has None"):
        compiled(mlp(), {"dp": 2}, None, loss=CE, plan=text).step(X, target=Y)


# -- the loss scale
TABLE = [  # options, then per step "ok" or "inf" and the scale after it
    (mw.LossScale(initial_scale_power=4, loss_scale_window=2), "ok 16 ok 32 ok 32 ok 64"),
    (mw.LossScale(initial_scale_power=4, loss_scale_window=2), "inf 16 inf 8 inf 4 ok 4 ok 8 inf 8 inf 4"),
    (mw.LossScale(initial_scale_power=4, loss_scale_window=2), "ok 16 inf 16 ok 16 inf 8"),
    (mw.LossScale(initial_scale_power=4, hysteresis=1, loss_scale_window=3), "inf 8 ok 8 inf 4 ok 4 ok 4 ok 8"),
    (mw.LossScale(initial_scale_power=2, hysteresis=1, min_loss_scale=2), "inf 2 ok 2"),
    (mw.LossScale(loss_scale=128.0), "ok 128 inf 128 inf 128 ok 128"),
]


@pytest.mark.parametrize("options,steps", TABLE, ids=range(len(TABLE)))
def test_the_scale_goes_through_its_states(options: mw.LossScale, steps: str):
    from meshwright.runtime.loss_scale import Scaler

    scaler, words = Scaler(options), steps.split()
    for kind, value in zip(words[::2], words[1::2], strict=True):
        scaler.update(kind == "inf")
        assert (scaler.scale.value, scaler.overflow) == (float(value), kind == "inf")
    assert scaler.scale.skipped == words.count("inf")
    again = Scaler(options)
    again.load_state_dict(scaler.state_dict())
    assert again.scale == scaler.scale
    with pytest.raises(mw.MeshwrightError, match="no state of a loss scale"):
        again.load_state_dict({"value": 1.0})


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.f, self.bn, self.g = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.g(torch.tanh(self.bn(self.f(x))))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_one_ranks_overflow_skips_the_step_everywhere(axes: dict[str, int]):
    options = {"loss": CE, "optimizer": adamw, "clip_grad_norm": 0.5}
    if "pp" in axes:
        options["micro_batches"] = 2
    c = compiled(Normed(), axes, mw.Precision("fp16", loss_scale=GENTLE), **options)
    sched = c.scheduler(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
    c.step(X, target=Y)
    sched.step()
    before, moments = state(c), [str(o.state_dict()) for o in c.optimizer.each]  # type: ignore[union-attr]
    c.step(with_inf(), target=Y)
    sched.step()
    assert equal(before, state(c)) and moments == [str(o.state_dict()) for o in c.optimizer.each]  # type: ignore[union-attr]
    assert (c.skipped_steps, c.loss_scale, sched.get_last_lr()) == (1, 128.0, [0.005])
    assert all(p.grad is None for p in c.parameters())
    c.step(X, target=Y)
    sched.step()
    assert (c.skipped_steps, sched.get_last_lr()) == (1, [0.0025])
    now = state(c)
    assert all(torch.isfinite(v).all() for v in now.values()) and not equal(before, now)


def test_the_scale_changes_no_number():
    """A power of two is taken out again exactly, where nothing overflows or underflows."""
    runs = []
    for power in (0, 10):
        scale = mw.LossScale(initial_scale_power=power)
        c = compiled(mlp(), {"dp": 2}, mw.Precision(loss_scale=scale), loss=CE, optimizer=sgd())
        loss = c.step(X, target=Y)
        runs.append({"loss": loss, **state(c)})
    assert equal(*runs)


def test_an_overflow_at_the_least_scale_is_an_error():
    scale = mw.LossScale(initial_scale_power=0, hysteresis=1)
    c = compiled(mlp(), {"dp": 2}, mw.Precision("fp16", loss_scale=scale), loss=CE, optimizer=sgd())
    before = state(c)
    with pytest.raises(mw.MeshwrightError, match="minimum, 1: the step was skipped"):
        c.step(with_inf(), target=Y)
    assert equal(before, state(c))


# -- a scaler of the user's own
def by_grad_scaler(trainer: Any, loss_of: Any, xs: list[torch.Tensor], scale: float = 2.0**10) -> float:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for x in xs:
        trainer.optimizer.zero_grad()
        scaler.scale(loss_of(trainer(x))).backward()
        scaler.step(trainer.optimizer)
        scaler.update()
    return scaler.get_scale()


XS = [X, with_inf(3), X * 2]


@pytest.mark.parametrize("precision", [None, mw.Precision("fp16", loss_scale=None)], ids=str)
def test_a_grad_scaler_of_torch_drives_it(precision: Any):
    from cases.oracle import Eager

    eager = Eager(mlp(), optimizer=sgd())
    c = compiled(mlp(), {"dp": 2, "tp": 2}, precision, optimizer=sgd())
    loss_of = lambda out: CE(out, Y)  # noqa: E731
    assert by_grad_scaler(eager, loss_of, XS) == by_grad_scaler(c, loss_of, XS) == 2.0**9
    rtol = 1e-4 if precision is None else 1e-2
    for name, want in eager.gather("params").items():
        torch.testing.assert_close(c.gather("params")[name], want, rtol=rtol, atol=rtol / 10)


def overflow_here(rank: int, world: int) -> Any:
    """Two processes, each its own rank: rank 1's data overflow in one step."""
    found = []
    for axes in ({"dp": 2}, {"tp": 2}, {"pp": 2}):
        options = {"micro_batches": 2} if "pp" in axes else {}
        c = compiled(Normed(), axes, mw.Precision("fp16", loss_scale=GENTLE), loss=CE, optimizer=adamw, **options)
        c.step(X, target=Y)
        before = state(c)
        c.step(with_inf(3), target=Y)
        found.append((c.skipped_steps, c.loss_scale, equal(before, state(c))))
    c = compiled(mlp(), {"dp": 2}, None, optimizer=sgd(), zero=3)
    scale = by_grad_scaler(c, lambda out: CE(out, Y), XS)
    values = {n: v.tolist() for n, v in c.gather("params").items()}
    return found, scale, values


@pytest.mark.gloo
def test_processes_skip_together():
    one, two = run_ranks("test_precision:overflow_here", 2)
    assert one == two
    found, scale, values = one
    assert found == [(1, 128.0, True)] * 3
    from cases.oracle import Eager

    eager = Eager(mlp(), optimizer=sgd())
    assert by_grad_scaler(eager, lambda out: CE(out, Y), XS) == scale
    for name, want in eager.gather("params").items():
        torch.testing.assert_close(torch.tensor(values[name]), want, rtol=1e-4, atol=1e-5)
