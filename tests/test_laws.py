"""Every law of passes/laws.py catches the break it is for, and the passes' texts are as they were."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshwright.partitioner.capture import capture
from meshwright.partitioner.collective import Step
from meshwright.partitioner.errors import LawError
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.plan import Plan
from meshwright.partitioner.planner import Options, make_plan
from meshwright.partitioner.program import primitive, reshard
from meshwright.partitioner.transfer import pause, start, wait
from meshwright.passes import dump, laws
from meshwright.passes.draft import Draft
from meshwright.passes.draft import start as started
from meshwright.passes.localize import rank_graph
from meshwright.passes.lower import PASSES, lower
from random_plans import GPT
from torch import nn

GOLDEN: dict[str, dict[str, Any]] = {
    "dp2": {"mesh": {"dp": 2}},
    "tp2": {"mesh": {"tp": 2}},
    "dp2_zero3": {"mesh": {"dp": 2}, "zero": 3},
}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def draft_after(passes: int, mesh: dict[str, int], zero: int = 0, form: str = "step") -> Draft:
    """A 2-layer MLP with a cross entropy, after the first `passes` passes."""
    x, y = torch.ones(4, 6), torch.zeros(4, dtype=torch.long)
    loss = F.cross_entropy if form == "step" else None
    graph = capture(mlp(), (x,), {}, target=y if loss else None, loss=loss)
    graph, plan = make_plan(graph, Mesh(**mesh, device="cpu"), Options(zero=zero))  # type: ignore[arg-type]
    draft = started(graph, plan, form, False)
    for run in PASSES[:passes]:
        draft = run(draft)
        laws.check(draft, run.__name__)
    return draft


def nodes(draft: Draft, target: Any) -> list[torch.fx.Node]:
    found = [n for n in draft.graph.fx.nodes if n.target is target]
    assert found, f"the draft has no {target}"
    return found


def broken(draft: Draft, after: str) -> str:
    with pytest.raises(LawError) as caught:
        laws.check(draft, after)
    return str(caught.value)


def names(text: str, law: str, after: str, node: str) -> bool:
    return text.startswith(f"law {law} broken after pass {after} at {node} (")


# -- one test for each law
def test_lint_sees_a_value_used_before_it_is_made():
    draft = draft_after(1, {"dp": 2})
    call = next(n for n in draft.graph.calls() if any(u.op == "call_function" for u in n.users))
    next(u for u in call.users if u.op == "call_function").append(call)
    assert "law lint broken after pass insert_reshards" in broken(draft, "insert_reshards")


def test_layouts_agree_sees_a_dropped_reshard():
    draft = draft_after(1, {"dp": 2})
    dropped = next(n for n in nodes(draft, reshard) if all(u.op == "call_function" for u in n.users))
    reader = next(iter(dropped.users))
    dropped.replace_all_uses_with(dropped.args[0])  # type: ignore[arg-type]
    text = broken(draft, "insert_reshards")
    assert names(text, "layouts-agree", "insert_reshards", reader.name)
    assert "test_laws.py" in text or "torch" not in text


def test_layouts_agree_sees_a_gradient_that_leaves_unreduced():
    draft = draft_after(1, {"dp": 2})
    out = draft.graph.output_node
    late = next(n for n in nodes(draft, reshard) if set(n.users) == {out})
    late.replace_all_uses_with(late.args[0])  # type: ignore[arg-type]
    text = broken(draft, "insert_reshards")
    assert names(text, "layouts-agree", "insert_reshards", late.args[0].name)  # type: ignore[union-attr]
    assert "leaves as" in text


def test_layouts_agree_sees_a_changed_layout():
    draft = draft_after(1, {"tp": 2})
    node = next(n for n in draft.splits if n.users and draft.layouts.get(n) is not None and draft.layouts[n].split_axes)
    reader = next(u for u in node.users if u in draft.splits)
    draft.layouts[node] = draft.layouts[node].unsplit()
    assert names(broken(draft, "insert_reshards"), "layouts-agree", "insert_reshards", reader.name)


def test_primitives_chain_sees_a_step_from_another_layout():
    draft = draft_after(2, {"dp": 2})
    node = nodes(draft, primitive)[0]
    step: Step = node.args[1]  # type: ignore[assignment]
    node.args = (node.args[0], Step(step.kind, step.axes, step.after, step.before, step.source, step.target, step.op))  # type: ignore[assignment]
    assert names(broken(draft, "expand_reshards"), "primitives-chain", "expand_reshards", node.name)


def test_one_wait_sees_a_dropped_wait():
    draft = draft_after(6, {"dp": 2})
    ended = nodes(draft, wait)[0]
    began = ended.args[0]
    for value in list(ended.users):
        value.replace_all_uses_with(began.args[1])  # type: ignore[union-attr, arg-type]
        draft.graph.fx.erase_node(value)
    draft.graph.fx.erase_node(ended)
    draft.established = ("one-wait",)  # layouts are wrong too by now; this law must see its own part
    text = broken(draft, "start_early")
    assert names(text, "one-wait", "start_early", began.name)  # type: ignore[union-attr]
    assert "0 waits" in text


def test_one_wait_sees_a_second_wait():
    draft = draft_after(6, {"dp": 2})
    ended = nodes(draft, wait)[0]
    with draft.graph.fx.inserting_after(ended):
        again = draft.graph.fx.call_function(wait, ended.args)
    again.meta = dict(ended.meta)
    assert "2 waits" in broken(draft, "start_early")


def test_one_wait_sees_a_collective_that_was_never_started():
    draft = draft_after(2, {"dp": 2})
    draft.established = ("one-wait",)
    assert "neither started nor waited for" in broken(draft, "start_early")


def test_backward_after_pause_sees_a_late_forward_node():
    draft = draft_after(6, {"dp": 2}, form="autograd")
    hold = nodes(draft, pause)[0]
    draft.established = ("backward-after-pause",)
    forward = next(n for n in reversed(draft.graph.fx.nodes) if n.op == "call_function" and not n.meta.get("backward"))
    with draft.graph.fx.inserting_after(hold):
        late = draft.graph.fx.node_copy(forward)
    late.meta = dict(forward.meta)
    assert names(broken(draft, "insert_pause"), "backward-after-pause", "insert_pause", late.name)


def test_local_shapes_sees_a_rank_with_another_shape():
    draft = draft_after(6, {"dp": 2})
    graph = rank_graph(draft, 1)
    laws.check_local_shapes(draft, graph, 1)
    relu = next(n for n in graph.nodes if "relu" in str(n.target))
    with graph.inserting_after(relu.args[0]):
        less = graph.call_function(torch.ops.aten.narrow.default, (relu.args[0], 0, 0, 1))
    relu.args = (less,)
    with pytest.raises(LawError, match="law local-shapes broken after pass localize at relu.*on rank 1"):
        laws.check_local_shapes(draft, graph, 1)


def test_local_shapes_sees_a_changed_layout():
    draft = draft_after(6, {"dp": 2})
    relu = next(n for n in draft.splits if "relu.default" in str(n.target))
    draft.layouts[relu] = draft.layouts[relu].unsplit()
    with pytest.raises(LawError, match="law local-shapes broken.*at relu"):
        laws.check_local_shapes(draft, rank_graph(draft, 0), 0)


def test_a_law_names_the_neighbours_and_the_source_line():
    draft = draft_after(1, {"dp": 2})
    late = next(n for n in nodes(draft, reshard) if all(u.op == "call_function" for u in n.users))
    late.replace_all_uses_with(late.args[0])  # type: ignore[arg-type]
    lines = broken(draft, "insert_reshards").splitlines()
    assert len(lines) == 4
    assert all(line.startswith("  %") for line in lines[1:])


def test_every_pass_establishes_the_law_its_page_names():
    draft = draft_after(6, {"dp": 2}, form="autograd")
    laws_so_far = ("layouts-agree", "backward-reads-kept", "primitives-chain", "backward-after-pause")
    laws_so_far += ("reload-has-offload", "one-wait")
    assert draft.established == laws_so_far
    assert set(draft.established) == set(laws._LAWS)


# -- what each pass writes
@pytest.mark.parametrize("name", GOLDEN)
def test_the_text_after_each_pass(name: str, golden: Callable[[str, str], bool]):
    body = ""
    for passes in range(len(PASSES) + 1):
        title = PASSES[passes - 1].__name__ if passes else "captured"
        if title not in ("chunk_loss", "insert_pause", "write_offload"):  # nothing in a plain step of small logits
            body += f"== {title}\n{dump.text(draft_after(passes, **GOLDEN[name]), lines=False)}\n"
    assert golden(f"mlp_{name}.txt", body)


def test_the_text_of_a_rank(golden: Callable[[str, str], bool]):
    from meshwright.runtime.execute import compile_rank

    draft = draft_after(6, {"dp": 2})
    source = re.sub(r"'[^']*test_laws\.py:\d+ in \w+'", "'WHERE'", compile_rank(rank_graph(draft, 1), "rank1").source)
    assert golden("mlp_dp2_rank1.txt", "\n".join(line.partition("  #")[0] for line in source.splitlines()) + "\n")


def test_autograd_differs_from_step_by_its_pause():
    step, autograd = draft_after(6, {"dp": 2}), draft_after(6, {"dp": 2}, form="autograd")
    assert not [n for n in step.graph.fx.nodes if n.target is pause]
    order = list(autograd.graph.fx.nodes)
    held = order.index(nodes(autograd, pause)[0])
    assert all(
        not n.meta.get("backward") for n in order[:held] if n.op == "call_function" and n.target not in (start, wait)
    )


def gpt_plan() -> Plan:
    torch.manual_seed(0)
    ids = torch.zeros(4, 6, dtype=torch.long)
    graph = capture(GPT(layers=1), (), {"ids": ids, "y": ids}, loss=lambda out, target: out)
    return make_plan(graph, Mesh(dp=2, tp=2, device="cpu"), Options())[1]


def test_the_text_of_a_plan(golden: Callable[[str, str], bool]):
    assert golden("gpt_dp2_tp2_plan.txt", str(gpt_plan()) + "\n")


def test_planning_and_lowering_are_deterministic_across_processes():
    """Twice here, and once in a process that hashes strings otherwise."""
    here = decided_text()
    assert decided_text() == here
    env = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-W", "ignore", "-c", "import test_laws; print(test_laws.decided_text(), end='')"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == here
    assert "all_reduce" in here


def decided_text() -> str:
    return gpt_plan().to_text() + dump.text(draft_after(6, {"dp": 2, "tp": 2}))


def test_lowering_leaves_the_captured_program_alone():
    x, y = torch.ones(4, 6), torch.zeros(4, dtype=torch.long)
    graph = capture(mlp(), (x,), {}, target=y, loss=F.cross_entropy)
    graph, plan = make_plan(graph, Mesh(dp=2, device="cpu"), Options())
    program = lower(graph, plan)
    assert not [n for n in program.captured.fx.nodes if n.target in (start, wait, primitive, reshard)]
