"""Saved plans with micro-batches and stages run as before; damaged ones, and options against them, are refused."""

import copy
import json
from collections.abc import Callable
from typing import Any

import meshwright as mw
import pytest
import torch
from pipeline_models import MODELS, adamw, rows_for
from torch import nn


def compiled(name: str, axes: dict[str, int], count: int, **options: Any) -> tuple[mw.Compiled, dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = MODELS[name](rows_for(axes, count))
    mesh = mw.Mesh(**axes, device="cpu")  # type: ignore[arg-type]
    return mw.compile(model, mesh, kwargs=batch, optimizer=adamw, **options), batch


RUNS = [
    ("twice", {"pp": 2}, 1, {}),
    ("tied", {"pp": 2}, 3, {"schedule": "zb-v"}),
    ("gpt", {"dp": 2, "pp": 2}, 4, {"zero": 1}),
    ("unet", {"dp": 1}, 3, {}),
    ("encoder-decoder", {"tp": 2}, 2, {}),
]


@pytest.mark.parametrize("name,axes,count,options", RUNS, ids=str)
def test_a_saved_plan_runs_as_before(name: str, axes: dict[str, int], count: int, options: dict[str, Any]):
    first, batch = compiled(name, axes, count, micro_batches=count, **options)
    text = first.plan.to_text()
    again, _ = compiled(name, axes, count, plan=text)
    assert again.plan.to_text() == text
    assert again.program.dumps() == first.program.dumps()
    assert again.plan.seconds == first.plan.seconds
    assert again.plan.stages == first.plan.stages and again.plan.schedule == first.plan.schedule
    torch.testing.assert_close(again.step(**batch), first.step(**batch), rtol=0, atol=0)
    torch.testing.assert_close(again.gather("params"), first.gather("params"), rtol=0, atol=0)


def test_a_saved_plan_with_stages_holds_when_the_first_call_is_a_forward():
    first, batch = compiled("twice", {"pp": 2}, 4, micro_batches=4, schedule="zb-v")
    again = mw.compile(first.model, first.mesh, plan=first.plan.to_text(), optimizer=adamw)
    with torch.no_grad():
        loss = again(**batch)
    torch.testing.assert_close(again.step(**batch), loss)
    first.step(**batch)
    torch.testing.assert_close(again.gather("params"), first.gather("params"))


def test_a_schedule_of_ones_own_is_no_hindrance_to_forward():
    text = "0: 0F0 0F1 0BW0 0BW1\n1: 1F0 1BW0 1F1 1BW1"
    first, batch = compiled("twice", {"pp": 2}, 2, micro_batches=2, schedule=text)
    other = mw.compile(first.model, first.mesh, micro_batches=2, schedule=text)
    with torch.no_grad():
        torch.testing.assert_close(first(**batch), first.model(**batch))
        torch.testing.assert_close(other(**batch), first.model(**batch))


Body = dict[str, Any]


def moved_call(body: Body) -> None:
    name, stage = next(iter(body["stages"].items()))
    body["stages"][name] = 1 - stage


def no_stages(body: Body) -> None:
    for key in ("cuts", "placement", "stages", "stages_of_parameters", "schedule"):
        del body[key]


DAMAGE: dict[str, tuple[Callable[[Body], None], str]] = {
    "a call on another stage": (moved_call, "do not fit its cuts: .* is on stage 1, the cuts put it on stage 0"),
    "a call left out": (lambda b: b["stages"].popitem(), "is on no stage, the cuts put it on"),
    "a call that is not there": (lambda b: b["stages"].update(nonsense=0), "nonsense is on stage 0, .* on no stage"),
    "a parameter elsewhere": (lambda b: b["stages_of_parameters"].update({"c.bias": [0]}), "parameter c.bias is on"),
    "a cut that is no call": (lambda b: b.update(cuts=["nonsense"]), r"cuts \['nonsense'\] are not 1 forward calls"),
    "a cut too many": (lambda b: b.update(cuts=b["cuts"] * 2), "are not 1 forward calls"),
    "a placement out of range": (lambda b: b.update(placement=[0, 2]), r"places its stages on \[0, 2\], pp has 2"),
    "the placement turned round": (lambda b: b.update(placement=[1, 0]), "schedule places stages on"),
    "no stages at all": (no_stages, "has no stages and no schedule"),
    "no schedule": (lambda b: b.pop("schedule"), "has 2 stages and no schedule"),
    "a schedule cut short": (lambda b: b["schedule"].pop(), "1 ranks .* here are 2"),
    "a schedule that is none": (lambda b: b.update(schedule=["0: nonsense"]), "this saved plan is damaged"),
    "a stage that is no number": (lambda b: b["stages"].update(tanh="x"), "this saved plan is damaged"),
    "half the stages": (lambda b: b.pop("placement"), "this saved plan is damaged .*placement"),
    "other micro-batches": (lambda b: b.update(micro_batches=3), "2 micro-batches; here are 2 and 3"),
}


@pytest.fixture(scope="module")
def saved() -> tuple[mw.Compiled, dict[str, Any], str]:
    first, batch = compiled("twice", {"pp": 2}, 2, micro_batches=2, schedule="1f1b")
    return first, batch, first.plan.to_text()


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_plan_is_refused(saved: tuple[mw.Compiled, dict[str, Any], str], damage: str):
    first, batch, text = saved
    change, message = DAMAGE[damage]
    body = copy.deepcopy(json.loads(text))
    change(body)
    with pytest.raises(mw.PlanError, match=message):
        mw.compile(first.model, first.mesh, kwargs=batch, plan=json.dumps(body))


OTHERWISE = [
    ({"micro_batches": 3}, "micro_batches=3, but the plan given by plan= has 2"),
    ({"schedule": "gpipe"}, "schedule='gpipe', but the plan given by plan= has 1f1b"),
    ({"schedule": "zb-v"}, "schedule='zb-v', but the plan given by plan= has 1f1b"),
]


@pytest.mark.parametrize("options,message", OTHERWISE, ids=str)
def test_options_that_say_otherwise_than_the_plan(
    saved: tuple[mw.Compiled, dict[str, Any], str], options: dict[str, Any], message: str
):
    first, batch, text = saved
    with pytest.raises(mw.PlanError, match=message):
        mw.compile(first.model, first.mesh, kwargs=batch, plan=text, **options)


def test_options_that_say_the_same_as_the_plan(saved: tuple[mw.Compiled, dict[str, Any], str]):
    first, batch, text = saved
    again = mw.compile(first.model, first.mesh, kwargs=batch, plan=text, micro_batches=2, schedule="1f1b")
    assert again.plan.to_text() == text


def test_a_schedule_beside_a_plan_without_a_pipeline():
    first, batch = compiled("twice", {"dp": 2}, 2, micro_batches=2)
    with pytest.raises(mw.PlanError, match="no axis pp"):
        mw.compile(first.model, first.mesh, kwargs=batch, plan=first.plan, schedule="1f1b")


@pytest.mark.parametrize("options", [{"zero": 3}, {"memory": 10**9}, {"pin": {"*": "[a]"}}], ids=str)
def test_what_a_given_plan_does_not_follow_is_refused(options: dict[str, Any]):
    """It was ignored in silence."""
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    plan = mw.compile(model, mw.Mesh(dp=2, device="cpu"), args=(x,), loss=lambda y: y.sum(), zero=0).plan
    with pytest.raises(mw.PlanError, match=f"{next(iter(options))}=.* plan="):
        mw.compile(model, mw.Mesh(dp=2, device="cpu"), args=(x,), loss=lambda y: y.sum(), plan=plan, **options)


def test_an_optimizer_class_is_a_function_that_makes_one():
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    compiled = mw.compile(model, mw.Mesh(dp=2, device="cpu"), loss=lambda y: y.sum(), optimizer=torch.optim.AdamW)
    compiled.step(x)
    assert not torch.equal(compiled.gather("params")["weight"], model.weight)
