"""A plan on one screen: what it costs, what it sends, how parameters rest, what the parts of the model do, notes.

Text made for review: the same plan gives the same text, and layers that decide alike are one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .doing import by_module, costly, module_of
from .fold import Folder
from .plan import Plan
from .stage_text import stage_lines
from .traffic import Moved, Total, Traffic
from .twins import is_away, is_twin, original
from .units import bytes_text, seconds_text

WIDEST = 56
"""A first column is at most so wide; longer names push the rest of their line."""


def summary(plan: Plan) -> str:
    lines = [*_head(plan), *_sent(plan), *_again(plan), *_away(plan), *_resting(plan), *_modules(plan)]
    if plan.compared:
        starts = f"stages start with {', '.join(_starts(plan))}"
        lines += ["pipeline", *(f"  {line}" for line in (starts, *plan.compared))]
    lines += stage_lines(plan)
    if plan.notes:
        lines += ["notes", *(f"  {note}" for note in plan.notes)]
    return "\n".join(lines)


def _starts(plan: Plan) -> list[str]:
    """Of every stage but the first, its first call and the module of that."""
    assert plan.stages is not None
    modules = {c: plan.modules.get(c, ("",))[0] for c in plan.stages.cuts}
    return [f"{c} of {modules[c]}" if modules[c] else c or "nothing" for c in plan.stages.cuts]


def _head(plan: Plan) -> list[str]:
    mesh = plan.mesh
    axes = ", ".join(f"{a}={n} ({mesh.role(a)}) over {mesh.link[a].name}" for a, n in mesh.axes)
    lines = [f"plan for {mesh.world_size} ranks of {mesh.device.name}: {axes}"]
    lines.append(f"  zero={plan.zero}, {len(plan.choices)} calls, {len(plan.resting)} parameters")
    lines += [f"  computes in {plan.precision}"] if plan.precision else []
    if plan.facts is not None:
        compute, sent = plan.seconds
        lines += [f"  asked for: {asked}"] if (asked := _asked(plan.facts.asked)) else []
        what = "a step, nothing overlapped" if plan.stages is None else "in all stages together, one after the other"
        lines.append(
            f"  {seconds_text(compute + sent)} {what}: {seconds_text(compute)} compute + "
            f"{seconds_text(sent)} communication"
        )
        lines += [f"  a rank holds at most {plan.facts.peak}"] if plan.facts.peak else []
    if plan.gap is not None:
        lines.append(f"  {gap_text(plan.gap, len(plan.decomposed))}")
    return lines


def _asked(asked: Mapping[str, Any]) -> str:
    """What the user asked for beside the mesh."""
    said = [f"{what}={asked[what]}" for what in ("zero", "memory") if asked.get(what) not in (None, "auto")]
    said += [f"pin {pattern}: {text}" for pattern, text in (asked.get("pin") or {}).items()]
    return ", ".join(said)


def gap_text(gap: float, written: int) -> str:
    """How far from the best; `written`: how many calls were written out. The bound has each of those at its least."""
    less = "" if gap < 5e-7 else f" than {1 / (1 + gap):.2%} of this one"
    said = f"no plan of these choices costs less{less}"
    return said if written < 2 else f"{said}, save for what the {written} calls written out could share with each other"


def _sent(plan: Plan) -> list[str]:
    if plan.facts is None:
        return []
    rows = traffic_rows(plan.traffic)
    if not rows:
        return ["a rank sends nothing" if plan.stages is None else "ranks send from stage to stage alone"]
    total = sum(plan.traffic.values(), Total())
    rows.append(("all", "", str(total.count), bytes_text(total.sent), seconds_text(total.seconds)))
    head = "a rank sends in a step" if plan.stages is None else "a rank of each stage together sends in a step"
    lines = [head, *columns(rows, right=(2, 3, 4))]
    again = _twice(plan.facts.moves)
    return [*lines, f"  {again} tensors of forward are sent again in backward, not kept"] if again else lines


def _again(plan: Plan) -> list[str]:
    """What backward makes again, by module, and what that takes."""
    if not plan.recompute:
        return []
    twins = {c for c in plan.choices if is_twin(c) and not is_away(c, plan.offload)}
    count = Counter(module_of(plan, original(c)) for c in costly(plan) if c in twins)
    took = sum(s for c, s in plan.facts.seconds.items() if c in twins) if plan.facts is not None else 0.0
    head = f"backward makes {sum(count.values())} calls of forward again" + (f", {seconds_text(took)}" if took else "")
    rows = Folder(count).rows((module, str(n)) for module, n in count.items())
    return [head, *columns(rows, right=(1,))] if rows else [head]


def _away(plan: Plan) -> list[str]:
    """What is on the host until backward reads it, by module, and the seconds of its way there and back."""
    if not plan.offload:
        return []
    count = Counter(module_of(plan, c) for c in plan.offload)
    seconds = plan.facts.seconds.items() if plan.facts is not None else ()
    took = sum(s for c, s in seconds if is_away(c, plan.offload))
    head = f"{len(plan.offload)} values of forward are on the host until backward reads them"
    rows = Folder(count).rows((module, str(n)) for module, n in sorted(count.items()))
    return [head + (f", {seconds_text(took)} of copies" if took else ""), *columns(rows, right=(1,))]


def _twice(moves: Sequence[Moved]) -> int:
    """How many tensors take one layout in forward and once more in backward."""
    early, late = ({(m.value, m.after) for m in moves if m.backward is when} for when in (False, True))
    return len({value for value, _ in early & late})


def traffic_rows(traffic: Traffic) -> list[tuple[str, ...]]:
    """(axes, kind, count, bytes, seconds) as text."""
    return [
        ("+".join(axes), kind, str(t.count), bytes_text(t.sent), seconds_text(t.seconds))
        for (axes, kind), t in traffic.items()
    ]


def _resting(plan: Plan) -> list[str]:
    head, order = "parameters at rest", list(plan.resting)
    if plan.facts is not None:
        order = list(plan.facts.whole)  # as the model has them; a saved plan has them by name
        held, whole = sum(plan.facts.at_rest.values()), sum(plan.facts.whole.values())
        who = "a rank holds" if plan.stages is None else "a rank of each stage together hold"
        head += f": {who} {bytes_text(held)} of {bytes_text(whole)}"
    rows = Folder(plan.resting).rows((name, str(plan.resting[name])) for name in order)
    return [head, *columns(rows)]


def _modules(plan: Plan) -> list[str]:
    """Per module, layers folded, what its calls split on each axis."""
    rows = by_module(plan)
    folded = Folder(module for module, _ in rows).rows(rows)
    head = ("what calls split", *plan.mesh.names)
    return columns([head, *(("  " + name, *what) for name, what in folded)], indent="")


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Rows as aligned lines; the columns in `right` are set to the right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    widths[0] = min(widths[0], WIDEST)
    lines = []
    for row in rows:
        cells = [c.rjust(w) if k in right else c.ljust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
