"""What the choices of an earlier draft leave open in the problem of the same program with calls written out.

A draft prices such a call as its simpler ops at their least (`written.py`). With all other calls as they were, and the
simpler ops at what the call was to split, those ops are small parts that do not know each other, and what was promised
is met by deciding each by itself; all of the program at once may be too wide for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch.fx as fx

from .factors import Factored
from .joint import Joint
from .layout import Layout
from .rules.split import Leaf, Shape
from .strategies import Choice
from .tables import Tables, Variable
from .ways import Ends, Values
from .written import exact


class Taken(NamedTuple):
    """Of an earlier draft: per call, by name, and axis what it does; how parameters rest; of each call its shape, and
    which atom each of its leaves is."""

    calls: Mapping[str, Mapping[str, Choice]]
    resting: Mapping[str, Layout]
    factored: Mapping[str, tuple[Shape, Mapping[Leaf, int]]]

    @staticmethod
    def of(taken: Mapping[fx.Node, Mapping[str, Choice]], resting: Mapping[str, Layout], factored: Factored) -> Taken:
        own = {n.name: (factored.shapes[n], factored.atoms[n]) for n in taken}
        return Taken({n.name: by for n, by in taken.items()}, resting, own)


def values_as_before(tables: Tables, before: Taken) -> dict[int, np.ndarray]:
    """Per variable the values that are left; of a variable that is not in it all are."""
    known: dict[Any, np.ndarray | None] = {}
    found: dict[int, np.ndarray | None] = {}
    names = tables.prices.names
    ends: dict[str, Ends] = {}
    values: dict[Any, Values] = {}
    copied = {i: value for value, (i, _, _) in tables.copied.items()}
    for i, variable in enumerate(tables.variables):
        if variable.resting is not None:
            layouts, layout = variable.resting.layouts, before.resting.get(variable.name)
            found[i] = np.array([layouts.index(layout)]) if layout in layouts else None
        elif variable.joint is not None and all(m.node.name in before.calls for m in variable.members):
            ways = _ways(variable, before.calls, names)
            key = (id(variable.joint), ways)
            if key not in known:
                known[key] = _value(variable.joint, ways)
            found[i] = known[key]
        else:
            of = _written_for(variable, copied.get(i))
            if of not in before.calls or of not in before.factored:  # written out of what was itself written out
                of = None
            if of is not None and of not in ends:
                ends[of] = _ends(of, before, names)
            if of is not None:
                own = tuple([tuple(tables.factored.atoms[m.node].values()) for m in variable.members])
                key = (id(variable.joint), id(variable.states), own, str(variable.dims))
                if key not in values:
                    values[key] = Values(variable, tables.factored)
                found[i] = values[key].fitting(ends[of])
    return {i: values for i, values in found.items() if values is not None}


def _ends(name: str, before: Taken, names: tuple[str, ...]) -> Ends:
    """What a call split, for those that it was written out in."""
    shape, atoms = before.factored[name]
    choices = [before.calls[name].get(axis) for axis in names]
    split = (frozenset({atoms[c]}) if isinstance(c, tuple) else frozenset() for c in choices)
    return Ends(tuple(split), tuple(exact(shape, c) for c in choices))


def _written_for(variable: Variable, copied: fx.Node | None) -> str | None:
    """The call that a new one, or a tensor that new ones make or read, is written out for."""
    nodes = [m.node for m in variable.members]
    if copied is not None:
        nodes += [copied, *copied.users]
    return next((n.meta["written"] for n in nodes if n.meta.get("written")), None)


def _ways(
    variable: Variable, calls: Mapping[str, Mapping[str, Choice]], names: tuple[str, ...]
) -> tuple[tuple[Choice, ...], ...]:
    """Per axis what each call of a group did."""
    members = [calls[m.node.name] for m in variable.members]
    return tuple(tuple([m.get(axis) for m in members]) for axis in names)


def _value(joint: Joint, ways: tuple[tuple[Choice, ...], ...]) -> np.ndarray | None:
    fits = np.ones(len(joint.joint), dtype=bool)
    for axis, (choices, way) in enumerate(zip(joint.choices, ways, strict=True)):
        fits &= np.array([tuple(c) == way for c in choices], dtype=bool)[joint.joint[:, axis]]
    return np.array([fits.argmax()]) if fits.any() else None
