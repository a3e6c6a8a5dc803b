"""The search for stages and schedules: better than even splits, within the memory, as pinned, the same every time."""

from typing import Any

import meshwright as mw
import pytest
import stage_models
import torch
from meshwright.partitioner.capture import capture
from meshwright.partitioner.pipeline import Asked
from meshwright.partitioner.plan import Plan
from meshwright.partitioner.planner import Options
from meshwright.partitioner.stage_search import plan_step, simulated
from pipeline_models import MODELS, complaints


def planned(
    model: torch.nn.Module, batch: dict[str, Any], ranks: int, micro_batches: Any, asked: Asked, memory: Any = None
) -> tuple:
    """(plan, simulated seconds of its step, bytes of the rank that holds most)."""
    graph = capture(model, (), batch, loss=lambda out, target: out)
    graph, plan = plan_step(graph, mw.Mesh(pp=ranks, device="cpu"), Options(memory=memory), micro_batches, asked)
    return (plan, *simulated(graph, plan))


CASES = [(name, 2) for name in stage_models.MODELS] + [("head of 4 layers", 4), ("encoder-decoder", 4)]


@pytest.mark.parametrize("name,ranks", CASES)
def test_the_cut_found_beats_the_even_split(name: str, ranks: int):
    model, batch = stage_models.MODELS[name](16)
    starts = stage_models.even_split(name, ranks)
    even, even_seconds, _ = planned(model, batch, ranks, 8, Asked("1f1b", starts=starts))
    for cut, module in zip(even.stages.cuts, starts, strict=True):
        assert even.modules[cut][0].startswith(module)
    _, seconds, _ = planned(model, batch, ranks, 8, Asked("1f1b"))
    assert seconds < 0.97 * even_seconds
    _, fastest, _ = planned(model, batch, ranks, 8, Asked("auto"))
    assert fastest <= seconds * 1.01


def compiled(name: str = "gpt", rows: int = 16, **options: Any) -> Plan:
    torch.manual_seed(0)
    model, batch = MODELS[name](rows)
    options = {"micro_batches": 8, **options}
    return mw.compile(model, mw.Mesh(pp=4, device="cpu"), kwargs=batch, **options).plan


def test_a_pinned_stage_starts_where_it_was_pinned():
    plan = compiled(pin={"blocks.1": "stage 1", "head": "stage 3"})
    assert plan.stages is not None
    modules = [plan.modules[c][0] for c in plan.stages.cuts]
    assert modules[0].startswith("blocks.1") and modules[2] == "head"
    assert plan.stages.count == 4


def test_a_pinned_stage_that_only_virtual_stages_have():
    plan = compiled(pin={"head": "stage 7"})
    assert plan.stages is not None and plan.stages.count == 8


def test_pins_of_stages_change_no_numbers():
    assert not complaints("gpt", {"pp": 2}, 3, pin={"blocks.2": "stage 1"})


def test_the_choice_says_why_and_is_the_same_every_time():
    plan = compiled(micro_batches="auto")
    assert plan.compared == compiled(micro_batches="auto").compared
    assert sum("(chosen)" in line for line in plan.compared) == 1
    assert {line.split()[1].strip(",") for line in plan.compared} >= {"1f1b", "gpipe", "zb-v"}
    assert plan.compared[0] in plan.summary()


def test_without_a_pipeline_nothing_is_cut_unless_asked():
    model, batch = MODELS["gpt"](16)
    assert mw.compile(model, mw.Mesh(dp=2, device="cpu"), kwargs=batch).plan.micro_batches == 1


def peak(line: str) -> float:
    number, unit = line.split("at most ")[1].split()[:2]
    return float(number) * {"B": 1, "KB": 1e3, "MB": 1e6}[unit]


def test_what_does_not_fit_is_not_chosen():
    free = compiled(micro_batches=16)
    (taken,) = (line for line in free.compared if "(chosen)" in line)
    least = min(map(peak, free.compared))
    assert least < peak(taken), "the case is too easy: the fastest is the smallest"
    torch.manual_seed(0)
    tight, _, _ = planned(*MODELS["gpt"](16), 4, 16, Asked(micro_batches=16), int(least * 1.01))
    (kept,) = (line for line in tight.compared if "(chosen)" in line)
    assert peak(kept) <= least * 1.01


def test_a_memory_too_small_names_the_least_peak():
    with pytest.raises(mw.PlanError, match=r"the least peak found is \d+ bytes, \d+ too many, .*schedule "):
        compiled(memory=1000)
