"""What a compiled model offers beside the numbers of one step: state, optimizers, outputs, recapture, dumps, bounds."""

from __future__ import annotations

import copy
import gc
import logging
import math
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from random_plans import GPT, Norms
from torch import nn

MESHES: list[dict[str, int]] = [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}]
ids = [pytest.param(m, id="x".join(f"{a}{n}" for a, n in m.items())) for m in MESHES]
on_every_mesh = pytest.mark.parametrize("axes", ids)


def mesh(axes: dict[str, int]) -> mw.Mesh:
    return mw.Mesh(**axes, device="cpu")  # type: ignore[arg-type]


def tied(layers: int = 1, drop: float = 0.0) -> tuple[GPT, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    batch = torch.randint(0, 13, (2, 4, 6))
    return GPT(layers=layers, drop=drop), {"ids": batch[0], "y": batch[1]}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


X, Y = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 3, 1, 2])
CE = F.cross_entropy


def sgd(lr: float = 0.1, **more: Any) -> Any:
    return lambda m: torch.optim.SGD(m.parameters(), lr=lr, **more)


def adamw(m: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), lr=0.01)


def close(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if value is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(got[name], value.detach(), rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023


def params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: p.grad for n, p in model.named_parameters()}


def eager_steps(model: nn.Module, make: Any, steps: int, after: Any = None, groups: Any = None) -> nn.Module:
    optimizer = make(model)
    scheduler = after(optimizer) if after else None
    for _ in range(steps):
        optimizer.zero_grad()
        CE(model(X), Y).backward()
        if groups:
            groups(model)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return model


# -- state
@on_every_mesh
def test_the_state_dict_is_the_models_own(axes: dict[str, int]):
    model, batch = tied()
    compiled = mw.compile(model, mesh(axes), kwargs=batch)
    have = compiled.state_dict()
    assert list(have) == list(model.state_dict())
    close(have, model.state_dict())
    assert torch.equal(have["head.weight"], have["tokens.weight"])


@on_every_mesh
def test_state_moves_to_another_mesh(axes: dict[str, int]):
    model, batch = tied()
    one = mw.compile(model, mesh(axes), optimizer=adamw, zero=1)
    one.step(**batch)
    other = mw.compile(tied()[0], mesh({"tp": 3}), kwargs=batch)
    other.load_state_dict(one.state_dict())
    close(other.state_dict(), one.state_dict())
    torch.testing.assert_close(other.step(**batch), one.step(**batch), rtol=1e-4, atol=1e-5)


def test_a_loaded_tied_weight_may_come_under_either_name():
    model, batch = tied()
    compiled = mw.compile(model, mesh({"tp": 2}), kwargs=batch)
    values = compiled.state_dict()
    del values["head.weight"]
    values["tokens.weight"] = torch.ones(13, 12)
    with pytest.raises(mw.MeshwrightError, match=r"missing head.weight"):
        compiled.load_state_dict(values)
    compiled.load_state_dict(values, strict=False)
    assert torch.equal(compiled.state_dict()["head.weight"], torch.ones(13, 12))


@on_every_mesh
def test_buffers_follow_the_batch(axes: dict[str, int]):
    torch.manual_seed(0)
    model, x, y = Norms(), torch.randn(6, 6), torch.randint(0, 5, (6,))
    twin = copy.deepcopy(model)
    compiled = mw.compile(model, mesh(axes))
    for _ in range(2):
        compiled.step(x=x, y=y)
        twin(x=x, y=y)
    close(compiled.gather("buffers"), dict(twin.named_buffers()))
    assert int(compiled.state_dict()["net.1.num_batches_tracked"]) == 2
    compiled.load_state_dict(model.state_dict())
    assert int(compiled.gather("buffers")["net.1.num_batches_tracked"]) == 0


def test_gathered_tensors_are_copies():
    compiled = mw.compile(mlp(), mesh({"dp": 2}), loss=CE, args=(X,), kwargs={"target": Y})
    for what in ("params", "grads", "buffers"):
        compiled.step(X, target=Y)
        for t in compiled.gather(what).values():
            t.fill_(7.0)
    assert not any((t == 7).all() for t in compiled.gather("params").values())
    assert not any((t == 7).all() for t in compiled.gather("grads").values() if t is not None)


def test_a_meta_model_is_filled_before_its_first_step():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
    compiled = mw.compile(model, mesh({"tp": 2}), loss=CE, args=(X,), kwargs={"target": Y})
    compiled.load_state_dict(mlp().state_dict())
    torch.testing.assert_close(compiled.step(X, target=Y), CE(mlp()(X), Y).detach())


@on_every_mesh
def test_parameters_have_the_models_names_and_dims(axes: dict[str, int]):
    model, batch = tied()
    model.norm.bias.requires_grad_(False)
    compiled = mw.compile(model, mesh(axes), kwargs=batch, zero=3 if "dp" in axes else 0)
    own = dict(model.named_parameters())
    found: dict[str, int] = {}
    for name, p in compiled.named_parameters():
        assert isinstance(p, nn.Parameter)
        assert (p.ndim, p.dtype, p.requires_grad) == (own[name].ndim, own[name].dtype, own[name].requires_grad)
        found[name] = found.get(name, 0) + 1
    assert found == dict.fromkeys(own, math.prod(axes.values()))
    assert len(list(compiled.parameters())) == sum(found.values())


def test_the_models_own_parameters_are_not_touched():
    model = mlp()
    before = params_of(model)
    mw.compile(model, mesh({"dp": 2}), loss=CE, optimizer=sgd()).step(X, target=Y)
    close(params_of(model), before)
    assert all(p.grad is None for p in model.parameters())


# -- optimizers
@on_every_mesh
def test_a_scheduler_changes_the_rate_of_every_rank(axes: dict[str, int]):
    def decay(o: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(o, 1, 0.5)

    compiled = mw.compile(mlp(), mesh(axes), loss=CE, optimizer=sgd(momentum=0.9))
    scheduler = compiled.scheduler(decay)
    for _ in range(3):
        compiled.step(X, target=Y)
        scheduler.step()
    assert scheduler.get_last_lr() == [0.1 * 0.5**3]
    close(compiled.gather("params"), params_of(eager_steps(mlp(), sgd(momentum=0.9), 3, decay)))


@on_every_mesh
def test_weight_decay_groups_by_ndim(axes: dict[str, int]):
    def make(m: Any) -> torch.optim.Optimizer:
        named = list(m.named_parameters())
        return torch.optim.AdamW(
            [
                {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.5},
                {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
            ],
            lr=0.01, eps=1e-3,
        )  # fmt: skip

    compiled = mw.compile(mlp(), mesh(axes), loss=CE, optimizer=make)
    for _ in range(2):
        compiled.step(X, target=Y)
    close(compiled.gather("params"), params_of(eager_steps(mlp(), make, 2)))
    assert compiled.optimizer is not None
    assert [g["weight_decay"] for g in compiled.optimizer.param_groups] == [0.5, 0.0]


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@on_every_mesh
def test_clipping_is_by_the_true_global_norm(axes: dict[str, int], p: float):
    zero = 1 if "dp" in axes else 0
    compiled = mw.compile(mlp(), mesh(axes), loss=CE, zero=zero)
    compiled.step(X, target=Y)
    model = mlp()
    CE(model(X), Y).backward()
    want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, p)
    torch.testing.assert_close(mw.clip_grad_norm_(compiled, 0.1, p), want)
    close(compiled.gather("grads"), grads_of(model))
    inside = mw.compile(mlp(), mesh(axes), loss=CE, zero=zero, clip_grad_norm=(0.1, p))
    inside.step(X, target=Y)
    torch.testing.assert_close(inside.grad_norm, want)
    close(inside.gather("grads"), grads_of(model))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_every_zero_stage_is_the_same_training(axes: dict[str, int]):
    found = []
    for zero in (0, 1, 2, 3):
        compiled = mw.compile(mlp(), mesh(axes), loss=CE, optimizer=sgd(momentum=0.9), zero=zero)
        losses = [float(compiled.step(X, target=Y)) for _ in range(2)]
        assert compiled.plan.zero == zero
        split = any(a.startswith("dp") for rest in compiled.plan.resting.values() for a in rest.split_axes)
        assert split == (zero > 0)
        found.append(({"losses": torch.tensor(losses)} | compiled.gather("params")))
    for other in found[1:]:
        close(other, found[0])
    close({k: v for k, v in found[0].items() if k != "losses"}, params_of(eager_steps(mlp(), sgd(momentum=0.9), 2)))


@on_every_mesh
def test_backward_calls_add_up(axes: dict[str, int]):
    compiled = mw.compile(mlp(), mesh(axes), optimizer=sgd())
    model = mlp()
    for part in (slice(0, 2), slice(2, 4)):
        (CE(compiled(X[part]), Y[part]) / 2).backward()
    CE(model(X), Y).backward()
    close(compiled.gather("grads"), grads_of(model))
    assert compiled.optimizer is not None
    compiled.optimizer.step()
    compiled.optimizer.zero_grad()
    assert set(compiled.gather("grads").values()) == {None}


# -- calls and outputs
def test_eval_and_no_grad():
    torch.manual_seed(0)
    model, x, y = Norms(), torch.randn(6, 6), torch.randint(0, 5, (6,))
    twin = copy.deepcopy(model)
    compiled = mw.compile(model, mesh({"dp": 2}))
    compiled.step(x=x, y=y)
    twin(x=x, y=y)
    compiled.eval()
    with torch.no_grad():
        out = compiled(x=x, y=y)
    assert not out.requires_grad
    torch.testing.assert_close(out, twin.eval()(x=x, y=y).detach(), rtol=1e-4, atol=1e-5)
    close(compiled.gather("buffers"), dict(twin.named_buffers()))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x=x, y=y), out, rtol=0, atol=0)


@dataclass
class Pair:
    left: torch.Tensor
    right: Any = None


class Shapes(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.f, self.kind = nn.Linear(6, 4), kind

    def forward(self, x: torch.Tensor) -> Any:
        h = self.f(x)
        made = {
            "dict": {"h": h, "n": 3, "text": "a"},
            "dataclass": Pair(h, None),
            "nested": [(h, {"a": [h * 2, None]}), Pair(h + 1, (h.sum(),))],
            "tuple": (h, None, h.argmax(-1)),
            "twice": (h, h),
            "input": (x, h),
        }
        return made[self.kind]


def same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-4, atol=1e-5)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        [same(got[k], want[k]) for k in want]
    elif isinstance(want, (list, tuple)):
        [same(a, b) for a, b in zip(got, want, strict=True)]
    elif isinstance(want, Pair):
        same((got.left, got.right), (want.left, want.right))
    else:
        assert got == want


@pytest.mark.parametrize("kind", ["dict", "dataclass", "nested", "tuple", "twice", "input"])
def test_outputs_keep_their_form(kind: str):
    torch.manual_seed(0)
    model = Shapes(kind)
    out = mw.compile(model, mesh({"dp": 2}))(X)
    same(out, model(X))


def test_inputs_get_their_gradients():
    x = X.clone().requires_grad_()
    twin = X.clone().requires_grad_()
    compiled, model = mw.compile(mlp(), mesh({"dp": 2, "tp": 2})), mlp()
    for _ in range(2):
        compiled(x).square().sum().backward()
        model(twin).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-4, atol=1e-5)
    close(compiled.gather("grads"), grads_of(model))


def test_new_shapes_are_captured_again_and_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshwright.runtime.compiled.PROGRAMS", 3)
    compiled, model = mw.compile(mlp(), mesh({"dp": 2}), loss=CE), mlp()
    with caplog.at_level(logging.WARNING, "meshwright"):
        for n in (2, 3, 4, 4, 5, 6, 2):
            x, y = torch.ones(n, 6), torch.zeros(n, dtype=torch.long)
            torch.testing.assert_close(compiled.step(x, target=y), CE(model(x), y).detach())
            assert len(compiled._runners) <= 3
    said = [r.getMessage() for r in caplog.records if "capturing again" in r.getMessage()]
    assert len(said) == 5
    assert "[3, 6], [3]" in said[0]


def test_equal_calls_are_captured_once(caplog: pytest.LogCaptureFixture):
    compiled = mw.compile(mlp(), mesh({"dp": 2}), loss=CE)
    with caplog.at_level(logging.WARNING, "meshwright"):
        for _ in range(3):
            compiled.step(torch.rand(4, 6), target=Y)
    assert not caplog.records


def test_dropout_draws_the_same_bits_on_every_mesh():
    def losses(axes: dict[str, int], seed: int = 3) -> torch.Tensor:
        compiled = mw.compile(nn.Sequential(mlp(), nn.Dropout(0.5)), mesh(axes), loss=CE, seed=seed)
        return torch.stack([compiled.step(X, target=Y) for _ in range(3)])

    first = losses({"dp": 1})
    assert len(set(first.tolist())) == 3
    for axes in MESHES:
        torch.testing.assert_close(losses(axes), first, rtol=1e-5, atol=1e-6)
    assert float((losses({"dp": 2}, seed=4) - first).abs().max()) > 1e-4


def test_dropout_inside_a_gpt_is_the_same_on_a_mesh():
    got = []
    for axes in ({"dp": 1}, {"dp": 2, "tp": 2}):
        model, batch = tied(drop=0.5)
        got.append(mw.compile(model, mesh(axes)).step(**batch))
    torch.testing.assert_close(got[1], got[0], rtol=1e-5, atol=1e-6)


class Drop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5)


def test_dropout_masks_are_equal_to_the_bit():
    x = torch.ones(4, 6)
    outs = [mw.compile(Drop(), mesh(axes), seed=1)(x) for axes in [{"dp": 1}, *MESHES, {"dp": 3}]]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert 0 < int((outs[0] == 0).sum()) < 24


@on_every_mesh
def test_autocast_is_recorded(axes: dict[str, int]):
    compiled, model = mw.compile(mlp(), mesh(axes)), mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, want = compiled(X), model(X)
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, rtol=2e-2, atol=1e-2)
    assert compiled(X).dtype == torch.float32


# -- plans
@pytest.mark.parametrize("zero,axes", [(0, {"tp": 2}), (3, {"dp": 2, "tp": 2})], ids=str)
def test_a_saved_plan_gives_the_same_program(axes: dict[str, int], zero: int):
    model, batch = tied()
    first = mw.compile(model, mesh(axes), kwargs=batch, zero=zero)
    again = mw.compile(model, mesh(axes), kwargs=batch, plan=first.plan.to_text())
    assert again.plan.to_text() == first.plan.to_text()
    assert again.program.dumps() == first.program.dumps()
    torch.testing.assert_close(again.step(**batch), first.step(**batch), rtol=0, atol=0)


def test_a_saved_plan_holds_when_the_first_call_is_a_forward():
    pin = {"0.weight": "[8, i:tp]"}
    first = mw.compile(mlp(), mesh({"tp": 2}), loss=CE, args=(X,), kwargs={"target": Y}, pin=pin)
    again = mw.compile(mlp(), mesh({"tp": 2}), loss=CE, plan=first.plan.to_text())
    torch.testing.assert_close(again(X), mlp()(X), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again.step(X, target=Y), first.step(X, target=Y), rtol=1e-4, atol=1e-5)
    close(again.gather("grads"), first.gather("grads"))


def test_pins_hold():
    for text in ("[o:tp, i]", "[o, i:tp]", "[o, i]"):
        compiled = mw.compile(mlp(), mesh({"tp": 2}), loss=CE, pin={"0.weight": text})
        compiled.step(X, target=Y)
        want = text.replace("o", "8").replace("i", "6")
        assert str(compiled.plan.resting["0.weight"]) == want
        model = mlp()
        CE(model(X), Y).backward()
        close(compiled.gather("grads"), grads_of(model))


def test_a_pin_by_glob_holds_for_every_layer():
    model, batch = tied(layers=2)
    compiled = mw.compile(model, mesh({"tp": 2}), kwargs=batch, pin={"*.up.weight": "[o, i:tp]"})
    rest = {n: str(layout) for n, layout in compiled.plan.resting.items() if n.endswith("up.weight")}
    assert len(rest) == 2
    assert all(":tp" in text.split(", ")[1] for text in rest.values()), rest


def test_explain_names_the_choices():
    model, batch = tied()
    compiled = mw.compile(model, mesh({"dp": 2, "tp": 2}), kwargs=batch)
    text = compiled.explain("blocks.0.up")
    assert "dp: " in text
    assert "tp: split" in text
    assert "blocks.0.up.weight rests as" in compiled.explain("blocks.0.up.weight")


# -- the microscope
@on_every_mesh
def test_verify_passes(axes: dict[str, int]):
    model, batch = tied()
    report = mw.compile(model, mesh(axes)).verify(**batch)
    assert report.compared > 50
    assert report.largest < 1e-4


def test_verify_names_a_wrong_rule(monkeypatch: pytest.MonkeyPatch):
    from meshwright.partitioner.rules.split import Split

    localize = Split.localize

    def wrong(self: Split, call: Any, args: tuple, kwargs: dict, mesh: Any, rank: int) -> Any:
        target, args, kwargs = localize(self, call, args, kwargs, mesh, rank)
        broken = target is torch.ops.aten.gelu.default and rank == 1
        return (torch.ops.aten.relu.default if broken else target), args, ({} if broken else kwargs)

    monkeypatch.setattr(Split, "localize", wrong)
    with pytest.raises(mw.VerifyError) as caught:
        mw.compile(mlp(), mesh({"dp": 2}), loss=CE).verify(X, target=Y)
    assert "the first op that differs is gelu = aten.gelu.default in module 1 at " in str(caught.value)
    assert "test_compiled.py:" in str(caught.value)


def test_verify_names_a_wrong_pass(monkeypatch: pytest.MonkeyPatch):
    from meshwright.passes import localize

    slice_args = localize.slice_args

    def wrong(step: Any, mesh: Any, rank: int) -> Any:
        return slice_args(step, mesh, rank)._replace(start=0)

    monkeypatch.setattr(localize, "slice_args", wrong)
    with pytest.raises(mw.VerifyError, match=r"first op that differs is .*test_compiled\.py:\d+"):
        mw.compile(mlp(), mesh({"dp": 2}), loss=CE).verify(X, target=Y)


def test_verify_changes_nothing():
    compiled = mw.compile(mlp(), mesh({"dp": 2}), loss=CE, optimizer=sgd())
    compiled.step(X, target=Y)
    before = compiled.gather("params") | {f"grad {n}": g for n, g in compiled.gather("grads").items()}
    compiled.verify(X, target=Y)
    close(compiled.gather("params") | {f"grad {n}": g for n, g in compiled.gather("grads").items()}, before)


def test_dump_writes_the_files(tmp_path: Path):
    compiled = mw.compile(mlp(), mesh({"dp": 2, "tp": 2}), loss=CE)
    compiled.step(X, target=Y)
    compiled.dump(tmp_path / "new" / "folder")
    files = {p.name: p.read_text() for p in (tmp_path / "new" / "folder").iterdir()}
    assert {"plan.txt", "plan.json", "program.dot", "0_captured.txt", "1_insert_reshards.txt", "rank3.py"} <= set(files)
    assert "def rank3" in files["rank3.py"]
    assert files["plan.json"] == compiled.plan.to_text()
    assert all(files.values())
    compile(files["rank3.py"], "rank3.py", "exec")


# -- bounds
@pytest.mark.slow
@pytest.mark.parametrize("form", ["step", "autograd"])
def test_memory_stays_flat(form: str):
    compiled = mw.compile(mlp(), mesh({"dp": 2, "tp": 2}), loss=CE, optimizer=adamw)

    def run(times: int) -> None:
        for _ in range(times):
            if form == "step":
                compiled.step(X, target=Y)
            else:
                CE(compiled(X), Y).backward()
                assert compiled.optimizer is not None
                compiled.optimizer.step()
                compiled.optimizer.zero_grad()

    run(10)
    gc.collect()
    tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    tracemalloc.start()
    run(5)
    before = tracemalloc.get_traced_memory()[0]
    run(200)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert abs(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) - tensors) <= 60  # a step's gradients come and go
    assert grown < 50_000


@pytest.mark.slow
def test_a_forward_whose_backward_never_comes_is_freed():
    compiled = mw.compile(mlp(), mesh({"dp": 2}))
    compiled(X)
    gc.collect()
    before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    for _ in range(50):
        compiled(X)
    gc.collect()
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) <= before + 5


@pytest.mark.slow
def test_a_hundred_layers_compile_in_bounded_time():
    model, batch = tied(layers=100)
    begun = time.process_time()
    compiled = mw.compile(model, mesh({"dp": 2, "tp": 2}), kwargs=batch)
    assert time.process_time() - begun < 240
    assert "blocks.*.up.weight" in str(compiled.plan)
    with torch.no_grad():
        want = model(**batch)
    torch.testing.assert_close(compiled.step(**batch), want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_three_thousand_parameters_compile_in_bounded_time():
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(1500) for m in (nn.LayerNorm(4), nn.Tanh())))
    x = torch.randn(4, 4)
    begun = time.process_time()
    compiled = mw.compile(model, mesh({"dp": 2}), args=(x,), loss=torch.Tensor.sum)
    assert time.process_time() - begun < 240
    torch.testing.assert_close(compiled.step(x), model(x).sum().detach(), rtol=1e-3, atol=1e-4)
    assert len(compiled.gather("grads")) == 3000
