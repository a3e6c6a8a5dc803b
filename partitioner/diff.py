"""Two plans compared: what the second does otherwise, layers folded. Equal plans give an empty text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .doing import dim_text, module_of
from .fold import Folder
from .plan import Plan
from .summary import columns
from .traffic import Total
from .units import bytes_text, seconds_text


def diff(one: Plan, other: Plan) -> str:
    """What `other` does otherwise than `one`: mesh, ZeRO, seconds, traffic, layouts at rest, choices, notes."""
    lines = [*_head(one, other), *_sent(one, other), *_resting(one, other), *_choices(one, other)]
    lines += _only(one, other, "first") + _only(other, one, "second")
    gone, new = _less(one.notes, other.notes), _less(other.notes, one.notes)
    if gone or new:
        lines += ["notes", *(f"  - {note}" for note in gone), *(f"  + {note}" for note in new)]
    return "\n".join(lines)


def _head(one: Plan, other: Plan) -> list[str]:
    def mesh(plan: Plan) -> str:
        return f"{plan.mesh} of {plan.mesh.device.name} over {', '.join(link.name for _, link in plan.mesh.links)}"

    pairs = [("mesh", mesh(one), mesh(other)), ("zero", str(one.zero), str(other.zero))]
    pairs.append(("micro-batches", str(one.micro_batches), str(other.micro_batches)))
    pairs.append(("schedule", _schedule(one), _schedule(other)))
    pairs.append(("stages start with", _starts(one), _starts(other)))
    if one.facts is not None and other.facts is not None:
        for what, a, b in zip(("compute", "communication"), one.seconds, other.seconds, strict=True):
            pairs.append((what, seconds_text(a), seconds_text(b)))
    return [f"{what}: {a} -> {b}" for what, a, b in pairs if a != b]


def _schedule(plan: Plan) -> str:
    return plan.schedule.name if plan.schedule is not None else "none"


def _starts(plan: Plan) -> str:
    return ", ".join(plan.stages.cuts) if plan.stages is not None else "none"


def _sent(one: Plan, other: Plan) -> list[str]:
    if one.facts is None or other.facts is None:
        return []
    rows = []
    for axes, kind in sorted({*one.traffic, *other.traffic}):
        a, b = (_total_text(p.traffic.get((axes, kind), Total())) for p in (one, other))
        if a != b:
            rows.append(("+".join(axes), kind, f"{a} -> {b}"))
    return ["a rank sends in a step", *columns(rows)] if rows else []


def _total_text(total: Total) -> str:
    return f"{total.count} x, {bytes_text(total.sent)}, {seconds_text(total.seconds)}" if total.count else "none"


def _resting(one: Plan, other: Plan) -> list[str]:
    changes = [
        (name, f"{layout} -> {other.resting[name]}")
        for name, layout in one.resting.items()
        if name in other.resting and layout != other.resting[name]
    ]
    return ["parameters at rest", *columns(Folder(one.resting).rows(changes))] if changes else []


def _choices(one: Plan, other: Plan) -> list[str]:
    """Per module what its calls do on the axes that both meshes have."""
    axes = [a for a in one.mesh.names if a in other.mesh.names]
    counts: dict[str, Counter[str]] = {}
    facts = one.facts or other.facts
    for call, by in one.choices.items():
        there = other.choices.get(call)
        for axis in axes if there is not None else ():
            mine, theirs = by.get(axis), there.get(axis)  # type: ignore[union-attr]
            if mine != theirs:
                dims = facts.dims.get(call) if facts is not None else None
                what = f"{axis}: {dim_text(mine, dims)} -> {dim_text(theirs, dims)}"
                counts.setdefault(_module(one, other, call), Counter())[what] += 1
    folder = Folder(_module(one, other, c) for c in {**one.choices, **other.choices})
    rows = [(module, tuple(f"{what} ({n})" for what, n in count.items())) for module, count in counts.items()]
    flat = [(name if i == 0 else "", text) for name, texts in folder.rows(rows) for i, text in enumerate(texts)]
    return ["calls, and how many", *columns(flat)] if flat else []


def _module(one: Plan, other: Plan, call: str) -> str:
    return module_of(one, call) or module_of(other, call)


def _only(one: Plan, other: Plan, which: str) -> list[str]:
    """What one plan has and the other does not: parameters, calls, calls decomposed, tensors made again in backward."""
    calls, params = _less(one.choices, other.choices), _less(one.resting, other.resting)
    lines = [f"only the {which} has {name}, at rest {one.resting[name]}" for name in params]
    for what, mine, theirs in (
        ("decomposes", one.decomposed, other.decomposed),
        ("makes again in backward", sorted(one.again), other.again),
        ("recomputes in backward", sorted(one.recompute), other.recompute),
        ("offloads", sorted(one.offload), other.offload),
    ):
        if names := _less(mine, theirs):
            lines.append(f"only the {which} {what} {', '.join(names[:4])}" + (" ..." if len(names) > 4 else ""))
    if calls:
        some = Folder(module_of(one, c) for c in one.choices).fold(dict.fromkeys(module_of(one, c) for c in calls))
        lines.append(f"only the {which} has {len(calls)} calls of {', '.join(some)}")
    return lines


def _less(some: Iterable[str], others: Iterable[str]) -> list[str]:
    known = set(others)
    return [x for x in some if x not in known]


