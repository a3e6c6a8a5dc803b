"""The reasons for one call, the calls of a module, or a parameter, as text."""

from __future__ import annotations

import difflib
import fnmatch

from .doing import choice_text
from .errors import PlanError
from .plan import Decision, Plan
from .strategies import Choice


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
