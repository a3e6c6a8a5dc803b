"""What trying an op has found, as plain data, and the rule it makes of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .dims import unit
from .notation import Dims, Rule
from .split import Call

SAME, NONE = "same", "-"
REDUCED = ("sum", "max", "min")
CODES = (SAME, *map(str, range(32)), *REDUCED)
"""What an output may be of a split: the same on every rank, split on a dim (its number), or partial; the first that
fits is taken."""


@dataclass(frozen=True)
class Factor:
    """Dims that split together: per operand its dim or None, and per output what it then is (see `CODES`)."""

    dims: tuple[int | None, ...]
    outs: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """The factors of an op and the operand sets it is linear in; or why there are none."""

    factors: tuple[Factor, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        factors = [[list(f.dims), list(f.outs)] for f in self.factors]
        return {"factors": factors, "linear": [list(s) for s in self.linear], "why": self.why}

    @classmethod
    def from_json(cls, body: Any, call: Call) -> Found:
        """Read `to_json`.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is something else, or of a call of another form.
        """
        factors = tuple(Factor(tuple(dims), tuple(outs)) for dims, outs in body["factors"])
        found = cls(factors, tuple(tuple(s) for s in body["linear"]), str(body["why"]))
        if not all(_fits(f, call) for f in factors):
            raise ValueError("factors of another call")
        if any(i not in range(len(call.operands)) for s in found.linear for i in s):
            raise ValueError("operands of another call")
        return found


def _fits(f: Factor, call: Call) -> bool:
    if len(f.dims) != len(call.operands) or len(f.outs) != len(call.outputs):
        return False
    held = [(d, t) for d, t in zip(f.dims, call.operands, strict=True) if d is not None]
    sizes = {t.shape[d] if d in range(t.dim()) else None for d, t in held}
    outs = [o for o in zip(f.outs, call.outputs, strict=True) if isinstance(o[1], torch.Tensor)]
    if not all(code in CODES for code, _ in outs):
        return False
    sizes |= {o.shape[int(code)] if int(code) < o.dim() else None for code, o in outs if code.isdigit()}
    return len(sizes) == 1 and None not in sizes


def rule_from(found: Found, call: Call) -> Rule:
    """The rule: one letter a factor; dims that nothing splits are whole, each with a letter of its own.

    A whole output dim takes the letter of the operand dim of its size at its place, so that what it is (the batch, say)
    is still known after the call.
    """
    letters = _letters()
    name_of: dict[Any, str] = {}
    whole: dict[str, None] = {}

    def named(key: Any) -> tuple[str, ...]:
        if key not in name_of:
            name_of[key] = next(letters)
            if not isinstance(key, Factor):
                whole[name_of[key]] = None
        return (name_of[key],)

    inputs: list[Dims] = []
    for i, t in enumerate(call.operands):
        held = {f.dims[i]: f for f in found.factors if f.dims[i] is not None}
        inputs.append(tuple(() if unit(n) else named(held.get(d, (i, d))) for d, n in enumerate(t.shape)))
    outputs: list[Dims | None] = []
    for j, t in enumerate(call.outputs):
        if not isinstance(t, torch.Tensor):
            outputs.append(None)
            continue
        split = {int(f.outs[j]): f for f in found.factors if f.outs[j].isdigit()}
        keys = [split.get(d) or _origin(t, d, call, name_of) or ("out", j, d) for d in range(t.dim())]
        outputs.append(tuple(() if unit(n) else named(k) for n, k in zip(t.shape, keys, strict=True)))
    sums = tuple(
        {name_of[f]: f.outs[j] for f in found.factors if f.outs[j] in REDUCED} for j in range(len(call.outputs))
    )
    linear = tuple(map(frozenset, found.linear))
    return Rule(tuple(inputs), tuple(outputs), sums, whole=frozenset(whole), linear=linear)


def _letters():
    for turn in range(1000):
        for letter in "abcdefghijklmnopqrstuvwxyz":
            yield letter + (str(turn) if turn else "")


def _origin(out: torch.Tensor, dim: int, call: Call, name_of: dict[Any, str]) -> tuple[int, int] | None:
    """The whole operand dim that an output dim looks to be: of the same size at the same place."""
    for i, t in enumerate(call.operands):
        if t.dim() == out.dim() and t.shape[dim] == out.shape[dim] and (i, dim) in name_of:
            return (i, dim)
    return None


def line_of(rule: Rule) -> str:
    """The rule as a line of factor notation, for people: `a b -> a {b} (a whole)`."""

    def side(dims: Dims | None) -> str:
        if dims is None:
            return "-"
        return " ".join(d[0] if d else "1" for d in dims) or "_"

    outs = []
    for j, dims in enumerate(rule.outputs):
        sums = rule.sums[j] if j < len(rule.sums) else {}
        marks = " ".join(f if op == "sum" else f"{f}|{op}" for f, op in sums.items())
        outs.append(side(dims) + (f" {{{marks}}}" if marks else ""))
    whole = " ".join(f for f in rule.factors if f in rule.whole)
    return f"{', '.join(map(side, rule.inputs))} -> {', '.join(outs)}" + (f" ({whole} whole)" if whole else "")
