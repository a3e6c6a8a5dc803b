"""What calls do on each axis of the mesh, in words: a call's choice, and a module's calls together.

    heads               splits the heads
    heads, whole 2/7    the same, but two of the module's seven calls (views not counted) run whole
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from .plan import Plan
from .rules.split import Leaf
from .strategies import Choice

SUMS, WHOLE = "partial sums", "whole"


def choice_text(choice: Choice, dims: Mapping[Leaf, str] | None = None) -> str:
    """`whole`, `partial sums`, `split heads`; a dim without a name is called by its letter in the op's rule."""
    what = dim_text(choice, dims)
    return f"split {what}" if isinstance(choice, tuple) else what


def dim_text(choice: Choice, dims: Mapping[Leaf, str] | None = None) -> str:
    if choice is None:
        return WHOLE
    if isinstance(choice, int):
        return SUMS
    return (dims or {}).get(choice) or choice[0] + (f".{choice[1]}" if choice[1] else "")


def doing(plan: Plan, call: str, axis: str) -> str:
    """What a call does on an axis, without the word split."""
    dims = plan.facts.dims.get(call) if plan.facts is not None else None
    return dim_text(plan.choices[call].get(axis), dims)


def module_of(plan: Plan, call: str) -> str:
    return plan.modules.get(call, ("", "", ""))[0] or ""


def costly(plan: Plan) -> Iterator[str]:
    """The calls that take time: all but views. Of a plan without facts, all."""
    for call in plan.choices:
        if plan.facts is None or plan.facts.seconds.get(call):
            yield call


def by_module(plan: Plan) -> list[tuple[str, tuple[str, ...]]]:
    """(module, per axis what its calls do), in program order."""
    found: dict[str, list[Counter[str]]] = {}
    for call in costly(plan):
        counts = found.setdefault(module_of(plan, call), [Counter() for _ in plan.mesh.names])
        for axis, count in zip(plan.mesh.names, counts, strict=True):
            count[doing(plan, call, axis)] += 1
    return [(module, tuple(map(_together, counts))) for module, counts in found.items()]


def _together(count: Counter[str]) -> str:
    """The most frequent first, without a number; of equally frequent ones in order of the alphabet."""
    (most, _), *others = sorted(count.items(), key=lambda c: (-c[1], c[0]))
    return ", ".join([most, *(f"{what} {n}/{count.total()}" for what, n in others)])
