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

import torch.fx as fx

from .atoms import Atoms
from .graph import Graph, is_getitem, is_tensor, tensor_operands, values_of
from .kinds import Kind, Kinds, Slots
from .layout import Factor, Layout
from .rules.notation import Dims
from .rules.split import Call, Leaf, LeafDims, Shape


@dataclass
class Factored:
    """The factors of a graph.

    Attributes:
        shapes: per call its rule laid on the layouts' factors.
        calls: per call what its rule was made from.
        atoms: per call and leaf the atom it is; per value (see `dims`) the atoms of each dim.
        dims: per tensor node, per dim, its atoms.
        operands: per call its tensor operands, as `tensor_operands` has them.
    """

    shapes: dict[fx.Node, Shape] = field(default_factory=dict)
    calls: dict[fx.Node, Call] = field(default_factory=dict)
    atoms: dict[fx.Node, dict[Leaf, int]] = field(default_factory=dict)
    dims: dict[fx.Node, list[list[int]]] = field(default_factory=dict)
    operands: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    sizes: Atoms = field(default_factory=Atoms)

    def moved(self, twins: Mapping[fx.Node, fx.Node]) -> Factored:
        """These, of a copy of the graph: `twins` has of each node the one that is it there."""
        return Factored(
            {twins[n]: x for n, x in self.shapes.items()},
            {twins[n]: x for n, x in self.calls.items()},
            {twins[n]: x for n, x in self.atoms.items()},
            {twins[n]: x for n, x in self.dims.items()},
            {twins[n]: [twins[o] for o in x] for n, x in self.operands.items()},
            self.sizes,
        )

    def whole(self, node: fx.Node) -> Layout:
        """The layout of a whole tensor, written with its factors."""
        return Layout(tuple(tuple(Factor(self.sizes.size(a)) for a in dim) for dim in self.dims[node]))


@dataclass(slots=True)
class _Laid:
    """A call whose factors have been united but may still be cut: per slot its atoms, and what stays apart."""

    kind: Kind
    operands: list[fx.Node]
    values: tuple[fx.Node | None, ...]
    known: list[list[int] | None]
    apart: set[int] = field(default_factory=set)


def factor_graph(
    graph: Graph, resting: Mapping[str, Layout] | None = None, held: Mapping[fx.Node, Layout] | None = None
) -> Factored:
    """Walk the graph once, uniting and cutting; then read every call's leaves off the final atoms.

    `resting`: layouts that parameters already have; their dims are cut at least as finely. `held`: of other inputs.
    """
    out = Factored()
    laid: dict[fx.Node, _Laid] = {}
    kinds = Kinds()
    for node in graph.fx.nodes:
        if node.op in ("placeholder", "get_attr") and is_tensor(node):
            out.dims[node] = [out.sizes.new(n) for n in node.meta["val"].shape]
        elif node.op == "call_function" and not is_getitem(node):
            kind, operands = kinds.of(node)
            out.calls[node], out.operands[node] = kind.call, operands
            laid[node] = _lay(kind, operands, values_of(node), out)
    cut = dict(held or {})
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if resting and role.kind == "param" and (layout := resting.get(str(role.name))):
            cut[node] = layout
    for node, layout in cut.items():
        for atoms, dim in zip(out.dims[node], layout.dims, strict=True):
            out.sizes.divide(atoms, [f.size for f in dim])
    _cut_gradients(graph, out)
    final = _Final(out.sizes)
    for node, dims in out.dims.items():
        out.dims[node] = [final.leaves(d) for d in dims]
    for node, one in laid.items():
        out.shapes[node], out.atoms[node] = _settled(one, out, final)
    out.sizes.settle()
    return out


def _cut_gradients(graph: Graph, out: Factored) -> None:
    """A gradient rests as its parameter does: where one is cut more finely, the other is cut so too."""
    inputs = zip(graph.placeholders, graph.inputs, strict=True)
    params = {r.name: n for n, r in inputs if r.kind == "param"}
    for value, role in zip(graph.output_values, graph.outputs, strict=True):
        if role.kind == "grad" and value in out.dims and value is not None:
            for own, theirs in zip(out.dims[value], out.dims[params[role.name]], strict=True):
                if len(out.sizes.leaves(own)) != len(out.sizes.leaves(theirs)):
                    out.sizes.unite(own, theirs)


def extended(old: Factored, graph: Graph) -> Factored | None:
    """The factors of a graph in which some calls were replaced; None where the new calls cut old dims anew."""
    own = (old.shapes, old.calls, old.atoms, old.dims, old.operands)
    out = Factored(*(dict(x) for x in own), old.sizes.copy())  # type: ignore[arg-type]
    nodes = list(graph.fx.nodes)
    alive = set(nodes)
    for of_node in (out.shapes, out.calls, out.atoms, out.dims, out.operands):
        for node in [n for n in of_node if n not in alive]:
            del of_node[node]  # type: ignore[arg-type]
    before, kinds = old.sizes.count(), Kinds()
    laid: dict[fx.Node, _Laid] = {}
    for node in nodes:
        if node.op == "call_function" and not is_getitem(node) and node not in out.shapes:
            kind, operands = kinds.of(node)
            out.calls[node], out.operands[node] = kind.call, operands
            laid[node] = _lay(kind, operands, values_of(node), out)
    if out.sizes.touched(before):
        return None
    final = _Final(out.sizes)
    for one in laid.values():
        for value in one.values:
            if value in out.dims:
                out.dims[value] = [final.leaves(d) for d in out.dims[value]]
    for node, one in laid.items():
        out.shapes[node], out.atoms[node] = _settled(one, out, final)
    out.sizes.settle()
    return out if _still_fit(out, laid) else None


def _still_fit(out: Factored, laid: dict[fx.Node, _Laid]) -> bool:
    """Whether the calls that read what new calls make see it in the factors that they saw before."""
    for one in laid.values():
        for value in (v for v in one.values if v is not None):
            own = [[out.sizes.size(a) for a in d] for d in out.dims[value]] if value in out.dims else None
            for user in value.users:
                if user in out.shapes and user not in laid:
                    operands = tensor_operands(user)
                    out.operands[user] = operands
                    seen = [[n for _, n in d] for d in out.shapes[user].inputs[operands.index(value)]]
                    if seen != own:
                        return False
    return True


def _lay(kind: Kind, operands: list[fx.Node], values: tuple[fx.Node | None, ...], out: Factored) -> _Laid:
    known: list[list[int] | None] = [None] * len(kind.names)
    one, store = _Laid(kind, operands, values, known), out.sizes
    for operand, dims in zip(operands, kind.inputs, strict=True):
        for slot, atoms in zip(dims, out.dims[operand], strict=True):
            if isinstance(slot, int):  # by far the most
                group = known[slot]
                if group is None:
                    known[slot] = atoms
                elif group is not atoms and group != atoms and not store.unite(group, atoms):
                    one.apart.add(slot)
            elif slot:
                _take(slot, atoms, one, store)
    for value, dims in zip(values, kind.outputs, strict=False):
        if dims is not None:
            made = [_make(slot, n, one, store) for slot, n in dims]
            if value is not None:
                out.dims[value] = made
    return one


def _take(slots: tuple[int, ...], atoms: list[int], one: _Laid, store: Atoms) -> None:
    """An operand's dim of several factors: unite its atoms with them, or set them apart."""
    groups = store.divide(atoms, [one.kind.sizes[i] for i in slots])
    if groups is None:
        one.apart |= set(slots)
        return
    for i, group in zip(slots, groups, strict=True):
        known = one.known[i]
        if known is None:
            one.known[i] = group
        elif not store.unite(known, group):
            one.apart.add(i)


def _make(slot: Slots, n: Any, one: _Laid, store: Atoms) -> list[int]:
    """An output's dim: the atoms of its factors; fresh ones for a factor that no operand has, or that is apart."""
    known = one.known
    if isinstance(slot, int):
        if one.apart and slot in one.apart:
            return store.new(n)
        if (atoms := known[slot]) is None:
            atoms = known[slot] = store.new(n)
        return atoms
    if not slot or any(i in one.apart for i in slot):
        one.apart |= set(slot)
        return store.new(n)
    made: list[int] = []
    for i in slot:
        if (atoms := known[i]) is None:
            atoms = known[i] = store.new(one.kind.sizes[i])
        made += atoms
    return made


class _Final:
    """The leaves of atoms, now that no atom will be cut any more; equal lists of them are one object."""

    def __init__(self, store: Atoms):
        self._store = store
        self._of: dict[Any, list[int]] = {}
        self._lists: dict[tuple[int, ...], list[int]] = {}
        self.alike: dict[Any, tuple[Shape, dict[Leaf, int]]] = {}

    def leaves(self, atoms: list[int]) -> list[int]:
        key = atoms[0] if len(atoms) == 1 else tuple(atoms)
        found = self._of.get(key)
        if found is None:
            made = self._store.leaves(atoms)
            found = self._of[key] = self._lists.setdefault(tuple(made), made)
        return found


def _settled(one: _Laid, out: Factored, final: _Final) -> tuple[Shape, dict[Leaf, int]]:
    """A call's shape, and the atom of each of its leaves. Calls of one kind that stand on the same atoms share both."""
    if one.apart or one.kind.loose or len(one.values) > 1:
        return _shaped(one, out, final)
    key = (id(one.kind), *[id(final.leaves(a)) for a in one.known if a is not None])
    found = final.alike.get(key)
    if found is None:
        found = final.alike[key] = _shaped(one, out, final)
    return found


def _shaped(one: _Laid, out: Factored, final: _Final) -> tuple[Shape, dict[Leaf, int]]:
    """Calls of one kind whose atoms make the same pattern share one `Shape`, which later stages know equal calls by."""
    every = zip(one.kind.names, one.known, strict=True)
    known = {f: final.leaves(a) for i, (f, a) in enumerate(every) if a is not None and i not in one.apart}
    number: dict[int, int] = {}
    pattern = [tuple([number.setdefault(a, len(number)) for a in atoms]) for atoms in known.values()]
    if one.apart:  # else the atoms of the other dims follow from the factors'
        for dims in _dims_of(one, out):
            pattern += [tuple([number.setdefault(a, len(number)) for a in dim]) for dim in dims]
    elif one.kind.loose:
        own = _dims_of(one, out)
        pattern += [tuple([number.setdefault(a, len(number)) for a in own[i][j]]) for i, j in one.kind.loose if own[i]]
    used = tuple([v is not None and v in out.dims for v in one.values]) if len(one.values) > 1 else ()
    apart = tuple(known) if one.apart else ()
    key = (tuple(pattern), tuple([out.sizes.size(a) for a in number]), apart, used)
    found = one.kind.settled.get(key)
    if found is None:
        shape, atoms = _settle(one, known, out)
        found = one.kind.settled[key] = (shape, {leaf: number[a] for leaf, a in atoms.items()})
    order = list(number)
    return found[0], {leaf: order[i] for leaf, i in found[1].items()}


def _dims_of(one: _Laid, out: Factored) -> list[list[list[int]]]:
    """The atoms of the dims of every operand and output; none where an output is not there."""
    outputs = zip(one.kind.rule.outputs, [*one.values, *[None] * len(one.kind.rule.outputs)], strict=False)
    return [out.dims[o] for o in one.operands] + [out.dims[v] if d and v in out.dims else [] for d, v in outputs]


def _settle(one: _Laid, known: dict[str, list[int]], out: Factored) -> tuple[Shape, dict[Leaf, int]]:
    """Read a call's leaves off the final atoms."""
    store, rule = out.sizes, one.kind.rule
    sides = zip([*rule.inputs, *rule.outputs], _dims_of(one, out), strict=True)
    leaves = _sound_leaves(known, [(dims, own) for dims, own in sides if own])

    def dims_of(dims: Dims, own: list[list[int]]) -> LeafDims:
        return tuple(
            _labels(names, atoms, leaves, store) or tuple((None, store.size(a)) for a in atoms)
            for names, atoms in zip(dims, own, strict=True)
        )

    inputs = tuple(dims_of(d, out.dims[o]) for o, d in zip(one.operands, rule.inputs, strict=True))
    outputs: list[LeafDims | None] = []
    for value, dims in zip(one.values, rule.outputs, strict=False):
        outputs.append(dims_of(dims, out.dims[value]) if dims is not None and value in out.dims else None)
    sizes = {f: tuple(store.size(a) for a in atoms) for f, atoms in leaves.items()}
    return Shape(rule, sizes, inputs, tuple(outputs)), {
        (f, i): a for f, atoms in leaves.items() for i, a in enumerate(atoms)
    }


def _sound_leaves(leaves: dict[str, list[int]], seen: list) -> dict[str, list[int]]:
    """The leaves of the factors that every dim they stand in shows; a factor hidden in one dim is not to be split."""
    while True:
        hidden = {
            f
            for dims, own in seen
            for names, atoms in zip(dims, own, strict=True)
            if names and not _shows(names, atoms, leaves)
            for f in names
            if f in leaves
        }
        if not hidden:
            return leaves
        leaves = {f: a for f, a in leaves.items() if f not in hidden}


def _shows(names: tuple[str, ...], atoms: list[int], leaves: dict[str, list[int]]) -> bool:
    """Whether a dim is made of just the leaves of its factors."""
    return all(f in leaves for f in names) and [a for f in names for a in leaves[f]] == atoms


def _labels(
    names: tuple[str, ...], atoms: list[int], leaves: dict[str, list[int]], store: Atoms
) -> tuple[tuple[Leaf | None, int], ...] | None:
    """Per layout factor of a dim the leaf it is; None when the dim does not show its factors."""
    if not _shows(names, atoms, leaves):
        return None
    return tuple(((f, i), store.size(a)) for f in names for i, a in enumerate(leaves[f]))
