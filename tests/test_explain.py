"""Plans as text: the summary, the difference of two, and the reasons for calls and parameters."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import meshwright as mw
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.partitioner.capture import capture
from meshwright.partitioner.fold import Folder
from meshwright.partitioner.graph import Graph
from meshwright.partitioner.plan import Plan
from meshwright.partitioner.planner import Options, make_plan, replan
from meshwright.partitioner.traffic import Total
from meshwright.partitioner.units import bytes_text, seconds_text
from random_plans import GPT, randomly

Golden = Callable[[str, str], bool]


def captured(layers: int = 2, d: int = 384) -> Graph:
    """So wide that a tensor split pays: a small model's gradients travel in one message, its activations do not."""
    torch.manual_seed(0)
    ids = torch.zeros(4, 6, dtype=torch.long)
    batch = {"ids": ids, "y": ids}
    return capture(GPT(d=d, layers=layers), (), batch, loss=lambda out, target: out)


def planned(axes: dict[str, int], layers: int = 2, d: int = 384, **options: Any) -> Plan:
    mesh = mw.Mesh(**axes, device="cpu")  # type: ignore[arg-type]
    return make_plan(captured(layers, d), mesh, Options(**options))[1]


@cache
def plan_of(zero: int | str = "auto") -> Plan:
    return planned({"dp": 2, "tp": 2}, zero=zero)


@cache
def free() -> Plan:
    return planned({"x": 2, "y": 2})


def call_of(plan: Plan, module: str, op: str) -> str:
    """The first call of an op in a module."""
    return next(c for c, (m, o, _) in plan.modules.items() if m == module and op in o)


# -- summary
def test_the_summary(golden: Golden):
    assert golden("gpt_summary.txt", plan_of(0).summary() + "\n")


def test_the_plan_as_text_is_its_summary():
    assert str(plan_of()) == plan_of().summary()


def test_a_hundred_layers_fit_a_screen():
    lines = planned({"dp": 2, "tp": 2}, layers=100).summary().splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 160
    assert any("blocks.*.attention.{q,k,v}.weight" in line for line in lines)


def test_what_is_sent_and_the_seconds_add_up():
    plan = plan_of(3)
    assert plan.facts is not None
    all_of_it = sum(plan.traffic.values(), Total())
    assert plan.seconds[1] == pytest.approx(all_of_it.seconds)
    assert plan.seconds[0] > sum(plan.facts.seconds.values())
    kinds = {kind for (axes, kind) in plan.traffic if axes == ("dp",)}
    assert kinds >= {"all_gather", "reduce_scatter"}


def test_a_plan_that_was_only_read_has_a_summary():
    plan = plan_of()
    read = Plan.from_text(plan.to_text(), plan.mesh)
    text = read.summary()
    assert "blocks.*.attention.{k,q,v}.weight" in text  # saved by name
    assert "a rank sends" not in text
    assert read.traffic == {}


def test_the_gap_is_known_where_a_plan_was_solved():
    graph, mesh = captured(1), mw.Mesh(dp=2, device="cpu")
    plan = make_plan(graph.copy(), mesh, Options())[1]
    assert plan.gap is not None
    assert 0 <= plan.gap < 0.01
    assert "no plan of these choices costs less" in plan.summary()
    assert make_plan(graph.copy(), mesh, Options(), randomly(0))[1].gap is None


# -- notes
def test_a_note_on_work_that_every_rank_repeats():
    (note,) = [n for n in plan_of(0).notes if "repeats" in n]
    assert re.match(r"axis tp=2: every rank of it repeats \d+% of the compute \(.* us a step, \d+ calls\), most", note)


def test_a_note_on_an_output_that_is_gathered_for_the_caller():
    model = torch.nn.Sequential(torch.nn.Linear(16, 64))
    graph = capture(model, (torch.zeros(8, 16),), {})
    plan = make_plan(graph, mw.Mesh(dp=2, device="cpu"), Options(zero=0))[1]
    assert [n for n in plan.notes if "gathered over dp, since the whole output is handed to the caller" in n]


# -- diff
def test_equal_plans_do_not_differ():
    assert plan_of().diff(plan_of()) == ""
    again = planned({"dp": 2, "tp": 2})
    assert again is not plan_of()
    assert plan_of().diff(again) == ""
    assert plan_of().diff(Plan.from_text(plan_of().to_text(), plan_of().mesh)) == ""


def test_a_diff_of_zero_stages(golden: Golden):
    assert golden("gpt_diff_zero.txt", plan_of(0).diff(plan_of(3)) + "\n")


def test_a_diff_of_choices(golden: Golden):
    pinned = planned({"dp": 2, "tp": 2}, zero=0, pin={"blocks.1.up.weight": "[o, i:tp]"})
    assert golden("gpt_diff_pin.txt", plan_of(0).diff(pinned) + "\n")


def test_a_diff_of_meshes_and_programs():
    text = plan_of().diff(planned({"dp": 4}, layers=1))
    assert text.startswith("mesh: dp=2, tp=2 of cpu over loopback, loopback -> dp=4 of cpu over loopback\n")
    assert re.search(r"only the first has \d+ calls of .*blocks\.1", text)
    assert "only the first has blocks.1.up.weight, at rest [" in text


def test_a_diff_of_what_backward_makes_again():
    plain, tight = planned({"dp": 2, "tp": 2}, d=12), planned({"dp": 2, "tp": 2}, memory=32000, d=12)
    assert tight.again
    assert "only the second makes again in backward " in plain.diff(tight)
    assert f"only the first makes again in backward {min(tight.again)}" in tight.diff(replace(tight, again=frozenset()))


def test_a_diff_reads_the_other_way_round():
    one, other = plan_of(0).diff(plan_of(3)).splitlines(), plan_of(3).diff(plan_of(0)).splitlines()
    assert len(one) == len(other)
    assert "zero: 0 -> 3" in one
    assert "zero: 3 -> 0" in other


# -- explain: calls
def test_a_call_that_the_role_of_an_axis_forces():
    plan = plan_of()
    text = plan.explain(call_of(plan, "blocks.0.up", "addmm"))
    assert "\n  dp: split batch, the only legal choice: a data axis splits the batch\n" in text


def test_a_call_with_its_next_best_and_the_parts_of_both_costs():
    plan = plan_of()
    text = plan.explain(call_of(plan, "blocks.1.up", "addmm"))
    assert re.search(r"\n  tp: split rows of up.weight; next best \w.*, \+[\d.]+ [mu]s with all else unchanged\n", text)
    assert re.search(r"\n +[\d.]+ us -> +[\d.]+ us  compute\n", text)
    assert re.search(r"\n +[\d.]+ us -> +[\d.]+ us  reshard of \w+.*, between here and blocks\.1", text)
    assert re.search(r"\n +[\d.]+ us -> +[\d.]+ us  reshard of .*blocks\.1\.up\.bias", text)


def test_the_calls_that_a_call_decides_with():
    plan = plan_of()
    text = plan.explain(call_of(plan, "blocks.0.attention.q", "addmm"))
    (line,) = [x for x in text.splitlines() if "decides with" in x]
    assert re.search(r"decides with \d+ other calls: .*\d+ of blocks\.0\.attention\.k", line)


def test_a_call_without_a_say():
    plan = plan_of()
    assert plan.decisions is not None
    mute = next(c for c in plan.choices if not plan.decisions.has_say(c) and len(plan.decisions.together(c)) > 1)
    assert "and has no say" in plan.explain(mute)


def test_a_pinned_call():
    plain = planned({"x": 2, "y": 2}, layers=1)
    call = call_of(plain, "blocks.0.up", "addmm")
    plan = planned({"x": 2, "y": 2}, layers=1, pin={call: "[b, o:x]"})
    assert f"  x: split rows of up.weight, pinned by '{call}': '[b, o:x]'" in plan.explain(call)


def test_a_call_of_a_given_plan():
    plan, graph = plan_of(), captured()
    read = Plan.from_text(plan.to_text(), plan.mesh)
    again = replan(graph, plan.mesh, read, Options())[1]
    text = again.explain("blocks.0.up")
    assert "  tp: split rows of up.weight, as the given plan says" in text
    assert "  tp: split n, as the given plan says" in read.explain(call_of(plan, "blocks.0.up", "addmm"))


def test_what_a_call_needs():
    plan = plan_of(3)
    text = plan.explain("blocks.0.up")
    assert "  needs blocks.0.up.weight as [1536:tp, 384], not [" in text
    assert "all_gather over dp, 590 KB sent, " in text


def test_a_call_that_replaced_another_knows_the_calls_of_the_first_round():
    plan = planned({"tp": 2}, pin={"tokens.weight": "[v:tp, d]"})
    plan = plan if plan.decomposed else planned({"x": 2}, pin={"*nll*": "[t]"})
    assert "next best" in plan.explain(call_of(plan, "blocks.0.up", "addmm"))


@pytest.mark.parametrize("plan", [plan_of, free], ids=["roles", "free"])
def test_the_parts_add_up(plan: Callable[[], Plan]):
    made = plan()
    assert made.decisions is not None
    seen = 0
    for call in made.choices:
        for axis, decision in made.decisions.of(call).items():
            best = made.decisions.next_best(call, axis)
            if best is not None:
                parts = sum(t.other - t.chosen for t in best.terms)
                costs = dict(decision.seconds)
                assert parts == pytest.approx(best.dearer, abs=1e-9)
                assert costs[best.what] - costs[decision.chosen] == pytest.approx(best.dearer, abs=1e-9)  # type: ignore[index]
                seen += 1
    assert seen > 100
    for name in made.resting:
        best = made.decisions.next_layout(name)
        assert best is None or sum(t.other - t.chosen for t in best.terms) == pytest.approx(best.dearer, abs=1e-9)


def test_nothing_is_cheaper_in_a_plan_that_was_solved():
    plan = free()
    assert plan.decisions is not None
    assert plan.gap == pytest.approx(0, abs=1e-6)
    nexts = [plan.decisions.next_best(c, a) for c in plan.choices for a in plan.decisions.of(c)]
    nexts += [plan.decisions.next_layout(p) for p in plan.resting]
    assert min(n.dearer for n in nexts if n is not None) > -1e-9


# -- explain: modules and globs
def test_a_module_lists_its_calls_and_leaves_out_views():
    text = plan_of().explain("blocks.0.up")
    assert text.count(" of blocks.0.up, at ") == 4
    assert re.search(r"\n\d+ views cost nothing and do as their neighbours: ", text)


def test_layers_of_the_same_reasons_are_told_once():
    plan = planned({"dp": 2, "tp": 2}, layers=5, zero=0)
    text = plan.explain("blocks.*.up")
    assert re.search(r"and \d alike: blocks\.[\d,-]+\.up", text)
    assert len(text.splitlines()) < 4 * len(plan.explain("blocks.2.up").splitlines())


# -- explain: parameters
def test_a_parameter():
    plan = plan_of(3)
    text = plan.explain("blocks.0.up.weight")
    assert text.startswith("blocks.0.up.weight rests as [")
    assert "\n  590 KB of 2.36 MB on a rank; " in text
    gathered = r"as \[1536:tp, 384\]: all_gather over dp, 590 KB sent, [\d.]+ [mu]s, for "
    assert re.search(rf"\n  needed in forward {gathered}", text)
    assert re.search(r"\n  needed in backward as \[1536:tp, 384\]: all_gather over dp, 590 KB sent, ", text)
    assert re.search(r"\n  its gradient, made as .* \+dp: reduce_scatter over dp, 590 KB sent, ", text)
    assert "\n  zero=3 was asked for\n" in text
    assert re.search(r"\n  next best of \d+ ways to rest: \[.*\], \+[\d.]+ us with all else unchanged", text)


def test_a_pinned_parameter():
    plan = planned({"tp": 2}, pin={"*.up.weight": "[o, i:tp]"})
    text = plan.explain("blocks.0.up.weight")
    assert "rests as [1536, 384:tp]" in text
    assert "  pinned by '*.up.weight': '[o, i:tp]'\n  it may rest in no other way" in text


@pytest.mark.parametrize("name", ["blocks.0.up", "op:gelu"])
def test_pins_of_modules_and_ops_are_named(name: str):
    plan = planned({"x": 2}, pin={name: "[b, s, h:x]"})
    assert f"pinned by {name!r}: '[b, s, h:x]'" in "\n".join(plan.explain(c) for c in plan.choices)


def test_what_memory_forces():
    """What is at rest in smaller parts than time alone would have it, and made again in backward."""
    plan = planned({"dp": 2, "tp": 2}, memory=32000, d=12)
    assert "\n  asked for: memory=32000\n" in plan.summary()
    assert re.search(r"\n  \d+ tensors of forward are sent again in backward, not kept\n", plan.summary())
    told = [line for name in plan.resting for line in plan.explain(name).splitlines()]
    assert "  memory=32000 bytes a device were asked for" in told
    pattern = r"next best of .* -[\d.]+ us and \d+ B more kept with all else unchanged; passed over for memory=32000"
    assert [line for line in told if re.search(pattern, line)]


def test_parameters_of_all_layers_are_told_once():
    text = plan_of(3).explain("blocks.*.down.bias")
    assert text.count("rests as") == 1
    assert text.endswith("and 1 alike: blocks.1.down.bias")


def test_a_frozen_parameter():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    model[0].weight.requires_grad_(False)
    graph = capture(model, (torch.zeros(4, 6),), {}, target=torch.zeros(4, 4), loss=torch.nn.functional.mse_loss)
    plan = make_plan(graph, mw.Mesh(dp=2, device="cpu"), Options())[1]
    assert "not trained" in plan.explain("0.weight")
    assert "an optimizer step" in plan.explain("1.weight")


@pytest.mark.parametrize("name", ["blocks.0.upp", "nothing", "", "*.wieght", "blocks.9.up.weight"])
def test_an_unknown_name(name: str):
    with pytest.raises(mw.PlanError, match="nothing in the plan is called .*; there are, for example, "):
        plan_of().explain(name)


# -- folding
NAMES = [f"layers.{i}.mlp.{n}" for i in range(4) for n in ("up", "down")] + ["embed", "layers.2.experts.0", "head"]
NAMES += [f"layers.{i}.experts.{j}" for i in (1, 3) for j in range(3)]


def unfolded(text: str, every: list[str]) -> set[str]:
    """The names that a folded one stands for."""
    parts = []
    for i, part in enumerate(text.split(".")):
        there = sorted({n.split(".")[i] for n in every if len(n.split(".")) == len(text.split("."))})
        if part == "*":
            parts.append([p for p in there if p.isdigit()])
        elif part.startswith("{"):
            parts.append(part[1:-1].split(","))
        elif re.fullmatch(r"[\d,-]+", part):
            spans = [p.split("-") for p in part.split(",")]
            parts.append([p for p in there if p.isdigit() and any(int(s[0]) <= int(p) <= int(s[-1]) for s in spans)])
        else:
            parts.append([part])
    return {".".join(p) for p in itertools.product(*parts)} & set(every)


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from("ab")))
@settings(max_examples=200, deadline=None)
def test_a_folded_name_stands_for_the_names_that_went_in(said: dict[str, str]):
    rows = Folder(NAMES).rows(said.items())
    for what in "ab":
        told = [n for text, key in rows if key == what for n in unfolded(text, NAMES)]
        assert sorted(told) == sorted(n for n, key in said.items() if key == what)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([f"layers.{i}.mlp.up" for i in range(4)], ["layers.*.mlp.up"]),
        ([f"layers.{i}.mlp.up" for i in (0, 1, 2)], ["layers.0-2.mlp.up"]),
        (["layers.0.mlp.up", "layers.1.mlp.up", "layers.3.mlp.up"], ["layers.0,1,3.mlp.up"]),
        (["embed", "head"], ["embed", "head"]),
        ([f"layers.{i}.experts.{j}" for i in (1, 3) for j in range(3)], ["layers.1,3.experts.*"]),
        ([], []),
        ([""], ["(model)"]),
    ],
)
def test_folded_names(names: list[str], text: list[str]):
    assert Folder(NAMES).fold(names) == text


def test_siblings_are_braced():
    rows = [(f"layers.{i}.mlp.{n}", "same") for i in range(4) for n in ("up", "down")]
    assert Folder(NAMES).rows(rows) == [("layers.*.mlp.{up,down}", "same")]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (seconds_text(0), "0 us"),
        (seconds_text(1.234e-8), "0.01 us"),
        (seconds_text(1.2345e-5), "12.3 us"),
        (seconds_text(9.996e-4), "1.00 ms"),
        (seconds_text(3.5), "3.50 s"),
        (seconds_text(-2e-3), "-2.00 ms"),
        (bytes_text(12), "12 B"),
        (bytes_text(999.6), "1.00 KB"),
        (bytes_text(3.2e9), "3.20 GB"),
    ],
)
def test_units(text: str, want: str):
    assert text == want
