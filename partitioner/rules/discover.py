"""Ops without a rule: it is found by trying them, and proved before it is used.

    casebook::scaled_flip(Tensor x, float s)      a b -> a b (b whole)

The op is run on small random tensors, whole and in parts, in a child process; what puts the parts together is the rule.
It is remembered here by the call's signature, and on disk.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from ..compat import no_modes
from . import rulecache
from .confirm import confirmed
from .dims import whole_rule
from .found import Found, line_of, rule_from
from .notation import Rule
from .samples import numbers_of
from .sandbox import Attempt, Unfinished, in_child
from .search import open_lab, search
from .split import Call

_REMEMBERED: dict[Any, Found] = {}
_RANDOM = torch.Tag.nondeterministic_seeded
_UNKNOWN_SIZE = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output


def discovered_rule(call: Call) -> Rule:
    """The rule of a call of an op that has none: discovered, or a whole one that says why."""
    if not isinstance(call.target, OpOverload):
        return whole_rule(call, note=_no_rule(*_wrapped(call)))
    name = call.target.name()
    if call.depends_on_data:
        return whole_rule(call, note=_no_rule(name, "its sizes depend on the data"))
    found = _found(call)
    rule = rule_from(found, call)
    if found.why:
        return rule.but(note=_no_rule(name, found.why))
    return rule.but(discovered=f"rule of {name} discovered: {line_of(rule)}")


def _no_rule(name: str, why: str) -> str:
    return f"no sharding rule for {name}" + (f": {why}" if why else "")


def _wrapped(call: Call) -> tuple[str, str]:
    """The name of what is no plain op, and why it has no rule; of an op that writes in place, the op's own."""
    first = call.args[0] if call.args else None
    if "auto_functionalized" in str(call.target) and isinstance(first, OpOverload):
        return first.name(), "it writes to its operands"
    return str(call.target), ""


def _found(call: Call) -> Found:
    why = _hopeless(call)
    if why:
        return Found(why=why)
    key = (call.target, rulecache.signature(call))
    if key not in _REMEMBERED:
        _REMEMBERED[key] = _kept_or_tried(call)
    return _REMEMBERED[key]


def _hopeless(call: Call) -> str:
    """Why an op need not be tried; "" where it may be."""
    tensors = [*call.operands, *(o for o in call.outputs if isinstance(o, torch.Tensor))]
    if call.target._schema.is_mutable:
        return "it writes to its operands"
    if _RANDOM in call.target.tags:
        return "its values are random"
    if any(tag in call.target.tags for tag in _UNKNOWN_SIZE):
        return "the size of what it gives depends on the data"
    if not call.operands or len(tensors) == len(call.operands):
        return "it has no tensor operands" if not call.operands else "it gives no tensor"
    if any(not isinstance(o, torch.Tensor) and o is not None for o in call.outputs):
        return "it gives something else than tensors"
    if any(t.layout != torch.strided or t.is_quantized for t in tensors):
        return "it has sparse or quantized tensors"
    if any(0 in t.shape for t in tensors):
        return "it has an empty operand"
    return "" if hasattr(os, "fork") else "ops are tried in a forked process, which this system has not"


def _kept_or_tried(call: Call) -> Found:
    key = rulecache.full_key(call)
    kept = rulecache.load(key) if key else None
    if kept is not None:
        try:
            return Found.from_json(kept, call)
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
    try:
        found = Found.from_json(in_child(_work(_on_meta(call))), call)
    except Unfinished as fault:
        return Found(why=f"trying it failed, {fault}")
    if key:
        rulecache.save(key, found.to_json())
    return found


def _on_meta(call: Call) -> Call:
    """The call with its fake tensors replaced by ones that belong to no mode."""

    def bare(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, torch.Tensor) else x

    with no_modes():
        return Call(call.target, *tree_map(bare, (call.args, call.kwargs, call.output)))


def _work(call: Call) -> Any:
    """What the child does: find, prove, and tell."""

    def work(attempt: Attempt) -> dict[str, Any]:
        lab = open_lab(call, attempt)
        if isinstance(lab, str):
            return Found(why=lab).to_json()
        found = confirmed(lab, search(lab, attempt), attempt)
        return (found if found.factors or found.why else replace(found, why=_why_not(call))).to_json()

    return work


def _why_not(call: Call) -> str:
    sizes = {n for t in call.operands for n in t.shape if n > 1} & numbers_of(call)
    if sizes:
        return f"its argument {min(sizes)} is a size of the whole"
    return "no split of its operands gives its result"
