"""Plans as text: a summary of one screen, and the reasons for one call or parameter."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Iterable

from .errors import PlanError
from .plan import Decision, Plan
from .strategies import Choice


def choice_text(choice: Choice) -> str:
    if choice is None:
        return "whole"
    return "partial" if isinstance(choice, int) else f"split {choice[0]}" + (f".{choice[1]}" if choice[1] else "")


def summary(plan: Plan) -> str:
    """Mesh, ZeRO stage, parameters with layers folded, what each kind of op does on each axis, notes."""
    lines = [f"plan for mesh {plan.mesh} on {plan.mesh.device.name}: zero={plan.zero}, {len(plan.choices)} calls"]
    lines.append("parameters at rest")
    lines += [f"  {name:<48} {layout}" for name, layout in _folded(plan.resting)]
    lines.append("calls")
    lines += _by_op(plan)
    if plan.notes:
        lines.append("notes")
        lines += [f"  {note}" for note in plan.notes]
    return "\n".join(lines)


def _folded(resting: Iterable) -> list[tuple[str, str]]:
    """Parameters that differ only by layer numbers and rest alike are one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, layout in dict(resting).items():
        groups.setdefault((re.sub(r"\b\d+\b", "*", name), str(layout)), []).append(name)
    return [(pattern if len(names) > 1 else names[0], text) for (pattern, text), names in groups.items()]


def _by_op(plan: Plan) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for name, by in plan.choices.items():
        op = plan.modules.get(name, ("", name, ""))[1]
        doing = ", ".join(f"{a}: {choice_text(c)}" for a, c in by.items()) or "whole"
        counts[(op, doing)] += 1
    rows = sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    return [f"  {count:>5} x {op:<44} {doing}" for (op, doing), count in rows if _is_interesting(op)]


def _is_interesting(op: str) -> bool:
    return any(w in op for w in ("mm", "attention", "conv", "embedding", "nll", "norm", "softmax", "index", "scatter"))


def explain(plan: Plan, name: str) -> str:
    """Why a call, a module's calls, or a parameter is as it is.

    Raises:
        PlanError: nothing has that name; the message lists the nearest ones.
    """
    lines: list[str] = []
    for param, layout in plan.resting.items():
        if param == name or fnmatch.fnmatchcase(param, name):
            lines.append(f"{param} rests as {layout}")
    for call, by in plan.choices.items():
        module, op, where = plan.modules.get(call, ("", "", ""))
        if name in (call, module) or fnmatch.fnmatchcase(module, name):
            lines.append(f"{call} = {op}  [{module}] {where}")
            decisions = plan.decisions.of(call) if plan.decisions is not None else {}
            lines += [f"  {axis}: {_reason(plan, decisions.get(axis), axis, choice)}" for axis, choice in by.items()]
    if not lines:
        near = sorted({m for m, _, _ in plan.modules.values() if m} | set(plan.resting))
        alike = [n for n in near if name.split(".")[-1] in n][:5]
        close = difflib.get_close_matches(name, near, 5) or alike or near[:5]
        raise PlanError(f"nothing in the plan is called {name!r}; there are, for example, {close}")
    return "\n".join(lines)


def _reason(plan: Plan, decision: Decision | None, axis: str, choice: Choice) -> str:
    if decision is None:
        return f"{choice_text(choice)} (the only legal choice for {plan.mesh.role(axis)} axis {axis})"
    ranked = ", ".join(f"{choice_text(c)} {s * 1e6:.1f} us" for c, s in decision.ranked())
    return f"{choice_text(decision.chosen)}; with all else unchanged: {ranked}"
