"""What a compiled model does beside one step: calls, outputs, recapture, random numbers, plans, verify, dump."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshwright as mw
import pytest
import torch
import torch.nn.functional as F
from random_plans import Norms
from small import CE, MESHES, X, Y, close, grads_of, mesh, mlp, on_every_mesh, sgd, tied
from torch import nn


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


class Hooked(nn.Linear):
    """The gradient of an activation is changed on its way back; one parameter is not trained."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        h = super().forward(input)
        h.register_hook(lambda g: 5 * g)
        return h.tanh()


def test_verify_runs_eager_as_training_does():
    """It ran without gradients, where a hook on an activation is refused."""
    model = nn.Sequential(Hooked(6, 8), nn.Linear(8, 4))
    model[1].bias.requires_grad_(False)
    compiled = mw.compile(model, mesh({"dp": 2}), loss=CE)
    assert compiled.verify(X, target=Y).largest < 1e-4
    assert [p.requires_grad for p in model.parameters()] == [True, True, True, False]


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


class Tempered(nn.Module):
    """Reads a number that its user anneals, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.temperature, self.calls = nn.Linear(4, 3), 1.0, 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) / self.temperature


def test_a_number_of_the_model_that_changes_is_seen(caplog):
    torch.manual_seed(0)
    model, x = Tempered(), torch.randn(4, 4)
    compiled = mw.compile(model, mw.Mesh(dp=2), loss=lambda out: out.square().mean())
    for temperature in (1.0, 2.0, 2.0, 1.0):
        model.temperature = temperature
        want = (model.linear(x) / temperature).square().mean()
        torch.testing.assert_close(compiled.step(x), want.detach())
    assert caplog.text.count("capturing again") == 1  # what forward itself counts is no reason


def test_inputs_that_the_model_refuses_are_told_with_its_line():
    compiled = mw.compile(nn.Sequential(nn.Linear(4, 3)), mw.Mesh(dp=2), loss=lambda out: out.mean())
    compiled.step(torch.randn(4, 4))
    with pytest.raises(RuntimeError) as caught:
        compiled.step(torch.randn(4, 5))
    assert "while the call was captured" in caught.value.__notes__[0]


def test_a_model_that_returns_nothing_can_be_called():
    compiled = mw.compile(Nothing(), mw.Mesh(dp=2))
    assert compiled(torch.randn(4, 4)) is None


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        self.linear(x)


def test_the_model_as_given_may_be_let_go_of_once_it_is_placed(tmp_path: Path):
    """Its values are read once: on the meta device it takes no memory, and all else goes on as before."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 6), torch.randint(0, 5, (6,))
    first = Norms()
    both = [mw.compile(m, mesh({"dp": 2}), optimizer=sgd()) for m in (first, copy.deepcopy(first))]
    for compiled in both:
        compiled.step(x=x, y=y)
    both[0].model.to("meta")
    for compiled in both:
        compiled.step(x=x, y=y)
        compiled.step(x=x[:4], y=y[:4])  # captured again
        compiled.verify(x=x, y=y)
        compiled.save(tmp_path)
        compiled.load(tmp_path)
    kept, gone = ({**c.gather("params"), **c.gather("buffers"), **c.state_dict()} for c in both)
    assert all(torch.equal(value, gone[name]) for name, value in kept.items())
