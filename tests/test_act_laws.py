"""What ranks of a pipeline do is proved before it runs: tampered programs are refused, and the fault is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meshwright.partitioner.capture import capture
from meshwright.partitioner.errors import LawError
from meshwright.partitioner.mesh import Mesh
from meshwright.partitioner.pipeline import Asked
from meshwright.partitioner.planner import Options
from meshwright.partitioner.program import Act
from meshwright.partitioner.stage_search import plan_step
from meshwright.passes.act_laws import check_acts, endless
from meshwright.passes.draft import Draft, start
from meshwright.passes.lower import WHOLE
from meshwright.passes.segments import Segmented, segments
from torch import nn


def cut() -> tuple[Draft, Segmented]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x, y = torch.randn(6, 6), torch.arange(6) % 4
    graph = capture(model, (x,), {}, target=y, loss=F.cross_entropy)
    graph, plan = plan_step(graph, Mesh(pp=2, device="cpu"), Options(), 3, Asked("1f1b", 3, starts={"2": 1}))
    draft = start(graph, plan, "step", False)
    for run in WHOLE:
        draft = run(draft)
    return draft, segments(draft)


def find(acts: list[Act], kind: str, nth: int = 0) -> int:
    return [i for i, a in enumerate(acts) if a.kind == kind][nth]


def drop(rank: int, kind: str, nth: int = 0) -> Callable[[Segmented], None]:
    def tamper(one: Segmented) -> None:
        del one.acts[rank][find(one.acts[rank], kind, nth)]

    return tamper


def change(rank: int, kind: str, **to: Any) -> Callable[[Segmented], None]:
    def tamper(one: Segmented) -> None:
        i = find(one.acts[rank], kind)
        one.acts[rank][i] = replace(one.acts[rank][i], **to)

    return tamper


def swap(rank: int, kind: str) -> Callable[[Segmented], None]:
    """The first two of a kind change places."""

    def tamper(one: Segmented) -> None:
        acts = one.acts[rank]
        i, j = find(acts, kind), find(acts, kind, 1)
        acts[i], acts[j] = acts[j], acts[i]

    return tamper


def late(rank: int, kind: str) -> Callable[[Segmented], None]:
    """The first of a kind comes last."""

    def tamper(one: Segmented) -> None:
        acts = one.acts[rank]
        acts.append(acts.pop(find(acts, kind)))

    return tamper


def last_run(one: Segmented) -> Act:
    """What the first stage rank runs last of a micro-batch."""
    return [a for a in one.acts[0] if a.kind == "run" and a.micro_batch is not None][-1]


TAMPERED = [
    ("a send is left out", drop(0, "send"), "sends-pair.*message 0 from stage rank 0 to 1"),
    ("a receive is left out", drop(1, "receive"), "segments-chain.*stage rank 1.*is not there yet"),
    ("a receive of a gradient is left out", drop(0, "receive"), "segments-chain.*stage rank 0"),
    ("a send of a gradient is left out", drop(1, "send"), "sends-pair.*from stage rank 1 to 0"),
    ("a segment is left out", drop(0, "run"), "segments-chain"),
    ("a micro-batch is left out", lambda one: one.acts[0].remove(last_run(one)), "segments-chain"),
    ("the last segment is left out", drop(1, "run", -1), "segments-chain.*leaves the program|is not there yet"),
    ("a send goes to another rank", change(0, "send", peer=0), "sends-pair"),
    ("a send is of another micro-batch", change(0, "send", micro_batch=2), "segments-chain|sends-pair"),
    ("a receive is of another micro-batch", change(1, "receive", micro_batch=1), "segments-chain|sends-pair"),
    ("two sends change places", swap(0, "send"), "segments-chain|sends-pair"),
    ("two receives change places", swap(1, "receive"), "sends-pair"),
    ("a send comes last", late(0, "send"), "sends-pair"),
    ("a receive comes last", late(1, "receive"), "segments-chain"),
    ("a micro-batch is added twice", lambda one: one.acts[0].append(last_run(one)), "collected-once.*already part"),
]


def test_the_program_is_legal():
    check_acts(*cut())


@pytest.mark.parametrize("what,tamper,says", TAMPERED, ids=[t[0] for t in TAMPERED])
def test_a_tampered_program_is_refused(what: str, tamper: Callable[[Segmented], None], says: str):
    draft, one = cut()
    tamper(one)
    with pytest.raises(LawError, match=says):
        check_acts(draft, one)


def test_a_circle_of_waits_is_named():
    """Each rank sends only after it has read what the other sends."""
    draft, one = cut()
    names = [c.name for c in draft.graph.calls()][:2]
    one.timed = frozenset()
    one.acts = [
        [Act("receive", values=(names[1],), peer=1), Act("send", values=(names[1],), peer=1)],
        [Act("receive", values=(names[0],), peer=0), Act("send", values=(names[0],), peer=0)],
    ]
    ((why, _),) = endless(draft, one)
    assert "stage rank 0" in why and f"waits for {names[1]} of stage rank 1" in why
    assert "stage rank 1" in why and f"waits for {names[0]} of stage rank 0" in why
