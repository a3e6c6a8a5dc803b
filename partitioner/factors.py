"""Factors of the whole program: which dims of which tensors are the same size for the same reason.

Every tensor dim is a list of *atoms*. Walking the graph once, the rule of each call says which dims of its operands are
one factor; their atoms are united. Where a view writes a dim as several, its atom is cut, everywhere it occurs:

    n = a * b   (view [n] -> [a, b])         every dim that held atom n now holds atoms a, b

so a view is the identity on atoms, and splitting the heads inside a packed hidden size is a split of one atom. Two dims
that disagree about how to be cut (48 as 6 x 8 here, as 16 x 3 there) stay apart; the call in between has them whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_map

from .graph import Graph, is_getitem, is_tensor, tensor_operands, values_of
from .layout import Factor, Layout
from .rules.every import rule_of
from .rules.notation import Dims, Rule
from .rules.split import Call, Leaf, LeafDims, Shape

UNKNOWN = -1
"""The size of a dim that depends on data: never split."""


class Atoms:
    """A union-find over sizes whose members can be cut in parts. Atoms of size 1 do not exist."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._size: list[int] = []
        self._parts: list[tuple[int, ...]] = []

    def new(self, size: Any) -> list[int]:
        """Fresh atoms for one dim: one, or none for a dim of size 1."""
        if isinstance(size, int) and size == 1:
            return []
        self._parent.append(len(self._parent))
        self._size.append(size if isinstance(size, int) else UNKNOWN)
        self._parts.append(())
        return [len(self._parent) - 1]

    def size(self, atom: int) -> int:
        return self._size[atom]

    def _root(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def leaves(self, atoms: list[int]) -> list[int]:
        """The atoms, each as the uncut ones it is now made of."""
        out: list[int] = []
        stack = list(reversed(atoms))
        while stack:
            root = self._root(stack.pop())
            if self._parts[root]:
                stack.extend(reversed(self._parts[root]))
            else:
                out.append(root)
        return out

    def _sizes(self, atoms: list[int]) -> list[int]:
        return [self._size[a] for a in self.leaves(atoms)]

    def _cut(self, atom: int, major: int) -> None:
        """Cut a leaf of size n in (major, n / major)."""
        minor = self._size[atom] // major
        self._parts[atom] = (*self.new(major), *self.new(minor))

    def unite(self, a: list[int], b: list[int]) -> bool:
        """Make two lists of atoms of one product the same; False (and nothing changes) when their cuts disagree."""
        if not _agree(self._sizes(a), self._sizes(b)):
            return False
        while True:
            left, right = self.leaves(a), self.leaves(b)
            pair = next(((x, y) for x, y in zip(left, right, strict=False) if x != y), None)
            if pair is None:
                return True
            x, y = pair
            if self._size[x] == self._size[y]:
                self._parent[max(x, y)] = min(x, y)
            elif self._size[x] > self._size[y]:
                self._cut(x, self._size[y])
            else:
                self._cut(y, self._size[x])

    def divide(self, atoms: list[int], sizes: list[int]) -> list[list[int]] | None:
        """The atoms of one dim in consecutive groups of these sizes, cutting where needed; None if that cannot be."""
        if UNKNOWN in self._sizes(atoms) or not _agree(self._sizes(atoms), [n for n in sizes if n != 1]):
            return None
        groups = [self.new(n) for n in sizes]
        return groups if self.unite(atoms, [a for g in groups for a in g]) else None


def _agree(a: list[int], b: list[int]) -> bool:
    """Whether two lists of sizes of one product have a common refinement by cutting."""
    if 0 in a or 0 in b or UNKNOWN in a or UNKNOWN in b:
        return a == b
    left, right = list(reversed(a)), list(reversed(b))
    while left and right:
        x, y = left.pop(), right.pop()
        if x == y:
            continue
        big, small = max(x, y), min(x, y)
        if big % small:
            return False
        (left if x > y else right).append(big // small)
    return not left and not right


@dataclass
class Factored:
    """The factors of a graph.

    Attributes:
        shapes: per call its rule laid on the layouts' factors.
        calls: per call what its rule was made from.
        atoms: per call and leaf the atom it is; per value (see `dims`) the atoms of each dim.
        dims: per tensor node, per dim, its atoms.
    """

    shapes: dict[fx.Node, Shape] = field(default_factory=dict)
    calls: dict[fx.Node, Call] = field(default_factory=dict)
    atoms: dict[fx.Node, dict[Leaf, int]] = field(default_factory=dict)
    dims: dict[fx.Node, list[list[int]]] = field(default_factory=dict)
    sizes: Atoms = field(default_factory=Atoms)

    def whole(self, node: fx.Node) -> Layout:
        """The layout of a whole tensor, written with its factors."""
        return Layout(tuple(tuple(Factor(self.sizes.size(a)) for a in dim) for dim in self.dims[node]))


@dataclass
class _Laid:
    """A call whose factors have been united but may still be cut: per factor its atoms, and what stays apart."""

    rule: Rule
    known: dict[str, list[int]]
    apart: set[str]


def factor_graph(graph: Graph, resting: Mapping[str, Layout] | None = None) -> Factored:
    """Walk the graph once, uniting and cutting; then read every call's leaves off the final atoms.

    `resting`: layouts that parameters already have; their dims are cut at least as finely.
    """
    out = Factored()
    laid: dict[fx.Node, _Laid] = {}
    rules: dict[Any, Rule] = {}
    for node in graph.fx.nodes:
        if node.op in ("placeholder", "get_attr") and is_tensor(node):
            out.dims[node] = [out.sizes.new(n) for n in node.meta["val"].shape]
        elif node.op == "call_function" and not is_getitem(node):
            laid[node] = _lay(node, out, rules)
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if resting and role.kind == "param" and (layout := resting.get(str(role.name))):
            for atoms, dim in zip(out.dims[node], layout.dims, strict=True):
                out.sizes.divide(atoms, [f.size for f in dim])
    for node, one in laid.items():
        _settle(node, one, out)
    for node, dims in out.dims.items():
        out.dims[node] = [out.sizes.leaves(d) for d in dims]
    return out


def call_of(node: fx.Node) -> Call:
    """The call of a node on fake tensors."""

    def fake(x: Any) -> Any:
        return x.meta["val"] if isinstance(x, fx.Node) else x

    return Call(node.target, tree_map(fake, node.args), tree_map(fake, dict(node.kwargs)), node.meta["val"])


def _signature(call: Call) -> Any:
    def key(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return ("T", tuple(n if isinstance(n, int) else str(n) for n in x.shape), x.dtype)
        return tuple(map(key, x)) if isinstance(x, (list, tuple)) else (type(x).__name__, str(x))

    outs = tuple(key(o) for o in call.outputs)
    return (call.target, key(call.args), tuple((k, key(v)) for k, v in call.kwargs.items()), outs)


def _lay(node: fx.Node, out: Factored, rules: dict[Any, Rule]) -> _Laid:
    call = call_of(node)
    signature = _signature(call)
    rule = rules.get(signature)
    if rule is None:
        rule = rules[signature] = rule_of(call)
    out.calls[node] = call
    one = _Laid(rule, {}, set())
    sizes = _sizes(rule, call)
    for operand, dims in zip(tensor_operands(node), rule.inputs, strict=True):
        for names, atoms in zip(dims, out.dims[operand], strict=True):
            _take(names, atoms, one, sizes, out.sizes)
    for value, dims, tensor in zip(values_of(node), rule.outputs, call.outputs, strict=False):
        if dims is None or not isinstance(tensor, torch.Tensor):
            continue
        made = [_make(names, n, one, sizes, out.sizes) for names, n in zip(dims, tensor.shape, strict=True)]
        if value is not None:
            out.dims[value] = made
    return one


def _sizes(rule: Rule, call: Call) -> dict[str, int]:
    """Sizes of the factors that stand alone in some dim, and of composites' last unknown."""
    sizes = dict(rule.sizes)
    seen = [
        (names, n)
        for dims, t in [*zip(rule.inputs, call.operands, strict=False), *zip(rule.outputs, call.outputs, strict=False)]
        if dims is not None and isinstance(t, torch.Tensor)
        for names, n in zip(dims, t.shape, strict=True)
        if isinstance(n, int)
    ]
    sizes |= {names[0]: n for names, n in seen if len(names) == 1}
    for names, n in seen:
        unknown = [f for f in names if f not in sizes]
        if len(unknown) == 1:
            known = 1
            for f in names:
                known *= sizes.get(f, 1)
            sizes[unknown[0]] = n // max(1, known)
    return sizes


def _take(names: tuple[str, ...], atoms: list[int], one: _Laid, sizes: dict[str, int], store: Atoms) -> None:
    """An operand's dim: unite its atoms with the factors it is made of, or set the factors apart."""
    if not names:
        return
    groups = [atoms] if len(names) == 1 else store.divide(atoms, [sizes[f] for f in names])
    if groups is None:
        one.apart |= set(names)
        return
    for f, group in zip(names, groups, strict=True):
        if f not in one.known:
            one.known[f] = group
        elif not store.unite(one.known[f], group):
            one.apart.add(f)


def _make(names: tuple[str, ...], n: Any, one: _Laid, sizes: dict[str, int], store: Atoms) -> list[int]:
    """An output's dim: the atoms of its factors; fresh ones for a factor that no operand has, or that is apart."""
    if not names or any(f in one.apart for f in names):
        one.apart |= set(names)
        return store.new(n)
    for f in names:
        if f not in one.known:
            one.known[f] = store.new(n if len(names) == 1 else sizes[f])
    return [a for f in names for a in one.known[f]]


def _settle(node: fx.Node, one: _Laid, out: Factored) -> None:
    """Read a call's leaves, now that no atom will be cut any more."""
    operands = tensor_operands(node)
    made = [(d, out.dims[v]) for v, d in zip(values_of(node), one.rule.outputs, strict=False) if d and v in out.dims]
    seen = [*zip(one.rule.inputs, (out.dims[o] for o in operands), strict=True), *made]
    leaves = _sound_leaves({f: a for f, a in one.known.items() if f not in one.apart}, seen, out.sizes)
    out.atoms[node] = {(f, i): a for f, atoms in leaves.items() for i, a in enumerate(atoms)}

    def dims_of(dims: Dims, own: list[list[int]]) -> LeafDims:
        return tuple(
            _labels(names, atoms, leaves, out.sizes)
            or tuple((None, out.sizes.size(a)) for a in out.sizes.leaves(atoms))
            for names, atoms in zip(dims, own, strict=True)
        )

    inputs = tuple(dims_of(d, out.dims[o]) for o, d in zip(operands, one.rule.inputs, strict=True))
    outputs: list[LeafDims | None] = []
    for value, dims in zip(values_of(node), one.rule.outputs, strict=False):
        outputs.append(dims_of(dims, out.dims[value]) if dims is not None and value in out.dims else None)
    sizes = {f: tuple(out.sizes.size(a) for a in atoms) for f, atoms in leaves.items()}
    out.shapes[node] = Shape(one.rule, sizes, inputs, tuple(outputs))


def _sound_leaves(known: dict[str, list[int]], seen: list, store: Atoms) -> dict[str, list[int]]:
    """The leaves of the factors that every dim they stand in shows; a factor hidden in one dim is not to be split."""
    leaves = {f: store.leaves(a) for f, a in known.items()}
    while True:
        hidden = {
            f
            for dims, own in seen
            for names, atoms in zip(dims, own, strict=True)
            if names and _labels(names, atoms, leaves, store) is None
            for f in names
            if f in leaves
        }
        if not hidden:
            return leaves
        leaves = {f: a for f, a in leaves.items() if f not in hidden}


def _labels(
    names: tuple[str, ...], atoms: list[int], leaves: dict[str, list[int]], store: Atoms
) -> tuple[tuple[Leaf | None, int], ...] | None:
    """Per layout factor of a dim the leaf it is; None when the dim does not show its factors."""
    own = store.leaves(atoms)
    if all(f in leaves for f in names):
        named = [((f, i), a) for f in names for i, a in enumerate(leaves[f])]
        if [a for _, a in named] == own:
            return tuple((leaf, store.size(a)) for leaf, a in named)
    return None
