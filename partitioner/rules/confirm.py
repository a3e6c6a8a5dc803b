"""What a search has found, proved as rules written by hand are; what does not hold is dropped."""

from __future__ import annotations

from dataclasses import replace

from ..layout import Layout, piece
from ..mesh import Mesh
from .dims import fitted
from .found import Factor, Found, rule_from
from .proof import alone, compare, together
from .samples import Sizes, elements, shrunk
from .sandbox import Attempt
from .search import Lab, largest
from .split import Call, Split, plain_shape

NEAR = 1 << 18
"""Operands of up to so many elements are proved at the sizes of the call itself."""


def confirmed(lab: Lab, found: Found, attempt: Attempt) -> Found:
    """The factors and linear sets that hold alone and in pairs on small tensors, and alone on larger ones."""
    kind = "wide" if attempt("run wide", lambda: bool(lab.real("wide"))) else "signed"
    found = _holding(lab.real(kind), found, lab, attempt, pairs=True)
    near = near_sizes(lab)
    if near == lab.sizes:
        return found
    if not attempt("run near", lambda: bool(lab.sized(near, "positive"))):
        return Found(why="it runs on small random tensors and not on larger ones")
    return _holding(lab.sized(near, "positive"), found, lab, attempt, pairs=False)


def near_sizes(lab: Lab) -> Sizes:
    """The sizes of the call, or the largest stand-ins for them that are cheap to run."""
    own = {n: n for t in lab.call.operands for n in t.shape}
    for sizes in (own, *(shrunk(lab.call, least, 16) for least in (250, 120, 60, 30))):
        if elements(lab.call, sizes) <= NEAR:
            return sizes
    return lab.sizes


def _holding(call: Call, found: Found, lab: Lab, attempt: Attempt, pairs: bool) -> Found:
    shape = plain_shape(fitted(rule_from(found, call), call), call)
    factor_of = _names(found, call)
    factors, linear = list(found.factors), list(found.linear)
    tolerance = lab.tolerance
    atol = tolerance / 10 * max(largest(o) for o in call.outputs if o is not None)
    for split, mesh in (*alone(shape), *(together(shape) if pairs else ())):
        parts = [factor_of[name] for name, _ in split.axes]
        sets = [found.linear[i] for i in split.partial.values()]
        if not all(f in factors for f in parts) or not all(s in linear for s in sets) or _empty(split, call, mesh):
            continue
        key = f"proof {pairs} {dict(split.axes)} {dict(split.partial)} {mesh}"
        if attempt(key, lambda s=split, m=mesh: compare(call, s, m, tolerance, atol) is None) is True:
            continue
        if sets:
            linear.remove(sets[-1])
        else:
            factors.remove(parts[-1])
    return replace(found, factors=tuple(factors), linear=tuple(linear))


def _names(found: Found, call: Call) -> dict[str, Factor]:
    """The factor that each letter of the rule stands for."""
    inputs = rule_from(found, call).inputs
    return {inputs[i][d][0]: f for f in found.factors for i, d in enumerate(f.dims) if d is not None and inputs[i][d]}


def _empty(split: Split, call: Call, mesh: Mesh) -> bool:
    """Some rank would hold nothing: no plan has such a split."""
    layouts: list[Layout] = [split.input_layout(i) for i in range(len(call.operands))]
    cuts = {(f.size, f.axes) for layout in layouts for dim in layout.dims for f in dim if f.axes}
    return any(piece(n, tuple((mesh.sizes[a], mesh.sizes[a] - 1) for a in axes))[1] == 0 for n, axes in cuts)
