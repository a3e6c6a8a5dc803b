"""What the rule files share: reading a call's arguments by name, naming dims, and local sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .notation import Dims, Local, Rule
from .split import Call, factor_sizes


def bound(call: Call) -> dict[str, Any]:
    """The call's arguments by the names of the op's schema, defaults filled in."""
    out: dict[str, Any] = {}
    for i, a in enumerate(call.target._schema.arguments):
        if i < len(call.args):
            out[a.name] = call.args[i]
        else:
            out[a.name] = call.kwargs.get(a.name, a.default_value)
    return out


def rebound(local: Local, target: Any = None, **changes: Any) -> tuple[Any, tuple, dict]:
    """The call with some arguments (named as in the op's schema) changed, and perhaps another target."""
    args, kwargs = list(local.args), dict(local.kwargs)
    for i, a in enumerate(local.target._schema.arguments):
        if a.name in changes and i < len(args):
            args[i] = changes[a.name]
        elif a.name in changes:
            kwargs[a.name] = changes[a.name]
    return target or local.target, tuple(args), kwargs


def argument(local: Local, name: str) -> Any:
    """One argument of the call as it stands on this rank, by its schema name."""
    for i, a in enumerate(local.target._schema.arguments):
        if a.name == name:
            return local.args[i] if i < len(local.args) else local.kwargs.get(name, a.default_value)
    raise KeyError(f"{local.target} has no argument {name!r}")


def plain(*sizes: Any) -> bool:
    """All are plain integers: none depends on the data."""
    return all(isinstance(n, int) for n in sizes)


def unit(n: Any) -> bool:
    """A size known to be 1."""
    return isinstance(n, int) and n == 1


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim % max(ndim, 1)


def dims_of(dims: Any, ndim: int) -> tuple[int, ...]:
    """Dims counted from the front, in order; None, or none listed, is all of them."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return tuple(range(ndim))
    listed = [dims] if isinstance(dims, int) else dims
    return tuple(sorted({dim_of(d, ndim) for d in listed if ndim}))


def names(shape: Iterable[Any], tag: str = "d") -> Dims:
    """One factor a dim, `d0 d1 ...`; none for a dim of size 1."""
    return tuple(() if unit(n) else (f"{tag}{i}",) for i, n in enumerate(shape))


def factors_in(*dims: Iterable[Iterable[str]]) -> frozenset[str]:
    """Every factor of some dims."""
    return frozenset(f for ds in dims for d in ds for f in d)


def replaced(dims: Dims, at: int, dim: tuple[str, ...]) -> Dims:
    """The dims with one of them changed."""
    return dims[:at] + (dim,) + dims[at + 1 :]


def without(dims: Dims, at: int) -> Dims:
    """The dims with one of them removed."""
    return dims[:at] + dims[at + 1 :]


def local_sizes(given: Sequence[Any], shape: Sequence[Any]) -> list[Any]:
    """A size argument made local; sizes that depend on the data stay as they are given."""
    return [n if isinstance(n, int) else g for g, n in zip(given, shape, strict=True)]


def additive(call: Call, *alternatives: Iterable[int]) -> tuple[frozenset[int], ...]:
    """Those alternatives of `Rule.linear` that can hold by type: no boolean is a partial sum."""
    if any(isinstance(o, torch.Tensor) and o.dtype == torch.bool for o in call.outputs):
        return ()
    sets = [frozenset(a) for a in alternatives]
    return tuple(s for s in sets if all(call.operands[i].dtype != torch.bool for i in s))


def whole_rule(call: Call, note: str = "") -> Rule:
    """Nothing splits: every dim of every operand and output is a whole factor of its own."""
    inputs = tuple(names(t.shape, f"i{i}_") for i, t in enumerate(call.operands))
    outputs = tuple(
        names(t.shape, f"o{i}_") if isinstance(t, torch.Tensor) else None for i, t in enumerate(call.outputs)
    )
    every = factors_in(*inputs, *(o for o in outputs if o is not None))
    return Rule(inputs, outputs, whole=every, note=note)


def fitted(rule: Rule, call: Call) -> Rule:
    """The rule for this call's sizes: factors of size 1 drop out, those that depend on the data are whole.

    Raises:
        ValueError: the rule does not fit the call.
    """
    sizes = factor_sizes(rule, call)
    gone = {f for f, n in sizes.items() if unit(n)}
    open_ = {f for f, n in sizes.items() if not isinstance(n, int)}
    if not gone and not open_:
        return rule

    def kept(dims: Dims) -> Dims:
        return tuple(tuple(f for f in dim if f not in gone) for dim in dims)

    return rule.but(
        inputs=tuple(map(kept, rule.inputs)),
        outputs=tuple(None if o is None else kept(o) for o in rule.outputs),
        sums=tuple({f: op for f, op in s.items() if f not in gone} for s in rule.sums),
        whole=(rule.whole | open_) - gone,
        ordered=rule.ordered - gone,
        windows={at: (f, window) for at, (f, window) in rule.windows.items() if f not in gone},
        sizes={f: n for f, n in rule.sizes.items() if f not in gone},
        decompose={f: fn for f, fn in rule.decompose.items() if f not in gone},
    )
