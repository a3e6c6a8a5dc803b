"""The reasons for one call, the calls of a module, or a parameter, as text.

For each axis: what was chosen, the next best and how much dearer it is with all else unchanged, the parts of both
costs, and who forced it: the role of the axis, a pin, the calls that it decides with. What is said alike of several
layers is said once.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Iterator

from .doing import choice_text, module_of
from .errors import PlanError
from .fold import MODEL, Folder
from .layout import Layout
from .plan import Plan
from .reasons import Next, Term
from .stage_text import stage_of_call
from .traffic import Moved
from .twins import is_away, is_twin, original
from .units import bytes_text, seconds_text

TERMS = 8
"""So many parts of a cost are listed, the largest."""

TINY = 5e-10
"""Seconds that are not worth a line."""


def explain(plan: Plan, name: str) -> str:
    """Why a call, a module's calls, or a parameter is as it is. `name` may be a glob.

    Raises:
        PlanError: nothing has that name; the message lists the nearest ones.
    """
    params = [p for p in plan.resting if p == name or fnmatch.fnmatchcase(p, name)]
    calls = [c for c in plan.choices if name == c or _matches(module_of(plan, c), name)]
    if not params and not calls:
        near = sorted({m for m, _, _ in plan.modules.values() if m} | set(plan.resting))
        alike = [n for n in near if name.split(".")[-1] in n][:5]
        close = difflib.get_close_matches(name, near, 5) or alike or near[:5]
        raise PlanError(f"nothing in the plan is called {name!r}; there are, for example, {close}")
    told: set[tuple[Term, ...]] = set()
    blocks = [(p, _parameter(plan, p, told)) for p in params]
    views = [c for c in calls if c != name and plan.facts is not None and not plan.facts.seconds.get(c)]
    blocks += [(c, _call(plan, c, told)) for c in calls if c not in views]
    lines = _folded(plan, blocks)
    if views:
        lines.append(f"{len(views)} views cost nothing and do as their neighbours: {_some(views)}")
    return "\n".join(lines)


def _matches(module: str, name: str) -> bool:
    return bool(module) and (module == name or fnmatch.fnmatchcase(module, name))


# -- names in the text are marked, so that texts of two layers can be compared without them
def _named(name: str) -> str:
    return f"\x01{name}\x02"


def _folded(plan: Plan, blocks: list[tuple[str, list[str]]]) -> list[str]:
    """The blocks, those that differ by the numbers in names alone written once."""
    alike: dict[str, list[tuple[str, list[str]]]] = {}
    for name, lines in blocks:
        key = re.sub("\x01.*?\x02", lambda m: re.sub(r"\d+", "#", m[0]), "\n".join(lines))
        alike.setdefault(key, []).append((name, lines))
    folder = Folder([*(m for m, _, _ in plan.modules.values()), *plan.resting])
    out = []
    for some in alike.values():
        out += [line.replace("\x01", "").replace("\x02", "") for line in some[0][1]]
        if len(some) > 1:
            where = folder.fold(name if name in plan.resting else module_of(plan, name) for name, _ in some[1:])
            out.append(f"  and {len(some) - 1} alike: {', '.join(where)}")
    return out


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# -- calls
def _call(plan: Plan, call: str, told: set[tuple[Term, ...]]) -> list[str]:
    module, op, where = plan.modules.get(call, ("", "", ""))
    took = plan.facts.seconds.get(call) if plan.facts is not None else None
    lines = [f"{_named(call)} = {op} of {_named(module or MODEL)}" + (f", at {where}" if where else "")]
    if took is not None:
        lines.append(f"  {seconds_text(took)} of compute" if took else "  a view: costs nothing")
    lines += stage_of_call(plan, call)
    if call in plan.recompute:
        lines.append("  not kept for backward, which makes it again")
    if call in plan.offload:
        lines.append("  on the host from its last use in forward until backward reads it")
    if is_away(call, plan.offload):
        lines.append(f"  comes back from the host for backward, as {_named(original(call))} was")
        return lines
    if is_twin(call):
        lines.append(f"  backward makes again what {_named(original(call))} gave, and as that did")
        return [*lines, *(f"  needs {line}" for line in _needs(plan, call))]
    for axis in plan.choices[call]:
        lines += _axis(plan, call, axis, told)
    lines += [f"  needs {line}" for line in _needs(plan, call)]
    return [*lines, *_group(plan, call)]


def _axis(plan: Plan, call: str, axis: str, told: set[tuple[Term, ...]]) -> Iterator[str]:
    dims = plan.facts.dims.get(call) if plan.facts is not None else None
    choice = plan.choices[call][axis]
    head = f"  {axis}: {choice_text(choice, dims)}"
    pin = _pin(plan, call)
    if plan.decisions is None:
        yield f"{head}, as the given plan says"
    elif axis not in plan.decisions.of(call):
        yield f"{head}, {pin or _role(plan, call, axis)}"
    else:
        best = plan.decisions.next_best(call, axis)
        head += f", {pin}" if pin else ""
        if best is None:
            yield f"{head}; no other choice fits its neighbours as they are"
        else:
            assert not isinstance(best.what, Layout)
            yield f"{head}; next best {choice_text(best.what, dims)}, {_dearer(plan, best)}"
            yield from _terms(best, told)


def _pin(plan: Plan, name: str) -> str:
    asked = plan.facts.asked if plan.facts is not None else {}
    pins = dict(asked.get("pinned", {}).get(name, ()))
    if name in plan.resting:
        pins = {p: text for p, text in (asked.get("pin") or {}).items() if fnmatch.fnmatchcase(name, p)}
    mine = [f"{pattern!r}: {text!r}" for pattern, text in pins.items()]
    return f"pinned by {', '.join(mine)}" if mine else ""


def _role(plan: Plan, call: str, axis: str) -> str:
    """Why an axis leaves a call no choice."""
    role, choice, only = plan.mesh.role(axis), plan.choices[call][axis], "the only legal choice"
    part = {"data": "the batch", "context": "the sequence", "expert": "experts"}.get(role)
    if part and isinstance(choice, tuple):
        return f"{only}: a {role} axis splits {part}"
    if part:
        return f"{only}: it has no part of {part} that a {role} axis could split"
    assert plan.decisions is not None
    if not plan.decisions.has_say(call):
        return "as the calls that it decides with, which have no other legal choice"
    if not isinstance(choice, tuple):
        return f"{only}: no dim of it can be split over {axis}"
    return f"{only}" + (": a tensor axis must split a weight, or heads, if it can" if role == "tensor" else "")


def _dearer(plan: Plan, best: Next) -> str:
    sign = "+" if best.dearer >= 0 else ""
    text = f"{sign}{seconds_text(best.dearer)}"
    if best.nbytes:
        text += f" and {bytes_text(abs(best.nbytes))} {'more' if best.nbytes > 0 else 'less'} kept"
    limit = plan.facts.asked.get("memory") if plan.facts is not None else None
    passed = f"; passed over for memory={limit}" if limit and best.dearer < -TINY and best.nbytes > 0 else ""
    return f"{text} with all else unchanged{passed}"


def _terms(best: Next, told: set[tuple[Term, ...]]) -> Iterator[str]:
    """The parts of the cost, as chosen and as they would be; of a group's calls only the first tells them."""
    terms = tuple(t for t in best.terms if max(t.chosen, t.other) > TINY)
    if terms in told:
        yield "      of the same parts as above"
        return
    told.add(terms)
    listed = sorted(terms, key=lambda t: -max(t.chosen, t.other))
    for term in listed[:TERMS]:
        yield f"      {seconds_text(term.chosen):>8} -> {seconds_text(term.other):>8}  {_what(term)}"
    if rest := listed[TERMS:]:
        chosen, other = sum(t.chosen for t in rest), sum(t.other for t in rest)
        yield f"      {seconds_text(chosen):>8} -> {seconds_text(other):>8}  {len(rest)} more"


def _what(term: Term) -> str:
    if term.what:
        return term.what
    some = ", ".join(map(_named, term.values[:2]))
    more = f" and {len(term.values) - 2} more" if len(term.values) > 2 else ""
    is_param = any(v.endswith(term.to) for v in term.values)
    if not some:  # what no call of the graph makes: a gradient as it goes to where it rests
        return f"reshard between here and {_named(term.to)}"
    return f"reshard of {some}{more}" + ("" if is_param else f", between here and {_named(term.to)}")


def _needs(plan: Plan, call: str) -> Iterator[str]:
    """The reshards that a call reads."""
    for move in plan.facts.moves if plan.facts is not None else ():
        if call in move.readers:
            others = len(move.readers) - 1
            shared = f", shared with {others} other call{'s' if others > 1 else ''}" if others else ""
            yield f"{_named(move.value)} as {move.after}, not {move.before}: {_cost(move)}{shared}"


def _cost(move: Moved) -> str:
    sent = sum(move.way.sent)
    return f"{move.way}, " + (f"{bytes_text(sent)} sent, " if sent else "") + seconds_text(move.way.total)


def _group(plan: Plan, call: str) -> list[str]:
    """The calls that a call decides with, by module."""
    together = plan.decisions.together(call) if plan.decisions is not None else []
    if plan.decisions is None or len(together) < 2:
        return []
    count = Counter(module_of(plan, c) or MODEL for c in together if c != call)
    some = ", ".join(f"{n} of {_named(m)}" for m, n in count.items())
    say = "" if plan.decisions.has_say(call) else " and has no say"
    return [f"  decides with {len(together) - 1} other call{'s' if len(together) > 2 else ''}{say}: {some}"]


# -- parameters
def _parameter(plan: Plan, name: str, told: set[tuple[Term, ...]]) -> list[str]:
    lines = [f"{_named(name)} rests as {plan.resting[name]}"]
    if plan.facts is None:
        return lines
    held, whole = plan.facts.at_rest[name], plan.facts.whole[name]
    step = plan.facts.optimizer.get(name)
    trained = f"; {seconds_text(step)} an optimizer step" if step is not None else "; not trained"
    lines.append(f"  {bytes_text(held)} of {bytes_text(whole)} on a rank{trained}")
    for move in plan.facts.moves:
        if ("grad", name) in move.leaves:
            lines.append(f"  its gradient, made as {move.before}: {_cost(move)}")
        elif move.is_param and move.value == name:
            when = "backward" if move.backward else "forward"
            lines.append(f"  needed in {when} as {move.after}: {_cost(move)}, for {_named(_some(list(move.readers)))}")
    return [*lines, *_why_there(plan, name, told)]


def _why_there(plan: Plan, name: str, told: set[tuple[Term, ...]]) -> Iterator[str]:
    """Who forced a parameter to rest as it does, and the next best."""
    asked = plan.facts.asked if plan.facts is not None else {}
    if pin := _pin(plan, name):
        yield f"  {pin}"
    if asked.get("zero", "auto") != "auto":
        yield f"  zero={asked['zero']} was asked for"
    if asked.get("memory") is not None:
        peak = f"; the peak is {plan.facts.peak}" if plan.facts is not None and plan.facts.peak else ""
        yield f"  memory={asked['memory']} bytes a device were asked for{peak}"
    if plan.decisions is None:
        yield "  as the given plan says"
        return
    best, ways = plan.decisions.next_layout(name), plan.decisions.layouts(name)
    if ways == 1:
        yield "  it may rest in no other way"
    elif best is None:
        yield f"  none of the {ways - 1} other ways to rest fits its readers as they are"
    else:
        yield f"  next best of {ways} ways to rest: {best.what}, {_dearer(plan, best)}"
        yield from _terms(best, told)
