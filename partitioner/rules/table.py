"""The table of rules: op -> function of a call that returns its `Rule`. Filled by the files beside this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .notation import Rule
from .split import Call

RuleOf = Callable[[Call], Rule]
Table = dict[Any, RuleOf]


def on(table: Table, *ops: Any) -> Callable[[RuleOf], RuleOf]:
    """Decorator: enter a rule function for these op overloads."""

    def enter(fn: RuleOf) -> RuleOf:
        for op in ops:
            if op in table:
                raise ValueError(f"two rules for {op}")
            table[op] = fn
        return fn

    return enter


def merged(tables: Iterable[Table]) -> Table:
    """One table of several; an op in two of them is an error."""
    out: Table = {}
    for table in tables:
        twice = out.keys() & table.keys()
        if twice:
            raise ValueError(f"two rules for {sorted(map(str, twice))}")
        out |= table
    return out
