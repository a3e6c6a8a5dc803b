"""Notes on what a plan does against the user's likely wish: work repeated, tensors gathered, parameters kept whole.

What costs less than `WORTH` of the step is not worth a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .doing import module_of
from .fold import Folder, pattern_of
from .plan import Plan
from .traffic import Moved
from .units import bytes_text, seconds_text

if TYPE_CHECKING:
    from .facts import Facts

WORTH = 0.01


def wishes(plan: Plan, facts: Facts) -> tuple[str, ...]:
    """The notes, in the order of the mesh's axes."""
    axes = [a for a, n in plan.mesh.axes if n > 1 and plan.mesh.role(a) != "pipeline"]
    return (
        *(note for axis in axes for note in _repeated(plan, facts, axis)),
        *(note for axis in axes for note in _kept_whole(plan, facts, axis)),
        *_gathered(plan, facts),
    )


def _repeated(plan: Plan, facts: Facts, axis: str) -> Iterator[str]:
    """Calls that every rank of an axis runs alike."""
    alike = {c: s for c, s in facts.seconds.items() if s and plan.choices[c].get(axis) is None}
    total, compute = sum(alike.values()), plan.seconds[0]
    if not alike or total < WORTH * compute:
        return
    by_pattern: dict[str, list[str]] = {}
    for call in alike:
        by_pattern.setdefault(pattern_of(module_of(plan, call)), []).append(call)
    most = max(by_pattern.values(), key=lambda calls: sum(alike[c] for c in calls))
    (text, *_) = Folder(module_of(plan, c) for c in plan.choices).fold(module_of(plan, c) for c in most)
    yield (
        f"axis {axis}={plan.mesh.sizes[axis]}: every rank of it repeats {total / compute:.0%} of the compute "
        f"({seconds_text(total)} a step, {len(alike)} calls), most of it in {text}"
    )


def _kept_whole(plan: Plan, facts: Facts, axis: str) -> Iterator[str]:
    """Matrices that a tensor axis leaves whole."""
    if plan.mesh.role(axis) != "tensor":
        return
    matrices = [n for n in facts.whole if sum(len(d) > 0 for d in plan.resting[n].dims) > 1]
    left = [n for n in matrices if axis not in plan.resting[n].split_axes]
    size, total = sum(facts.whole[n] for n in left), sum(facts.whole.values())
    if left and size >= WORTH * total:
        yield (
            f"axis {axis}={plan.mesh.sizes[axis]}: {len(left)} of {len(matrices)} matrices rest whole on it "
            f"({size / total:.0%} of all parameters' bytes), such as {left[0]}"
        )


def _gathered(plan: Plan, facts: Facts) -> Iterator[str]:
    """Activations gathered over data axes, parameters over others, and what leaves the program."""
    found: dict[tuple[str, str], list[Moved]] = {}
    for move in facts.moves:
        for why in dict.fromkeys(_against(plan, move)):
            found.setdefault((pattern_of(move.value if move.is_param else move.module), why), []).append(move)
    folder = Folder([*(m[0] for m in plan.modules.values()), *plan.resting])
    for (_, why), moves in found.items():
        text = ", ".join(folder.fold(m.value if m.is_param else m.module for m in moves))
        took = sum(m.way.total for m in moves)
        if took >= WORTH * sum(plan.seconds):
            sent, first = sum(sum(m.way.sent) for m in moves), moves[0]
            what = text if first.is_param else f"{first.value} of {text}"
            more = f" ({len(moves)} times)" if len(moves) > 1 else ""
            yield f"{what} is {why}{more}: a rank sends {bytes_text(sent)}, {seconds_text(took)} a step"


def _against(plan: Plan, move: Moved) -> Iterator[str]:
    for step in move.way.steps:
        roles = {plan.mesh.role(a) for a in step.axes}
        over = "+".join(step.axes)
        if step.kind != "all_gather":
            continue
        if any(kind == "output" for kind, _ in move.leaves):
            yield f"gathered over {over}, since the whole output is handed to the caller"
        elif move.is_param and not roles & {"data", "free"}:
            yield f"gathered over {over} to be used whole"
        elif not move.is_param and "data" in roles and not any(kind == "grad" for kind, _ in move.leaves):
            yield f"gathered over {over}, so that ranks of it hold each other's samples"
