"""Factor notation: one line says how an op may be split.

    "m k, k n -> m n {k}"

Left of the arrow one group of words per tensor operand (tensors in the order they stand in args, then kwargs; None
and numbers are not counted), right of it one per tensor output. A word is a *factor*: a named dimension of the op's
iteration space. Splitting factor `f` over a mesh axis splits every operand and output dim that holds `f`, leaves
whole those that lack it, and makes partial each output that lists `f` in braces (it is reduced there).

    {k}        the output is a sum over k           {k|max}   a maximum over k
    k!         k must stay whole                    (h d)     one dim that is h x d, h major
    1          a dim of size 1, or one broadcast: no factor
    _          an operand or output that is 0-d (no dims)
    -          an output that is None or no tensor

An output that lacks a split factor without reducing over it is the same on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..window import Window

Dims = tuple[tuple[str, ...], ...]
"""Per tensor dim, the factors it is made of, major first; () is a dim of size 1 or a broadcast one."""


@dataclass(frozen=True)
class Rule:
    """How one call of an op may be split. Built by `rule("...")`.

    Attributes:
        inputs: per tensor operand, its dims.
        outputs: per output, its dims; None where the output is no tensor.
        sums: per output, {factor: "sum" | "max" | "min"}, the factors it reduces over.
        whole: factors that must not be split.
        ordered: factors of which a rank must hold one contiguous range (its start is used: positions, vocabulary).
        linear: alternatives of operand sets; when just the operands of one set are partial sums (the others
            whole), running the op locally gives outputs that are partial sums.
        localize: how the call's plain arguments change on a rank; see `Local`. None: they do not.
        decompose: {factor: function of the op's arguments} that computes the same by simpler ops; splitting the
            factor is legal after the call has been replaced by them.
        windows: {(operand, dim): (factor, window)}: splitting the factor needs, of that dim, the rows that the window
            sees from the rank's piece of the factor. The factor is ordered.
        sizes: sizes of factors that no dim shows alone (the h and d of `(h d)`).
        flops: floating-point operations of the whole call.
        note: why the op is not split more, for the plan's notes.
        discovered: what was found out of an op that has no rule of its own, for the plan's notes.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    sums: tuple[dict[str, str], ...] = ()
    whole: frozenset[str] = frozenset()
    ordered: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    localize: Callable[[Local], tuple[Any, tuple, dict]] | None = None
    decompose: dict[str, Callable[..., Any]] = field(default_factory=dict)
    windows: dict[tuple[int, int], tuple[str, Window]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    flops: float = 0.0
    note: str = ""
    discovered: str = ""

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of appearance."""
        seen: dict[str, None] = {}
        for dims in (*self.inputs, *(o for o in self.outputs if o is not None)):
            for dim in dims:
                seen |= dict.fromkeys(dim)
        return tuple(seen)

    def but(self, **changes: Any) -> Rule:
        return replace(self, **changes)


class Local:
    """What a localizer sees of one call on one rank.

    `target`, `args` and `kwargs` are the call's own (tensors stand in place, whatever stands for them); a localizer
    returns new ones, with tensors untouched and plain arguments (sizes, starts) made local.
    """

    target: Any
    args: tuple
    kwargs: dict[str, Any]

    def in_shape(self, operand: int) -> tuple[int, ...]:
        """The local shape of a tensor operand."""
        raise TypeError("abstract")

    def span(self, operand: int, dim: int) -> tuple[int, int] | None:
        """The rows [low, high) that this rank's windows see of a dim, beyond its borders too; None: it is not split.

        The local operand holds those that lie within the borders.
        """
        raise TypeError("abstract")

    def out_shape(self, output: int = 0) -> tuple[int, ...]:
        """The local shape of an output."""
        raise TypeError("abstract")

    def whole_shape(self, operand: int) -> tuple[int, ...]:
        """The whole shape of a tensor operand."""
        raise TypeError("abstract")

    def start(self, factor: str) -> int:
        """Where this rank's range of an `ordered` (or unsplit) factor begins."""
        raise TypeError("abstract")

    def size(self, factor: str) -> int:
        """How much of a factor this rank holds."""
        raise TypeError("abstract")

    def out_pieces(self, output: int = 0) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Per dim and factor of an output: (start, local length, whole size)."""
        raise TypeError("abstract")


_WORD = re.compile(r"\(([^)]*)\)|(\S+)")


def rule(line: str, **more: Any) -> Rule:
    """Parse a line of factor notation; keyword arguments set further attributes of `Rule`.

    `whole`, `ordered` may be given as strings of factors; `linear` as a string such as `"0 1, 2"`: operands 0 and 1
    together, or operand 2 alone.

    Raises:
        ValueError: the line does not parse, or an output holds a factor that no operand has (name it in `new`).
    """
    left, arrow, right = line.partition("->")
    if not arrow:
        raise ValueError(f"no '->' in {line!r}")
    marked: set[str] = set()
    inputs = tuple(_dims(text, marked) for text in left.split(",")) if left.strip() else ()
    outputs: list[Dims | None] = []
    sums: list[dict[str, str]] = []
    for text in right.split(","):
        body, _, braces = text.partition("{")
        outputs.append(None if body.strip() == "-" else _dims(body, marked))
        words = braces.replace("}", "").split()
        sums.append({w.partition("|")[0]: w.partition("|")[2] or "sum" for w in words})
    for name in ("whole", "ordered"):
        if isinstance(more.get(name), str):
            more[name] = frozenset(more[name].split())
    if isinstance(more.get("linear"), str):
        more["linear"] = tuple(frozenset(map(int, s.split())) for s in more["linear"].split(","))
    whole = frozenset(marked) | more.pop("whole", frozenset())
    return Rule(inputs, tuple(outputs), tuple(sums), whole=whole, **more)


def _dims(text: str, marked: set[str]) -> Dims:
    dims: list[tuple[str, ...]] = []
    for group, word in _WORD.findall(text):
        if word == "_":
            return ()
        names = group.split() if group else ([] if word == "1" else [word])
        marked |= {n[:-1] for n in names if n.endswith("!")}
        dims.append(tuple(n.rstrip("!") for n in names))
    return tuple(dims)
